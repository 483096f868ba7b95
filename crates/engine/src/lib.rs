//! # The engine: the data plane
//!
//! **Design.** One control thread ([`control`]) talks with the daemon, opens devices, accepts
//! connections, and alone writes translation tables. Each reactor ([`reactor`]) is a thread with
//! one io_uring, and owns its lanes, connections ([`frontend`]) and commands ([`core`]). They
//! communicate by bounded rings ([`reactor::mailbox`]). A busy reactor polls; an idle one sleeps in
//! one `io_uring_enter`. The I/O path does not allocate, lock, log or block. A successor continues
//! a dead engine's work ([`takeover`]).
//!
//! **Not here:** the catalog, and decisions about space: it asks the owner (a fault) and obeys it
//! (grant, revoke).

#![deny(unsafe_code)]

mod associations;
mod bell;
pub mod config;
mod control;
mod core;
mod crash;
mod device_heartbeat;
pub mod documented_limits;
mod exports;
mod frontend;
mod io;
mod lane;
mod listener;
mod memory;
mod offload;
#[cfg(test)]
mod patience;
mod qos;
mod reactor;
mod recovery;
pub mod signals;
mod takeover;
mod upcall;
mod volume;

pub use config::{Engine, EngineConfig, EngineError};
#[cfg(fuzzing)]
pub use takeover::fuzzing;
