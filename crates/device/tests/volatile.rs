//! What a power cut of a volatile device leaves.
//!
//! A model keeps, for each sector, every content that a cut may leave: the durable one and all
//! later writes. Operations end in random order, so that flushes meet operations in flight. A child
//! process killed during writes shows that journal and visible file stay consistent.

mod support;

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_device::conformance::{Driver, Rng};
use forebay_device::power::{self, Cut};
use forebay_device::sync_io::SyncDevice;
use forebay_device::volatile::{fail_path, hang_path};
use forebay_device::{Device, DeviceKind, DeviceSpec, Errno, Op, OpenOptions};

const SECTOR: usize = 512;
const SECTORS: u64 = 256;
const SIZE: u64 = 8 << 20;

struct Lab {
    _dir: tempfile::TempDir,
    spec: DeviceSpec,
}

impl Lab {
    fn new() -> Self {
        let dir = support::memory_dir();
        let spec = DeviceSpec::new(DeviceKind::Volatile, dir.path().join("v")).with_size(SIZE);
        drop(Device::open(&spec, &options()).expect("creates"));
        Self { _dir: dir, spec }
    }

    fn open(&self) -> Device {
        Device::open(&self.spec, &OpenOptions::default()).expect("opens")
    }

    fn open_sync(&self) -> SyncDevice {
        SyncDevice::open(&self.spec, &OpenOptions::default()).expect("opens")
    }

    fn cut(&self, seed: u64) -> Cut {
        power::cut(self.spec.path(), seed).expect("cut")
    }
}

fn options() -> OpenOptions {
    OpenOptions {
        create_missing: true,
        ..OpenOptions::default()
    }
}

/// Each sector repeats the number of its write; 0 is a zeroing.
fn bytes(number: u32, sectors: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().repeat(SECTOR / 4 * sectors as usize);
    if number == 0 {
        bytes.fill(0);
    }
    bytes
}

fn number(sector: &[u8]) -> u32 {
    let first = u32::from_le_bytes(sector[..4].try_into().expect("four bytes"));
    assert_eq!(sector, bytes(first, 1), "a sector is torn inside");
    first
}

/// Per sector, the writes that it may hold, oldest first; the first is durable. Zeroings count as
/// writes.
struct Sectors {
    histories: Vec<Vec<u32>>,
    zeroings: HashSet<u32>,
}

#[derive(Clone, Copy)]
struct Running {
    from: u64,
    sectors: u64,
    number: u32,
    durable: bool,
    is_flush: bool,
}

impl Sectors {
    fn new() -> Self {
        Self {
            histories: vec![vec![0]; SECTORS as usize],
            zeroings: HashSet::from([0]),
        }
    }

    fn content(&self, number: u32) -> u32 {
        if self.zeroings.contains(&number) {
            0
        } else {
            number
        }
    }

    /// Drops the sector's history before this write.
    fn durable(&mut self, sector: usize, number: u32) {
        let history = &mut self.histories[sector];
        if let Some(at) = history.iter().position(|n| *n == number) {
            history.drain(..at);
        }
    }
}

/// Random operations, some of which are still in flight at the end.
fn live(device: &Device, rng: &mut Rng, model: &mut Sectors, next: &mut u32) {
    let mut driver = Driver::new();
    let mut running: HashMap<u64, Running> = HashMap::new();
    // Per flush in flight and sector, the newest content that it makes durable.
    let mut covers: HashMap<u64, Vec<u32>> = HashMap::new();
    let mut ended: Vec<u32> = model.histories.iter().map(|history| history[0]).collect();
    for tag in 0..rng.u64(..120) {
        let from = rng.u64(..SECTORS);
        let sectors = 1 + rng.u64(..(SECTORS - from).min(24));
        let busy = running
            .values()
            .any(|r| !r.is_flush && r.from < from + sectors && from < r.from + r.sectors);
        let kind = rng.u64(..10);
        if kind < 8 && !busy {
            *next += 1;
            if kind < 2 {
                model.zeroings.insert(*next);
            }
            let content = *next;
            let op = match kind {
                0 => Op::punch(from * 512, sectors * 512),
                1 => Op::write_zeroes(from * 512, sectors * 512),
                2 => Op::write(
                    from * 512,
                    driver.fill((tag % 64) as u32, &bytes(content, sectors)),
                )
                .with_dsync(),
                _ => Op::write(
                    from * 512,
                    driver.fill((tag % 64) as u32, &bytes(content, sectors)),
                ),
            };
            for history in &mut model.histories[from as usize..(from + sectors) as usize] {
                history.push(content);
            }
            let run = Running {
                from,
                sectors,
                number: content,
                durable: kind == 2,
                is_flush: false,
            };
            assert_eq!(driver.start(device, op, tag), None);
            running.insert(tag, run);
        } else if kind == 8 {
            let flush = Running {
                from: 0,
                sectors: 0,
                number: 0,
                durable: false,
                is_flush: true,
            };
            assert_eq!(driver.start(device, Op::flush(), tag), None);
            covers.insert(tag, ended.clone());
            running.insert(tag, flush);
        }
        while running.len() > 8 || (!running.is_empty() && rng.u64(..4) == 0) {
            let (tag, result) = driver.next(device);
            assert_eq!(result, Ok(()));
            let run = running.remove(&tag).expect("running");
            if run.is_flush {
                let cover = covers.remove(&tag).expect("covers something");
                for (sector, content) in cover.into_iter().enumerate() {
                    model.durable(sector, content);
                }
                continue;
            }
            ended[run.from as usize..(run.from + run.sectors) as usize].fill(run.number);
            if run.durable {
                for sector in run.from..run.from + run.sectors {
                    model.durable(sector as usize, run.number);
                }
            }
        }
    }
}

