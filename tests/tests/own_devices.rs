//! A daemon opens its own pool again, although its predecessor or itself has the devices open: many
//! block devices, one that hangs, one that returns.
//!
//! They are loop devices, some over a file whose requests the test delays, and a FUSE file system.
//! Needs root.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::IoOp;
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::disk::LoopDevice;
use forebay_tests::hold::Hold;
use forebay_tests::host::Host;
use forebay_tests::shadow::Promise;
use forebay_tests::wait;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
const MINUTE: Duration = Duration::from_secs(60);

/// Prints a message if not.
fn has_loop_devices(folder: &Path) -> Result<bool> {
    let file = folder.join("try");
    File::create(&file)?.set_len(MIB)?;
    let made = LoopDevice::over(&file);
    if let Err(error) = &made {
        eprintln!("SKIPPED: no loop devices can be made here: {error:#}");
    }
    Ok(made.is_ok())
}

fn disk(folder: &Path, name: usize) -> Result<LoopDevice> {
    let file = folder.join(format!("disk{name}"));
    if !file.exists() {
        File::create(&file)?.set_len(128 * MIB)?;
    }
    LoopDevice::over(&file)
}

fn serve(specs: &[String]) -> Result<(Daemon, Host)> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    daemon.create_pool(&as_arguments(specs))?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    let address = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let mut host = Host::new(address, "t/v", SIZE, 4096, 1);
    host.fill()?;
    Ok((daemon, host))
}

fn as_arguments(specs: &[String]) -> Vec<&str> {
    specs.iter().flat_map(|spec| ["--device", spec]).collect()
}

fn open(daemon: &Daemon, specs: &[String]) -> Result<()> {
    let arguments = [vec!["pool", "open"], as_arguments(specs)].concat();
    daemon.cli(&arguments).map(drop)
}

/// `device list` fails while the pool is opened again.
fn wait_state(daemon: &Daemon, device: usize, state: &str) -> Result<()> {
    wait::until(&format!("device {device} is {state}"), MINUTE, || {
        let list = daemon.cli(&["device", "list"]).unwrap_or_default();
        Ok((list[device]["state"] == state).then_some(()))
    })
}

#[test]
fn pool_open_many_block_devices() -> Result<()> {
    let folder = tempfile::tempdir()?;
    if !has_loop_devices(folder.path())? {
        return Ok(());
    }
    let mut disks = (0..8)
        .map(|name| disk(folder.path(), name))
        .collect::<Result<Vec<_>>>()?;
    let specs: Vec<String> = disks.iter().map(LoopDevice::spec).collect();
    let (mut daemon, mut host) = serve(&specs)?;
    let record = daemon.folder().join("var/state/devices.json");

    // The engine lives, so its pool is known.
    let engine = daemon.processes()?.engine;
    daemon.kill_daemon()?;
    std::fs::remove_file(&record)?;
    daemon.start_again()?;
    ensure!(daemon.processes()?.engine == engine, "it serves on");
    for device in 0..8 {
        wait_state(&daemon, device, "online")?;
    }
    ensure!(record.exists(), "it is recorded again");
    host.check()?;

    // No process lives: the pool is where the command says.
    daemon.kill_all()?;
    std::fs::remove_file(&record)?;
    daemon.start_again()?;
    open(&daemon, &specs)?;
    host.verify(Promise::Acknowledged)?;
    daemon.stop()?;

    // A device returns: the daemon opens the other seven again, which it has open itself.
    for _ in 0..3 {
        drop(disks.pop());
        daemon.start_again()?;
        wait_state(&daemon, 7, "missing")?;
        disks.push(disk(folder.path(), 7)?);
        open(&daemon, &[disks[7].spec()])?;
        for device in 0..8 {
            wait_state(&daemon, device, "online")?;
        }
        daemon.stop()?;
    }
    daemon.start_again()?;
    host.verify(Promise::Acknowledged)?;
    daemon.pool_check()?;
    daemon.stop()
}

