//! Locks on ranges of volumes whose mapping is changing.
//!
//! A task that releases, evicts or deletes a range holds it; faults in it wait. Answering a fault
//! has no await and needs no lock. [`OwnerSide`] defines which steps may follow each other, and the
//! protocol's model drives it too. This module adds the waiting.

use crate::changed::Signal;
use forebay_xlate::ExtentRange;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::GrantOf;
use forebay_xlate::grants::Grant;
use forebay_xlate::grants::GrantTable;
use forebay_xlate::owner_side::OwnerSide;
use forebay_xlate::owner_side::Refused;
use forebay_xlate::owner_side::TakingId;
use std::cell::RefCell;

#[derive(Debug)]
pub(crate) struct Locks {
    pub(crate) protocol: RefCell<OwnerSide>,
    changed: Signal,
}

/// A held range; freed on drop.
#[derive(Debug)]
pub(crate) struct LockGuard<'a> {
    locks: &'a Locks,
    pub(crate) id: TakingId,
    pub(crate) volume: VolumeId,
    pub(crate) range: ExtentRange,
}

impl Locks {
    pub(crate) fn new() -> Self {
        Self {
            protocol: RefCell::default(),
            changed: Signal::new(),
        }
    }

    /// None if another task holds a part of the range.
    pub(crate) fn try_hold(&self, volume: VolumeId, range: ExtentRange) -> Option<LockGuard<'_>> {
        let id = self.protocol.borrow_mut().begin_take_back(volume, range)?;
        Some(LockGuard {
            locks: self,
            id,
            volume,
            range,
        })
    }

    pub(crate) async fn hold(&self, volume: VolumeId, range: ExtentRange) -> LockGuard<'_> {
        self.changed.until(|| self.try_hold(volume, range)).await
    }

    pub(crate) fn is_free(&self, volume: VolumeId, extent: u64) -> bool {
        self.protocol.borrow().free_run(volume, extent, 1) > 0
    }

    pub(crate) fn enter_grant(
        &self,
        table: &mut GrantTable,
        grant: Grant,
    ) -> Result<GrantOf, Refused> {
        self.protocol.borrow().grant(table, grant)
    }

    pub(crate) async fn wait_free(&self, volume: VolumeId, extent: u64) {
        let free = || self.is_free(volume, extent).then_some(());
        self.changed.until(free).await;
    }
}

impl Drop for LockGuard<'_> {
    fn drop(&mut self) {
        self.locks.protocol.borrow_mut().let_go(self.id);
        self.locks.changed.raise();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_range_is_free_again_when_it_is_dropped() {
        let locks = Locks::new();
        let v = VolumeId(1);
        let held = locks.try_hold(v, ExtentRange::new(10, 5)).unwrap();
        assert!(locks.try_hold(v, ExtentRange::new(14, 1)).is_none());
        assert!(locks.is_free(v, 9) && !locks.is_free(v, 14) && locks.is_free(v, 15));
        drop(held);
        assert!(locks.is_free(v, 14));
    }
}
