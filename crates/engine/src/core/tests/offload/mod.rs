//! Slices that other reactors carry out: two cores in one thread.

use super::admit::quiet_lane;
use super::*;
use crate::bell::ReactorBell;
use crate::offload::idle::SAY_NS;
use crate::offload::{TURN, TURN_BYTES};
use forebay_qos::params::Params;
use forebay_xlate::boundary::message::Spread;
use forebay_xlate::boundary::region::CommandState;

mod budget;
mod rules;
mod speed;

const BLOCK: u64 = 4096;
/// Defaults: time without own work until a reactor is idle, and the interval at which need for help
/// is judged.
const OWN_NS: u64 = 600_000;
const NEED_NS: u64 = 2_000_000;
const LANE: LaneIndex = LaneIndex(3);
/// The other reactor's own lane.
const OTHER: LaneIndex = LaneIndex(4);

struct Two {
    b: Bench,
    other: Core,
}

/// Without a setting for the spread of queues.
fn linked(kind: &str) -> Two {
    let mut b = bench_with(kind);
    let bells = [ReactorBell::new().unwrap(), ReactorBell::new().unwrap()];
    let [of_home, of_other]: [Links; 2] = links(&bells).try_into().ok().unwrap();
    let ring = Ring::new(&RingOptions::default()).unwrap();
    let mut other = Core::new(1, b.core.region.clone(), Staging::new().unwrap(), ring);
    other.set_device(b.core.devices.served[0].clone().unwrap());
    other.offload.link(of_other);
    other.set_spread(Spread::default());
    b.core.offload.link(of_home);
    b.core.set_spread(Spread::default());
    b.grant(0, 3, Rights::ReadWrite, 50);
    b.grant(50, 120, Rights::ReadWrite, 50);
    Two { b, other }
}

fn two(kind: &str, spread: Spread) -> Two {
    let mut t = linked(kind);
    t.other.set_spread(spread);
    t.b.core.set_spread(spread);
    t
}

fn write(block: u64, blocks: u64) -> IoOp {
    IoOp::Write {
        offset_bytes: block * BLOCK,
        len_bytes: (blocks * BLOCK) as u32,
        fua: false,
    }
}

fn read(block: u64, blocks: u64) -> IoOp {
    IoOp::Read {
        offset_bytes: block * BLOCK,
        len_bytes: (blocks * BLOCK) as u32,
    }
}

impl Two {
    fn turn_other(&mut self) {
        self.turn_other_with(false);
    }

    /// A turn of the other reactor, with or without a read of its own.
    fn turn_other_with(&mut self, own: bool) {
        self.other.begin_turn();
        let busy = self.other.reap();
        while let Some(done) = self.other.next_done() {
            self.other.staging.release(done.buffer.unwrap());
        }
        if own {
            self.own_read();
        }
        if !self.other.carry_out(false) && !busy {
            self.other.is_idle();
        }
        self.other.end_turn();
    }

    fn own_read(&mut self) {
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: 0,
                conn_generation: 0,
                slot: 0,
            },
            lane: OTHER,
            op: read(0, 1),
            buffer: self.other.staging.allocate(BLOCK as u32),
            record: CommandRef::new(OTHER.0, 0),
            over_ns: None,
        };
        assert!(self.other.start(new).is_ok());
    }

    /// Writes of a block each in one turn, some of them offloaded.
    fn writes(&mut self, count: u64) -> Vec<u16> {
        self.turn_other();
        let one = |at| self.b.start(write(at, 1), Some(&[at as u8 + 1; 4096]));
        let slots = (0..count).map(one).collect();
        assert!(self.b.core.offload.out > 0, "nothing is away");
        slots
    }

    fn offload(&self) -> usize {
        self.b.core.offload.out
    }

    fn handed_over(&self) -> u64 {
        self.b.core.record().handed_over.load(Relaxed)
    }

    /// Turns both until `count` have ended.
    fn ends(&mut self, count: usize) -> Vec<Status> {
        let mut all = Vec::new();
        for _ in crate::patience::patiently() {
            while let Some(done) = self.b.core.next_done() {
                all.push(done.status);
                self.b.core.staging.release(done.buffer.unwrap());
            }
            if all.len() >= count {
                break;
            }
            self.turn_other();
            self.b.turn();
        }
        assert_eq!(all.len(), count);
        all
    }

    fn nothing_is_left(&self) {
        assert_eq!((self.offload(), self.b.core.slab.busy()), (0, 0));
        assert_eq!(self.b.core.staging.out(), 0);
        assert_eq!(
            self.other.offload.free.len(),
            self.other.offload.carrying.len()
        );
        assert!(
            self.b
                .core
                .lanes
                .get(LANE)
                .is_none_or(|lane| lane.remote == 0)
        );
        assert!(
            self.b.core.offload.nothing_from_others() && self.other.offload.nothing_from_others()
        );
    }
}