#[test]
fn a_power_cut_keeps_durable_data_and_invents_none() {
    let mut seen = Cut::default();
    let mut reordered = 0;
    for seed in 1..=60 {
        let lab = Lab::new();
        let mut rng = Rng::with_seed(seed);
        let mut model = Sectors::new();
        let mut next = 0;
        for life in 0..4 {
            live(&lab.open(), &mut rng, &mut model, &mut next);
            let cut = lab.cut(seed * 10 + life);
            seen.durable += cut.durable;
            seen.kept += cut.kept;
            seen.dropped += cut.dropped;
            seen.torn += cut.torn;
            seen.flushes += cut.flushes;
            let mut driver = Driver::new();
            let found = driver.read(&lab.open(), 0, SECTORS as usize * SECTOR);
            for (sector, found) in found.chunks(SECTOR).enumerate() {
                let found = number(found);
                let history = &model.histories[sector];
                let at = history.iter().rposition(|n| model.content(*n) == found);
                let at = at.unwrap_or_else(|| {
                    panic!("seed {seed}: sector {sector} holds {found}, not one of {history:?}")
                });
                reordered += u32::from(at > 0 && at + 1 < history.len());
                model.histories[sector] = vec![history[at]];
            }
        }
    }
    eprintln!("{seen:?}, {reordered} sectors neither first nor last");
    for count in [
        seen.durable,
        seen.kept,
        seen.dropped,
        seen.torn,
        seen.flushes,
    ] {
        assert!(count > 100, "{seen:?}");
    }
    assert!(reordered > 100, "{reordered}");
}

#[test]
fn the_same_seed_leaves_the_same() {
    let run = |seed| {
        let lab = Lab::new();
        let mut model = Sectors::new();
        let device = lab.open();
        let mut driver = Driver::new();
        for i in 0..40 {
            driver.write(&device, i * 2048, &bytes(i as u32 + 1, 8));
        }
        live(&device, &mut Rng::with_seed(3), &mut model, &mut 0);
        drop(driver);
        drop(device);
        let cut = lab.cut(seed);
        (cut, std::fs::read(lab.spec.path()).expect("reads"))
    };
    assert!(run(5) == run(5));
    assert!((6..20).any(|seed| run(seed).1 != run(5).1));
}

#[test]
fn the_daemons_writes_take_part() {
    let lab = Lab::new();
    let (daemon, device) = (lab.open_sync(), lab.open());
    let mut driver = Driver::new();
    daemon.write_at(1000, &[1; 3000]).expect("write");
    daemon.sync().expect("sync");
    daemon.write_at(1000, &[2; 3000]).expect("write");
    assert_eq!(driver.read(&device, 1024, 512), [2; 512]);
    driver.write(&device, 1 << 20, &[3; 4096]);
    let mut found = [0; 4096];
    daemon.read_at(1 << 20, &mut found).expect("read");
    assert_eq!(found, [3; 4096]);
    driver.run(&device, Op::flush()).expect("flush");
    daemon.write_at(1000, &[4; 3000]).expect("write");
    drop((daemon, device));
    // This seed drops everything.
    let seed = (0..)
        .find(|seed| lab_drops_all(*seed))
        .expect("there is one");
    lab.cut(seed);
    let daemon = lab.open_sync();
    let mut found = [0; 3000];
    daemon.read_at(1000, &mut found).expect("read");
    assert_eq!(found, [2; 3000]);
}

fn lab_drops_all(seed: u64) -> bool {
    let lab = Lab::new();
    let device = lab.open();
    let mut driver = Driver::new();
    for i in 0..20 {
        driver.write(&device, i * 4096, &[1; 4096]);
    }
    drop(device);
    lab.cut(seed).dropped == 20
}

