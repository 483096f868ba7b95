//! Commands that wait for a budget leave room to others, and begin at once if a stop waits for
//! them.

use super::*;
use forebay_qos::budget::{Burst, Rate};

const NOISY: std::ops::Range<u32> = 5..25;

fn read_of(len_bytes: u32) -> IoOp {
    IoOp::Read {
        offset_bytes: 0,
        len_bytes,
    }
}

#[test]
fn over_budget_many_lanes_leave_room_to_others() {
    for len_bytes in [4096, 512 << 10] {
        let mut rig = rig(&fixed(1), &Budget::unstated());
        rig.b.core.set_share(QUIET, None);
        let region = rig.b.core.region.clone();
        for lane in NOISY {
            let volume = VolumeId(100 + u64::from(lane));
            rig.b.core.set_lane(mapped_lane(lane, volume, &region));
            let share = Share {
                tenant: 0,
                budget: None,
            };
            rig.b.core.set_share(volume, Some(share));
        }
        let mut noisy = Vec::new();
        for lane in NOISY {
            for _ in 0..1000 {
                if !rig.b.core.may_start(LaneIndex(lane)) {
                    break;
                }
                noisy.push(rig.start(lane, read_of(len_bytes)));
            }
        }
        assert!(noisy.len() > 2 * NOISY.len(), "{}", noisy.len());
        let (count, bytes) = (
            rig.b.core.qos.throttled.count,
            rig.b.core.qos.throttled.bytes,
        );
        assert!(count <= 512 + NOISY.len(), "{count}");
        assert!(bytes <= (16 << 20) + NOISY.len() * (512 << 10), "{bytes}");
        // No use in looking for more of them.
        for lane in NOISY {
            assert!(rig.b.core.qos.is_held_back(LaneIndex(lane)), "{lane}");
        }
        assert!(!rig.b.core.qos.is_held_back(LaneIndex(4)));
        let begun = rig.ended_well();
        let victim: Vec<u16> = (0..64).map(|_| rig.read(4)).collect();
        assert_eq!(rig.ended_well(), victim);
        let large: Vec<u16> = (0..8).map(|_| rig.start(4, read_of(512 << 10))).collect();
        assert_eq!(rig.ended_well(), large);
        rig.pass(40 * WINDOW_NS);
        let more = rig.ended_well();
        assert!(!more.is_empty());
        rig.b.core.set_admission(None);
        let rest = rig.ended_well();
        assert_eq!(begun.len() + more.len() + rest.len(), noisy.len());
        assert_eq!(
            (
                rig.b.core.qos.throttled.count,
                rig.b.core.qos.throttled.bytes
            ),
            (0, 0)
        );
        assert_eq!((rig.b.core.slab.busy(), rig.b.core.staging.out()), (0, 0));
    }
}

#[test]
fn commands_begun_in_debt_are_paid_for_later() {
    let mut rig = rig(&fixed(2), &fixed(100));
    let all: Vec<u16> = (0..12).map(|_| rig.read(3)).collect();
    assert_eq!(rig.ended_well(), all[..2]);
    rig.b.core.begin_owing(LaneIndex(3));
    assert_eq!(rig.ended_well(), all[2..]);
    assert_eq!(rig.throttled(3).1, 0);
    // A debt of ten at two a window: the next five windows begin none.
    let next = rig.read(3);
    for _ in 0..4 {
        rig.pass(WINDOW_NS);
        assert!(rig.ended().is_empty());
    }
    let mut windows = 4;
    while rig.ended_well() != [next] {
        rig.pass(WINDOW_NS);
        windows += 1;
        assert!(windows < 9, "more than was owed");
    }
    rig.b.core.begin_owing(LaneIndex(3));
    rig.pass(WINDOW_NS);
    rig.read(3);
    assert_eq!(rig.ended_well().len(), 1);
}

#[test]
fn to_have_commands_begin_owing_again_and_again_is_no_way_around_a_budget() {
    let mut rig = rig(&fixed(1), &fixed(1));
    let mut begun = 0;
    for _ in 0..200 {
        while rig.throttled(3).1 < 8 {
            rig.read(3);
        }
        rig.b.core.begin_owing(LaneIndex(3));
        begun += rig.ended_well().len();
    }
    // The debt is limited to a second's worth.
    assert!((900..=1010).contains(&begun), "{begun}");
    // The rest waits as usual.
    assert_eq!(rig.throttled(3).1, 8);
    rig.pass(WINDOW_NS);
    assert!(rig.ended().is_empty());
    rig.b.core.set_admission(None);
    assert_eq!(rig.ended_well().len(), 8);
}

