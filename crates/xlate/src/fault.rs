//! Outstanding faults: each question is asked once, however many commands wait.
//!
//! Reads and writes are separate questions: a write without space must not fail a read. Only
//! reactors with parked commands are woken. Without a daemon, faults accumulate up to
//! [`MAX_FAULTS`].

use crate::reactors::ReactorSet;
use crate::types::{ExtentRange, VolumeId};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The most unanswered questions.
pub const MAX_FAULTS: usize = 65_536;

/// The result of a miss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// Ask the owner now.
    Ask,
    /// The owner was asked before.
    Asked,
    /// The table is full.
    Refused,
}

/// The unanswered questions.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct FaultTable {
    /// Volume, extent, for writing; and the waiting reactors.
    asked: BTreeMap<(VolumeId, u64, bool), ReactorSet>,
}

impl FaultTable {
    /// Records a reactor's miss.
    pub fn want(&mut self, volume: VolumeId, extent: u64, write: bool, reactor: usize) -> Wanted {
        let full = self.asked.len() >= MAX_FAULTS;
        match self.asked.entry((volume, extent, write)) {
            Entry::Occupied(mut waiting) => {
                waiting.get_mut().insert(reactor);
                Wanted::Asked
            }
            Entry::Vacant(_) if full => Wanted::Refused,
            Entry::Vacant(new) => {
                new.insert(ReactorSet::one(reactor));
                Wanted::Ask
            }
        }
    }

    fn take(
        &mut self,
        volume: VolumeId,
        range: ExtentRange,
        which: impl Fn(bool) -> bool,
    ) -> ReactorSet {
        let keys = (volume, range.first, false)..(volume, range.end(), false);
        self.asked
            .extract_if(keys, |(.., write), _| which(*write))
            .fold(ReactorSet::default(), |all, (_, waiting)| all.with(waiting))
    }

    /// Ends the faults in `range` that a grant answers; returns the reactors to tell.
    pub fn granted(&mut self, volume: VolumeId, range: ExtentRange, writable: bool) -> ReactorSet {
        self.take(volume, range, |write| writable || !write)
    }

    /// Ends failed faults in `range`; returns the reactors to tell.
    pub fn failed(&mut self, volume: VolumeId, range: ExtentRange, write: bool) -> ReactorSet {
        self.take(volume, range, |asked| asked == write)
    }

    /// The reactors that wait for this answer.
    pub fn waiting(&self, volume: VolumeId, extent: u64, write: bool) -> ReactorSet {
        let waiting = self.asked.get(&(volume, extent, write));
        waiting.copied().unwrap_or_default()
    }

    /// Forgets a volume.
    pub fn forget(&mut self, volume: VolumeId) {
        self.asked.retain(|(v, ..), _| *v != volume);
    }

    /// The unanswered questions: (volume, extent, for writing).
    pub fn outstanding(&self) -> impl Iterator<Item = (VolumeId, u64, bool)> + '_ {
        self.asked.keys().copied()
    }

    /// Number of unanswered questions.
    pub fn len(&self) -> usize {
        self.asked.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.asked.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_question_is_asked_once() {
        let v = VolumeId(1);
        let all = ExtentRange::new(0, 10);
        let mut t = FaultTable::default();
        assert_eq!(t.want(v, 5, false, 0), Wanted::Ask);
        assert_eq!(t.want(v, 5, false, 2), Wanted::Asked);
        let write = t.want(v, 5, true, 1);
        assert_eq!(write, Wanted::Ask, "a write is another question");
        assert_eq!(t.want(v, 5, true, 1), Wanted::Asked);
        assert_eq!(t.want(v, 6, true, 3), Wanted::Ask);
        let reported = t.granted(v, all, false);
        assert_eq!(reported.iter().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(t.len(), 2, "the writes are still unanswered");
        assert_eq!(t.want(v, 5, false, 0), Wanted::Ask);
        let reported = t.failed(v, ExtentRange::new(5, 1), true);
        assert_eq!(
            reported.iter().collect::<Vec<_>>(),
            [1],
            "the read goes on waiting"
        );
        let reported = t.granted(v, all, true);
        assert_eq!(reported.iter().collect::<Vec<_>>(), [0, 3]);
        assert!(t.is_empty());
        assert!(t.granted(v, all, true).is_empty());
        assert_eq!(t.want(v, 5, true, 0), Wanted::Ask);
        t.forget(v);
        assert!(t.is_empty());
    }
}
