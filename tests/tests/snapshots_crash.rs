//! Daemon, engine or both die, or power fails, while extents are copied on write and snapshots and
//! clones come and go. Volumes keep their promise to hosts; snapshots stay the same to the byte.
//!
//! `FOREBAY_TEST_SEED` is the first round's seed, `FOREBAY_TEST_ROUNDS` their number. A seed
//! replays commands and cuts, not their timing.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use forebay_initiator::verify::pattern::{self, Content, SECTOR_BYTES};
use forebay_initiator::{IoOp, IoQueue, Session, dsm_ranges};
use forebay_tests::daemon::program;
use forebay_tests::host::{Dice, Habits, Host, Load};
use forebay_tests::lab::{BLOCK, Lab, LabOptions, MIB, MINUTE, count_from};
use forebay_tests::shadow::Promise;
use forebay_tests::system::kill_by_pid;
use forebay_tests::wait;
use serde_json::Value;
use xtask::process;

const SIZE: u64 = 4 * MIB;
/// Of each host, so that commands of the API have time, too.
const COMMANDS_PER_SECOND: u32 = 1500;
/// Far from the numbers of other volumes' writes.
const CLONE_NUMBERS: u32 = 1 << 24;
/// Snapshots and unused clones.
const KNOWN_MAX: usize = 7;

/// What ends a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    Daemon,
    Engine,
    Both,
    Power,
}

/// What a snapshot or an unused clone must be.
#[derive(Debug, Default)]
struct Known {
    /// Whether it surely exists.
    is_there: bool,
    /// Its content, once read.
    content: Option<Vec<u8>>,
}

/// A volume `t/a` and its clone `t/c`, with snapshots of both.
struct World {
    lab: Lab,
    devices: Vec<PathBuf>,
    snapshots: Snapshots,
}

/// Snapshots and unused clones. Its commands go on while the daemon dies and returns.
struct Snapshots {
    socket: PathBuf,
    address: SocketAddr,
    known: BTreeMap<String, Known>,
    taken: u64,
}

impl World {
    fn new(devices: &[String]) -> Result<Self> {
        let options = LabOptions {
            devices: devices.to_vec(),
            ..LabOptions::volumes(1, SIZE)
        };
        let mut lab = Lab::new(&options)?;
        lab.hosts[0].load(|commands| commands < 500)?;
        let mut snapshots = Snapshots {
            socket: lab.daemon.socket(),
            address: lab.address,
            known: BTreeMap::new(),
            taken: 0,
        };
        snapshots.take(&["t/a@first".into()])?;
        snapshots.cli(&["volume", "clone", "t/a@first", "t/c"])?;
        snapshots.cli(&["export", "create", "t/c", "--any-host"])?;
        let mut clone = Host::new(lab.address, "t/c", SIZE, BLOCK, 3);
        clone.shadow = lab.hosts[0].shadow.clone();
        clone.shadow.skip_numbers(CLONE_NUMBERS);
        lab.hosts.push(clone);
        let folder = lab.daemon.folder();
        let devices = (0..devices.len()).map(|i| folder.join(format!("device{i}")));
        Ok(Self {
            devices: devices.collect(),
            lab,
            snapshots,
        })
    }

