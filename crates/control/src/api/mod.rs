//! The REST API on a Unix socket.
//!
//! Purpose: everything an operator can do, as HTTP with JSON bodies, for callers whose credentials
//! the kernel vouches for (root, or the user the daemon runs as).
//! Design: a handler in `routes` checks the syntax of a request and sends what it asks to the daemon's thread. `server` is
//! the socket, `client` the other end of it for the command line and for tests.
//! A new field needs `crate::model`, perhaps `model::validate`, and the owner; a new route also a handler in `routes`, and
//! its line in `audit::changes` if it changes something.
//! Not here: the operations themselves, the bodies (`crate::model`).

mod audit;
pub mod client;
mod extract;
mod openapi;
mod router;
mod routes;
mod server;
mod whole_body;

#[cfg(test)]
mod tests;

pub use router::{BODY_MAX_BYTES, TIME_LIMIT};
pub(crate) use server::{bind, serve, serve_metrics};
