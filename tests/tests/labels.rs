//! Device labels and their conflicts: other names of a disk, foreign marks, older copies, larger
//! blocks.

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, IoQueue, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::disk::LoopDevice;
use forebay_tests::wait;

const HOST: &str = "nqn.2026-01.test:host";
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const SECOND_LABEL: u64 = 512 << 10;

fn refused(result: Result<impl Sized>, says: &str) -> Result<()> {
    let error = result.err().context("it was not refused")?;
    let text = format!("{error:#}");
    ensure!(text.contains(says), "'{says}' is not in: {text}");
    Ok(())
}

fn sparse(path: &Path, bytes: u64) -> Result<File> {
    let options = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    options.set_len(bytes)?;
    Ok(options)
}

fn spec(path: &Path) -> String {
    format!("file:{}", path.display())
}

fn connect(daemon: &Daemon, volume: &str) -> Result<(Session, IoQueue)> {
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = format!("nqn.2026-01.io.forebay:test:t.{volume}");
    let mut session = Session::connect(address, &nqn, HOST, &Options::default())?;
    let queue = session.open_queue(1)?;
    Ok((session, queue))
}

fn read_at(path: &Path, at: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut into = vec![0; bytes];
    File::open(path)?.read_exact_at(&mut into, at)?;
    Ok(into)
}

#[test]
fn two_names_of_one_disk() -> Result<()> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let path = daemon.folder().join("disk");
    sparse(&path, 128 * MIB)?;
    let (one, two) = (LoopDevice::over(&path)?, LoopDevice::over(&path)?);
    let (one, two) = (one.spec(), two.spec());
    let both = ["pool", "create", "--device", &one, "--device", &two];
    refused(daemon.cli(&both), "two names of one disk")?;
    refused(
        daemon.cli(&[&both[..], &["--force"]].concat()),
        "two names of one disk",
    )?;
    ensure!(daemon.status()?["pool"].is_null());
    daemon.create_pool(&["--device", &one])?;
    refused(daemon.cli(&["device", "add", &two]), "")?;
    refused(
        daemon.cli(&["device", "add", &two, "--force"]),
        "perhaps under another name",
    )?;
    daemon.pool_check()
}

/// `pool create` and `device add` wipe overridden marks at both ends; `pool open` wipes nothing.
#[test]
fn force_wipes_what_it_overrides() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let paths: Vec<PathBuf> = ["a", "b"].map(|name| daemon.folder().join(name)).to_vec();
    for path in &paths {
        let file = sparse(path, 64 * MIB)?;
        for (at, mark) in gpt_marks(64 * MIB) {
            file.write_all_at(mark, at)?;
        }
    }
    let [a, b] = [spec(&paths[0]), spec(&paths[1])];
    refused(daemon.cli(&["pool", "create", "--device", &a]), "GPT")?;
    daemon.create_pool(&["--device", &a, "--force"])?;
    refused(daemon.cli(&["device", "add", &b]), "GPT")?;
    daemon.cli(&["device", "add", &b, "--force"])?;
    for path in &paths {
        for (at, mark) in gpt_marks(64 * MIB) {
            ensure!(
                read_at(path, at, mark.len())? != mark,
                "{} at {at}",
                path.display()
            );
        }
    }
    daemon.stop()?;
    let last = 64 * MIB - 512;
    File::options()
        .write(true)
        .open(&paths[0])?
        .write_all_at(b"EFI PART", last)?;
    daemon.start_again()?;
    ensure!(read_at(&paths[0], last, 8)? == b"EFI PART");
    Ok(())
}

