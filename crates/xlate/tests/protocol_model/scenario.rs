//! What a history may contain: tenants' commands, the owner's wishes, and how often what goes wrong.

use crate::daemon::Wish;
use forebay_xlate::VolumeId;
use forebay_xlate::reactor_side::Parked;
use std::collections::BTreeSet;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Read,
    Write,
    Deallocate,
}

/// A tenant's command.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    pub reactor: usize,
    pub volume: VolumeId,
    pub kind: Kind,
    /// The command that must have ended before.
    pub after: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    Idle,
    /// Translated, or in flight.
    Moving,
    Parked(Parked),
    DeviceWait,
    Releasing,
    Done,
    Failed,
}

/// What may happen at most so often.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Budget {
    pub daemon_deaths: u8,
    pub engine_deaths: u8,
    pub hangs: u8,
    pub recoveries: u8,
    /// A release waits too long.
    pub interrupts: u8,
    /// A revoke waits too long though its device answers.
    pub timeouts: u8,
    /// A reactor falls asleep.
    pub sleeps: u8,
}

/// A bounded history.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub reactors: usize,
    /// Each has one extent.
    pub devices: u8,
    pub max_drains: usize,
    pub commands: Vec<Command>,
    /// What the owner does besides answering, each once.
    pub wishes: Vec<(VolumeId, Wish)>,
    pub budget: Budget,
}

impl Scenario {
    pub fn volumes(&self) -> Vec<VolumeId> {
        let all: BTreeSet<_> = self.commands.iter().map(|c| c.volume).collect();
        all.into_iter().collect()
    }
}