    /// Loads both volumes until a death.
    fn round(&mut self, death: Death, seed: u64) -> Result<()> {
        let mut dice = Dice::with_seed(seed);
        let before = self.lab.daemon.processes()?;
        let mut pids = match death {
            Death::Daemon => vec![before.daemon],
            Death::Engine => vec![before.engine],
            Death::Both | Death::Power => vec![before.daemon, before.engine],
        };
        dice.shuffle(&mut pids);
        let delay = Duration::from_millis(30 + dice.u64(..900));
        let (dying, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let mut hosts = std::mem::take(&mut self.lab.hosts);
        for host in &mut hosts {
            host.habits = Habits {
                reads: 5,
                holes: [0, 10, 30][dice.usize(..3)],
                flushes: [0, 0, 1, 3][dice.usize(..4)],
                fua: [0, 0, 1, 3][dice.usize(..4)],
                depth: 16,
                per_second: Some(COMMANDS_PER_SECOND),
                ..Habits::default()
            };
        }
        let loads = std::thread::scope(|scope| -> Result<Vec<Load>> {
            let threads: Vec<_> = hosts
                .iter_mut()
                .map(|host| scope.spawn(|| host.load(|_| !over.load(SeqCst))))
                .collect();
            let daemon = &mut self.lab.daemon;
            let killer = scope.spawn(|| {
                std::thread::sleep(delay);
                dying.store(true, SeqCst);
                pids.into_iter().try_for_each(kill_by_pid)?;
                match death {
                    Death::Daemon => {
                        daemon.wait_daemon_death()?;
                        daemon.start_again()
                    }
                    Death::Engine => {
                        let next = daemon.wait_engine_after(before.generation, MINUTE);
                        next.map(drop)
                    }
                    Death::Both | Death::Power => Ok(()),
                }
            });
            let came = self.snapshots.come_and_go(&mut dice, &dying);
            let killed = killer.join().expect("it does not panic");
            over.store(true, SeqCst);
            let loads = threads
                .into_iter()
                .map(|load| load.join().expect("a load does not panic"))
                .collect::<Result<Vec<Load>>>();
            came?;
            killed?;
            loads
        });
        self.lab.hosts = hosts;
        let loads = loads?;
        let promise = match death {
            Death::Power => {
                let cuts = self.lab.daemon.power_cut(&self.devices, seed)?;
                println!("{cuts:?}");
                Promise::Flushed
            }
            Death::Both => {
                self.lab.daemon.kill_all()?;
                Promise::Acknowledged
            }
            Death::Daemon | Death::Engine => {
                ensure!(!loads.iter().any(|load| load.lost), "{loads:?}");
                Promise::Acknowledged
            }
        };
        if matches!(death, Death::Power | Death::Both) {
            self.lab.daemon.start_again()?;
        }
        self.verify(promise).with_context(|| format!("{loads:?}"))
    }

    /// Judges all volumes and snapshots.
    fn verify(&mut self, promise: Promise) -> Result<()> {
        self.snapshots.verify()?;
        for host in &mut self.lab.hosts {
            host.verify(promise)?;
        }
        self.lab.daemon.pool_check()
    }

    /// Deletes everything; all space returns.
    fn finish(mut self) -> Result<()> {
        let mut names: Vec<String> = self.snapshots.known.keys().cloned().collect();
        names.extend(["t/a".into(), "t/c".into()]);
        for name in &names {
            self.snapshots.delete(name)?;
        }
        wait::until("free space", MINUTE, || {
            let pool = self.lab.daemon.cli(&["pool", "show"])?;
            let is_free = pool["used_bytes"] == 0 && pool["clean_bytes"] == pool["capacity_bytes"];
            Ok(is_free.then_some(()))
        })?;
        self.lab.daemon.pool_check()?;
        self.lab.daemon.stop()
    }
}

impl Snapshots {
    fn cli(&self, args: &[&str]) -> Result<Value> {
        let mut command = Command::new(program());
        command.arg("--json").arg("--socket").arg(&self.socket);
        let said = process::output(command.args(args), MINUTE)?;
        Ok(serde_json::from_slice(&said)?)
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
        let names: Vec<String> = self.known.keys().cloned().collect();
        match (dice.u64(..6), dice.choice(&names)) {
            (3, Some(name)) => self.read(name),
            (4, Some(name)) if name.contains('@') && names.len() < KNOWN_MAX => self.clone(name),
            (0 | 1, Some(name)) if names.len() >= KNOWN_MAX => self.delete(name),
            (2 | 4, Some(name)) => self.delete(name),
            _ => {
                self.taken += 1;
                let names = ["a", "c"].map(|volume| format!("t/{volume}@s{}", self.taken));
                // Of one volume, or of both.
                match dice.usize(..3) {
                    2 => self.take(&names),
                    one => self.take(&names[one..=one]),
                }
            }
        }
    }

    fn take(&mut self, names: &[String]) -> Result<()> {
        let mut command = vec!["volume", "snapshot"];
        command.extend(names.iter().map(String::as_str));
        for name in names {
            self.known.insert(name.clone(), Known::default());
        }
        self.cli(&command)?;
        for name in names {
            self.of(name)?.is_there = true;
        }
        names.iter().try_for_each(|name| self.read(name))
    }

    fn clone(&mut self, snapshot: &str) -> Result<()> {
        self.taken += 1;
        let name = format!("t/clone{}", self.taken);
        let content = self.of(snapshot)?.content.clone();
        let is_there = false;
        let known = Known { is_there, content };
        self.known.insert(name.clone(), known);
        self.cli(&["volume", "clone", snapshot, &name])?;
        self.of(&name)?.is_there = true;
        self.read(&name)
    }

