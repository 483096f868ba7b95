//! Budgets from the daemon: bad values are refused by name, repetitions change nothing, and changes
//! work under load.
#![allow(missing_docs)]

mod common;

use common::{HOST, TestEngine};
use forebay_initiator::load::{Amount, LoadReport, LoadSpec, run};
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_qos::cost::default_profiles;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{CostProfile, NodeCapacity, Scheduling, TenantId, ToEngine};
use forebay_xlate::boundary::region::MAX_TENANTS;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

fn scheduling(params: &[(&str, f64)]) -> Option<Box<Scheduling>> {
    let params = params.iter();
    Some(Box::new(Scheduling {
        policy: Default::default(),
        params: params
            .map(|(name, value)| ((*name).to_owned(), value.to_bits()))
            .collect(),
        capacity: NodeCapacity::UNLIMITED,
        costs: default_profiles().map(|row| row.each_ref().map(CostProfile::from)),
    }))
}

fn set(scheduling: Option<Box<Scheduling>>) -> impl FnOnce(u64) -> ToEngine {
    move |request| ToEngine::SetScheduling {
        request,
        scheduling,
    }
}

fn tenant(tenant: u64, budget: Option<Budget>) -> impl FnOnce(u64) -> ToEngine {
    move |request| ToEngine::SetTenantBudget {
        request,
        tenant: TenantId(tenant),
        budget,
        credit: [0; 2],
        guaranteed: true,
    }
}

fn volume(volume: u64, tenant: u64, budget: Option<Budget>) -> impl FnOnce(u64) -> ToEngine {
    move |request| ToEngine::SetVolumeBudget {
        request,
        volume: VolumeId(volume),
        tenant: TenantId(tenant),
        budget,
    }
}

#[test]
fn invalid_scheduling_is_refused_by_name() {
    let mut engine = TestEngine::start("ram", 8 << 20, 1);
    engine.volume(1, 1 << 20, 4096);
    let mut said =
        |order: &mut dyn FnMut(u64) -> ToEngine| engine.refusal(order).unwrap_or_default();
    macro_rules! said {
        ($order:expr) => {{
            let mut order = Some($order);
            said(&mut |request| (order.take().unwrap())(request))
        }};
    }
    let budget = Budget::fixed(1000);
    assert!(said!(tenant(1, Some(budget))).contains("needs scheduling"));
    assert!(said!(volume(1, 1, None)).contains("needs scheduling"));
    assert_eq!(said!(tenant(1, None)), "");
    assert!(said!(set(scheduling(&[("speed", 1.0)]))).contains("speed"));
    assert!(said!(set(scheduling(&[("keep", 9.0)]))).contains("keep is 9"));
    let mut nothing = scheduling(&[]);
    if let Some(scheduling) = &mut nothing {
        scheduling.capacity.link_in_bytes_s = 0;
    }
    assert!(said!(set(nothing)).contains("incoming bytes"));
    // None of that was applied.
    assert!(said!(tenant(1, Some(budget))).contains("needs scheduling"));
    for _ in 0..2 {
        assert_eq!(said!(set(scheduling(&[]))), "");
        assert_eq!(said!(tenant(1, Some(budget))), "");
        assert_eq!(said!(volume(1, 1, None)), "");
    }
    // A refusal leaves the previous state.
    assert!(said!(set(scheduling(&[("forget", 7.0)]))).contains("forget"));
    assert!(said!(volume(2, 1, None)).contains("is not served"));
    assert!(said!(volume(1, 2, None)).contains("tenant 2 has no budget"));
    let bad = Budget {
        base: Rate {
            iops: 5000,
            ..budget.base
        },
        ..budget
    };
    assert!(said!(tenant(1, Some(bad))).contains("tenant 1: base IOPS of 5000"));
    assert!(said!(volume(1, 1, Some(bad))).contains("base IOPS of 5000"));
    let never = Budget {
        how: Burst::Credit { seconds: 0 },
        ..budget
    };
    assert!(said!(tenant(1, Some(never))).contains("credit seconds"));
    for other in 2..=MAX_TENANTS as u64 {
        assert_eq!(said!(tenant(other, Some(budget))), "");
    }
    assert!(said!(tenant(5000, Some(budget))).contains("at most 1024 tenants"));
    assert_eq!(said!(tenant(7, None)), "");
    assert_eq!(said!(tenant(5000, Some(budget))), "");
    for _ in 0..2 {
        assert_eq!(said!(set(None)), "");
    }
    assert!(said!(volume(1, 1, None)).contains("needs scheduling"));
}

#[test]
fn an_export_is_served_by_its_assigned_reactor() {
    let mut engine = TestEngine::start("ram", 8 << 20, 2);
    (1..=5).for_each(|volume| engine.volume(volume, 1 << 20, 4096));
    // An unknown reactor means the one with the fewest exports.
    for (volume, reported) in [
        (1, Some(1)),
        (2, Some(1)),
        (3, None),
        (4, Some(0)),
        (5, Some(7)),
    ] {
        engine.export_at(volume, &[], reported);
        // A repetition does not move it.
        engine.export_at(volume, &[], Some(0));
    }
    let region = engine.region();
    let mut served: Vec<(u64, u64)> = (region.lanes().iter())
        .map(|lane| (lane.export.load(Relaxed), lane.reactor.load(Relaxed)))
        .filter(|(export, _)| *export > 0)
        .map(|(export, reactor)| (export - 1, reactor))
        .collect();
    served.sort_unstable();
    assert_eq!(served, [(1, 1), (2, 1), (3, 0), (4, 0), (5, 0)]);
}

