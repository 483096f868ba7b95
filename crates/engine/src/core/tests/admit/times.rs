//! What counts as time over budget.

use super::*;
use forebay_qos::budget::Burst;

/// A lane's counted commands, and their time.
fn counted(rig: &Rig, lane: u32) -> (u64, u64) {
    let record = rig.b.core.lane(LaneIndex(lane)).unwrap().record();
    let times = &record.throttled_times;
    let count: u64 = times.buckets.iter().map(|b| b.load(Relaxed)).sum();
    assert_eq!(record.throttled_ops.load(Relaxed), count);
    (count, times.sum_ns.load(Relaxed))
}

#[test]
fn commands_behind_a_throttled_command_are_throttled_too() {
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
    // The tenant's counters agree, also after a new admission.
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
    // Two begin at once.
    assert_eq!(now, (before.0 + 5, before.1 + 4 * WINDOW_NS));
    let tenant = &rig.b.core.region.tenants()[0];
    let reported = (&tenant.throttled_ops, &tenant.throttled_ns);
    assert_eq!((reported.0.load(Relaxed), reported.1.load(Relaxed)), now);
}

/// Waits for turns do not count.
#[test]
fn of_a_command_that_waits_for_its_budget_and_then_for_its_turn_only_the_former_counts() {
    let mut rig = rig(&fixed(16), &fixed(100));
    for _ in 0..24 {
        rig.read(3);
    }
    let mut ended = rig.ended_well().len();
    assert!(ended < 16, "{ended} in a turn");
    while ended < 16 {
        rig.pass(1000);
        ended += rig.ended_well().len();
    }
    assert!(!rig.b.core.must_turn(), "it waits for its budget");
    let refused_ns = rig.now_ns;
    assert_eq!(counted(&rig, 3), (0, 0));
    let left_ns = rig.b.core.qos.window_ends_ns().unwrap() - refused_ns;
    rig.pass(left_ns);
    let first = rig.ended_well().len();
    while ended + first < 24 {
        rig.pass(1000);
        ended += rig.ended_well().len();
    }
    assert_eq!(counted(&rig, 3), (8, 8 * left_ns));
}

/// A frontend reports when a command began to wait.
#[test]
fn time_throttled_in_the_frontend_is_counted() {
    let mut rig = rig(&fixed(2), &fixed(100));
    for _ in 0..3 {
        rig.read(3);
    }
    assert_eq!(rig.ended_well().len(), 2);
    rig.pass(WINDOW_NS / 4);
    let over_ns = Some(rig.b.core.qos.over_ns(LaneIndex(3), rig.b.core.now_ns()));
    rig.pass(WINDOW_NS * 3 / 4);
    assert_eq!(rig.ended_well().len(), 1);
    let new = NewIo {
        owner: Issuer {
            frontend: FrontendIndex(0),
            conn: 3,
            conn_generation: 0,
            slot: 100,
        },
        lane: LaneIndex(3),
        op: IoOp::Flush,
        buffer: None,
        record: CommandRef::new(3, 100),
        over_ns,
    };
    rig.b.core.start(new).unwrap();
    assert_eq!(rig.ended_well(), [100]);
    assert_eq!(counted(&rig, 3), (2, WINDOW_NS + WINDOW_NS * 3 / 4));
}

/// Above the base, lanes wait in a run queue.
#[test]
fn a_lane_that_stands_in_line_is_not_over_budget() {
    let mut noisy = fixed(1);
    noisy.burst = fixed(40).burst;
    noisy.how = Burst::Metered;
    let mut rig = rig(&noisy, &fixed(100));
    let region = rig.b.core.region.clone();
    rig.b.core.set_lane(mapped_lane(5, VolumeId(25), &region));
    let budget = None;
    let share = Some(Share { tenant: 0, budget });
    rig.b.core.set_share(VolumeId(25), share);
    let mut in_line = 0;
    for _ in 0..20 {
        for lane in [3, 5] {
            while rig.throttled(lane).1 < 20 {
                rig.read(lane);
            }
        }
        while !rig.ended_well().is_empty() {
            rig.pass(1000);
        }
        let ends_ns = rig.b.core.qos.window_ends_ns().unwrap();
        let waits = [3, 5].map(|lane| rig.throttled(lane).1);
        rig.pass(ends_ns - rig.now_ns);
        rig.ended_well();
        // Lanes that could begin in the window's first turn but had no part of it.
        for (lane, before) in [3, 5].into_iter().zip(waits) {
            let (index, core) = (LaneIndex(lane), &rig.b.core);
            if core.qos.waits_for_turns(index) && rig.throttled(lane).1 == before {
                in_line += 1;
                let over_ns = rig.b.core.qos.over_ns(index, rig.b.core.now_ns());
                rig.b.core.clock.set_now_ns(rig.now_ns + 1000);
                assert_eq!(rig.b.core.qos.over_ns(index, rig.b.core.now_ns()), over_ns);
                rig.b.core.clock.set_now_ns(rig.now_ns);
            }
        }
    }
    assert!(in_line > 5, "{in_line}");
}
