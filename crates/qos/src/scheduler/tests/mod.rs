//! The scheduler on a simulated reactor with exact costs: serial I/Os, and a queue for each tenant.

mod adversaries;
mod bases;
mod cost;
mod credit;
mod moves;
mod reactors;
mod rests;
mod storm;
mod volumes;

use super::Scheduler;
use crate::budget::{Budget, Burst, Rate};
use crate::cost::Routes;
use crate::cost::{CostTable, Operation, Transport, tests::table};
use crate::ledger::Ledger;
use crate::params::Params;
use crate::resources::{PARTS, Resource, ResourceVector};
use std::collections::VecDeque;
use std::sync::Arc;

/// Steps of a window, each with new I/Os.
const STEPS: usize = 20;

/// I/Os and bytes for a tenant, window and step.
type Load<'a> = &'a dyn Fn(usize, u64, usize) -> (usize, u32);

pub(super) struct Bench {
    pub(super) scheduler: Scheduler,
    costs: CostTable,
    queues: Vec<VecDeque<ResourceVector>>,
    pub(super) ended: Vec<u64>,
    pub(super) cpu_ns: i64,
    /// Processor time left in a step; negative if overdrawn.
    time: i64,
    pub(super) window: u64,
    from: usize,
}

pub(super) fn budget(base: u64, burst: u64, how: Burst) -> Budget {
    let rate = |iops: u64| Rate {
        iops,
        bytes: iops * 4096,
    };
    Budget {
        base: rate(base),
        burst: rate(burst),
        how,
    }
}

impl Bench {
    pub(super) fn new(budgets: &[Budget], params: Params) -> Self {
        let costs = table();
        let ledger = Arc::new(Ledger::new(budgets.len()));
        let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
        let mut scheduler = Scheduler::new(params, &whole, budgets.len(), &ledger).expect("good");
        for (tenant, budget) in budgets.iter().enumerate() {
            budget.check().expect("a good budget");
            scheduler.set_budget(tenant, budget, &costs, Routes::LOCAL);
            scheduler.attach(tenant, tenant);
        }
        Self {
            scheduler,
            costs,
            queues: vec![VecDeque::new(); budgets.len()],
            ended: vec![0; budgets.len()],
            cpu_ns: 0,
            time: 0,
            window: 0,
            from: 0,
        }
    }

    pub(super) fn set_budget(&mut self, tenant: usize, budget: &Budget) {
        self.scheduler
            .set_budget(tenant, budget, &self.costs, Routes::LOCAL);
    }

    fn forget(&mut self, tenant: usize) {
        for cost in self.queues[tenant].drain(..) {
            self.scheduler.cancel(tenant, &cost);
        }
    }

    /// Runs a window with at most `depth` waiting I/Os per tenant.
    pub(super) fn window(&mut self, depth: usize, load: Load<'_>) {
        self.ended.fill(0);
        self.cpu_ns = 0;
        for step in 0..STEPS {
            for tenant in 0..self.queues.len() {
                let (count, len) = load(tenant, self.window, step);
                let cost = self.costs.of(Transport::Tcp, Operation::Read, len);
                for _ in 0..count {
                    if self.queues[tenant].len() < depth {
                        self.queues[tenant].push_back(cost);
                        self.scheduler.wait(tenant, &cost);
                    }
                }
            }
            self.step();
        }
        self.scheduler.refill(1, 0);
        self.window += 1;
    }

    /// Serves one I/O of each tenant in turn, until time or I/Os run out.
    fn step(&mut self) {
        let step_ns = self.scheduler.params.window_ns as i64 / STEPS as i64;
        self.time = (self.time + step_ns).min(step_ns);
        let mut idle = 0;
        let count = self.queues.len();
        while self.time > 0 && idle < count {
            let tenant = self.from % count;
            self.from += 1;
            idle += 1;
            let Some(cost) = self.queues[tenant].front().copied() else {
                continue;
            };
            let before = self.scheduler.statistics(tenant);
            if !self.scheduler.resume(tenant, &cost) {
                continue;
            }
            let after = self.scheduler.statistics(tenant);
            if after.taken + after.from_reserve > before.taken + before.from_reserve {
                self.assert_below_base(tenant);
            }
            idle = 0;
            self.queues[tenant].pop_front();
            self.ended[tenant] += 1;
            self.time -= i64::from(cost[Resource::Cpu]);
            self.cpu_ns += i64::from(cost[Resource::Cpu]);
        }
    }

