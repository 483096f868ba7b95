//! Take-over: how an engine goes on where a dead one stopped.
//!
//! **Purpose.** Hosts must not notice that the engine died: their TCP connections stay, every command
//! they sent is answered once, and no write lands after a later one.
//!
//! **Design.** The daemon holds what outlives an engine: its sockets, its state region, its memory. It
//! gives them to the successor, which *converts* them ([`Pending::convert`]): the dead engine's records
//! are read once into private memory, the kernel says how far each stream was consumed
//! and accepted ([`counters`]), and from both follows what each queue has still to do. All of that is
//! written into the successor's own region and memory, and nothing else is touched: until the daemon says
//! `Resume`, the dead engine's records stay the truth, and a successor that dies is replaced by another.
//! With `Resume` the reactors get their [`InheritedPart`]s and serve.
//!
//! Every byte of the dead engine's region is hostile input. What is found damaged closes its own
//! association and no other.
//!
//! **What it does not do.** It waits for no fence ([`crate::core`] does), and decides nothing about whom
//! to blame (the daemon does).

mod closing;
pub(crate) mod counters;
#[cfg(any(test, fuzzing))]
mod dead;
#[cfg(any(test, fuzzing))]
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

use crate::core::Devices;
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

/// The bytes of a dead engine's memory file.
pub(crate) trait OldBytes {
    /// Fills `out` from the bytes at `place`; `None` when there are none.
    fn read(&self, place: u64, out: &mut [u8]) -> Option<()>;
}

/// What is wrong with a record of a dead engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Damage(pub &'static str);

/// What a dead engine left, while it is being gathered.
#[derive(Debug)]
pub(crate) struct Pending {
    region: Region,
    memory: OldMemory,
    blamed: Option<Blamed>,
    sockets: Vec<(u64, Arc<OwnedFd>)>,
}

/// An export of the successor: where its lane is.
#[derive(Clone, Debug)]
pub(crate) struct ServedLane {
    /// Its configuration and its reactor.
    pub served: Served,
    /// Its lane.
    pub lane: LaneIndex,
    /// Its volume.
    pub volume: Arc<Volume>,
}

/// The successor's exports.
pub(crate) type ServedLanes = BTreeMap<ExportId, ServedLane>;

impl Pending {
    /// Takes what generation `generation` left.
    ///
    /// # Errors
    /// What is told as `Refused`: it is of no use, and its hosts must connect again.
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
            return Err("the state region is another engine's".into());
        }
        forebay_xlate::kill_point!("over.adopted");
        Ok(Self {
            region,
            memory,
            blamed,
            sockets: Vec::new(),
        })
    }

    /// What it crashed over.
    pub(crate) fn blamed(&self) -> Option<Blamed> {
        self.blamed
    }

    /// Adds one of its sockets.
    pub(crate) fn add(&mut self, socket: u64, fd: OwnedFd) {
        self.sockets.push((socket, Arc::new(fd)));
    }

    /// Decides what goes on, and writes it into the successor's region and memory: complete, but to no
    /// effect yet. Sockets are neither read nor written.
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