/// Even with a tiny budget, a lane holds only commands that may begin at once as debt.
#[test]
fn a_stop_waits_for_no_tiny_budget() {
    let rate = Rate {
        iops: 1000,
        bytes: 64 << 10,
    };
    let tiny = Budget {
        base: rate,
        burst: rate,
        how: Burst::Metered,
    };
    let mut rig = rig(&tiny, &fixed(100));
    let hold = |rig: &mut Rig| {
        let mut held = 0;
        while rig.b.core.may_start(LaneIndex(3)) {
            rig.start(3, read_of(64 << 10));
            held += 1;
        }
        held
    };
    // A second's worth, and one more command.
    assert_eq!(hold(&mut rig), 2);
    assert!(rig.ended().is_empty());
    rig.b.core.begin_owing(LaneIndex(3));
    assert_eq!(rig.ended_well().len(), 2);
    // Again, one second later.
    assert_eq!(hold(&mut rig), 2);
    let (mut begun, mut windows) = (0, 0);
    while begun < 2 {
        rig.b.core.begin_owing(LaneIndex(3));
        begun += rig.ended_well().len();
        rig.pass(WINDOW_NS);
        windows += 1;
        assert!(windows < 2100, "{begun}");
    }
    assert!(windows > 1800, "{windows}");
}

/// Aborts and closes must not return everyone's burst buffers.
#[test]
fn to_end_commands_takes_no_memory_from_bursts() {
    let mut b = bench_with("ram");
    let burst: Vec<_> = (0..64)
        .map_while(|_| b.core.staging.allocate(64 << 10))
        .collect();
    burst
        .into_iter()
        .for_each(|buffer| b.core.staging.release(buffer));
    b.core.tick();
    let record = b.core.record();
    let before = record.staging_borrowed_bytes.load(Relaxed);
    assert!(before > 0);
    for _ in 0..100 {
        b.core
            .end_waiting(Status::COMMAND_ABORT_REQUESTED, |_, _, _| false);
        b.core.recovered.orphan(3);
        b.core.end_turn();
    }
    b.core.tick();
    assert_eq!(record.staging_borrowed_bytes.load(Relaxed), before);
}

/// Commands on many ranges count as many operations, as far as a small budget can save for it.
#[test]
fn ranges_and_zeroes_are_charged_by_pieces() {
    for (op, operations) in [
        (IoOp::Deallocate { ranges: 1 }, 1),
        (IoOp::Deallocate { ranges: 5 }, 5),
        (IoOp::Deallocate { ranges: 256 }, 32),
        (zeroes(4096, false), 1),
        (zeroes(4 << 20, false), 4),
        (zeroes(3 << 20, true), 3),
    ] {
        let mut rig = rig(&fixed(40), &fixed(100));
        rig.b.grant(0, 0, Rights::Hole, 100);
        let slot = rig.start(3, op);
        assert_eq!(rig.ended_well(), [slot], "{op:?}");
        rig.pass(WINDOW_NS);
        for _ in 0..4 {
            rig.pass(4 * WINDOW_NS);
        }
        let used = &rig.b.core.region.tenants()[0].used_ops;
        assert_eq!(used.load(Relaxed), operations, "{op:?}");
    }
}

fn zeroes(len_bytes: u64, deallocate: bool) -> IoOp {
    IoOp::WriteZeroes {
        offset_bytes: 0,
        len_bytes,
        deallocate,
        fua: false,
    }
}

#[test]
fn a_pair_waits_for_nothing_that_waits_behind_it() {
    let mut rig = rig(&fixed(1), &fixed(100));
    let first = rig.read(3);
    let block = |core: &mut Core, value: u8| {
        let mut buffer = core.staging.allocate(4096).unwrap();
        buffer.as_mut_slice().fill(value);
        Some(buffer)
    };
    let (offset_bytes, len_bytes, fua) = (0, 4096, false);
    let record = CommandRef::new(3, 100);
    let pair = NewIo {
        owner: Issuer {
            frontend: FrontendIndex(0),
            conn: 3,
            conn_generation: 0,
            slot: 100,
        },
        lane: LaneIndex(3),
        op: IoOp::CompareAndWrite {
            offset_bytes,
            len_bytes,
            fua,
        },
        buffer: block(&mut rig.b.core, 1),
        record,
        over_ns: None,
    };
    let expected = Expected {
        bytes: &[0; 4096],
        durable: false,
    };
    assert!(rig.b.core.start_comparing(pair, expected).is_ok());
    let behind = rig.start(
        3,
        IoOp::Write {
            offset_bytes,
            len_bytes,
            fua,
        },
    );
    assert_eq!(rig.ended_well(), [first]);
    rig.pass(WINDOW_NS);
    assert_eq!(rig.ended_well(), [100]);
    rig.b.core.recovered.pair_answered(record);
    rig.pass(WINDOW_NS);
    assert_eq!(rig.ended_well(), [behind]);
}
