//! A killed engine's last write lands before its lock falls.
//!
//! This program starts itself as the engine. A control group slows a block device, so that writes
//! are in flight at the kill. A plain file can't be slowed, so the test only checks, several times,
//! that nothing lands after the lock falls.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use forebay_device::conformance::Driver;
use forebay_device::fence::{Holder, lock_holders};
use forebay_device::ring::RingOptions;
use forebay_device::{Device, DeviceKind, DeviceSpec, Op, OpenOptions};

const HANG: Duration = Duration::from_secs(60);
const CHUNK_BYTES: u32 = 256 * 1024;

/// The child's arguments: `generation chunks spec`.
const ORDER: &str = "FOREBAY_TEST_FENCE_CHILD";

/// The engine: takes its byte and puts writes in flight. Does nothing without `ORDER`.
#[test]
fn child() {
    let Ok(order) = std::env::var(ORDER) else {
        return;
    };
    let mut words = order.splitn(3, ' ');
    let mut word = || words.next().expect("three words");
    let generation: u64 = word().parse().expect("generation");
    let chunks: u32 = word().parse().expect("chunks");
    let spec: DeviceSpec = word().parse().expect("spec");
    let device = Device::open(&spec, &OpenOptions::default()).expect("opens");
    device.take_fence(generation).expect("free");
    // The parent moves this process into a control group meanwhile.
    println!("HELD");
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).expect("go");
    let mut driver = Driver::with_ring(&RingOptions {
        entries: 512,
        ..RingOptions::default()
    });
    let bytes = vec![generation as u8; CHUNK_BYTES as usize];
    for chunk in 0..chunks {
        let op = Op::write(at(chunk), driver.fill(chunk % 64, &bytes));
        driver.start(&device, op, u64::from(chunk));
    }
    driver.ring.submit().expect("submit");
    println!("FLYING");
    loop {
        std::thread::sleep(HANG);
    }
}

fn at(chunk: u32) -> u64 {
    u64::from(chunk) * u64::from(CHUNK_BYTES)
}

struct Engine {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Engine {
    fn start(spec: &DeviceSpec, generation: u64, chunks: u32) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("own path"))
            .args(["--exact", "child", "--nocapture"])
            .env(ORDER, format!("{generation} {chunks} {spec}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let said = BufReader::new(child.stdout.take().expect("its output"));
        let mut engine = Self { child, said };
        engine.wait_for("HELD");
        engine
    }

    fn go(&mut self) {
        let stdin = self.child.stdin.as_mut().expect("its input");
        stdin.write_all(b"go\n").expect("said");
        self.wait_for("FLYING");
    }

    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            let n = self.said.read_line(&mut line).expect("its output");
            assert_ne!(n, 0, "the child ended before it said {word}");
        }
    }

    fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("waited for");
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The first byte of each chunk; `None` if its bytes differ.
fn poll(device: &Device, chunks: u32) -> Vec<Option<u8>> {
    let mut driver = Driver::new();
    (0..chunks)
        .map(|chunk| {
            let bytes = driver.read(device, at(chunk), CHUNK_BYTES as usize);
            bytes.iter().all(|b| *b == bytes[0]).then_some(bytes[0])
        })
        .collect()
}

fn open(spec: &DeviceSpec) -> Device {
    Device::open(spec, &OpenOptions::default()).expect("opens")
}

#[test]
fn a_successor_waits_for_io_in_flight() {
    let what = "a_successor_waits_for_io_in_flight";
    const CHUNKS: u32 = 8;
    let Some(device) = support::Loop::new(what, 8 << 20, 512) else {
        return;
    };
    let spec = DeviceSpec::new(DeviceKind::Block, device.path.clone());
    // 2 MiB in flight, at 32 KiB/s until all was checked.
    let Some(slow) = Slow::new(what, &device.path, 32 << 10) else {
        return;
    };
    let mut engine = Engine::start(&spec, 7, CHUNKS);
    slow.add(engine.child.id());
    engine.go();
    let successor = open(&spec);
    successor.take_fence(8).expect("its own byte is free");
    engine.kill();

    assert!(
        !successor.predecessors_gone(8).expect("ask"),
        "it fell at the exit"
    );
    assert_eq!(
        lock_holders(&device.path).expect("ask"),
        [7, 8].map(|generation| Holder::Engine { generation })
    );
    let at_exit = poll(&successor, CHUNKS);
    assert!(!successor.predecessors_gone(8).expect("ask"));
    slow.release();
    let waited = successor.wait_for_predecessors(8, HANG).expect("it falls");
    let at_lock = poll(&successor, CHUNKS);
    eprintln!("the lock fell {waited:?} after the exit was seen");
    assert!(
        at_exit.contains(&Some(0)),
        "nothing was in flight at the exit: {at_exit:?}"
    );
    assert!(
        at_lock.iter().all(|byte| *byte == Some(7)),
        "the lock fell before the last write: {at_lock:?}"
    );
}

