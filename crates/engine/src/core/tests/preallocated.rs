//! Preallocated extents: holes that the first write claims.

use super::*;

/// `count` preallocated extents from logical `extent` on, at device extent `at`.
fn preallocated(b: &mut Bench, extent: u64, at: u64, count: u64) {
    let word = Word::preallocated(DeviceIndex(0), ExtentIndex(at)).unwrap();
    let range = ExtentRange::new(extent, count);
    b.volume.may_write_to(DeviceIndex(0));
    b.volume.table.install(range, word);
    b.core.fault_answered(V, range, Answer::Granted);
}

#[test]
fn the_first_write_claims_a_preallocated_extent_without_upcall() {
    for kind in ["file", "ram"] {
        let mut b = bench_with(kind);
        preallocated(&mut b, 0, 20, 8);
        assert_eq!(b.read(0, 8192), vec![0; 8192]);
        assert_eq!(b.write(4096, &[7; 4096]).0, Status::SUCCESS);
        assert_eq!(b.upcall(), "None");
        let mut want = vec![0; 4096];
        want.extend([7; 4096]);
        want.extend([0; 4096]);
        assert_eq!(b.read(0, 12288), want);
        // A late grant cannot replace written data.
        preallocated(&mut b, 0, 20, 8);
        assert_eq!(b.read(0, 12288), want, "{kind}");
        let first = ExtentRange::new(0, 8);
        assert_eq!(b.volume.table.take_back(first), [ExtentRange::new(1, 7)]);
        assert_eq!(b.read(0, 12288), want, "{kind}");
        let raw = std::fs::read(&b.path).unwrap();
        let at = (1 << 20) + 20 * EXTENT as usize;
        assert_eq!(raw[at..at + 12288], want, "{kind}");
    }
}

#[test]
fn a_write_over_places_side_by_side_is_one_slice() {
    let mut b = bench();
    preallocated(&mut b, 1, 20, 3);
    b.gate.hold();
    let write = IoOp::Write {
        offset_bytes: EXTENT + 4096,
        len_bytes: 2 * EXTENT as u32,
        fua: false,
    };
    b.start(write, Some(&vec![3; 2 * EXTENT as usize]));
    b.nothing_ends();
    assert_eq!(b.core.slices.iter().count(), 1);
    assert_eq!(b.upcall(), "None");
    b.gate.release();
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.read(4 * EXTENT - 8192, 4096), vec![0; 4096]);
}

#[test]
fn a_parked_write_resumes_when_its_extent_is_preallocated() {
    let mut b = bench();
    let write = |extent| IoOp::Write {
        offset_bytes: extent * EXTENT,
        len_bytes: 4096,
        fua: false,
    };
    let slot = b.start(write(3), Some(&[9; 4096]));
    assert!(b.upcall().contains("extent: 3, write: true"));
    preallocated(&mut b, 0, 20, 8);
    assert_eq!((slot, Status::SUCCESS), {
        let (ended, status, _) = b.end();
        (ended, status)
    });
    assert_eq!(b.read(3 * EXTENT, 4096), vec![9; 4096]);
    // Taken back before the write: it faults as usual.
    b.volume.table.take_back(b.volume.whole());
    b.start(write(4), Some(&[9; 4096]));
    assert!(b.upcall().contains("extent: 4, write: true"));
}

#[test]
fn zeroing_treats_a_preallocated_extent_as_a_hole() {
    let mut b = bench();
    preallocated(&mut b, 0, 20, 8);
    for deallocate in [false, true] {
        let op = IoOp::WriteZeroes {
            offset_bytes: 4096,
            len_bytes: 6 * EXTENT,
            deallocate,
            fua: false,
        };
        b.start(op, None);
        assert_eq!(b.end().1, Status::SUCCESS);
    }
    let blocks = 5 * EXTENT / 4096;
    let mut range = [0u8; 16];
    range[4..8].copy_from_slice(&(blocks as u32).to_le_bytes());
    b.start(IoOp::Deallocate { ranges: 1 }, Some(&range));
    assert_eq!(b.end().1, Status::SUCCESS);
    assert_eq!(b.upcall(), "None");
    assert_eq!(b.volume.table.count_preallocated(b.volume.whole()), 8);
}
