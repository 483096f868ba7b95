//! Several reactors with volumes of one tenant, and idle reactors.

use super::*;
use crate::cost::Routes;
use crate::ledger::Newest;

/// A reactor for each number of lanes, all of tenant 0.
pub(super) fn reactors(
    lanes: &[usize],
    budget: &Budget,
    params: &Params,
) -> (Vec<Scheduler>, ResourceVector) {
    let costs = table();
    let ledger = Arc::new(Ledger::new(1));
    let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
    let make = |lanes: &usize| {
        let mut scheduler = Scheduler::new(params.clone(), &whole, *lanes, &ledger).expect("good");
        scheduler.set_budget(0, budget, &costs, Routes::LOCAL);
        (0..*lanes).for_each(|lane| scheduler.attach(lane, 0));
        scheduler
    };
    let cost = costs.of(Transport::Tcp, Operation::Read, 4096);
    (lanes.iter().map(make).collect(), cost)
}

/// 256 I/Os wait on one reactor, one on the other; counts those begun in 200 windows.
fn begun(own: Option<&Budget>) -> [u64; 2] {
    let all = budget(10_000, 10_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1, 1], &all, &params());
    reactors[1].set_volume(0, own);
    for (scheduler, depth) in reactors.iter_mut().zip([256, 1]) {
        (0..depth).for_each(|_| scheduler.wait(0, &cost));
    }
    let mut begun = [0; 2];
    for window in 0..400 {
        for _ in 0..STEPS {
            for (scheduler, begun) in reactors.iter_mut().zip(&mut begun) {
                if scheduler.resume(0, &cost) {
                    *begun += u64::from(window >= 200);
                    scheduler.wait(0, &cost);
                }
            }
        }
        reactors
            .iter_mut()
            .for_each(|scheduler| scheduler.refill(1, 0));
    }
    begun
}

#[test]
fn a_long_queue_does_not_take_a_tenants_budget_from_its_volumes_elsewhere() {
    let [long, short] = begun(None);
    assert!((1900..=2010).contains(&(long + short)), "{long} {short}");
    assert!(short >= 900, "{long} {short}");
    // A volume has its own base on any reactor, and a part of the rest.
    let [long, short] = begun(Some(&budget(8_000, 10_000, Burst::Metered)));
    assert!((1900..=2010).contains(&(long + short)), "{long} {short}");
    assert!((1600..=1900).contains(&short), "{long} {short}");
}

#[test]
fn a_part_of_a_small_budget_is_not_nothing() {
    let small = Budget {
        base: Rate {
            iops: 1000,
            bytes: 64 << 10,
        },
        burst: Rate {
            iops: 1000,
            bytes: 64 << 10,
        },
        how: Burst::Metered,
    };
    let (mut reactors, cost) = reactors(&[40, 1], &small, &Params::default());
    for scheduler in &mut reactors {
        for lane in 0..scheduler.lanes.len() {
            scheduler.wait(lane, &cost);
        }
    }
    let mut begun = [0u32; 2];
    for _ in 0..33_333 {
        for (scheduler, begun) in reactors.iter_mut().zip(&mut begun) {
            let lane = *begun as usize % scheduler.lanes.len();
            if scheduler.resume(lane, &cost) {
                *begun += 1;
                scheduler.wait(lane, &cost);
            }
            scheduler.refill(1, 0);
        }
    }
    // At 16 per second, one of 41 volumes gets 4 in that time.
    let [many, one] = begun;
    assert!((3..=6).contains(&one), "{many} {one}");
    assert!((150..=166).contains(&(many + one)), "{many} {one}");
}

#[test]
fn a_reactor_that_sleeps_has_no_claim() {
    let all = budget(10_000, 10_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1, 1], &all, &params());
    let [first, second] = &mut reactors[..] else {
        panic!()
    };
    for _ in 0..20 {
        while first.admit(0, &cost) {}
        first.refill(1, 0);
    }
    let mut windows = 0;
    while first.is_reckoned_with() {
        first.refill(1, 0);
        windows += 1;
        assert!(windows <= 10);
    }
    let ledger = first.ledger.clone();
    assert_eq!(ledger.awake(), 1);
    second.wait(0, &cost);
    while second.resume(0, &cost) {
        second.wait(0, &cost);
    }
    second.refill(1, 0);
    assert_eq!(ledger.awake(), 1);
    assert!(second.tenants[0].share > 0.9, "{}", second.tenants[0].share);
}

