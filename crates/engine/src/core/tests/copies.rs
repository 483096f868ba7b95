//! The internal lane's copies: bytes, bounds, errors, hung devices.

use super::hung::second;
use super::*;

const DATA_AT: u64 = 1 << 20;

fn copy(from: u8, source: u64, to: u8, target: u64, count: u64) -> Job {
    Job::Copy {
        from: DeviceIndex(from),
        source: ExtentIndex(source),
        to: DeviceIndex(to),
        target: ExtentIndex(target),
        count,
    }
}

fn zero_fill(device: u8, first: u64) -> Job {
    Job::ZeroFill {
        device: DeviceIndex(device),
        extents: ExtentRange::new(first, 1),
    }
}

impl Bench {
    /// Runs turns until `count` jobs have ended. Returns each job and its error, sorted.
    fn jobs_end(&mut self, count: usize) -> Vec<(u64, Option<Errno>)> {
        let mut ended = Vec::new();
        for _ in crate::patience::patiently() {
            self.turn();
            while let Some(upcall) = self.core.upcalls.pop_front() {
                let Upcall::JobDone { job, error } = upcall else {
                    panic!("{upcall:?}");
                };
                ended.push((job, error));
            }
            if ended.len() >= count {
                ended.sort_by_key(|(job, _)| *job);
                return ended;
            }
        }
        panic!("only {ended:?}");
    }

    fn run(&mut self, job: u64, work: Job) -> Option<Errno> {
        self.core.jobs.start(job, work);
        let ended = self.jobs_end(1);
        assert_eq!((ended.len(), ended[0].0), (1, job));
        ended[0].1
    }
}

/// Extent `at` of this device's file, filled with a pattern.
fn fill(path: &std::path::Path, first: u64, count: u64) -> Vec<u8> {
    use std::os::unix::fs::FileExt as _;
    let bytes: Vec<u8> = (0..count * EXTENT)
        .map(|i| (i / 512 * 7 + first) as u8)
        .collect();
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&bytes, DATA_AT + first * EXTENT).unwrap();
    bytes
}

pub(super) fn content(path: &std::path::Path, first: u64, count: u64) -> Vec<u8> {
    use std::os::unix::fs::FileExt as _;
    let mut bytes = vec![0; (count * EXTENT) as usize];
    let file = std::fs::File::open(path).unwrap();
    file.read_exact_at(&mut bytes, DATA_AT + first * EXTENT)
        .unwrap();
    bytes
}

#[test]
fn a_copy_has_every_byte_and_changes_no_other() {
    for kind in ["file", "ram"] {
        let mut b = bench_with(kind);
        let path = b.path.clone();
        // Several pieces, the last one short.
        let bytes = fill(&path, 3, 21);
        let around = (fill(&path, 99, 1), fill(&path, 121, 1));
        assert_eq!(b.run(1, copy(0, 3, 0, 100, 21)), None);
        assert!(content(&path, 100, 21) == bytes && content(&path, 3, 21) == bytes);
        let now = (content(&path, 99, 1), content(&path, 121, 1));
        assert!(now == around, "{kind}");
        assert!(!b.core.jobs.any());
    }
    let mut b = bench();
    second(&mut b);
    let bytes = fill(&b.path, 199, 1);
    assert_eq!(b.run(1, copy(0, 199, 1, 0, 1)), None);
    assert!(content(&b.path.with_file_name("second"), 0, 1) == bytes);
}

#[test]
fn many_copies_keep_their_bytes_apart() {
    for kind in ["file", "ram"] {
        let mut b = bench_with(kind);
        let path = b.path.clone();
        let bytes = fill(&path, 0, 90);
        for job in 0..90 {
            b.core.jobs.start(job, copy(0, job, 0, 199 - job, 1));
        }
        let ended = b.jobs_end(90);
        assert!(ended.iter().all(|(_, error)| error.is_none()), "{ended:?}");
        for extent in 0..90 {
            let at = (extent * EXTENT) as usize;
            assert!(
                content(&path, 199 - extent, 1) == bytes[at..at + EXTENT as usize],
                "{kind}: {extent}"
            );
        }
    }
}

#[test]
fn copies_that_end_at_once_share_their_turns() {
    let mut b = bench_with("ram");
    b.core.jobs.start(1, copy(0, 0, 0, 100, 100));
    b.core.jobs.start(2, copy(0, 0, 0, 100, 1));
    let mut turns = 0;
    let mut ended = Vec::new();
    while ended.len() < 2 {
        turns += 1;
        b.turn();
        while let Some(upcall) = b.core.upcalls.pop_front() {
            ended.push(format!("{upcall:?}"));
        }
        assert!(ended.len() == 2 || b.core.must_turn(), "turn {turns}");
    }
    assert!(turns > 20, "6 MiB in {turns} turns");
    assert!(ended[0].contains("job: 2"), "{ended:?}");
    assert!(!b.core.must_turn());
}

