//! The faults of a faulty device. Children test aborts and missing permission.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use forebay_device::conformance::Driver;
use forebay_device::faulty::{self, Faults};
use forebay_device::sync_io::SyncDevice;
use forebay_device::{Device, DeviceKind, DeviceSpec, Errno, Op, OpenOptions};

const SIZE: u64 = 8 << 20;
const MILLION: u64 = 1_000_000;
const CHILD: &str = "FOREBAY_TEST_FAULTY";

struct Lab {
    file: tempfile::NamedTempFile,
    spec: DeviceSpec,
}

impl Lab {
    fn new(seed: u64) -> Self {
        faulty::allow();
        let file = support::scratch_file(SIZE);
        let spec = DeviceSpec::new(DeviceKind::Faulty, file.path().to_owned())
            .with_size(SIZE)
            .with_options(format!("seed={seed}"));
        Self { file, spec }
    }

    fn open(&self) -> Device {
        Device::open(&self.spec, &OpenOptions::default()).expect("opens")
    }

    fn set(&self, faults: Faults) {
        faulty::set(self.file.path(), &faults).expect("set");
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(faulty::faults_path(self.file.path()));
    }
}

/// Per write of 8 KiB: `None` if it succeeded, else whether its halves are new.
fn writes(lab: &Lab, generation: u64) -> Vec<Option<(bool, bool)>> {
    let device = lab.open();
    device.take_fence(generation).expect("the fence");
    let mut driver = Driver::new();
    let results = (0..200_u64).map(|i| {
        let buf = driver.fill(1, &[i as u8 + 1; 8192]);
        let result = driver.run(&device, Op::write(i * 8192, buf));
        let now = driver.read_until_well(&device, i * 8192, 8192);
        let new = |part: &[u8]| part.iter().all(|byte| *byte == i as u8 + 1);
        match result {
            Ok(()) => {
                assert!(new(&now), "a write that ended well is there");
                None
            }
            Err(errno) => {
                assert_eq!(errno, Errno::IO);
                Some((new(&now[..4096]), new(&now[4096..])))
            }
        }
    });
    results.collect()
}

trait Stubborn {
    fn read_until_well(&mut self, device: &Device, offset_bytes: u64, len: usize) -> Vec<u8>;
}

impl Stubborn for Driver {
    fn read_until_well(&mut self, device: &Device, offset_bytes: u64, len: usize) -> Vec<u8> {
        let buf = self.buf(0, len as u32);
        while self.run(device, Op::read(offset_bytes, buf)).is_err() {}
        self.bytes(0, len)
    }
}

#[test]
fn errors_and_torn_writes_come_by_the_seed() {
    let run = |seed, generation| {
        let lab = Lab::new(seed);
        lab.set(Faults {
            error_ppm: MILLION / 10,
            torn_ppm: MILLION / 10,
            ..Faults::default()
        });
        writes(&lab, generation)
    };
    let first = run(1, 1);
    assert_eq!(first, run(1, 1), "the same seed, the same faults");
    assert_ne!(first, run(2, 1));
    assert_ne!(first, run(1, 2), "the next engine has other luck");
    let failed: Vec<_> = first.into_iter().flatten().collect();
    let count = |what| failed.iter().filter(|left| **left == what).count();
    assert!(count((false, false)) > 5, "{failed:?}");
    assert!(
        count((true, false)) > 1 && count((false, true)) > 1,
        "{failed:?}"
    );
    assert_eq!(count((true, true)), 0, "a write that failed is never whole");
}

#[test]
fn a_torn_write_of_pieces_leaves_some_of_them() {
    let lab = Lab::new(3);
    let device = lab.open();
    let mut driver = Driver::new();
    let mut left = [0; 4];
    for i in 0..100_u8 {
        lab.set(Faults::default());
        driver.write(&device, 0, &[0; 16384]);
        lab.set(Faults {
            torn_ppm: MILLION,
            ..Faults::default()
        });
        // The order in memory differs from that on the device.
        let pieces = [12288, 0, 8192, 4096].map(|from| (from, 4096));
        driver.fill(1, &[i + 1; 16384]);
        let bufs = driver.pieces(1, &pieces);
        let result = driver.run(&device, Op::write_pieces(0, bufs));
        assert_eq!(result, Err(Errno::IO));
        lab.set(Faults::default());
        let now = driver.read(&device, 0, 16384);
        let new = now
            .chunks(4096)
            .map(|chunk| chunk.iter().all(|byte| *byte == i + 1));
        let new = new.filter(|new| *new).count();
        assert!(new < 4, "a write that failed is never whole");
        left[new] += 1;
    }
    assert!(left[1..].iter().all(|count| *count > 5), "{left:?}");
}

