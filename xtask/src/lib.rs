//! Code that the `xtask` program shares with the system tests in `tests/`.
//!
//! It runs programs with time limits ([`process`]), finds free ports ([`ports`]), fetches Debian
//! packages ([`debian`]), caches files ([`cache`]), builds our package ([`package`]) and starts
//! Ceph clusters ([`ceph`]).

pub mod cache;
pub mod ceph;
pub mod debian;
pub mod package;
pub mod ports;
pub mod process;
