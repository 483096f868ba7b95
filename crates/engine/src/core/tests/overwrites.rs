//! Writes of whole shared extents.

use super::copies::content;
use super::*;

const OLD: u64 = 10;
const NEW: u64 = 20;

fn overwrite(extent: u64, target: u64) -> Job {
    Job::Overwrite {
        volume: V,
        extent,
        to: DeviceIndex(0),
        target: ExtentIndex(target),
    }
}

/// With extents 0 to 3 shared, and a command that writes `len` bytes of `value` to them.
fn waiting(kind: &str, len: u64, value: u8, fua: bool) -> (Bench, u16) {
    let mut b = bench_with(kind);
    b.grant(0, OLD, Rights::Read, 4);
    let op = IoOp::Write {
        offset_bytes: 0,
        len_bytes: len as u32,
        fua,
    };
    let slot = b.start(op, Some(&vec![value; len as usize]));
    (b, slot)
}

fn asked(extent: u64, whole: bool) -> String {
    format!("Some(Fault {{ volume: {V:?}, extent: {extent}, write: true, whole: {whole} }})")
}

fn ended(job: u64, error: Option<Errno>) -> String {
    format!("Some(JobDone {{ job: {job}, error: {error:?} }})")
}

impl Bench {
    /// Runs an overwrite of extent 0 into [`NEW`]; the command then waits for its grant.
    fn overwritten(&mut self, job: u64) {
        assert_eq!(self.upcall(), asked(0, true));
        self.core.jobs.start(job, overwrite(0, NEW));
        self.turn_until_upcall();
        assert_eq!(self.upcall(), ended(job, None));
        assert_eq!(self.upcall(), asked(0, false));
        self.nothing_ends();
    }

    fn overwrite(&self, at: u64) {
        use std::os::unix::fs::FileExt as _;
        let file = std::fs::File::options().write(true).open(&self.path);
        let at = (1 << 20) + at * EXTENT;
        (file.unwrap())
            .write_all_at(&[0xee; EXTENT as usize], at)
            .unwrap();
    }

    fn holds(&self, at: u64, value: u8) -> bool {
        content(&self.path, at, 1) == vec![value; EXTENT as usize]
    }
}

#[test]
fn a_whole_extent_is_written_once_and_shown_when_it_is_granted() {
    for kind in ["file", "ram"] {
        let (mut b, slot) = waiting(kind, EXTENT, 5, true);
        b.overwritten(7);
        assert!(b.holds(NEW, 5) && b.holds(OLD, 0), "{kind}");
        assert_eq!(b.volume.table.lookup(0).extent().0, OLD);
        // The grant alone ends the command: the extent is not written again.
        b.overwrite(NEW);
        b.grant(0, NEW, Rights::ReadWrite, 1);
        let (ended, status, _) = b.end();
        assert_eq!((ended, status), (slot, Status::SUCCESS));
        assert!(b.holds(NEW, 0xee), "{kind}");
        assert!(!b.core.overwrites.any());
    }
}

#[test]
fn each_extent_of_a_long_command_is_written_in_turn() {
    let (mut b, _) = waiting("file", 2 * EXTENT + 4096, 5, false);
    b.overwritten(7);
    b.grant(0, NEW, Rights::ReadWrite, 1);
    assert_eq!(b.upcall(), asked(1, true));
    // This one gets a copy instead.
    b.grant(1, NEW + 1, Rights::ReadWrite, 1);
    assert_eq!(b.upcall(), asked(2, false));
    b.core.jobs.start(8, overwrite(2, NEW + 2));
    b.turn_until_upcall();
    assert_eq!(b.upcall(), ended(8, Some(Errno::NOENT)));
    b.grant(2, NEW + 2, Rights::ReadWrite, 1);
    assert_eq!(b.end().1, Status::SUCCESS);
    assert!(b.holds(NEW, 5) && b.holds(NEW + 1, 5));
    assert!(content(&b.path, NEW + 2, 1)[..4097] == [[5; 4096].as_slice(), &[0]].concat());
}

