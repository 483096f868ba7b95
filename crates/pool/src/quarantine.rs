//! Extents that something may still write to.
//!
//! **Design.** A request that hangs at a device may end at any time, and write. What it may write to
//! is *quarantined*, durably, in the batch that takes it from its owner: nobody gets it, nobody zeroes
//! it. It ends for a device as a whole, up to a mark: whoever asks whether all requests of now have
//! ended notes the mark first, so that what is quarantined while he waits stays.
//!
//! **Not here:** asking the engine, the fence.

use crate::{extents::ExtentState, pool::Pool, runs::DeviceRun};
use forebay_xlate::types::DeviceIndex;

/// A point in the order of quarantines; see [`Pool::quarantine_mark`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct QuarantineMark(pub u64);

/// What is quarantined, in the order in which it came.
#[derive(Default, Debug)]
pub(crate) struct Quarantine {
    runs: Vec<(QuarantineMark, DeviceRun)>,
    newest: u64,
}

impl Quarantine {
    /// What was found quarantined at opening.
    pub(crate) fn found(runs: Vec<DeviceRun>) -> Self {
        let runs = runs.into_iter().map(|run| (QuarantineMark(0), run));
        Self {
            runs: runs.collect(),
            newest: 0,
        }
    }

    fn add(&mut self, run: DeviceRun) {
        self.newest += 1;
        self.runs.push((QuarantineMark(self.newest), run));
    }

    fn take(&mut self, which: impl Fn(QuarantineMark, DeviceRun) -> bool) -> Vec<DeviceRun> {
        let all = std::mem::take(&mut self.runs);
        let (gone, stay): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(mark, run)| which(*mark, *run));
        self.runs = stay;
        gone.into_iter().map(|(_, run)| run).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = DeviceRun> + '_ {
        self.runs.iter().map(|(_, run)| *run)
    }
}

impl Pool {
    /// Quarantines a run that nobody has any more.
    pub(crate) fn quarantine_extents(&mut self, run: DeviceRun) {
        self.set_extents(run, ExtentState::Quarantined);
        self.quarantine.add(run);
    }

    /// All that is quarantined up to now. To be noted before the engine is asked whether a device's
    /// requests have ended, or before a new engine is granted anything.
    pub fn quarantine_mark(&self) -> QuarantineMark {
        QuarantineMark(self.quarantine.newest)
    }

    /// How many of a device's extents are quarantined.
    pub fn quarantined_on(&self, device: DeviceIndex) -> u64 {
        let runs = self.quarantine.iter();
        runs.filter(|run| run.device == device)
            .map(|run| run.count)
            .sum()
    }

    /// Every request to a device that began before the mark has ended: what was quarantined by then is
    /// dirty once the open batch is durable. Returns how many extents.
    pub fn end_quarantine_on(&mut self, device: DeviceIndex, mark: QuarantineMark) -> u64 {
        let ended = self
            .quarantine
            .take(|since, run| since <= mark && run.device == device);
        for run in &ended {
            self.free_extents(*run);
        }
        ended.iter().map(|run| run.count).sum()
    }

    /// Whatever hung hangs no more. Returns how many extents.
    pub(crate) fn end_all_quarantine(&mut self) -> u64 {
        let ended = self.quarantine.take(|_, _| true);
        for run in &ended {
            self.free_extents(*run);
        }
        ended.iter().map(|run| run.count).sum()
    }
}
