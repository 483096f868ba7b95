//! Compare, and compare-and-write.

use super::*;
use forebay_xlate::boundary::region::{CommandStage, CommandState};
use forebay_xlate::kill;

const BLOCK: u32 = 4096;

fn pair(at: u64) -> IoOp {
    IoOp::CompareAndWrite {
        offset_bytes: at,
        len_bytes: BLOCK,
        fua: false,
    }
}

impl Bench {
    fn compare(&mut self, op: IoOp, data: &[u8], expected: &[u8]) -> u16 {
        self.try_compare(op, data, expected, false).unwrap()
    }

    fn durable_pair(&mut self, data: u8, expected: u8) -> u16 {
        self.try_compare(pair(0), &[data; 4096], &[expected; 4096], true)
            .unwrap()
    }

    fn try_compare(
        &mut self,
        op: IoOp,
        data: &[u8],
        expected: &[u8],
        durable: bool,
    ) -> Option<u16> {
        let slot = self.next_slot;
        self.next_slot += 1;
        let mut buffer = self.core.staging.allocate(data.len() as u32).unwrap();
        buffer.as_mut_slice().copy_from_slice(data);
        let record = &self.core.region.commands(0)[usize::from(slot)];
        record
            .state
            .store(CommandState::taken(u64::from(slot) + 1).0, Relaxed);
        let new = NewIo {
            owner: Issuer {
                frontend: FrontendIndex(0),
                conn: 0,
                conn_generation: 0,
                slot,
            },
            lane: LaneIndex(3),
            op,
            buffer: Some(buffer),
            record: CommandRef::new(self.queue, slot),
            over_ns: None,
        };
        self.core.begin_turn();
        let expected = Expected {
            bytes: expected,
            durable,
        };
        match self.core.start_comparing(new, expected) {
            Ok(()) => Some(slot),
            Err(new) => {
                self.core.staging.release(new.buffer.unwrap());
                None
            }
        }
    }

    /// The next ended command, its answer unpublished.
    fn next_done(&mut self) -> DoneIo {
        loop {
            match self.core.next_done() {
                Some(done) => return done,
                None => self.turn(),
            }
        }
    }

    fn stage(&self, slot: u16) -> Option<CommandStage> {
        self.core.region.commands(0)[usize::from(slot)]
            .state()
            .stage()
    }
}

fn compare(at: u64, len_bytes: u32) -> IoOp {
    IoOp::Compare {
        offset_bytes: at,
        len_bytes,
    }
}

#[test]
fn a_compare_finds_one_differing_byte_in_any_slice() {
    for kind in ["file", "ram"] {
        let mut b = bench_with(kind);
        b.grant(0, 5, Rights::ReadWrite, 2);
        b.grant(2, 50, Rights::ReadWrite, 3);
        b.grant(5, 0, Rights::Hole, 3);
        let mut data: Vec<u8> = (0..4 * EXTENT).map(|i| (i / 512) as u8 ^ i as u8).collect();
        assert_eq!(b.write(8192, &data).0, Status::SUCCESS);
        let slot = b.compare(compare(8192, data.len() as u32), &data, &[]);
        // The host's bytes come back.
        assert_eq!(b.end(), (slot, Status::SUCCESS, data.clone()), "{kind}");
        for at in [0, 65_535, 65_536, 200_000, data.len() - 1] {
            data[at] ^= 4;
            let slot = b.compare(compare(8192, data.len() as u32), &data, &[]);
            let (ended, status, bytes) = b.end();
            assert_eq!((ended, status), (slot, Status::COMPARE_FAILURE), "{at}");
            assert_eq!(bytes, data);
            data[at] ^= 4;
        }
        b.compare(compare(6 * EXTENT, BLOCK), &[0; 4096], &[]);
        assert_eq!(b.end().1, Status::SUCCESS);
        b.compare(compare(6 * EXTENT, BLOCK), &[1; 4096], &[]);
        assert_eq!(b.end().1, Status::COMPARE_FAILURE);
        assert_eq!((b.core.staging.out(), b.core.slab.busy()), (0, 0));
        b.turn();
        assert!(!b.core.recovered.any(), "others pay nothing any more");
    }
}