#[test]
fn one_command_at_a_time_stays_at_home_and_many_are_shared() {
    for kind in ["file", "ram"] {
        let mut t = two(kind, Spread::OneToN);
        for at in 0..50 {
            t.b.write(at * BLOCK, &[7; 4096]);
            t.b.turn();
        }
        assert_eq!(t.handed_over(), 0, "{kind}");
        t.writes(40);
        // Half are offloaded, without the first few.
        assert!((17..=20).contains(&t.offload()), "{kind}: {}", t.offload());
        assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
        assert_eq!(t.other.record().carried_out.load(Relaxed), t.handed_over());
        for at in 0..40 {
            assert_eq!(t.b.read(at * BLOCK, 4096), [at as u8 + 1; 4096], "{at}");
            t.b.turn();
        }
        t.nothing_is_left();
        // Without that setting, nothing is handed over.
        t.b.core.set_spread(Spread::OneToOne);
        let before = t.handed_over();
        (0..40).for_each(|at| _ = t.b.start(write(at, 1), Some(&[9; 4096])));
        assert_eq!((t.ends(40).len(), t.handed_over()), (40, before));
        // Earlier operations do not count.
        t.b.core.set_spread(Spread::OneToN);
        t.b.turn();
        (0..2).for_each(|at| _ = t.b.start(write(at, 1), Some(&[9; 4096])));
        assert_eq!((t.ends(2).len(), t.handed_over()), (2, before));
    }
}

#[test]
fn offloaded_slices_wait_for_their_image_at_home() {
    let mut t = two("file", Spread::OneToN);
    t.writes(40);
    t.b.gate.set_unready(true);
    for _ in crate::patience::patiently() {
        if t.offload() == 0 {
            break;
        }
        t.turn_other();
        t.b.turn();
    }
    assert_eq!(t.offload(), 0);
    assert!(!t.b.core.slices.not_ready.is_empty());
    assert!(!t.b.core.must_turn() && !t.other.must_turn());
    t.b.gate.set_unready(false);
    t.b.core.retry_not_ready();
    assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    t.nothing_is_left();
}

