//! Budgets, tenants and scheduling itself change while commands wait.

use super::*;

#[test]
fn a_budget_changes_within_a_window_and_without_scheduling_all_begin() {
    let mut rig = rig(&fixed(1), &fixed(100));
    let all: Vec<u16> = (0..24).map(|_| rig.read(3)).collect();
    let mut ended = rig.ended_well();
    assert_eq!(ended.len(), 1);
    rig.b.core.qos.set_budget(0, &fixed(10), false);
    rig.pass(WINDOW_NS);
    while ended.len() < 8 {
        let more = rig.ended_well();
        assert!(!more.is_empty(), "{ended:?}");
        ended.extend(more);
        rig.pass(1000);
    }
    assert!(ended.len() <= 12, "{ended:?}");
    // With other costs and parameters, waiting commands still wait, in order.
    rig.switch_on(&fixed(1), &fixed(100));
    assert!(rig.throttled(3).1 >= 24 - 12 - 2);
    rig.b.core.set_admission(None);
    ended.extend(rig.ended_well());
    assert_eq!(ended, all);
    assert_eq!(rig.throttled(3).1, 0);
    let more = rig.read(3);
    assert_eq!(rig.ended_well(), [more]);
}

/// Each command ends once, in its lane's order.
#[test]
fn qos_set_storm() {
    let mut rig = rig(&fixed(3), &fixed(3));
    let mut random = fastrand::Rng::with_seed(1);
    let mut draw = move |below: u64| random.u64(..below);
    let mut begun = [Vec::new(), Vec::new()];
    let mut ended = [Vec::new(), Vec::new()];
    for change in 0..10_000u32 {
        let budget = match draw(3) {
            0 => Budget::unstated(),
            _ => fixed(1 + draw(20)),
        };
        match draw(100) {
            0 => rig.b.core.set_admission(None),
            1 | 2 => rig.switch_on(&budget, &fixed(5)),
            3 | 4 => rig.b.core.set_share(V, None),
            5..9 => {
                let share = Share {
                    tenant: 0,
                    budget: Some(budget),
                };
                rig.b.core.set_share(V, Some(share));
            }
            _ => rig.b.core.qos.set_budget(draw(2) as u32, &budget, false),
        }
        for (lane, begun) in [3, 4].into_iter().zip(&mut begun) {
            if begun.len() < 20_000 && rig.throttled(lane).1 < 20 {
                begun.push(rig.read(lane));
            }
        }
        rig.pass(draw(2 * WINDOW_NS / (1 + u64::from(change) % 7)));
        rig.b.core.end_turn();
        while let Some(done) = rig.b.core.next_done() {
            ended[done.lane.0 as usize - 3].push(done.owner.slot);
            assert_eq!(done.status, Status::SUCCESS);
            rig.b.core.staging.release(done.buffer.unwrap());
        }
    }
    rig.b.core.set_admission(None);
    rig.b.core.end_turn();
    while let Some(done) = rig.b.core.next_done() {
        ended[done.lane.0 as usize - 3].push(done.owner.slot);
    }
    assert!(ended == begun, "each once, and in order");
    assert_eq!((rig.throttled(3).1, rig.throttled(4).1), (0, 0));
}

/// A lane pays its debt although it had other tenants meanwhile.
#[test]
fn a_lane_that_is_given_its_tenant_again_goes_on_paying() {
    let mut small = fixed(2);
    (small.base.bytes, small.burst.bytes) = (4096 * 1000, 4096 * 1000);
    let mut rig = rig(&small, &fixed(1));
    let op = IoOp::Read {
        offset_bytes: 0,
        len_bytes: 64 << 10,
    };
    let waits = |rig: &mut Rig| {
        let slot = rig.start(3, op);
        let mut windows = 0;
        while rig.ended_well() != [slot] {
            rig.pass(WINDOW_NS);
            windows += 1;
            assert!(windows < 40);
        }
        windows
    };
    let first = waits(&mut rig);
    assert!(first < 4, "{first}");
    let (tenant, budget) = (0, None);
    for share in [None, Some(Share { tenant, budget })] {
        rig.b.core.set_share(V, share);
    }
    let second = waits(&mut rig);
    assert!(second > 10, "{second}");
}

/// Waiting commands begin in order, and the tenant at that time pays.
#[test]
fn a_lane_that_changes_its_tenant_loses_no_command_and_charges_each_once() {
    let mut rig = rig(&fixed(2), &fixed(3));
    let all: Vec<u16> = (0..12).map(|_| rig.read(3)).collect();
    let mut ended = rig.ended_well();
    assert_eq!(ended.len(), 2, "{ended:?}");
    let share = |tenant| {
        let budget = None;
        Some(Share { tenant, budget })
    };
    rig.b.core.set_share(V, share(1));
    let mut windows = 0;
    while ended.len() < 8 {
        rig.pass(WINDOW_NS);
        let more = rig.ended_well();
        assert!(more.len() <= 3, "{more:?}");
        ended.extend(more);
        windows += 1;
        assert!(windows < 20, "{ended:?} after {windows} windows");
    }
    let others = ended.len() as u64 - 2;
    rig.b.core.set_share(V, share(0));
    while ended.len() < all.len() {
        rig.pass(WINDOW_NS);
        ended.extend(rig.ended_well());
        windows += 1;
        assert!(windows < 40, "{ended:?} after {windows} windows");
    }
    assert_eq!(ended, all);
    assert_eq!(rig.throttled(3).1, 0);
    rig.pass(WINDOW_NS);
    rig.b.core.set_admission(None);
    let used = |tenant: usize| rig.b.core.region.tenants()[tenant].used_ops.load(Relaxed);
    assert_eq!((used(0), used(1)), (12 - others, others));
}
