//! How long operations wait at devices: what their costs are corrected by.
//!
//! **Design.** Of each kind (reads, writes) one operation at a time is *timed*: the first that begins in a turn, if none
//! is. It is found by its place, once a turn, so nothing is added to an I/O's path; and the clock is the turns' own.
//! As that is coarse, two times are kept. *At most* it took from the begin of the turn that submitted it to the turn that
//! saw its end: the least of those, by device, kind and size, is what such a one takes with nobody before it, and ages by a
//! thousandth a second (as BBR knows a path's round trip). *At least* it took from the next turn on, less the last turn
//! before its end was seen, as far as that had something else to do: so a reactor that is short of the processor does not
//! take its devices for slow. What that is above twice the least, it *waited*. Of a window the least counts (as with CoDel): a queue
//! that stands, not one that a batch or a large neighbour leaves behind for a moment.
//!
//! What waits for its budget is not at a device yet, and not in this. While the timed one is under way, the
//! correction stays as it is: a slow device's moves at that device's pace. One that hangs is given up.
//!
//! **Not here:** what follows from it ([`forebay_burst::estimator`]). What other reactors carry out is not timed, nor
//! what devices end at once.

use super::super::parked::NONE;
use super::super::{Core, Slice, TIMED};
use forebay_burst::scheduler::Scheduler;
use forebay_burst::units::Resource;
use forebay_device::OpKind;

/// What is timed, in the order of [`kind_of`].
const RESOURCES: [Resource; 2] = [Resource::DeviceRead, Resource::DeviceWrite];
/// Sizes that are told apart: up to 4 KiB, and twice as much each.
const SIZES: usize = 9;
const DEVICES: usize = 256;
/// How often the least times grow, by a 1024th.
const AGE_NS: u64 = 1_000_000_000;
/// An operation that takes so long says nothing of costs.
const GIVEN_UP_NS: u64 = 1_000_000_000;

/// Of a device, by kind and size, ns.
type Least = [[u32; SIZES]; RESOURCES.len()];
const UNSEEN: Least = [[u32::MAX; SIZES]; RESOURCES.len()];

/// See the module's text.
#[derive(Debug)]
pub(super) struct Delays {
    /// The least time, by device; of what was not seen, the most there is.
    least_ns: Box<[Least]>,
    timed: [Timed; RESOURCES.len()],
    /// Where the next slice goes that begins, unless others end before.
    next: u32,
    turn_ns: u64,
    /// How long the turn before this one was at something.
    took_ns: u64,
    was_idle: bool,
    aged_ns: u64,
}

/// Of a kind.
#[derive(Clone, Copy, Debug)]
struct Timed {
    /// The place of the slice, or [`NONE`].
    slice: u32,
    device: u8,
    size: u8,
    /// The turn that submitted it.
    turn_ns: u64,
    /// The next one; 0: not yet.
    after_ns: u64,
    /// The least that one of them waited in this window.
    waited_ns: Option<u64>,
}

const NOTHING: Timed = Timed {
    slice: NONE,
    device: 0,
    size: 0,
    turn_ns: 0,
    after_ns: 0,
    waited_ns: None,
};

fn kind_of(slice: &Slice) -> Option<usize> {
    match slice.op.kind() {
        OpKind::Read => Some(0),
        OpKind::Write => Some(1),
        OpKind::Flush | OpKind::WriteZeroes | OpKind::Punch => None,
    }
}

fn size_of(slice: &Slice) -> usize {
    let blocks = slice.op.len_bytes().div_ceil(4096).max(1);
    (blocks.next_power_of_two().ilog2() as usize).min(SIZES - 1)
}

impl Delays {
    pub(super) fn new() -> Self {
        Self {
            least_ns: vec![UNSEEN; DEVICES].into(),
            timed: [NOTHING; RESOURCES.len()],
            next: NONE,
            turn_ns: 0,
            took_ns: 0,
            was_idle: false,
            aged_ns: 0,
        }
    }

    /// A turn begins.
    #[inline]
    pub(super) fn turn(&mut self, now_ns: u64) {
        self.took_ns = match std::mem::take(&mut self.was_idle) {
            true => 0,
            false => now_ns.saturating_sub(self.turn_ns),
        };
        for timed in &mut self.timed {
            if timed.after_ns == 0 {
                timed.after_ns = now_ns;
            }
        }
        self.turn_ns = now_ns;
    }

    /// There was nothing to do in this turn.
    #[inline]
    pub(super) fn idle(&mut self) {
        self.was_idle = true;
    }

    /// A turn ends: times what it began first.
    #[inline]
    fn choose(&mut self, slices: &mut [Option<Slice>]) {
        let next = std::mem::replace(&mut self.next, NONE);
        let Some(Some(slice)) = slices.get_mut(next as usize) else {
            return;
        };
        let Some(kind) = kind_of(slice).filter(|_| !slice.away) else {
            return;
        };
        let timed = &mut self.timed[kind];
        if timed.slice != NONE {
            return;
        }
        slice.marks |= TIMED;
        *timed = Timed {
            slice: next,
            device: slice.device,
            size: size_of(slice) as u8,
            turn_ns: self.turn_ns,
            after_ns: 0,
            waited_ns: timed.waited_ns,
        };
    }

