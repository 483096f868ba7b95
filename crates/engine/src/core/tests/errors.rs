//! Device errors: command statuses, and counters in the state region.

use super::*;

/// Failed reads, writes and flushes, and writes without room.
fn counts(b: &Bench) -> [u64; 4] {
    let record = &b.core.region.devices()[0];
    [
        &record.read_errors,
        &record.write_errors,
        &record.flush_errors,
        &record.no_room_errors,
    ]
    .map(|counter| counter.load(Relaxed))
}

#[test]
fn errors_become_statuses_and_end_the_command_once() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 4);
    b.gate.fail(0..u64::MAX, &[OpKind::Write], Errno::IO, 1);
    assert_eq!(b.write(0, &[1; 4096]).0, Status::WRITE_FAULT);
    // A removed drive's error, unlike that of an image that became smaller.
    b.gate.fail(0..u64::MAX, &[OpKind::Write], Errno::NXIO, 1);
    assert_eq!(b.write(0, &[1; 4096]).0, Status::WRITE_FAULT);
    b.gate.fail(0..u64::MAX, &[OpKind::Write], Errno::RANGE, 1);
    assert_eq!(b.write(0, &[1; 4096]).0, Status::LBA_OUT_OF_RANGE);
    b.gate.fail(0..u64::MAX, &[OpKind::Read], Errno::IO, 1);
    b.start(
        IoOp::Read {
            offset_bytes: 0,
            len_bytes: 4096,
        },
        None,
    );
    assert_eq!(b.end().1, Status::UNRECOVERED_READ_ERROR);
    b.gate.fail(0..u64::MAX, &[OpKind::Write], Errno::NOSPC, 1);
    assert_eq!(b.write(0, &[1; 4096]).0, Status::CAPACITY_EXCEEDED);
    b.start(
        IoOp::Write {
            offset_bytes: 50 * EXTENT,
            len_bytes: 4096,
            fua: false,
        },
        Some(&[1; 4096]),
    );
    b.core.fault_answered(
        V,
        ExtentRange::new(50, 1),
        Answer::Failed {
            write: true,
            reason: FaultFailure::NoSpace,
        },
    );
    assert_eq!(b.end().1, Status::CAPACITY_EXCEEDED);
    // A grant beyond the device's end is refused.
    b.grant(60, 200, Rights::ReadWrite, 1);
    assert_eq!(b.write(60 * EXTENT, &[1; 4096]).0, Status::WRITE_FAULT);
    assert_eq!(b.core.slab.busy(), 0);
    // A refused command is no device error.
    assert_eq!(counts(&b), [1, 3, 0, 1]);
    // Missing room is no media error of the export.
    let lane = b.core.lane(LaneIndex(3)).unwrap();
    assert_eq!(lane.record().media_errors.load(Relaxed), 4);
}

#[test]
fn errors_are_counted_where_they_happened() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 4);
    assert_eq!(b.write(4096, &[1; 4096]).0, Status::SUCCESS);
    assert_eq!(counts(&b), [0; 4]);
    b.gate.fail(0..u64::MAX, &[OpKind::Write], Errno::IO, 1);
    assert_eq!(b.write(4096, &[1; 4096]).0, Status::WRITE_FAULT);
    let region = b.core.region.clone();
    let record = &region.devices()[0];
    assert_eq!(record.last_errno.load(Relaxed), 5);
    let at = EXTENT + 4096;
    assert_eq!(record.last_offset_bytes.load(Relaxed), (1 << 20) + at);
    assert!(record.last_ns.load(Relaxed) > 0);
    // Errors of the internal lane count too.
    let device = DeviceIndex(0);
    b.gate.fail(0..u64::MAX, &[OpKind::Flush], Errno::IO, 1);
    b.core.jobs.start(1, Job::Flush { device });
    b.gate.fail(0..u64::MAX, &[OpKind::Punch], Errno::IO, 1);
    let extents = ExtentRange::new(9, 1);
    b.core.jobs.start(2, Job::ZeroFill { device, extents });
    while counts(&b) != [0, 2, 1, 0] {
        b.core.begin_turn();
        b.core.end_turn();
        b.core.reap();
    }
}
