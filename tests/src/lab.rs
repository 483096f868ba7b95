//! A pool with exported volumes and hosts, for tests in which processes die.
//!
//! A lost connection, or a status that asks for a retry, means that a host noticed a death;
//! [`Noticed`] says whether it may.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::daemon::{Daemon, DaemonOptions};
use crate::host::{Host, LATER, Load};
use crate::shadow::Promise;
use crate::wait;

/// A limit that only a hang exceeds.
pub const MINUTE: Duration = Duration::from_secs(60);
/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;
/// Bytes of a volume's block.
pub const BLOCK: u32 = 4096;

/// Options of a lab.
#[derive(Debug, Clone, Default)]
pub struct LabOptions {
    /// More configuration.
    pub config: String,
    /// More environment for the daemon.
    pub environment: Vec<(String, String)>,
    /// More arguments for `forebay serve`.
    pub arguments: Vec<String>,
    /// The pool's devices, where `FOLDER` is the daemon's folder; by default a file.
    pub devices: Vec<String>,
    /// Name and size of each volume of tenant `t`.
    pub volumes: Vec<(String, u64)>,
}

impl LabOptions {
    /// `count` volumes `a`, `b`, …, in a file, with two reactors.
    #[must_use]
    pub fn volumes(count: u8, size_bytes: u64) -> Self {
        let name = |i: u8| char::from(b'a' + i).to_string();
        Self {
            config: "[engine]\nreactors = 2\n".into(),
            volumes: (0..count).map(|i| (name(i), size_bytes)).collect(),
            ..Self::default()
        }
    }
}

/// A daemon with its pool, and a host for each volume.
#[derive(Debug)]
pub struct Lab {
    /// The daemon.
    pub daemon: Daemon,
    /// The engine's address.
    pub address: SocketAddr,
    /// One host for each volume.
    pub hosts: Vec<Host>,
    /// Indices of hosts that may always lose connections.
    pub hurt: Vec<usize>,
}

/// Effects of a scenario that hosts may notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Noticed {
    /// No error, no lost connection.
    Nothing,
    /// Lost connections, but no errors. Hosts connect again.
    Reconnects,
    /// Lost connections, and statuses that ask for a retry.
    Interruptions,
}

/// Progress of the hosts, for a scenario.
#[derive(Debug)]
pub struct Progress {
    commands: Vec<AtomicU64>,
    over: AtomicBool,
}

impl Progress {
    /// Fails if a host gave up.
    pub fn alive(&self) -> Result<()> {
        ensure!(!self.over.load(SeqCst), "a host gave up");
        Ok(())
    }

    /// Waits until every host has completed `commands` more.
    pub fn more(&self, what: &str, commands: u64) -> Result<()> {
        let all = (0..self.commands.len()).collect::<Vec<_>>();
        self.more_of(&all, what, commands)
    }

    /// [`Progress::more`] for some of the hosts.
    pub fn more_of(&self, hosts: &[usize], what: &str, commands: u64) -> Result<()> {
        let goals: Vec<u64> = hosts
            .iter()
            .map(|i| self.commands[*i].load(SeqCst) + commands)
            .collect();
        wait::until(what, MINUTE, || {
            self.alive()?;
            let reached = |(i, goal): (&usize, &u64)| self.commands[*i].load(SeqCst) >= *goal;
            Ok(hosts.iter().zip(&goals).all(reached).then_some(()))
        })
    }
}

