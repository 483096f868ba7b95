//! Many commands that wait for many extents.

use super::*;

fn read(extent: u64) -> IoOp {
    IoOp::Read {
        offset_bytes: extent * EXTENT,
        len_bytes: 4096,
    }
}

fn asked(b: &mut Bench) -> Vec<(u64, bool)> {
    let mut all = Vec::new();
    while let Some(upcall) = b.core.upcalls.pop_front() {
        let Upcall::Fault { extent, write, .. } = upcall else {
            panic!("{upcall:?}");
        };
        all.push((extent, write));
    }
    all
}

fn ended(b: &mut Bench) -> Vec<(u16, Status)> {
    let mut all = Vec::new();
    while let Some(done) = b.core.next_done() {
        all.push((done.owner.slot, done.status));
        if let Some(buffer) = done.buffer {
            b.core.staging.release(buffer);
        }
    }
    all
}

#[test]
fn each_extent_is_asked_once_and_answers_find_all_who_wait() {
    let mut b = bench();
    let mut slots = vec![Vec::new(); 100];
    // Three for each extent, mixed.
    for round in 0..3 {
        for i in 0..100u64 {
            let extent = (i * 37 + round) % 100;
            slots[extent as usize].push(b.start(read(extent), None));
        }
    }
    let mut all = asked(&mut b);
    all.sort_unstable();
    assert_eq!(all, (0..100).map(|e| (e, false)).collect::<Vec<_>>());
    assert_eq!(ended(&mut b), []);
    // One extent, in order of arrival.
    b.grant(7, 0, Rights::Hole, 1);
    let mine = |e: usize| slots[e].iter().map(|s| (*s, Status::SUCCESS));
    assert_eq!(ended(&mut b), mine(7).collect::<Vec<_>>());
    // A range, and one longer than any table.
    b.grant(20, 0, Rights::Hole, 30);
    let mut got = ended(&mut b);
    let mut want: Vec<_> = slots[20..50]
        .iter()
        .flatten()
        .map(|s| (*s, Status::SUCCESS))
        .collect();
    got.sort_unstable_by_key(|g| g.0);
    want.sort_unstable_by_key(|w: &(u16, Status)| w.0);
    assert_eq!(got, want);
    b.volume.table.install(b.volume.whole(), Word::HOLE);
    b.core
        .fault_answered(VolumeId(1), ExtentRange::new(0, u64::MAX), Answer::Granted);
    assert_eq!(ended(&mut b), [], "another volume's answer");
    b.core
        .fault_answered(V, ExtentRange::new(0, u64::MAX), Answer::Granted);
    assert_eq!(ended(&mut b).len(), 300 - 3 - 90);
    assert!(!b.core.has_waiting());
    let parked = &b.core.lane(LaneIndex(3)).unwrap().record().parked;
    assert_eq!(parked.load(Relaxed), 0);
}

#[test]
fn an_answer_that_is_taken_back_at_once_is_asked_for_again() {
    let mut b = bench();
    let slot = b.start(read(3), None);
    assert_eq!(asked(&mut b), [(3, false)]);
    // Granted and revoked before the reactor runs.
    b.core
        .fault_answered(V, ExtentRange::new(3, 1), Answer::Granted);
    assert_eq!(asked(&mut b), [(3, false)]);
    b.grant(3, 0, Rights::Hole, 1);
    assert_eq!(ended(&mut b), [(slot, Status::SUCCESS)]);
}

#[test]
fn a_read_and_a_write_of_one_extent_have_answers_of_their_own() {
    let mut b = bench();
    let first = b.start(read(5), None);
    let write = IoOp::Write {
        offset_bytes: 5 * EXTENT,
        len_bytes: 4096,
        fua: false,
    };
    let second = b.start(write, Some(&[1; 4096]));
    let third = b.start(read(5), None);
    assert_eq!(asked(&mut b), [(5, false), (5, true)]);
    let range = ExtentRange::new(0, 10);
    b.core.fault_answered(
        V,
        range,
        Answer::Failed {
            write: true,
            reason: FaultFailure::NoSpace,
        },
    );
    assert_eq!(ended(&mut b), [(second, Status::CAPACITY_EXCEEDED)]);
    b.core.fault_answered(
        V,
        range,
        Answer::Failed {
            write: false,
            reason: FaultFailure::Device,
        },
    );
    let gone = Status::UNRECOVERED_READ_ERROR;
    assert_eq!(ended(&mut b), [(first, gone), (third, gone)]);
}

#[test]
fn expired_waits_end_and_others_stay() {
    let mut b = bench();
    let start_ns = b.core.now_ns();
    for extent in 0..50 {
        b.start(read(extent % 10), None);
    }
    // Every other one is younger.
    let limit = start_ns + OWNER_WAIT_LIMIT_NS + 1_000_000_000;
    let mut old = Vec::new();
    for io in b.core.slab.iter_mut().filter(|io| io.stage != Stage::Free) {
        if io.owner.slot % 2 == 0 {
            io.deadline_ns = limit + 1;
        } else {
            old.push(io.owner.slot);
        }
    }
    b.core.clock.set_now_ns(limit);
    b.core.tick();
    let mut got = ended(&mut b);
    got.sort_unstable_by_key(|g| g.0);
    old.sort_unstable();
    let interrupted = Status::COMMAND_INTERRUPTED;
    assert_eq!(
        got,
        old.iter().map(|s| (*s, interrupted)).collect::<Vec<_>>()
    );
    b.grant(0, 0, Rights::Hole, 50);
    assert_eq!(ended(&mut b).len(), 25);
}

/// The volume may have another writer when the answer comes.
#[test]
fn waiting_commands_of_a_removed_export_never_execute() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 1);
    let write = |extent: u64, len_bytes: u32| IoOp::Write {
        offset_bytes: extent * EXTENT,
        len_bytes,
        fua: false,
    };
    // One is parked, one has its first part at the device, and one's device is missing.
    let parked = b.start(write(5, 4096), Some(&[1; 4096]));
    b.gate.hold();
    let both = 2 * EXTENT as u32;
    let begun = b.start(write(0, both), Some(&vec![2; both as usize]));
    let absent = Word::new(DeviceIndex(7), ExtentIndex(0), Rights::ReadWrite).unwrap();
    b.volume.table.install(ExtentRange::new(9, 1), absent);
    let device = b.start(write(9, 4096), Some(&[3; 4096]));
    b.turn();
    assert_eq!(b.gate.held(), 1);
    assert_eq!(asked(&mut b), [(5, true), (1, true)]);
    b.core.remove_lane(LaneIndex(3));
    let mut got = ended(&mut b);
    got.sort_unstable_by_key(|g| g.0);
    let interrupted = Status::COMMAND_INTERRUPTED;
    assert_eq!(got, [(parked, interrupted), (device, interrupted)]);
    b.grant(1, 2, Rights::ReadWrite, 9);
    b.turn();
    assert_eq!(b.gate.held(), 1, "nothing more went to the device");
    assert_eq!(b.upcall(), "None");
    b.gate.release();
    let (slot, status, _) = b.end();
    assert_eq!((slot, status), (begun, interrupted));
    assert!(b.upcall().contains("LaneGone"));
    // Nothing was written at the others' places.
    let raw = std::fs::read(&b.path).unwrap();
    let rest = (1 << 20) + 2 * EXTENT as usize;
    assert!(raw[rest..].iter().all(|x| *x == 0));
}