/// By default, reactors help those that need it, unless they have own work.
#[test]
fn a_busy_reactor_gets_no_offloaded_work() {
    let mut t = linked("file");
    let region = t.b.core.region.clone();
    t.other.set_lane(quiet_lane(&region));
    let mut now_ns = t.b.core.now_ns();
    let pass = |t: &mut Two, now_ns: &mut u64, ns: u64| {
        *now_ns += ns;
        t.b.core.clock.set_clock_ns(*now_ns);
        t.other.clock.set_clock_ns(*now_ns);
        t.turn_other();
        t.b.core.begin_turn();
    };
    let many = |t: &mut Two| {
        let before = t.handed_over();
        (0..40).for_each(|at| _ = t.b.start(write(at, 1), Some(&[9; 4096])));
        t.handed_over() - before
    };
    let carried_out = |t: &Two| t.other.record().carried_out.load(Relaxed);
    pass(&mut t, &mut now_ns, SAY_NS);
    assert!(many(&mut t) > 10);
    assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    // Its own work comes while it has remote operations.
    pass(&mut t, &mut now_ns, SAY_NS);
    assert!(many(&mut t) > 10);
    let before = carried_out(&t);
    t.turn_other_with(true);
    assert_eq!(carried_out(&t), before, "all of it goes back");
    t.b.core.reap();
    assert_eq!(t.offload(), 0);
    assert_eq!(many(&mut t), 0, "who gave it back is given no more");
    assert_eq!(t.ends(80), [Status::SUCCESS; 80]);
    // A long turn.
    now_ns += 10 * OWN_NS;
    t.b.core.clock.set_clock_ns(now_ns);
    t.b.core.begin_turn();
    (0..40).for_each(|at| _ = t.b.start(write(at, 1), Some(&[9; 4096])));
    assert_eq!(t.offload(), 0, "it is still at work");
    assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    // It helps some time after its work ends, not at once.
    t.other.clock.set_clock_ns(now_ns);
    t.turn_other();
    for _ in 0..OWN_NS / SAY_NS - 1 {
        pass(&mut t, &mut now_ns, SAY_NS);
        assert_eq!(many(&mut t), 0);
        assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    }
    pass(&mut t, &mut now_ns, SAY_NS);
    assert!(many(&mut t) > 10, "it has nothing to do again");
    assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    t.nothing_is_left();
}

/// A reactor reports itself idle before it sleeps.
#[test]
fn a_sleeping_reactor_helps() {
    let mut t = two("ram", Spread::OneToN);
    let region = t.b.core.region.clone();
    t.other.set_lane(quiet_lane(&region));
    let now_ns = t.b.core.now_ns();
    for core in [&mut t.b.core, &mut t.other] {
        core.clock.set_clock_ns(now_ns);
    }
    t.turn_other_with(true);
    let (quiet, _open) = std::io::pipe().unwrap();
    t.other.sleep(&quiet, std::time::Duration::ZERO);
    for (ns, helps) in [(OWN_NS - 1, false), (OWN_NS + SAY_NS, true)] {
        t.b.core.clock.set_clock_ns(now_ns + ns);
        t.b.core.begin_turn();
        (0..40).for_each(|at| _ = t.b.start(write(at, 1), Some(&[9; 4096])));
        assert_eq!(t.offload() > 0, helps, "after {ns}");
        t.other.clock.set_clock_ns(now_ns + ns);
        assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    }
}

/// A queue limited by its device gets no help.
#[test]
fn a_reactor_with_idle_time_gets_no_help() {
    let mut t = two("file", Spread::OneToN);
    let mut now_ns = t.b.core.now_ns();
    // Turns of which `idle` in eight find no work.
    let mut is_helped = |t: &mut Two, idle: u64| {
        for turn in 0..2 * NEED_NS / SAY_NS {
            now_ns += SAY_NS;
            t.b.core.clock.set_clock_ns(now_ns);
            t.b.core.begin_turn();
            if turn % 8 < idle {
                t.b.core.is_idle();
            }
            t.b.core.end_turn();
        }
        (0..40).for_each(|at| _ = t.b.start(write(at, 1), Some(&[9; 4096])));
        let helped = t.offload() > 0;
        assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
        helped
    };
    assert!(is_helped(&mut t, 0));
    assert!(is_helped(&mut t, 4), "both are half of the time at work");
    assert!(!is_helped(&mut t, 5), "one would be enough");
    assert!(!is_helped(&mut t, 1), "it is enough");
    assert!(is_helped(&mut t, 0), "it is not any more");
    // Unneeded help does not continue.
    t.b.core.set_spread(Spread::OneToN);
    assert!(!is_helped(&mut t, 1));
    t.nothing_is_left();
}

