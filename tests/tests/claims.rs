//! A daemon that is killed while it waits for a device keeps its claim until the request ends. The
//! next daemon recognises that claim and continues with all other devices.
//!
//! The test delays reads of the device's file; a delayed write would also block its opening.
//! Daemons are this program in other processes, because the test must not touch the file.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_device::fence::FenceError;
use forebay_device::sync_io::SyncDevice;
use forebay_device::{DeviceSpec, OpenOptions};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::hold::Hold;
use forebay_tests::host::Host;
use forebay_tests::shadow::Promise;
use forebay_tests::wait;

const REPORTED: &str = "FOREBAY_TEST_CLAIM";
const PATHS: &str = "FOREBAY_TEST_CLAIM_PATHS";
const HELD_AT: u64 = 1 << 20;
const MIB: u64 = 1 << 20;
const MINUTE: Duration = Duration::from_secs(60);

fn another(reported: &str, paths: &[&Path]) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args([
            "--exact",
            "a_killed_daemons_claim_is_no_living_ones",
            "--nocapture",
        ])
        .env(REPORTED, reported)
        .env(PATHS, std::env::join_paths(paths)?)
        .stdout(Stdio::piped());
    Ok(command.spawn()?)
}

/// Another process's view of the claim.
fn asked(path: &Path) -> Result<String> {
    let output = another("ask", &[path])?.wait_with_output()?;
    let text = String::from_utf8(output.stdout)?;
    let said = text.lines().find_map(|line| line.split_once("claim: "));
    let (_, said) = said.with_context(|| format!("it said nothing: {text}"))?;
    Ok(said.to_owned())
}

/// The actions of such a process.
fn act(reported: &str) -> Result<()> {
    let paths = std::env::var_os(PATHS).context("no paths")?;
    let mut devices = Vec::new();
    for path in std::env::split_paths(&paths) {
        let spec: DeviceSpec = path.display().to_string().parse()?;
        devices.push(SyncDevice::open(&spec, &OpenOptions::default())?);
    }
    if reported == "claim all and read the first" {
        for device in &devices {
            device.claim_for_daemon()?;
        }
        devices[0].read_at(HELD_AT, &mut [0; 4096])?;
        return Ok(());
    }
    if reported == "claim and stay" {
        // A process that asks holds the claim for a moment.
        wait::until("the claim", MINUTE, || {
            Ok(devices[0].claim_for_daemon().ok())
        })?;
        println!("claim: taken");
        std::thread::sleep(2 * MINUTE);
    }
    let said = match devices[0].claim_for_daemon() {
        Ok(()) => "free",
        Err(FenceError::Hangs { .. }) => "of one that is being killed, inside a request",
        Err(_) => "of one that lives",
    };
    println!("claim: {said}");
    Ok(())
}

#[test]
fn a_killed_daemons_claim_is_no_living_ones() -> Result<()> {
    if let Ok(reported) = std::env::var(REPORTED) {
        return act(&reported);
    }
    let folder = tempfile::tempdir()?;
    let hold = Hold::new(folder.path(), 8 << 20)?;
    let (hangs, other) = (hold.path(), folder.path().join("other"));
    File::create(&other)?.set_len(8 << 20)?;
    ensure!(asked(&hangs)? == "free");
    hold.hold_reads(HELD_AT..HELD_AT + 4096);
    let mut first = another("claim all and read the first", &[&hangs, &other])?;
    hold.wait_held(1)?;
    for path in [&hangs, &other] {
        ensure!(asked(path)? == "of one that lives");
    }
    first.kill()?;
    wait::until("the claim of one that is being killed", MINUTE, || {
        Ok((asked(&hangs)? != "of one that lives").then_some(()))
    })?;
    ensure!(asked(&hangs)? == "of one that is being killed, inside a request");
    ensure!(asked(&other)? == "free", "nothing hangs there");
    // A third process meets the claims of both.
    let mut second = another("claim and stay", &[&other])?;
    let said = BufReader::new(second.stdout.take().context("no output")?);
    let taken = said.lines().find(|line| {
        line.as_ref()
            .is_ok_and(|line| line.ends_with("claim: taken"))
    });
    ensure!(taken.is_some(), "the second one ended");
    ensure!(asked(&other)? == "of one that lives");
    ensure!(first.try_wait()?.is_none(), "it can't end");
    hold.release();
    first.wait()?;
    ensure!(asked(&hangs)? == "free");
    ensure!(asked(&other)? == "of one that lives", "the second one does");
    second.kill()?;
    second.wait()?;
    ensure!(asked(&other)? == "free");
    Ok(())
}

