//! Which bases are guaranteed, and where exports are served.

use super::*;

fn two() -> PlacementPlan {
    PlacementPlan::new(2, 100.0)
}

fn lack(placement: &PlacementPlan, tenant: u64) -> Option<Lack> {
    let mut all = placement.lacking();
    all.find(|(of, _)| *of == tenant).map(|(_, lack)| lack)
}

fn guaranteed(placement: &PlacementPlan) -> Vec<u64> {
    let all = placement.promises().map(|(tenant, _)| tenant);
    all.filter(|tenant| placement.is_guaranteed(*tenant))
        .collect()
}

/// A plan with these costs and exports, and the promises of `before`.
fn again(before: &PlacementPlan, tenants: &[(u64, f64, &[usize])]) -> PlacementPlan {
    let mut placement = two();
    for (tenant, cost, _) in tenants {
        placement.set_cost(*tenant, *cost);
    }
    for (tenant, promise) in before.promises() {
        placement.set_promise(tenant, promise.clone());
    }
    for (tenant, _, reactors) in tenants {
        reactors
            .iter()
            .for_each(|at| placement.export(*tenant, *at));
    }
    placement.settle();
    placement
}

#[test]
fn a_base_that_is_more_than_its_reactor_has_is_not_had() {
    let mut placement = two();
    placement.set_cost(1, 150.0);
    placement.export(1, 0);
    placement.settle();
    let short = Lack {
        reactor: None,
        fits: 100.0,
    };
    assert_eq!(lack(&placement, 1), Some(short));
    placement.export(1, 1);
    placement.settle();
    assert!(placement.fit());
    placement.set_cost(2, 1.0);
    placement.export(2, 1);
    placement.settle();
    assert_eq!(guaranteed(&placement), [1]);
    let none = Lack {
        reactor: Some(1),
        fits: 0.0,
    };
    assert_eq!(lack(&placement, 2), Some(none));
    placement.count_all();
    assert_eq!(lack(&placement, 1).map(|lack| lack.reactor), Some(Some(1)));
    assert_eq!(lack(&placement, 2), Some(none));
}

#[test]
fn bases_that_one_reactor_owes_together_fit_there_or_are_not_had() {
    let over = Some(Lack {
        reactor: Some(0),
        fits: 40.0,
    });
    let placement = again(&two(), &[(2, 60.0, &[0])]);
    let placement = again(&placement, &[(1, 60.0, &[0]), (2, 60.0, &[0])]);
    assert_eq!(placement.parts(), [1.2, 0.0]);
    assert_eq!((lack(&placement, 1), lack(&placement, 2)), (over, None));
    let mut all = placement.clone();
    all.count_all();
    assert_eq!((lack(&all, 1), lack(&all, 2)), (over, over));
    let at_once = |placement: &PlacementPlan| placement.at_once().collect::<Vec<_>>();
    assert_eq!(at_once(&placement), [(2, 1), (0, 0)]);
    let placement = again(&placement, &[(1, 40.0, &[0]), (2, 60.0, &[0])]);
    assert!(placement.fit());
    assert_eq!(at_once(&placement), [(2, 2), (0, 0)]);
    let tenants: [(u64, f64, &[usize]); 3] = [(1, 40.0, &[0]), (2, 60.0, &[0]), (3, 60.0, &[1])];
    let mut placement = again(&placement, &tenants);
    assert!(placement.fit());
    placement.export(2, 1);
    placement.settle();
    assert_eq!(placement.parts(), [1.0, 1.2]);
    assert_eq!(guaranteed(&placement), [1, 3]);
}

#[test]
fn later_tenants_take_nothing_from_earlier_ones() {
    // The first has the least, so only promises decide the order.
    let first = again(&two(), &[(5, 10.0, &[0]), (6, 60.0, &[0])]);
    assert_eq!(guaranteed(&first), [5, 6]);
    let all: [(u64, f64, &[usize]); 3] = [(1, 90.0, &[0]), (5, 10.0, &[0]), (6, 60.0, &[0])];
    let then = again(&first, &all);
    assert_eq!(guaranteed(&then), [5, 6]);
    assert_eq!(lack(&then, 1).map(|lack| lack.fits), Some(30.0));
    // More than promised, or another reactor, comes later.
    let more = again(&first, &[(5, 41.0, &[0]), (6, 60.0, &[0])]);
    assert_eq!(guaranteed(&more), [6]);
    let there = again(&first, &[(5, 10.0, &[0]), (6, 60.0, &[0]), (7, 50.0, &[1])]);
    let there = again(
        &there,
        &[(5, 10.0, &[0]), (6, 60.0, &[0, 1]), (7, 50.0, &[1])],
    );
    assert_eq!(guaranteed(&there), [5, 7]);
    assert_eq!(lack(&there, 6).map(|lack| lack.reactor), Some(Some(1)));
    let room = again(&then, &[(1, 90.0, &[0]), (5, 10.0, &[0]), (6, 60.0, &[1])]);
    assert_eq!(guaranteed(&room), [1, 5, 6]);
    let room = again(&then, &[(1, 90.0, &[0]), (5, 10.0, &[0])]);
    assert!(room.fit());
}

