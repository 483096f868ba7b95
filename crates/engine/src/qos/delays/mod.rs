//! Measures how long operations wait at devices, to correct their costs.
//!
//! **Design.** For each device, one read and one write at a time is timed, from turn to turn. The
//! least time by device, kind and size, which ages by a thousandth a second, is its service time.
//! The excess over twice that, less the longest turn, is waiting. The least of a window counts (as
//! in CoDel), so that a batch is no standing queue. All devices share one correction. Devices above
//! the target are ignored while others are in use; if all are above, the least wait counts. **Not
//! here:** the correction ([`forebay_qos::estimator`]), remote operations.

#[cfg(test)]
mod tests;

use forebay_device::{Op, OpKind};
use forebay_qos::resources::Resource;
use forebay_qos::scheduler::Scheduler;

const RESOURCES: [Resource; 2] = [Resource::DeviceRead, Resource::DeviceWrite];
const KINDS: usize = RESOURCES.len();
/// Size classes: up to 4 KiB, and twice as much each.
const SIZES: usize = 9;
const DEVICES: usize = 256;
/// Interval at which the least times grow by a 1024th.
const AGE_NS: u64 = 1_000_000_000;
/// Without timed operations a device counts as unused.
const GIVEN_UP_NS: u64 = 1_000_000_000;
/// One operation in [`Timed::begun`], which loses a 16th per window.
const ONE_BEGUN: u32 = 256;

#[derive(Debug)]
pub(crate) struct Delays {
    timed: Box<[Timed]>,
    in_use: Vec<u16>,
    some_at_once: bool,
    turn_ns: u64,
    /// Busy time of the last turn; `longest_ns` is a recent maximum.
    took_ns: u64,
    longest_ns: u64,
    was_idle: bool,
    aged_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Timed {
    in_use: bool,
    came: bool,
    /// Start of the timed operation; 0 if there is none.
    begun_ns: u64,
    size: u8,
    begun: u32,
    /// Last start or end of a timed operation.
    seen_ns: u64,
    /// Least delay in this window.
    waited_ns: Option<u64>,
    /// Least delay in the last window that had one.
    known_ns: Option<u64>,
    /// Least time by size, ns; the maximum if none was seen.
    least_ns: [u32; SIZES],
}

const NOTHING: Timed = Timed {
    in_use: false,
    came: false,
    begun_ns: 0,
    size: 0,
    begun: 0,
    seen_ns: 0,
    waited_ns: None,
    known_ns: None,
    least_ns: [u32::MAX; SIZES],
};

impl Timed {
    /// If the operation ended now, without the time of turns.
    fn waited_ns(&self, now_ns: u64, next_tick_ns: u64) -> u64 {
        let took_ns = now_ns.saturating_sub(self.begun_ns);
        took_ns.saturating_sub(2 * u64::from(self.least_ns[usize::from(self.size)]) + next_tick_ns)
    }

    fn forget(&mut self) {
        *self = Self {
            least_ns: self.least_ns,
            ..NOTHING
        };
    }
}

#[derive(Clone, Copy, Default)]
struct Said {
    any: bool,
    under_way: bool,
    waited_ns: Option<u64>,
}

/// Index in `timed`; `None` if such operations are not timed.
fn number_of(device: u8, op: &Op) -> Option<usize> {
    let kind = match op.kind() {
        OpKind::Read => 0,
        OpKind::Write => 1,
        OpKind::Flush | OpKind::WriteZeroes | OpKind::Punch => return None,
    };
    Some(usize::from(device) * KINDS + kind)
}

fn size_of(op: &Op) -> usize {
    let blocks = op.len_bytes().div_ceil(4096).max(1);
    (blocks.next_power_of_two().ilog2() as usize).min(SIZES - 1)
}

impl Delays {
    pub(super) fn new() -> Self {
        Self {
            timed: vec![NOTHING; DEVICES * KINDS].into(),
            in_use: Vec::with_capacity(DEVICES * KINDS),
            some_at_once: false,
            turn_ns: 0,
            took_ns: 0,
            longest_ns: 0,
            was_idle: true,
            aged_ns: 0,
        }
    }

    #[inline]
    pub(super) fn turn(&mut self, now_ns: u64) {
        self.took_ns = match std::mem::take(&mut self.was_idle) {
            true => 0,
            false => now_ns.saturating_sub(self.turn_ns),
        };
        self.longest_ns = self.longest_ns.max(self.took_ns);
        self.turn_ns = now_ns;
    }

