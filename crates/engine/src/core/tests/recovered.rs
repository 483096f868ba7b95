//! Operations that a dead engine or a closed connection may still have at a device, and commands
//! that wait for them.

use super::*;

const BLOCK: u64 = 4096;

fn write(block: u64) -> IoOp {
    IoOp::Write {
        offset_bytes: block * BLOCK,
        len_bytes: BLOCK as u32,
        fua: false,
    }
}

fn read(block: u64) -> IoOp {
    IoOp::Read {
        offset_bytes: block * BLOCK,
        len_bytes: BLOCK as u32,
    }
}

/// Blocks `first..end` of the volume, on `device`, for the command in `slot` of queue 0.
fn span(blocks: std::ops::Range<u64>, device: u8, slot: Option<u16>) -> RecoveredSpan {
    RecoveredSpan {
        volume: V,
        bytes: blocks.start * BLOCK..blocks.end * BLOCK,
        write: true,
        devices: FenceSet::One(DeviceIndex(device)),
        command: slot.map(|slot| CommandRef::new(0, slot)),
    }
}

/// With the whole volume on a device before its fence.
fn taken_over() -> Bench {
    let mut b = unfenced("file");
    b.grant(0, 0, Rights::ReadWrite, 100);
    b
}

impl Bench {
    fn start_write(&mut self, block: u64, value: u8) -> u16 {
        self.start(write(block), Some(&[value; BLOCK as usize]))
    }

    fn ends(&mut self, slot: u16) -> Vec<u8> {
        let (ended, status, bytes) = self.end();
        assert_eq!((ended, status), (slot, Status::SUCCESS));
        bytes
    }

    fn block(&mut self, block: u64) -> u8 {
        let bytes = self.read(block * BLOCK, BLOCK as u32);
        assert!(bytes.iter().all(|b| *b == bytes[0]));
        bytes[0]
    }

    fn pass_time(&mut self, ns: u64) {
        self.core.clock.now_ns += ns;
        self.core.tick();
    }
}

#[test]
fn recovered_commands_wait_for_the_fence_in_order() {
    let mut b = taken_over();
    let older = span(4..5, 0, Some(0));
    let younger = span(3..5, 0, Some(1));
    b.core.recovered.recover(&[older, younger]);
    // They start in the other order.
    b.next_slot = 1;
    let two_blocks = IoOp::Write {
        offset_bytes: 3 * BLOCK,
        len_bytes: 2 * BLOCK as u32,
        fua: false,
    };
    let younger = b.start(two_blocks, Some(&[2; 2 * BLOCK as usize]));
    b.next_slot = 0;
    let older = b.start_write(4, 1);
    b.next_slot = 2;
    let new_write = b.start_write(3, 3);
    let new_read = b.start(read(4), None);
    // Commands that overlap none of them are served at once.
    let elsewhere = b.start_write(5, 9);
    b.ends(elsewhere);
    b.nothing_ends();
    b.core.fenced(DeviceIndex(0));
    b.ends(older);
    b.ends(younger);
    let mut rest = [b.end(), b.end()];
    rest.sort_by_key(|e| e.0);
    assert_eq!((rest[0].0, rest[1].0), (new_write, new_read));
    assert_eq!(rest[1].2, [2; BLOCK as usize]);
    assert_eq!((b.block(3), b.block(4), b.block(5)), (3, 2, 9));
    assert!(!b.core.recovered.any());
}

#[test]
fn the_fence_of_one_device_holds_no_other() {
    let mut b = taken_over();
    let file = b.path.with_file_name("other");
    let other = std::fs::File::create(&file).unwrap();
    other.set_len(16 << 20).unwrap();
    let spec = format!("file:{}", file.display()).parse().unwrap();
    b.core.set_device(device(1, &spec).0);
    let word = Word::new(DeviceIndex(1), ExtentIndex(7), Rights::ReadWrite).unwrap();
    b.volume.table.install(ExtentRange::new(1, 1), word);
    let there = EXTENT / BLOCK;
    let everywhere = RecoveredSpan {
        devices: FenceSet::ALL,
        ..span(8..9, 0, None)
    };
    // Device 1 or 9, or 2 or 10; the others are not served.
    let not_first = RecoveredSpan {
        devices: FenceSet::Among(0b110),
        ..span(9..10, 0, None)
    };
    b.core.recovered.recover(&[
        span(0..1, 0, Some(0)),
        span(there..there + 1, 1, Some(1)),
        everywhere,
        not_first,
    ]);
    let first = b.start_write(0, 1);
    let second = b.start_write(there, 2);
    let third = b.start_write(8, 3);
    let fourth = b.start_write(9, 4);
    b.nothing_ends();
    b.core.fenced(DeviceIndex(1));
    let mut now = [b.end().0, b.end().0];
    now.sort_unstable();
    assert_eq!(now, [second, fourth]);
    b.nothing_ends();
    b.core.fenced(DeviceIndex(0));
    let mut rest = [b.end().0, b.end().0];
    rest.sort_unstable();
    assert_eq!(rest, [first, third]);
    b.turn();
    assert!(!b.core.recovered.any());
}