#[test]
fn a_reactor_that_slept_gets_one_window_of_shared_resources() {
    let all = budget(10_000, 10_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1], &all, &params());
    let scheduler = &mut reactors[0];
    let at = Resource::Cpu as usize;
    // Includes the last window's reserve.
    let most = scheduler.whole[at] * 1.06;
    let there = |scheduler: &Scheduler| {
        let given = scheduler.free.0[at] + scheduler.reserve.0[at];
        given as f32 + scheduler.tenants[0].allocated.0[at]
    };
    scheduler.refill(1000, 0);
    assert!(there(scheduler) <= most, "{}", there(scheduler));
    assert!(scheduler.admit(0, &cost));
    scheduler.refill(8, 0);
    assert!(there(scheduler) > 7.0 * most, "{}", there(scheduler));
    scheduler.refill(8, 0);
    scheduler.refill(64, 0);
    assert!(there(scheduler) <= most, "{}", there(scheduler));
}

#[test]
fn processors_that_help_are_given_out_as_long_as_they_do() {
    let all = budget(10_000, 10_000_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1], &all, &params());
    let scheduler = &mut reactors[0];
    let mut in_a_window = |processors: f32| {
        scheduler.set_processors(processors);
        let mut begun = 0;
        for _ in 0..20 {
            scheduler.refill(1, 0);
            begun = 0;
            scheduler.wait(0, &cost);
            while scheduler.resume(0, &cost) {
                begun += 1;
                scheduler.wait(0, &cost);
            }
        }
        begun as f64
    };
    let (one, two, again) = (in_a_window(1.0), in_a_window(2.0), in_a_window(1.0));
    assert!((1.9..2.1).contains(&(two / one)), "{one}, {two}");
    assert!((0.9..1.1).contains(&(again / one)), "{one}, {again}");
}

/// Half of what a helper's time admits stays queued and raises the processor's correction. Without
/// the helper, bases must not suffer.
#[test]
fn a_lost_helper_lowers_the_processors_correction() {
    let params = Params::default();
    let all = budget(10_000, 10_000_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1], &all, &params);
    let scheduler = &mut reactors[0];
    let dear_ns = 10 * params.target_delay_ns;
    let window = |scheduler: &mut Scheduler| waiting_window(scheduler, &cost);
    let factor = |scheduler: &Scheduler| scheduler.corrections()[Resource::Cpu as usize];
    scheduler.set_processors(2.0);
    for _ in 0..15 {
        scheduler.observe(Resource::Cpu, dear_ns, 1);
        window(scheduler);
    }
    let before = factor(scheduler);
    assert!((1.5..2.0).contains(&before), "{before}");
    scheduler.set_processors(1.0);
    assert_eq!(factor(scheduler), 1.0);
    for _ in 0..30 {
        scheduler.observe(Resource::Cpu, dear_ns, 1);
        window(scheduler);
    }
    let before = factor(scheduler);
    scheduler.set_processors(1.0);
    assert_eq!(factor(scheduler), before);
    scheduler.set_processors(2.0);
    scheduler.set_processors(1.5);
    assert_eq!(factor(scheduler), before * 0.75);
}

#[test]
fn a_tenants_newest_window_is_a_sum_over_reactors() {
    let all = budget(100_000, 100_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1, 1], &all, &params());
    let mut sum = Newest::default();
    for _ in 0..50 {
        for scheduler in &mut reactors {
            scheduler.wait(0, &cost);
            while scheduler.resume(0, &cost) {
                scheduler.wait(0, &cost);
            }
            scheduler.refill(1, 0);
            sum = scheduler.newest(0);
        }
    }
    for rate in [sum.granted, sum.used] {
        assert!((90_000..=110_000).contains(&rate.iops), "{sum:?}");
    }
    assert_eq!(sum.waited, 100);
    for (scheduler, most) in reactors.iter_mut().zip([60_000, 0]) {
        scheduler.withdraw();
        let left = scheduler.newest(0).granted.iops;
        assert!(left <= most, "{left}");
    }
    assert_eq!(reactors[0].newest(0), Newest::default());
}

