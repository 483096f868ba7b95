//! Data verification across deaths of the target: finds lost, stale, torn, misplaced and foreign
//! sectors.
//!
//! A sector's [`pattern`] proves its origin. The model keeps each block's versions in 12 bytes. The
//! [`Verifier`] drives one queue, reconnects and repeats unacknowledged commands. A block has at
//! most one write in flight, so its versions are ordered. FUA and deallocation are not tested.

pub(crate) mod check;
mod link;
pub(crate) mod model;
pub mod pattern;
mod verifier;

use std::net::SocketAddr;
use std::time::Duration;

pub use check::{Mismatch, Verdict, VerifyReport};
pub use model::Promise;
pub use verifier::{Progress, Verifier, WriteGoal, WriteReport};

use crate::{Options, Wait};

/// The namespace's content before the first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initial {
    /// Zeros; the whole span is read back.
    Zeros,
    /// Anything; only written blocks are read back.
    Any,
}

/// Parameters of a verification.
#[derive(Clone, Debug)]
pub struct VerifySpec {
    /// The target.
    pub addr: SocketAddr,
    /// The subsystem.
    pub subnqn: String,
    /// The host's NQN.
    pub hostnqn: String,
    /// The namespace.
    pub nsid: u32,
    /// Bytes of each write and read, in whole blocks.
    pub block_bytes: u32,
    /// Bytes from the beginning; `None`: all.
    pub span_bytes: Option<u64>,
    /// Commands in flight.
    pub queue_depth: u16,
    /// Seed of random numbers, and part of every sector.
    pub seed: u64,
    /// Acknowledged writes between flushes; 0: no automatic flushes.
    pub flush_every_writes: u64,
    /// The data that survives the target's death.
    pub promise: Promise,
    /// The initial content.
    pub initial: Initial,
    /// Time limit for reconnecting.
    pub reconnect_limit: Duration,
    /// Retries of a command whose status allows it (DNR clear).
    pub retries: u32,
    /// How to wait for completions.
    pub wait: Wait,
    /// Other options; the verifier sets `io_queues` and `queue_entries`.
    pub options: Options,
}

impl VerifySpec {
    /// 4-KiB writes at depth 32 over a whole zeroed namespace, with a flush every 1000 writes.
    #[must_use]
    pub fn new(addr: SocketAddr, subnqn: &str, hostnqn: &str) -> Self {
        Self {
            addr,
            subnqn: subnqn.into(),
            hostnqn: hostnqn.into(),
            nsid: 1,
            block_bytes: 4096,
            span_bytes: None,
            queue_depth: 32,
            seed: 1,
            flush_every_writes: 1000,
            promise: Promise::Acknowledged,
            initial: Initial::Zeros,
            reconnect_limit: Duration::from_secs(30),
            retries: 30,
            wait: Wait::Block,
            options: Options {
                command_timeout: Duration::from_secs(60),
                ..Options::default()
            },
        }
    }
}
