//! Write Zeroes and Deallocate on real device files.

use super::*;

fn dsm(ranges: &[(u64, u32)]) -> Vec<u8> {
    let each = |(lba, blocks): &(u64, u32)| {
        let mut r = [0u8; 16];
        r[4..8].copy_from_slice(&blocks.to_le_bytes());
        r[8..].copy_from_slice(&lba.to_le_bytes());
        r
    };
    ranges.iter().flat_map(each).collect()
}

#[test]
fn deallocate_releases_whole_extents_and_punches_the_rest() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 4);
    b.grant(4, 0, Rights::Hole, 90);
    let data = vec![9; 4 * EXTENT as usize];
    assert_eq!(b.write(0, &data).0, Status::SUCCESS);
    // From the middle of extent 0 to the middle of extent 3; then holes.
    let half = (EXTENT / 2 / 4096) as u32;
    let per = (EXTENT / 4096) as u32;
    let ranges = dsm(&[
        (u64::from(half), half + 2 * per + half),
        (u64::from(5 * per), 10 * per),
    ]);
    let slot = b.start(IoOp::Deallocate { ranges: 2 }, Some(&ranges));
    let upcall = b.core.upcalls.pop_front();
    let Some(Upcall::Release {
        io,
        generation,
        range,
        ..
    }) = upcall
    else {
        panic!("{upcall:?}")
    };
    assert_eq!(range, ExtentRange::new(1, 2));
    b.nothing_ends();
    b.core
        .release_ended(io, generation.wrapping_sub(1), Released::Done(2));
    b.nothing_ends();
    b.volume.table.clear(range);
    b.core
        .release_ended(io, generation, Released::Done(u64::MAX));
    let (ended, status, _) = b.end();
    assert_eq!((ended, status), (slot, Status::SUCCESS));
    assert_eq!(b.upcall(), "None");
    // All bytes of its ranges count, holes too.
    let kind = forebay_xlate::boundary::region::OpKind::Deallocate;
    let statistics = &b.core.lane(LaneIndex(3)).unwrap().record().ops[kind as usize];
    assert_eq!(statistics.bytes.load(Relaxed), 13 * EXTENT);
    b.grant(1, 0, Rights::Hole, 2);
    let mut want = vec![9; EXTENT as usize / 2];
    want.extend(vec![0; 3 * EXTENT as usize]);
    want.extend(vec![9; EXTENT as usize / 2]);
    assert_eq!(b.read(0, 4 * EXTENT as u32), want);
}

/// A command that names many holes many times leaves turns to others.
#[test]
fn a_huge_deallocation_does_not_hold_up_others() {
    let mut b = bench();
    let volume = Volume::new(VolumeConfig {
        size_bytes: 100_000 * EXTENT,
        ..b.volume.config.clone()
    });
    b.volume = Arc::new(volume.unwrap());
    b.core.lanes.set_volume(&b.volume.clone());
    b.grant(0, 0, Rights::Hole, 100_000);
    let blocks = (100_000 * EXTENT / 4096) as u32;
    let huge = b.start(
        IoOp::Deallocate { ranges: 256 },
        Some(&dsm(&[(0, blocks); 256])),
    );
    assert!(
        b.core.next_done().is_none(),
        "it was not carried out in one go"
    );
    let read = b.start(
        IoOp::Read {
            offset_bytes: 0,
            len_bytes: 4096,
        },
        None,
    );
    assert_eq!((b.end().0, b.end().0), (read, huge));
}

/// Unknown extents are asked for at once; the owner may do a part.
#[test]
fn deallocate_of_holes_is_free() {
    const EXTENTS: u64 = 16 << 20;
    let mut b = bench();
    let volume = Volume::new(VolumeConfig {
        size_bytes: EXTENTS * EXTENT,
        ..b.volume.config.clone()
    });
    b.volume = Arc::new(volume.unwrap());
    b.core.lanes.set_volume(&b.volume.clone());
    b.grant(0, 1, Rights::ReadWrite, 4);
    let blocks = (EXTENTS * EXTENT / 4096) as u32;
    let zeroes = IoOp::WriteZeroes {
        offset_bytes: 0,
        len_bytes: EXTENTS * EXTENT,
        deallocate: true,
        fua: false,
    };
    let ranges = dsm(&[(0, blocks)]);
    for (op, ranges) in [
        (IoOp::Deallocate { ranges: 1 }, Some(&ranges[..])),
        (zeroes, None),
    ] {
        let slot = b.start(op, ranges);
        for (first, done) in [(0, 5), (5, 1000), (1005, u64::MAX)] {
            let Some(Upcall::Release {
                io,
                generation,
                range,
                ..
            }) = b.core.upcalls.pop_front()
            else {
                panic!("nothing is asked")
            };
            assert_eq!(range, ExtentRange::new(first, EXTENTS - first));
            b.volume.table.clear(range);
            b.core.release_ended(io, generation, Released::Done(done));
        }
        let (ended, status, _) = b.end();
        assert_eq!((ended, status), (slot, Status::SUCCESS));
        assert_eq!(b.upcall(), "None");
    }
}

