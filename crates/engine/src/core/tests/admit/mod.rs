//! Admission: commands over budget wait in order, and end with their owner; others do not wait. The
//! test sets the clock.

mod alone;
mod changes;
mod exports;
mod held;
mod times;
mod wake;

use super::*;
use crate::lane::Share;
use forebay_qos::budget::Budget;
use forebay_qos::cost::{CostTable, default_profiles};
use forebay_qos::ledger::Ledger;
use forebay_qos::params::Params;
use forebay_xlate::boundary::message::NodeCapacity;
use forebay_xlate::kill::{self, Killed};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;

const WINDOW_NS: u64 = 1_000_000;
pub(super) const QUIET: VolumeId = VolumeId(10);

/// A noisy lane (3) and a quiet one (4), with one tenant each.
struct Rig {
    b: Bench,
    now_ns: u64,
    ledger: Arc<Ledger>,
}

/// A fixed number of operations in a window.
fn fixed(ops: u64) -> Budget {
    Budget::fixed(ops * 1_000_000_000 / WINDOW_NS)
}

fn admission(ledger: &Arc<Ledger>) -> Box<Admission> {
    let params = Params {
        window_ns: WINDOW_NS,
        saved_windows: 1,
        ..Params::default()
    };
    let per_second = NodeCapacity::UNLIMITED.capacity(1).per_second();
    let costs = Arc::new(CostTable::new(default_profiles()));
    Box::new(Admission::new(params, &per_second, &costs, ledger).unwrap())
}

pub(super) fn quiet_lane(region: &Arc<Region>) -> Lane {
    mapped_lane(4, QUIET, region)
}

fn mapped_lane(index: u32, volume: VolumeId, region: &Arc<Region>) -> Lane {
    let (lane, volume) = lane(index, volume, region);
    let word = Word::new(DeviceIndex(0), ExtentIndex(100), Rights::ReadWrite).unwrap();
    volume.table.install(ExtentRange::new(0, 100), word);
    lane
}

fn rig(noisy: &Budget, quiet: &Budget) -> Rig {
    rig_on("ram", noisy, quiet)
}

fn rig_on(device: &str, noisy: &Budget, quiet: &Budget) -> Rig {
    let mut b = bench_with(device);
    let region = b.core.region.clone();
    b.core.set_lane(quiet_lane(&region));
    b.grant(0, 0, Rights::ReadWrite, 100);
    let ledger = Arc::new(Ledger::new(2));
    let mut rig = Rig {
        now_ns: b.core.now_ns(),
        b,
        ledger,
    };
    rig.switch_on(noisy, quiet);
    rig
}

impl Rig {
    fn switch_on(&mut self, noisy: &Budget, quiet: &Budget) {
        let mut admission = admission(&self.ledger);
        admission.set_budget(0, noisy, false);
        admission.set_budget(1, quiet, false);
        self.b.core.set_admission(Some(admission));
        for (tenant, volume) in [(0, V), (1, QUIET)] {
            let share = Share {
                tenant,
                budget: None,
            };
            self.b.core.set_share(volume, Some(share));
        }
        self.pass(0);
    }

    /// Begins a turn `ns` later.
    fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        self.b.core.clock.set_now_ns(self.now_ns);
        self.b.core.begin_admission();
    }

    fn start(&mut self, lane: u32, op: IoOp) -> u16 {
        self.try_start(lane, op).unwrap()
    }

    /// `None` if there is no room.
    fn try_start(&mut self, lane: u32, op: IoOp) -> Option<u16> {
        let slot = self.b.next_slot;
        self.b.next_slot = slot.wrapping_add(1);
        let len_bytes = match op {
            IoOp::WriteZeroes { .. } => 0,
            _ => op.len_bytes() as u32,
        };
        let buffer = (len_bytes > 0).then(|| self.b.core.staging.allocate(len_bytes).unwrap());
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: lane,
                conn_generation: 0,
                slot,
            },
            lane: LaneIndex(lane),
            op,
            buffer,
            record: CommandRef::new(lane, slot % 256),
            over_ns: None,
        };
        match self.b.core.start(new) {
            Ok(()) => Some(slot),
            Err(new) => {
                if let Some(buffer) = new.buffer {
                    self.b.core.staging.release(buffer);
                }
                None
            }
        }
    }

    fn read(&mut self, lane: u32) -> u16 {
        self.try_read(lane).unwrap()
    }

    fn try_read(&mut self, lane: u32) -> Option<u16> {
        let op = IoOp::Read {
            offset_bytes: 0,
            len_bytes: 4096,
        };
        self.try_start(lane, op)
    }

    /// Ends the turn. The device is memory, so commands that began have ended.
    fn ended(&mut self) -> Vec<(u16, Status)> {
        self.b.core.end_turn();
        for _ in crate::patience::patiently() {
            self.b.core.reap();
            if self.b.core.slices.in_flight() == 0 && !self.b.core.flusher.is_busy() {
                break;
            }
        }
        let mut ended = Vec::new();
        while let Some(done) = self.b.core.next_done() {
            if let Some(buffer) = done.buffer {
                self.b.core.staging.release(buffer);
            }
            ended.push((done.owner.slot, done.status));
        }
        ended
    }

    fn ended_well(&mut self) -> Vec<u16> {
        let ended = self.ended();
        assert!(ended.iter().all(|(_, status)| *status == Status::SUCCESS));
        ended.into_iter().map(|(slot, _)| slot).collect()
    }

    /// Commands of a lane that waited for its budget, and those waiting now for anything.
    fn throttled(&self, lane: u32) -> (u64, u64) {
        let record = self.b.core.lane(LaneIndex(lane)).unwrap().record();
        let (ops, now) = (&record.throttled_ops, &record.throttled);
        (ops.load(Relaxed), now.load(Relaxed))
    }
}

