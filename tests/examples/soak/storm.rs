//! All troubles at the same time, a thread for each kind.
//!
//! Hosts may lose connections and get errors, but must read correct data, and must work afterwards.
//! Results of the command line are ignored.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forebay_device::faulty::{self, Faults};
use forebay_tests::daemon::Daemon;
use forebay_tests::host::{DEVICE, Dice, LATER};
use forebay_tests::lab::MINUTE;
use forebay_tests::wait;
use xtask::process;

use crate::troubles::{HostSwitches, Troubles};
use crate::victim::Touched;

#[derive(Default)]
struct Happened {
    engines: AtomicU64,
    daemons: AtomicU64,
    cuts: AtomicU64,
    faults: AtomicU64,
    volumes: AtomicU64,
    killed: AtomicU64,
}

impl Troubles<'_> {
    /// Runs all troubles for some seconds.
    pub(crate) fn storm(&mut self) -> Result<&'static str> {
        self.shared.may_lose.store(true, SeqCst);
        for (tolerates, _) in &self.hosts {
            tolerates.store(DEVICE | LATER, SeqCst);
        }
        let end = Instant::now() + Duration::from_secs(8 + self.dice.u64(..16));
        let over = AtomicBool::new(false);
        let happened = Happened::default();
        let mut dice = |_| Dice::with_seed(self.dice.u64(..));
        let [mut deaths, mut faults, mut cuts] = [0, 1, 2].map(&mut dice);
        let commands = volume_commands(self.daemon, &mut self.volumes);
        let (daemon, victim) = (&mut *self.daemon, &mut self.victim);
        let (devices, hosts, dying) = (&self.devices, &self.hosts, victim.trap());
        let ran = std::thread::scope(|scope| {
            let (over, happened) = (&over, &happened);
            let others = [
                scope.spawn(move || {
                    while !over.load(SeqCst) {
                        bad_devices(devices, &dying, &mut faults)?;
                        happened.faults.fetch_add(1, SeqCst);
                    }
                    Ok(())
                }),
                scope.spawn(move || {
                    while !over.load(SeqCst) {
                        cut(hosts, &mut cuts);
                        happened.cuts.fetch_add(1, SeqCst);
                    }
                    Ok(())
                }),
                scope.spawn(move || {
                    for mut command in commands {
                        if over.load(SeqCst) {
                            break;
                        }
                        let done = process::output(&mut command, MINUTE).is_ok();
                        happened.volumes.fetch_add(done.into(), SeqCst);
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    Ok(())
                }),
                scope.spawn(move || {
                    while !over.load(SeqCst) {
                        let killed = victim.touch()? == Touched::Killed;
                        happened.killed.fetch_add(killed.into(), SeqCst);
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    Ok(())
                }),
            ];
            let died = die(daemon, &mut deaths, end, happened);
            over.store(true, SeqCst);
            let others = others.map(|thread| thread.join().expect("no panic"));
            others.into_iter().fold(died, Result::and)
        });
        for device in &self.devices {
            faulty::set(device, &Faults::default())?;
        }
        ran?;
        if self.daemon.has_died()? {
            self.daemon.start_again()?;
        }
        wait::until("the daemon has opened its pool", MINUTE, || {
            Ok((!has_no_pool(self.daemon)).then_some(()))
        })?;
        self.victim.heal(self.daemon)?;
        for (what, count) in [
            ("engines killed in a storm", &happened.engines),
            ("daemons killed in a storm", &happened.daemons),
            ("connections cut in a storm", &happened.cuts),
            ("changes of devices' faults in a storm", &happened.faults),
            ("steps of volumes in a storm", &happened.volumes),
            ("commands answered that killed in a storm", &happened.killed),
        ] {
            *self.survived.entry(what).or_default() += count.load(SeqCst);
        }
        Ok("storms of all of these at once")
    }
}

/// A device fault can keep the daemon from opening its pool; it tries again.
fn has_no_pool(daemon: &Daemon) -> bool {
    daemon.status().is_ok_and(|status| status["pool"].is_null())
}

/// Afterwards a killed daemon runs again, unless a device fault prevents that.
fn die(daemon: &mut Daemon, dice: &mut Dice, end: Instant, happened: &Happened) -> Result<()> {
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50 + dice.u64(..700)));
        if daemon.has_died()? {
            // A device may fail the daemon's reads at its start.
            happened.daemons.fetch_add(1, SeqCst);
            let _ = daemon.start_again();
            continue;
        }
        match dice.u64(..12) {
            0 => daemon.kill_daemon()?,
            1 => daemon.kill_all()?,
            // There may be no engine now.
            _ => drop(
                daemon
                    .kill_engine()
                    .map(|_| happened.engines.fetch_add(1, SeqCst)),
            ),
        }
    }
    Ok(())
}

/// Makes one device faulty for a while.
fn bad_devices(
    devices: &[std::path::PathBuf],
    trap: &(std::path::PathBuf, u64),
    dice: &mut Dice,
) -> Result<()> {
    let device: &Path = &devices[dice.usize(..devices.len())];
    let mut faults = Faults {
        error_ppm: dice.u64(..3_000),
        torn_ppm: dice.u64(..3_000),
        delay_ppm: dice.u64(..50_000),
        delay_ms: 1 + dice.u64(..100),
        daemon_error_ppm: dice.u64(..20_000),
        lose_flushes: dice.u64(..4) == 0,
        hang: dice.u64(..6) == 0,
        ..Faults::default()
    };
    if device == trap.0 {
        match dice.u64(..6) {
            0 => faults.poison = Some(trap.1),
            1 => faults.spin = Some(trap.1),
            _ => {}
        }
    }
    faulty::set(device, &faults).context("setting faults")?;
    std::thread::sleep(Duration::from_millis(50 + dice.u64(..700)));
    Ok(())
}

fn cut(hosts: &[HostSwitches], dice: &mut Dice) {
    std::thread::sleep(Duration::from_millis(100 + dice.u64(..900)));
    let (_, cut) = &hosts[dice.usize(..hosts.len())];
    cut.store(true, SeqCst);
}

/// More commands than can be executed.
fn volume_commands(daemon: &Daemon, volumes: &mut u64) -> Vec<Command> {
    let mut commands = Vec::new();
    for _ in 0..200 {
        *volumes += 1;
        let volume = format!("t/new{volumes}");
        for step in [
            &["volume", "create", &volume, "--size", "8M"][..],
            &["export", "create", &volume, "--any-host"],
            &["volume", "resize", &volume, "--size", "16M"],
            &["export", "delete", &volume, "--disconnect-hosts"],
            &["volume", "delete", &volume],
        ] {
            commands.push(daemon.cli_command(step));
        }
    }
    commands
}
