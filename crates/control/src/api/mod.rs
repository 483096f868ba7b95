//! The REST API on a Unix socket, for root and the daemon's user.
//!
//! A handler in `routes` checks a request's syntax and sends it to the daemon's thread. A new field
//! needs `crate::model`, perhaps `model::validate`, and the owner. A new route needs a handler, and
//! a line in `audit::changes` if it changes something.

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
