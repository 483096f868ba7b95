//! Single troubles, one after the other. Each sets what hosts tolerate, and ends when all hosts
//! work again.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_device::faulty::{self, Faults};
use forebay_tests::daemon::Daemon;
use forebay_tests::host::{DEVICE, Dice, Host, LATER};
use forebay_tests::lab::{BLOCK, MIB, MINUTE};
use forebay_tests::wait;
use serde_json::Value;

use crate::Shared;
use crate::victim::Victim;

/// Further commands of each host, until a trouble is over.
const SETTLED: u64 = 200;

/// A host's `tolerates` and `cut`.
pub(crate) type HostSwitches = (Arc<AtomicU8>, Arc<AtomicBool>);

pub(crate) struct Troubles<'a> {
    pub(crate) devices: Vec<PathBuf>,
    pub(crate) hosts: Vec<HostSwitches>,
    pub(crate) address: SocketAddr,
    pub(crate) daemon: &'a mut Daemon,
    pub(crate) dice: Dice,
    pub(crate) shared: &'a Shared,
    pub(crate) survived: BTreeMap<&'static str, u64>,
    pub(crate) volumes: u64,
    pub(crate) victim: Victim,
}

const TROUBLES: u64 = 14;

impl Troubles<'_> {
    /// Each trouble once in random order, then random ones until `end`, and a storm last.
    pub(crate) fn all(&mut self, end: Instant) -> Result<()> {
        self.settle("the beginning")?;
        let mut first: Vec<u64> = (0..TROUBLES).collect();
        while Instant::now() < end {
            let which = match first.len() as u64 {
                0 => self.dice.u64(..TROUBLES),
                left => first.swap_remove(self.dice.u64(..left) as usize),
            };
            self.one(which)?;
        }
        self.one(TROUBLES - 1)
    }

    fn one(&mut self, which: u64) -> Result<()> {
        let begin = Instant::now();
        let name = match which {
            0 => self.engine_dies()?,
            1 => self.daemon_dies()?,
            2 => self.both_die()?,
            3 => self.connections_cut()?,
            4 => self.volume_comes_and_goes()?,
            5 => self.device("devices with errors", DEVICE | LATER, |dice| Faults {
                error_ppm: 1 + dice.u64(..30_000),
                ..Faults::default()
            })?,
            6 => self.device("devices with torn writes", DEVICE | LATER, |dice| Faults {
                torn_ppm: 1 + dice.u64(..30_000),
                ..Faults::default()
            })?,
            7 => self.device("devices with delays", 0, |dice| Faults {
                delay_ppm: 1 + dice.u64(..200_000),
                delay_ms: 1 + dice.u64(..300),
                ..Faults::default()
            })?,
            8 => self.device("devices that lie about flushes", 0, |_| Faults {
                lose_flushes: true,
                ..Faults::default()
            })?,
            9 => self.device("devices that hang", 0, |_| Faults {
                hang: true,
                ..Faults::default()
            })?,
            10 => self.device("devices that fail the daemon", DEVICE | LATER, |dice| {
                Faults {
                    daemon_error_ppm: 1 + dice.u64(..100_000),
                    ..Faults::default()
                }
            })?,
            11 => self.poisoned()?,
            12 => self.stuck()?,
            _ => self.storm()?,
        };
        self.settle(name)?;
        *self.survived.entry(name).or_default() += 1;
        println!("{:>8.1} s  {name}", begin.elapsed().as_secs_f64());
        Ok(())
    }

    /// Waits for hosts and devices; then errors are no longer tolerated.
    fn settle(&mut self, after: &str) -> Result<()> {
        wait::until("the devices are back", 2 * MINUTE, || {
            let devices = self.daemon.cli(&["device", "list"])?;
            let back = |device: &Value| device["state"] == "online" || device["state"] == "failing";
            Ok(devices
                .as_array()
                .context("a list")?
                .iter()
                .all(back)
                .then_some(()))
        })
        .with_context(|| format!("after {after}"))?;
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
        std::thread::sleep(Duration::from_millis(self.dice.u64(..most_ms)));
    }

    fn engine_dies(&mut self) -> Result<&'static str> {
        // Sometimes early successors die too.
        for _ in 0..=self.dice.u64(..3) {
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
            if self.dice.u64(..2) == 0 {
                cut.store(true, SeqCst);
            }
        }
        Ok("connections cut")
    }

    /// A device is faulty for a while, sometimes with a death meanwhile.
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
            if self.dice.u64(..3) > 0 {
                faulty::set(device, &faults(&mut self.dice))?;
            }
        }
        self.pause(2000);
        let dies = self.dice.u64(..3) == 0;
        if dies {
            self.daemon.kill_engine()?;
            self.pause(500);
        }
        for device in &self.devices {
            faulty::set(device, &Faults::default())?;
        }
        Ok(name)
    }

    /// A command crashes engines until one answers it.
    fn poisoned(&mut self) -> Result<&'static str> {
        let faults = Faults {
            poison: Some(self.victim.place),
            ..Faults::default()
        };
        self.victim.is_killed(self.daemon, &faults)?;
        Ok("commands that crash engines")
    }

    /// A command makes reactors spin until an engine answers it.
    fn stuck(&mut self) -> Result<&'static str> {
        let faults = Faults {
            spin: Some(self.victim.place),
            ..Faults::default()
        };
        self.victim.is_killed(self.daemon, &faults)?;
        Ok("commands that have reactors stuck")
    }

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
        self.daemon
            .cli(&["export", "delete", &volume, "--disconnect-hosts"])?;
        self.daemon.cli(&["volume", "delete", &volume])?;
        Ok("volumes made, grown and removed")
    }
}
