//! Credit: unused base that is saved for bursts.
//!
//! Reactors share token buckets without a lock. The scheduler draws before use, so no bucket goes
//! below zero.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A token bucket, of operations (in parts) or bytes.
#[derive(Default, Debug)]
pub struct TokenBucket {
    has: AtomicU64,
    cap: AtomicU64,
}

impl TokenBucket {
    /// Sets the cap; tokens above it are lost.
    pub fn set_cap(&self, cap: u64) {
        self.cap.store(cap, Relaxed);
        let _ = self
            .has
            .fetch_update(Relaxed, Relaxed, |has| Some(has.min(cap)));
    }

    /// The current tokens.
    #[inline]
    #[must_use]
    pub fn has(&self) -> u64 {
        self.has.load(Relaxed)
    }

    /// The most tokens.
    #[must_use]
    pub fn cap(&self) -> u64 {
        self.cap.load(Relaxed)
    }

    /// Adds tokens; returns those above the cap.
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

    /// Takes at most `amount` tokens; returns how many.
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
