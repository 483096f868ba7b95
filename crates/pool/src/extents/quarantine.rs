//! Extents that something may still write to.
//!
//! **Design.** A request that hangs at a device may end at any time, and write. What it may write to
//! is *quarantined*, durably, in the batch that takes it from its owner: nobody gets it, nobody zeroes
//! it. It ends for a device as a whole, up to a mark: whoever asks whether all requests of now have
//! ended notes the mark first, so that what is quarantined while he waits stays.
//!
//! **Not here:** asking the engine, the fence.

use super::runs::DeviceRun;

/// A point in the order of quarantines; see [`Allocator::quarantine_mark`](super::allocator::Allocator::quarantine_mark).
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

    /// A point after all that is quarantined now.
    pub(crate) fn mark(&self) -> QuarantineMark {
        QuarantineMark(self.newest)
    }

    pub(super) fn add(&mut self, run: DeviceRun) {
        self.newest += 1;
        self.runs.push((QuarantineMark(self.newest), run));
    }

    pub(super) fn take(
        &mut self,
        which: impl Fn(QuarantineMark, DeviceRun) -> bool,
    ) -> Vec<DeviceRun> {
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
