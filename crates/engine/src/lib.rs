//! # The engine: the data plane
//!
//! **Purpose.** Serves exports to tenants: takes their commands, translates them, moves their bytes.
//!
//! **Design.** One control thread ([`control`]) talks with the daemon, opens devices, accepts
//! connections and is the only writer of translation tables. Each reactor ([`reactor`]) is a thread
//! with one io_uring that owns what it touches: its lanes, its connections ([`frontend`]), its commands in
//! flight ([`core`]). They speak through bounded rings ([`reactor::mailbox`]). Busy, a reactor polls; idle, it
//! sleeps in one `io_uring_enter`. The I/O path doesn't allocate, lock, log or block. What a dead engine left
//! is taken up where it was ([`takeover`]).
//!
//! **What it does not do.** It never opens the catalog and decides nothing about space: it asks the
//! owner (a fault) and obeys it (grant, revoke).

#![deny(unsafe_code)]

mod associations;
mod bell;
pub mod config;
mod control;
pub mod core;
mod crash;
mod exports;
mod frontend;
mod heartbeat;
mod io;
mod lane;
pub mod limits;
mod listener;
pub mod memory;
mod offload;
#[cfg(test)]
mod patience;
mod qos;
mod reactor;
mod records;
mod recovery;
pub mod signals;
mod takeover;
mod upcall;
mod volume;

pub use config::{Engine, EngineConfig, EngineError};
#[cfg(fuzzing)]
pub use takeover::fuzzing;
