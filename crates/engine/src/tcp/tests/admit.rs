//! A host that is over its budget: its commands wait in order, can be aborted, and go with their connection.

use super::abort::{ABORTED, abort, answers};
use super::*;
use forebay_burst::budget::Budget;
use forebay_xlate::boundary::message::ExportId;
use std::sync::atomic::Ordering::Relaxed;

const WINDOW_NS: u64 = 1_000_000;

fn pass_window(rig: &mut rig::Rig) {
    let now_ns = rig.core.now_ns();
    rig.core.set_clock_ns(now_ns + WINDOW_NS);
    rig.core.begin_turn();
}

#[test]
fn what_is_over_budget_waits_is_aborted_and_goes_with_its_connection() {
    let mut rig = rig();
    rig.map_all();
    let (mut admin, cntlid) = rig.admin();
    let mut host = rig.io(cntlid, 1, 32);
    let now_ns = rig.core.now_ns();
    rig.core.set_clock_ns(now_ns);
    rig.core.admit_all_by(&Budget::fixed(2000));
    let good = |cid: u16| (cid, Status::SUCCESS);
    for cid in 1..=4 {
        host.say(&rw(2, cid, u64::from(cid), 1), &[]);
    }
    host.say(&write_in_capsule(5, 5, 1), &[5; 4096]);
    host.say(&Sqe::new(0, 6).with_nsid(1), &[]);
    for cid in 7..=12 {
        host.say(&rw(2, cid, u64::from(cid), 1), &[]);
    }
    assert_eq!(answers(&mut rig, &mut host), [good(1), good(2)]);
    assert_eq!(abort(&mut rig, &mut admin, 1, 4), 0);
    assert_eq!(answers(&mut rig, &mut host), [(4, ABORTED)]);
    pass_window(&mut rig);
    assert_eq!(answers(&mut rig, &mut host), [good(3), good(5)]);
    // The flush as well, before what came after it.
    pass_window(&mut rig);
    assert_eq!(answers(&mut rig, &mut host), [good(6), good(7)]);
    let lane = rig.core.lane_of_export(ExportId(1)).unwrap();
    let throttled = |rig: &rig::Rig| {
        let record = rig.core.lane(lane).unwrap().record();
        record.throttled.load(Relaxed)
    };
    assert_eq!(throttled(&rig), 5);
    drop(host);
    rig.turns(10 + SKIPPED_TURNS as usize);
    assert_eq!((throttled(&rig), rig.core.busy_ios()), (0, 0));
    assert_eq!((rig.held_bytes(), rig.core.staging.out()), (0, 0));
    // Nothing is left that a window would begin.
    pass_window(&mut rig);
    rig.turns(2);
    assert_eq!(rig.core.busy_ios(), 0);
}
