//! Volumes of one tenant whose own bases are no whole number of I/Os per window.

use super::volumes::scheduler;
use super::*;
use crate::cost::{Profile, Route, Routes};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// A lane with `depth` I/Os always waiting.
struct Always {
    lane: usize,
    cost: ResourceVector,
    depth: usize,
    /// Waits only in one of this many windows.
    period: u64,
}

/// Counts the I/Os that begin. Earlier loads are asked first, at every step.
fn begun(scheduler: &mut Scheduler, loads: &[Always], windows: u64) -> Vec<u64> {
    let mut begun = vec![0; loads.len()];
    let each = |scheduler: &mut Scheduler, load: &Always, waits: bool| {
        (0..load.depth).for_each(|_| match waits {
            true => scheduler.wait(load.lane, &load.cost),
            false => scheduler.cancel(load.lane, &load.cost),
        });
    };
    for window in 0..windows {
        let asks = |load: &Always| window % load.period == 0;
        let begins = |load: &Always| asks(load) && (load.period > 1 || window == 0);
        for load in loads.iter().filter(|load| begins(load)) {
            each(scheduler, load, true);
        }
        for _ in 0..4 {
            for (begun, load) in begun.iter_mut().zip(loads) {
                if !asks(load) {
                    continue;
                }
                while scheduler.resume(load.lane, &load.cost) {
                    scheduler.wait(load.lane, &load.cost);
                    *begun += 1;
                }
            }
        }
        scheduler.refill(1, 0);
        for load in loads.iter().filter(|load| asks(load) && load.period > 1) {
            each(scheduler, load, false);
        }
    }
    for load in loads.iter().filter(|load| load.period == 1) {
        each(scheduler, load, false);
    }
    begun
}

#[test]
fn a_base_of_less_than_an_io_in_a_window_is_kept() {
    const WINDOWS: u64 = 5000;
    // Two or three per window; four siblings want everything, so equal parts would be a third each.
    for burst in [2000, 3000] {
        let all = budget(2000, burst, Burst::Metered);
        let (mut scheduler, cost) = scheduler(6, &all);
        let bases = [(4, 1400), (5, 600)];
        for (lane, base) in bases {
            scheduler.set_volume(lane, Some(&budget(base, burst, Burst::Metered)));
        }
        let depth = |lane| if lane < 4 { 64 } else { 1 };
        let loads: Vec<_> = (0..6)
            .map(|lane| Always {
                lane,
                cost: cost(4096),
                depth: depth(lane),
                period: 1,
            })
            .collect();
        let begun = begun(&mut scheduler, &loads, WINDOWS);
        for (lane, base) in bases {
            let due = base * WINDOWS / 1000;
            assert!(
                begun[lane] + 4 >= due,
                "{burst}: {due} of lane {lane}: {begun:?}"
            );
        }
        let sum: u64 = begun.iter().sum();
        let whole = burst * WINDOWS / 1000;
        assert!(
            (whole * 98 / 100..=whole + 20).contains(&sum),
            "{burst}: {begun:?}"
        );
    }
}

#[test]
fn a_base_is_kept_of_ios_of_any_size() {
    // 40 KiB per window, with I/Os of 4 KiB to 1 MiB.
    let all = budget(10_000, 10_000, Burst::Metered);
    let (mut scheduler, cost) = scheduler(6, &all);
    let sizes = [4096, 128 << 10, 1 << 20, 4096, 128 << 10, 4096];
    let bases = [0, 0, 0, 500, 6000, 2500];
    for (lane, base) in bases.into_iter().enumerate() {
        if base > 0 {
            scheduler.set_volume(lane, Some(&budget(base, 10_000, Burst::Metered)));
        }
    }
    let loads: Vec<_> = (0..6)
        .map(|lane| Always {
            lane,
            cost: cost(sizes[lane]),
            depth: if lane < 3 { 32 } else { 2 },
            period: 1,
        })
        .collect();
    let begun = begun(&mut scheduler, &loads, 5000);
    for (lane, base) in bases.into_iter().enumerate() {
        let has = begun[lane] * u64::from(sizes[lane]);
        let due = base * 4096 * 5;
        assert!(
            has + 2 * u64::from(sizes[lane]) + due / 1000 >= due,
            "{due} of lane {lane}, {has}: {begun:?}"
        );
    }
    assert!(begun[0] > 0 && begun[1] > 0 && begun[2] > 0, "{begun:?}");
}

