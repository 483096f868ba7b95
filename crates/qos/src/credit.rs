//! What a tenant saved of its base.
//!
//! **Design.** Two token buckets, operations and bytes. What of the base is neither used nor saved for the next windows fills them; use
//! above the base is drawn first, so a bucket is never below zero, and what exceeds the cap is lost. Atomic, as several reactors serve one
//! tenant: each step is one exchange, with no lock.
//! **Not here:** how much may be drawn ([`crate::scheduler`]).

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// One bucket: of operations (in parts) or of bytes.
#[derive(Default, Debug)]
pub struct TokenBucket {
    has: AtomicU64,
    cap: AtomicU64,
}

impl TokenBucket {
    /// At most so much from now on; what is above it is lost.
    pub fn set_cap(&self, cap: u64) {
        self.cap.store(cap, Relaxed);
        let _ = self
            .has
            .fetch_update(Relaxed, Relaxed, |has| Some(has.min(cap)));
    }

    /// What is in it.
    #[inline]
    #[must_use]
    pub fn has(&self) -> u64 {
        self.has.load(Relaxed)
    }

    /// What can be in it.
    #[must_use]
    pub fn cap(&self) -> u64 {
        self.cap.load(Relaxed)
    }

    /// Earned. Says what found no room.
    #[inline]
    pub fn put(&self, amount: u64) -> u64 {
        let cap = self.cap();
        if amount == 0 || self.has() >= cap {
            return amount;
        }
        let before = self.has.fetch_update(Relaxed, Relaxed, |has| {
            Some(has.saturating_add(amount).min(cap))
        });
        before.map_or(amount, |had| amount.saturating_sub(cap.saturating_sub(had)))
    }

    /// Drawn, as much as there is of `amount`. Says how much.
    #[inline]
    pub fn draw(&self, amount: u64) -> u64 {
        if amount == 0 || self.has() == 0 {
            return 0;
        }
        let before = self
            .has
            .fetch_update(Relaxed, Relaxed, |has| Some(has.saturating_sub(amount)));
        before.map_or(0, |had| had.min(amount))
    }
}
