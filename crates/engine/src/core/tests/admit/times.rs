//! What is counted as time over budget: all of it, and nothing else.

use super::*;

/// What is counted of a lane: commands, and their time.
fn counted(rig: &Rig, lane: u32) -> (u64, u64) {
    let record = rig.b.core.lane(LaneIndex(lane)).unwrap().record();
    let times = &record.throttled_times;
    let count: u64 = times.buckets.iter().map(|b| b.load(Relaxed)).sum();
    assert_eq!(record.throttled_ops.load(Relaxed), count);
    (count, times.sum_ns.load(Relaxed))
}

#[test]
fn what_comes_behind_a_refused_command_is_over_budget_too() {
    let mut rig = rig(&fixed(2), &fixed(100));
    for _ in 0..3 {
        rig.read(3);
    }
    assert_eq!(rig.ended_well().len(), 2);
    rig.pass(WINDOW_NS / 4);
    rig.read(3);
    assert!(rig.ended_well().is_empty());
    rig.pass(WINDOW_NS * 3 / 4);
    assert_eq!(rig.ended_well().len(), 2);
    assert_eq!(counted(&rig, 3), (2, WINDOW_NS + WINDOW_NS * 3 / 4));
    assert_eq!(counted(&rig, 4), (0, 0));
    // The tenant has the same, and goes on with it where its lane is scheduled anew.
    for _ in 0..5 {
        rig.read(3);
    }
    rig.ended_well();
    rig.pass(WINDOW_NS / 2);
    let before = counted(&rig, 3);
    rig.switch_on(&fixed(2), &fixed(100));
    rig.pass(WINDOW_NS / 2);
    rig.b.core.set_admission(None);
    assert_eq!(rig.throttled(3).1, 0);
    let now = counted(&rig, 3);
    // Two begin as soon as it is.
    assert_eq!(now, (before.0 + 5, before.1 + 4 * WINDOW_NS));
    let tenant = &rig.b.core.region.tenants()[0];
    let told = (&tenant.throttled_ops, &tenant.throttled_ns);
    assert_eq!((told.0.load(Relaxed), told.1.load(Relaxed)), now);
}

/// Turns are no budget.
#[test]
fn of_a_command_that_waits_for_its_budget_and_then_for_its_turn_only_the_former_counts() {
    let mut rig = rig(&fixed(20), &fixed(100));
    for _ in 0..32 {
        rig.read(3);
    }
    let mut ended = rig.ended_well().len();
    assert!(ended < 20, "{ended} in a turn");
    while ended < 20 {
        rig.pass(1000);
        ended += rig.ended_well().len();
    }
    assert!(!rig.b.core.must_turn(), "it waits for its budget");
    let refused_ns = rig.now_ns;
    assert_eq!(counted(&rig, 3), (0, 0));
    let left_ns = rig.b.core.window_ends_ns().unwrap() - refused_ns;
    rig.pass(left_ns);
    let first = rig.ended_well().len();
    assert!(first < 12, "{first} in a turn");
    while ended + first < 32 {
        rig.pass(1000);
        ended += rig.ended_well().len();
    }
    assert_eq!(counted(&rig, 3), (12, 12 * left_ns));
}
