//! One queue over two reactors with budgets: two cores in one thread, each with its own clock,
//! which each turn advances by its cost.

use super::super::admit::{QUIET, quiet_lane};
use super::*;
use crate::lane::Share;
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::{CostTable, Profile};
use forebay_qos::ledger::Ledger;
use forebay_xlate::boundary::message::NodeCapacity;

/// Processor time of an operation on its home reactor, and on the one that submits it.
const HOME_NS: u64 = 300;
/// Shortest turn.
const TURN_NS: u64 = 200;
/// Fewer than a lane may have waiting.
const DEPTH: usize = 24;
/// Interval of the other tenant's reads: always busy, with pauses, or nearly idle.
const OFTEN_NS: u64 = 100_000;
const PAUSE_NS: u64 = 5_000_000;
const SELDOM_NS: u64 = 100_000_000;

fn metered(base: u64, burst: u64) -> Budget {
    let rate = |iops: u64| Rate {
        iops,
        bytes: iops * BLOCK,
    };
    Budget {
        base: rate(base),
        burst: rate(burst),
        how: Burst::Metered,
    }
}

#[derive(Default)]
struct Reactor {
    now_ns: u64,
    started: usize,
    /// Operations started and submitted before the last turn's end.
    before: (usize, usize),
}

impl Reactor {
    fn begin(&mut self, core: &mut Core) {
        core.clock.set_clock_ns(self.now_ns);
        core.begin_turn();
        core.reap();
    }

    fn ask(&mut self, core: &mut Core, lane: LaneIndex) {
        self.started += 1;
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: 0,
                conn_generation: 0,
                slot: 0,
            },
            lane,
            op: read(0, 1),
            buffer: core.staging.allocate(BLOCK as u32),
            record: CommandRef::new(lane.0, self.started as u16 % 256),
            over_ns: None,
        };
        assert!(core.start(new).is_ok(), "there is room");
    }

    /// Ends the turn. The device is memory, so all submitted operations have ended.
    fn end(&mut self, core: &mut Core, device_ns: u64) {
        core.end_turn();
        let record = core.record();
        let (handed_over, carried_out) = (&record.handed_over, &record.carried_out);
        let back = handed_over.load(Relaxed) as usize - core.offload.out;
        let own = self.started - core.slab.busy();
        let given = own - back + carried_out.load(Relaxed) as usize;
        let begun = own + core.offload.out;
        let took = (begun - self.before.0, given - self.before.1);
        self.before = (begun, given);
        if took == (0, 0) {
            core.is_idle();
        }
        let took_ns = took.0 as u64 * HOME_NS + took.1 as u64 * device_ns;
        self.now_ns += took_ns.max(TURN_NS);
    }
}

/// Reads per ms of the queue, and the mean and longest waits of the other reactor's tenant, ns.
fn run(spread: Spread, device_ns: u64, every_ns: u64) -> (f64, u64, u64) {
    let mut t = two("ram", spread);
    let region = t.b.core.region.clone();
    t.other.set_lane(quiet_lane(&region));
    let profile = Profile::line(((device_ns + HOME_NS) as f64, 0.0), (0.0, 0.0), 0);
    let costs = CostTable::new([[profile; 3]; 3]);
    let ledger = Arc::new(Ledger::new(2));
    let per_second = NodeCapacity::UNLIMITED.capacity(1).per_second();
    for core in [&mut t.b.core, &mut t.other] {
        let mut admission =
            Admission::new(Params::default(), &per_second, &costs, &ledger).unwrap();
        admission.set_budget(0, &metered(5_000, 5_000_000), false);
        admission.set_budget(1, &metered(20_000, 20_000), false);
        core.set_admission(Some(Box::new(admission)));
        for (tenant, volume) in [(0, V), (1, QUIET)] {
            let budget = None;
            core.set_share(volume, Some(Share { tenant, budget }));
        }
    }
    let now_ns = t.b.core.now_ns();
    let (warm_ns, end_ns) = (now_ns + 30_000_000, now_ns + 130_000_000);
    let reactor = || Reactor {
        now_ns,
        ..Reactor::default()
    };
    let (mut home, mut other) = (reactor(), reactor());
    let (mut in_hand, mut ended) = (0, 0u64);
    let (mut next_ns, mut asked, mut waited) = (now_ns, VecDeque::new(), Vec::new());
    while home.now_ns < end_ns {
        if home.now_ns <= other.now_ns {
            let core = &mut t.b.core;
            home.begin(core);
            while let Some(done) = core.next_done() {
                assert_eq!(done.status, Status::SUCCESS);
                core.staging.release(done.buffer.unwrap());
                in_hand -= 1;
                ended += u64::from(home.now_ns >= warm_ns);
            }
            while in_hand < DEPTH {
                in_hand += 1;
                home.ask(core, LANE);
            }
            home.end(core, device_ns);
        } else {
            let core = &mut t.other;
            other.begin(core);
            let mut busy = false;
            while let Some(done) = core.next_done() {
                busy = true;
                core.staging.release(done.buffer.unwrap());
                let asked_ns: u64 = asked.pop_front().unwrap();
                waited.push(other.now_ns - asked_ns);
            }
            while next_ns <= other.now_ns {
                busy = true;
                asked.push_back(next_ns);
                other.ask(core, OTHER);
                next_ns += every_ns;
            }
            core.carry_out(busy);
            other.end(core, device_ns);
        }
    }
    let mean = waited.iter().sum::<u64>() / waited.len() as u64;
    let most = waited.into_iter().max().unwrap_or(0);
    (ended as f64 / 100.0, mean, most)
}

#[test]
fn a_queue_within_a_budget_gets_what_two_reactors_can_do() {
    // Costs of which a turn fits many, two, or less than one.
    for device_ns in [1_500, 5_000, 20_000] {
        let (one, ..) = run(Spread::OneToOne, device_ns, SELDOM_NS);
        let (two, ..) = run(Spread::OneToN, device_ns, SELDOM_NS);
        let (less, mean_ns, most_ns) = run(Spread::OneToN, device_ns, PAUSE_NS);
        let what = format!(
            "{device_ns}: {one:.1} and {two:.1} in a ms; {less:.1} beside one who asks now and then, and waits {mean_ns} and at most {most_ns}"
        );
        println!("{what}");
        assert!(two >= 1.7 * one && less >= 1.5 * one, "{what}");
        // A wait for a turn's part, plus its overrun.
        assert!(most_ns <= 12_000 + 2 * (device_ns + HOME_NS), "{what}");
    }
}

/// A reactor with its own work gives no processor time away.
#[test]
fn a_busy_reactor_is_not_slowed_by_a_remote_burst() {
    for device_ns in [1_500, 5_000, 20_000] {
        let alone = run(Spread::OneToOne, device_ns, OFTEN_NS);
        let beside = run(Spread::OneToN, device_ns, OFTEN_NS);
        let what = format!("{device_ns}: {alone:?} and {beside:?}");
        println!("{what}");
        assert!(beside.0 >= 0.99 * alone.0, "{what}");
        assert!(beside.1 <= alone.1 && beside.2 <= alone.2, "{what}");
    }
}
