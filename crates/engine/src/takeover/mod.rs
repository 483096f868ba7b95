//! Take-over: an engine continues where a dead one stopped. TCP connections stay, every command is
//! answered once, and no write lands after a later one.
//!
//! **Design.** The daemon gives the dead engine's sockets, state region and memory to a successor,
//! which *converts* them ([`Pending::convert`]). It reads the records once into private memory and
//! reads the kernel's counters ([`counters`]). Then it writes the rest of the work into its own
//! region. Until `Resume` nothing else changes, so it can be replaced; then reactors get their
//! [`InheritedPart`]s. The dead region is untrusted; damage closes only its own association. **Not
//! here:** fences ([`crate::control`], [`crate::recovery`]), blame (the daemon).

mod closing;
pub(crate) mod counters;
#[cfg(any(test, fuzzing))]
mod dead;
#[cfg(any(test, fuzzing))]
#[allow(unreachable_pub, reason = "the fuzz target uses it")]
pub mod fuzzing;
mod install;
mod items;
mod plan;
mod queue;
mod snapshot;
mod spans;
mod stream;
mod types;

pub(crate) use closing::Closing;
pub(crate) use install::Successor;
pub(crate) use types::{
    Inheritance, InheritedCommand, InheritedController, InheritedPart, InheritedQueue, Next,
};

use crate::core::FenceSet;
use crate::exports::Served;
use crate::lane::LaneIndex;
use crate::memory::OldMemory;
use crate::volume::Volume;
use forebay_xlate::boundary::message::{Blamed, ExportId};
use forebay_xlate::boundary::region::Region;
use forebay_xlate::shm::SharedMemory;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Deaths of engines after which a command is not begun again.
pub(crate) const MAX_ATTEMPTS: u8 = 2;

pub(crate) trait OldBytes {
    fn read(&self, place: u64, out: &mut [u8]) -> Option<()>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Damage(pub &'static str);

#[derive(Debug)]
pub(crate) struct Pending {
    region: Region,
    memory: OldMemory,
    blamed: Option<Blamed>,
    sockets: Vec<(u64, Arc<OwnedFd>)>,
}

#[derive(Clone, Debug)]
pub(crate) struct ServedLane {
    pub served: Served,
    pub lane: LaneIndex,
    pub volume: Arc<Volume>,
}

pub(crate) type ServedLanes = BTreeMap<ExportId, ServedLane>;

impl Pending {
    /// # Errors
    /// The state is unusable: its hosts must reconnect. Reported as `Refused`.
    pub(crate) fn new(
        generation: u64,
        region: OwnedFd,
        memory: Option<OwnedFd>,
        blamed: Option<Blamed>,
    ) -> Result<Self, String> {
        let region = SharedMemory::from_fd(region)
            .and_then(Region::adopt)
            .map_err(|e| e.to_string())?;
        let memory = memory.ok_or("the state region came without its memory")?;
        let memory = OldMemory::adopt(memory).map_err(|e| e.to_string())?;
        if region.header().generation.load(Relaxed) != generation {
            return Err("the state region belongs to another engine".into());
        }
        forebay_xlate::kill_point!("over.adopted");
        Ok(Self {
            region,
            memory,
            blamed,
            sockets: Vec::new(),
        })
    }

    pub(crate) fn blamed(&self) -> Option<Blamed> {
        self.blamed
    }

    pub(crate) fn add(&mut self, socket: u64, fd: OwnedFd) {
        self.sockets.push((socket, Arc::new(fd)));
    }

    /// Writes into the successor's region and memory, without effect yet. Sockets are neither read
    /// nor written.
    pub(crate) fn convert(self, new: Successor<'_>) -> Inheritance {
        let facts: Vec<_> = (self.sockets.iter())
            .map(|(socket, fd)| (*socket, counters::read(fd)))
            .collect();
        forebay_xlate::kill_point!("over.counted");
        let (region, memory) = (&self.region, &self.memory);
        let now_ns = crate::core::monotonic_ns();
        let plan = plan::plan(region, memory, &facts, self.blamed, new.lanes, now_ns);
        let mut inheritance = install::install(plan, memory, &self.sockets, new);
        inheritance.after_fence |=
            (region.reactors().iter()).any(|reactor| reactor.orphans.load(Relaxed) != 0);
        inheritance.served = (region.devices().iter())
            .map(|device| device.served.load(Relaxed))
            .collect();
        forebay_xlate::kill_point!("over.converted");
        inheritance
    }
}

#[cfg(test)]
mod tests;

impl OldBytes for OldMemory {
    fn read(&self, place: u64, out: &mut [u8]) -> Option<()> {
        OldMemory::read(self, place, out).ok()
    }
}