/// The owner decides: it may have begun.
#[test]
fn a_late_release_is_abandoned_only_by_the_owner() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 4);
    let per = (EXTENT / 4096) as u32;
    let dealloc = b.start(IoOp::Deallocate { ranges: 1 }, Some(&dsm(&[(0, per)])));
    let Some(Upcall::Release { io, generation, .. }) = b.core.upcalls.pop_front() else {
        panic!()
    };
    b.core.clock.now_ns += OWNER_WAIT_LIMIT_NS + 1;
    b.core.tick();
    assert!(b.core.next_done().is_none());
    let asked = format!("AbandonRelease {{ io: {io}, generation: {generation} }}");
    assert!(b.upcall().contains(&asked));
    b.core.tick();
    assert_eq!(b.upcall(), "None", "asked once in a while");
    b.core.release_ended(io, generation, Released::Abandoned);
    let (ended, status, _) = b.end();
    assert_eq!((ended, status), (dealloc, Status::COMMAND_INTERRUPTED));
    // A late answer is ignored.
    b.core
        .release_ended(io, generation, Released::Done(u64::MAX));
    assert_eq!(b.core.slab.busy(), 0);
}

/// Write Zeroes must leave zeros even if the release fails; a deallocation may leave anything.
#[test]
fn zeros_are_written_where_the_owner_can_not_release() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 4);
    let data = vec![9; 4 * EXTENT as usize];
    assert_eq!(b.write(0, &data).0, Status::SUCCESS);
    let op = IoOp::WriteZeroes {
        offset_bytes: EXTENT,
        len_bytes: 2 * EXTENT + 4096,
        deallocate: true,
        fua: false,
    };
    let slot = b.start(op, None);
    let Some(Upcall::Release { io, generation, .. }) = b.core.upcalls.pop_front() else {
        panic!()
    };
    // The owner revoked the words, but changed nothing.
    b.volume.table.clear(ExtentRange::new(1, 2));
    b.core
        .release_ended(io, generation.wrapping_sub(1), Released::Failed);
    b.nothing_ends();
    b.core.release_ended(io, generation, Released::Failed);
    assert!(b.upcall().contains("Fault"), "where does it lie?");
    b.grant(1, 2, Rights::ReadWrite, 2);
    let (ended, status, _) = b.end();
    assert_eq!((ended, status), (slot, Status::SUCCESS));
    assert_eq!(b.upcall(), "None", "not asked a second time");
    let got = b.read(0, 4 * EXTENT as u32);
    let (first, rest) = got.split_at(EXTENT as usize);
    let (zeros, last) = rest.split_at(2 * EXTENT as usize + 4096);
    assert!(first.iter().chain(last).all(|byte| *byte == 9));
    assert!(zeros.iter().all(|byte| *byte == 0));

    let per = (EXTENT / 4096) as u32;
    let slot = b.start(IoOp::Deallocate { ranges: 1 }, Some(&dsm(&[(0, per)])));
    let Some(Upcall::Release { io, generation, .. }) = b.core.upcalls.pop_front() else {
        panic!()
    };
    b.core.release_ended(io, generation, Released::Failed);
    let (ended, status, _) = b.end();
    assert_eq!((ended, status), (slot, Status::SUCCESS));
    assert_eq!(b.read(0, EXTENT as u32), vec![9; EXTENT as usize]);
}

#[test]
fn write_zeroes_allocates_nothing_for_holes() {
    let mut b = bench();
    b.grant(0, 0, Rights::Hole, 2);
    b.grant(2, 5, Rights::ReadWrite, 2);
    assert_eq!(
        b.write(2 * EXTENT, &vec![4; 2 * EXTENT as usize]).0,
        Status::SUCCESS
    );
    let op = IoOp::WriteZeroes {
        offset_bytes: EXTENT,
        len_bytes: 2 * EXTENT + 4096,
        deallocate: false,
        fua: true,
    };
    b.start(op, None);
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.upcall(), "None", "no fault, no release");
    let got = b.read(2 * EXTENT, 2 * EXTENT as u32);
    assert!(got[..EXTENT as usize + 4096].iter().all(|x| *x == 0));
    assert!(got[EXTENT as usize + 4096..].iter().all(|x| *x == 4));
}