#[test]
fn nothing_lands_after_the_lock() {
    const CHUNKS: u32 = 400;
    for generation in 1..=5 {
        // A new file each time: writes into holes are slowest.
        let file = support::scratch_file(u64::from(CHUNKS) * u64::from(CHUNK_BYTES));
        let spec = DeviceSpec::new(DeviceKind::File, file.path().to_owned());
        let mut engine = Engine::start(&spec, generation, CHUNKS);
        engine.go();
        let successor = open(&spec);
        engine.kill();
        successor.take_fence(generation + 1).expect("its own byte");
        let waited = successor
            .wait_for_predecessors(generation + 1, HANG)
            .expect("it falls");
        eprintln!("the lock fell {waited:?} after the exit was seen");
        let at_lock = poll(&successor, CHUNKS);
        // A late write would land now.
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(poll(&successor, CHUNKS), at_lock);
        assert!(successor.predecessors_gone(generation + 1).expect("ask"));
    }
}

#[test]
fn a_ram_device_is_free_when_its_engine_is_gone() {
    let dir = support::memory_dir();
    let spec = DeviceSpec::new(DeviceKind::Ram, dir.path().join("ram")).with_size(8 << 20);
    let options = OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    };
    drop(Device::open(&spec, &options).expect("creates"));
    let mut engine = Engine::start(&spec, 1, 16);
    engine.go();
    let successor = open(&spec);
    let again = successor.take_fence(1).expect_err("held");
    assert!(again.to_string().contains("generation 1"), "{again}");
    successor.take_fence(2).expect("its own byte");
    assert!(!successor.predecessors_gone(2).expect("ask"));
    engine.kill();
    successor.wait_for_predecessors(2, HANG).expect("it falls");
    assert!(poll(&successor, 16).iter().all(|byte| *byte == Some(1)));
}

/// A control group that limits writes to one device.
struct Slow {
    dir: PathBuf,
    /// The control file, and the text that ends the limit.
    file: &'static str,
    no_limit: String,
}

impl Slow {
    fn new(what: &str, device: &Path, bytes_per_second: u64) -> Option<Self> {
        let name = format!("forebay-test-{}", std::process::id());
        let number = std::fs::metadata(device).expect("the device is there");
        let number = std::os::unix::fs::MetadataExt::rdev(&number);
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let v1 = Path::new("/sys/fs/cgroup/blkio");
        let v2 = Path::new("/sys/fs/cgroup");
        let (dir, file, [text, no_limit]) = if v1.is_dir() {
            let texts = [bytes_per_second, 0].map(|bytes| format!("{major}:{minor} {bytes}"));
            (v1.join(name), "blkio.throttle.write_bps_device", texts)
        } else {
            let _ = std::fs::write(v2.join("cgroup.subtree_control"), "+io");
            let bytes = bytes_per_second.to_string();
            let texts =
                [bytes.as_str(), "max"].map(|bytes| format!("{major}:{minor} wbps={bytes}"));
            (v2.join(name), "io.max", texts)
        };
        let made = std::fs::create_dir(&dir).and_then(|()| std::fs::write(dir.join(file), text));
        let slow = Self {
            dir,
            file,
            no_limit,
        };
        match made {
            Ok(()) => Some(slow),
            Err(error) => {
                support::skip(
                    what,
                    &format!("no control group makes the device slow: {error}"),
                );
                None
            }
        }
    }

    /// Ends the limit, also for waiting writes.
    fn release(&self) {
        std::fs::write(self.dir.join(self.file), &self.no_limit).expect("no limit");
    }

    fn add(&self, pid: u32) {
        std::fs::write(self.dir.join("cgroup.procs"), pid.to_string()).expect("joins the group");
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}
