//! How long operations wait at devices: what their costs are corrected by.
//!
//! **Design.** Of each device and kind (reads, writes) one operation at a time is *timed*. In a turn two that it began are looked
//! at: the first, and any other, so that whoever is never the first is found too; and whose that
//! is says who begins how much. They are found by their places, once a turn, so nothing is added to an I/O's path; and the clock
//! is the turns' own.
//! As that is coarse, two times are kept. *At most* it took from the begin of the turn that submitted it to the turn that
//! saw its end: the least of those, by device, kind and size, is what such a one takes with nobody before it, and ages by a
//! thousandth a second (as BBR knows a path's round trip). *At least* it took from the next turn on, less the last turn
//! before its end was seen, as far as that had something else to do: so a reactor that is short of the processor does not
//! take its devices for slow. What that is above twice the least, it *waited*. Of a window the least counts (as with CoDel): a queue
//! that stands, not one that a batch or a large neighbour leaves behind for a moment.
//!
//! There is one correction for all devices, and it follows those that are well. A device is *slow* if its last operation waited
//! longer than is aimed at, or the one under way has. While any other is in use, a slow one has no say: it neither makes
//! costs dear nor holds a correction where it is. If all that are in use are slow, they are the resource, and the least counts. One that
//! comes into use takes dearness away at once. For less than that costs are taken only if devices that have half of what begins
//! are quick, so that a few operations on an idle one do not hide that another is full. A device is in use for a second after the last one
//! that was timed; one that hangs so long is given up, and its device with it.
//!
//! What waits for its budget is not at a device yet, and not in this. While the timed one is under way, the
//! correction stays as it is: where all are slow, it moves at their pace.
//!
//! What other reactors carry out is not timed: how long it waits for their turns says nothing of a device. But it counts as begun, or a
//! device would seem to have little to do because others help. Nothing is lost by that, whoever is helped: corrections are of
//! a reactor's resources, and nobody has costs of their own; home keeps as much of a queue as it hands to anybody, so of each
//! device and kind that is helped with it has some to time, which stand in the same queue as the others'. Nor is the helpers' processor time measured: all of an operation is
//! charged at home, as calibrated, and what could not be done of what home gave out stays in its line, which is what makes its processor
//! dear. A helper gives what its own tenants left, a turn's part at a time, and nothing while they have work.
//!
//! **Not here:** what follows from it ([`forebay_burst::estimator`]), what devices end at once: those are taken for well, and in use as
//! long as they are there; what they take is the processor's time, which has a correction of its own.

#[cfg(test)]
mod tests;

use super::super::parked::NONE;
use super::super::{Core, ServedDevice, Slice, TIMED};
use forebay_burst::scheduler::Scheduler;
use forebay_burst::units::Resource;
use forebay_device::OpKind;

/// What is timed, in the order of [`kind_of`].
const RESOURCES: [Resource; 2] = [Resource::DeviceRead, Resource::DeviceWrite];
const KINDS: usize = RESOURCES.len();
/// Sizes that are told apart: up to 4 KiB, and twice as much each.
const SIZES: usize = 9;
const DEVICES: usize = 256;
/// How often the least times grow, by a 1024th.
const AGE_NS: u64 = 1_000_000_000;
/// An operation that takes so long says nothing of costs; nor does a device of which none was timed for so long.
const GIVEN_UP_NS: u64 = 1_000_000_000;
/// In [`Timed::begun`], one that was seen; a 16th of all is forgotten in a window.
const ONE_BEGUN: u32 = 256;
/// In the place of a number of [`Delays::timed`].
const NOBODY: u16 = u16::MAX;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Delays {
    /// By device and kind.
    timed: Box<[Timed]>,
    /// Which of them are in use.
    in_use: Vec<u16>,
    /// Those whose operation began in the last turn.
    new: [u16; 2],
    /// Where slices go that begin, unless others end before: the first, the one before that which is looked at,
    /// and that one, unless it is the first: so many are begun before it.
    next: [u32; 3],
    before: usize,
    /// How many places were free then, and how many slices had been numbered.
    free: usize,
    numbered: u64,
    /// So many began in a turn lately, in 256ths.
    most: usize,
    random: u32,
    /// Nobody waits for one of the devices.
    some_at_once: bool,
    turn_ns: u64,
    /// How long the turn before this one was at something.
    took_ns: u64,
    was_idle: bool,
    aged_ns: u64,
}