#[test]
fn a_base_has_its_part_of_what_is_shared() {
    const VOLUMES: usize = 50;
    // Two tenants burst, and the second wants everything; the first one's base is 20 I/Os per
    // window.
    let budgets = [
        budget(20_000, 900_000, Burst::Metered),
        budget(700_000, 900_000, Burst::Metered),
    ];
    let costs = table();
    let ledger = Arc::new(Ledger::new(2));
    let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
    let mut scheduler = Scheduler::new(params(), &whole, VOLUMES + 1, &ledger).expect("good");
    for (tenant, budget) in budgets.iter().enumerate() {
        scheduler.set_budget(tenant, budget, &costs, Routes::LOCAL);
    }
    (0..VOLUMES).for_each(|lane| scheduler.attach(lane, 0));
    scheduler.attach(VOLUMES, 1);
    let bases = [(VOLUMES - 2, 9_500), (VOLUMES - 1, 900)];
    for (lane, base) in bases {
        scheduler.set_volume(lane, Some(&budget(base, 900_000, Burst::Metered)));
    }
    let cost = costs.of(Transport::Tcp, Operation::Read, 4096);
    let loads: Vec<_> = (0..=VOLUMES)
        .rev()
        .map(|lane| Always {
            lane,
            cost,
            depth: if lane == VOLUMES { 2000 } else { 64 },
            period: 1,
        })
        .collect();
    let begun = begun(&mut scheduler, &loads, 2000);
    for (lane, base) in bases {
        let has = begun[VOLUMES - lane];
        assert!(has + 60 >= base * 2, "{base}, {has}: {begun:?}");
    }
}

/// Four tenants with half of the processor as a base: guaranteed ones have it, awake or waking, and
/// no other stops.
#[test]
fn guaranteed_bases_come_first_where_there_are_too_many() {
    const WINDOWS: u64 = 400;
    let rate = Rate {
        iops: 1000,
        bytes: 1000 * 4096,
    };
    let each = table().most_of(rate)[Resource::Cpu as usize] / 1000.0;
    // I/Os of each after the second one woke, its I/Os in its first window, and the final parts of
    // the bases.
    let run = |part: f64, guaranteed: [bool; 4]| {
        let iops = (part * 1e9 / each) as u64;
        let mut bench = Bench::new(&[budget(iops, 2 * iops, Burst::Metered); 4], params());
        for (tenant, guaranteed) in guaranteed.into_iter().enumerate() {
            bench.scheduler.set_guaranteed(tenant, guaranteed);
        }
        let load = |tenant: usize, window: u64, _: usize| match tenant == 1 && window < WINDOWS {
            true => (0, 4096),
            false => (64, 4096),
        };
        let (mut ended, mut woken) = ([0u64; 4], 0);
        for window in 0..2 * WINDOWS {
            bench.window(4096, &load);
            let counts = window >= WINDOWS;
            for (sum, ended) in ended.iter_mut().zip(&bench.ended) {
                *sum += ended * u64::from(counts);
            }
            if window == WINDOWS {
                woken = bench.ended[1];
            }
        }
        let has = bench.scheduler.tenants.iter();
        let has = has.map(|one| one.allocated.0[0] / one.shared_base.0[0]);
        (iops * WINDOWS / 1000, ended, woken, has.collect::<Vec<_>>())
    };
    let (due, ended, woken, has) = run(0.47, [true, true, false, false]);
    for (ended, has) in ended[..2].iter().zip(&has) {
        assert!(ended + 2 * due / WINDOWS >= due, "{due}: {ended:?}");
        assert!(*has > 0.999, "{has:?}");
    }
    assert!(2 * woken >= due / WINDOWS, "{due}: {woken}");
    for (ended, has) in ended[2..].iter().zip(&has[2..]) {
        assert!(
            *ended >= due / 100 && *has < 0.1,
            "{due}: {ended:?} {has:?}"
        );
    }
    // Higher costs: even guaranteed bases don't fit, but none stops.
    let (.., has) = run(0.6, [true, true, false, false]);
    assert!(has.iter().all(|has| *has > 0.03), "{has:?}");
    assert!(has[..2].iter().all(|has| *has > 0.7), "{has:?}");
    for said in [true, false] {
        let (due, ended, _, has) = run(0.47, [said; 4]);
        let mean = ended.iter().sum::<u64>() / 4;
        let is_mean = |ended: &u64| ended.abs_diff(mean) < mean / 20;
        assert!(mean < due && ended.iter().all(is_mean), "{due}: {ended:?}");
        assert!(has.iter().all(|one| (one - has[0]).abs() < 0.01), "{has:?}");
    }
}

/// Part of the tenant's base in percent, size, waiting I/Os, and period in windows.
type Volume = (u64, u32, usize, u64);