    /// A timed slice has ended; false: it failed.
    fn ended(&mut self, place: u32, good: bool, now_ns: u64) {
        let Some(kind) = self.timed.iter().position(|timed| timed.slice == place) else {
            // It was given up.
            return;
        };
        let timed = &mut self.timed[kind];
        timed.slice = NONE;
        if !good {
            return;
        }
        let least = &mut self.least_ns[usize::from(timed.device)][kind][usize::from(timed.size)];
        let at_most = now_ns.saturating_sub(timed.turn_ns);
        *least = (*least).min(u32::try_from(at_most).unwrap_or(u32::MAX));
        let at_least = match timed.after_ns {
            0 => 0,
            after_ns => now_ns.saturating_sub(after_ns + self.took_ns),
        };
        let waited_ns = at_least.saturating_sub(2 * u64::from(*least));
        timed.waited_ns = Some(
            timed
                .waited_ns
                .map_or(waited_ns, |other| other.min(waited_ns)),
        );
    }

    /// A window has ended.
    pub(super) fn tell(&mut self, scheduler: &mut Scheduler, now_ns: u64) {
        for (timed, resource) in self.timed.iter_mut().zip(RESOURCES) {
            match timed.waited_ns.take() {
                Some(waited_ns) => scheduler.observe(resource, waited_ns, 1),
                None if timed.slice == NONE => {}
                None if now_ns.saturating_sub(timed.turn_ns) < GIVEN_UP_NS => {
                    scheduler.hold(resource);
                }
                None => timed.slice = NONE,
            }
        }
        if now_ns.saturating_sub(self.aged_ns) >= AGE_NS {
            self.aged_ns = now_ns;
            for least in self.least_ns.iter_mut().flatten().flatten() {
                *least = least.saturating_add(*least >> 10);
            }
        }
    }
}

impl Core {
    /// What has ended is taken: the place that is free next is where the next slice goes.
    #[inline]
    pub(in crate::core) fn note_next_slice(&mut self) {
        if let Some(admission) = &mut self.admission {
            admission.delays.next = self.free_slices.last().copied().unwrap_or(NONE);
        }
    }

    /// A turn ends: one of what it began is timed, unless one is.
    #[inline]
    pub(in crate::core) fn time_one(&mut self) {
        if let Some(admission) = &mut self.admission {
            admission.delays.choose(&mut self.slices);
            self.note_next_slice();
        }
    }

    /// A timed slice has ended.
    pub(in crate::core) fn timed_ended(&mut self, index: usize, good: bool) {
        if let Some(admission) = &mut self.admission {
            admission.delays.ended(index as u32, good, self.now_ns);
        }
    }

    /// Another device may be there now.
    pub(in crate::core) fn forget_delays(&mut self, device: usize) {
        if let Some(admission) = &mut self.admission {
            admission.delays.least_ns[device] = UNSEEN;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    /// A read of 4 KiB begins in a turn at `begun`; the next turns are at these times, of which the last sees its end. Before
    /// that, the reactor had something to do, or not.
    fn read(delays: &mut Delays, begun: u64, turns: &[u64], busy: bool, good: bool) {
        delays.idle();
        delays.turn(begun);
        delays.timed[0] = Timed {
            slice: 7,
            turn_ns: begun,
            ..delays.timed[0]
        };
        delays.timed[0].after_ns = 0;
        for at in turns {
            if !busy {
                delays.idle();
            }
            delays.turn(*at);
        }
        delays.ended(7, good, turns[turns.len() - 1]);
    }

    #[test]
    fn what_an_operation_waited_is_what_nothing_else_explains() {
        let mut delays = Delays::new();
        let waited = |delays: &mut Delays| delays.timed[0].waited_ns.take().map(|ns| ns / US);
        // One that is alone says how long it takes.
        read(&mut delays, 1000 * US, &[1080 * US], false, true);
        assert_eq!(waited(&mut delays), Some(0));
        // What failed says nothing.
        read(&mut delays, 1200 * US, &[1210 * US], false, false);
        assert_eq!(waited(&mut delays), None);
        // More than twice that has waited, from the turn after it on.
        let late = [2010 * US, 2400 * US];
        read(&mut delays, 2000 * US, &late, false, true);
        assert_eq!(waited(&mut delays), Some(390 - 160));
        // Not where the reactor could not look.
        read(&mut delays, 2000 * US, &late, true, true);
        assert_eq!(waited(&mut delays), Some(0));
        // Of a window the least counts.
        read(&mut delays, 2000 * US, &late, false, true);
        read(&mut delays, 3000 * US, &[3010 * US, 3900 * US], false, true);
        assert_eq!(waited(&mut delays), Some(390 - 160));
        // Another's end is none of this one's.
        delays.ended(8, true, 4000 * US);
        assert_eq!(waited(&mut delays), None);
    }
}