impl Lab {
    /// Sets everything up.
    pub fn new(options: &LabOptions) -> Result<Self> {
        let daemon = Daemon::start(&DaemonOptions {
            config: options.config.clone(),
            environment: options.environment.clone(),
            arguments: options.arguments.clone(),
            ..DaemonOptions::default()
        })?;
        let folder = daemon.folder().display().to_string();
        let mut args: Vec<String> = Vec::new();
        for device in &options.devices {
            args.extend(["--device".into(), device.replace("FOLDER", &folder)]);
        }
        if options.devices.is_empty() {
            args.extend(["--device".into(), format!("file:{folder}/pool.img")]);
        }
        if options
            .devices
            .iter()
            .all(|device| device.starts_with("file:FOLDER"))
        {
            // Device files are created.
            args.extend(["--size".into(), "2G".into()]);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        daemon.create_pool(&args)?;
        daemon.cli(&["tenant", "create", "t"])?;
        let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
        let mut lab = Self {
            daemon,
            address,
            hosts: Vec::new(),
            hurt: Vec::new(),
        };
        for (name, size_bytes) in &options.volumes {
            lab.add_volume(name, *size_bytes)?;
        }
        Ok(lab)
    }

    /// Adds a volume with its export and host.
    pub fn add_volume(&mut self, name: &str, size_bytes: u64) -> Result<()> {
        self.add_volume_of("t", name, size_bytes, &[])
    }

    /// [`Lab::add_volume`] for a tenant, with more arguments for its creation.
    pub fn add_volume_of(
        &mut self,
        tenant: &str,
        name: &str,
        size_bytes: u64,
        more: &[&str],
    ) -> Result<()> {
        let volume = format!("{tenant}/{name}");
        let size = size_bytes.to_string();
        let create = ["volume", "create", &volume, "--size", &size];
        self.daemon.cli(&[&create, more].concat())?;
        self.daemon
            .cli(&["export", "create", &volume, "--any-host"])?;
        let number = self.hosts.len() as u64 + 1;
        let host = Host::new(self.address, &volume, size_bytes, BLOCK, number);
        self.hosts.push(host);
        Ok(())
    }

    /// The default pool file.
    #[must_use]
    pub fn pool_file(&self) -> PathBuf {
        self.daemon.folder().join("pool.img")
    }

    /// Runs a scenario while every host works; returns their results.
    pub fn during_load(
        &mut self,
        noticed: Noticed,
        scenario: impl FnOnce(&mut Daemon, &Progress) -> Result<()>,
    ) -> Result<Vec<Load>> {
        let progress = Progress {
            commands: self.hosts.iter().map(|_| AtomicU64::new(0)).collect(),
            over: AtomicBool::new(false),
        };
        let (daemon, hosts, hurt) = (&mut self.daemon, &mut self.hosts, &self.hurt);
        let (ran, loads) = std::thread::scope(|scope| {
            let threads: Vec<_> = hosts
                .iter_mut()
                .zip(&progress.commands)
                .enumerate()
                .map(|(number, (host, commands))| {
                    let over = &progress.over;
                    let noticed = match hurt.contains(&number) && noticed == Noticed::Nothing {
                        true => Noticed::Interruptions,
                        false => noticed,
                    };
                    scope.spawn(move || {
                        let worked = work(host, noticed, commands, over);
                        over.store(over.load(SeqCst) || worked.is_err(), SeqCst);
                        worked
                    })
                })
                .collect();
            let ran = scenario(daemon, &progress);
            progress.over.store(true, SeqCst);
            let loads: Vec<Result<Load>> = threads
                .into_iter()
                .map(|thread| thread.join().expect("a host does not panic"))
                .collect();
            (ran, loads)
        });
        // A host's error explains more than the scenario's.
        let loads = loads.into_iter().collect::<Result<Vec<Load>>>();
        let loads = match (loads, ran) {
            (Err(host), Err(ran)) => Err(host.context(format!("and: {ran:#}"))),
            (Ok(_), Err(ran)) => Err(ran),
            (loads, Ok(())) => loads,
        };
        let loads = loads.map_err(|error| self.daemon.with_logs(error))?;
        for load in &loads {
            ensure!(load.commands > 0 && load.no_space == 0, "{load:?}");
        }
        Ok(loads)
    }

    /// [`check`](Self::check), then stops the daemon.
    pub fn finish(mut self) -> Result<()> {
        self.check()?;
        self.daemon.stop()
    }

    /// Reads everything back and checks the pool.
    pub fn check(&mut self) -> Result<()> {
        for host in &mut self.hosts {
            host.verify(Promise::Acknowledged)?;
        }
        self.daemon.pool_check()
    }

    /// The daemon's events by kind.
    pub fn events(&self) -> Result<BTreeMap<String, Vec<Value>>> {
        events(&self.daemon)
    }
}

/// The daemon's events by kind.
pub fn events(daemon: &Daemon) -> Result<BTreeMap<String, Vec<Value>>> {
    let said = daemon.cli(&["events"])?;
    let mut kinds: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for event in said.as_array().context("a list of events")? {
        let kind = event["kind"].as_str().context("an event's kind")?;
        kinds
            .entry(kind.to_owned())
            .or_default()
            .push(event.clone());
    }
    Ok(kinds)
}

/// Loads until `over`, with reconnects if allowed.
fn work(
    host: &mut Host,
    noticed: Noticed,
    commands: &AtomicU64,
    over: &AtomicBool,
) -> Result<Load> {
    let tolerated = if noticed == Noticed::Interruptions {
        LATER
    } else {
        0
    };
    host.tolerates.store(tolerated, SeqCst);
    let mut all = Load::default();
    while !over.load(SeqCst) {
        let before = commands.load(SeqCst);
        let load = host.load(|ended| {
            commands.store(before + ended, SeqCst);
            !over.load(SeqCst)
        })?;
        all.commands += load.commands;
        all.flushes += load.flushes;
        all.interrupted += load.interrupted;
        all.no_space += load.no_space;
        all.lost |= load.lost;
        ensure!(
            noticed != Noticed::Nothing || !load.lost,
            "a connection was lost: {load:?}"
        );
        if load.lost {
            host.verify(Promise::Acknowledged)?;
        }
    }
    Ok(all)
}

/// A number that an environment variable may set.
#[must_use]
pub fn count_from(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(otherwise)
}