    /// Taken and reserved resources only served use within the base.
    fn assert_below_base(&self, tenant: usize) {
        let one = &self.scheduler.tenants[tenant];
        let used = self.scheduler.used(tenant);
        assert!(
            one.entitlement.covers(&used.own()),
            "{:?} {used:?}",
            one.entitlement
        );
    }
}

pub(super) fn params() -> Params {
    Params {
        window_ns: 1_000_000,
        ..Params::default()
    }
}

pub(super) const ALL: (usize, u32) = (100, 4096);
pub(super) const NONE: (usize, u32) = (0, 4096);

pub(super) fn even(each: usize, window: u64, step: usize) -> (usize, u32) {
    let at = window as usize * STEPS + step;
    ((at + 1) * each / STEPS - at * each / STEPS, 4096)
}

/// 4 KiB reads of 1.205 us that fit a window of 1 ms.
pub(super) const FIT: u64 = 830;

#[test]
fn no_steal_by_tenants_above_base() {
    let mut bench = Bench::new(&[budget(100_000, 900_000, Burst::Metered); 4], params());
    for window in 0..400 {
        let taken = |bench: &Bench, tenant: usize| {
            let statistics = bench.scheduler.statistics(tenant);
            statistics.taken + statistics.from_reserve
        };
        let before = taken(&bench, 0) + taken(&bench, 1);
        bench.window(300, &|tenant, window, step| match tenant {
            0 | 1 => ALL,
            2 => even(100, window, step),
            _ if window % 40 < 4 => ALL,
            _ => NONE,
        });
        // `Bench::step` checks each source. Tenants that are always above their base take nothing.
        if window > 10 {
            let after = taken(&bench, 0) + taken(&bench, 1);
            assert_eq!(after, before, "window {window}");
        }
        if window > 10 && window % 40 == 0 {
            assert!(bench.ended[3] >= 95, "window {window}: {:?}", bench.ended);
        }
    }
    let statistics = bench.scheduler.statistics(3);
    assert!(
        statistics.taken + statistics.from_reserve > 0,
        "{statistics:?}"
    );
    let published = |tenant: usize| {
        let statistics = bench.scheduler.statistics(tenant);
        let window_ns = bench.scheduler.params.window_ns;
        (
            statistics.burst_windows * 100 / statistics.active_windows,
            statistics.granted(window_ns).iops,
        )
    };
    assert_eq!((published(0).0, published(2).0), (100, 0));
    assert!(
        (250_000..450_000).contains(&published(0).1),
        "{:?}",
        published(0)
    );
    assert!(
        (100_000..450_000).contains(&published(2).1),
        "{:?}",
        published(2)
    );
    assert!(bench.scheduler.statistics(0).lost > 0);
}

#[test]
fn work_conserving() {
    // While an admissible I/O waits, all processor time is used, including the last window's
    // reserve.
    for busy in 1..=8usize {
        let mut bench = Bench::new(&[budget(50_000, 2_000_000, Burst::Metered); 8], params());
        let params = bench.scheduler.params.clone();
        let floor = f64::from(params.utilisation) - 0.012;
        let mut sum = 0;
        for window in 0..200u64 {
            bench.window(300, &|tenant, window, _| {
                let turn = (window / 50) as usize * 3;
                if (tenant + turn) % 8 < busy {
                    ALL
                } else {
                    NONE
                }
            });
            let part = bench.cpu_ns as f64 / params.window_ns as f64;
            if window % 50 > 15 {
                assert!(part >= floor, "{busy} busy, window {window}: {part}");
            }
            sum += bench.cpu_ns;
        }
        assert!(sum as f64 / 200e6 >= floor - 0.03, "{busy} busy: {sum}");
    }
}