#[test]
fn a_device_hangs_and_fails_by_order() {
    let lab = Lab::new();
    let device = lab.open();
    let mut driver = Driver::new();
    driver.write(&device, 0, &[1; 4096]);
    std::fs::write(hang_path(lab.spec.path()), "").expect("ordered");
    let buf = driver.fill(1, &[2; 4096]);
    assert_eq!(driver.start(&device, Op::write(0, buf), 1), None);
    let little = Some(Duration::from_millis(30));
    let wake = driver.ring.wait(1, little).expect("wait");
    assert_ne!(wake, forebay_device::ring::Wake::Completions);
    // The write has not begun.
    let poll = || std::fs::read(lab.spec.path()).expect("reads")[..4096].to_vec();
    assert_eq!(poll(), [1; 4096]);
    let waiting = {
        let daemon = lab.open_sync();
        std::thread::spawn(move || daemon.write_at(8192, &[5; 512]))
    };
    std::fs::remove_file(hang_path(lab.spec.path())).expect("ordered");
    assert_eq!(driver.next(&device), (1, Ok(())));
    assert_eq!(poll(), [2; 4096]);
    waiting.join().expect("joins").expect("writes");
    std::fs::write(fail_path(lab.spec.path()), "").expect("ordered");
    for op in [
        Op::read(0, buf),
        Op::write(0, buf),
        Op::flush(),
        Op::punch(0, 4096),
    ] {
        assert_eq!(driver.run(&device, op), Err(Errno::IO));
    }
    assert!(lab.open_sync().sync().is_err());
    std::fs::remove_file(fail_path(lab.spec.path())).expect("ordered");
    assert_eq!(driver.read(&device, 0, 4096), [2; 4096]);
}

/// The device spec for the child.
const ORDER: &str = "FOREBAY_TEST_VOLATILE_CHILD";

/// Writes until it is killed. Does nothing without `ORDER`.
#[test]
fn child() {
    let Ok(spec) = std::env::var(ORDER) else {
        return;
    };
    let spec: DeviceSpec = spec.parse().expect("spec");
    let device = Device::open(&spec, &OpenOptions::default()).expect("opens");
    device.take_fence(1).expect("free");
    // One write ends before the parent is told, however early the kill.
    let (mut driver, mut rng) = (Driver::new(), Rng::with_seed(std::process::id().into()));
    driver.write(&device, 0, &bytes(0, 1));
    println!("WRITES");
    for number in 1.. {
        // Large, so that the kill comes in the middle of one.
        let (from, sectors) = (rng.u64(..SECTORS), 480);
        driver.write(&device, from * 512, &bytes(number, sectors));
    }
}

#[test]
fn a_kill_at_any_instruction_leaves_journal_and_file_agreed() {
    let mut half = 0;
    for seed in 0..12 {
        let lab = Lab::new();
        let mut child = Command::new(std::env::current_exe().expect("own path"))
            .args(["--exact", "child", "--nocapture"])
            .env(ORDER, lab.spec.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut said = BufReader::new(child.stdout.take().expect("its output"));
        let mut line = String::new();
        while !line.contains("WRITES") {
            line.clear();
            assert_ne!(said.read_line(&mut line).expect("output"), 0);
        }
        std::thread::sleep(Duration::from_micros(1500 + 777 * seed));
        child.kill().expect("killed");
        child.wait().expect("waited for");
        let journal = || {
            let mut path = lab.spec.path().as_os_str().to_owned();
            path.push(".journal");
            std::fs::read(path).expect("reads")
        };
        let before = journal();
        let shown = u64::from_le_bytes(before[..8].try_into().expect("eight bytes"));
        half += u32::from(before.len() as u64 != shown.max(4096));
        // The next open completes the journal, and shows the result of a cut that keeps everything.
        drop(lab.open());
        let text = std::fs::read(lab.spec.path()).expect("reads");
        let keeps = (0..).find(|seed| keeps_all(*seed)).expect("there is one");
        let cut = lab.cut(keeps);
        assert_eq!((cut.dropped, cut.torn), (0, 0));
        assert!(cut.kept > 0);
        let kept = std::fs::read(lab.spec.path()).expect("reads");
        assert!(
            kept == text,
            "the visible file was not what the journal says"
        );
    }
    eprintln!("{half} of 12 deaths were in the middle of a write");
}

fn keeps_all(seed: u64) -> bool {
    let lab = Lab::new();
    let device = lab.open();
    let mut driver = Driver::new();
    for i in 0..20 {
        driver.write(&device, i * 4096, &[1; 4096]);
    }
    drop(device);
    lab.cut(seed).kept == 20
}