#[test]
fn orphan_spans_end_with_the_fence() {
    let mut b = taken_over();
    b.core.recovered.recover(&[span(7..8, 0, Some(99))]);
    assert_eq!(b.core.record().orphans.load(Relaxed), 0);
    b.core.recovered.recover(&[
        span(0..1, 0, None),
        RecoveredSpan {
            write: false,
            ..span(2..3, 0, None)
        },
    ]);
    assert_eq!(b.core.record().orphans.load(Relaxed), 1);
    let over_a_write = b.start(read(0), None);
    let over_a_read = b.start_write(2, 5);
    let beside_a_read = b.start(read(2), None);
    b.ends(beside_a_read);
    b.nothing_ends();
    b.core.fenced(DeviceIndex(0));
    let mut rest = [b.end().0, b.end().0];
    rest.sort_unstable();
    assert_eq!(rest, [over_a_write, over_a_read]);
    assert_eq!(b.core.record().orphans.load(Relaxed), 0);
    b.core.recovered.orphan(0);
    b.turn();
    // Fences that have passed are not waited for.
    b.core.recovered.recover(&[span(0..1, 0, None)]);
    assert!(!b.core.recovered.any());
}

#[test]
fn waits_for_recovered_commands_are_limited() {
    let mut b = taken_over();
    b.core.recovered.recover(&[span(0..1, 0, Some(0))]);
    let recovered = b.start_write(0, 1);
    let waits = b.start_write(0, 2);
    b.pass_time(OWNER_WAIT_LIMIT_NS - 1);
    assert!(b.core.next_done().is_none());
    b.pass_time(2);
    let (slot, status, _) = b.end();
    assert_eq!((slot, status), (waits, Status::COMMAND_INTERRUPTED));
    // A recovered command waits without limit.
    b.pass_time(100 * OWNER_WAIT_LIMIT_NS);
    b.nothing_ends();
    b.core.fenced(DeviceIndex(0));
    b.ends(recovered);
    assert_eq!(b.block(0), 1);
}

#[test]
fn a_flush_waits_for_nothing_that_was_not_acknowledged() {
    let mut b = taken_over();
    b.core
        .recovered
        .recover(&[span(0..1, 0, Some(0)), span(2..3, 0, Some(1))]);
    // The first half of a durable read, whose second half is recovered.
    let flush = b.start(IoOp::Flush, None);
    b.ends(flush);
    b.next_slot = 0;
    let second_half = b.start(read(0), None);
    b.nothing_ends();
    // If the first half fails, there is no second.
    b.gate.fail(0..u64::MAX, &[OpKind::Flush], Errno::IO, 1);
    let flush = b.start(IoOp::Flush, None);
    let (slot, status, _) = b.end();
    assert_eq!((slot, status), (flush, Status::WRITE_FAULT));
    b.core.fenced(DeviceIndex(0));
    b.ends(second_half);
    b.turn();
    assert!(!b.core.recovered.any());
}

#[test]
fn a_deallocation_is_recovered_range_by_range() {
    let mut b = taken_over();
    for block in 0..4 {
        assert_eq!(
            b.write(block * BLOCK, &[7; BLOCK as usize]).0,
            Status::SUCCESS
        );
    }
    b.next_slot = 0;
    b.core
        .recovered
        .recover(&[span(0..1, 0, Some(0)), span(2..3, 0, Some(0))]);
    let mut ranges = [0; 32];
    for (range, lba) in ranges.chunks_exact_mut(16).zip([0u64, 2]) {
        range[4..8].copy_from_slice(&1u32.to_le_bytes());
        range[8..16].copy_from_slice(&lba.to_le_bytes());
    }
    let recovered = b.start(IoOp::Deallocate { ranges: 2 }, Some(&ranges));
    let waits = b.start_write(2, 8);
    let goes = b.start_write(1, 9);
    b.ends(goes);
    b.nothing_ends();
    // A new one is checked range by range too.
    ranges[8..16].copy_from_slice(&3u64.to_le_bytes());
    let second = b.start(IoOp::Deallocate { ranges: 2 }, Some(&ranges));
    b.nothing_ends();
    b.core.fenced(DeviceIndex(0));
    b.ends(recovered);
    let mut rest = [b.end().0, b.end().0];
    rest.sort_unstable();
    assert_eq!(rest, [waits, second]);
    assert_eq!((b.block(0), b.block(1), b.block(3)), (0, 9, 0));
}

