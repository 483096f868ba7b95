//! The REST API on a Unix socket.
//!
//! Purpose: everything an operator can do, as HTTP with JSON bodies, for callers whose credentials
//! the kernel vouches for (root, or the user the daemon runs as).
//! Design: `model` and `stats` are the bodies, `request` is the bridge to the owner loop.
//! Not here: the operations themselves.

pub mod error;
pub mod model;
pub mod request;
pub mod stats;