#[test]
fn a_compare_waits_for_the_owner_and_ends_with_a_devices_error() {
    let mut b = bench();
    b.compare(compare(0, 8192), &[7; 8192], &[]);
    assert!(b.upcall().contains("extent: 0, write: false"));
    b.nothing_ends();
    b.grant(0, 5, Rights::ReadWrite, 1);
    assert_eq!(b.end().1, Status::COMPARE_FAILURE);
    b.gate.fail(0..u64::MAX, &[OpKind::Read], Errno::IO, 1);
    b.compare(compare(0, 8192), &[7; 8192], &[]);
    let (_, status, bytes) = b.end();
    assert_eq!(status, Status::UNRECOVERED_READ_ERROR);
    assert_eq!(bytes, [7; 8192], "its host's bytes, not ours");
    assert_eq!(b.core.staging.out(), 0);
    b.core.remove_lane(LaneIndex(3));
    b.compare(compare(0, 8192), &[7; 8192], &[]);
    let (_, status, bytes) = b.end();
    assert_eq!(
        (status, bytes),
        (Status::INVALID_NAMESPACE_OR_FORMAT, vec![7; 8192])
    );
    assert_eq!((b.core.staging.out(), b.core.fused.any()), (0, false));
}

#[test]
fn without_memory_it_is_given_back() {
    let mut b = bench();
    b.grant(0, 5, Rights::ReadWrite, 8);
    let mut all = Vec::new();
    while b.core.staging.left() > 1 {
        all.push(b.core.staging.allocate(1).unwrap());
    }
    assert_eq!(
        b.try_compare(compare(0, BLOCK), &[0; 4096], &[], false),
        None
    );
    assert_eq!(b.core.slab.busy(), 0);
    for buffer in all {
        b.core.staging.release(buffer);
    }
    b.compare(compare(0, BLOCK), &[0; 4096], &[]);
    assert_eq!(b.end().1, Status::SUCCESS);
}

#[test]
fn a_pair_writes_what_it_expects_alone() {
    for kind in ["file", "ram"] {
        let mut b = bench_with(kind);
        b.grant(0, 5, Rights::ReadWrite, 2);
        assert_eq!(b.write(4096, &[1; 4096]).0, Status::SUCCESS);
        let slot = b.compare(pair(4096), &[2; 4096], &[0; 4096]);
        let (ended, status, bytes) = b.end();
        assert_eq!((ended, status), (slot, Status::COMPARE_FAILURE));
        assert_eq!(bytes, [2; 4096]);
        assert_eq!(b.read(4096, BLOCK), [1; 4096]);
        assert_eq!(b.stage(slot), Some(CommandStage::Taken));
        let slot = b.compare(pair(4096), &[2; 4096], &[1; 4096]);
        assert_eq!(b.end(), (slot, Status::SUCCESS, vec![2; 4096]), "{kind}");
        assert_eq!(b.stage(slot), Some(CommandStage::Passed));
        assert_eq!(b.read(0, 3 * BLOCK)[4096..8192], [2; 4096]);
        assert_eq!((b.core.staging.out(), b.core.fused.any()), (0, false));
        b.turn();
        assert!(!b.core.recovered.any());
    }
}

#[test]
fn that_it_passed_is_recorded_before_a_device_gets_any_of_it() {
    let mut b = bench();
    b.grant(0, 5, Rights::ReadWrite, 2);
    b.write(0, &[1; 4096]);
    b.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    let slot = b.compare(pair(0), &[2; 4096], &[1; 4096]);
    kill::arm_here("fused.passed", 1);
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| b.nothing_ends()));
    assert!(died.is_err());
    assert_eq!(
        (b.stage(slot), b.gate.held()),
        (Some(CommandStage::Passed), 0)
    );
    std::mem::forget(b);
}

