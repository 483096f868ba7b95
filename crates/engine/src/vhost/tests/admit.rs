//! A machine that is over its budget: what it may not begin stays in its rings, and the reactor sleeps meanwhile.

use super::guest::Guest;
use super::*;
use forebay_burst::budget::Budget;
use forebay_xlate::boundary::region::{OpKind, TimesOf};
use std::sync::atomic::Ordering::Relaxed;

const WINDOW_NS: u64 = 1_000_000;
const START_NS: u64 = 1_000_000_000_000;

/// So many operations in a window of 1 ms.
fn admit(rig: &mut Rig, operations: u64) {
    rig.core.set_clock_ns(START_NS);
    rig.core.admit_all_by(&Budget::fixed(operations * 1000));
}

fn throttled(rig: &Rig) -> u64 {
    let lane = rig.core.lane(crate::lane::LaneIndex(3)).unwrap();
    lane.record().throttled.load(Relaxed)
}

/// What ended, in order.
fn ended(guest: &mut Guest) -> Vec<usize> {
    let ended = std::iter::from_fn(|| guest.collect(0));
    ended.map(|(request, _, _)| request).collect()
}

#[test]
fn what_is_over_budget_stays_in_the_ring() {
    for kind in ["ram", "file"] {
        for way in WAYS {
            let mut rig = Rig::on(kind, 4);
            let mut guest = rig.guest(Way { size: 64, ..way });
            admit(&mut rig, 3);
            let all: Vec<usize> = (0..16)
                .map(|n| guest.offer(0, IN, n * 8, Data::In(512)))
                .collect();
            guest.kick(0);
            let mut done = Vec::new();
            for window in 1.. {
                rig.until("what a window has", |_| {
                    done.extend(ended(&mut guest));
                    done.len() >= all.len().min(3 * window)
                });
                rig.turns();
                done.extend(ended(&mut guest));
                assert_eq!(done.len(), all.len().min(3 * window), "{kind} {way:?}");
                if done.len() == all.len() {
                    break;
                }
                // With what is left nothing is done, and nothing looked at.
                assert!(throttled(&rig) <= 8);
                assert!(!rig.core.must_turn() && rig.core.window_ends_ns().is_some());
                let may_sleep = rig.machines.arm(&mut rig.core);
                assert!(may_sleep || all.len() - done.len() < 8, "{kind} {way:?}");
                rig.core.set_clock_ns(START_NS + window as u64 * WINDOW_NS);
            }
            done.sort_unstable();
            assert_eq!((done, throttled(&rig)), (all, 0));
            // What they waited is time over budget, and in all of their time.
            let lane = rig.core.lane(crate::lane::LaneIndex(3)).unwrap();
            let record = lane.record();
            let waited_ns = record.throttled_times.sum_ns.load(Relaxed);
            let reads = &record.ops[OpKind::Read as usize].times[TimesOf::Total as usize];
            assert!(waited_ns >= 8 * WINDOW_NS, "{kind} {way:?}: {waited_ns}");
            assert!(reads.sum_ns.load(Relaxed) >= waited_ns, "{kind} {way:?}");
            assert!(rig.left.is_empty());
        }
    }
}

#[test]
fn a_client_that_leaves_takes_along_what_is_over_budget() {
    let mut rig = Rig::new(1);
    let mut guest = rig.guest(Way { size: 64, ..PLAIN });
    admit(&mut rig, 1);
    for n in 0..12 {
        guest.offer(0, OUT, n * 8, Data::Out(&[7; 512]));
    }
    guest.kick(0);
    rig.until("some wait", |rig| throttled(rig) >= 8);
    drop(guest);
    rig.until("it has left, in no window", |rig| {
        rig.machines.tick(&mut rig.core);
        rig.left.len() == 1
    });
    assert_eq!((throttled(&rig), rig.core.busy_ios()), (0, 0));
}

/// A client that stops a ring waits for no window.
#[test]
fn to_stop_a_ring_waits_for_no_budget() {
    let mut rig = Rig::new(1);
    let mut guest = rig.guest(Way { size: 64, ..PLAIN });
    admit(&mut rig, 1);
    for n in 0..12 {
        guest.offer(0, OUT, n * 8, Data::Out(&[7; 512]));
    }
    guest.kick(0);
    rig.until("some wait", |rig| throttled(rig) >= 8);
    guest.ask(&mut rig, request::GET_VRING_BASE, &[0; 8]);
    assert_eq!((throttled(&rig), rig.core.busy_ios()), (0, 0));
}