#[test]
fn hung_daemon_does_not_block() -> Result<()> {
    let folder = tempfile::tempdir()?;
    if !has_loop_devices(folder.path())? {
        return Ok(());
    }
    let hold = Hold::new(folder.path(), 128 * MIB)?;
    let first = disk(folder.path(), 0)?;
    let (mut daemon, mut host) = serve(&[first.spec()])?;
    // The second device gets a copy of the catalog.
    let hangs = LoopDevice::over(&hold.path())?;
    daemon.cli(&["device", "add", &hangs.spec()])?;
    let third = disk(folder.path(), 2)?;
    daemon.cli(&["device", "add", &third.spec()])?;
    let engine = daemon.processes()?.engine;

    hold.hold_writes(0..128 * MIB);
    let mut waiting = daemon.cli_command(&["tenant", "create", "u"]).spawn()?;
    hold.wait_held(1)?;
    let mut killed = daemon.replace_hanging_daemon()?;
    waiting.kill()?;
    waiting.wait()?;
    ensure!(killed.try_wait()?.is_none(), "it can't end");
    for device in [0, 2] {
        wait_state(&daemon, device, "online")?;
    }
    wait_state(&daemon, 1, "missing")?;
    ensure!(daemon.processes()?.engine == engine, "it serves on");
    host.verify(Promise::Acknowledged)?;

    hold.release();
    killed.wait()?;
    // No command is needed.
    wait_state(&daemon, 1, "online")?;
    host.check()?;
    daemon.pool_check()?;
    daemon.stop()
}

/// Reads a block of each extent.
fn failed_reads(host: &mut Host) -> Result<u64> {
    let (_session, mut queue) = host.connect()?;
    let mut failed = 0;
    for lba in (0..host.shadow.blocks()).step_by(16) {
        let op = IoOp::Read { lba, blocks: 1 };
        match queue.execute(&op, vec![0; 4096], MINUTE) {
            Ok(got) => host.shadow.judge(lba, &got)?,
            Err(forebay_initiator::Error::Status { .. }) => failed += 1,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(failed)
}

#[test]
fn returned_device_is_taken_back() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut hold = Hold::new(folder.path(), 128 * MIB)?;
    let first = folder.path().join("first");
    File::create(&first)?.set_len(128 * MIB)?;
    let specs = [&first, &hold.path()].map(|path| format!("file:{}", path.display()));
    let (mut daemon, mut host) = serve(&specs)?;

    // The device is taken back without a command.
    hold.die()?;
    ensure!(failed_reads(&mut host)? > 0, "it did not go away");
    hold.come_back()?;
    wait::until("the device is read again", MINUTE, || {
        Ok((failed_reads(&mut host).unwrap_or(1) == 0).then_some(()))
    })?;
    host.check()?;
    wait_state(&daemon, 1, "online")?;

    // The device is taken back by a command, which refuses a copy.
    hold.die()?;
    ensure!(failed_reads(&mut host)? > 0, "it did not go away again");
    hold.come_back()?;
    let (copied, copy) = (folder.path().join("copy"), first.clone());
    std::fs::copy(&copy, &copied)?;
    let error = open(&daemon, &[format!("file:{}", copied.display())])
        .err()
        .context("a copy was taken")?;
    ensure!(
        format!("{error:#}").contains("its label is that of device 0"),
        "{error:#}"
    );
    std::fs::remove_file(&copied)?;
    open(&daemon, &specs[1..])?;
    host.check()?;
    wait_state(&daemon, 1, "online")?;
    host.flush()?;
    let load = host.load(|commands| commands < 200)?;
    ensure!(!load.lost && load.device_errors == 0, "{load:?}");
    daemon.pool_check()?;
    daemon.stop()?;
    daemon.start_again()?;
    host.verify(Promise::Acknowledged)?;
    daemon.stop()
}
