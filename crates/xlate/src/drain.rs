//! The second half of a revoke, in each reactor: wait for the slices that began under the old
//! words.
//!
//! A revoke counts the overlapping slices in flight; when they have ended, the reactor answers.
//! Later slices see cleared words, or the new epoch. A freeze counts only writes. The array is fixed,
//! as this is on the I/O path.

use crate::types::{ExtentRange, VolumeId};

/// The most revokes that a reactor drains at once.
pub const MAX_DRAINS: usize = 64;

/// A slice in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SliceSpan {
    /// Its volume.
    pub volume: VolumeId,
    /// Its logical extents.
    pub range: ExtentRange,
    /// Whether it changes the device.
    pub write: bool,
    /// Its number, from [`Drains::begin`].
    pub number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Drain {
    revoke: u64,
    volume: VolumeId,
    range: ExtentRange,
    writes_only: bool,
    /// Slices numbered below this began before the revoke.
    before: u64,
    remaining: u64,
}

impl Drain {
    fn counts(&self, s: &SliceSpan) -> bool {
        s.number < self.before
            && s.volume == self.volume
            && self.range.overlaps(&s.range)
            && (s.write || !self.writes_only)
    }
}

/// A reactor's open revokes, `N` at most.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Drains<const N: usize = MAX_DRAINS> {
    next_number: u64,
    active: [Option<Drain>; N],
    active_count: usize,
}

impl<const N: usize> Default for Drains<N> {
    fn default() -> Self {
        Self {
            next_number: 0,
            active: [None; N],
            active_count: 0,
        }
    }
}

impl<const N: usize> Drains<N> {
    /// Numbers a new slice.
    #[inline]
    pub fn begin(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    /// Slices begun so far.
    #[inline]
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.next_number
    }

    /// Takes a revoke after its words are cleared, or a freeze (`writes_only`) after its epoch is
    /// set; `in_flight` is this reactor's. True: answer at once.
    ///
    /// # Panics
    /// If more than `N` are active, which the sender must prevent.
    pub fn post(
        &mut self,
        revoke: u64,
        volume: VolumeId,
        range: ExtentRange,
        writes_only: bool,
        in_flight: impl Iterator<Item = SliceSpan>,
    ) -> bool {
        let mut drain = Drain {
            revoke,
            volume,
            range,
            writes_only,
            before: self.next_number,
            remaining: 0,
        };
        drain.remaining = in_flight.filter(|s| drain.counts(s)).count() as u64;
        if drain.remaining == 0 {
            return true;
        }
        let slot = self
            .active
            .iter_mut()
            .find(|d| d.is_none())
            .expect("sender bounds revokes");
        *slot = Some(drain);
        self.active_count += 1;
        false
    }

    /// Ends a slice; calls `done` for each drained revoke.
    #[inline]
    pub fn ended(&mut self, slice: &SliceSpan, mut done: impl FnMut(u64)) {
        if self.active_count == 0 {
            return;
        }
        for slot in &mut self.active {
            let Some(drain) = slot else { continue };
            if drain.counts(slice) {
                drain.remaining -= 1;
                if drain.remaining == 0 {
                    done(drain.revoke);
                    *slot = None;
                    self.active_count -= 1;
                }
            }
        }
    }

    /// Drops a revoke, which is never answered.
    pub fn abandon(&mut self, revoke: u64) {
        for slot in &mut self.active {
            if slot.is_some_and(|drain| drain.revoke == revoke) {
                *slot = None;
                self.active_count -= 1;
            }
        }
    }

    /// Whether no revoke waits.
    pub fn is_empty(&self) -> bool {
        self.active_count == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: VolumeId = VolumeId(7);

    fn slice<const N: usize>(d: &mut Drains<N>, extent: u64, write: bool) -> SliceSpan {
        SliceSpan {
            volume: V,
            range: ExtentRange::new(extent, 1),
            write,
            number: d.begin(),
        }
    }

    #[test]
    fn waits_only_for_what_overlaps_and_began_before() {
        let mut d = <Drains>::default();
        let a = slice(&mut d, 4, true);
        let b = slice(&mut d, 5, false);
        let c = slice(&mut d, 9, true);
        let other = SliceSpan {
            volume: VolumeId(8),
            ..a
        };
        assert!(!d.post(
            1,
            V,
            ExtentRange::new(4, 2),
            false,
            [a, b, c, other].into_iter()
        ));
        let later = slice(&mut d, 4, true);
        let mut done = vec![];
        d.ended(&later, |r| done.push(r));
        d.ended(&c, |r| done.push(r));
        d.ended(&other, |r| done.push(r));
        d.ended(&a, |r| done.push(r));
        assert!(done.is_empty());
        d.ended(&b, |r| done.push(r));
        assert_eq!(done, [1]);
        assert!(d.is_empty());
    }

    #[test]
    fn a_freeze_leaves_reads_alone() {
        let mut d = <Drains>::default();
        let read = slice(&mut d, 1, false);
        assert!(d.post(1, V, ExtentRange::new(0, 10), true, [read].into_iter()));
        let write = slice(&mut d, 1, true);
        assert!(!d.post(
            2,
            V,
            ExtentRange::new(0, 10),
            true,
            [read, write].into_iter()
        ));
        let mut done = vec![];
        d.ended(&read, |r| done.push(r));
        assert!(done.is_empty());
        d.ended(&write, |r| done.push(r));
        assert_eq!(done, [2]);
    }

    #[test]
    fn a_drain_that_is_given_up_makes_room_and_never_answers() {
        let mut d = Drains::<1>::default();
        let hung = slice(&mut d, 1, true);
        let range = ExtentRange::new(1, 1);
        assert!(!d.post(1, V, range, false, [hung].into_iter()));
        d.abandon(1);
        d.abandon(1);
        assert!(d.is_empty());
        assert!(!d.post(1, V, range, false, [hung].into_iter()));
        let mut done = vec![];
        d.ended(&hung, |r| done.push(r));
        assert_eq!(done, [1]);
    }
}
