//! A queue's command identifiers in use, and their slots.
//!
//! Open addressing with linear probing; removal moves later entries back, so there are no
//! tombstones. The table has twice the queue's entries and never grows. Colliding identifiers cost
//! at most a scan of the host's own queue.

const EMPTY: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Cids {
    places: Box<[u32]>,
}

impl Cids {
    pub(super) fn new(entries: usize) -> Self {
        Self {
            places: vec![EMPTY; (entries.max(2) * 2).next_power_of_two()].into(),
        }
    }

    fn home(&self, cid: u16) -> usize {
        usize::from(cid) & (self.places.len() - 1)
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.places.len() - 1)
    }

    #[inline]
    fn find(&self, cid: u16) -> usize {
        let mut at = self.home(cid);
        while self.places[at] != EMPTY && (self.places[at] >> 16) as u16 != cid {
            at = self.next(at);
        }
        at
    }

    pub(super) fn get(&self, cid: u16) -> Option<u16> {
        match self.places[self.find(cid)] {
            EMPTY => None,
            place => Some(place as u16),
        }
    }

    /// False: its identifier is in use. There is room for every slot.
    #[inline]
    pub(super) fn insert(&mut self, cid: u16, slot: u16) -> bool {
        debug_assert!(slot < u16::MAX);
        let at = self.find(cid);
        let free = self.places[at] == EMPTY;
        if free {
            self.places[at] = u32::from(cid) << 16 | u32::from(slot);
        }
        free
    }

    #[inline(never)]
    pub(super) fn remove(&mut self, cid: u16) {
        let mut hole = self.find(cid);
        if self.places[hole] == EMPTY {
            return;
        }
        let mut at = self.next(hole);
        while self.places[at] != EMPTY {
            let home = self.home((self.places[at] >> 16) as u16);
            // An entry whose probe sequence passes the hole moves into it.
            let mask = self.places.len() - 1;
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.places[hole] = self.places[at];
                hole = at;
            }
            at = self.next(at);
        }
        self.places[hole] = EMPTY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn it_is_a_map(steps in proptest::collection::vec((any::<bool>(), 0u16..40, 0u16..4), 0..400)) {
            let mut cids = Cids::new(16);
            let mut model = HashMap::new();
            for (i, (insert, low, high)) in steps.into_iter().enumerate() {
                let cid = (low % 8) | (high << 9) | ((low / 8) << 5);
                if insert && (model.len() < 16 || model.contains_key(&cid)) {
                    let fresh = !model.contains_key(&cid);
                    prop_assert_eq!(cids.insert(cid, i as u16), fresh);
                    model.entry(cid).or_insert(i as u16);
                } else if !insert {
                    cids.remove(cid);
                    model.remove(&cid);
                }
                for (cid, slot) in &model {
                    prop_assert_eq!(cids.get(*cid), Some(*slot));
                }
                prop_assert_eq!(cids.places.iter().filter(|p| **p != EMPTY).count(), model.len());
            }
        }
    }
}