#[test]
fn over_budget_waits_in_order_and_goes_on() {
    let mut rig = rig(&fixed(2), &fixed(100));
    let mut all: Vec<u16> = (0..6).map(|_| rig.read(3)).collect();
    all.push(rig.start(3, IoOp::Flush));
    all.extend((0..6).map(|_| rig.read(3)));
    let mut ended = rig.ended_well();
    assert_eq!(ended.len(), 2, "{ended:?}");
    assert_eq!(rig.throttled(3), (0, 11));
    // Nothing changes within the window.
    rig.pass(WINDOW_NS / 2);
    assert!(rig.ended().is_empty() && !rig.b.core.must_turn());
    assert!(
        rig.b
            .core
            .qos
            .window_ends_ns()
            .is_some_and(|at| at > rig.now_ns)
    );
    // Each window lets two more begin; nothing overtakes the flush.
    let mut windows = 0;
    while ended.len() < all.len() {
        rig.pass(WINDOW_NS);
        let more = rig.ended_well();
        assert!(more.len() <= 2, "{more:?}");
        ended.extend(more);
        windows += 1;
        assert!(windows < 20, "{ended:?} after {windows} windows");
    }
    assert_eq!(ended, all);
    assert_eq!(rig.throttled(3), (11, 0));
    let times = &rig
        .b
        .core
        .lane(LaneIndex(3))
        .unwrap()
        .record()
        .throttled_times;
    let counted: u64 = times.buckets.iter().map(|b| b.load(Relaxed)).sum();
    assert_eq!(counted, 11);
    assert!(times.sum_ns.load(Relaxed) >= 11 * WINDOW_NS / 2);
    rig.pass(4 * WINDOW_NS);
    rig.read(3);
    assert_eq!(rig.ended_well().len(), 1);
}

#[test]
fn within_its_base_a_lane_waits_for_no_neighbour() {
    // The reactor has room for this base: 50 reads in a window.
    let mut quiet = fixed(50);
    (quiet.base.bytes, quiet.burst.bytes) = (50_000 * 4096, 50_000 * 4096);
    let mut rig = rig(&Budget::unstated(), &quiet);
    // Warm-up, so that the lane gets the resources that others leave.
    for _ in 0..20 {
        for _ in 0..20 {
            rig.read(3);
        }
        rig.pass(WINDOW_NS);
        while !rig.ended_well().is_empty() {
            rig.pass(1000);
        }
    }
    rig.pass(1000);
    let before = rig.throttled(3).0;
    let noisy: Vec<u16> = (0..24).map(|_| rig.read(3)).collect();
    // Three reads are one turn's part, and within the base.
    let quiet: Vec<u16> = (0..3).map(|_| rig.read(4)).collect();
    let first = rig.ended_well();
    assert!(quiet.iter().all(|slot| first.contains(slot)), "{first:?}");
    // The noisy lane gets a turn's part.
    assert!((4..16).contains(&first.len()), "{first:?}");
    assert!(
        rig.b.core.must_turn(),
        "what may begin is begun without an event"
    );
    let mut noisy_ended = first;
    noisy_ended.retain(|slot| !quiet.contains(slot));
    let mut turns = 0;
    while noisy_ended.len() < noisy.len() {
        rig.pass(1000);
        let quiet = rig.read(4);
        let ended = rig.ended_well();
        assert!(ended.contains(&quiet), "{ended:?}");
        assert!(ended.len() < 16, "{ended:?}");
        noisy_ended.extend(ended.into_iter().filter(|slot| *slot != quiet));
        turns += 1;
        assert!(turns < 40, "{noisy_ended:?}");
    }
    assert_eq!(noisy_ended, noisy);
    // No window has ended, and no lane was over budget.
    assert_eq!(rig.throttled(3), (before, 0));
    assert_eq!(rig.throttled(4), (0, 0));
}