/// A tenant keeps the credit saved in an earlier engine, up to its cap.
#[test]
fn credit_goes_on_in_the_next_engine() {
    let mut engine = TestEngine::start("ram", 8 << 20, 1);
    let mut budget = Budget::fixed(1000);
    budget.how = Burst::Credit { seconds: 2 };
    engine.order(set(scheduling(&[])));
    let said = |engine: &mut TestEngine, of: u64, budget, credit| {
        engine.order(|request| ToEngine::SetTenantBudget {
            request,
            tenant: TenantId(of),
            budget: Some(budget),
            credit,
            guaranteed: true,
        });
        engine.credit(of)
    };
    assert_eq!(said(&mut engine, 1, budget, [700, 5]), Some([700, 5]));
    assert_eq!(said(&mut engine, 2, budget, [u64::MAX, 0]), Some([2000, 0]));
    // A known tenant keeps its credit.
    budget.how = Burst::Credit { seconds: 3 };
    assert_eq!(said(&mut engine, 1, budget, [1, 1]), Some([700, 5]));
    budget.how = Burst::Metered;
    assert_eq!(said(&mut engine, 3, budget, [700, 5]), Some([0, 0]));
    // The slot's next tenant gets none of it.
    engine.order(tenant(1, None));
    assert_eq!(engine.credit(1), None);
    for other in 4..=MAX_TENANTS as u64 + 1 {
        engine.order(tenant(other, Some(Budget::fixed(1000))));
        assert_eq!(engine.credit(other), Some([0, 0]));
    }
}

fn load(engine: &TestEngine, nqn: &str) -> LoadSpec {
    LoadSpec {
        read_percent: 50,
        block_bytes: 4096,
        queue_depth: 16,
        queues: 2,
        amount: Amount::Duration(Duration::from_secs(1)),
        ..LoadSpec::new(engine.address, nqn, HOST)
    }
}

fn loads(engine: &TestEngine, nqns: &[String]) -> Vec<LoadReport> {
    std::thread::scope(|scope| {
        let specs = nqns.iter().map(|nqn| load(engine, nqn));
        let runs: Vec<_> = specs
            .map(|spec| scope.spawn(move || run(&spec, &mut |_| {}).unwrap()))
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}

/// Volumes on two reactors share one tenant's budget.
#[test]
fn reactors_share_a_tenants_budget() {
    let mut engine = TestEngine::start("ram", 64 << 20, 2);
    let nqns: Vec<String> = (1..=2)
        .map(|volume| {
            engine.volume(volume, 8 << 20, 4096);
            engine.export(volume, &[])
        })
        .collect();
    // Maps all extents.
    for nqn in &nqns {
        run(&load(&engine, nqn), &mut |_| {}).unwrap();
    }
    engine.order(set(scheduling(&[])));
    engine.order(tenant(1, Some(Budget::fixed(3000))));
    for of in 1..=2 {
        engine.order(volume(of, 1, None));
    }
    let reports = loads(&engine, &nqns);
    let sum: f64 = (reports.iter())
        .map(|report| report.iops * report.elapsed.as_secs_f64())
        .sum();
    let longest = reports.iter().map(|r| r.elapsed).max().unwrap();
    assert!(reports.iter().all(|report| report.errors == 0));
    assert!(reports.iter().all(|report| report.iops > 0.0));
    // A second's worth may have been saved before.
    let most = 3000.0 * (longest.as_secs_f64() + 1.0) * 1.1 + 100.0;
    assert!(sum <= most, "{sum} of {most}");
}

#[test]
fn budgets_change_under_load() {
    let mut engine = TestEngine::start("ram", 64 << 20, 2);
    engine.volume(1, 8 << 20, 4096);
    let nqn = engine.export(1, &[]);
    let spec = load(&engine, &nqn);
    let report = std::thread::scope(|scope| {
        let load = scope.spawn(move || run(&spec, &mut |_| {}).unwrap());
        let mut round = 0;
        while !load.is_finished() {
            round += 1;
            engine.order(set(scheduling(&[(
                "window_ns",
                f64::from(100_000 * (1 + round % 5)),
            )])));
            for iops in [2000, 50_000, 100_000] {
                engine.order(tenant(1, Some(Budget::fixed(iops))));
                engine.order(volume(1, 1, Some(Budget::fixed(iops / 2))));
                engine.order(volume(1, 1, None));
            }
            if round % 3 == 0 {
                engine.order(tenant(1, None));
            }
            if round % 2 == 0 {
                engine.order(set(None));
            }
        }
        load.join().unwrap()
    });
    assert_eq!(report.errors, 0, "{:?}", report.first_error);
    assert!(report.iops > 0.0);
}