/// Before the owner unmaps an extent, the volume may grow and be written behind its old end.
#[test]
fn the_extent_that_the_volume_ends_in_is_not_released() {
    let mut b = bench();
    let size_bytes = 2 * EXTENT + 8192;
    let volume = Volume::new(VolumeConfig {
        size_bytes,
        ..b.volume.config.clone()
    });
    b.volume = Arc::new(volume.unwrap());
    b.core.lanes.set_volume(&b.volume.clone());
    b.grant(0, 1, Rights::ReadWrite, 3);
    let data = vec![9; size_bytes as usize];
    assert_eq!(b.write(0, &data).0, Status::SUCCESS);
    let ranges = dsm(&[(0, (size_bytes / 4096) as u32)]);
    let slot = b.start(IoOp::Deallocate { ranges: 1 }, Some(&ranges));
    let upcall = b.core.upcalls.pop_front();
    let Some(Upcall::Release {
        io,
        generation,
        range,
        ..
    }) = upcall
    else {
        panic!("{upcall:?}")
    };
    assert_eq!(range, ExtentRange::new(0, 2));
    let grown = b.volume.resized(VolumeConfig {
        size_bytes: 3 * EXTENT,
        ..b.volume.config.clone()
    });
    b.volume = Arc::new(grown.unwrap());
    b.core.lanes.set_volume(&b.volume.clone());
    assert_eq!(b.write(size_bytes, &[7; 4096]).0, Status::SUCCESS);
    b.volume.table.clear(range);
    b.core
        .release_ended(io, generation, Released::Done(u64::MAX));
    let (ended, status, _) = b.end();
    assert_eq!((ended, status), (slot, Status::SUCCESS));
    let mut want = vec![0; 8192];
    want.extend([7; 4096]);
    assert_eq!(b.read(2 * EXTENT, 12288), want);
}

#[test]
fn a_release_of_a_removed_export_is_given_up_at_once() {
    let mut b = bench();
    b.grant(0, 1, Rights::ReadWrite, 4);
    let per = (EXTENT / 4096) as u32;
    b.start(
        IoOp::Deallocate { ranges: 1 },
        Some(&dsm(&[(0, per * 2 + 1)])),
    );
    let Some(Upcall::Release { io, generation, .. }) = b.core.upcalls.pop_front() else {
        panic!()
    };
    b.core.remove_lane(LaneIndex(3));
    assert!(b.upcall().contains("AbandonRelease"));
    assert!(b.core.next_done().is_none(), "the owner may have begun");
    b.gate.hold();
    b.core
        .release_ended(io, generation, Released::Done(u64::MAX));
    b.turn();
    assert_eq!(b.gate.held(), 0, "the rest is not carried out");
    assert_eq!(b.end().1, Status::INVALID_NAMESPACE_OR_FORMAT);
    assert!(b.upcall().contains("LaneGone"));
}

/// Reads of zeros use shared memory.
#[test]
fn zeros_are_shared_and_mixed_reads_are_filled() {
    let mut b = bench();
    b.grant(0, 0, Rights::Hole, 10);
    b.grant(10, 3, Rights::ReadWrite, 1);
    b.grant(11, 0, Rights::Hole, 10);
    let data = vec![9; EXTENT as usize];
    assert_eq!(b.write(10 * EXTENT, &data).0, Status::SUCCESS);
    let read = |b: &mut Bench, at, len: u64| {
        let op = IoOp::Read {
            offset_bytes: at,
            len_bytes: len as u32,
        };
        b.start(op, None);
        let out = b.core.staging.out();
        let (_, status, bytes) = b.end();
        assert_eq!(status, Status::SUCCESS);
        (out, bytes)
    };
    // Within an extent, over several, to their end.
    for (at, len) in [
        (8192, 4096),
        (EXTENT - 4096, 2 * EXTENT),
        (9 * EXTENT, EXTENT),
    ] {
        assert_eq!(read(&mut b, at, len), (0, vec![0; len as usize]));
    }
    // Reads that begin or end elsewhere.
    for (at, len, zeros) in [
        (10 * EXTENT - 8192, 16384, 0..8192),
        (11 * EXTENT - 8192, 16384, 8192..16384),
    ] {
        let mut want = vec![9; len as usize];
        want[zeros].fill(0);
        assert_eq!(read(&mut b, at, len), (1, want));
    }
    assert_eq!(b.core.staging.out(), 0);
}
