//! Volumes of one tenant on one reactor: sizes, own bases, debt.

use super::*;
use crate::cost::Routes;

/// Lanes of tenant 0, and the cost of an I/O by size.
pub(super) fn scheduler(
    lanes: usize,
    budget: &Budget,
) -> (Scheduler, impl Fn(u32) -> ResourceVector) {
    let costs = table();
    let ledger = Arc::new(Ledger::new(1));
    let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
    let mut scheduler = Scheduler::new(params(), &whole, lanes, &ledger).expect("good");
    scheduler.set_budget(0, budget, &costs, Routes::LOCAL);
    (0..lanes).for_each(|lane| scheduler.attach(lane, 0));
    let cost = move |len| costs.of(Transport::Tcp, Operation::Read, len);
    (scheduler, cost)
}

/// I/Os begun by lanes that always wait; earlier loads are asked first.
fn begun(scheduler: &mut Scheduler, loads: &[(usize, ResourceVector)], windows: u32) -> Vec<u64> {
    let mut begun = vec![0; loads.len()];
    for (lane, cost) in loads {
        scheduler.wait(*lane, cost);
    }
    for _ in 0..windows {
        for (begun, (lane, cost)) in begun.iter_mut().zip(loads) {
            while scheduler.resume(*lane, cost) {
                scheduler.wait(*lane, cost);
                *begun += 1;
            }
        }
        scheduler.refill(1, 0);
    }
    begun
}

#[test]
fn small_ios_do_not_starve_a_siblings_large_ones() {
    // 8 KiB per window; a large I/O has 128 KiB.
    let small = budget(2000, 2000, Burst::Metered);
    for lanes in [2, 3] {
        let (mut scheduler, cost) = scheduler(lanes, &small);
        let mut loads = vec![(0, cost(4096)); lanes];
        for (lane, load) in loads.iter_mut().enumerate() {
            *load = (lane, cost(if lane == 0 { 4096 } else { 128 << 10 }));
        }
        let begun = begun(&mut scheduler, &loads, 4000);
        let bytes: Vec<u64> = (begun.iter().zip(&loads))
            .map(|(begun, (_, cost))| begun * cost[Resource::Bytes] as u64)
            .collect();
        let whole = 4000 * 8192;
        let sum: u64 = bytes.iter().sum();
        assert!(sum > whole * 95 / 100, "{bytes:?}");
        assert!(sum < whole + (256 << 10), "{bytes:?}");
        for bytes in &bytes {
            assert!(*bytes > whole / lanes as u64 * 6 / 10, "{begun:?}");
        }
    }
}

#[test]
fn volumes_have_their_own_bases_though_nothing_is_left_beside() {
    for whole in [20_000, 100_000, 400_000] {
        let all = budget(whole, whole, Burst::Metered);
        let (mut scheduler, cost) = scheduler(3, &all);
        for (lane, part) in [(0, 20), (1, 80)] {
            let own = budget(whole * part / 100, whole, Burst::Metered);
            scheduler.set_volume(lane, Some(&own));
        }
        let loads = [0, 1, 2].map(|lane| (lane, cost(4096)));
        let begun = begun(&mut scheduler, &loads, 1000);
        let part = |lane: usize| begun[lane] * 100 / whole;
        assert!(
            (18..=24).contains(&part(0)) && (76..=82).contains(&part(1)),
            "{begun:?}"
        );
        assert!(begun.iter().sum::<u64>() <= whole * 102 / 100, "{begun:?}");
    }
}

#[test]
fn more_promised_to_volumes_than_there_is_gives_no_more() {
    // Four exports of a volume whose base is all of its tenant's.
    let all = budget(100_000, 100_000, Burst::Metered);
    let (mut scheduler, cost) = scheduler(4, &all);
    (0..4).for_each(|lane| scheduler.set_volume(lane, Some(&all)));
    let loads = [0, 1, 2, 3].map(|lane| (lane, cost(4096)));
    let begun = begun(&mut scheduler, &loads, 1000);
    let sum: u64 = begun.iter().sum();
    assert!((97_000..=101_000).contains(&sum), "{begun:?}");
    assert!(begun.iter().all(|begun| *begun > 20_000), "{begun:?}");
}