fn volume() -> impl Strategy<Value = Volume> {
    let len = prop::sample::select(vec![512, 4096, 16 << 10, 128 << 10, 1 << 20]);
    let period = prop_oneof![3 => Just(1u64), 1 => 2u64..9];
    (0u64..100, len, 1usize..40, period)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(7),
        ..ProptestConfig::default()
    })]

    /// Every volume that wants its base has it, except for two I/Os in flight and the first
    /// windows.
    #[test]
    fn every_volume_has_its_own_base(
        iops in 300u64..30_000,
        more in 1u64..4,
        volumes in prop::collection::vec(volume(), 2..12),
        without in 0u64..3,
    ) {
        const WINDOWS: u64 = 2000;
        let all = budget(iops, iops * more, Burst::Metered);
        let lanes = volumes.len();
        let (mut scheduler, cost) = scheduler(lanes, &all);
        let sum = volumes.iter().map(|(part, ..)| part).sum::<u64>().max(1) * (2 + without) / 2;
        let bases: Vec<u64> = volumes.iter().map(|(part, ..)| iops * part / sum).collect();
        for (lane, base) in bases.iter().enumerate() {
            if *base > 0 {
                let own = budget(*base, iops * more, Burst::Metered);
                scheduler.set_volume(lane, Some(&own));
            }
        }
        let load = |(lane, (_, len, depth, period)): (usize, &Volume)| Always {
            lane,
            cost: cost(*len),
            depth: *depth,
            period: *period,
        };
        let loads: Vec<_> = volumes.iter().enumerate().map(load).collect();
        let begun = begun(&mut scheduler, &loads, WINDOWS);
        let always = |lane: &usize| volumes[*lane].3 == 1;
        for (lane, base) in bases.iter().enumerate().filter(|(lane, _)| always(lane)) {
            let each = u64::from(volumes[lane].1).max(4096);
            let has = begun[lane] * each;
            let due = base * 4096 * (WINDOWS - 8) / 1000;
            prop_assert!(has + 2 * each >= due, "{due} of lane {lane}, {has}: {begun:?}, {bases:?}");
        }
        let whole = iops * more * (WINDOWS + 10) / 1000;
        let bytes: u64 = begun.iter().zip(&volumes).map(|(begun, (_, len, ..))| begun * u64::from(*len)).sum();
        let used = begun.iter().sum::<u64>().max(bytes / 4096);
        prop_assert!(used <= whole + 512, "{used} of {whole}: {begun:?}");
        let all_ask = (0..lanes).all(|lane| always(&lane));
        prop_assert!(!all_ask || used + 512 >= whole * 9 / 10, "{used} of {whole}: {begun:?}");
        let left = (iops * more - bases.iter().sum::<u64>()) * WINDOWS / 1000;
        for (lane, begun) in begun.iter().enumerate().filter(|(lane, _)| always(lane)) {
            let each = (u64::from(volumes[lane].1) / 4096).max(1);
            prop_assert!(left < 8 * lanes as u64 * each || *begun > 0, "{lane}: {bases:?}");
        }
    }
}

/// A base costs what its frontends cost: with TCP at ten times the cost, the bases of these two VMs
/// would not fit.
#[test]
fn a_base_is_what_it_takes_by_the_frontends_it_comes_by() {
    let profile = |ns: f64| Profile::line((ns, 0.0), (10.0, 0.0), 0);
    let costs = CostTable::new([10_000.0, 1000.0, 1000.0].map(|ns| [profile(ns); 3]));
    let vms = Routes::of([Route::local(Transport::Pcie)].into_iter());
    // A reactor can serve 1000 I/Os of a VM in a window of 1 ms.
    for (frontends, fits) in [(vms, true), (Routes::default(), false)] {
        let mut bench = Bench::new(&[budget(100_000, 2_000_000, Burst::Metered); 2], params());
        let scheduler = &mut bench.scheduler;
        for tenant in 0..2 {
            let budget = budget(100_000, 2_000_000, Burst::Metered);
            scheduler.set_budget(tenant, &budget, &costs, frontends);
        }
        let cost = costs.of(Transport::Pcie, Operation::Read, 4096);
        let mut kept_waiting = 0;
        for window in 0..200 {
            while scheduler.resume(0, &cost) {
                scheduler.wait(0, &cost);
            }
            scheduler.wait(0, &cost);
            let refused = (0..50).filter(|_| !scheduler.admit(1, &cost)).count();
            kept_waiting += if window > 0 { refused } else { 0 };
            scheduler.refill(1, 0);
        }
        assert_eq!(kept_waiting == 0, fits, "{frontends:?}: {kept_waiting}");
    }
}