#[test]
fn a_tenant_that_asks_for_too_much_keeps_its_promise() {
    let all: [(u64, f64, &[usize]); 2] = [(1, 30.0, &[0]), (2, 60.0, &[0])];
    let placement = again(&two(), &all);
    // The first one keeps its promise of 30. The remaining 10 suffice neither for its new base nor
    // for the third one.
    let mut all = vec![(1, 50.0, &[0][..]), (2, 60.0, &[0]), (3, 38.0, &[0])];
    let mut placement = again(&placement, &all);
    for _ in 0..2 {
        assert_eq!(guaranteed(&placement), [2]);
        assert_eq!(lack(&placement, 1).map(|lack| lack.fits), Some(40.0));
        placement = again(&placement, &all);
    }
    all[0].1 = 30.0;
    let placement = again(&placement, &all);
    assert_eq!(guaranteed(&placement), [1, 2]);
    // The same holds for its part of a reactor, when a second one serves it too.
    all[0] = (1, 30.0, &[0, 1]);
    all.push((4, 80.0, &[1]));
    let placement = again(&placement, &all);
    assert_eq!(guaranteed(&placement), [1, 2]);
    let mut before = again(&two(), &[(4, 80.0, &[1])]);
    for (tenant, promise) in placement.promises().filter(|(tenant, _)| *tenant < 3) {
        let promise = Promise {
            reactors: [0].into(),
            ..promise.clone()
        };
        before.set_cost(tenant, promise.cost);
        before.set_promise(tenant, promise);
    }
    let placement = again(&before, &all);
    assert_eq!(guaranteed(&placement), [2, 4]);
    all[0].2 = &[0];
    assert_eq!(guaranteed(&again(&placement, &all)), [1, 2, 4]);
}

#[test]
fn a_base_without_exports_grows_where_there_is_room() {
    let none: &[usize] = &[];
    let placement = again(&two(), &[(1, 30.0, none), (2, 60.0, &[0])]);
    assert_eq!(guaranteed(&placement), [1, 2]);
    let mut before = two();
    for (tenant, cost) in [(1, 10.0), (2, 30.0), (3, 60.0)] {
        before.set_cost(tenant, cost);
        let promise = Promise {
            cost,
            reactors: [0].into(),
            held: true,
        };
        before.set_promise(tenant, promise);
    }
    let all = [(1, 40.0, &[0][..]), (2, 50.0, none), (3, 60.0, &[0])];
    let placement = again(&before, &all);
    assert_eq!(guaranteed(&placement), [1, 2, 3]);
    let placement = again(&placement, &[(2, 150.0, none), (3, 60.0, &[0])]);
    assert_eq!(guaranteed(&placement), [3]);
    let all = [(2, 50.0, none), (3, 60.0, &[0]), (4, 60.0, &[1])];
    assert_eq!(guaranteed(&again(&placement, &all)), [2, 3]);
}

#[test]
fn a_promise_that_does_not_fit_for_a_while_comes_before_those_who_had_none() {
    let served = |costs: [f64; 3]| {
        let all = (1..).zip(costs);
        all.map(|(tenant, cost)| (tenant, cost, &[0][..]))
            .collect::<Vec<_>>()
    };
    let all = served([40.0, 30.0, 70.0]);
    let placement = again(&two(), &all[..2]);
    let placement = again(&placement, &all);
    assert_eq!(guaranteed(&placement), [1, 2]);
    let times = |placement: &PlacementPlan, by: f64| {
        let mut then = two();
        for (tenant, promise) in placement.promises() {
            let cost = promise.cost * by;
            then.set_cost(tenant, cost);
            let promise = Promise {
                cost,
                ..promise.clone()
            };
            then.set_promise(tenant, promise);
        }
        let all = all
            .iter()
            .map(|(tenant, cost, at)| (*tenant, cost * by, *at));
        let all: Vec<_> = all.filter(|(_, cost, _)| *cost > 0.0).collect();
        (then, all)
    };
    for (by, some) in [(2.0, &[1][..]), (9.0, &[])] {
        let (before, dear) = times(&placement, by);
        let then = again(&before, &dear);
        assert_eq!(guaranteed(&then), some);
        let (before, again_cheap) = times(&then, 1.0 / by);
        assert_eq!(again_cheap.len(), 3);
        let then = again(&before, &all);
        assert_eq!(guaranteed(&then), [1, 2], "{by}");
    }
}