    fn delete(&mut self, name: &str) -> Result<()> {
        self.cli(&["export", "delete", name, "--disconnect-hosts"])?;
        if let Some(known) = self.known.get_mut(name) {
            known.is_there = false;
        }
        self.cli(&["volume", "delete", name])?;
        self.known.remove(name);
        Ok(())
    }

    fn of(&mut self, name: &str) -> Result<&mut Known> {
        self.known.get_mut(name).context("an unknown snapshot")
    }

    /// Reads a snapshot or clone, which must be as before.
    fn read(&mut self, name: &str) -> Result<()> {
        let shown = self.cli(&["volume", "show", name])?;
        if shown["exported"] == false {
            self.cli(&["export", "create", name, "--any-host"])?;
        }
        let host = Host::new(self.address, name, SIZE, BLOCK, 0);
        let found = read_all(host.connect()?).with_context(|| format!("reading {name}"))?;
        let known = self.of(name)?;
        if let Some(content) = &known.content {
            return ensure_same(name, &found, content);
        }
        ensure_whole(name, &found)?;
        known.content = Some(found);
        Ok(())
    }

    /// Judges all snapshots and unused clones after a death.
    fn verify(&mut self) -> Result<()> {
        let listed = self.cli(&["volume", "list"])?;
        let listed = listed.as_array().context("a list")?.iter();
        let listed: Vec<String> = listed
            .map(|volume| format!("t/{}", volume["name"].as_str().unwrap_or("")))
            .filter(|name| name != "t/a" && name != "t/c")
            .collect();
        for name in &listed {
            let is_known = self.known.contains_key(name);
            ensure!(is_known, "{name} was deleted, and is there again");
        }
        for (name, known) in &self.known {
            let is_there = listed.contains(name);
            ensure!(is_there || !known.is_there, "{name} is lost: {listed:?}");
            let is_new = |known: &Known| !known.is_there && known.content.is_none();
            let other = name.replace("t/a@", "t/c@");
            if is_new(known) && self.known.get(&other).is_some_and(is_new) {
                let both = listed.contains(&other) == is_there;
                ensure!(both, "{name} and {other}: only one is in {listed:?}");
            }
        }
        self.known.retain(|name, _| listed.contains(name));
        for name in &listed {
            self.read(name)?;
            self.of(name)?.is_there = true;
        }
        Ok(())
    }
}

fn read_all((_session, mut queue): (Session, IoQueue)) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    for lba in (0..SIZE / u64::from(BLOCK)).step_by(32) {
        let buffer = vec![0; 32 * BLOCK as usize];
        all.append(&mut queue.execute(&IoOp::Read { lba, blocks: 32 }, buffer, MINUTE)?);
    }
    Ok(all)
}

fn ensure_same(name: &str, found: &[u8], wanted: &[u8]) -> Result<()> {
    let pairs = found.chunks(SECTOR_BYTES).zip(wanted.chunks(SECTOR_BYTES));
    for (sector, (found, wanted)) in pairs.enumerate() {
        if found != wanted {
            let (found, wanted) = (pattern::read(found), pattern::read(wanted));
            bail!("{name}, sector {sector}: {found} instead of {wanted}");
        }
    }
    Ok(())
}

/// Fails if a sector is torn or from another place.
fn ensure_whole(name: &str, found: &[u8]) -> Result<()> {
    for (at, bytes) in found.chunks(SECTOR_BYTES).enumerate() {
        match pattern::read(bytes) {
            Content::Zeros => {}
            Content::Written { sector, .. } if sector == at as u64 => {}
            other => bail!("{name}, sector {at}: {other}"),
        }
    }
    Ok(())
}

/// The third has no copy of the catalog, so commits alone don't flush it.
fn volatile_devices() -> [String; 3] {
    [0, 1, 2].map(|i| format!("volatile:FOLDER/device{i}?size=128M"))
}

fn run(devices: &[String], deaths: &[Death], seed: u64, rounds: u64) -> Result<()> {
    let first = count_from("FOREBAY_TEST_SEED", seed);
    let rounds = count_from("FOREBAY_TEST_ROUNDS", rounds);
    let mut world = World::new(devices)?;
    for (seed, death) in (first..first + rounds).zip(deaths.iter().cycle()) {
        println!("{death:?}, FOREBAY_TEST_SEED={seed}");
        world
            .round(*death, seed)
            .with_context(|| format!("{death:?}, FOREBAY_TEST_SEED={seed}"))
            .map_err(|error| world.lab.daemon.with_logs(error))?;
    }
    println!("{} snapshots and clones", world.snapshots.taken);
    world.finish()
}

