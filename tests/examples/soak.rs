//! `cargo xtask soak`: everything that can go wrong, for as long as asked.
//!
//! Purpose: deaths of engine, daemon and both; device errors, torn writes, delays, lost flushes, hangs; connections cut;
//! volumes made, grown and removed: at random from a seed, while hosts do everything a host may and judge every byte.
//! Design: one trouble after the other, now and then two at once, on a pool of two `faulty:` devices. Each trouble says
//! what hosts may notice of it; whatever else they notice ends the soak with an error. At the end everything is read
//! back and the pool is checked. Prints what was survived.
//! Not here: power cuts (`powercut_volatile_cache` in `tests/tests/`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use forebay_device::faulty::{self, Faults};
use forebay_tests::daemon::Daemon;
use forebay_tests::host::{DEVICE, Dice, Host, LATER, Load};
use forebay_tests::lab::{BLOCK, Lab, LabOptions, MIB, MINUTE};
use forebay_tests::shadow::Promise;
use forebay_tests::wait;

const HOSTS: u8 = 4;
const VOLUME_BYTES: u64 = 48 * MIB;
/// What is left of a trouble after it: so many commands of each host later it is over.
const SETTLED: u64 = 200;

/// What the hosts are told and say while they work.
struct Shared {
    over: AtomicBool,
    /// Connections may be lost.
    may_lose: AtomicBool,
    commands: Vec<AtomicU64>,
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (mut minutes, mut seed) = (5.0, 1);
    while let Some(arg) = args.next() {
        let value = args
            .next()
            .with_context(|| format!("{arg} needs a value"))?;
        match arg.as_str() {
            "--minutes" => minutes = value.parse::<f64>()?,
            "--seed" => seed = value.parse::<u64>()?,
            other => bail!("unknown argument '{other}'; there are: --minutes N, --seed N"),
        }
    }
    println!("seed {seed}");
    let end = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let device = |i| format!("faulty:FOLDER/device{i}?size=2G&seed={}", seed + i);
    let mut lab = Lab::new(&LabOptions {
        config: "[engine]\nreactors = 2\nstuck_s = 2\n[devices]\nallow_faulty = true\n".into(),
        devices: vec![device(0), device(1)],
        ..LabOptions::volumes(HOSTS, VOLUME_BYTES)
    })?;
    let shared = Shared {
        over: AtomicBool::new(false),
        may_lose: AtomicBool::new(false),
        commands: lab.hosts.iter().map(|_| AtomicU64::new(0)).collect(),
    };
    let mut troubles = Troubles {
        devices: (0..2)
            .map(|i| lab.daemon.folder().join(format!("device{i}")))
            .collect(),
        hosts: lab
            .hosts
            .iter()
            .map(|host| (host.tolerates.clone(), host.cut.clone()))
            .collect(),
        address: lab.address,
        daemon: &mut lab.daemon,
        dice: Dice(seed),
        shared: &shared,
        survived: BTreeMap::new(),
        volumes: 0,
    };
    let hosts = &mut lab.hosts;
    let (ran, loads) = std::thread::scope(|scope| {
        let threads: Vec<_> = hosts
            .iter_mut()
            .enumerate()
            .map(|(number, host)| {
                let shared = &shared;
                scope.spawn(move || {
                    let worked = work(host, number, shared);
                    if let Err(error) = &worked {
                        eprintln!("host {number}: {error:#}");
                        shared.over.store(true, SeqCst);
                    }
                    worked
                })
            })
            .collect();
        let ran = (|| -> Result<()> {
            troubles.settle("the beginning")?;
            while Instant::now() < end {
                troubles.one()?;
            }
            Ok(())
        })();
        shared.over.store(true, SeqCst);
        let loads: Vec<Result<Load>> = threads
            .into_iter()
            .map(|thread| thread.join().expect("a host does not panic"))
            .collect();
        (ran, loads)
    });
    for (what, times) in &troubles.survived {
        println!("{times:>8}  {what}");
    }
    let loads = loads.into_iter().collect::<Result<Vec<_>>>();
    if let Err(error) = &ran {
        eprintln!("{error:#}");
    }
    let loads = loads.map_err(|error| lab.daemon.with_logs(error))?;
    ran?;
    let sum = |of: fn(&Load) -> u64| loads.iter().map(of).sum::<u64>();
    println!("{:>8}  commands judged", sum(|load| load.commands));
    println!("{:>8}  flushes among them", sum(|load| load.flushes));
    println!(
        "{:>8}  ended by a device's error",
        sum(|load| load.device_errors)
    );
    println!("{:>8}  put off", sum(|load| load.interrupted));
    lab.check()?;
    lab.daemon.stop()?;
    println!("no byte lost or wrong, no error unexplained (seed {seed})");
    Ok(())
}