/// Of a device and kind.
#[derive(Clone, Copy, Debug)]
struct Timed {
    /// The place of the slice, or [`NONE`].
    slice: u32,
    size: u8,
    in_use: bool,
    /// It came into use in this window.
    came: bool,
    /// Of those that begin, how many were seen lately.
    begun: u32,
    /// The turn that submitted it.
    turn_ns: u64,
    /// The next one; 0: not yet.
    after_ns: u64,
    /// When one was timed last: its begin, or its end.
    seen_ns: u64,
    /// The least that one of them waited in this window.
    waited_ns: Option<u64>,
    /// The same of the last window in which one did.
    known_ns: Option<u64>,
    /// The least time, by size, ns; of what was not seen, the most there is.
    least_ns: [u32; SIZES],
}

const NOTHING: Timed = Timed {
    slice: NONE,
    size: 0,
    in_use: false,
    came: false,
    begun: 0,
    turn_ns: 0,
    after_ns: 0,
    seen_ns: 0,
    waited_ns: None,
    known_ns: None,
    least_ns: [u32::MAX; SIZES],
};

impl Timed {
    /// How long it waited, if it ends now.
    fn waited_by(&self, now_ns: u64, took_ns: u64) -> u64 {
        let at_least = match self.after_ns {
            0 => 0,
            after_ns => now_ns.saturating_sub(after_ns + took_ns),
        };
        at_least.saturating_sub(2 * u64::from(self.least_ns[usize::from(self.size)]))
    }

    /// Nothing is known of what it waits for.
    fn forget(&mut self) {
        *self = Self {
            least_ns: self.least_ns,
            ..NOTHING
        };
    }
}

/// What devices say of a window, those that are well or those that are slow.
#[derive(Clone, Copy, Default)]
struct Said {
    any: bool,
    under_way: bool,
    waited_ns: Option<u64>,
}

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

/// Whose it is, in [`Delays::timed`]; nobody's, if nothing is known of such.
fn number_of(slice: &Slice) -> u16 {
    match kind_of(slice) {
        Some(kind) => (usize::from(slice.device) * KINDS + kind) as u16,
        None => NOBODY,
    }
}

