//! A volume's mappings that are not durable.
//!
//! Lists in sequence order, nearly always the order of arrival, hold all mappings, and by device
//! those that no batch carries. So the oldest mapping and those due after a flush are found
//! directly. Removed entries stay until they reach an end.

use crate::journal::batch::BatchId;
use forebay_xlate::types::DeviceIndex;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) seq: u64,
    pub(crate) device: DeviceIndex,
    /// The batch that carries it.
    pub(crate) committing: Option<BatchId>,
}

/// (sequence, logical), in order.
type SequenceQueue = VecDeque<(u64, u64)>;

#[derive(Default, Debug)]
pub(crate) struct PendingSet {
    by_logical: BTreeMap<u64, Pending>,
    /// Removed entries may lie between pending ones.
    by_seq: SequenceQueue,
    /// By device, without entries in a batch.
    waiting: BTreeMap<u8, SequenceQueue>,
}

/// Inserts in order, nearly always at the end.
fn enqueue(queue: &mut SequenceQueue, entry: (u64, u64)) {
    if queue.back().is_none_or(|last| *last < entry) {
        queue.push_back(entry);
    } else {
        let at = queue.partition_point(|other| *other < entry);
        // A removed entry may come back.
        if queue.get(at) != Some(&entry) {
            queue.insert(at, entry);
        }
    }
}

/// Drops removed entries from both ends.
fn trim(queue: &mut SequenceQueue, is_there: impl Fn(&(u64, u64)) -> bool) {
    while queue.front().is_some_and(|entry| !is_there(entry)) {
        queue.pop_front();
    }
    while queue.back().is_some_and(|entry| !is_there(entry)) {
        queue.pop_back();
    }
}

fn is_pending(by_logical: &BTreeMap<u64, Pending>, (seq, logical): &(u64, u64)) -> bool {
    by_logical.get(logical).is_some_and(|p| p.seq == *seq)
}

fn waits(by_logical: &BTreeMap<u64, Pending>, (seq, logical): &(u64, u64)) -> bool {
    let pending = by_logical.get(logical);
    pending.is_some_and(|p| p.seq == *seq && p.committing.is_none())
}

impl PendingSet {
    pub(crate) fn len(&self) -> u64 {
        self.by_logical.len() as u64
    }

    pub(crate) fn get(&self, logical: u64) -> Option<&Pending> {
        self.by_logical.get(&logical)
    }

    pub(crate) fn within(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, &Pending)> {
        let range = first..end.max(first);
        self.by_logical
            .range(range)
            .map(|(logical, pending)| (*logical, pending))
    }

    pub(crate) fn oldest(&self) -> Option<u64> {
        self.by_seq.front().map(|(seq, _)| *seq)
    }

    pub(crate) fn newest(&self) -> Option<u64> {
        self.by_seq.back().map(|(seq, _)| *seq)
    }

    /// The devices with mappings up to `up_to_seq` in no batch.
    pub(crate) fn waiting_devices(&self, up_to_seq: u64) -> impl Iterator<Item = DeviceIndex> {
        self.waiting
            .iter()
            .filter(move |(_, waiting)| waiting.front().is_some_and(|(seq, _)| *seq <= up_to_seq))
            .map(|(device, _)| DeviceIndex(*device))
    }

    pub(crate) fn add_run(&mut self, logicals: Range<u64>, device: DeviceIndex, seq: u64) {
        for logical in logicals {
            self.add(logical, device, seq);
        }
    }

    pub(crate) fn add(&mut self, logical: u64, device: DeviceIndex, seq: u64) {
        let pending = Pending {
            seq,
            device,
            committing: None,
        };
        self.by_logical.insert(logical, pending);
        enqueue(&mut self.by_seq, (seq, logical));
        enqueue(self.waiting.entry(device.0).or_default(), (seq, logical));
    }

    /// Removes durable or released mappings.
    pub(crate) fn remove(&mut self, logicals: impl IntoIterator<Item = u64>) {
        for logical in logicals {
            self.by_logical.remove(&logical);
        }
        let there = &self.by_logical;
        trim(&mut self.by_seq, |entry| is_pending(there, entry));
        self.waiting.retain(|_, waiting| {
            trim(waiting, |entry| waits(there, entry));
            !waiting.is_empty()
        });
    }

    /// Puts a device's mappings up to a sequence into a batch. Returns them in logical order.
    pub(crate) fn commit(
        &mut self,
        device: DeviceIndex,
        up_to_seq: u64,
        batch: BatchId,
    ) -> Vec<u64> {
        let Some(waiting) = self.waiting.get_mut(&device.0) else {
            return Vec::new();
        };
        let due = waiting.partition_point(|(seq, _)| *seq <= up_to_seq);
        let mut due: Vec<(u64, u64)> = waiting.drain(..due).collect();
        due.sort_unstable_by_key(|(_, logical)| *logical);
        let mut given = Vec::with_capacity(due.len());
        for (seq, logical) in due {
            if let Some(pending) = self.by_logical.get_mut(&logical)
                && pending.seq == seq
                && pending.committing.is_none()
            {
                pending.committing = Some(batch);
                given.push(logical);
            }
        }
        let there = &self.by_logical;
        trim(waiting, |entry| waits(there, entry));
        if waiting.is_empty() {
            self.waiting.remove(&device.0);
        }
        given
    }