/// A place may be used again for other content.
#[test]
fn another_place_or_another_owner_gets_the_data_again() {
    for (place, hangs_up) in [(NEW + 1, false), (NEW, true)] {
        let (mut b, _) = waiting("file", EXTENT, 5, false);
        b.overwritten(7);
        if hangs_up {
            b.core.overwrites.hung_up();
        }
        b.overwrite(place);
        b.grant(0, place, Rights::ReadWrite, 1);
        assert_eq!(b.end().1, Status::SUCCESS);
        assert!(b.holds(place, 5), "{place}");
    }
    // The owner has gone before the overwrite ends.
    let (mut b, _) = waiting("file", EXTENT, 5, false);
    b.upcall();
    b.gate.hold();
    b.core.jobs.start(7, overwrite(0, NEW));
    b.turn();
    b.core.overwrites.hung_up();
    b.gate.release();
    b.turn_until_upcall();
    b.overwrite(NEW);
    b.grant(0, NEW, Rights::ReadWrite, 1);
    assert_eq!(b.end().1, Status::SUCCESS);
    assert!(b.holds(NEW, 5));
}

#[test]
fn an_overwrite_that_fails_ends_its_job_and_its_command() {
    let (mut b, _) = waiting("file", EXTENT, 5, false);
    b.upcall();
    b.gate.fail(0..u64::MAX, &[OpKind::Write], Errno::IO, 1);
    b.core.jobs.start(7, overwrite(0, NEW));
    assert_eq!(b.end().1, Status::WRITE_FAULT);
    assert_eq!(b.upcall(), ended(7, Some(Errno::IO)));
    assert!(!b.core.overwrites.any());
    // Nobody waits now; a device is unknown; a place is beyond the end.
    b.core.jobs.start(8, overwrite(0, NEW));
    b.turn_until_upcall();
    assert_eq!(b.upcall(), ended(8, Some(Errno::NOENT)));
    for (job, target) in [(9, 200), (10, 1 << 60)] {
        let (mut b, _) = waiting("file", EXTENT, 5, false);
        b.upcall();
        b.core.jobs.start(job, overwrite(0, target));
        b.turn_until_upcall();
        assert!(
            b.upcall()
                .contains(&format!("JobDone {{ job: {job}, error: Some"))
        );
    }
}

#[test]
fn an_export_that_ends_lets_the_overwrite_end_first() {
    let (mut b, _) = waiting("file", EXTENT, 5, false);
    b.upcall();
    b.gate.hold();
    b.core.jobs.start(7, overwrite(0, NEW));
    b.turn();
    b.core.remove_lane(LaneIndex(3));
    b.turn();
    assert!(b.core.upcalls.is_empty(), "the write may still land");
    b.gate.release();
    b.turn_until_upcall();
    assert_eq!(b.upcall(), ended(7, None));
    let (mut b, _) = waiting("file", EXTENT, 5, false);
    b.overwritten(7);
    b.core.remove_lane(LaneIndex(3));
    assert_eq!(b.end().1, Status::COMMAND_INTERRUPTED);
    assert!(!b.core.overwrites.any());
}

#[test]
fn nothing_is_overwritten_before_the_fence() {
    let mut b = unfenced("file");
    b.grant(0, OLD, Rights::Read, 4);
    let op = IoOp::Write {
        offset_bytes: 0,
        len_bytes: EXTENT as u32,
        fua: false,
    };
    b.start(op, None);
    b.upcall();
    b.core.jobs.start(7, overwrite(0, NEW));
    b.nothing_ends();
    assert!(b.core.upcalls.is_empty() && b.holds(NEW, 0));
    b.core.fenced(DeviceIndex(0));
    b.turn_until_upcall();
    assert_eq!(b.upcall(), ended(7, None));
    assert!(b.holds(NEW, 0x77));
}

#[test]
fn a_vms_memory_is_written_from_where_it_lies() {
    use super::guest::{numbers, vm, write};
    for place in [NEW, NEW + 1] {
        let mut m = vm();
        let mut b = bench();
        b.grant(0, OLD, Rights::Read, 4);
        let bytes = numbers(2 * EXTENT);
        let pieces = [
            (0, 4096),
            (8192, EXTENT as u32),
            (EXTENT * 2, EXTENT as u32 - 4096),
        ];
        m.put(&pieces, &bytes);
        b.start_of(&mut m, write(0, 2 * EXTENT as u32), &pieces);
        b.overwritten(7);
        b.grant(0, place, Rights::ReadWrite, 1);
        assert_eq!(b.upcall(), asked(1, true));
        b.grant(1, NEW + 2, Rights::ReadWrite, 1);
        assert_eq!(b.end_of_vm().1, Status::SUCCESS);
        let (first, second) = bytes.split_at(EXTENT as usize);
        assert!(content(&b.path, place, 1) == first);
        assert!(content(&b.path, NEW + 2, 1) == second);
    }
}