/// The protective MBR, the table and its backup, for 512-byte blocks.
fn gpt_marks(bytes: u64) -> [(u64, &'static [u8]); 3] {
    [
        (510, b"\x55\xaa"),
        (512, b"EFI PART"),
        (bytes - 512, b"EFI PART"),
    ]
}

/// Firmware that restores a GPT overwrites the first label.
#[test]
fn label_survives_a_restored_gpt() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let path = daemon.folder().join("disk");
    daemon.create_pool(&["--device", &spec(&path), "--size", "64M"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "1M"])?;
    daemon.stop()?;
    let file = File::options().write(true).open(&path)?;
    // Protective MBR, header and 128 entries, for blocks of 512 and of 4096 bytes.
    let table = vec![0x5a; 24 << 10];
    file.write_all_at(&table, 0)?;
    daemon.start_again()?;
    let shown = daemon.cli(&["volume", "show", "t/v"])?;
    ensure!(shown["size_bytes"] == MIB);
    wait::until("the warning", LIMIT, || {
        let pool = daemon.cli(&["pool", "show"])?.to_string();
        Ok(pool.contains("lies over the first copy").then_some(()))
    })?;
    refused(daemon.pool_check(), "lies over the first copy")?;
    daemon.stop()?;
    ensure!(read_at(&path, 0, table.len())? == table);
    daemon.start_again()?;
    daemon.cli(&["pool", "check", "--repair"])?;
    daemon.pool_check()?;
    daemon.stop()?;
    ensure!(read_at(&path, 0, 13)? == b"Forebay label");
    daemon.start_again()?;
    daemon.pool_check()
}

/// A pool without owner: `tests/fixtures/pool-label-3.img.gz`. Byte `i` of its volume `t/v` is
/// `i / 512 mod 251`.
#[test]
fn older_pool_opens_and_upgrades() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let path = daemon.folder().join("pool.img");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/pool-label-3.img.gz");
    let unpacked = Command::new("gzip")
        .arg("-dc")
        .arg(fixture)
        .stdout(File::create(&path)?)
        .status()?;
    ensure!(unpacked.success());
    let before = read_at(&path, 0, 8192)?;
    daemon.cli(&["pool", "open", "--device", &spec(&path)])?;
    daemon.wait_engine_after(0, LIMIT)?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    let expected: Vec<u8> = (0..MIB).map(|at| (at / 512 % 251) as u8).collect();
    let same = |daemon: &Daemon| -> Result<()> {
        let (session, mut queue) = connect(daemon, "v")?;
        let read = IoOp::Read { lba: 0, blocks: 16 };
        let found = queue.execute(&read, vec![0; 65536], LIMIT)?;
        ensure!(found == expected[..65536]);
        drop(queue);
        session.close()?;
        Ok(())
    };
    same(&daemon)?;
    wait::until("the warning", LIMIT, || {
        let pool = daemon.cli(&["pool", "show"])?.to_string();
        Ok(pool.contains("forebay pool upgrade").then_some(()))
    })?;
    daemon.stop()?;
    // The old version would still find its labels.
    let version = |at: usize, bytes: &[u8]| bytes.get(at + 16).copied();
    let after = read_at(&path, 0, 8192)?;
    ensure!(
        version(0, &after) == version(0, &before)
            && version(4096, &after) == version(4096, &before)
    );
    daemon.start_again()?;
    let (_session, mut queue) = connect(&daemon, "v")?;
    daemon.cli(&["pool", "upgrade"])?;
    let read = IoOp::Read { lba: 0, blocks: 16 };
    ensure!(queue.execute(&read, vec![0; 65536], LIMIT)? == expected[..65536]);
    drop((queue, _session));
    let upgraded = read_at(&path, 0, 8192)?;
    ensure!(
        upgraded[16] == 4,
        "the first copy has format {}",
        upgraded[16]
    );
    ensure!(upgraded[4096..].iter().all(|byte| *byte == 0));
    ensure!(read_at(&path, SECOND_LABEL, 13)? == b"Forebay label");
    daemon.pool_check()?;
    // Now it has an owner.
    let other = Daemon::start(&DaemonOptions::default())?;
    let name = LoopDevice::over(&path)?;
    refused(
        other.cli(&["pool", "open", "--device", &name.spec()]),
        "--take-over",
    )?;
    daemon.kill_all()?;
    daemon.start_again()?;
    ensure!(
        !daemon
            .cli(&["pool", "show"])?
            .to_string()
            .contains("pool upgrade")
    );
    same(&daemon)?;
    daemon.pool_check()
}

