//! Misses that the owner has been asked about: each question once, however many commands wait.
//!
//! **Design.** Held by the engine's side of the protocol. A question is an extent and whether it is to
//! be written: a write that finds no room must not fail a read. Each knows the reactors that have
//! commands parked for it, so that an answer wakes nobody else. A new daemon is told all of them again.
//! While there is none, hosts go on missing: beyond [`MAX_FAULTS`] nothing more is taken.
//!
//! **Not here:** the parked commands (the lane's) and the messages.

use crate::reactors::ReactorSet;
use crate::types::{ExtentRange, VolumeId};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Unanswered questions at once.
pub const MAX_FAULTS: usize = 65_536;

/// What becomes of a miss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// The owner must be asked now.
    Ask,
    /// It has been.
    Asked,
    /// There is no room for the question.
    Refused,
}

/// See the module's text.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct FaultTable {
    /// Volume, extent, for writing; and who waits.
    asked: BTreeMap<(VolumeId, u64, bool), ReactorSet>,
}

impl FaultTable {
    /// Notes a reactor's miss.
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

    /// The owner granted something in `range`; who must be told. Without the right to write, writes
    /// stay asked.
    pub fn granted(&mut self, volume: VolumeId, range: ExtentRange, writable: bool) -> ReactorSet {
        self.take(volume, range, |write| writable || !write)
    }

    /// The owner can't answer the questions for writing, or for reading, in `range`; who must be told.
    pub fn failed(&mut self, volume: VolumeId, range: ExtentRange, write: bool) -> ReactorSet {
        self.take(volume, range, |asked| asked == write)
    }

    /// Forgets a volume.
    pub fn forget(&mut self, volume: VolumeId) {
        self.asked.retain(|(v, ..), _| *v != volume);
    }

    /// All that is asked and not answered: (volume, extent, for writing).
    pub fn outstanding(&self) -> impl Iterator<Item = (VolumeId, u64, bool)> + '_ {
        self.asked.keys().copied()
    }

    /// How many are outstanding.
    pub fn len(&self) -> usize {
        self.asked.len()
    }

    /// Whether none is.
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
        let told = t.granted(v, all, false);
        assert_eq!(told.iter().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(t.len(), 2, "the writes are still unanswered");
        assert_eq!(t.want(v, 5, false, 0), Wanted::Ask);
        let told = t.failed(v, ExtentRange::new(5, 1), true);
        assert_eq!(
            told.iter().collect::<Vec<_>>(),
            [1],
            "the read goes on waiting"
        );
        let told = t.granted(v, all, true);
        assert_eq!(told.iter().collect::<Vec<_>>(), [0, 3]);
        assert!(t.is_empty());
        assert!(t.granted(v, all, true).is_empty());
        assert_eq!(t.want(v, 5, true, 0), Wanted::Ask);
        t.forget(v);
        assert!(t.is_empty());
    }
}
