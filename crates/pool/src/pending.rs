//! A volume's mappings that are not durable.
//!
//! **Design.** Each has a sequence and a device. Kept by logical extent, by sequence, and, as long as
//! no batch carries it, by device and sequence: so the oldest, and what a flush of some devices makes
//! due, are found without looking at the rest. **Not here:** where the mapping points (`volume_map`).

use crate::batch::BatchId;
use forebay_xlate::types::DeviceIndex;
use std::collections::{BTreeMap, BTreeSet};

/// A mapping whose durability is outstanding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) seq: u64,
    pub(crate) device: DeviceIndex,
    /// The batch that carries it; none: nobody asked for it yet.
    pub(crate) committing: Option<BatchId>,
}

/// All of a volume's.
#[derive(Default, Debug)]
pub(crate) struct PendingSet {
    by_logical: BTreeMap<u64, Pending>,
    /// (sequence, logical).
    by_seq: BTreeSet<(u64, u64)>,
    /// device -> (sequence, logical), of what no batch carries.
    waiting: BTreeMap<u8, BTreeSet<(u64, u64)>>,
}

impl PendingSet {
    pub(crate) fn len(&self) -> u64 {
        self.by_logical.len() as u64
    }

    pub(crate) fn get(&self, logical: u64) -> Option<&Pending> {
        self.by_logical.get(&logical)
    }

    /// In logical order.
    pub(crate) fn within(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, &Pending)> {
        let range = first..end.max(first);
        self.by_logical
            .range(range)
            .map(|(logical, pending)| (*logical, pending))
    }

    /// The oldest sequence.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.by_seq.first().map(|(seq, _)| *seq)
    }

    /// The newest sequence.
    pub(crate) fn newest(&self) -> Option<u64> {
        self.by_seq.last().map(|(seq, _)| *seq)
    }

    /// The devices with something up to `up_to_seq` that no batch carries.
    pub(crate) fn waiting_devices(&self, up_to_seq: u64) -> impl Iterator<Item = DeviceIndex> {
        self.waiting
            .iter()
            .filter(move |(_, waiting)| waiting.first().is_some_and(|(seq, _)| *seq <= up_to_seq))
            .map(|(device, _)| DeviceIndex(*device))
    }

    /// Adds one that is not there.
    pub(crate) fn add(&mut self, logical: u64, device: DeviceIndex, seq: u64) {
        let pending = Pending {
            seq,
            device,
            committing: None,
        };
        self.by_logical.insert(logical, pending);
        self.by_seq.insert((seq, logical));
        self.waiting
            .entry(device.0)
            .or_default()
            .insert((seq, logical));
    }

    fn no_longer_waits(&mut self, device: DeviceIndex, seq: u64, logical: u64) {
        if let Some(waiting) = self.waiting.get_mut(&device.0) {
            waiting.remove(&(seq, logical));
            if waiting.is_empty() {
                self.waiting.remove(&device.0);
            }
        }
    }

    /// Forgets one: it is durable, or gone.
    pub(crate) fn remove(&mut self, logical: u64) -> bool {
        let Some(pending) = self.by_logical.remove(&logical) else {
            return false;
        };
        self.by_seq.remove(&(pending.seq, logical));
        if pending.committing.is_none() {
            self.no_longer_waits(pending.device, pending.seq, logical);
        }
        true
    }

    /// Gives a device's mappings up to a sequence to a batch; says which.
    pub(crate) fn commit(
        &mut self,
        device: DeviceIndex,
        up_to_seq: u64,
        batch: BatchId,
    ) -> Vec<u64> {
        let Some(waiting) = self.waiting.get_mut(&device.0) else {
            return Vec::new();
        };
        let due = match up_to_seq.checked_add(1) {
            Some(after) => {
                let later = waiting.split_off(&(after, 0));
                std::mem::replace(waiting, later)
            }
            None => std::mem::take(waiting),
        };
        if waiting.is_empty() {
            self.waiting.remove(&device.0);
        }
        let due: Vec<u64> = due.into_iter().map(|(_, logical)| logical).collect();
        for logical in &due {
            if let Some(pending) = self.by_logical.get_mut(logical) {
                pending.committing = Some(batch);
            }
        }
        due
    }

    /// What is wrong with it, if anything is.
    pub(crate) fn contradiction(&self) -> Option<String> {
        let waiting: usize = self.waiting.values().map(BTreeSet::len).sum();
        let (mut uncarried, mut lost) = (0, 0);
        for (logical, pending) in &self.by_logical {
            let entry = (pending.seq, *logical);
            lost += usize::from(!self.by_seq.contains(&entry));
            if pending.committing.is_none() {
                uncarried += 1;
                let waits = self.waiting.get(&pending.device.0);
                lost += usize::from(!waits.is_some_and(|waiting| waiting.contains(&entry)));
            }
        }
        let sound = lost == 0 && waiting == uncarried && self.by_seq.len() == self.by_logical.len();
        (!sound).then(|| {
            format!(
                "{} mappings that are not durable are listed as {} by sequence and {waiting} by \
                 device, {lost} of them wrongly",
                self.by_logical.len(),
                self.by_seq.len()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const D0: DeviceIndex = DeviceIndex(0);
    const D1: DeviceIndex = DeviceIndex(1);

    #[test]
    fn a_commit_takes_what_is_due_on_its_device() {
        let mut set = PendingSet::default();
        for (logical, device, seq) in [(5, D0, 1), (3, D1, 2), (9, D0, 3), (7, D0, 9)] {
            set.add(logical, device, seq);
        }
        assert_eq!(
            (set.oldest(), set.newest(), set.len()),
            (Some(1), Some(9), 4)
        );
        assert_eq!(set.waiting_devices(1).collect::<Vec<_>>(), [D0]);
        assert_eq!(set.commit(D0, 3, BatchId(4)), [5, 9]);
        assert_eq!(set.commit(D0, 3, BatchId(5)), [0; 0]);
        assert_eq!(set.get(9).unwrap().committing, Some(BatchId(4)));
        assert_eq!(set.oldest(), Some(1), "until it is durable");
        assert!(set.remove(5) && !set.remove(5));
        assert_eq!(set.oldest(), Some(2));
        assert_eq!(set.commit(D0, u64::MAX, BatchId(5)), [7]);
        assert_eq!(set.waiting_devices(u64::MAX).collect::<Vec<_>>(), [D1]);
        assert_eq!(set.contradiction(), None);
        set.by_seq.remove(&(2, 3));
        assert!(set.contradiction().is_some());
    }
}