#[test]
fn a_promise_is_kept_for_a_tenant_without_exports() {
    let none: &[usize] = &[];
    let placement = again(&two(), &[(1, 60.0, none), (2, 60.0, none)]);
    assert_eq!(guaranteed(&placement), [1, 2]);
    // Both reactors serve a third one first.
    let all = [(1, 60.0, none), (2, 60.0, none), (3, 50.0, &[0, 1])];
    let mut then = again(&placement, &all);
    assert_eq!(guaranteed(&then), [1, 2]);
    let [one, other] = [1, 2].map(|tenant| then.place(tenant));
    assert_ne!(one, other);
    then.settle();
    assert_eq!(guaranteed(&then), [1, 2]);
    // No other export is placed there, whatever is served elsewhere.
    let one = again(&two(), &[(1, 60.0, none)]);
    let mut then = two();
    then.set_cost(1, 60.0);
    then.set_cost(2, 50.0);
    for (tenant, promise) in one.promises() {
        then.set_promise(tenant, promise.clone());
    }
    let kept = then.best(1);
    (0..9).for_each(|_| then.export(9, 1 - kept));
    assert_eq!(then.place(2), 1 - kept);
}

#[test]
fn a_renewed_promise_takes_nothing_from_held_ones() {
    let promise = |cost, held| Promise {
        cost,
        reactors: [0].into(),
        held,
    };
    let mut before = two();
    before.set_promise(1, promise(60.0, false));
    before.set_promise(2, promise(50.0, true));
    let all: [(u64, f64, &[usize]); 2] = [(1, 60.0, &[0]), (2, 50.0, &[0])];
    assert_eq!(guaranteed(&again(&before, &all)), [2]);
}

#[test]
fn all_that_was_served_is_served_again_so_that_it_fits() {
    let tenants: [(u64, f64, &[usize]); 4] = [
        (1, 40.0, &[1]),
        (2, 50.0, &[0]),
        (3, 50.0, &[0]),
        (4, 60.0, &[1, 1]),
    ];
    let before = again(&two(), &tenants);
    assert!(before.fit());
    let mut after = two();
    for (tenant, cost, _) in tenants {
        after.set_cost(tenant, cost);
    }
    for (tenant, promise) in before.promises() {
        after.set_promise(tenant, promise.clone());
    }
    for (tenant, _, reactors) in tenants {
        reactors.iter().for_each(|_| _ = after.place(tenant));
    }
    after.settle();
    assert!(after.fit(), "{after:?}");
    let both = again(&two(), &[(1, 150.0, &[0, 1])]);
    let mut after = two();
    after.set_cost(1, 150.0);
    for (tenant, promise) in both.promises() {
        after.set_promise(tenant, promise.clone());
    }
    assert_ne!(after.place(1), after.place(1));
    after.settle();
    assert!(after.fit());
}

#[test]
fn a_volumes_own_base_is_owed_where_it_is() {
    let mut placement = two();
    placement.set_cost(1, 150.0);
    placement.export(1, 0);
    placement.export(1, 1);
    placement.own(1, 0, 90.0);
    placement.settle();
    assert!(placement.fit());
    placement.own(1, 0, 30.0);
    placement.settle();
    assert_eq!(placement.parts(), [1.2, 1.0]);
    assert!(!placement.fit());
}

#[test]
fn a_new_export_goes_where_its_base_fits() {
    let mut placement = two();
    placement.set_cost(1, 60.0);
    for _ in 0..3 {
        placement.export(9, 1);
    }
    assert_eq!(placement.best(1), 0);
    placement.export(1, 0);
    placement.settle();
    // Less is served there, but the base fits only on the other.
    let mut other = placement.clone();
    (0..9).for_each(|_| other.export(9, 1));
    other.set_cost(2, 60.0);
    assert_eq!(other.best(2), 1);
    // It fits nowhere, so it goes to the reactor that lacks least.
    other.export(2, 1);
    other.set_cost(1, 70.0);
    other.settle();
    other.set_cost(3, 45.0);
    assert_eq!(other.best(3), 1);
    assert_eq!(other.best(1), 0);
}

#[test]
fn without_bases_exports_are_dealt_out_and_with_them_the_busy_have_less() {
    let mut placement = two();
    for at in 0..6 {
        let reactor = placement.best(at % 2);
        placement.export(at % 2, reactor);
        assert_eq!(reactor as u64, at % 2);
    }
    let mut placement = two();
    placement.set_cost(1, 80.0);
    placement.export(1, 0);
    placement.settle();
    assert_eq!(placement.best(1), 1);
    for _ in 0..5 {
        assert_eq!(placement.best(2), 1);
        placement.export(2, 1);
    }
}

#[test]
fn a_tenant_without_exports_counts_where_it_would_be_served() {
    let mut placement = two();
    for (tenant, cost) in [(1, 40.0), (2, 40.0), (3, 60.0), (4, 60.0)] {
        placement.set_cost(tenant, cost);
    }
    placement.settle();
    assert!(placement.fit(), "{:?}", placement.parts());
    placement.set_cost(5, 1.0);
    placement.settle();
    let lack = lack(&placement, 5);
    assert_eq!(lack.map(|lack| lack.fits), Some(0.0));
}
