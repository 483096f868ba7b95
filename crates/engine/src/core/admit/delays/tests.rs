//! What is said of devices, and what follows, by a clock of the test's own.

use super::*;
use forebay_burst::board::Board;
use forebay_burst::budget::{Budget, Burst, Rate};
use forebay_burst::cost::{CostTable, default_profiles};
use forebay_burst::params::Params;
use forebay_burst::units::{PARTS, Units};
use forebay_device::Op;
use forebay_device::mem::StaticRegion;
use forebay_xlate::drain::SliceSpan;
use forebay_xlate::{ExtentRange, VolumeId};
use std::sync::Arc;

const US: u64 = 1000;
const MS: u64 = 1000 * US;

/// A read of 4 KiB begins at a device in a turn at `begun`; the next turns are at these times, of which the last sees its end.
/// Before that, the reactor had something to do, or not.
fn read(delays: &mut Delays, begun: u64, turns: &[u64], busy: bool, good: bool) {
    delays.idle();
    delays.turn(begun);
    begins(delays, 0);
    for at in turns {
        if !busy {
            delays.idle();
        }
        delays.turn(*at);
    }
    delays.ended(7, 0, good, turns[turns.len() - 1]);
}

/// The same as [`Delays::time`] does it, without a slice.
fn begins(delays: &mut Delays, device: u16) {
    let number = device * KINDS as u16;
    let timed = &mut delays.timed[usize::from(number)];
    timed.slice = 7 + u32::from(device);
    (timed.turn_ns, timed.after_ns) = (delays.turn_ns, 0);
    timed.seen_ns = delays.turn_ns;
    if !std::mem::replace(&mut timed.in_use, true) {
        timed.came = true;
        delays.in_use.push(number);
    }
    delays.new[usize::from(device)] = number;
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
    delays.ended(8, 0, true, 4000 * US);
    delays.ended(7, 1, true, 4000 * US);
    assert_eq!(waited(&mut delays), None);
}

fn slice(device: u8, at: u64, memory: &StaticRegion) -> Slice {
    let span = SliceSpan {
        volume: VolumeId(1),
        range: ExtentRange::new(at, 1),
        write: false,
        number: at,
    };
    Slice {
        io: 0,
        device,
        marks: 0,
        away: false,
        op: Op::read(at * 4096, memory.buf(0, 4096).unwrap()),
        span,
    }
}

#[test]
fn whoever_is_never_the_first_in_a_turn_is_found_too() {
    shares_are_seen(|_| false);
}

/// What others carry out is not timed, but its device has it.
#[test]
fn what_others_carry_out_counts_as_begun() {
    shares_are_seen(|at| (1..15).contains(&at));
}

fn shares_are_seen(is_away: impl Fn(u64) -> bool) {
    let memory = StaticRegion::anonymous(4096).unwrap();
    let mut delays = Delays::new();
    let mut slices: Vec<Option<Slice>> = (0..64).map(|_| None).collect();
    let mut timed = Vec::new();
    for turn in 0..900 {
        // Fifteen at one device, then five at another; but in every second turn one, and in every third none.
        let mut free: Vec<u32> = (0..64).collect();
        delays.turn((turn + 1) * 1000);
        delays.note(&free, turn);
        for at in 0..[20, 1, 0][turn as usize % 3] {
            let place = free.pop().unwrap();
            slices[place as usize] = Some(Slice {
                away: is_away(at),
                ..slice(u8::from(at >= 15), at, &memory)
            });
        }
        delays.choose(&mut slices, free.len());
        let marked = slices.iter().flatten().filter(|s| s.marks & TIMED != 0);
        timed.extend(marked.map(|s| (s.device, s.span.number)));
        slices.fill_with(|| None);
    }
    // The first of each, and none of those that stand behind them.
    assert_eq!(timed, [(0, 0), (1, 15)]);
    let begun = [0, KINDS].map(|at| f64::from(delays.timed[at].begun));
    let part = begun[1] / (begun[0] + begun[1]);
    assert!((0.2..=0.28).contains(&part), "{begun:?}");
    assert_eq!(delays.in_use, [0, KINDS as u16]);
}

/// Two devices, and what follows for reads.
struct Desk {
    delays: Delays,
    scheduler: Scheduler,
    now_ns: u64,
}

impl Desk {
    fn new() -> Self {
        let board = Arc::new(Board::new(1));
        let scheduler = Scheduler::new(Params::default(), &[1e9; 6], 1, &board).unwrap();
        let (delays, now_ns) = (Delays::new(), MS);
        Self {
            delays,
            scheduler,
            now_ns,
        }
    }