/// A device is copied, a volume deleted, another's written, and the copy put back.
#[test]
fn rolled_back_device_is_missing() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let paths: Vec<PathBuf> = (0..3)
        .map(|at| daemon.folder().join(format!("d{at}")))
        .collect();
    let specs: Vec<String> = paths.iter().map(|path| spec(path)).collect();
    let devices = specs.iter().flat_map(|spec| ["--device", spec.as_str()]);
    let args: Vec<&str> = devices.chain(["--size", "64M"]).collect();
    daemon.create_pool(&args)?;
    daemon.cli(&["tenant", "create", "t"])?;
    for volume in ["a", "b"] {
        daemon.cli(&["volume", "create", &format!("t/{volume}"), "--size", "48M"])?;
        daemon.cli(&["export", "create", &format!("t/{volume}"), "--any-host"])?;
    }
    fill(&daemon, "a", 0xaa)?;
    daemon.stop()?;
    let copy = daemon.folder().join("copy");
    std::fs::copy(&paths[2], &copy)?;
    daemon.start_again()?;
    daemon.cli(&["export", "delete", "t/a", "--disconnect-hosts"])?;
    daemon.cli(&["volume", "delete", "t/a"])?;
    fill(&daemon, "b", 0xbb)?;
    daemon.stop()?;
    std::fs::rename(&copy, &paths[2])?;

    daemon.start_again()?;
    let devices = daemon.cli(&["device", "list"])?;
    let text = devices[2].to_string();
    ensure!(
        devices[2]["state"] == "missing" && text.contains("older copy"),
        "{}",
        devices[2]
    );
    ensure!(
        text.contains("number 1") && text.contains("number 3"),
        "{}",
        devices[2]
    );
    // The copy's content is never shown.
    let (_session, mut queue) = connect(&daemon, "b")?;
    let mut unreadable = 0;
    for extent in 0..48 * 16 {
        let read = IoOp::Read {
            lba: extent * 16,
            blocks: 16,
        };
        match queue.execute(&read, vec![0; 65536], LIMIT) {
            Ok(found) => ensure!(found.iter().all(|byte| *byte == 0xbb)),
            Err(_) => unreadable += 1,
        }
    }
    ensure!(unreadable > 0);
    refused(
        daemon.cli(&["pool", "open", "--device", &specs[2]]),
        "older copy",
    )?;
    daemon.cli(&["pool", "open", "--device", &specs[2], "--force"])?;
    wait::until("the device is back", LIMIT, || {
        let state = daemon.cli(&["device", "list"])?[2]["state"].clone();
        Ok((state == "online").then_some(()))
    })?;
    daemon.pool_check()
}

fn fill(daemon: &Daemon, volume: &str, byte: u8) -> Result<()> {
    let (session, mut queue) = connect(daemon, volume)?;
    for extent in 0..48 * 16 {
        let write = IoOp::Write {
            lba: extent * 16,
            blocks: 16,
            fua: false,
        };
        queue.execute(&write, vec![byte; 65536], LIMIT)?;
    }
    queue.execute(&IoOp::Flush, vec![], LIMIT)?;
    drop(queue);
    session.close()?;
    Ok(())
}

/// On a 4096-byte disk, volumes of this pool would write less than a block.
#[test]
fn sector_size_change_is_refused() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let path = daemon.folder().join("disk");
    sparse(&path, 128 * MIB)?;
    let disk = LoopDevice::over(&path)?;
    daemon.create_pool(&["--device", &disk.spec()])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&[
        "volume",
        "create",
        "t/v",
        "--size",
        "1M",
        "--block-size",
        "512",
    ])?;
    daemon.stop()?;
    drop(disk);
    let larger = LoopDevice::with_blocks(&path, 4096)?;
    daemon.start_again()?;
    let opened = daemon.cli(&["pool", "open", "--device", &larger.spec()]);
    refused(opened, "blocks of 4096 bytes, but its label says 512")?;
    drop(larger);
    let right = LoopDevice::over(&path)?;
    daemon.cli(&["pool", "open", "--device", &right.spec()])?;
    daemon.wait_engine_after(0, LIMIT)?;
    daemon.stop()?;
    // The opposite case works.
    let folder = Daemon::start(&DaemonOptions::default())?;
    let path = folder.folder().join("larger");
    sparse(&path, 128 * MIB)?;
    let disk = LoopDevice::with_blocks(&path, 4096)?;
    let mut other = folder;
    other.create_pool(&["--device", &disk.spec()])?;
    other.stop()?;
    drop(disk);
    let smaller = LoopDevice::over(&path)?;
    other.start_again()?;
    other.cli(&["pool", "open", "--device", &smaller.spec()])?;
    other.wait_engine_after(0, LIMIT)?;
    other.pool_check()
}