fn state(daemon: &Daemon, index: &str) -> Result<(String, String)> {
    let shown = daemon.cli(&["device", "show", index])?;
    let text = |name: &str| shown[name].as_str().unwrap_or_default().to_owned();
    Ok((text("state"), text("why")))
}

#[test]
fn only_the_device_that_a_killed_daemon_waits_for_is_missing() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let hold = Hold::new(folder.path(), 256 * MIB)?;
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let first = daemon.folder().join("first");
    let first = format!("file:{}", first.display());
    daemon.create_pool(&["--device", &first, "--size", "256M"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let mut host = Host::new(address, "t/v", 16 * MIB, 4096, 1);
    host.fill()?;
    let second = format!("file:{}", hold.path().display());
    daemon.cli(&["device", "add", &second])?;
    let engine = daemon.processes()?.engine;

    // The catalog's copy on this device hangs.
    hold.hold_writes(0..256 * MIB);
    let mut waiting = daemon.cli_command(&["tenant", "create", "u"]).spawn()?;
    hold.wait_held(1)?;
    let mut killed = daemon.replace_hanging_daemon()?;
    waiting.kill()?;
    waiting.wait()?;
    ensure!(killed.try_wait()?.is_none(), "it can't end");
    ensure!(daemon.processes()?.engine == engine, "it serves on");
    // The new daemon's own request may take a while too.
    wait::until("the first device is there", MINUTE, || {
        let (here, _) = state(&daemon, "0").unwrap_or_default();
        Ok((here == "online").then_some(()))
    })?;
    let (there, why) = state(&daemon, "1")?;
    ensure!(
        there == "missing" && why.contains("hangs"),
        "{there}: {why}"
    );
    host.verify(Promise::Acknowledged)?;
    let load = host.load(|commands| commands < 200)?;
    ensure!(!load.lost && load.interrupted == 0, "{load:?}");

    hold.release();
    killed.wait()?;
    // No command is needed.
    wait::until("the device is taken back", MINUTE, || {
        // `device show` fails while the pool is opened again.
        let state = state(&daemon, "1").unwrap_or_default();
        Ok((state.0 == "online").then_some(()))
    })?;
    host.check()?;
    daemon.pool_check()?;
    daemon.stop()
}

#[test]
fn a_pool_that_a_killed_daemon_waits_for_is_opened_by_the_next_one_when_that_ends() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let hold = Hold::new(folder.path(), 256 * MIB)?;
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let only = format!("file:{}", hold.path().display());
    daemon.create_pool(&["--device", &only])?;
    daemon.cli(&["tenant", "create", "t"])?;
    hold.hold_writes(0..256 * MIB);
    let mut waiting = daemon.cli_command(&["tenant", "create", "u"]).spawn()?;
    hold.wait_held(1)?;
    let mut killed = daemon.replace_hanging_daemon()?;
    waiting.kill()?;
    waiting.wait()?;
    let status = daemon.cli(&["status"])?;
    ensure!(status["pool"].is_null(), "{status}");
    ensure!(!status["pool_trouble"].is_null(), "{status}");
    ensure!(killed.try_wait()?.is_none(), "it can't end");
    hold.release();
    killed.wait()?;
    wait::until("the pool is open", MINUTE, || {
        let status = daemon.cli(&["status"])?;
        Ok((!status["pool"].is_null()).then_some(()))
    })?;
    daemon.cli(&["tenant", "create", "v"])?;
    daemon.pool_check()?;
    daemon.stop()
}
