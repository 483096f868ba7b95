//! The fence: nobody touches a device before the last request of a dead engine has ended there.
//!
//! **Purpose.** Requests outlive their process: writes land, and reads overwrite memory, after its exit was seen. A
//! successor must know when that is over, on each device, before it does again what was in flight.
//!
//! **Design.** Each kind of device has a fence of its own, as a [`Fence`]: for files and block devices an
//! open-file-description lock, which each request in flight refers to (`lock`); for memory that the CPU copies, the
//! process's exit; for a remote device a new association, or a blocklist. Engines have generations, so that two can live
//! side by side during an upgrade. The daemon's claims are [`Claims`].
//!
//! **What it does not do.** It doesn't stop a process that doesn't ask. A device that never answers keeps its fence
//! forever: the limit of [`crate::Device::wait_for_predecessors`] is the caller's policy.

pub(crate) mod lock;

use std::ffi::CStr;
use std::time::Duration;

pub use self::lock::{claim_file, who_holds};
use crate::dying::HoldingProcess;

/// Generations must be below this.
pub(crate) const MAX_GENERATION: u64 = 1 << 61;

/// A device's fence between engines, each of which has a generation.
pub(crate) trait Fence {
    /// Takes a generation's place, before the first request. Must keep it until this device is dropped and the last
    /// request has ended, whatever becomes of the process.
    ///
    /// # Errors
    /// The generation is taken, or there is a newer one: the one who asks is the old one.
    fn take(&self, generation: u64) -> Result<(), FenceError>;

    /// Whether no earlier generation has anything in flight. Must not say so too early, and takes nothing.
    ///
    /// # Errors
    /// It can't be told.
    fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError>;

    /// Sleeps until [`Fence::predecessors_gone`], at most for `limit`; says how long it took. A kind whose predecessors
    /// don't end by themselves has them shut out here.
    ///
    /// # Errors
    /// [`FenceError::TimedOut`], or [`FenceError::NewerEngine`].
    fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError>;
}

/// A device's claims by daemons, and what a daemon sees of its fence.
pub(crate) trait Claims {
    /// Claims it for this daemon, for as long as the device is open. Must pass over a daemon that is being killed and
    /// has nothing in flight here. Threads inside a request to it are called `inside`.
    ///
    /// # Errors
    /// [`FenceError::Held`] by a daemon that lives; [`FenceError::Hangs`] where a dying one has a request in flight.
    fn claim(&self, inside: &CStr) -> Result<(), FenceError>;

    /// Whether [`Claims::claim`] would do, and would pass over a daemon that is being killed. Takes nothing.
    ///
    /// # Errors
    /// As [`Claims::claim`].
    fn would_pass_over(&self, inside: &CStr) -> Result<bool, FenceError>;

    /// Who else holds claims and places in the fence.
    ///
    /// # Errors
    /// It can't be told.
    fn holders(&self) -> Result<Vec<Holder>, FenceError>;

    /// The engine before `generation` that still has its place, and its process if that can be seen.
    ///
    /// # Errors
    /// It can't be told.
    fn predecessor(&self, generation: u64) -> Result<Option<Predecessor>, FenceError>;
}

/// Who has a lock on a device.
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

/// An earlier engine that holds a lock, and its process if that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Predecessor {
    /// The engine's generation.
    pub generation: u64,
    pub(crate) process: Option<HoldingProcess>,
}

impl Predecessor {
    /// The process that has the lock, if it can be seen.
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
                "process {pid} ({name}), engine generation {generation}, runs and holds its lock there: end it if it is left over"
            ),
            Some(HoldingProcess { pid, name, .. }) => write!(
                f,
                "process {pid} ({name}), engine generation {generation}, was killed and can't end: the device has not answered its requests"
            ),
            None => write!(
                f,
                "the lock of engine generation {generation} is still there, and no process that can be seen has it: the device has not answered the requests of that engine"
            ),
        }
    }
}

/// Why the fence isn't ours.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// Somebody has the byte that was asked for.
    #[error(
        "{device}: {holder} holds this device already; stop it, or wait until its last request has ended"
    )]
    Held {
        /// The device's path.
        device: String,
        /// Who it is.
        holder: Holder,
    },
    /// A daemon that is being killed is inside a request.
    #[error(
        "{device}: an earlier daemon was killed while it waited for this device, which has not answered since: it hangs"
    )]
    Hangs {
        /// The device's path.
        device: String,
    },
    /// An engine with a higher generation is there: the one who asks is the old one.
    #[error(
        "{device}: the newer engine generation {newer} is there, so generation {own} must not start"
    )]
    NewerEngine {
        /// The device's path.
        device: String,
        /// The generation that asks.
        own: u64,
        /// The generation that was found.
        newer: u64,
    },
    /// The time is over and a predecessor's requests are still in flight.
    #[error(
        "{device}: not free after {} ms: {process}",
        .waited.as_millis()
    )]
    TimedOut {
        /// The device's path.
        device: String,
        /// Whose lock is left.
        predecessor: u64,
        /// That engine, and its process if that was found.
        process: Predecessor,
        /// How long it was waited.
        waited: Duration,
    },
    /// The generation is out of range.
    #[error("engine generation {0} is out of range")]
    BadGeneration(u64),
    /// The system knows no such locks here, or another error.
    #[error("{device}: {doing} failed: {source}")]
    Io {
        /// The device's path.
        device: String,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}
