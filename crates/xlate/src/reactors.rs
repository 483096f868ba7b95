//! A set of reactors in one word.

use crate::boundary::region::MAX_REACTORS;

/// Reactors by number, below [`MAX_REACTORS`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct ReactorSet(u64);

const _: () = assert!(MAX_REACTORS <= 64);

impl ReactorSet {
    /// The first `count`.
    pub const fn first(count: usize) -> Self {
        Self(if count >= 64 {
            u64::MAX
        } else {
            (1 << count) - 1
        })
    }

    /// Only this one.
    pub const fn one(reactor: usize) -> Self {
        Self(1 << (reactor % 64))
    }

    /// Adds one.
    pub fn insert(&mut self, reactor: usize) {
        self.0 |= Self::one(reactor).0;
    }

    /// Removes one.
    pub fn remove(&mut self, reactor: usize) {
        self.0 &= !Self::one(reactor).0;
    }

    /// The union.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The reactors in order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |r| self.0 & 1 << r != 0)
    }
}