#[test]
fn a_copy_outside_a_device_or_onto_itself_is_refused() {
    let mut b = bench();
    second(&mut b);
    let refused = [
        copy(0, 0, 0, 1, 0),
        copy(0, 199, 1, 0, 2),
        copy(0, 0, 1, 199, 2),
        copy(0, u64::MAX, 1, 0, 1),
        copy(0, 0, 1, u64::MAX, u64::MAX),
        copy(0, 0, 1, 0, u64::MAX),
        copy(0, 10, 0, 12, 3),
        copy(0, 12, 0, 10, 3),
        copy(0, 10, 0, 10, 1),
    ];
    for work in refused {
        assert_eq!(b.run(1, work), Some(Errno::INVAL), "{work:?}");
    }
    for work in [copy(0, 0, 7, 0, 1), copy(7, 0, 0, 0, 1)] {
        assert_eq!(b.run(1, work), Some(Errno::NODEV), "{work:?}");
    }
    assert_eq!(b.run(1, copy(0, 10, 0, 12, 2)), None);
    assert_eq!(b.run(1, copy(0, 10, 1, 10, 100)), None);
}

#[test]
fn an_error_ends_its_copy() {
    for kind in [OpKind::Read, OpKind::Write] {
        let mut b = bench();
        b.gate.fail(0..u64::MAX, &[kind], Errno::IO, 1);
        assert_eq!(b.run(1, copy(0, 0, 0, 100, 20)), Some(Errno::IO));
        assert_eq!(b.run(2, copy(0, 0, 0, 100, 20)), None);
        let at = (b.core.region.devices()[0].last_offset_bytes).load(Relaxed);
        let expected = DATA_AT
            + if kind == OpKind::Read {
                0
            } else {
                100 * EXTENT
            };
        assert_eq!(at, expected);
    }
}

#[test]
fn copies_of_a_hung_device_hold_up_no_others() {
    // As the source, and as the target.
    for (from, to) in [(1, 0), (0, 1)] {
        let mut b = bench();
        let (_, gate) = second(&mut b);
        gate.hold();
        for job in 0..60 {
            b.core.jobs.start(job, copy(from, job, to, 100 + job, 1));
        }
        for _ in 0..50 {
            b.turn();
        }
        let held = gate.held();
        assert!((4..=16).contains(&held), "{held} operations at the device");
        for job in 100..140 {
            b.core
                .jobs
                .start(job, copy(0, job - 100, 0, 60 + job - 100, 1));
            b.core.jobs.start(job + 100, zero_fill(0, 199));
        }
        let ended = b.jobs_end(80);
        assert!(
            ended
                .iter()
                .all(|(job, error)| *job >= 100 && error.is_none())
        );
        gate.release();
        assert_eq!(b.jobs_end(60).len(), 60);
    }
}

#[test]
fn a_copy_counts_at_the_device_where_it_is() {
    let mut b = bench();
    let (_, gate) = second(&mut b);
    b.gate.hold();
    gate.hold();
    b.core.jobs.start(1, copy(0, 0, 1, 0, 1));
    b.turn();
    assert_eq!((b.gate.held(), gate.held()), (1, 0));
    b.core.settle(2, DeviceIndex(1));
    assert!(
        b.upcall().contains("Settled { job: 2 }"),
        "it reads elsewhere"
    );
    b.core.settle(3, DeviceIndex(0));
    assert_eq!(b.upcall(), "None");
    b.gate.release();
    b.turn_until_upcall();
    assert!(b.upcall().contains("Settled { job: 3 }"));
    for _ in crate::patience::patiently() {
        b.turn();
        if gate.held() == 1 {
            break;
        }
    }
    b.core.settle(4, DeviceIndex(0));
    assert!(
        b.upcall().contains("Settled { job: 4 }"),
        "it has been read"
    );
    b.core.settle(5, DeviceIndex(1));
    assert_eq!(b.upcall(), "None");
    gate.release();
    let mut heard = Vec::new();
    while heard.len() < 2 {
        b.turn_until_upcall();
        heard.push(b.upcall());
    }
    heard.sort();
    assert!(
        heard[0].contains("JobDone { job: 1, error: None }"),
        "{heard:?}"
    );
    assert!(heard[1].contains("Settled { job: 5 }"), "{heard:?}");
}