/// A lane that waits for a turn is not over budget, however many commands follow.
#[test]
fn commands_behind_a_queued_lane_are_not_over_budget() {
    let mut rig = rig(&Budget::unstated(), &fixed(50));
    let region = rig.b.core.region.clone();
    rig.b.core.set_lane(mapped_lane(5, VolumeId(25), &region));
    let budget = None;
    let share = Some(Share { tenant: 0, budget });
    rig.b.core.set_share(VolumeId(25), share);
    for _ in 0..20 {
        for _ in 0..20 {
            rig.read(3);
            rig.read(5);
        }
        rig.pass(WINDOW_NS);
        while !rig.ended_well().is_empty() {
            rig.pass(1000);
        }
    }
    rig.pass(1000);
    let throttled = |rig: &Rig| [3, 5].map(|lane| rig.throttled(lane));
    let before = throttled(&rig).map(|(ops, _)| (ops, 0));
    let mut all = Vec::new();
    for _ in 0..12 {
        all.extend([rig.read(3), rig.read(5)]);
    }
    let mut ended = rig.ended_well();
    assert!(ended.len() < all.len(), "{ended:?}");
    for turn in 0..100 {
        rig.pass(1000);
        if turn < 10 {
            all.extend([rig.read(3), rig.read(5)]);
        }
        ended.extend(rig.ended_well());
        // In run-queue order: none is served twice before the other.
        let of = |lane: usize| {
            let of_lane = all.iter().skip(lane).step_by(2);
            of_lane.filter(|slot| ended.contains(slot)).count()
        };
        assert!(of(0).abs_diff(of(1)) <= 10, "{} {}", of(0), of(1));
    }
    assert_eq!(ended.len(), all.len());
    assert_eq!(throttled(&rig), before);
}

#[test]
fn throttled_commands_end_with_an_abort_connection_or_lane() {
    let mut rig = rig(&fixed(1), &fixed(1));
    let aborted = Status::COMMAND_ABORT_REQUESTED;
    let noisy: Vec<u16> = (0..9).map(|_| rig.read(3)).collect();
    let quiet: Vec<u16> = (0..4).map(|_| rig.read(4)).collect();
    assert_eq!(rig.ended_well(), [noisy[0], quiet[0]]);
    // One in the middle, the last and the first.
    for slot in [noisy[4], noisy[8], noisy[1]] {
        let left = (rig.b.core).end_waiting(aborted, |of, _, _| of.conn == 3 && of.slot == slot);
        assert_eq!(left, 0);
        assert_eq!(rig.ended(), [(slot, aborted)]);
    }
    let more = rig.read(3);
    rig.pass(WINDOW_NS);
    let ended = rig.ended_well();
    assert_eq!(ended, [noisy[2], quiet[1]]);
    assert_eq!(rig.throttled(3).1, 5);
    rig.b.core.recovered.orphan(3);
    let ended = rig.ended();
    let expected = [noisy[3], noisy[5], noisy[6], noisy[7], more];
    let interrupted = Status::COMMAND_INTERRUPTED;
    assert_eq!(ended, expected.map(|slot| (slot, interrupted)));
    assert_eq!(rig.throttled(3).1, 0);
    rig.b.core.remove_lane(LaneIndex(4));
    let ended = rig.ended();
    assert_eq!(ended, [quiet[2], quiet[3]].map(|slot| (slot, interrupted)));
    assert!(rig.b.upcall().contains("LaneGone"));
    // A tenant without waiting commands is not active.
    for _ in 0..20 {
        rig.pass(WINDOW_NS);
    }
    assert_eq!(rig.b.core.active_tenants(), 0);
    // Another lane in its place does not get its tenant.
    rig.pass(WINDOW_NS);
    assert!(rig.ended().is_empty() && rig.b.core.qos.window_ends_ns().is_none());
    let region = rig.b.core.region.clone();
    rig.b.core.set_lane(quiet_lane(&region));
    let free: Vec<u16> = (0..50).map(|_| rig.read(4)).collect();
    assert_eq!(rig.ended_well(), free);
}

