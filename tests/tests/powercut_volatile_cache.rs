//! Power cuts at random moments. The pool opens, flushed data and created volumes survive, deleted
//! volumes stay deleted; other blocks are old, new, or zero if never flushed.
//!
//! The devices' volatile caches keep, drop, reorder and tear unflushed writes. `FOREBAY_TEST_SEED`
//! is the first round's seed, `FOREBAY_TEST_ROUNDS` their number. A seed replays commands and cuts,
//! not their timing.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_device::power::Cut;
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::host::{Dice, Habits, Host};
use forebay_tests::shadow::Promise;
use forebay_tests::system::kill_by_pid;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const KEPT_BYTES: u64 = 24 * MIB;
const PASSING_BYTES: u64 = 12 * MIB;

fn number(name: &str, otherwise: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text}")),
        Err(_) => Ok(otherwise),
    }
}

/// Whether a volume exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum There {
    Yes,
    /// It was being created or deleted at the cut.
    Perhaps,
}

/// The load of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    /// Everything, and volumes are created and deleted.
    Busy,
    /// Few flushes.
    Calm,
    /// Overwrites of mapped blocks: the pool commits nothing, so only the host flushes.
    Overwriting,
}

struct Volume {
    name: String,
    host: Host,
    there: There,
}

struct Lab {
    daemon: Daemon,
    address: SocketAddr,
    devices: Vec<PathBuf>,
    kept: Vec<Volume>,
    passing: Vec<Volume>,
    numbers: u64,
}

impl Lab {
    fn new(devices: usize, seed: u64) -> Result<Self> {
        let daemon = Daemon::start(&DaemonOptions {
            config: "[engine]\nreactors = 2\n".into(),
            ..DaemonOptions::default()
        })?;
        let devices: Vec<PathBuf> = (0..devices)
            .map(|i| daemon.folder().join(format!("device{i}")))
            .collect();
        let specs: Vec<String> = devices
            .iter()
            .map(|device| format!("volatile:{}?size=256M", device.display()))
            .collect();
        let mut args = Vec::new();
        for spec in &specs {
            args.extend(["--device", spec]);
        }
        daemon.create_pool(&args)?;
        daemon.cli(&["tenant", "create", "t"])?;
        let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
        let mut lab = Self {
            daemon,
            address,
            devices,
            kept: Vec::new(),
            passing: Vec::new(),
            numbers: seed << 16,
        };
        for (name, block) in [("kept512", 512), ("kept4096", 4096)] {
            let mut volume = lab.volume(name.to_owned(), KEPT_BYTES, block);
            create(&lab.daemon, &volume.name, KEPT_BYTES, block)?;
            volume.there = There::Yes;
            lab.kept.push(volume);
        }
        Ok(lab)
    }

    fn volume(&mut self, name: String, size_bytes: u64, block: u32) -> Volume {
        self.numbers += 1;
        Volume {
            host: Host::new(
                self.address,
                &format!("t/{name}"),
                size_bytes,
                block,
                self.numbers,
            ),
            name: format!("t/{name}"),
            there: There::Perhaps,
        }
    }

    fn round(&mut self, seed: u64) -> Result<Vec<Cut>> {
        let mut dice = Dice::with_seed(seed);
        let processes = self.daemon.processes()?;
        let (dying, dead) = (AtomicBool::new(false), AtomicBool::new(false));
        let delay = Duration::from_millis(100 + dice.u64(..900));
        let engine_first = dice.u64(..2) == 0;
        // Each flush and commit makes all earlier writes durable.
        let mood = [Mood::Busy, Mood::Calm, Mood::Overwriting][dice.usize(..3)];
        let mut kept = std::mem::take(&mut self.kept);
        for volume in &mut kept {
            volume.host.habits = match mood {
                Mood::Busy => Habits::default(),
                Mood::Calm => Habits {
                    flushes: dice.u64(..2),
                    fua: 0,
                    ..Habits::default()
                },
                Mood::Overwriting => Habits {
                    reads: 5,
                    holes: 0,
                    flushes: dice.u64(..3),
                    fua: dice.u64(..6),
                    ..Habits::default()
                },
            };
        }
        if mood == Mood::Overwriting {
            for volume in &mut kept {
                volume.host.fill()?;
            }
        }
        let result = std::thread::scope(|scope| -> Result<()> {
            let loads: Vec<_> = kept
                .iter_mut()
                .map(|volume| scope.spawn(|| volume.host.load(|_| !dead.load(SeqCst))))
                .collect();
            let killer = scope.spawn(|| {
                std::thread::sleep(delay);
                dying.store(true, SeqCst);
                let mut pids = [processes.daemon, processes.engine];
                if engine_first {
                    pids.reverse();
                }
                let killed = pids.map(kill_by_pid);
                dead.store(true, SeqCst);
                killed
            });
            let passed = match mood {
                Mood::Busy => self.come_and_go(&mut dice, &dying),
                Mood::Calm | Mood::Overwriting => Ok(()),
            };
            for killed in killer.join().expect("it does not panic") {
                killed?;
            }
            for load in loads {
                load.join().expect("a load does not panic")?;
            }
            passed
        });
        self.kept = kept;
        result?;
        let cuts = self.daemon.power_cut(&self.devices, seed)?;
        self.daemon.start_again().context("after the cut")?;
        self.verify()
            .with_context(|| format!("after this cut: {cuts:?}"))?;
        Ok(cuts)
    }