    /// An inconsistency of its lists.
    pub(crate) fn contradiction(&self) -> Option<String> {
        let there = &self.by_logical;
        let in_order =
            |queue: &SequenceQueue| queue.iter().zip(queue.iter().skip(1)).all(|(a, b)| a < b);
        let listed = self.by_seq.iter();
        let listed = listed.filter(|entry| is_pending(there, entry)).count();
        let (mut waiting, mut lost) = (0, usize::from(!in_order(&self.by_seq)));
        for (device, queue) in &self.waiting {
            let mine = |entry: &&(u64, u64)| waits(there, entry);
            let of_device = |(_, logical): &&(u64, u64)| {
                there.get(logical).map(|p| p.device.0) == Some(*device)
            };
            waiting += queue.iter().filter(mine).filter(of_device).count();
            lost += usize::from(!in_order(queue));
        }
        let uncarried = there.values().filter(|p| p.committing.is_none()).count();
        let ends = [self.by_seq.front(), self.by_seq.back()];
        lost += ends
            .iter()
            .flatten()
            .filter(|e| !is_pending(there, e))
            .count();
        let sound = lost == 0 && waiting == uncarried && listed == there.len();
        (!sound).then(|| {
            format!(
                "{} mappings that are not durable are listed as {} by sequence and {waiting} by \
                 device (of {uncarried}); {lost} of these lists are wrong",
                self.by_logical.len(),
                listed
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const D0: DeviceIndex = DeviceIndex(0);
    const D1: DeviceIndex = DeviceIndex(1);

    #[test]
    fn a_commit_takes_the_pending_extents_of_its_device() {
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
        set.remove([5, 5]);
        assert_eq!(set.oldest(), Some(2));
        assert_eq!(set.commit(D0, u64::MAX, BatchId(5)), [7]);
        assert_eq!(set.waiting_devices(u64::MAX).collect::<Vec<_>>(), [D1]);
        assert_eq!(set.contradiction(), None);
        set.by_seq.retain(|entry| *entry != (2, 3));
        assert!(set.contradiction().is_some());
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Add(u64, u8),
        Remove(u64),
        Commit(u8, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u64..30, 0u8..2).prop_map(|(logical, device)| Step::Add(logical, device)),
            2 => (0u64..30).prop_map(Step::Remove),
            1 => (0u8..2, 0u64..60).prop_map(|(device, seq)| Step::Commit(device, seq)),
        ]
    }

    proptest! {
        /// Agrees with a linear search.
        #[test]
        fn it_is_a_list(steps in prop::collection::vec(step(), 1..200)) {
            let mut set = PendingSet::default();
            let mut model: Vec<(u64, u64, u8, bool)> = Vec::new();
            for (number, step) in (1u64..).zip(steps) {
                match step {
                    Step::Add(logical, device) => {
                        if model.iter().any(|m| m.1 == logical) { continue; }
                        // As in adoption: some sequences out of order.
                        let seq = if number % 7 == 0 { number / 2 * 1000 + 1 } else { number * 1000 };
                        set.add(logical, DeviceIndex(device), seq);
                        model.push((seq, logical, device, false));
                    }
                    Step::Remove(logical) => {
                        model.retain(|m| m.1 != logical);
                        set.remove([logical]);
                    }
                    Step::Commit(device, seq) => {
                        let mut want = Vec::new();
                        for m in &mut model {
                            if m.2 == device && m.0 <= seq * 1000 && !m.3 {
                                m.3 = true;
                                want.push((m.0, m.1));
                            }
                        }
                        want.sort_unstable_by_key(|w| w.1);
                        let want: Vec<u64> = want.into_iter().map(|w| w.1).collect();
                        prop_assert_eq!(set.commit(DeviceIndex(device), seq * 1000, BatchId(number)), want);
                    }
                }
                prop_assert_eq!(set.contradiction(), None);
                prop_assert_eq!(set.oldest(), model.iter().map(|m| m.0).min());
                prop_assert_eq!(set.newest(), model.iter().map(|m| m.0).max());
                for limit in [0, number * 500, u64::MAX] {
                    let mut want: Vec<u8> = model.iter().filter(|m| !m.3 && m.0 <= limit).map(|m| m.2).collect();
                    want.sort_unstable();
                    want.dedup();
                    let got: Vec<u8> = set.waiting_devices(limit).map(|d| d.0).collect();
                    prop_assert_eq!(got, want);
                }
            }
        }
    }
}