#[test]
fn commands_begun_as_scheduling_ends_are_blamed_themselves() {
    let mut rig = rig_on("file", &fixed(1), &fixed(100));
    let all: Vec<u16> = (0..3).map(|_| rig.read(3)).collect();
    assert_eq!(rig.ended_well(), all[..1]);
    kill::arm_here("core.put", 2);
    let killed = catch_unwind(AssertUnwindSafe(|| rig.b.core.set_admission(None)));
    assert!(killed.is_err_and(|why| why.is::<Killed>()));
    let blamed = rig.b.core.record().blame.load(Relaxed);
    assert_eq!(blamed, CommandRef::new(3, all[2] % 256).blame());
    let mut rig = rig_on("file", &fixed(1), &fixed(100));
    (0..3).for_each(|_| _ = rig.read(3));
    rig.b.core.set_admission(None);
    assert_eq!(rig.b.core.record().blame.load(Relaxed), 0);
    assert_eq!(rig.ended_well().len(), 3);
}

#[test]
fn recovered_commands_are_not_charged_again() {
    let mut rig = rig(&fixed(1), &fixed(1));
    let first = rig.read(3);
    rig.read(3);
    assert_eq!(rig.ended_well(), [first]);
    let slot = rig.b.next_slot;
    rig.b.core.recovered.recover(&[RecoveredSpan {
        volume: V,
        bytes: 0..4096,
        write: true,
        devices: FenceSet::None,
        command: Some(CommandRef::new(3, slot)),
    }]);
    let op = IoOp::Write {
        offset_bytes: 0,
        len_bytes: 4096,
        fua: false,
    };
    assert_eq!(rig.start(3, op), slot);
    assert_eq!(rig.ended_well(), [slot]);
    assert_eq!(rig.throttled(3).1, 1);
}

/// Volumes of one tenant whose budget is less than one command each per window: all progress.
#[test]
fn a_small_budget_starves_no_volume() {
    let mut small = Budget::fixed(900);
    (small.base.bytes, small.burst.bytes) = (900 * 4096, 900 * 4096);
    let mut rig = rig(&small, &fixed(1));
    let region = rig.b.core.region.clone();
    let lanes = [3, 4, 5, 6, 7];
    for lane in &lanes[2..] {
        let volume = VolumeId(20 + u64::from(*lane));
        rig.b.core.set_lane(mapped_lane(*lane, volume, &region));
    }
    let volumes = [V, QUIET, VolumeId(25), VolumeId(26), VolumeId(27)];
    for volume in volumes {
        let share = Share {
            tenant: 0,
            budget: None,
        };
        rig.b.core.set_share(volume, Some(share));
    }
    let mut begun = [0u32; 5];
    let mut of_slot = std::collections::BTreeMap::new();
    for at in [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] {
        of_slot.insert(rig.read(lanes[at]), at);
    }
    for _ in 0..1000 {
        rig.pass(WINDOW_NS / 5);
        for slot in rig.ended_well() {
            let at = of_slot.remove(&slot).unwrap();
            begun[at] += 1;
            of_slot.insert(rig.read(lanes[at]), at);
        }
    }
    let sum: u32 = begun.iter().sum();
    assert!((170..=190).contains(&sum), "{begun:?}");
    assert!(begun.iter().all(|n| (30..=42).contains(n)), "{begun:?}");
}

#[test]
fn a_tenant_has_its_record() {
    let mut rig = rig(&fixed(2), &fixed(100));
    for _ in 0..8 {
        rig.read(3);
    }
    for _ in 0..40 {
        rig.pass(WINDOW_NS);
        rig.ended_well();
    }
    let region = rig.b.core.region.clone();
    let record = &region.tenants()[0];
    assert_eq!(record.used_ops.load(Relaxed), 8);
    assert_eq!(record.used_bytes.load(Relaxed), 8 * 4096);
    assert_eq!(record.throttled_ops.load(Relaxed), 6);
    assert!(record.throttled_ns.load(Relaxed) >= 6 * WINDOW_NS);
    assert!(record.active_windows.load(Relaxed) > 0);
    let saved = record.credit_ops.load(Relaxed);
    assert!(saved > 0);
    // A resting tenant saves credit; it shows once the sleeping reactor runs again.
    rig.pass(100 * WINDOW_NS);
    rig.b.core.is_idle();
    let earned = record.credit_ops.load(Relaxed) - saved;
    assert!((150..=250).contains(&earned), "{earned}");
    assert_eq!(region.tenants()[1].used_ops.load(Relaxed), 0);
    let reactor = &region.reactors()[0];
    assert_eq!(reactor.windows.load(Relaxed), 141);
    assert!(reactor.corrections_milli[0].load(Relaxed) > 0);
    rig.b.core.set_admission(None);
    assert_eq!(reactor.corrections_milli[0].load(Relaxed), 0);
}
