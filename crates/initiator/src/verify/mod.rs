//! Data verification that survives the target's deaths.
//!
//! Purpose: write data at random places such that any lost, stale, torn, misplaced or foreign sector is recognised when
//! it is read back, through any number of lost connections, and say precisely what is wrong where.
//!
//! Design: [`pattern`] makes each sector prove its origin; its model remembers, in 12 bytes per block, which writes
//! were issued, acknowledged and flushed; the [`Verifier`] drives a queue, and on a lost connection makes a new session
//! within a time limit and drives again what was not acknowledged. A block has at most one write in flight, so that
//! the order of its versions is known; what was in flight at a death may be old or new until it is driven again.
//!
//! What it does *not* do: several queues, FUA, deallocation, or keep its memory beyond the process.

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

/// What the namespace held before the first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initial {
    /// Zeros, and blocks that are not written must stay so: reading back reads the whole span.
    Zeros,
    /// Anything: only what was written is read back.
    Any,
}

/// What to verify, where.
#[derive(Clone, Debug)]
pub struct VerifySpec {
    /// The target.
    pub addr: SocketAddr,
    /// The subsystem.
    pub subnqn: String,
    /// The host's name.
    pub hostnqn: String,
    /// The namespace.
    pub nsid: u32,
    /// Size of each write and read: a multiple of the namespace's block.
    pub block_bytes: u32,
    /// How much of the namespace, from its beginning; `None`: all of it.
    pub span_bytes: Option<u64>,
    /// Commands in flight.
    pub queue_depth: u16,
    /// Start of all random numbers, and part of every sector.
    pub seed: u64,
    /// A flush after so many acknowledged writes; 0: none but [`Verifier::flush`].
    pub flush_every_writes: u64,
    /// What survives the target's death.
    pub promise: Promise,
    /// What was there before.
    pub initial: Initial,
    /// The most that reconnecting may take.
    pub reconnect_limit: Duration,
    /// How often a command is driven again that ended with a status that allows it (DNR clear).
    pub retries: u32,
    /// Sleep between completions, or burn the CPU.
    pub wait: Wait,
    /// Digests, time limits, keep-alive. `io_queues` and `queue_entries` are set from the rest.
    pub options: Options,
}

impl VerifySpec {
    /// 4-KiB writes at depth 32 over the whole namespace, zeros before, a flush every 1000 writes.
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
