//! Measured delays and their effect; the test sets the clock.

use super::*;
use forebay_device::Op;
use forebay_device::mem::StaticRegion;
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::Routes;
use forebay_qos::cost::{CostTable, default_profiles};
use forebay_qos::ledger::Ledger;
use forebay_qos::params::Params;
use forebay_qos::resources::{PARTS, ResourceVector};
use std::sync::{Arc, OnceLock};

const US: u64 = 1000;
const MS: u64 = 1000 * US;

fn op() -> Op {
    static MEMORY: OnceLock<StaticRegion> = OnceLock::new();
    let memory = MEMORY.get_or_init(|| StaticRegion::anonymous(4096).unwrap());
    Op::read(0, memory.buf(0, 4096).unwrap())
}

/// The last of `turns` sees its end. `busy`: with work before.
fn read(delays: &mut Delays, begun: u64, turns: &[u64], busy: bool, good: bool) {
    delays.idle();
    delays.turn(begun);
    let begun_ns = delays.begun(0, &op(), false);
    for at in turns {
        if !busy {
            delays.idle();
        }
        delays.turn(*at);
    }
    delays.ended(0, &op(), begun_ns, good, turns[turns.len() - 1]);
}

#[test]
fn waiting_time_excludes_service_and_reactor_time() {
    let mut delays = Delays::new();
    let waited = |delays: &mut Delays| delays.timed[0].waited_ns.take().map(|ns| ns / US);
    // A single operation shows the service time.
    read(&mut delays, 1000 * US, &[1080 * US], false, true);
    assert_eq!(waited(&mut delays), Some(0));
    read(&mut delays, 1200 * US, &[1210 * US], false, false);
    assert_eq!(waited(&mut delays), None);
    // Time beyond twice the service time is waiting.
    let late = [2010 * US, 2400 * US];
    read(&mut delays, 2000 * US, &late, false, true);
    assert_eq!(waited(&mut delays), Some(400 - 160));
    // Not if the reactor was busy meanwhile.
    read(&mut delays, 2000 * US, &late, true, true);
    assert_eq!(waited(&mut delays), Some(0));
    // A window's least counts.
    delays.longest_ns = 0;
    read(&mut delays, 2000 * US, &late, false, true);
    read(&mut delays, 3000 * US, &[3010 * US, 3900 * US], false, true);
    assert_eq!(waited(&mut delays), Some(400 - 160));
    // Its device was forgotten.
    let begun_ns = delays.begun(0, &op(), false);
    delays.timed[0].forget();
    delays.ended(0, &op(), begun_ns, true, 4000 * US);
    assert_eq!(waited(&mut delays), None);
}

#[test]
fn offloaded_operations_count_as_begun_and_are_not_timed() {
    let mut delays = Delays::new();
    delays.turn(1000);
    assert_eq!(delays.begun(0, &op(), true), 0);
    assert_eq!(delays.begun(1, &op(), false), 1000);
    let of = |at: usize| (delays.timed[at].begun, delays.timed[at].begun_ns);
    assert_eq!([of(0), of(KINDS)], [(ONE_BEGUN, 0), (ONE_BEGUN, 1000)]);
    assert_eq!(delays.in_use, [KINDS as u16]);
}

/// Two devices, and the correction for reads.
struct Desk {
    delays: Delays,
    scheduler: Scheduler,
    now_ns: u64,
}

impl Desk {
    fn new() -> Self {
        let ledger = Arc::new(Ledger::new(1));
        let scheduler = Scheduler::new(Params::default(), &[1e9; 6], 1, &ledger).unwrap();
        let (delays, now_ns) = (Delays::new(), MS);
        Self {
            delays,
            scheduler,
            now_ns,
        }
    }

    /// Windows of a millisecond with these waits, us.
    fn windows(&mut self, count: u64, said: &[(u16, u64)]) -> f32 {
        for _ in 0..count {
            for (device, us) in said {
                self.delays.turn(self.now_ns);
                let began = self.delays.begun(*device as u8, &op(), false);
                (self.delays).ended(*device as u8, &op(), began, true, self.now_ns);
                let timed = &mut self.delays.timed[usize::from(*device) * KINDS];
                (timed.begun_ns, timed.waited_ns) = (0, Some(us * US));
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
            self.delays.report(&mut self.scheduler, self.now_ns);
            self.scheduler.refill(1, 0);
        }
        self.factor()
    }

    fn begins(&mut self, device: u16) {
        self.delays.begun(device as u8, &op(), false);
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
    // Others do not pay, from the first command on.
    desk.begins(1);
    assert_eq!(desk.pass(1), 1.0);
    assert_eq!(desk.windows(100, &[SLOW, (1, 0)]), 1.0);
    // This holds even if that device is rarely used.
    for _ in 0..10 {
        assert_eq!(desk.windows(90, &[SLOW]), 1.0);
        assert_eq!(desk.windows(1, &[SLOW, (1, 0)]), 1.0);
    }
    desk.windows(1000, &[SLOW]);
    assert_eq!(desk.windows(100, &[SLOW]), 4.0);
    let both = [SLOW, (1, 300)];
    desk.windows(1, &both);
    assert_eq!(desk.windows(100, &both), 4.0);
}

#[test]
fn io_in_flight_at_a_slow_device_holds_no_other_correction() {
    let mut desk = Desk::new();
    let both = [SLOW, (1, 300)];
    assert_eq!(desk.windows(100, &both), 4.0);
    // One is fast and idle; the other has an operation in flight.
    assert!(desk.windows(1, &[(1, 0)]) < 4.0);
    desk.begins(0);
    assert_eq!(desk.pass(200), 1.0);
    // Both are fast, but one has an operation in flight for long.
    let mut desk = Desk::new();
    assert_eq!(desk.windows(100, &both), 4.0);
    assert!(desk.windows(1, &[(0, 0), (1, 0)]) < 4.0);
    desk.begins(0);
    assert_eq!(desk.pass(200), 1.0);
    // Alone, it holds the correction for a second.
    let mut desk = Desk::new();
    assert_eq!(desk.windows(100, &[SLOW]), 4.0);
    desk.begins(0);
    assert_eq!(desk.pass(900), 4.0);
    assert_eq!(desk.pass(300), 1.0);
    assert!(desk.delays.in_use.is_empty());
    desk.delays.ended(0, &op(), MS, true, desk.now_ns);
    assert_eq!(desk.delays.timed[0].waited_ns, None);
}

/// Its capacity is unknown, but no operation waits for it.
#[test]
fn a_device_that_completes_at_once_throttles_no_lane() {
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
        desk.scheduler.set_budget(0, &budget, &costs, Routes::LOCAL);
        desk.scheduler.attach(0, 0);
        // The device is the scarcest resource.
        let mut cost = ResourceVector::ZERO;
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
        // By calibration 300 in a window of 0.3 ms.
        let expected = if at_once { 2500..6001 } else { 270..301 };
        assert!(expected.contains(&begun), "{at_once}: {begun}");
    }
}
