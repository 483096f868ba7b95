//! Extents change their owner while processes die or the power is cut. No volume shows or
//! overwrites another's data.
//!
//! In a small pool, a victim is filled, then deleted or deallocated, and a process dies at a random
//! moment. An heir writes one block into each extent; the rest must read as zeros. A keeper keeps
//! its data throughout.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, dsm_ranges};
use forebay_tests::daemon::{Daemon, DaemonOptions, Processes};
use forebay_tests::host::{Dice, Host, is_no_space};
use forebay_tests::lab::count_from;
use forebay_tests::shadow::Promise;
use forebay_tests::system::kill_by_pid;
use forebay_tests::wait;

const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const EXTENT: u64 = 64 << 10;
const BLOCK: u32 = 4096;
/// Most of the pool: three volumes never fit.
const VOLUME: u64 = 20 * MIB;
const KEEPER: u64 = 4 * MIB;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    Daemon,
    Engine,
    Both,
    Power,
}

const DEATHS: [Death; 4] = [Death::Power, Death::Daemon, Death::Both, Death::Engine];

struct Lab {
    daemon: Daemon,
    device: PathBuf,
    numbers: u64,
}

impl Lab {
    fn new() -> Result<Self> {
        // A deletion frees slices, with a possible death after each.
        let slice = ("FOREBAY_DELETE_SLICE".to_owned(), "40".to_owned());
        let daemon = Daemon::start(&DaemonOptions {
            environment: vec![slice],
            ..DaemonOptions::default()
        })?;
        let device = daemon.folder().join("device");
        let spec = format!("volatile:{}?size=128M", device.display());
        daemon.create_pool(&["--device", &spec])?;
        daemon.cli(&["tenant", "create", "t"])?;
        let lab = Self {
            daemon,
            device,
            numbers: 0,
        };
        // Leave slightly more space than two volumes.
        let pool = lab.daemon.cli(&["pool", "show"])?;
        let clean = pool["clean_bytes"].as_u64().context("clean_bytes")?;
        let ballast = clean.saturating_sub(2 * VOLUME + KEEPER + 6 * MIB);
        let mut ballast_host = lab.create_sized("t/ballast", ballast, u64::MAX)?;
        ballast_host.fill()?;
        Ok(lab)
    }

    fn create(&mut self, kind: &str, size_bytes: u64) -> Result<(String, Host)> {
        self.numbers += 1;
        let name = format!("t/{kind}{}", self.numbers);
        let host = self.create_sized(&name, size_bytes, self.numbers)?;
        Ok((name, host))
    }

    fn create_sized(&self, name: &str, size_bytes: u64, number: u64) -> Result<Host> {
        let size_bytes = size_bytes / EXTENT * EXTENT;
        let size = size_bytes.to_string();
        self.daemon
            .cli(&["volume", "create", name, "--size", &size])?;
        self.daemon.cli(&["export", "create", name, "--any-host"])?;
        let address = format!("127.0.0.1:{}", self.daemon.port()).parse()?;
        Ok(Host::new(address, name, size_bytes, BLOCK, number))
    }

    fn die(&mut self, death: Death, before: &Processes, seed: u64) -> Result<Promise> {
        match death {
            Death::Engine => {
                kill_by_pid(before.engine)?;
                self.daemon.wait_engine_after(before.generation, MINUTE)?;
            }
            Death::Daemon => {
                self.daemon.kill_daemon()?;
                self.daemon.start_again()?;
            }
            Death::Both => {
                self.daemon.kill_all()?;
                self.daemon.start_again()?;
            }
            Death::Power => {
                let cuts = self
                    .daemon
                    .power_cut(std::slice::from_ref(&self.device), seed)?;
                println!("{cuts:?}");
                self.daemon.start_again()?;
                return Ok(Promise::Flushed);
            }
        }
        Ok(Promise::Acknowledged)
    }

    fn has_volume(&self, name: &str) -> Result<bool> {
        let list = self.daemon.cli(&["volume", "list"])?;
        let items = list.as_array().context("a list")?;
        let name = name.trim_start_matches("t/");
        Ok(items.iter().any(|item| item["name"] == name))
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.daemon
            .cli(&["export", "delete", name, "--disconnect-hosts"])?;
        self.daemon.cli(&["volume", "delete", name])?;
        Ok(())
    }
}

/// Writes one block in each extent, at different places, while there is space.
fn dot(host: &mut Host) -> Result<u64> {
    let (_session, mut queue) = host.connect_soon()?;
    let per_extent = EXTENT / u64::from(BLOCK);
    let extents = host.shadow.blocks() / per_extent;
    for extent in 0..extents {
        let lba = extent * per_extent + extent % per_extent;
        // Freed extents are zero-filled first.
        let written = wait::until("space that was freed", MINUTE, || {
            match host.write_with(&mut queue, lba, 1) {
                written if is_no_space(&written) => Ok(None),
                written => written.map(Some),
            }
        });
        written.with_context(|| format!("extent {extent}"))?;
    }
    Ok(extents)
}