    /// So many windows of a millisecond, in each of which these devices say how long one waited, us.
    fn windows(&mut self, count: u64, said: &[(u16, u64)]) -> f32 {
        for _ in 0..count {
            for (device, us) in said {
                self.delays.turn(self.now_ns);
                begins(&mut self.delays, *device);
                let timed = &mut self.delays.timed[usize::from(*device) * KINDS];
                (timed.slice, timed.waited_ns) = (NONE, Some(us * US));
                timed.least_ns[0] = 80_000;
            }
            self.pass(1);
        }
        self.factor()
    }

    fn pass(&mut self, windows: u64) -> f32 {
        for _ in 0..windows {
            self.now_ns += MS;
            self.delays.idle();
            self.delays.turn(self.now_ns);
            self.delays.tell(&mut self.scheduler, self.now_ns);
            self.scheduler.turn(1);
        }
        self.factor()
    }

    fn begins(&mut self, device: u16) {
        begins(&mut self.delays, device);
    }

    fn factor(&self) -> f32 {
        self.scheduler.corrections()[Resource::DeviceRead as usize]
    }
}

const SLOW: (u16, u64) = (0, 5_000);

#[test]
fn a_slow_device_makes_costs_dear_only_where_no_other_is_in_use() {
    let mut desk = Desk::new();
    assert_eq!(desk.windows(100, &[SLOW]), 4.0);
    // Whoever comes to another does not pay for that, from the first on.
    desk.begins(1);
    assert_eq!(desk.pass(1), 1.0);
    assert_eq!(desk.windows(100, &[SLOW, (1, 0)]), 1.0);
    // Also where that one has something now and then.
    for _ in 0..10 {
        assert_eq!(desk.windows(90, &[SLOW]), 1.0);
        assert_eq!(desk.windows(1, &[SLOW, (1, 0)]), 1.0);
    }
    // What it said long ago does not count.
    desk.windows(1000, &[SLOW]);
    assert_eq!(desk.windows(100, &[SLOW]), 4.0);
    // Both are slow.
    let both = [SLOW, (1, 300)];
    desk.windows(1, &both);
    assert_eq!(desk.windows(100, &both), 4.0);
}

#[test]
fn what_is_under_way_at_a_slow_device_holds_nobody_elses_correction() {
    let mut desk = Desk::new();
    let both = [SLOW, (1, 300)];
    assert_eq!(desk.windows(100, &both), 4.0);
    // One is well again, and does nothing now; at the other there is one under way.
    assert!(desk.windows(1, &[(1, 0)]) < 4.0);
    desk.begins(0);
    assert_eq!(desk.pass(200), 1.0);
    // Both are, and at one there is one under way for longer than it was when it was well.
    let mut desk = Desk::new();
    assert_eq!(desk.windows(100, &both), 4.0);
    assert!(desk.windows(1, &[(0, 0), (1, 0)]) < 4.0);
    desk.begins(0);
    assert_eq!(desk.pass(200), 1.0);
    // Alone it holds, for a second and no longer.
    let mut desk = Desk::new();
    assert_eq!(desk.windows(100, &[SLOW]), 4.0);
    desk.begins(0);
    assert_eq!(desk.pass(900), 4.0);
    assert_eq!(desk.pass(300), 1.0);
    assert!(desk.delays.in_use.is_empty());
    // Its end, should it come, is nobody's.
    desk.delays.ended(7, 0, true, desk.now_ns);
    assert_eq!(desk.delays.timed[0].waited_ns, None);
}

/// Of a device in memory nobody knows how much it can do, but that nobody waits for it.
#[test]
fn what_ends_at_once_holds_nobody_back() {
    let rate = |iops| Rate {
        iops,
        bytes: iops * 4096,
    };
    for at_once in [false, true] {
        let mut desk = Desk::new();
        desk.delays.some_at_once = at_once;
        let budget = Budget {
            base: rate(1000),
            burst: rate(20_000_000),
            how: Burst::Metered,
        };
        let costs = CostTable::new(default_profiles());
        desk.scheduler.set_budget(0, &budget, &costs);
        desk.scheduler.attach(0, 0);
        // More of the device than of anything else.
        let mut cost = Units::ZERO;
        (cost[Resource::DeviceRead], cost[Resource::Cpu]) = (1000, 100);
        (cost[Resource::Ops], cost[Resource::Bytes]) = (PARTS, 4096);
        let mut begun = 0;
        for _ in 0..1000 {
            begun = 0;
            while desk.scheduler.admit(0, &cost) {
                begun += 1;
            }
            desk.scheduler.wait(0, &cost);
            desk.pass(1);
            desk.scheduler.cancel(0, &cost);
        }
        // Windows are of 0.3 ms: 300 by what is calibrated, and twice that of who is alone.
        let expected = if at_once { 2500..6001 } else { 540..601 };
        assert!(expected.contains(&begun), "{at_once}: {begun}");
    }
}