/// The reserve follows the bases of all tenants, active or not.
#[test]
fn the_reserve_is_for_all_who_may_wake() {
    let small = budget(1000, 500_000, Burst::Metered);
    let large = budget(5000, 500_000, Burst::Metered);
    let mut bench = Bench::new(&[small, large], params());
    let reserve = |bench: &mut Bench| {
        (0..4).for_each(|_| bench.window(64, &|tenant, _, _| (4 * usize::from(tenant == 0), 4096)));
        bench.scheduler.reserve[Resource::Cpu]
    };
    let with = reserve(&mut bench);
    bench.scheduler.detach(1);
    let without = reserve(&mut bench);
    assert!(with > 3 * without && without > 0, "{with} {without}");
}

/// An I/O below the base combines free processor time with a link from the reserve.
#[test]
fn free_resources_combine_with_the_reserve() {
    let mut bench = Bench::new(&[budget(5000, 500_000, Burst::Metered)], params());
    (0..8).for_each(|_| bench.window(64, &|_, _, step| (usize::from(step == 0), 4096)));
    let cost = bench
        .costs
        .of(Transport::Tcp, Operation::Read, 4096)
        .shared();
    let mut time = ResourceVector::ZERO;
    time[Resource::Cpu] = cost[Resource::Cpu];
    let rest = cost.minus(&time);
    let scheduler = &mut bench.scheduler;
    let lane = &mut scheduler.lanes[0];
    let left = &mut lane.left;
    (*left, lane.given) = (left.own(), lane.given.minus(&left.shared()));
    scheduler.bases_fit = [false; 2];
    let cost = bench.costs.of(Transport::Tcp, Operation::Read, 4096);
    (scheduler.free, scheduler.reserve) = (time, ResourceVector::ZERO);
    assert!(!scheduler.admit(0, &cost), "no link");
    (scheduler.free, scheduler.reserve) = (ResourceVector::ZERO, rest);
    assert!(!scheduler.admit(0, &cost), "no time");
    (scheduler.free, scheduler.reserve) = (time, rest);
    assert!(scheduler.admit(0, &cost));
    let left = (scheduler.free, scheduler.reserve, scheduler.overdrawn_ns);
    assert_eq!(left, (ResourceVector::ZERO, ResourceVector::ZERO, 0));
}

#[test]
fn bursting_tenants_share_the_rest_by_demand() {
    let mut bench = Bench::new(&[budget(50_000, 900_000, Burst::Metered); 3], params());
    for _ in 0..100 {
        bench.window(400, &|_, _, _| ALL);
    }
    let [a, b, c] = bench.ended[..] else { panic!() };
    assert!(a.abs_diff(b) < 30 && b.abs_diff(c) < 30, "{a} {b} {c}");
    assert!(a + b + c > FIT * 91 / 100);
}

#[test]
fn a_tenants_volumes_share_it_fairly() {
    let costs = table();
    let ledger = Arc::new(Ledger::new(1));
    let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
    let mut scheduler = Scheduler::new(params(), &whole, 4, &ledger).expect("good");
    scheduler.set_budget(
        0,
        &budget(100_000, 200_000, Burst::Metered),
        &costs,
        Routes::LOCAL,
    );
    for lane in 0..4 {
        scheduler.attach(lane, 0);
    }
    scheduler.set_volume(2, Some(&budget(10_000, 20_000, Burst::Metered)));
    let cost = costs.of(Transport::Tcp, Operation::Read, 4096);
    for lane in 0..4 {
        scheduler.wait(lane, &cost);
    }
    let mut ended = [0u32; 4];
    for window in 0..200 {
        let mut little = 10;
        let mut idle = 0;
        for round in 0.. {
            let lane = [0, 0, 0, 1, 2, 3][round % 6];
            idle += 1;
            if lane == 3 && little == 0 {
                continue;
            }
            if scheduler.admit(lane, &cost) {
                idle = 0;
                if lane == 3 {
                    little -= 1;
                }
                if window >= 100 {
                    ended[lane] += 1;
                }
            }
            if idle > 12 {
                break;
            }
        }
        scheduler.refill(1, 0);
    }
    let [a, b, limited, little] = ended;
    assert_eq!(little, 1000);
    // The tenant is above its base until a whole window isn't.
    assert!(!scheduler.is_within_base(0));
    (0..2).for_each(|_| scheduler.refill(1, 0));
    assert!(scheduler.is_within_base(0));
    for lane in [0, 1] {
        while scheduler.admit(lane, &cost) {}
    }
    assert!(!scheduler.is_within_base(0) && !scheduler.is_within_base(3));
    assert!((1950..=2050).contains(&limited), "{limited}");
    assert!(
        (7900..=8700).contains(&a) && (7900..=8700).contains(&b),
        "{a} {b}"
    );
    // Each lane may lose a fraction of an I/O.
    let sum: u32 = ended.iter().sum();
    assert!((19_500..=20_000).contains(&sum), "{ended:?}");
}