#[test]
fn cow_crash_old_or_new() -> Result<()> {
    let deaths = [Death::Daemon, Death::Engine, Death::Both];
    run(&[], &deaths, 1, 9)
}

#[test]
fn cow_power_cut_old_or_new() -> Result<()> {
    run(&volatile_devices(), &[Death::Power], 100, 8)
}

/// Overwrites of mapped blocks: only the snapshot itself can flush them.
#[test]
fn an_acknowledged_snapshot_is_durable() -> Result<()> {
    let first = count_from("FOREBAY_TEST_SEED", 200);
    let mut world = World::new(&volatile_devices())?;
    for seed in first..first + count_from("FOREBAY_TEST_ROUNDS", 4) {
        println!("FOREBAY_TEST_SEED={seed}");
        let host = &mut world.lab.hosts[0];
        host.fill()?;
        host.habits = Habits {
            reads: 0,
            holes: 0,
            flushes: 0,
            fua: 0,
            ..Habits::default()
        };
        host.load(|commands| commands < 200)?;
        world.snapshots.take(&[format!("t/a@s{seed}")])?;
        world.lab.daemon.power_cut(&world.devices, seed)?;
        world.lab.daemon.start_again()?;
        let verified = world.verify(Promise::Flushed);
        verified.with_context(|| format!("FOREBAY_TEST_SEED={seed}"))?;
    }
    world.finish()
}

/// Power fails during or after a rollback: the volume has all of the old content, or all of the
/// snapshot's.
#[test]
fn a_rollback_is_whole_or_undone() -> Result<()> {
    let first = count_from("FOREBAY_TEST_SEED", 300);
    let mut world = World::new(&volatile_devices())?;
    let mut done = 0;
    for seed in first..first + count_from("FOREBAY_TEST_ROUNDS", 8) {
        println!("FOREBAY_TEST_SEED={seed}");
        let mut dice = Dice::with_seed(seed);
        let host = &mut world.lab.hosts[0];
        // It makes the shadow right again, too.
        host.fill()?;
        let name = format!("t/a@s{seed}");
        world.snapshots.take(std::slice::from_ref(&name))?;
        host.load(|commands| commands < 300)?;
        host.flush()?;
        let old = read_all(host.connect()?)?;
        let pids = world.lab.daemon.processes()?;
        let delay = Duration::from_millis(dice.u64(..120));
        let killer = std::thread::spawn(move || -> Result<()> {
            std::thread::sleep(delay);
            kill_by_pid(pids.daemon)?;
            kill_by_pid(pids.engine)
        });
        let rollback = ["volume", "rollback", &name, "--while-connected"];
        let rolled_back = world.snapshots.cli(&rollback);
        killer.join().expect("it does not panic")?;
        world.lab.daemon.power_cut(&world.devices, seed)?;
        world.lab.daemon.start_again()?;
        world.snapshots.verify()?;
        let new = world.snapshots.of(&name)?.content.take();
        let new = new.context("the snapshot's content")?;
        let now = read_all(world.lab.hosts[0].connect_soon()?)?;
        let is_undone = rolled_back.is_err() && now == old;
        if !is_undone {
            done += 1;
            ensure_same(&format!("{name}: {rolled_back:?}"), &now, &new)?;
        }
        world.lab.daemon.pool_check()?;
        world.snapshots.delete(&name)?;
    }
    println!("{done} rolled back");
    world.finish()
}

/// A deallocation that only hides a snapshot's extents frees nothing, and is durable all the same.
#[test]
fn a_flushed_deallocation_stays() -> Result<()> {
    let mut world = World::new(&[])?;
    let host = &mut world.lab.hosts[0];
    host.fill()?;
    world.snapshots.take(&["t/a@filled".into()])?;
    let (session, mut queue) = host.connect()?;
    let change = host.shadow.begin(0, 64, None);
    let ranges = dsm_ranges(&[(0, 64)]);
    queue.execute(&IoOp::Deallocate { ranges: 1 }, ranges, MINUTE)?;
    host.shadow.end(&change, true, false);
    drop((queue, session));
    host.flush()?;
    world.lab.daemon.kill_all()?;
    world.lab.daemon.start_again()?;
    world.verify(Promise::Acknowledged)?;
    world.finish()
}
