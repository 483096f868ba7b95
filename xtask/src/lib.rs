//! Code that the `xtask` program shares with the system tests in `tests/`.
//!
//! It runs programs with time limits ([`process`]), fetches Debian packages ([`debian`]), caches
//! files ([`cache`]) and builds our package ([`package`]).

pub mod cache;
pub mod debian;
pub mod package;
pub mod process;
