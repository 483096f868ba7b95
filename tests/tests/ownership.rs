//! A pool of another node is refused, watched and taken over, and its old owner loses it.
//!
//! The second node is a second daemon. It reaches the pool's file through a loop device, so that
//! the first one's locks do not stop it.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, IoQueue, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::disk::LoopDevice;
use forebay_tests::wait;
use rustix::process::{Pid, Signal, kill_process};

const HOST: &str = "nqn.2026-01.test:host";
const LIMIT: Duration = Duration::from_secs(60);

struct Two {
    first: Daemon,
    second: Daemon,
    device: LoopDevice,
}

fn two() -> Result<Two> {
    let first = Daemon::start(&DaemonOptions::default())?;
    let path = first.folder().join("pool.img");
    let spec = format!("file:{}", path.display());
    first.create_pool(&["--device", &spec, "--size", "128M"])?;
    first.cli(&["tenant", "create", "t"])?;
    first.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    first.cli(&["export", "create", "t/v", "--any-host"])?;
    let second = Daemon::start(&DaemonOptions::default())?;
    let device = LoopDevice::over(&path)?;
    Ok(Two {
        first,
        second,
        device,
    })
}

fn connect(daemon: &Daemon) -> Result<(Session, IoQueue)> {
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let mut session = Session::connect(address, nqn, HOST, &Options::default())?;
    let queue = session.open_queue(1)?;
    Ok((session, queue))
}

fn write(queue: &mut IoQueue, byte: u8) -> Result<()> {
    let write = IoOp::Write {
        lba: 0,
        blocks: 1,
        fua: true,
    };
    queue.execute(&write, vec![byte; 4096], LIMIT)?;
    Ok(())
}

fn refused(result: Result<impl Sized>, says: &str) -> Result<()> {
    let error = result.err().context("it was not refused")?;
    let text = format!("{error:#}");
    ensure!(text.contains(says), "'{says}' is not in: {text}");
    Ok(())
}

fn open<'a>(device: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["pool", "open", "--device", device], more].concat()
}

fn send(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid.cast_signed()).context("a pid")?;
    Ok(kill_process(pid, signal)?)
}

/// The first daemon keeps serving its data.
#[test]
fn foreign_pool_is_refused() -> Result<()> {
    let mut two = two()?;
    let spec = two.device.spec();
    let (_session, mut queue) = connect(&two.first)?;
    write(&mut queue, 1)?;
    refused(two.second.cli(&open(&spec, &[])), "--take-over")?;
    refused(two.second.cli(&open(&spec, &["--force"])), "--take-over")?;

    refused(
        two.second.cli(&open(&spec, &["--take-over"])),
        "is in use now",
    )?;
    let create = ["pool", "create", "--device", &spec, "--force"];
    refused(two.second.cli(&create), "is in use now")?;
    ensure!(two.second.status()?["pool"].is_null());

    write(&mut queue, 2)?;
    two.first.pool_check()?;
    two.first.stop()?;
    // A closed pool still belongs to the first daemon.
    refused(two.second.cli(&open(&spec, &[])), "closed it in good order")?;
    two.first.start_again()?;
    two.first.pool_check()
}

#[test]
fn foreign_pool_after_kill9_needs_take_over() -> Result<()> {
    let mut two = two()?;
    let spec = two.device.spec();
    // Only the catalog names this device to the second daemon.
    let more = two.first.folder().join("more.img");
    let more = format!("file:{}", more.display());
    two.first
        .cli(&["device", "add", &more, "--create", "--size", "128M"])?;
    let (session, mut queue) = connect(&two.first)?;
    write(&mut queue, 7)?;
    two.first.kill_all()?;
    drop((queue, session));
    refused(two.second.cli(&open(&spec, &[])), "which may use it now")?;
    two.second.cli(&open(&spec, &["--take-over"]))?;
    two.second.wait_engine_after(0, LIMIT)?;
    two.second.pool_check()?;
    let devices = two.second.cli(&["device", "list"])?;
    ensure!(devices[1]["state"] == "online", "{devices}");
    let (_session, mut queue) = connect(&two.second)?;
    let read = IoOp::Read { lba: 0, blocks: 1 };
    ensure!(queue.execute(&read, vec![0; 4096], LIMIT)? == [7; 4096]);
    // The first daemon learns of it when it returns.
    two.first.start_again()?;
    let trouble = two.first.status()?["pool_trouble"].to_string();
    // On one node, the lock may report it first.
    let is_told = ["another Forebay", "holds this device"];
    ensure!(
        is_told.iter().any(|reported| trouble.contains(reported)),
        "{trouble}"
    );
    write(&mut queue, 8)?;
    two.second.pool_check()
}