/// Of two that expect the same data, one writes.
#[test]
fn of_two_pairs_on_a_block_one_passes() {
    let mut b = bench();
    b.grant(0, 5, Rights::ReadWrite, 2);
    b.write(0, &[1; 4096]);
    for round in 1..20u8 {
        let first = b.compare(pair(0), &[round + 1; 4096], &[round; 4096]);
        let second = b.compare(pair(0), &[100 + round; 4096], &[round; 4096]);
        assert_eq!((b.end().0, b.end().1), (first, Status::COMPARE_FAILURE));
        assert!(b.stage(second) == Some(CommandStage::Taken));
        assert_eq!(b.read(0, BLOCK), [round + 1; 4096]);
    }
}

/// An older write at its device lands before the compare reads. A younger write and read wait for
/// the pair's write.
#[test]
fn nothing_comes_between() {
    let mut b = bench();
    b.grant(0, 5, Rights::ReadWrite, 2);
    b.write(0, &[1; 8192]);
    let write = |at: u64| IoOp::Write {
        offset_bytes: at,
        len_bytes: BLOCK,
        fua: false,
    };
    b.gate.hold_some(0..u64::MAX, &[OpKind::Write]);
    let older = b.start(write(0), Some(&[3; 4096]));
    b.turn();
    let waits = b.compare(pair(0), &[4; 4096], &[3; 4096]);
    let younger = b.start(write(0), Some(&[5; 4096]));
    let elsewhere = b.start(
        IoOp::Read {
            offset_bytes: 4096,
            len_bytes: BLOCK,
        },
        None,
    );
    let (ended, _, bytes) = b.end();
    assert_eq!((ended, bytes), (elsewhere, vec![1; 4096]));
    b.nothing_ends();
    b.gate.release();
    let mut order = Vec::new();
    for _ in 0..3 {
        let (slot, status, _) = b.end();
        assert_eq!(status, Status::SUCCESS);
        order.push(slot);
    }
    assert_eq!(order, [older, waits, younger]);
    assert_eq!(b.read(0, BLOCK), [5; 4096]);
}

/// Between the pair's write and its answer, a successor would repeat the write.
#[test]
fn nothing_comes_before_the_answer() {
    let mut b = bench_with("ram");
    b.grant(0, 5, Rights::ReadWrite, 2);
    let slot = b.compare(pair(0), &[4; 4096], &[0; 4096]);
    let write = IoOp::Write {
        offset_bytes: 0,
        len_bytes: BLOCK,
        fua: false,
    };
    let done = b.next_done();
    assert_eq!((done.owner.slot, done.status), (slot, Status::SUCCESS));
    b.core.staging.release(done.buffer.unwrap());
    let younger = b.start(write, Some(&[5; 4096]));
    b.nothing_ends();
    b.core.recovered.pair_answered(CommandRef::new(0, slot));
    assert_eq!(b.end().0, younger);
    let fails = b.gate.clone();
    fails.fail(0..u64::MAX, &[OpKind::Write], Errno::IO, 1);
    let slot = b.compare(pair(0), &[6; 4096], &[5; 4096]);
    let done = b.next_done();
    assert_eq!((done.owner.slot, done.status), (slot, Status::WRITE_FAULT));
    b.core.staging.release(done.buffer.unwrap());
    b.start(write, Some(&[5; 4096]));
    b.nothing_ends();
    b.core.recovered.pair_answered(CommandRef::new(0, slot));
    assert_eq!(b.end().1, Status::SUCCESS);
    b.turn();
    assert!(!b.core.recovered.any());
}