impl Delays {
    pub(super) fn new() -> Self {
        Self {
            timed: vec![NOTHING; DEVICES * KINDS].into(),
            in_use: Vec::with_capacity(DEVICES * KINDS),
            new: [NOBODY; 2],
            next: [NONE; 3],
            before: 0,
            free: 0,
            numbered: u64::MAX,
            most: 0,
            random: 0,
            some_at_once: false,
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
        if self.new != [NOBODY; 2] {
            self.begin_after(now_ns);
        }
        self.turn_ns = now_ns;
    }

    /// This is the next turn of those that were timed in the last.
    #[inline(never)]
    fn begin_after(&mut self, now_ns: u64) {
        for new in std::mem::replace(&mut self.new, [NOBODY; 2]) {
            if let Some(timed) = self.timed.get_mut(usize::from(new)) {
                timed.after_ns = now_ns;
            }
        }
    }

    /// There was nothing to do in this turn.
    #[inline]
    pub(super) fn idle(&mut self) {
        self.was_idle = true;
    }

    /// Whether the same slices are there as when places were noted last: then so are the places.
    #[inline]
    fn is_noted(&self, numbered: u64, free: usize) -> bool {
        numbered == self.numbered && free == self.free
    }

    /// Slices that begin go to the last of these places; so many have been numbered.
    #[inline]
    fn note(&mut self, free: &[u32], numbered: u64) {
        (self.free, self.numbered) = (free.len(), numbered);
        self.next = match self.before {
            0 => [free.last().copied().unwrap_or(NONE), NONE, NONE],
            before => [1, before, before + 1].map(|back| {
                let at = free.len().checked_sub(back);
                at.map_or(NONE, |at| free[at])
            }),
        };
    }

    /// A turn ends, with so many places free: looks at what it began.
    #[inline]
    fn choose(&mut self, slices: &mut [Option<Slice>], free: usize) {
        let [first, before, other] = std::mem::replace(&mut self.next, [NONE; 3]);
        if matches!(slices.get(first as usize), Some(Some(_))) {
            self.look(
                slices,
                [first, before, other],
                self.free.saturating_sub(free),
            );
        }
    }

    fn look(&mut self, slices: &mut [Option<Slice>], next: [u32; 3], begun: usize) {
        let [first, before, other] = next;
        let begun = begun.max(1);
        let numbers = [before, other].map(|place| {
            let slice = slices.get(place as usize).and_then(Option::as_ref);
            slice.map(number_of)
        });
        let mut seen = self.time(slices, first, 0);
        if let [before, Some(number)] = numbers {
            // Behind another of its device it would wait for its own batch.
            if number != seen && before != Some(number) {
                self.time(slices, other, 1);
            }
            seen = number;
        }
        if let Some(timed) = self.timed.get_mut(usize::from(seen)) {
            timed.begun = timed.begun.saturating_add(begun as u32 * ONE_BEGUN);
        }
        // Of all that turns begin, any: at random, as turns may follow a pattern.
        self.most = (self.most - (self.most >> 8)).max(begun << 8);
        self.random = (self.random.wrapping_mul(0x2C92_77B5)).wrapping_add(0xAC56_4B05);
        self.before = ((u64::from(self.random) * self.most as u64) >> 40) as usize;
    }

    /// Times a slice that has just begun, unless one of its kind and device is, or another reactor carries it out. Says whose it is.
    fn time(&mut self, slices: &mut [Option<Slice>], place: u32, at: usize) -> u16 {
        let Some(Some(slice)) = slices.get_mut(place as usize) else {
            return NOBODY;
        };
        let number = number_of(slice);
        let Some(timed) = self.timed.get_mut(usize::from(number)) else {
            return NOBODY;
        };
        if timed.slice != NONE || slice.away {
            return number;
        }
        slice.marks |= TIMED;
        timed.slice = place;
        timed.size = size_of(slice) as u8;
        (timed.turn_ns, timed.after_ns) = (self.turn_ns, 0);
        timed.seen_ns = self.turn_ns;
        if !std::mem::replace(&mut timed.in_use, true) {
            timed.came = true;
            self.in_use.push(number);
        }
        self.new[at] = number;
        number
    }

    /// A timed slice has ended; false: it failed.
    fn ended(&mut self, place: u32, number: u16, good: bool, now_ns: u64) {
        let took_ns = self.took_ns;
        let timed = self.timed.get_mut(usize::from(number));
        let Some(timed) = timed.filter(|timed| timed.slice == place) else {
            // It was given up.
            return;
        };
        timed.slice = NONE;
        timed.seen_ns = now_ns;
        if !good {
            return;
        }
        let at_most = now_ns.saturating_sub(timed.turn_ns);
        let least = &mut timed.least_ns[usize::from(timed.size)];
        *least = (*least).min(u32::try_from(at_most).unwrap_or(u32::MAX));
        let waited_ns = timed.waited_by(now_ns, took_ns);
        let least_ns = timed.waited_ns.unwrap_or(u64::MAX);
        timed.waited_ns = Some(least_ns.min(waited_ns));
    }

    /// A window has ended.
    pub(super) fn tell(&mut self, scheduler: &mut Scheduler, now_ns: u64) {
        let timed = &mut self.timed;
        self.in_use.retain(|number| {
            let timed = &mut timed[usize::from(*number)];
            let since_ns = match timed.slice {
                NONE => timed.seen_ns,
                _ => timed.turn_ns,
            };
            let keep = now_ns.saturating_sub(since_ns) < GIVEN_UP_NS;
            if !keep {
                timed.forget();
            }
            keep
        });
        for kind in 0..KINDS {
            self.tell_kind(scheduler, kind, now_ns);
        }
        if now_ns.saturating_sub(self.aged_ns) >= AGE_NS {
            self.aged_ns = now_ns;
            for least in self.timed.iter_mut().flat_map(|timed| &mut timed.least_ns) {
                *least = least.saturating_add(*least >> 10);
            }
        }
    }

    fn tell_kind(&mut self, scheduler: &mut Scheduler, kind: usize, now_ns: u64) {
        let resource = RESOURCES[kind];
        let target_ns = scheduler.params().target_delay_ns;
        let (mut well, mut slow) = (Said::default(), Said::default());
        well.any = self.some_at_once;
        let (mut begun, mut begun_at_quick) = (0u64, 0u64);
        for number in &self.in_use {
            let timed = &mut self.timed[usize::from(*number)];
            if usize::from(*number) % KINDS != kind {
                continue;
            }
            let waited_ns = timed.waited_ns.take();
            timed.known_ns = waited_ns.or(timed.known_ns);
            let under_way = timed.slice != NONE;
            let is_slow = timed.known_ns.is_some_and(|ns| ns > target_ns)
                || under_way && timed.waited_by(now_ns, self.took_ns) > target_ns;
            let said = if is_slow { &mut slow } else { &mut well };
            said.any = true;
            said.under_way |= under_way;
            said.waited_ns = [said.waited_ns, waited_ns].into_iter().flatten().min();
            if std::mem::take(&mut timed.came) && !is_slow {
                scheduler.relieve(resource);
            }
            begun += u64::from(timed.begun);
            if !is_slow && timed.known_ns.is_some_and(|ns| ns < target_ns / 4) {
                begun_at_quick += u64::from(timed.begun);
            }
            timed.begun -= timed.begun >> 4;
        }
        let said = if well.any { well } else { slow };
        match said.waited_ns {
            // Neither dear nor cheap.
            Some(ns) if well.any && 2 * begun_at_quick < begun => {
                scheduler.observe(resource, ns.max(target_ns / 4), 1);
            }
            Some(ns) => scheduler.observe(resource, ns, 1),
            None if said.under_way => scheduler.hold(resource),
            // Nobody waits for what ends at once: what is calibrated of it is too much, if that is what holds anybody back.
            None if self.some_at_once && self.in_use.is_empty() => {
                scheduler.observe(resource, 0, 1)
            }
            None => {}
        }
    }
}

impl Core {
    /// What has ended is taken: the places that are free next are where the next slices go.
    #[inline]
    pub(in crate::core) fn note_next_slice(&mut self) {
        if let Some(admission) = &mut self.admission {
            (admission.delays).note(&self.free_slices, self.drains.begun());
        }
    }