/// Works until it is over, connecting again when that is allowed.
fn work(host: &mut Host, number: usize, shared: &Shared) -> Result<Load> {
    let mut all = Load::default();
    while !shared.over.load(SeqCst) {
        let before = shared.commands[number].load(SeqCst);
        let load = host.load(|ended| {
            shared.commands[number].store(before + ended, SeqCst);
            !shared.over.load(SeqCst)
        })?;
        all.commands += load.commands;
        all.flushes += load.flushes;
        all.interrupted += load.interrupted;
        all.device_errors += load.device_errors;
        if load.lost {
            ensure!(
                shared.may_lose.load(SeqCst),
                "a connection was lost for no reason: {load:?}"
            );
            host.verify(Promise::Acknowledged)?;
        }
    }
    Ok(all)
}

type HostSwitches = (Arc<AtomicU8>, Arc<AtomicBool>);

struct Troubles<'a> {
    devices: Vec<PathBuf>,
    hosts: Vec<HostSwitches>,
    address: SocketAddr,
    daemon: &'a mut Daemon,
    dice: Dice,
    shared: &'a Shared,
    survived: BTreeMap<&'static str, u64>,
    volumes: u64,
}

impl Troubles<'_> {
    /// One trouble, until hosts work as before.
    fn one(&mut self) -> Result<()> {
        let name = match self.dice.below(14) {
            0..=2 => self.engine_dies()?,
            3 => self.daemon_dies()?,
            4 => self.both_die()?,
            5 => self.connections_cut()?,
            6 => self.volume_comes_and_goes()?,
            7 => self.device("devices with errors", DEVICE | LATER, |dice| Faults {
                error_ppm: 1 + dice.below(30_000),
                ..Faults::default()
            })?,
            8 => self.device("devices with torn writes", DEVICE | LATER, |dice| Faults {
                torn_ppm: 1 + dice.below(30_000),
                ..Faults::default()
            })?,
            9 => self.device("devices with delays", 0, |dice| Faults {
                delay_ppm: 1 + dice.below(200_000),
                delay_ms: 1 + dice.below(300),
                ..Faults::default()
            })?,
            10 => self.device("devices that lie about flushes", 0, |_| Faults {
                lose_flushes: true,
                ..Faults::default()
            })?,
            11 | 12 => self.everything()?,
            _ => self.device("devices that hang", 0, |_| Faults {
                hang: true,
                ..Faults::default()
            })?,
        };
        self.settle(name)?;
        *self.survived.entry(name).or_default() += 1;
        Ok(())
    }

    /// Everybody works, and nothing more is tolerated.
    fn settle(&mut self, after: &str) -> Result<()> {
        let commands = &self.shared.commands;
        let goals: Vec<u64> = commands.iter().map(|c| c.load(SeqCst) + SETTLED).collect();
        wait::until("all hosts work", 2 * MINUTE, || {
            ensure!(!self.shared.over.load(SeqCst), "a host gave up");
            let reached = |(c, goal): (&AtomicU64, &u64)| c.load(SeqCst) >= *goal;
            Ok(commands.iter().zip(&goals).all(reached).then_some(()))
        })
        .with_context(|| format!("after {after}"))?;
        self.shared.may_lose.store(false, SeqCst);
        for (tolerates, _) in &self.hosts {
            tolerates.store(0, SeqCst);
        }
        Ok(())
    }

    fn pause(&mut self, most_ms: u64) {
        std::thread::sleep(Duration::from_millis(self.dice.below(most_ms)));
    }

    fn engine_dies(&mut self) -> Result<&'static str> {
        // Sometimes its successors too, before they have begun.
        for _ in 0..=self.dice.below(3) {
            let dead = self.daemon.kill_engine()?;
            self.daemon.wait_engine_after(dead.generation, MINUTE)?;
            self.pause(200);
        }
        Ok("engines killed")
    }

    fn daemon_dies(&mut self) -> Result<&'static str> {
        self.daemon.kill_daemon()?;
        self.pause(1000);
        self.daemon.start_again()?;
        Ok("daemons killed")
    }

    fn both_die(&mut self) -> Result<&'static str> {
        self.shared.may_lose.store(true, SeqCst);
        self.daemon.kill_all()?;
        self.daemon.start_again()?;
        Ok("both killed")
    }

    fn connections_cut(&mut self) -> Result<&'static str> {
        self.shared.may_lose.store(true, SeqCst);
        for (_, cut) in &self.hosts {
            if self.dice.below(2) == 0 {
                cut.store(true, SeqCst);
            }
        }
        Ok("connections cut")
    }

    /// Faults for a while, and now and then a death in the middle of them.
    fn device(
        &mut self,
        name: &'static str,
        tolerated: u8,
        faults: impl Fn(&mut Dice) -> Faults,
    ) -> Result<&'static str> {
        for (tolerates, _) in &self.hosts {
            tolerates.store(tolerated, SeqCst);
        }
        for device in &self.devices {
            if self.dice.below(3) > 0 {
                faulty::set(device, &faults(&mut self.dice))?;
            }
        }
        self.pause(2000);
        let dies = self.dice.below(3) == 0;
        if dies {
            self.daemon.kill_engine()?;
            self.pause(500);
        }
        for device in &self.devices {
            faulty::set(device, &Faults::default())?;
        }
        Ok(name)
    }

    /// All of them at once: bad devices, deaths, cut connections, a volume that comes and goes.
    fn everything(&mut self) -> Result<&'static str> {
        for (tolerates, _) in &self.hosts {
            tolerates.store(DEVICE | LATER, SeqCst);
        }
        for device in &self.devices {
            let faults = Faults {
                error_ppm: self.dice.below(5_000),
                torn_ppm: self.dice.below(5_000),
                delay_ppm: self.dice.below(50_000),
                delay_ms: 1 + self.dice.below(50),
                ..Faults::default()
            };
            faulty::set(device, &faults)?;
        }
        for _ in 0..3 + self.dice.below(4) {
            match self.dice.below(5) {
                0 => drop(self.daemon_dies()?),
                1 => drop(self.connections_cut()?),
                2 => {
                    self.volumes += 1;
                    let volume = format!("t/new{}", self.volumes);
                    let daemon = &self.daemon;
                    daemon.cli(&["volume", "create", &volume, "--size", "8M"])?;
                    daemon.cli(&["export", "create", &volume, "--any-host"])?;
                    daemon.cli(&["export", "delete", &volume])?;
                    daemon.cli(&["volume", "delete", &volume])?;
                }
                _ => drop(self.engine_dies()?),
            }
            self.pause(300);
        }
        for device in &self.devices {
            faulty::set(device, &Faults::default())?;
        }
        Ok("all of these at once")
    }

    /// A volume is made, must read as zeros, is written, grown and removed.
    fn volume_comes_and_goes(&mut self) -> Result<&'static str> {
        self.volumes += 1;
        let volume = format!("t/new{}", self.volumes);
        let number = 1000 + self.volumes;
        self.daemon
            .cli(&["volume", "create", &volume, "--size", "8M"])?;
        self.daemon
            .cli(&["export", "create", &volume, "--any-host"])?;
        let mut host = Host::new(self.address, &volume, 8 * MIB, BLOCK, number);
        host.check()?;
        let load = host.load(|ended| ended < 300)?;
        ensure!(!load.lost && load.interrupted == 0, "{volume}: {load:?}");
        host.check()?;
        self.daemon
            .cli(&["volume", "resize", &volume, "--size", "16M"])?;
        self.daemon.cli(&["export", "delete", &volume])?;
        self.daemon.cli(&["volume", "delete", &volume])?;
        Ok("volumes made, grown and removed")
    }
}
