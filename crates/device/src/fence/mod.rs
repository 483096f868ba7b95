//! The fence: keeps engines off a device until a dead engine's last request has ended there.
//!
//! Even after a process's exit, its writes land and its reads overwrite memory. A successor must
//! wait for that before it repeats requests in flight. Each kind has its own [`Fence`]: a lock to
//! which each request refers (`lock`), the process's exit for memory, a new association or a
//! blocklist for a remote device. Engines have generations, so that two can live side by side
//! during an upgrade. A device that never answers is fenced forever: callers limit
//! [`crate::Device::wait_for_predecessors`].

pub(crate) mod lock;

use std::ffi::CStr;
use std::time::Duration;

pub use self::lock::{claim_file, lock_holders};
use crate::dying::HoldingProcess;

pub(crate) const MAX_GENERATION: u64 = 1 << 61;

/// A device's fence between engines, each of which has a generation.
pub(crate) trait Fence {
    /// Takes a generation's place before the first request. It lasts until the device is dropped
    /// and its last request has ended, even if the process dies.
    fn take(&self, generation: u64) -> Result<(), FenceError>;

    /// Whether no earlier generation has anything in flight. Must never return true too early;
    /// takes nothing.
    fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError>;

    /// Waits at most `limit` for [`Fence::predecessors_gone`]; returns the time taken. Must shut
    /// out predecessors that don't end by themselves.
    fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError>;
}

/// A device's claims by daemons, and a daemon's view of its fence.
pub(crate) trait Claims {
    /// Claims the device while it is open. It must pass over a dying daemon with nothing in flight
    /// here; threads inside a request are called `inside`.
    fn claim(&self, inside: &CStr) -> Result<(), FenceError>;

    /// Checks [`Claims::claim`] without claiming; returns whether it would pass over a dying
    /// daemon.
    fn would_pass_over(&self, inside: &CStr) -> Result<bool, FenceError>;

    fn holders(&self) -> Result<Vec<Holder>, FenceError>;

    /// The earlier engine that still holds the fence, and its process if visible.
    fn predecessor(&self, generation: u64) -> Result<Option<Predecessor>, FenceError>;
}

/// Holder of a lock on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder {
    /// A daemon.
    Daemon,
    /// An engine, alive, or dead with requests in flight.
    Engine {
        /// Its generation.
        generation: u64,
    },
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Daemon => f.write_str("a forebay daemon"),
            Self::Engine { generation } => write!(f, "forebay engine generation {generation}"),
        }
    }
}

/// An earlier engine that holds a lock, and its process if found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Predecessor {
    /// The engine's generation.
    pub generation: u64,
    pub(crate) process: Option<HoldingProcess>,
}

impl Predecessor {
    /// The process that has the lock, if visible.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid)
    }
}

impl std::fmt::Display for Predecessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let generation = self.generation;
        match &self.process {
            Some(HoldingProcess {
                pid,
                name,
                is_being_killed: false,
            }) => write!(
                f,
                "process {pid} ({name}), engine generation {generation}, is running and holds its lock there: end it \
                if it is left over"
            ),
            Some(HoldingProcess { pid, name, .. }) => write!(
                f,
                "process {pid} ({name}), engine generation {generation}, was killed but can't exit: the device has \
                not answered its requests"
            ),
            None => write!(
                f,
                "the lock of engine generation {generation} is still held, but no visible process holds it: the \
                device has not answered that engine's requests"
            ),
        }
    }
}

/// Why the fence can't be taken.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// Another process holds the lock.
    #[error(
        "{device}: {holder} already holds this device; stop it, or wait until its last request has finished"
    )]
    Held {
        /// The device's path.
        device: String,
        /// Its holder.
        holder: Holder,
    },
    /// A daemon that is being killed is inside a request.
    #[error(
        "{device}: an earlier daemon was killed while it waited for this device; the device has not answered since \
        and hangs"
    )]
    Hangs {
        /// The device's path.
        device: String,
    },
    /// An engine with a higher generation exists: the caller is the old one.
    #[error(
        "{device}: the newer engine generation {newer} already uses it, so generation {own} must not start"
    )]
    NewerEngine {
        /// The device's path.
        device: String,
        /// The caller's generation.
        own: u64,
        /// The newer generation.
        newer: u64,
    },
    /// A predecessor's requests are still in flight after the time limit.
    #[error(
        "{device}: not free after {} ms: {process}",
        .waited.as_millis()
    )]
    TimedOut {
        /// The device's path.
        device: String,
        /// The generation whose lock is left.
        predecessor: u64,
        /// That engine, and its process if found.
        process: Predecessor,
        /// The time waited.
        waited: Duration,
    },
    /// The generation is out of range.
    #[error("engine generation {0} is out of range")]
    BadGeneration(u64),
    /// The system has no such locks here, or another error.
    #[error("{device}: {doing} failed: {source}")]
    Io {
        /// The device's path.
        device: String,
        /// The step that failed.
        doing: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}
