//! Saving base, and spending it above the base.

use super::*;
use crate::cost::Routes;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

#[test]
fn credit_is_earned_below_the_base_and_spent_above() {
    let seconds = 1;
    let mut bench = Bench::new(
        &[budget(100_000, 300_000, Burst::Credit { seconds })],
        params(),
    );
    let cap = 100_000 * PARTS as u64;
    let mut most = 0;
    let mut ended = 0;
    let mut run = |bench: &mut Bench, windows: u64, each: usize| {
        let mut sum = 0;
        for _ in 0..windows {
            bench.window(1000, &|_, window, step| even(each, window, step));
            sum += bench.ended[0];
            ended += bench.ended[0];
            let credit = bench.scheduler.statistics(0).credit_parts;
            assert!(credit <= cap);
            most = most.max(credit);
            assert!(ended <= 100 * bench.window + 300, "{ended}");
        }
        sum
    };
    let base = run(&mut bench, 100, 1000);
    assert!((9_900..=10_100).contains(&base), "{base}");
    bench.forget(0);
    // Half of the base for 400 windows saves 200 windows' base: 100 windows at three times the
    // base.
    run(&mut bench, 400, 50);
    let burst = run(&mut bench, 100, 1000);
    assert!((28_000..=30_500).contains(&burst), "{burst}");
    let after = run(&mut bench, 100, 1000);
    assert!((9_900..=11_500).contains(&after), "{after}");
    bench.forget(0);
    run(&mut bench, 3000, 0);
    run(&mut bench, 1, 1);
    assert_eq!(most, cap);
}

#[test]
fn an_idle_tenant_accrues_its_base_while_it_has_volumes() {
    let costs = table();
    let ledger = Arc::new(Ledger::new(1));
    let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
    let mut scheduler = Scheduler::new(params(), &whole, 1, &ledger).expect("good");
    let credit = Burst::Credit { seconds: 600 };
    let cost = costs.of(Transport::Tcp, Operation::Read, 4096);
    let has = |scheduler: &Scheduler| scheduler.statistics(0).credit_parts / PARTS as u64;
    // Windows before its first volume don't count.
    scheduler.refill(5000, 0);
    scheduler.set_budget(0, &budget(10_000, 20_000, credit), &costs, Routes::LOCAL);
    scheduler.attach(0, 0);
    assert!(scheduler.admit(0, &cost));
    assert_eq!(has(&scheduler), 0);
    while scheduler.is_reckoned_with() {
        scheduler.refill(1, 0);
    }
    let begun = has(&scheduler);
    // 10 per window, visible before it returns, and not counted twice.
    scheduler.refill(1000, 0);
    scheduler.earn(0);
    let earned = has(&scheduler) - begun;
    assert!((9_900..=10_000).contains(&earned), "{earned}");
    scheduler.earn(0);
    assert_eq!(has(&scheduler) - begun, earned);
    scheduler.refill(1000, 0);
    scheduler.set_budget(0, &budget(100_000, 200_000, credit), &costs, Routes::LOCAL);
    assert!(scheduler.admit(0, &cost));
    let earned = has(&scheduler) - begun - earned;
    assert!((9_900..=10_110).contains(&earned), "{earned}");
}

#[derive(Clone, Debug)]
enum Does {
    /// Reactor, I/Os, KiB, windows.
    Asks(usize, usize, u32, u32),
    /// Windows without a reactor.
    Away(usize, u32),
    /// Base in I/Os per window, multiple for the burst limit, seconds of credit (`None`: metered).
    Budget(u64, u64, Option<u32>),
    Moves(usize),
}

fn does() -> impl Strategy<Value = Does> {
    let len = prop::sample::select(vec![512u32, 4096, 64 << 10]);
    prop_oneof![
        4 => (0usize..2, 0usize..400, len, 1u32..20).prop_map(|(at, n, len, windows)| Does::Asks(at, n, len, windows)),
        1 => (0usize..2, 1u32..40).prop_map(|(at, windows)| Does::Away(at, windows)),
        2 => (2u64..60, 1u64..20, prop::option::weighted(0.6, 1u32..30)).prop_map(|(base, more, s)| Does::Budget(base, more, s)),
        1 => (0usize..2).prop_map(Does::Moves),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(11),
        ..ProptestConfig::default()
    })]

    /// Credit never exceeds what the base accrued, for any load and any change of budgets.
    #[test]
    fn credit_never_negative_nor_over_cap(all in prop::collection::vec(does(), 1..40)) {
        let costs = table();
        let ledger = Arc::new(Ledger::new(1));
        let whole = [1e9, 1e12, 1e12, 100e9, 100e9, 100e6 * f64::from(PARTS)];
        let mut reactors = [0, 1].map(|_| Scheduler::new(params(), &whole, 1, &ledger).expect("good"));
        let of = |base: u64, more: u64, seconds: Option<u32>| {
            let how = seconds.map_or(Burst::Metered, |seconds| Burst::Credit { seconds });
            budget(base * 1000, base * more * 1000, how)
        };
        let mut now = of(10, 10, Some(2));
        for scheduler in &mut reactors {
            scheduler.set_budget(0, &now, &costs, Routes::LOCAL);
            scheduler.attach(0, 0);
        }
        // Accrued base, plus what each reactor may have saved, in I/Os of 4 KiB.
        let saved = u64::from(params().saved_windows) + 2;
        let mut brought = 2 * saved * 10;
        for does in &all {
            let (turns, asks) = match *does {
                Does::Asks(at, n, len, windows) => (windows, Some((at, n, len))),
                Does::Away(_, windows) => (windows, None),
                Does::Budget(base, more, seconds) => {
                    now = of(base, more, seconds);
                    reactors.iter_mut().for_each(|s| s.set_budget(0, &now, &costs, Routes::LOCAL));
                    brought += 2 * saved * base;
                    (0, None)
                }
                Does::Moves(at) => {
                    reactors[at].detach(0);
                    reactors[at].attach(0, 0);
                    (1, None)
                }
            };
            for _ in 0..turns {
                if let Some((at, n, len)) = asks {
                    let cost = costs.of(Transport::Tcp, Operation::Read, len);
                    let _ = (0..n).take_while(|_| reactors[at].admit(0, &cost)).count();
                }
                for (at, scheduler) in reactors.iter_mut().enumerate() {
                    let is_away = matches!(does, Does::Away(away, _) if *away == at);
                    if !is_away {
                        scheduler.refill(1, 0);
                    }
                }
                brought += now.base.iops / 1000;
            }
            if let Does::Away(at, windows) = *does {
                reactors[at].refill(windows.into(), 0);
            }
            let entry = ledger.entry(0);
            for (own, each) in [(0, PARTS as u64), (1, 4096)] {
                let bucket = &entry.credit[own];
                prop_assert!(bucket.has() <= bucket.cap(), "{does:?}");
                prop_assert!(bucket.has() <= brought * each, "{} of {}: {does:?}", bucket.has() / each, brought);
            }
            for scheduler in &reactors {
                let statistics = scheduler.statistics(0);
                let caps = [0, 1].map(|own| entry.credit[own].cap());
                prop_assert!(statistics.credit_parts <= caps[0] && statistics.credit_bytes <= caps[1], "{does:?}");
            }
        }
    }
}
