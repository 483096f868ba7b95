//! What several reactors that serve the same tenants tell each other.
//!
//! **Design.** For each tenant one sum of what each reactor last saw of its demand. A reactor adds the change once a
//! window, and the same instruction gives it the sum: its share of the tenant's budget is its part of the demand. No lock;
//! nothing is read or written on the path of an I/O. Credit lies here as well, as it is the tenant's and not a reactor's.
//! What the node shares besides processors is divided by the reactors that are awake.
//! **Not here:** processors, of which each reactor has its own.

use crate::credit::Account;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A tenant's, in lines of memory of its own.
#[derive(Default, Debug)]
#[repr(align(128))]
pub struct Entry {
    /// All reactors' demand, as parts of base, in 1/65536.
    demand: AtomicU64,
    /// Reactors that have lanes of it.
    reactors: AtomicU32,
    /// What it saved: operations, bytes.
    pub credit: [Account; 2],
}

/// See the module's text.
#[derive(Debug)]
pub struct Board {
    entries: Box<[Entry]>,
    awake: AtomicU32,
}

impl Board {
    /// For so many tenants.
    #[must_use]
    pub fn new(tenants: usize) -> Self {
        Self {
            entries: (0..tenants).map(|_| Entry::default()).collect(),
            awake: AtomicU32::new(0),
        }
    }

    /// A tenant's.
    #[inline]
    #[must_use]
    pub fn entry(&self, tenant: usize) -> &Entry {
        &self.entries[tenant]
    }

    /// How many tenants can be.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.entries.len()
    }

    /// A reactor begins to work (`true`), or sleeps.
    pub fn wake(&self, awake: bool) {
        if awake {
            self.awake.fetch_add(1, Relaxed);
        } else {
            self.awake.fetch_sub(1, Relaxed);
        }
    }

    /// So many work, at least the one that asks.
    #[must_use]
    pub fn awake(&self) -> u32 {
        self.awake.load(Relaxed).max(1)
    }
}

/// Demand as large as the whole base.
pub const WHOLE: u64 = 1 << 16;
/// What a reactor that has just begun counts as: so that it has a share before it is known.
const BEGINNER: u64 = WHOLE / 16;

impl Entry {
    /// A reactor has its first lane of this tenant (`true`), or no lane any more.
    pub fn attach(&self, attached: bool) {
        if attached {
            self.reactors.fetch_add(1, Relaxed);
        } else {
            self.reactors.fetch_sub(1, Relaxed);
        }
    }

    /// More than one reactor has lanes of this tenant: what one of them needs has to be told.
    #[inline]
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.reactors.load(Relaxed) > 1
    }

    /// This reactor told a demand of `told`, and it is `new` now; its share of the tenant (0 to 1). Whoever is the only one
    /// has all of it and tells nothing.
    #[inline]
    pub fn share(&self, told: &mut u64, new: u64) -> f32 {
        let reactors = u64::from(self.reactors.load(Relaxed));
        if reactors <= 1 {
            return 1.0;
        }
        let change = new.wrapping_sub(std::mem::replace(told, new));
        let sum = self.demand.fetch_add(change, Relaxed).wrapping_add(change);
        let sum = sum.max(new) + BEGINNER * reactors;
        (new + BEGINNER) as f32 / sum as f32
    }

    /// A reactor that told this has no lane any more.
    pub fn leave(&self, told: u64) {
        self.demand.fetch_sub(told, Relaxed);
        self.attach(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_demand_and_make_a_whole() {
        let board = Board::new(1);
        let entry = board.entry(0);
        let (mut first, mut second) = (0, 0);
        entry.attach(true);
        assert_eq!(entry.share(&mut first, WHOLE), 1.0);
        entry.attach(true);
        entry.share(&mut first, WHOLE);
        let other = entry.share(&mut second, 0);
        assert!(other > 0.0 && other < 0.1, "{other}");
        // Both see the same demand: half of it each.
        let other = entry.share(&mut second, WHOLE);
        let one = entry.share(&mut first, WHOLE);
        assert_eq!((one, other), (0.5, 0.5));
        // One stops: the other has nearly all.
        let one = entry.share(&mut first, 0);
        let other = entry.share(&mut second, WHOLE);
        assert!((one + other - 1.0).abs() < 0.001, "{one} {other}");
        assert!(other > 0.9);
        // It is gone: all is the other's, and of the next that comes it is not counted.
        entry.leave(first);
        assert_eq!(entry.share(&mut second, WHOLE), 1.0);
        entry.attach(true);
        let (one, other) = (entry.share(&mut 0, WHOLE), entry.share(&mut second, WHOLE));
        assert_eq!((one, other), (0.5, 0.5));
    }

    #[test]
    fn credit_never_negative_nor_over_cap() {
        let account = Account::default();
        account.set_cap(1000);
        assert_eq!(account.draw(1), 0);
        account.put(600);
        account.put(u64::MAX);
        assert_eq!(account.has(), 1000);
        assert_eq!(account.draw(300), 300);
        assert_eq!(account.draw(u64::MAX), 700);
        assert_eq!((account.has(), account.draw(5)), (0, 0));
        account.put(900);
        account.set_cap(100);
        assert_eq!((account.has(), account.cap()), (100, 100));
    }
}