#[test]
fn a_small_budget_of_many_volumes_starves_none() {
    let costs = table();
    let ledger = Arc::new(Ledger::new(1));
    let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
    let mut scheduler = Scheduler::new(params(), &whole, 8, &ledger).expect("good");
    // Half an I/O per window for eight lanes.
    let small = Budget {
        base: Rate {
            iops: 500,
            bytes: 128 << 20,
        },
        burst: Rate {
            iops: 500,
            bytes: 128 << 20,
        },
        how: Burst::Metered,
    };
    scheduler.set_budget(0, &small, &costs, Routes::LOCAL);
    let cost = costs.of(Transport::Tcp, Operation::Write, 256 << 10);
    for lane in 0..8 {
        scheduler.attach(lane, 0);
        scheduler.wait(lane, &cost);
    }
    let mut ended = [0u32; 8];
    let mut from = 0;
    for _ in 0..1000 {
        for at in 0..8 {
            let lane = (from + at) % 8;
            if scheduler.admit(lane, &cost) {
                ended[lane] += 1;
                from = lane + 1;
            }
        }
        scheduler.refill(1, 0);
    }
    let sum: u32 = ended.iter().sum();
    assert!((490..=505).contains(&sum), "{ended:?}");
    assert!(
        ended.iter().all(|ended| (60..=65).contains(ended)),
        "{ended:?}"
    );
}

#[test]
fn several_reactors_share_a_tenants_budget() {
    let costs = table();
    let ledger = Arc::new(Ledger::new(1));
    let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
    let mut reactors: Vec<Scheduler> = (0..3)
        .map(|_| {
            let mut scheduler = Scheduler::new(params(), &whole, 1, &ledger).expect("good");
            scheduler.set_budget(
                0,
                &budget(100_000, 300_000, Burst::Metered),
                &costs,
                Routes::LOCAL,
            );
            scheduler.attach(0, 0);
            scheduler
        })
        .collect();
    let cost = costs.of(Transport::Tcp, Operation::Read, 4096);
    // Every 20 windows, other reactors are busy. The sum exceeds the burst limit only right after a
    // change, by savings elsewhere.
    for window in 0..300usize {
        let mut sum = 0;
        for (at, scheduler) in reactors.iter_mut().enumerate() {
            let busy = (window / 20 + at) % 3 < 1 + window / 100;
            while busy && scheduler.admit(0, &cost) {
                sum += 1;
            }
        }
        for scheduler in &mut reactors {
            scheduler.refill(1, 0);
        }
        let change = window % 20 < 5;
        assert!(
            sum <= if change { 1200 } else { 330 },
            "window {window}: {sum}"
        );
        assert!(change || sum >= 240, "window {window}: {sum}");
    }
}

