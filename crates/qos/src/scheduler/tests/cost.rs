//! A run for `cargo xtask bench instructions`, which counts the instructions of
//! [`counted_admission`], found by name.
//!
//! `FOREBAY_COST` is the number of I/Os: `1000`, all alike, or `1000:changing`, where sizes always
//! change.

use super::{Bench, budget, params};
use crate::budget::Burst;
use crate::cost::{CostTable, OPERATIONS, Operation, Route, Transport};
use crate::scheduler::Scheduler;

#[test]
fn an_admission_is_counted() {
    let wanted = std::env::var("FOREBAY_COST").unwrap_or("1000".into());
    let (rounds, how) = wanted.split_once(':').unwrap_or((&wanted, ""));
    let rounds: u32 = rounds.parse().expect("a number");
    let mut bench = Bench::new(
        &[budget(20_000_000, 20_000_000, Burst::Metered); 4],
        params(),
    );
    for tenant in 0..4 {
        assert!(bench.scheduler.admit(
            tenant,
            &bench.costs.of(Transport::Tcp, Operation::Read, 512)
        ));
    }
    let mut begun = 0;
    for round in 0..rounds {
        if round % 20 == 0 {
            bench.scheduler.refill(1, 0);
        }
        let operation = OPERATIONS[(round % 2) as usize];
        let len = match how {
            "changing" => 4096 * (1 + round / 4 % 2),
            _ => 4096 * (1 + round % 2),
        };
        let lane = (round % 4) as usize;
        let passed = counted_admission(&mut bench.scheduler, &bench.costs, lane, operation, len);
        begun += u32::from(passed);
        if !passed {
            let cost = bench.costs.of(Transport::Pcie, operation, len);
            assert!(bench.scheduler.admit(lane, &cost));
        }
    }
    assert!(begun + rounds / 20 >= rounds, "{begun} of {rounds}");
}

const ROUTE: Route = Route::local(Transport::Pcie);

#[inline(never)]
fn counted_admission(
    scheduler: &mut Scheduler,
    costs: &CostTable,
    lane: usize,
    operation: Operation,
    len: u32,
) -> bool {
    let cost = costs.row(ROUTE, operation, len);
    cost.is_some_and(|cost| scheduler.spend(lane, cost))
}