#[test]
fn a_window_reports_use_above_the_base_and_costs() {
    let all = budget(20_000, 100_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1], &all, &params());
    let scheduler = &mut reactors[0];
    let mut newest = Newest::default();
    for _ in 0..50 {
        scheduler.wait(0, &cost);
        while scheduler.resume(0, &cost) {
            scheduler.wait(0, &cost);
        }
        scheduler.refill(1, 0);
        newest = scheduler.newest(0);
    }
    let above = newest.used.iops - newest.above.iops;
    assert!((19_000..=21_000).contains(&above), "{newest:?}");
    let timed = [Resource::Cpu, Resource::DeviceRead, Resource::DeviceWrite];
    let each: i32 = timed.map(|of| cost[of]).iter().sum();
    let due = newest.used.iops * each as u64;
    assert!(
        newest.cost_ns.abs_diff(due) <= due / 100,
        "{newest:?} {due}"
    );
    assert!(newest.corrected_ns > 0, "{newest:?}");
    scheduler.set_budget(
        0,
        &budget(100_000, 100_000, Burst::Metered),
        &table(),
        Routes::LOCAL,
    );
    (0..4).for_each(|_| scheduler.refill(1, 0));
    assert!(scheduler.admit(0, &cost));
    scheduler.refill(1, 0);
    let newest = scheduler.newest(0);
    assert!(newest.used.iops > 0 && newest.above.iops == 0, "{newest:?}");
}

#[test]
fn a_late_windows_use_is_reported_per_second() {
    let all = budget(100_000, 100_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1], &all, &params());
    let scheduler = &mut reactors[0];
    let a_second = 1e9 / scheduler.params.window_ns as f64;
    for passed in [1, 4] {
        scheduler.refill(1, 0);
        let begun = (0..3).filter(|_| scheduler.admit(0, &cost)).count();
        scheduler.refill(passed, 0);
        let used = scheduler.newest(0).used.iops as f64;
        let expected = begun as f64 * a_second / passed as f64;
        assert!((used - expected).abs() <= 1.0, "{used} {expected}");
    }
}

fn waiting_window(scheduler: &mut Scheduler, cost: &ResourceVector) {
    scheduler.wait(0, cost);
    while scheduler.resume(0, cost) {
        scheduler.wait(0, cost);
    }
    scheduler.refill(1, 0);
    scheduler.cancel(0, cost);
}

/// An idle reactor ends windows in time only until its share has gone to others: two windows.
#[test]
fn an_idle_reactors_share_goes_to_others_in_two_windows() {
    let all = budget(100_000, 100_000, Burst::Metered);
    let (mut reactors, cost) = reactors(&[1, 1], &all, &params());
    let window = |scheduler: &mut Scheduler| waiting_window(scheduler, &cost);
    (0..50).for_each(|_| reactors.iter_mut().for_each(window));
    let [first, second] = &mut reactors[..] else {
        panic!()
    };
    assert!((0.4..0.6).contains(&second.tenants[0].share));
    let mut windows = 0;
    while first.shares_with_others() {
        first.refill(1, 0);
        windows += 1;
        assert!(windows <= 2);
    }
    window(second);
    assert!(second.tenants[0].share > 0.9, "{}", second.tenants[0].share);
    // Others still count on its windows; with new I/Os it publishes again.
    assert!(first.is_reckoned_with() && second.shares_with_others());
    while first.is_reckoned_with() {
        first.refill(1, 0);
    }
    first.admit(0, &cost);
    assert!(first.shares_with_others());
    // A tenant on one reactor publishes nothing.
    second.detach(0);
    first.refill(1, 0);
    assert!(!first.shares_with_others());
}