#[test]
fn nothing_begins_while_it_hangs() {
    let lab = Lab::new(1);
    let device = lab.open();
    let daemon = SyncDevice::open(&lab.spec, &OpenOptions::default()).expect("opens");
    let mut driver = Driver::new();
    driver.write(&device, 0, &[1; 4096]);
    lab.set(Faults {
        hang: true,
        ..Faults::default()
    });
    let buf = driver.fill(1, &[2; 4096]);
    assert_eq!(driver.start(&device, Op::write(0, buf), 7), None);
    driver.ring.submit().expect("submit");
    let mut now = [0];
    std::fs::File::open(lab.file.path())
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut now))
        .expect("reads");
    assert_eq!(now, [1]);
    assert!(!driver.ring.has_completions());
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut now = [0];
            daemon.read_at(0, &mut now).map(|()| now)
        });
        lab.set(Faults::default());
        reader.join().expect("ends").expect("reads");
    });
    assert_eq!(driver.next(&device), (7, Ok(())));
    assert_eq!(driver.read(&device, 0, 4096), [2; 4096]);
}

#[test]
fn delays_let_later_operations_pass() {
    let lab = Lab::new(1);
    let device = lab.open();
    let mut driver = Driver::new();
    lab.set(Faults {
        delay_ppm: MILLION,
        delay_ms: 300,
        ..Faults::default()
    });
    for mark in 0..8 {
        let buf = driver.fill(mark as u32, &[mark as u8 + 1; 4096]);
        assert_eq!(
            driver.start(&device, Op::write(mark * 4096, buf), mark),
            None
        );
    }
    let ends: Vec<_> = (0..8).map(|_| driver.next(&device)).collect();
    assert!(ends.iter().all(|(_, result)| result.is_ok()), "{ends:?}");
    assert!(!ends.iter().map(|(mark, _)| mark).is_sorted(), "{ends:?}");
}

#[test]
fn the_daemon_has_errors_of_its_own() {
    let lab = Lab::new(1);
    let device = lab.open();
    let daemon = SyncDevice::open(&lab.spec, &OpenOptions::default()).expect("opens");
    lab.set(Faults {
        daemon_error_ppm: MILLION,
        ..Faults::default()
    });
    Driver::new().write(&device, 0, &[1; 4096]);
    daemon.read_at(0, &mut [0]).expect_err("fails");
    daemon.write_at(0, &[0]).expect_err("fails");
    daemon.sync().expect_err("fails");
    lab.set(Faults {
        error_ppm: MILLION,
        ..Faults::default()
    });
    daemon.read_at(0, &mut [0]).expect("reads");
}

#[test]
fn a_misspelt_switch_fails_everything() {
    let lab = Lab::new(1);
    std::fs::write(faulty::faults_path(lab.file.path()), "eror_ppm=1\n").expect("writes");
    let device = lab.open();
    let mut driver = Driver::new();
    let buf = driver.buf(0, 4096);
    assert_eq!(driver.run(&device, Op::read(0, buf)), Err(Errno::INVAL));
}

#[test]
fn a_poisoned_block_aborts_and_leave_is_needed() {
    let lab = Lab::new(1);
    lab.set(Faults {
        poison: Some(8192),
        ..Faults::default()
    });
    let child = |what: &str| {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, format!("{what} {}", lab.spec));
        command.output().expect("runs")
    };
    let abort = Some(libc_sigabrt());
    assert_eq!(child("write").status.signal(), abort);
    assert_eq!(child("read").status.signal(), abort);
    assert!(child("other").status.success());
    let refused = child("open");
    assert!(refused.status.success(), "{refused:?}");
}

fn libc_sigabrt() -> i32 {
    rustix::process::Signal::ABORT.as_raw()
}

/// The children of the test above; otherwise does nothing.
#[test]
fn child() {
    let Ok(reported) = std::env::var(CHILD) else {
        return;
    };
    let (what, spec) = reported.split_once(' ').expect("two words");
    let spec: DeviceSpec = spec.parse().expect("a spec");
    let error = Device::open(&spec, &OpenOptions::default()).expect_err("not allowed yet");
    assert!(error.to_string().contains("allow_faulty"), "{error}");
    if what == "open" {
        return;
    }
    faulty::allow();
    let device = Device::open(&spec, &OpenOptions::default()).expect("opens");
    let mut driver = Driver::new();
    let buf = driver.fill(0, &[1; 4096]);
    let result = match what {
        "write" => driver.run(&device, Op::write(8192, buf)),
        "read" => driver.run(&device, Op::read(8192, buf)),
        _ => driver.run(&device, Op::write(4096, buf)),
    };
    result.expect("the block beside it is sound");
}
