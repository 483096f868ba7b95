//! The bounds of a history.

use crate::daemon::Wish;
use forebay_xlate::VolumeId;
use forebay_xlate::reactor_side::Parked;
use std::collections::BTreeSet;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Read,
    Write,
    Deallocate,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub reactor: usize,
    pub volume: VolumeId,
    pub kind: Kind,
    /// This command must end first.
    pub after: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Stage {
    Idle,
    Moving,
    Parked(Parked),
    DeviceWait,
    Releasing,
    Done,
    Failed,
}

/// How often each event may happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Budget {
    pub daemon_deaths: u8,
    pub engine_deaths: u8,
    pub hangs: u8,
    pub recoveries: u8,
    /// A release times out.
    pub interrupts: u8,
    /// A revoke times out although its device answers.
    pub timeouts: u8,
    pub sleeps: u8,
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub reactors: usize,
    pub devices: u8,
    pub max_drains: usize,
    pub commands: Vec<Command>,
    /// The owner's own operations, each once.
    pub wishes: Vec<(VolumeId, Wish)>,
    pub budget: Budget,
}

impl Scenario {
    pub(crate) fn volumes(&self) -> Vec<VolumeId> {
        let all: BTreeSet<_> = self.commands.iter().map(|c| c.volume).collect();
        all.into_iter().collect()
    }

    /// The volumes that may be frozen.
    pub(crate) fn freezes(&self) -> impl Iterator<Item = VolumeId> {
        let wishes = self.wishes.iter();
        wishes.filter_map(|(volume, wish)| (*wish == Wish::Freeze).then_some(*volume))
    }
}
