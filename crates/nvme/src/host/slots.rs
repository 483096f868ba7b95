//! Allocates command identifiers: a slot number, with the slot's use count in the upper bits.
//!
//! Consecutive uses of a slot differ. FFFFh is avoided, as advised (Base 3.3.3.1). An ended
//! command's slot can stay reserved while its buffer is in use.

/// Command identifiers of a queue.
#[derive(Debug)]
pub struct CommandSlots {
    free: Vec<u16>,
    /// Per slot, the current or next identifier.
    cids: Vec<u16>,
    states: Vec<State>,
    slot_mask: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Busy,
    Ended,
}

impl CommandSlots {
    /// `depth` slots, 1..=32768.
    #[must_use]
    pub fn new(depth: u16) -> Self {
        let depth = depth.clamp(1, 1 << 15);
        Self {
            free: (0..depth).rev().collect(),
            cids: (0..depth).collect(),
            states: vec![State::Free; usize::from(depth)],
            slot_mask: depth.next_power_of_two() - 1,
        }
    }

    /// Number of slots.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.cids.len() as u16
    }

    /// Slots in use or ended.
    #[must_use]
    pub fn in_use(&self) -> u16 {
        (self.cids.len() - self.free.len()) as u16
    }

    /// Takes a slot: number and command identifier.
    pub fn claim(&mut self) -> Option<(u16, u16)> {
        let slot = self.free.pop()?;
        self.states[usize::from(slot)] = State::Busy;
        Some((slot, self.cids[usize::from(slot)]))
    }

    /// The slot in use with this identifier.
    #[must_use]
    pub fn find(&self, cid: u16) -> Option<u16> {
        let slot = cid & self.slot_mask;
        let at = usize::from(slot);
        (self.states.get(at) == Some(&State::Busy) && self.cids[at] == cid).then_some(slot)
    }

    /// Invalidates a slot's identifier; the slot is not free yet.
    pub fn end(&mut self, slot: u16) {
        if let Some(state @ State::Busy) = self.states.get_mut(usize::from(slot)) {
            *state = State::Ended;
        }
    }

    /// Frees a slot, if it is not free.
    pub fn give_back(&mut self, slot: u16) {
        let at = usize::from(slot);
        match self.states.get_mut(at) {
            Some(state) if *state != State::Free => *state = State::Free,
            _ => return,
        }
        let step = self.slot_mask.wrapping_add(1);
        let mut next = self.cids[at].wrapping_add(step);
        if next == u16::MAX {
            next = next.wrapping_add(step);
        }
        self.cids[at] = next;
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_valid_only_while_in_use() {
        let mut slots = CommandSlots::new(3);
        let (slot, cid) = slots.claim().unwrap();
        assert_eq!(slots.find(cid), Some(slot));
        assert_eq!(slots.find(cid.wrapping_add(4)), None);
        slots.end(slot);
        assert_eq!((slots.find(cid), slots.in_use()), (None, 1));
        slots.give_back(slot);
        slots.give_back(slot);
        assert_eq!(slots.find(cid), None);
        assert_eq!(slots.in_use(), 0);
        let again = slots.claim().unwrap();
        assert_eq!(again.0, slot);
        assert_ne!(again.1, cid);
    }

    #[test]
    fn slots_run_out_and_are_distinct() {
        let mut slots = CommandSlots::new(128);
        let mut seen = std::collections::BTreeSet::new();
        while let Some((slot, cid)) = slots.claim() {
            assert!(seen.insert(cid));
            assert_eq!(slots.find(cid), Some(slot));
        }
        assert_eq!(seen.len(), 128);
    }

    #[test]
    fn the_forbidden_identifier_is_never_used() {
        let mut slots = CommandSlots::new(16);
        for _ in 0..16 {
            slots.claim();
        }
        for _ in 0..10_000 {
            slots.give_back(15);
            let (slot, cid) = slots.claim().unwrap();
            assert_eq!(slot, 15);
            assert_ne!(cid, u16::MAX);
            assert_eq!(slots.find(cid), Some(15));
        }
    }
}