/// A recovered pair that has passed only writes; another one compares again.
#[test]
fn a_recovered_fused_pair_keeps_its_order() {
    let mut b = unfenced("file");
    b.grant(0, 5, Rights::ReadWrite, 2);
    let of = |slot| RecoveredSpan {
        volume: V,
        bytes: 0..4096,
        write: true,
        devices: FenceSet::One(DeviceIndex(0)),
        command: Some(CommandRef::new(0, slot)),
    };
    b.core.recovered.recover(&[of(0), of(1)]);
    let write = IoOp::Write {
        offset_bytes: 0,
        len_bytes: BLOCK,
        fua: false,
    };
    assert_eq!(b.start(write, Some(&[8; 4096])), 0);
    assert_eq!(b.compare(pair(0), &[9; 4096], &[8; 4096]), 1);
    b.nothing_ends();
    b.core.fenced(DeviceIndex(0));
    assert_eq!((b.end().0, b.end().1), (0, Status::SUCCESS));
    assert_eq!(b.read(0, BLOCK), [9; 4096]);
}

/// Its scratch buffer is the last, and must not count against the command itself.
#[test]
fn the_scratch_buffer_of_a_compare_refuses_no_command() {
    let mut b = bench();
    b.grant(0, 5, Rights::ReadWrite, 2);
    assert_eq!(b.write(0, &[1; 4096]).0, Status::SUCCESS);
    b.gate.hold();
    let held = IoOp::Write {
        offset_bytes: EXTENT,
        len_bytes: BLOCK,
        fua: false,
    };
    b.start(held, Some(&[9; 4096]));
    b.turn();
    let mut others = Vec::new();
    while b.core.staging.left() > 3 {
        others.push(b.core.staging.allocate(BLOCK).unwrap());
    }
    let slot = b.compare(pair(0), &[2; 4096], &[1; 4096]);
    b.gate.release();
    let ends = [b.end(), b.end()];
    assert!(ends.iter().all(|end| end.1 == Status::SUCCESS), "{ends:?}");
    assert!(ends.iter().any(|end| end.0 == slot));
    assert_eq!(b.read(0, BLOCK), [2; 4096]);
    for buffer in others {
        b.core.staging.release(buffer);
    }
    assert_eq!((b.core.staging.out(), b.core.slab.busy()), (0, 0));
}

/// FUA of the compare flushes and commits before it reads.
#[test]
fn a_durable_compare_flushes_and_commits_before_it_reads() {
    let mut b = bench();
    b.volume.granted(5);
    b.grant(0, 5, Rights::ReadWrite, 2);
    b.write(0, &[1; 8192]);
    b.gate.hold_some(0..u64::MAX, &[OpKind::Flush]);
    let slot = b.durable_pair(2, 1);
    let write = IoOp::Write {
        offset_bytes: 0,
        len_bytes: BLOCK,
        fua: false,
    };
    let younger = b.start(write, Some(&[3; 4096]));
    b.nothing_ends();
    assert_eq!((b.gate.held(), b.upcall()), (1, "None".into()));
    assert_eq!(b.stage(slot), Some(CommandStage::Taken), "it begins again");
    assert_eq!(b.read(4096, BLOCK), [1; 4096], "others go on");
    b.gate.release();
    b.turn_until_upcall();
    assert!(
        b.upcall()
            .contains("CommitWanted { volume: VolumeId(9), sequence: 5 }")
    );
    b.nothing_ends();
    assert_eq!(b.stage(slot), Some(CommandStage::Taken));
    b.volume.committed(5);
    b.core.commit_ended(V, Ok(()));
    assert_eq!(b.end(), (slot, Status::SUCCESS, vec![2; 4096]));
    assert_eq!(b.stage(slot), Some(CommandStage::Passed));
    assert_eq!((b.end().0, b.read(0, BLOCK)), (younger, vec![3; 4096]));
    // All is durable: only the device is flushed; and the compare may fail.
    b.durable_pair(4, 9);
    assert_eq!(
        (b.end().1, b.upcall()),
        (Status::COMPARE_FAILURE, "None".into())
    );
    // FUA of both halves.
    b.volume.granted(6);
    let IoOp::CompareAndWrite {
        offset_bytes,
        len_bytes,
        ..
    } = pair(0)
    else {
        unreachable!()
    };
    let both = IoOp::CompareAndWrite {
        offset_bytes,
        len_bytes,
        fua: true,
    };
    let slot = b.try_compare(both, &[4; 4096], &[3; 4096], true);
    b.turn_until_upcall();
    assert!(b.upcall().contains("sequence: 6"));
    // Later grants concern only its write.
    b.volume.granted(7);
    b.volume.committed(6);
    b.core.commit_ended(V, Ok(()));
    b.turn_until_upcall();
    assert!(b.upcall().contains("sequence: 7"));
    b.nothing_ends();
    b.volume.committed(7);
    b.core.commit_ended(V, Ok(()));
    assert_eq!((Some(b.end().0), b.read(0, BLOCK)), (slot, vec![4; 4096]));
    assert_eq!((b.core.staging.out(), b.core.fused.any()), (0, false));
    b.turn();
    assert!(!b.core.recovered.any());
    // Here a flush ends at once.
    let mut b = bench_with("ram");
    b.grant(0, 5, Rights::ReadWrite, 2);
    let slot = b.durable_pair(2, 0);
    assert_eq!(b.end(), (slot, Status::SUCCESS, vec![2; 4096]));
}