    fn come_and_go(&mut self, dice: &mut Dice, dying: &AtomicBool) -> Result<()> {
        while !dying.load(SeqCst) {
            let result = self.come_or_go(dice);
            // A failed command may have been executed.
            if !dying.load(SeqCst) {
                result?;
            }
        }
        Ok(())
    }

    fn come_or_go(&mut self, dice: &mut Dice) -> Result<()> {
        if self.passing.len() < 2 || (self.passing.len() < 5 && dice.u64(..2) == 0) {
            self.numbers += 1;
            let block = [512, 4096][dice.usize(..2)];
            let volume = self.volume(format!("v{}", self.numbers), PASSING_BYTES, block);
            self.passing.push(volume);
            let volume = self.passing.last_mut().context("it was just put there")?;
            create(&self.daemon, &volume.name, PASSING_BYTES, block)?;
            volume.there = There::Yes;
            let most = 20 + dice.u64(..300);
            volume.host.load(|commands| commands < most)?;
        } else {
            let at = dice.usize(..self.passing.len());
            let volume = &mut self.passing[at];
            volume.there = There::Perhaps;
            self.daemon
                .cli(&["export", "delete", &volume.name, "--disconnect-hosts"])?;
            self.daemon.cli(&["volume", "delete", &volume.name])?;
            self.passing.remove(at);
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<()> {
        let volumes = names(&self.daemon.cli(&["volume", "list"])?, "name");
        let exports = names(&self.daemon.cli(&["export", "list"])?, "volume");
        let all = self.kept.iter_mut().chain(&mut self.passing);
        let mut known = Vec::new();
        for volume in all {
            let is_there = volumes.contains(&volume.name);
            ensure!(
                is_there || volume.there == There::Perhaps,
                "{} is lost",
                volume.name
            );
            if !is_there {
                continue;
            }
            known.push(volume.name.clone());
            if !exports.contains(&volume.name) {
                ensure!(
                    volume.there == There::Perhaps,
                    "{}: its export is lost",
                    volume.name
                );
                self.daemon
                    .cli(&["export", "create", &volume.name, "--any-host"])?;
            }
            volume.there = There::Yes;
            volume.host.verify(Promise::Flushed)?;
        }
        self.passing.retain(|volume| known.contains(&volume.name));
        for name in &volumes {
            ensure!(
                known.contains(name),
                "{name} was deleted, and is there again"
            );
        }
        Ok(())
    }
}

fn create(daemon: &Daemon, volume: &str, size_bytes: u64, block: u32) -> Result<()> {
    let (size, block) = (size_bytes.to_string(), block.to_string());
    daemon.cli(&[
        "volume",
        "create",
        volume,
        "--size",
        &size,
        "--block-size",
        &block,
    ])?;
    daemon.cli(&["export", "create", volume, "--any-host"])?;
    Ok(())
}

/// `tenant/name` of each.
fn names(list: &Value, key: &str) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let items = list.as_array().into_iter().flatten();
    items
        .map(|item| format!("{}/{}", text(&item["tenant"]), text(&item[key])))
        .collect()
}

fn run(devices: usize, seed: u64) -> Result<()> {
    let first = number("FOREBAY_TEST_SEED", seed)?;
    let rounds = number("FOREBAY_TEST_ROUNDS", 10)?;
    let mut lab = Lab::new(devices, first)?;
    let mut all = Cut::default();
    for seed in first..first + rounds {
        let cuts = lab
            .round(seed)
            .with_context(|| format!("{devices} devices, FOREBAY_TEST_SEED={seed}"))?;
        for cut in cuts {
            all.durable += cut.durable;
            all.kept += cut.kept;
            all.dropped += cut.dropped;
            all.torn += cut.torn;
            all.flushes += cut.flushes;
        }
    }
    println!("{devices} devices, {rounds} cuts: {all:?}");
    // Otherwise the test proves nothing.
    ensure!(
        all.durable > 0 && all.dropped > 0 && all.flushes > 0,
        "{all:?}"
    );
    lab.daemon.stop()
}

#[test]
fn powercut_volatile_cache() -> Result<()> {
    run(1, 100)
}

#[test]
fn powercut_volatile_cache_of_two_devices() -> Result<()> {
    run(2, 200)
}