    /// A turn ends: some of what it began are timed, unless others are.
    #[inline]
    pub(in crate::core) fn time_some(&mut self) {
        let Some(admission) = &mut self.admission else {
            return;
        };
        let free = self.free_slices.len();
        if !admission.delays.is_noted(self.drains.begun(), free) {
            admission.delays.choose(&mut self.slices, free);
            self.note_next_slice();
        }
    }

    /// A timed slice has ended, which was in this place.
    pub(in crate::core) fn timed_ended(&mut self, index: usize, slice: &Slice, good: bool) {
        if let Some(admission) = &mut self.admission {
            let number = number_of(slice);
            (admission.delays).ended(index as u32, number, good, self.now_ns);
        }
    }

    /// Another device may be there now.
    pub(in crate::core) fn forget_delays(&mut self, device: usize) {
        if let Some(admission) = &mut self.admission {
            let delays = &mut admission.delays;
            delays.timed[device * KINDS..][..KINDS].fill(NOTHING);
            let is_other = |number: &u16| usize::from(*number) / KINDS != device;
            delays.in_use.retain(is_other);
        }
        self.note_devices();
    }

    /// Which devices there are.
    pub(super) fn note_devices(&mut self) {
        if let Some(admission) = &mut self.admission {
            let ends_at_once = |served: &ServedDevice| served.device.ends_at_once();
            admission.delays.some_at_once = self.devices.iter().flatten().any(ends_at_once);
        }
    }
}
