//! Runs of device extents, and sets of them.
//!
//! **Design.** [`DeviceRun`] is what leaves the crate. [`RunSet`] keeps disjoint runs in order and
//! merged, so that taking and returning single extents keeps contiguous space contiguous. **Not
//! here:** what state the extents are in (`extents`).

use forebay_xlate::types::{DeviceIndex, ExtentIndex};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Consecutive extents of one device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceRun {
    /// The device.
    pub device: DeviceIndex,
    /// The first of them.
    pub first: ExtentIndex,
    /// How many.
    pub count: u64,
}

impl DeviceRun {
    /// The run of `count` extents from `first` on `device`.
    pub const fn new(device: DeviceIndex, first: u64, count: u64) -> Self {
        Self {
            device,
            first: ExtentIndex(first),
            count,
        }
    }

    /// One past the last extent; saturates.
    pub const fn end(&self) -> u64 {
        self.first.0.saturating_add(self.count)
    }
}

/// Disjoint, merged runs in order.
#[derive(Clone, Default, Debug)]
pub(crate) struct RunSet {
    /// (device, first) -> count.
    runs: BTreeMap<(u8, u64), u64>,
    extents: u64,
}

impl RunSet {
    pub(crate) fn extents(&self) -> u64 {
        self.extents
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.extents == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = DeviceRun> + '_ {
        self.runs
            .iter()
            .map(|((device, first), count)| DeviceRun::new(DeviceIndex(*device), *first, *count))
    }

    /// Adds a run that overlaps none that is there.
    pub(crate) fn insert(&mut self, run: DeviceRun) {
        if run.count == 0 {
            return;
        }
        self.extents += run.count;
        let device = run.device.0;
        let (mut first, mut count) = (run.first.0, run.count);
        if let Some((&(_, before), &length)) =
            self.runs.range((device, 0)..(device, first)).next_back()
        {
            debug_assert!(before + length <= first, "runs overlap");
            if before + length == first {
                first = before;
                count += length;
            }
        }
        if let Some(length) = self.runs.remove(&(device, run.end())) {
            count += length;
        }
        self.runs.insert((device, first), count);
    }

    /// The run that holds the extent.
    pub(crate) fn run_of(&self, device: DeviceIndex, extent: u64) -> Option<DeviceRun> {
        let (&(_, first), &count) = self
            .runs
            .range((device.0, 0)..=(device.0, extent))
            .next_back()?;
        (extent < first + count).then(|| DeviceRun::new(device, first, count))
    }

    /// Takes out a run if all of it is there.
    pub(crate) fn take(&mut self, run: DeviceRun) -> bool {
        let Some(holder) = self.run_of(run.device, run.first.0) else {
            return false;
        };
        if run.end() > holder.end() || run.count == 0 {
            return false;
        }
        let device = run.device.0;
        self.runs.remove(&(device, holder.first.0));
        if holder.first < run.first {
            self.runs
                .insert((device, holder.first.0), run.first.0 - holder.first.0);
        }
        if run.end() < holder.end() {
            self.runs
                .insert((device, run.end()), holder.end() - run.end());
        }
        self.extents -= run.count;
        true
    }

    /// The longest run.
    pub(crate) fn longest(&self) -> Option<DeviceRun> {
        self.iter().max_by_key(|run| run.count)
    }

    /// Takes out up to `max` extents from the last run.
    pub(crate) fn pop(&mut self, max: u64) -> Option<DeviceRun> {
        let (&(device, first), &count) = self.runs.last_key_value()?;
        let taken = count.min(max);
        let run = DeviceRun::new(DeviceIndex(device), first + count - taken, taken);
        self.take(run).then_some(run)
    }

    /// Takes out everything.
    pub(crate) fn drain(&mut self) -> Vec<DeviceRun> {
        let all = self.iter().collect();
        *self = Self::default();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// The set holds what a set of single extents holds, and its runs are merged.
        #[test]
        fn run_set_is_a_set(steps in prop::collection::vec((any::<bool>(), 0u8..2, 0u64..60, 1u64..9), 1..80)) {
            let mut set = RunSet::default();
            let mut model = BTreeSet::new();
            for (insert, device, first, count) in steps {
                let run = DeviceRun::new(DeviceIndex(device), first, count);
                let extents: Vec<_> = (first..first + count).map(|e| (device, e)).collect();
                if insert {
                    if extents.iter().any(|e| model.contains(e)) { continue; }
                    set.insert(run);
                    model.extend(extents);
                } else {
                    let there = extents.iter().all(|e| model.contains(e));
                    prop_assert_eq!(set.take(run), there);
                    if there { for e in &extents { model.remove(e); } }
                }
                let flat: Vec<_> = set.iter()
                    .flat_map(|run| (run.first.0..run.end()).map(move |e| (run.device.0, e)))
                    .collect();
                prop_assert_eq!(&flat, &model.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(set.extents(), flat.len() as u64);
                let runs: Vec<_> = set.iter().collect();
                for pair in runs.windows(2) {
                    prop_assert!(pair[0].device != pair[1].device || pair[0].end() < pair[1].first.0);
                }
            }
        }
    }
}
