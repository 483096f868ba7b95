//! Which volume each reserved extent is for.
//!
//! Neighbouring runs of one volume are merged. They are stored by chunk of the device, like states,
//! so that a commit writes only the changes.

use crate::extents::runs::DeviceRun;
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// (device, first) -> (count, volume).
    runs: BTreeMap<(u8, u64), (u64, VolumeId)>,
}

impl Reservations {
    /// The run must not overlap others.
    pub(crate) fn insert(&mut self, run: DeviceRun, volume: VolumeId) {
        if run.count == 0 {
            return;
        }
        let device = run.device.0;
        let (mut first, mut count) = (run.first.0, run.count);
        if let Some((&(_, before), &(length, owner))) =
            self.runs.range((device, 0)..(device, first)).next_back()
        {
            debug_assert!(before + length <= first, "reserved twice");
            if before + length == first && owner == volume {
                first = before;
                count += length;
            }
        }
        if let Some(&(length, owner)) = self.runs.get(&(device, run.end()))
            && owner == volume
        {
            self.runs.remove(&(device, run.end()));
            count += length;
        }
        self.runs.insert((device, first), (count, volume));
    }

    /// The reserved parts of `run`, in order.
    pub(crate) fn within(&self, run: DeviceRun) -> Vec<(DeviceRun, VolumeId)> {
        let device = run.device.0;
        let before = self
            .runs
            .range((device, 0)..(device, run.first.0))
            .next_back();
        before
            .into_iter()
            .chain(self.runs.range((device, run.first.0)..(device, run.end())))
            .filter_map(|(&(_, first), &(count, volume))| {
                let (from, to) = (first.max(run.first.0), (first + count).min(run.end()));
                (from < to).then(|| (DeviceRun::new(DeviceIndex(device), from, to - from), volume))
            })
            .collect()
    }

    /// All runs, and their number of extents.
    pub(crate) fn contents(&self) -> (impl Iterator<Item = (DeviceRun, VolumeId)>, u64) {
        let runs = self
            .runs
            .iter()
            .map(|(&(device, first), &(count, volume))| {
                (DeviceRun::new(DeviceIndex(device), first, count), volume)
            });
        (runs, self.runs.values().map(|(count, _)| count).sum())
    }

    /// Removes the reserved parts of `run`; `false` if there were none.
    pub(crate) fn remove(&mut self, run: DeviceRun) -> bool {
        let parts = self.within(run);
        for (part, _) in &parts {
            let device = part.device.0;
            let holder = self
                .runs
                .range((device, 0)..=(device, part.first.0))
                .next_back();
            let Some((&(_, first), &(count, volume))) = holder else {
                continue;
            };
            self.runs.remove(&(device, first));
            if first < part.first.0 {
                self.runs
                    .insert((device, first), (part.first.0 - first, volume));
            }
            if part.end() < first + count {
                self.runs
                    .insert((device, part.end()), (first + count - part.end(), volume));
            }
        }
        !parts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn reservations_are_a_map(
            steps in prop::collection::vec((0u64..3, 0u8..2, 0u64..60, 1u64..9), 1..80),
        ) {
            let mut reservations = Reservations::default();
            let mut model: BTreeMap<(u8, u64), u64> = BTreeMap::new();
            for (volume, device, first, count) in steps {
                let run = DeviceRun::new(DeviceIndex(device), first, count);
                let there: Vec<_> = (first..first + count)
                    .filter_map(|extent| Some(((device, extent), *model.get(&(device, extent))?)))
                    .collect();
                let flat: Vec<_> = reservations
                    .within(run)
                    .into_iter()
                    .flat_map(|(run, volume)| {
                        (run.first.0..run.end()).map(move |e| ((run.device.0, e), volume.0))
                    })
                    .collect();
                prop_assert_eq!(&flat, &there);
                if volume == 0 || !there.is_empty() {
                    prop_assert_eq!(reservations.remove(run), !there.is_empty());
                    model.retain(|place, _| !there.iter().any(|(gone, _)| gone == place));
                } else {
                    reservations.insert(run, VolumeId(volume));
                    model.extend((first..first + count).map(|extent| ((device, extent), volume)));
                }
            }
            let merged: Vec<_> =
                reservations.runs.iter().map(|(place, held)| (*place, *held)).collect();
            for pair in merged.windows(2) {
                let ((device, first), (count, volume)) = pair[0];
                let touches = pair[1].0 == (device, first + count);
                prop_assert!(!touches || pair[1].1.1 != volume, "not merged");
            }
        }
    }
}