/// The engine's heartbeat protects the pool while no daemon lives.
#[test]
fn engine_heartbeat_without_daemon() -> Result<()> {
    let mut two = two()?;
    let spec = two.device.spec();
    let (_session, mut queue) = connect(&two.first)?;
    write(&mut queue, 1)?;
    two.first.kill_daemon()?;
    refused(
        two.second.cli(&open(&spec, &["--take-over"])),
        "is in use now",
    )?;
    write(&mut queue, 2)?;
    two.first.start_again()?;
    two.first.pool_check()
}

/// Both processes are stopped and lose the pool; later writes do not reach it.
#[test]
fn resumed_engine_checks_the_label() -> Result<()> {
    let two = two()?;
    let spec = two.device.spec();
    let (_session, mut queue) = connect(&two.first)?;
    write(&mut queue, 1)?;
    let processes = two.first.processes()?;
    // The daemon first, because it would replace a stopped engine.
    send(processes.daemon, Signal::STOP)?;
    send(processes.engine, Signal::STOP)?;
    two.second.cli(&open(&spec, &["--take-over"]))?;
    two.second.wait_engine_after(0, LIMIT)?;
    let (_other, mut other) = connect(&two.second)?;
    write(&mut other, 9)?;
    // The write is the first thing that the resumed engine sees.
    let sent = std::thread::spawn(move || write(&mut queue, 66));
    std::thread::sleep(Duration::from_millis(200));
    send(processes.engine, Signal::CONT)?;
    wait::until("the engine ends", LIMIT, || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", processes.engine));
        Ok(stat.map_or(Some(()), |stat| stat.contains(") Z").then_some(())))
    })?;
    send(processes.daemon, Signal::CONT)?;
    wait::until("the daemon says so", LIMIT, || {
        let trouble = two.first.status()?["pool_trouble"].to_string();
        Ok(trouble.contains("took the pool over").then_some(()))
    })?;
    ensure!(sent.join().is_ok_and(|sent| sent.is_err()));
    let read = IoOp::Read { lba: 0, blocks: 1 };
    ensure!(other.execute(&read, vec![0; 4096], LIMIT)? == [9; 4096]);
    two.second.pool_check()
}

#[test]
fn two_opens_one_wins() -> Result<()> {
    let mut two = two()?;
    two.first.kill_all()?;
    let third = Daemon::start(&DaemonOptions::default())?;
    let other_name = LoopDevice::over(&two.first.folder().join("pool.img"))?;
    let opening = |daemon: &Daemon, device: &LoopDevice| -> Result<std::process::Child> {
        let mut command: Command = daemon.cli_command(&open(&device.spec(), &["--take-over"]));
        let silent = std::process::Stdio::null;
        Ok(command.stdout(silent()).stderr(silent()).spawn()?)
    };
    let mut one = opening(&two.second, &two.device)?;
    let mut other = opening(&third, &other_name)?;
    let won = [one.wait()?.success(), other.wait()?.success()];
    ensure!(won.iter().filter(|won| **won).count() == 1, "{won:?}");
    let winner = if won[0] { &two.second } else { &third };
    winner.wait_engine_after(0, LIMIT)?;
    winner.pool_check()
}

#[test]
fn state_dir_is_claimed() -> Result<()> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let state = daemon.folder().join("var/state");
    let mut other = Daemon::start(&DaemonOptions::default())?;
    other.stop()?;
    let config = other.folder().join("forebay.toml");
    let text = std::fs::read_to_string(&config)?;
    std::fs::write(&config, format!("state_dir = {state:?}\n{text}"))?;
    refused(other.start_again(), "uses the state folder")
}