fn deallocate(host: &mut Host) -> Result<()> {
    let (_session, mut queue) = host.connect_soon()?;
    let piece = (2 * MIB / u64::from(BLOCK)) as u32;
    for lba in (0..host.shadow.blocks()).step_by(piece as usize) {
        let blocks = u64::from(piece).min(host.shadow.blocks() - lba) as u32;
        let change = host.shadow.begin(lba, blocks, None);
        let op = IoOp::Deallocate { ranges: 1 };
        let done = queue.execute(&op, dsm_ranges(&[(lba, blocks)]), MINUTE);
        host.shadow.end(&change, done.is_ok(), false);
        done?;
    }
    Ok(())
}

#[test]
fn delete_crash_no_double_owner() -> Result<()> {
    let mut lab = Lab::new()?;
    let (_, mut keeper) = lab.create("keeper", KEEPER)?;
    keeper.fill()?;
    let seed = count_from("FOREBAY_TEST_SEED", 11);
    let mut dice = Dice::with_seed(seed);
    let mut left: Option<(String, Host)> = None;
    for round in 0..count_from("FOREBAY_TEST_ROUNDS", 8) {
        let (name, mut victim) = match left.take() {
            Some(there) => there,
            None => lab.create("victim", VOLUME)?,
        };
        victim.fill()?;
        // A later request would wait for the deletion.
        let before = lab.daemon.processes()?;
        let mut export = lab
            .daemon
            .cli_command(&["export", "delete", &name, "--disconnect-hosts"]);
        let export = export.stdout(Stdio::null()).status()?;
        ensure!(export.success(), "{name}: its export");
        let mut deletion = lab.daemon.cli_command(&["volume", "delete", &name]);
        let mut deletion = deletion.stdout(Stdio::null()).spawn()?;
        std::thread::sleep(Duration::from_micros(dice.u64(..20_000)));
        let death = DEATHS[round as usize % DEATHS.len()];
        let promise = lab.die(death, &before, seed + round)?;
        let deleted = deletion.wait()?.success();
        let there = wait::until("it is deleted or stays", MINUTE, || {
            let there = lab.has_volume(&name)?;
            ensure!(!(deleted && there), "{name} was deleted and is there again");
            Ok(Some(there))
        })?;
        println!("round {round}: {death:?}: told of its end: {deleted}; there: {there}");
        let (heir_name, mut heir) = lab.create("heir", VOLUME - 2 * MIB)?;
        dot(&mut heir).with_context(|| format!("round {round}, {death:?}"))?;
        heir.check()?;
        if there {
            lab.daemon.cli(&["export", "create", &name, "--any-host"])?;
            victim
                .verify(promise)
                .with_context(|| format!("round {round}, {death:?}"))?;
            left = Some((name, victim));
        }
        keeper
            .verify(promise)
            .with_context(|| format!("round {round}, {death:?}"))?;
        heir.check()?;
        lab.delete(&heir_name)?;
    }
    lab.daemon.stop()
}

#[test]
fn freed_extent_never_shows_old_bytes() -> Result<()> {
    let mut lab = Lab::new()?;
    let seed = count_from("FOREBAY_TEST_SEED", 13);
    let mut dice = Dice::with_seed(seed);
    for round in 0..count_from("FOREBAY_TEST_ROUNDS", 8) {
        let (name, mut victim) = lab.create("victim", VOLUME)?;
        victim.fill()?;
        let death = DEATHS[round as usize % DEATHS.len()];
        let deallocates = round % 2 == (round / 4) % 2;
        match deallocates {
            true => deallocate(&mut victim)?,
            false => lab.delete(&name)?,
        }
        std::thread::sleep(Duration::from_millis(dice.u64(..40)));
        let (heir_name, mut heir) = lab.create("heir", VOLUME)?;
        // At the death, a part of the freed extents has a new owner.
        let before = lab.daemon.processes()?;
        let blocks = dice.u64(..VOLUME / EXTENT);
        let (session, mut queue) = heir.connect_soon()?;
        for extent in 0..blocks {
            heir.write_with(&mut queue, extent * (EXTENT / u64::from(BLOCK)), 1)?;
        }
        drop((queue, session));
        let what = format!("round {round}, {death:?}, deallocates: {deallocates}");
        let promise = lab
            .die(death, &before, 100 + seed + round)
            .with_context(|| what.clone())?;
        println!("{what}, {blocks} extents before");
        heir.verify(promise).with_context(|| what.clone())?;
        dot(&mut heir).with_context(|| what.clone())?;
        heir.check().with_context(|| what.clone())?;
        if deallocates {
            victim.verify(promise).with_context(|| what.clone())?;
            lab.delete(&name)?;
        }
        ensure!(!lab.has_volume(&name)?, "{name} is there again");
        lab.delete(&heir_name)?;
    }
    lab.daemon.stop()
}
