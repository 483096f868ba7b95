//! Locks on ranges of volumes whose mapping is changing.
//!
//! A task that releases, evicts or deletes a range holds it; faults in it wait. Answering a fault
//! has no await and needs no lock. [`OwnerSide`] defines which steps may follow each other, and the
//! protocol's model drives it too. This module adds the waiting.

use crate::changed::Signal;
use crate::mapping::ALL_EXTENTS;
use forebay_xlate::ExtentRange;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::GrantOf;
use forebay_xlate::grants::Grant;
use forebay_xlate::grants::GrantTable;
use forebay_xlate::owner_side::OwnerSide;
use forebay_xlate::owner_side::Refused;
use forebay_xlate::owner_side::TakingId;
use std::cell::RefCell;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(crate) struct Locks {
    pub(crate) protocol: RefCell<OwnerSide>,
    /// Volumes that tasks want as a whole, and the number of these tasks.
    wanted: RefCell<BTreeMap<VolumeId, u32>>,
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
            wanted: RefCell::default(),
            changed: Signal::new(),
        }
    }

    /// None if another task holds a part of the range, or waits for the whole volume.
    pub(crate) fn try_hold(&self, volume: VolumeId, range: ExtentRange) -> Option<LockGuard<'_>> {
        if self.wanted.borrow().contains_key(&volume) {
            return None;
        }
        self.hold_now(volume, range)
    }

    fn hold_now(&self, volume: VolumeId, range: ExtentRange) -> Option<LockGuard<'_>> {
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

    /// Holds a whole volume. Meanwhile no other task gets a part of it, as a stream of them could
    /// last for ever.
    pub(crate) async fn hold_volume(&self, volume: VolumeId) -> LockGuard<'_> {
        let _wanted = self.want(volume);
        let hold = || self.hold_now(volume, ALL_EXTENTS);
        self.changed.until(hold).await
    }

    fn want(&self, volume: VolumeId) -> WantGuard<'_> {
        *self.wanted.borrow_mut().entry(volume).or_default() += 1;
        WantGuard {
            locks: self,
            volume,
        }
    }

    /// Whether no task holds the extent, or waits for its whole volume.
    pub(crate) fn is_free(&self, volume: VolumeId, extent: u64) -> bool {
        !self.wanted.borrow().contains_key(&volume)
            && self.protocol.borrow().free_run(volume, extent, 1) > 0
    }

    pub(crate) fn enter_grant(
        &self,
        table: &mut GrantTable,
        grant: Grant,
        epoch: u16,
    ) -> Result<GrantOf, Refused> {
        self.protocol.borrow().grant(table, grant, epoch)
    }

    pub(crate) async fn wait_free(&self, volume: VolumeId, extent: u64) {
        let free = || self.is_free(volume, extent).then_some(());
        self.changed.until(free).await;
    }
}

/// A task waits for the whole volume.
struct WantGuard<'a> {
    locks: &'a Locks,
    volume: VolumeId,
}

impl Drop for WantGuard<'_> {
    fn drop(&mut self) {
        let mut wanted = self.locks.wanted.borrow_mut();
        if let Some(waiting) = wanted.get_mut(&self.volume) {
            *waiting -= 1;
            if *waiting == 0 {
                wanted.remove(&self.volume);
            }
        }
        self.locks.changed.raise();
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

    #[tokio::test]
    async fn nothing_gets_in_before_a_task_that_wants_the_volume() {
        let locks = Locks::new();
        let v = VolumeId(1);
        let one = locks.try_hold(v, ExtentRange::new(10, 5)).unwrap();
        let mut whole = Box::pin(locks.hold_volume(v));
        tokio::select! {
            biased;
            _ = &mut whole => panic!("a part is held"),
            () = std::future::ready(()) => {}
        }
        assert!(locks.try_hold(v, ExtentRange::new(0, 1)).is_none());
        assert!(!locks.is_free(v, 0) && locks.is_free(VolumeId(2), 0));
        drop(one);
        drop(whole.await);
        assert!(locks.is_free(v, 0));
    }
}
