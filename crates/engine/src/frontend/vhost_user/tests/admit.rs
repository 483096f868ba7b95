//! A throttled VM: its requests stay in its rings, and the reactor can sleep.

use super::guest::Guest;
use super::*;
use crate::frontend::Frontend;
use forebay_qos::budget::{Budget, Burst, Rate};
use forebay_xlate::boundary::region::{OpKind, TimesOf};
use std::sync::atomic::Ordering::Relaxed;

const WINDOW_NS: u64 = 1_000_000;
const START_NS: u64 = 1_000_000_000_000;

/// Limits to `operations` per window of 1 ms.
fn admit(rig: &mut Rig, operations: u64) {
    rig.core.clock.set_clock_ns(START_NS);
    rig.core.admit_all_by(&Budget::fixed(operations * 1000));
}

fn throttled(rig: &Rig) -> u64 {
    let lane = rig.core.lane(crate::lane::LaneIndex(3)).unwrap();
    lane.record().throttled.load(Relaxed)
}

/// Requests that ended, in order.
fn ended(guest: &mut Guest) -> Vec<usize> {
    let ended = std::iter::from_fn(|| guest.collect(0));
    ended.map(|(request, _, _)| request).collect()
}

#[test]
fn commands_over_budget_stay_in_the_ring() {
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
                // The rest is neither served nor polled.
                assert!(throttled(&rig) <= 8);
                assert!(!rig.core.must_turn() && rig.core.qos.window_ends_ns().is_some());
                let may_sleep = rig.vms.arm(&mut rig.core);
                assert!(may_sleep || all.len() - done.len() < 8, "{kind} {way:?}");
                rig.core
                    .clock
                    .set_clock_ns(START_NS + window as u64 * WINDOW_NS);
            }
            done.sort_unstable();
            assert_eq!((done, throttled(&rig)), (all, 0));
            // Throttled time counts as such, and in the total.
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
fn a_disconnect_drops_throttled_requests() {
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
        rig.vms.tick(&mut rig.core);
        rig.left.len() == 1
    });
    assert_eq!((throttled(&rig), rig.core.slab.busy()), (0, 0));
}

/// Stopping a ring waits for no window.
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
    assert_eq!((throttled(&rig), rig.core.slab.busy()), (0, 0));
}

/// A lane within its base waits for one quantum of a burst, at most. Both VMs share a volume, so
/// that one sees the other's progress.
#[test]
fn a_lane_within_its_base_runs_between_the_quanta_of_a_burst() {
    let metered = |base_iops| {
        let rate = |iops| Rate {
            iops,
            bytes: iops * 4096,
        };
        Budget {
            base: rate(base_iops),
            burst: rate(1_000_000),
            how: Burst::Metered,
        }
    };
    for way in WAYS {
        let mut rig = Rig::on("ram", 4);
        let mut burst = rig.guest(Way { size: 64, ..way });
        rig.export_again();
        let mut calm = rig.guest(Way { size: 64, ..way });
        rig.core.clock.set_clock_ns(START_NS);
        (rig.core).admit_each_by(&[metered(1000), metered(100_000)]);
        for window in 1..9 {
            for n in 0..16 {
                burst.offer(0, IN, n, Data::In(512));
            }
            burst.kick(0);
            rig.core.clock.set_clock_ns(START_NS + window * WINDOW_NS);
            let mut done = 0;
            rig.until("they end", |_| {
                done += ended(&mut burst).len();
                done == 16
            });
        }
        for n in 0..16 {
            burst.offer(0, OUT, n, Data::Out(&[7; 512]));
        }
        let reads: Vec<usize> = (0..16)
            .map(|n| calm.offer(0, IN, n, Data::In(512)))
            .collect();
        burst.kick(0);
        calm.kick(0);
        let mut done = [0, 0];
        rig.until("all end", |_| {
            done[0] += ended(&mut burst).len();
            done[1] += ended(&mut calm).len();
            done == [16, 16]
        });
        let seen = reads
            .iter()
            .filter(|request| calm.data(**request, 1)[0] == 7);
        assert!((1..14).contains(&seen.count()), "{way:?}");
    }
}