/// Interrupted while it flushes: it writes nothing, and blocks no other command.
#[test]
fn a_pair_that_ends_while_it_flushes_writes_nothing() {
    type Ends = fn(&mut Bench) -> Status;
    let aborted: Ends = |b| {
        b.gate.hold_some(0..u64::MAX, &[OpKind::Flush]);
        b.durable_pair(2, 1);
        b.nothing_ends();
        let status = Status::COMMAND_ABORT_REQUESTED;
        assert_eq!(b.core.end_waiting(status, |_, op, _| op.writes()), 0);
        status
    };
    let late: Ends = |b| {
        b.gate.hold_some(0..u64::MAX, &[OpKind::Flush]);
        b.durable_pair(2, 1);
        b.nothing_ends();
        b.core
            .clock
            .set_now_ns(b.core.now_ns() + OWNER_WAIT_LIMIT_NS + 1_000_000_000);
        b.core.tick();
        Status::COMMAND_INTERRUPTED
    };
    let not_flushed: Ends = |b| {
        (b.gate).fail(0..u64::MAX, &[OpKind::Flush], Errno::IO, 1);
        b.durable_pair(2, 1);
        Status::WRITE_FAULT
    };
    let not_committed: Ends = |b| {
        b.volume.granted(5);
        b.durable_pair(2, 1);
        b.turn_until_upcall();
        assert!(b.upcall().contains("sequence: 5"));
        b.core.commit_ended(V, Err(5));
        Status::INTERNAL_ERROR
    };
    let gone: Ends = |b| {
        b.volume.granted(5);
        b.durable_pair(2, 1);
        b.turn_until_upcall();
        assert!(b.upcall().contains("sequence: 5"));
        b.core.recovered.orphan(0);
        Status::COMMAND_INTERRUPTED
    };
    for ends in [aborted, late, not_flushed, not_committed, gone] {
        let mut b = bench();
        b.grant(0, 5, Rights::ReadWrite, 2);
        assert_eq!(b.write(0, &[1; 4096]).0, Status::SUCCESS);
        let status = ends(&mut b);
        let (slot, ended, bytes) = b.end();
        assert_eq!((ended, bytes), (status, vec![2; 4096]));
        assert_eq!(b.stage(slot), Some(CommandStage::Taken));
        b.gate.release();
        assert_eq!(b.read(0, BLOCK), [1; 4096]);
        assert_eq!(b.write(0, &[8; 4096]).0, Status::SUCCESS);
        assert_eq!((b.core.staging.out(), b.core.fused.any()), (0, false));
        b.turn();
        assert!(!b.core.recovered.any(), "{status:?}");
    }
}
