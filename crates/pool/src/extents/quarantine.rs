//! Extents to which a hanging request may still write.
//!
//! Such extents are quarantined durably in the batch that frees them; they are neither given out
//! nor zeroed. A device's quarantine ends up to a mark, taken before the engine is asked whether
//! all requests have ended. Later quarantines stay.
//!
//! **Not here:** asking the engine, the fence.

use super::runs::DeviceRun;

/// A point in the order of quarantines; see
/// [`Allocator::quarantine_mark`](super::allocator::Allocator::quarantine_mark).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct QuarantineMark(pub u64);

/// In the order of arrival.
#[derive(Default, Debug)]
pub(crate) struct Quarantine {
    runs: Vec<(QuarantineMark, DeviceRun)>,
    newest: u64,
}

impl Quarantine {
    /// From the catalog, at opening.
    pub(crate) fn found(runs: Vec<DeviceRun>) -> Self {
        let runs = runs.into_iter().map(|run| (QuarantineMark(0), run));
        Self {
            runs: runs.collect(),
            newest: 0,
        }
    }

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