#[test]
fn jobs_begin_after_the_fence() {
    let mut b = taken_over();
    let device = DeviceIndex(0);
    let extents = ExtentRange::new(50, 1);
    b.gate.hold();
    b.core.jobs.start(1, Job::ZeroFill { device, extents });
    b.core.jobs.start(2, Job::Flush { device });
    let copy = Job::Copy {
        from: device,
        source: ExtentIndex(20),
        to: device,
        target: ExtentIndex(21),
        count: 1,
    };
    b.core.jobs.start(3, copy);
    b.nothing_ends();
    assert_eq!((b.gate.held(), b.upcall().as_str()), (0, "None"));
    b.core.fenced(device);
    assert!(b.core.must_turn());
    b.turn();
    assert_eq!(b.gate.held(), 3);
    b.gate.release();
    b.turn_until_upcall();
    assert!(b.upcall().contains("error: None"));
}

#[test]
fn recovered_commands_of_a_closed_connection_keep_their_spans() {
    let mut b = taken_over();
    let mut begun_then_closed = span(2..3, 0, Some(1));
    begun_then_closed.command = Some(CommandRef::new(5, 0));
    let mut never_begun = span(6..7, 0, Some(0));
    never_begun.command = Some(CommandRef::new(7, 0));
    b.core
        .recovered
        .recover(&[begun_then_closed, span(0..1, 0, Some(40)), never_begun]);
    b.queue = 5;
    b.start_write(2, 1);
    b.core.recovered.orphan(5);
    // The others never begin, and a successor would find no record of them.
    let orphans = |b: &Bench| b.core.record().orphans.load(Relaxed);
    assert_eq!(orphans(&b), 1);
    b.core.recovered.orphan(0);
    b.core.recovered.orphan(7);
    let (slot, status, _) = b.end();
    assert_eq!((slot, status), (0, Status::COMMAND_INTERRUPTED));
    // The slots' next users are other commands.
    b.queue = 0;
    b.next_slot = 40;
    let next = b.start_write(0, 2);
    let other = b.start_write(2, 2);
    b.nothing_ends();
    b.core.fenced(DeviceIndex(0));
    let mut rest = [b.end().0, b.end().0];
    rest.sort_unstable();
    assert_eq!(rest, [next, other]);
    assert_eq!((b.block(0), b.block(2)), (2, 2));
    b.turn();
    assert!(!b.core.recovered.any());
    assert_eq!(orphans(&b), 0);
}

#[test]
fn a_recovered_command_of_a_removed_export_blocks_no_other() {
    let mut b = taken_over();
    b.core.recovered.recover(&[RecoveredSpan {
        devices: FenceSet::None,
        ..span(0..1, 0, Some(0))
    }]);
    b.core.remove_lane(LaneIndex(3));
    b.start_write(0, 1);
    assert_eq!(b.end().1, Status::INVALID_NAMESPACE_OR_FORMAT);
    b.turn();
    assert!(!b.core.recovered.any());
}

#[test]
fn failover_waits_for_what_a_closed_connection_has_at_the_device() {
    let mut b = bench();
    b.grant(0, 0, Rights::ReadWrite, 2);
    b.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    let old = b.start_write(0, 1);
    b.turn();
    assert_eq!(b.gate.held(), 1);
    assert_eq!(
        b.core.record().orphans.load(Relaxed),
        0,
        "its record says it"
    );
    // Another one waits for the owner, and never gets to the device.
    let parked = b.start_write(2 * EXTENT / BLOCK, 1);
    assert!(b.upcall().contains("Fault"));
    b.core.recovered.orphan(0);
    b.queue = 1;
    // Another host, or a new association of this one.
    let over = b.start_write(0, 2);
    let (slot, status, _) = b.end();
    assert_eq!((slot, status), (parked, Status::COMMAND_INTERRUPTED));
    let beside = b.start(read(1), None);
    b.ends(beside);
    b.nothing_ends();
    assert_eq!(b.gate.held(), 1, "the new write is not at the device");
    b.gate.release();
    let (slot, status, _) = b.end();
    assert_eq!((slot, status), (old, Status::COMMAND_INTERRUPTED));
    b.ends(over);
    assert_eq!(b.block(0), 2, "the former association's write came first");
    assert!(!b.core.recovered.any());
    b.grant(2, 2, Rights::ReadWrite, 1);
    assert_eq!(
        b.block(2 * EXTENT / BLOCK),
        0,
        "what was parked came to nothing"
    );
}