#[test]
fn a_helper_without_the_device_returns_the_operation() {
    let mut t = two("file", Spread::OneToN);
    t.other.devices.served[0] = None;
    t.writes(40);
    assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    assert!(t.handed_over() > 0 && t.other.record().carried_out.load(Relaxed) == 0);
    // Another device with this index.
    let (another, _) = device(0, &format!("file:{}", t.b.path.display()).parse().unwrap());
    t.other.set_device(another);
    t.writes(40);
    assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    assert_eq!(t.other.record().carried_out.load(Relaxed), 0);
    t.nothing_is_left();
}

#[test]
fn offloaded_failures_are_returned_and_counted() {
    let mut t = two("file", Spread::OneToN);
    t.writes(40);
    let offload = t.offload();
    assert!(t.b.core.must_turn(), "somebody is yet to be told");
    // The home's operations are at the device.
    t.b.core.end_turn();
    assert!(!t.b.core.must_turn());
    t.b.gate
        .fail(0..u64::MAX, &[OpKind::Write], Errno::IO, 1000);
    let ends = t.ends(40);
    let failed = ends.iter().filter(|s| **s == Status::WRITE_FAULT).count();
    assert_eq!(failed, offload);
    let errors = &t.b.core.lanes.get(LANE).unwrap().record().media_errors;
    assert_eq!(errors.load(Relaxed), offload as u64);
    t.nothing_is_left();
}

/// The device is in a command's record before another reactor can submit it.
#[test]
fn command_records_cover_offloaded_operations() {
    let mut t = two("file", Spread::OneToN);
    t.turn_other();
    t.b.gate.hold();
    for slot in 0..40 {
        let record = &t.b.core.records.commands[slot];
        let taken = CommandState::taken(slot as u64 + 1);
        record.state.store(taken.0, Relaxed);
        t.b.next_slot = slot as u16;
        t.b.start(write(slot as u64, 1), Some(&[1; 4096]));
        let at_device = record.state().0 != taken.0;
        assert!(
            at_device,
            "{slot} may be at its device, and its record says no"
        );
    }
    assert!(t.offload() > 10);
    t.b.gate.release();
    assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    // A helper's blame names the home's command.
    t.writes(40);
    t.other.blame(None);
    t.other.carry_out(false);
    let blame = t.other.record().blame.load(Relaxed);
    let offload = t.b.core.slices.iter().filter(|slice| slice.remote);
    let blamed: Vec<u64> = offload
        .map(|slice| t.b.core.slab[slice.io as usize].record.blame())
        .collect();
    assert!(blamed.contains(&blame));
    t.ends(40);
    t.nothing_is_left();
}

#[test]
fn revokes_drain_after_offloaded_operations_end() {
    for kind in ["file", "ram"] {
        let mut t = two(kind, Spread::OneToN);
        t.b.gate.hold();
        t.writes(40);
        let range = ExtentRange::new(0, 50);
        t.b.volume.table.clear(range);
        t.b.core
            .slices
            .revoke(1, V, range, false, &mut t.b.core.upcalls);
        t.b.core.settle(5, DeviceIndex(0));
        // The other reactor has no operation of that volume.
        t.other
            .slices
            .revoke(1, V, range, false, &mut t.other.upcalls);
        assert_eq!(
            format!("{:?}", t.other.upcalls.pop_front()),
            "Some(Drained { revoke: 1 })"
        );
        t.turn_other();
        t.b.turn();
        assert!(t.b.core.upcalls.is_empty());
        t.b.gate.release();
        let offload = t.offload();
        for _ in crate::patience::patiently() {
            t.b.turn();
            if t.b.core.ended_count() == 40 - offload {
                break;
            }
        }
        assert!(
            t.b.core.upcalls.is_empty(),
            "what is away is still at its device"
        );
        assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
        assert_eq!(t.b.upcall(), "Some(Drained { revoke: 1 })");
        assert_eq!(t.b.upcall(), "Some(Settled { job: 5 })");
        t.nothing_is_left();
    }
}

