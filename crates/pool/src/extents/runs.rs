//! Runs of device extents. [`RunSet`] keeps them disjoint, ordered and merged, so that space stays
//! contiguous when extents come and go.

use forebay_xlate::types::{DeviceIndex, ExtentIndex};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Consecutive extents of one device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceRun {
    /// The device.
    pub device: DeviceIndex,
    /// The first extent.
    pub first: ExtentIndex,
    /// The number of extents.
    pub count: u64,
}

impl DeviceRun {
    /// `count` extents from `first` on.
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

#[derive(Clone, Default, Debug)]
pub(crate) struct RunSet {
    /// (device, first) -> count.
    runs: BTreeMap<(u8, u64), u64>,
    /// (device, count, first).
    by_length: BTreeSet<(u8, u64, u64)>,
    /// Extents by device, without entries of 0.
    devices: BTreeMap<u8, u64>,
    extents: u64,
}

impl RunSet {
    pub(crate) fn extents(&self) -> u64 {
        self.extents
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = (DeviceIndex, u64)> + '_ {
        let devices = self.devices.iter();
        devices.map(|(device, extents)| (DeviceIndex(*device), *extents))
    }

    pub(crate) fn extents_on(&self, device: DeviceIndex) -> u64 {
        self.devices.get(&device.0).copied().unwrap_or(0)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = DeviceRun> + '_ {
        self.runs
            .iter()
            .map(|((device, first), count)| DeviceRun::new(DeviceIndex(*device), *first, *count))
    }

    fn put(&mut self, device: u8, first: u64, count: u64) {
        self.runs.insert((device, first), count);
        self.by_length.insert((device, count, first));
    }

    fn cut(&mut self, device: u8, first: u64) -> Option<u64> {
        let count = self.runs.remove(&(device, first))?;
        self.by_length.remove(&(device, count, first));
        Some(count)
    }

    /// The run must not overlap others.
    pub(crate) fn insert(&mut self, run: DeviceRun) {
        if run.count == 0 {
            return;
        }
        let device = run.device.0;
        self.extents += run.count;
        *self.devices.entry(device).or_default() += run.count;
        let (mut first, mut count) = (run.first.0, run.count);
        if let Some((&(_, before), &length)) =
            self.runs.range((device, 0)..(device, first)).next_back()
        {
            debug_assert!(before + length <= first, "runs overlap");
            if before + length == first {
                self.cut(device, before);
                first = before;
                count += length;
            }
        }
        if let Some(length) = self.cut(device, run.end()) {
            count += length;
        }
        self.put(device, first, count);
    }

    pub(crate) fn run_of(&self, device: DeviceIndex, extent: u64) -> Option<DeviceRun> {
        let (&(_, first), &count) = self
            .runs
            .range((device.0, 0)..=(device.0, extent))
            .next_back()?;
        (extent < first + count).then(|| DeviceRun::new(device, first, count))
    }

    /// Removes a run; `false` if a part is missing.
    pub(crate) fn take(&mut self, run: DeviceRun) -> bool {
        let Some(holder) = self.run_of(run.device, run.first.0) else {
            return false;
        };
        if run.end() > holder.end() || run.count == 0 {
            return false;
        }
        let device = run.device.0;
        let head = run.first.0 - holder.first.0;
        match self.runs.get_mut(&(device, holder.first.0)) {
            // The start is unchanged.
            Some(count) if head > 0 => {
                *count = head;
                self.by_length
                    .remove(&(device, holder.count, holder.first.0));
                self.by_length.insert((device, head, holder.first.0));
            }
            _ => {
                self.cut(device, holder.first.0);
            }
        }
        if run.end() < holder.end() {
            self.put(device, run.end(), holder.end() - run.end());
        }
        self.extents -= run.count;
        if let Some(left) = self.devices.get_mut(&device) {
            *left -= run.count;
            if *left == 0 {
                self.devices.remove(&device);
            }
        }
        true
    }

    pub(crate) fn longest_on(&self, device: DeviceIndex) -> Option<DeviceRun> {
        let all = (device.0, 0, 0)..=(device.0, u64::MAX, u64::MAX);
        let (_, count, first) = self.by_length.range(all).next_back()?;
        Some(DeviceRun::new(device, *first, *count))
    }

    /// Removes up to `max` extents from the end of a device's last run.
    pub(crate) fn pop_on(&mut self, device: DeviceIndex, max: u64) -> Option<DeviceRun> {
        let all = (device.0, 0)..=(device.0, u64::MAX);
        let (&(_, first), &count) = self.runs.range(all).next_back()?;
        let taken = count.min(max);
        let run = DeviceRun::new(device, first + count - taken, taken);
        self.take(run).then_some(run)
    }

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

    proptest! {
        /// Agrees with a set of single extents, and its runs are merged.
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
                for device in [DeviceIndex(0), DeviceIndex(1)] {
                    let there = flat.iter().filter(|(on, _)| *on == device.0).count() as u64;
                    prop_assert_eq!(set.extents_on(device), there);
                    let longest = set.iter().filter(|run| run.device == device).map(|run| run.count).max();
                    prop_assert_eq!(set.longest_on(device).map(|run| run.count), longest);
                }
                let runs: Vec<_> = set.iter().collect();
                for pair in runs.windows(2) {
                    prop_assert!(pair[0].device != pair[1].device || pair[0].end() < pair[1].first.0);
                }
            }
        }
    }
}