    #[inline]
    pub(super) fn idle(&mut self) {
        self.was_idle = true;
    }

    /// 0 if not timed. Offloaded (`remote`) ones are only counted.
    #[inline]
    pub(crate) fn begun(&mut self, device: u8, op: &Op, remote: bool) -> u64 {
        let Some(number) = number_of(device, op) else {
            return 0;
        };
        let timed = &mut self.timed[number];
        timed.begun = timed.begun.saturating_add(ONE_BEGUN);
        if remote || timed.begun_ns != 0 {
            return 0;
        }
        timed.size = size_of(op) as u8;
        (timed.begun_ns, timed.seen_ns) = (self.turn_ns, self.turn_ns);
        if !std::mem::replace(&mut timed.in_use, true) {
            (timed.came, timed.begun) = (true, ONE_BEGUN);
            self.in_use.push(number as u16);
        }
        self.turn_ns
    }

    pub(super) fn ended(&mut self, device: u8, op: &Op, begun_ns: u64, good: bool, now_ns: u64) {
        let next_tick_ns = self.longest_ns + self.took_ns;
        let timed = number_of(device, op).map(|number| &mut self.timed[number]);
        // Its timing was given up, and another operation is timed now.
        let Some(timed) = timed.filter(|timed| timed.begun_ns == begun_ns) else {
            return;
        };
        if good {
            let took_ns = u32::try_from(now_ns.saturating_sub(begun_ns));
            let least = &mut timed.least_ns[usize::from(timed.size)];
            *least = (*least).min(took_ns.unwrap_or(u32::MAX));
            let waited_ns = timed.waited_ns(now_ns, next_tick_ns);
            timed.waited_ns = Some(timed.waited_ns.map_or(waited_ns, |ns| ns.min(waited_ns)));
        }
        (timed.begun_ns, timed.seen_ns) = (0, now_ns);
    }

    /// Forgets a device that may be another one now.
    pub(super) fn note_devices(&mut self, changed: Option<u8>, some_at_once: bool) {
        if let Some(device) = changed.map(usize::from) {
            self.timed[device * KINDS..][..KINDS].fill(NOTHING);
            let is_other = |number: &u16| usize::from(*number) / KINDS != device;
            self.in_use.retain(is_other);
        }
        self.some_at_once = some_at_once;
    }

    pub(super) fn report(&mut self, scheduler: &mut Scheduler, now_ns: u64) {
        let timed = &mut self.timed;
        self.in_use.retain(|number| {
            let timed = &mut timed[usize::from(*number)];
            let keep = now_ns.saturating_sub(timed.seen_ns) < GIVEN_UP_NS;
            if !keep {
                timed.forget();
            }
            keep
        });
        for kind in 0..KINDS {
            self.publish_kind(scheduler, kind, now_ns);
        }
        self.longest_ns -= self.longest_ns >> 3;
        if now_ns.saturating_sub(self.aged_ns) >= AGE_NS {
            self.aged_ns = now_ns;
            for least in self.timed.iter_mut().flat_map(|timed| &mut timed.least_ns) {
                *least = least.saturating_add(*least >> 10);
            }
        }
    }

    fn publish_kind(&mut self, scheduler: &mut Scheduler, kind: usize, now_ns: u64) {
        let resource = RESOURCES[kind];
        let target_ns = scheduler.params().target_delay_ns;
        let next_tick_ns = self.longest_ns + self.took_ns;
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
            let under_way = timed.begun_ns != 0;
            let is_slow = timed.known_ns.is_some_and(|ns| ns > target_ns)
                || under_way && timed.waited_ns(now_ns, next_tick_ns) > target_ns;
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
            // Too few operations go to quick devices to lower costs further.
            Some(ns) if well.any && 2 * begun_at_quick < begun => {
                scheduler.observe(resource, ns.max(target_ns / 4), 1);
            }
            Some(ns) => scheduler.observe(resource, ns, 1),
            None if said.under_way => scheduler.hold(resource),
            // Such operations have no delay, so calibrated costs may be too high.
            None if self.some_at_once && self.in_use.is_empty() => {
                scheduler.observe(resource, 0, 1)
            }
            None => {}
        }
    }
}
