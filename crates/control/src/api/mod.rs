//! The REST API on a Unix socket.
//!
//! Purpose: everything an operator can do, as HTTP with JSON bodies, for callers whose credentials
//! the kernel vouches for (root, or the user the daemon runs as).
//! Design: `model` and `stats` are the bodies, `request` is the bridge to the owner loop, `routes`
//! goes from one to the other, `server` is the socket, `client` the other end of it for the command
//! line and for tests.
//! Not here: the operations themselves.

mod audit;
pub mod client;
pub mod error;
pub mod events;
mod extract;
mod figure_routes;
mod hosts;
pub mod model;
pub mod openapi;
mod pool_routes;
mod port_routes;
pub mod request;
mod routes;
pub mod scheduling;
mod scheduling_routes;
mod server;
pub mod stats;
mod transfer_routes;
pub mod validate;
mod whole_body;

#[cfg(test)]
mod tests;

pub use routes::{BODY_MAX_BYTES, TIME_LIMIT};
pub(crate) use server::lock_file;
pub use server::{ApiListener, bind, bind_metrics, serve, serve_metrics};
