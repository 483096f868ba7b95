//! Ranges of volumes whose mapping is being changed.
//!
//! Purpose: while a range is released, evicted or deleted, no fault is answered from it.
//! Design: who changes a range holds it; faults look before they answer and wait until it is free.
//! Answering a fault is one step without a wait in it, so faults need no lock of their own.
//! Not here: what is done to a range.

use std::cell::{Cell, RefCell};

use forebay_xlate::{ExtentRange, VolumeId};

use crate::signal::Signal;

/// The ranges that are held.
#[derive(Debug)]
pub(crate) struct Locks {
    held: RefCell<Vec<(u64, VolumeId, ExtentRange)>>,
    next: Cell<u64>,
    changed: Signal,
}

/// A held range; free again when dropped.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    locks: &'a Locks,
    number: u64,
}

impl Locks {
    pub(crate) fn new() -> Self {
        Self {
            held: RefCell::new(Vec::new()),
            next: Cell::new(0),
            changed: Signal::new(),
        }
    }

    fn overlaps(&self, volume: VolumeId, range: ExtentRange) -> bool {
        self.held
            .borrow()
            .iter()
            .any(|(_, v, r)| *v == volume && r.overlaps(&range))
    }

    /// Holds the range if nobody has a part of it.
    pub(crate) fn try_hold(&self, volume: VolumeId, range: ExtentRange) -> Option<Held<'_>> {
        if self.overlaps(volume, range) {
            return None;
        }
        let number = self.next.get();
        self.next.set(number + 1);
        self.held.borrow_mut().push((number, volume, range));
        Some(Held {
            locks: self,
            number,
        })
    }

    /// Holds the range once nobody has a part of it.
    pub(crate) async fn hold(&self, volume: VolumeId, range: ExtentRange) -> Held<'_> {
        self.changed.until(|| self.try_hold(volume, range)).await
    }

    /// How many extents from `first` on are free, up to `limit`; 0 when `first` itself is held.
    pub(crate) fn free_run(&self, volume: VolumeId, first: u64, limit: u64) -> u64 {
        let wanted = ExtentRange::new(first, limit);
        self.held
            .borrow()
            .iter()
            .filter(|(_, v, r)| *v == volume && r.overlaps(&wanted))
            .map(|(_, _, r)| r.first.saturating_sub(first))
            .min()
            .unwrap_or(limit)
    }

    /// The parts of a range that are free.
    pub(crate) fn free_parts(&self, volume: VolumeId, range: ExtentRange) -> Vec<ExtentRange> {
        let held = self.held.borrow();
        let mut taken: Vec<ExtentRange> = held
            .iter()
            .filter(|(_, v, r)| *v == volume && r.overlaps(&range))
            .map(|(_, _, r)| *r)
            .collect();
        taken.sort_unstable();
        let (mut at, mut parts) = (range.first, Vec::new());
        for one in taken {
            if at < one.first {
                parts.push(ExtentRange::new(at, one.first - at));
            }
            at = at.max(one.end());
        }
        if at < range.end() {
            parts.push(ExtentRange::new(at, range.end() - at));
        }
        parts
    }

    /// Waits until the extent is free.
    pub(crate) async fn wait_free(&self, volume: VolumeId, extent: u64) {
        let free = || (self.free_run(volume, extent, 1) > 0).then_some(());
        self.changed.until(free).await;
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.locks
            .held
            .borrow_mut()
            .retain(|(number, ..)| *number != self.number);
        self.locks.changed.raise();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_range_stops_at_its_ends() {
        let locks = Locks::new();
        let v = VolumeId(1);
        let held = locks.try_hold(v, ExtentRange::new(10, 5)).unwrap();
        assert!(locks.try_hold(v, ExtentRange::new(14, 1)).is_none());
        assert_eq!(locks.free_run(v, 0, 64), 10);
        assert_eq!(locks.free_run(v, 10, 64), 0);
        assert_eq!(locks.free_run(v, 14, 1), 0);
        assert_eq!(locks.free_run(v, 15, 64), 64);
        assert_eq!(locks.free_run(VolumeId(2), 10, 64), 64);
        let parts = locks.free_parts(v, ExtentRange::new(8, 10));
        assert_eq!(parts, [ExtentRange::new(8, 2), ExtentRange::new(15, 3)]);
        assert_eq!(locks.free_parts(v, ExtentRange::new(11, 2)), []);
        drop(held);
        assert_eq!(locks.free_run(v, 10, 64), 64);
    }
}