#[test]
fn a_volume_pays_its_debt_above_its_limit() {
    let all = budget(100_000, 900_000, Burst::Metered);
    let (mut scheduler, cost) = scheduler(2, &all);
    let cost = cost(4096);
    let limit = budget(1000, 1000, Burst::Metered);
    // Use from before the limit is no debt.
    (0..50).for_each(|_| assert!(scheduler.admit(0, &cost)));
    scheduler.set_volume(0, Some(&limit));
    scheduler.refill(1, 0);
    while scheduler.admit(0, &cost) {}
    (0..20).for_each(|_| scheduler.borrow(0, &cost));
    scheduler.wait(0, &cost);
    // It pays one I/O per window. Setting the limit again forgives nothing.
    let mut windows = 0;
    while !scheduler.resume(0, &cost) {
        scheduler.set_volume(0, Some(&limit));
        scheduler.refill(1, 0);
        windows += 1;
        assert!(windows < 30);
    }
    assert!(windows >= 19, "{windows}");
    scheduler.borrow(0, &cost);
    assert!(scheduler.admit(1, &cost));
}

#[test]
fn no_more_is_owed_than_a_second_brings() {
    for iops in [10, 1000, 100_000] {
        for limited in [false, true] {
            let own = budget(iops, iops, Burst::Metered);
            let all = match limited {
                true => budget(100_000, 900_000, Burst::Metered),
                false => own,
            };
            let (mut scheduler, cost) = scheduler(1, &all);
            // Small, so that operations are the limit.
            let cost = cost(512);
            if limited {
                scheduler.set_volume(0, Some(&own));
            }
            let mut owing = 0;
            for window in 0..4000 {
                while scheduler.may_borrow(0) {
                    scheduler.borrow(0, &cost);
                    owing += 1;
                }
                let earned = iops * window / 1000;
                let most = iops.min(4096);
                assert!(
                    owing <= most + earned + iops / 100 + 10,
                    "{iops}: {owing} in {window}"
                );
                scheduler.refill(1, 0);
            }
            assert!(owing >= iops * 39 / 10, "{iops}: {owing}");
        }
    }
}

#[test]
fn taking_from_a_tenant_forgives_no_lanes_debt() {
    let budgets = [budget(50_000, 900_000, Burst::Metered); 2];
    let mut bench = Bench::new(&budgets, params());
    for _ in 0..20 {
        bench.window(300, &|tenant, _, _| if tenant == 0 { ALL } else { NONE });
    }
    let scheduler = &mut bench.scheduler;
    assert_eq!(scheduler.bursting, [0]);
    let cpu = Resource::Cpu;
    scheduler.attach(1, 0);
    scheduler.lanes[1].left[cpu] = 200_000;
    scheduler.lanes[1].given[cpu] = 200_000;
    scheduler.lanes[0].left[cpu] = -50_000;
    scheduler.tenants[0].spare = ResourceVector::ZERO;
    let mut need = ResourceVector::ZERO;
    need[cpu] = 10_000;
    assert!(scheduler.take_from_bursting(1, &need));
    let left = [0, 1].map(|lane: usize| scheduler.lanes[lane].left[cpu]);
    assert_eq!(left, [-50_000, 190_000]);
}

#[test]
fn an_io_from_free_resources_keeps_its_lanes_debt() {
    let all = budget(100_000, 900_000, Burst::Metered);
    let (mut scheduler, cost) = scheduler(1, &all);
    assert!(scheduler.admit(0, &cost(4096)));
    let cpu = Resource::Cpu;
    scheduler.lanes[0].left[cpu] = -50_000;
    assert!(scheduler.admit(0, &cost(4096)));
    assert_eq!(scheduler.lanes[0].left[cpu], -50_000);
}

#[test]
fn a_slots_next_tenant_owes_nothing() {
    let small = budget(1000, 1000, Burst::Metered);
    let (mut scheduler, cost) = scheduler(1, &small);
    // More than a second's accrual.
    (0..50).for_each(|_| scheduler.borrow(0, &cost(128 << 10)));
    scheduler.refill(1, 0);
    scheduler.detach(0);
    for is_new in [false, true] {
        if is_new {
            scheduler.begin_tenant(0);
        }
        scheduler.attach(0, 0);
        scheduler.refill(10, 0);
        assert_eq!(scheduler.admit(0, &cost(4096)), is_new);
        scheduler.detach(0);
    }
}