#[test]
fn a_closed_connections_write_goes_no_further() {
    let mut b = bench();
    b.volume.granted(5);
    b.grant(0, 0, Rights::ReadWrite, 1);
    b.gate.hold();
    let old = b.start(
        IoOp::Write {
            offset_bytes: EXTENT - BLOCK,
            len_bytes: 2 * BLOCK as u32,
            fua: true,
        },
        Some(&[1; 2 * BLOCK as usize]),
    );
    b.turn();
    assert!(b.upcall().contains("extent: 1"));
    b.core.recovered.orphan(0);
    b.turn();
    // Its second half is granted too late, and a write without a host is not flushed.
    b.grant(1, 1, Rights::ReadWrite, 1);
    b.nothing_ends();
    assert_eq!(b.gate.held(), 1);
    b.gate.release();
    assert_eq!(b.end().0, old);
    assert_eq!(b.upcall(), "None");
    assert_eq!(b.block(EXTENT / BLOCK), 0);
    assert_eq!(b.block(EXTENT / BLOCK - 1), 1);
    // Fully at the device, but neither flushed nor committed.
    b.gate.hold();
    let op = IoOp::Write {
        offset_bytes: 0,
        len_bytes: BLOCK as u32,
        fua: true,
    };
    let old = b.start(op, Some(&[2; BLOCK as usize]));
    b.turn();
    b.core.recovered.orphan(0);
    b.turn();
    b.gate.release();
    assert_eq!(b.end().0, old);
    assert_eq!(b.upcall(), "None");
}

#[test]
fn buffer_reuse_after_cancel() {
    let mut b = bench();
    b.grant(0, 0, Rights::ReadWrite, 1);
    assert_eq!(b.write(0, &[0xee; BLOCK as usize]).0, Status::SUCCESS);
    b.gate.hold_some(0..u64::MAX, &[OpKind::Read]);
    let old = b.start(read(0), None);
    b.turn();
    assert_eq!(b.gate.held(), 1);
    b.core.recovered.orphan(0);
    b.nothing_ends();
    // Others take and fill every buffer.
    let mut all = Vec::new();
    while let Some(mut buffer) = b.core.staging.allocate(BLOCK as u32) {
        buffer.as_mut_slice().fill(0x33);
        all.push(buffer);
    }
    assert_eq!(b.core.staging.left(), 0);
    // The read lands late.
    b.gate.release();
    let (slot, _, bytes) = b.end();
    assert_eq!((slot, bytes), (old, vec![0xee; BLOCK as usize]));
    for buffer in all {
        assert!(buffer.as_slice().iter().all(|byte| *byte == 0x33));
        b.core.staging.release(buffer);
    }
    assert_eq!(b.core.staging.out(), 0);
}

#[test]
fn another_export_of_the_volume_waits_too() {
    let mut b = bench();
    b.grant(0, 0, Rights::ReadWrite, 1);
    b.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    let old = b.start_write(0, 1);
    b.turn();
    b.core.recovered.orphan(0);
    b.core.remove_lane(LaneIndex(3));
    let mut second = lane(4, V, &b.core.region.clone()).0;
    second.volume = b.volume.clone();
    b.core.set_lane(second);
    b.queue = 1;
    let new = b.start_on(4, write(0), Some(&[2; BLOCK as usize])).unwrap();
    b.nothing_ends();
    assert_eq!(b.gate.held(), 1);
    b.gate.release();
    assert_eq!((b.end().0, b.end().0), (old, new));
    let read = b.start_on(4, read(0), None).unwrap();
    assert_eq!(b.ends(read), [2; BLOCK as usize]);
}

#[test]
fn spans_on_any_device_wait_for_devices_not_yet_opened() {
    for comes in [true, false] {
        let mut b = taken_over();
        b.core.recovered.expect(DeviceIndex(1), true);
        let everywhere = RecoveredSpan {
            devices: FenceSet::ALL,
            ..span(8..9, 0, None)
        };
        b.core.recovered.recover(&[everywhere]);
        b.core.fenced(DeviceIndex(0));
        let new = b.start_write(8, 3);
        b.nothing_ends();
        if comes {
            b.core.fenced(DeviceIndex(1));
        } else {
            b.core.recovered.expect(DeviceIndex(1), false);
        }
        b.ends(new);
        assert!(!b.core.recovered.any());
    }
}
