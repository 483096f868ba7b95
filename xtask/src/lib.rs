//! What the project's own tasks and its system tests have in common.
//!
//! Purpose: running programs with a time limit ([`process`]), getting Debian packages without
//! touching the machine's own package configuration ([`debian`]), a cache for fetched files ([`cache`]),
//! and making our own package ([`package`]).
//! Design: a library beside the `xtask` program, so that the guest harness in `tests/` uses the same
//! code as the tasks.
//! Not here: the tasks themselves (`main.rs` and its modules), and anything else about Forebay.

pub mod cache;
pub mod debian;
pub mod package;
pub mod process;
