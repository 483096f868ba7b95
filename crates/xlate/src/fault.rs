//! Misses that the owner has been asked about: each extent once, however many commands wait.
//!
//! **Design.** Held by the engine's control thread. A write fault is stronger than a read fault, so
//! it is asked even while a read fault for the same extent is out. A new daemon is told all of them
//! again. **Not here:** the parked commands (the lane's) and the messages.

use crate::types::{ExtentRange, VolumeId};
use std::collections::BTreeMap;

/// See the module's text.
#[derive(Default, Debug)]
pub struct FaultTable {
    /// Asked extents, and whether for writing.
    asked: BTreeMap<(VolumeId, u64), bool>,
}

impl FaultTable {
    /// Notes a miss; true when the owner must be asked now.
    pub fn want(&mut self, volume: VolumeId, extent: u64, write: bool) -> bool {
        match self.asked.get_mut(&(volume, extent)) {
            Some(asked_write) if *asked_write || !write => false,
            Some(asked_write) => {
                *asked_write = true;
                true
            }
            None => {
                self.asked.insert((volume, extent), write);
                true
            }
        }
    }

    /// The owner answered for `range` (a grant that allows writing, one that does not, or an error).
    /// A read grant leaves a write fault outstanding.
    pub fn answered(&mut self, volume: VolumeId, range: ExtentRange, writable: bool) {
        let keys: Vec<_> = self
            .asked
            .range((volume, range.first)..(volume, range.end()))
            .filter(|(_, write)| writable || !**write)
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            self.asked.remove(&key);
        }
    }

    /// Forgets a volume.
    pub fn forget(&mut self, volume: VolumeId) {
        self.asked.retain(|(v, _), _| *v != volume);
    }

    /// All that is asked and not answered: (volume, extent, for writing).
    pub fn outstanding(&self) -> impl Iterator<Item = (VolumeId, u64, bool)> + '_ {
        self.asked.iter().map(|((v, e), w)| (*v, *e, *w))
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
    fn asked_once() {
        let v = VolumeId(1);
        let mut t = FaultTable::default();
        assert!(t.want(v, 5, false));
        assert!(!t.want(v, 5, false));
        assert!(t.want(v, 5, true), "a write asks again above a read");
        assert!(!t.want(v, 5, true));
        assert!(!t.want(v, 5, false));
        t.answered(v, ExtentRange::new(0, 10), false);
        assert_eq!(t.len(), 1, "the write is still unanswered");
        t.answered(v, ExtentRange::new(0, 10), true);
        assert!(t.is_empty());
        assert!(t.want(v, 5, true));
        t.forget(v);
        assert!(t.is_empty());
    }
}
