//! Which copy of the catalog includes the other one's history.
//!
//! A history is a list of epochs. When the catalog goes on without a copy, it notes the last sync
//! and begins a new epoch with a random name. So the survivor's history includes a copy left
//! behind; of two diverged copies, neither includes the other. A copy left behind may have one
//! further sync, never acknowledged. One older than the remembered epochs counts as diverged.
//!
//! All labels note the [`Epoch`], so that a copy left behind does not pass for the catalog.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian::U64};

/// Remembered epochs before the current one.
const PAST: usize = 31;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Past {
    name: U64,
    /// Its last sync.
    last: U64,
}

/// The epoch in a label: that it began, not its content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Epoch {
    /// Number of epochs before it.
    pub number: u64,
    /// Its random name.
    pub name: u64,
    /// Devices with a copy; 255 for none.
    pub copies: [u8; 2],
}

/// The epochs of one copy, as stored.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Lineage {
    /// Number of epochs before this one.
    number: U64,
    name: U64,
    /// Newest first.
    past: [Past; PAST],
}

impl Lineage {
    pub(crate) fn first(name: u64) -> Self {
        let none = Past {
            name: U64::new(0),
            last: U64::new(0),
        };
        Self {
            number: U64::new(0),
            name: U64::new(name),
            past: [none; PAST],
        }
    }

    /// `last` is the old epoch's last sync.
    pub(crate) fn begin(&mut self, name: u64, last: u64) {
        self.past.copy_within(0..PAST - 1, 1);
        self.past[0] = Past {
            name: self.name,
            last: U64::new(last),
        };
        self.name = U64::new(name);
        self.number = U64::new(self.number.get().saturating_add(1));
    }

    pub(crate) fn number(&self) -> u64 {
        self.number.get()
    }

    pub(crate) fn name(&self) -> u64 {
        self.name.get()
    }

    /// Whether this includes a label's epoch.
    pub(crate) fn knows(&self, epoch: &Epoch) -> bool {
        match self.number.get().checked_sub(epoch.number) {
            Some(0) => self.name.get() == epoch.name,
            Some(back) => usize::try_from(back - 1)
                .ok()
                .and_then(|at| self.past.get(at))
                .is_some_and(|past| past.name.get() == epoch.name),
            None => false,
        }
    }

    /// Whether a copy at sync `seq` includes everything that the other acknowledged.
    pub(crate) fn contains(&self, seq: u64, other: &Lineage, other_seq: u64) -> bool {
        if self.name == other.name {
            return seq >= other_seq;
        }
        let number = self.number.get();
        let Some(back) = number.checked_sub(other.number.get()) else {
            return false;
        };
        match usize::try_from(back)
            .ok()
            .and_then(|back| self.past.get(back.checked_sub(1)?))
        {
            Some(past) => past.name == other.name && other_seq <= past.last.get().saturating_add(1),
            // Too long ago to be known.
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_surviving_copy_contains_the_history_of_the_other() {
        let start = Lineage::first(1);
        assert!(start.contains(5, &start, 5) && !start.contains(5, &start, 6));
        let mut alone = start.clone();
        alone.begin(2, 5);
        // Left behind at 4, at 5, and with an unacknowledged sync.
        for seq in 4..=6 {
            assert!(alone.contains(6, &start, seq));
            assert!(!start.contains(seq, &alone, 6));
        }
        assert!(!alone.contains(100, &start, 7));
        let mut apart = start.clone();
        apart.begin(3, 5);
        assert!(!alone.contains(100, &apart, 6) && !apart.contains(100, &alone, 6));
    }

    #[test]
    fn a_forgotten_epoch_is_not_an_ancestor() {
        let start = Lineage::first(1);
        let mut now = start.clone();
        for epoch in 0..PAST as u64 {
            now.begin(epoch + 10, epoch * 10);
        }
        assert!(now.contains(1000, &start, 1) && !now.contains(1000, &start, 2));
        let epoch = |number, name| Epoch {
            number,
            name,
            copies: [0, 1],
        };
        assert!(now.knows(&epoch(0, 1)) && !now.knows(&epoch(0, 2)));
        assert!(now.knows(&epoch(31, 40)) && !now.knows(&epoch(31, 39)));
        assert!(!now.knows(&epoch(32, 40)) && !start.knows(&epoch(1, 10)));
        now.begin(99, 900);
        assert!(!now.contains(1000, &start, 1) && !now.contains(1000, &start, 2));
        assert!(!now.knows(&epoch(0, 1)));
        assert!(!start.contains(5000, &now, 1000));
    }
}
