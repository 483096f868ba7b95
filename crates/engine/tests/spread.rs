//! One queue on two reactors without budgets: help by default, and changes at run time. **Not
//! here:** the choice of helpers (the core's tests).
#![allow(missing_docs)]

mod common;

use common::{HANG, HOST, TestEngine};
use forebay_initiator::load::{Amount, LoadSpec, run};
use forebay_qos::cost::default_profiles;
use forebay_xlate::boundary::message::{CostProfile, NodeCapacity, Scheduling, Spread, ToEngine};
use std::time::{Duration, Instant};

/// Operations that the home reactor hands over during a load.
fn handed_over(engine: &TestEngine, nqn: &str, queues: u16, depth: u16) -> u64 {
    let before = engine.handed_over(0)[0];
    let spec = LoadSpec {
        read_percent: 50,
        block_bytes: 4096,
        queue_depth: depth,
        queues,
        amount: Amount::Duration(Duration::from_millis(300)),
        ..LoadSpec::new(engine.address, nqn, HOST)
    };
    assert_eq!(run(&spec, &mut |_| {}).unwrap().errors, 0);
    assert_eq!(engine.handed_over(1)[0], 0, "it has nothing of its own");
    engine.handed_over(0)[0] - before
}

fn is_helped(engine: &TestEngine, nqn: &str) {
    let until = Instant::now() + HANG;
    // A paused machine had time left.
    while handed_over(engine, nqn, 2, 64) == 0 {
        assert!(Instant::now() < until, "nobody helps");
    }
}

/// Turns budgets on and off.
fn budgets_come_and_go(engine: &mut TestEngine) {
    let scheduling = Box::new(Scheduling {
        policy: Default::default(),
        params: vec![],
        capacity: NodeCapacity::UNLIMITED,
        costs: default_profiles().map(|row| row.each_ref().map(CostProfile::from)),
    });
    for scheduling in [Some(scheduling), None] {
        engine.order(|request| ToEngine::SetScheduling {
            request,
            scheduling,
        });
    }
}

#[test]
fn a_busy_queue_is_helped_without_any_budget() {
    let mut engine = TestEngine::start("file", 128 << 20, 2);
    engine.volume(1, 32 << 20, 4096);
    let nqn = engine.export(1, &[]);
    is_helped(&engine, &nqn);
    assert_eq!(handed_over(&engine, &nqn, 2, 1), 0, "one at a time");
    budgets_come_and_go(&mut engine);
    is_helped(&engine, &nqn);
    engine.spread(Spread::OneToOne);
    assert_eq!(handed_over(&engine, &nqn, 2, 64), 0);
    budgets_come_and_go(&mut engine);
    assert_eq!(handed_over(&engine, &nqn, 2, 64), 0);
    engine.spread(Spread::OneToN);
    is_helped(&engine, &nqn);
    let [home, there] = [engine.handed_over(0), engine.handed_over(1)];
    assert!(there[1] > 0 && there[1] <= home[0]);
}