#[test]
fn a_late_reactor_makes_up_for_what_passed() {
    let costs = table();
    let saved = Burst::Credit { seconds: 3600 };
    let budgets = [(2000, Burst::Metered), (2000, saved), (3000, saved)];
    for (len, (base, how)) in [4096, 128 << 10]
        .into_iter()
        .flat_map(|len| budgets.map(|b| (len, b)))
    {
        let cost = costs.of(Transport::Tcp, Operation::Read, len);
        for passed in [1, 2, 14, 60] {
            let params = Params {
                window_ns: 300_000,
                ..Params::default()
            };
            let mut bench = Bench::new(&[budget(base, 3000, how)], params);
            let scheduler = &mut bench.scheduler;
            // An hour of idleness fills the credit.
            scheduler.refill(12_000_000, 0);
            let turns = 20_000 / passed;
            let mut begun = 0u64;
            let mut waits = false;
            for _ in 0..turns {
                loop {
                    let may = if waits {
                        scheduler.resume(0, &cost)
                    } else {
                        scheduler.admit(0, &cost)
                    };
                    if !may {
                        break;
                    }
                    (begun, waits) = (begun + 1, false);
                }
                if !std::mem::replace(&mut waits, true) {
                    scheduler.wait(0, &cost);
                }
                scheduler.refill(passed, 0);
            }
            let seconds = (turns * passed) as f64 * 0.0003;
            let rate = begun as f64 * f64::from(len) / 4096.0 / seconds;
            assert!(
                (2940.0..=3080.0).contains(&rate),
                "{len} {base} {how:?} {passed}: {rate}"
            );
        }
    }
}

#[test]
fn allocations_of_lanes_add_up_to_their_tenants() {
    let one = budget(20_000, 20_000, Burst::Metered);
    let other = budget(1000, 1000, Burst::Metered);
    let mut bench = Bench::new(&[one, other], Params::default());
    bench.scheduler.detach(1);
    bench.scheduler.attach(1, 0);
    let granted = |bench: &Bench| [0, 1].map(|lane| bench.scheduler.granted_to(lane).iops);
    for _ in 0..200 {
        bench.window(64, &|lane, _, _| (usize::from(lane == 0), 4096));
    }
    let whole = bench
        .scheduler
        .statistics(0)
        .granted(bench.scheduler.params.window_ns);
    let [first, second] = granted(&bench);
    assert!(
        first > 15_000 && first <= whole.iops,
        "{first} of {whole:?}"
    );
    assert_eq!(second, 0);
    for _ in 0..200 {
        bench.window(64, &|_, _, _| (1, 4096));
    }
    let [first, second] = granted(&bench);
    let whole = bench
        .scheduler
        .statistics(0)
        .granted(bench.scheduler.params.window_ns);
    assert!(
        first + second <= whole.iops + 1,
        "{first} {second} of {whole:?}"
    );
    assert!(
        first.abs_diff(second) < 3000 && first > 7000,
        "{first} {second}"
    );
}

#[test]
fn a_tenant_below_its_base_does_not_wait_for_the_processor() {
    let base =
        1e9 / f64::from(table().of(Transport::Tcp, Operation::Read, 4096)[Resource::Cpu]) * 0.2;
    let budgets =
        [base, 10.0 * base].map(|burst| budget(base as u64, burst as u64, Burst::Metered));
    let mut bench = Bench::new(&budgets, params());
    let cost = bench.costs.of(Transport::Tcp, Operation::Read, 4096);
    let window_s = bench.scheduler.params.window_ns as f64 / 1e9;
    let begins = |bench: &mut Bench, tenant, most: usize| {
        let ios = 0..most;
        ios.take_while(|_| bench.scheduler.admit(tenant, &cost))
            .count()
    };
    let mut had = 0;
    for _ in 0..100 {
        bench.scheduler.refill(1, 0);
        assert_eq!(begins(&mut bench, 0, 1), 1);
        had = begins(&mut bench, 1, 100_000);
    }
    let due = (base * window_s) as usize - 1;
    assert_eq!(begins(&mut bench, 0, due), due);
    // The next window has less for the other tenant.
    bench.scheduler.refill(1, 0);
    let has = begins(&mut bench, 1, 100_000);
    assert!(has + 2 * due < had, "{has}, {had} before, {due}");
}