#[test]
fn an_export_is_removed_after_its_offloaded_operations_end() {
    let mut t = two("file", Spread::OneToN);
    t.writes(40);
    let offload = t.offload();
    t.b.core.remove_lane(LANE);
    t.b.core.recovered.orphan(0);
    for _ in crate::patience::patiently() {
        t.b.turn();
        if t.b.core.ended_count() == 40 - offload {
            break;
        }
    }
    assert!(t.b.core.lanes.get(LANE).is_some() && t.b.core.staging.out() > 0);
    assert!(t.b.core.upcalls.is_empty());
    t.ends(40);
    assert_eq!(t.b.upcall(), "Some(LaneGone { lane: LaneIndex(3) })");
    t.nothing_is_left();
}

#[test]
fn a_reactor_leaves_only_without_offloaded_work() {
    let mut t = two("file", Spread::OneToN);
    assert!(bench().core.offload.is_drained(), "alone, any time");
    t.other.set_spread(Spread::OneToOne);
    t.other.offload.be_quiet();
    assert!(!t.other.offload.is_drained(), "something may come");
    t.writes(40);
    t.b.core.set_spread(Spread::OneToOne);
    t.b.core.offload.be_quiet();
    assert!(!t.other.offload.is_drained(), "that is yet to be done");
    let before = t.handed_over();
    assert_eq!(t.ends(40), [Status::SUCCESS; 40]);
    assert!(t.other.offload.is_drained() && t.b.core.offload.is_drained());
    t.b.core.set_spread(Spread::OneToN);
    (0..40).for_each(|at| _ = t.b.start(write(at, 1), Some(&[9; 4096])));
    assert_eq!((t.ends(40).len(), t.handed_over()), (40, before));
}

/// A lane within its base there waits for one lane's part of a turn.
#[test]
fn with_budgets_a_turn_does_only_so_much_for_others() {
    let mut t = two("file", Spread::OneToN);
    t.other
        .admit_all_by(&forebay_qos::budget::Budget::fixed(1000));
    t.writes(100);
    t.other.begin_turn();
    t.other.carry_out(false);
    let done = t.other.record().carried_out.load(Relaxed);
    assert!(
        (1..TURN[1] as u64).contains(&done) && t.offload() > TURN[1],
        "{done} of {}",
        t.offload()
    );
    assert_eq!(t.ends(100), [Status::SUCCESS; 100]);
    t.nothing_is_left();
}

/// Without known costs, bytes limit a turn.
#[test]
fn bytes_limit_offloaded_work_per_turn_without_budgets() {
    let mut t = linked("file");
    t.turn_other();
    let blocks = 16;
    for at in 0..20 {
        t.b.start(write(at * blocks, blocks), Some(&[1; 65536]));
    }
    let most = TURN_BYTES / (blocks * BLOCK);
    assert!(t.offload() as u64 > most, "{} of {most}", t.offload());
    t.other.begin_turn();
    t.other.carry_out(false);
    assert_eq!(t.other.record().carried_out.load(Relaxed), most);
    assert_eq!(t.ends(20), [Status::SUCCESS; 20]);
    t.nothing_is_left();
}

/// A lane on a hung device leaves room to others, on the helper too.
#[test]
fn hung_offloads_take_at_most_half_the_room() {
    let mut t = two("file", Spread::OneToN);
    t.b.gate.hold();
    t.turn_other();
    for at in 0..500 {
        t.b.start(write(at, 1), Some(&[1; 4096]));
        t.turn_other();
        t.b.turn();
    }
    let (offload, room) = (t.offload(), t.other.offload.carrying.len());
    assert!(
        offload > 8 && offload <= room / 2 + 1,
        "{offload} of {room}"
    );
    t.b.gate.release();
    assert_eq!(t.ends(500), [Status::SUCCESS; 500]);
    t.nothing_is_left();
}
