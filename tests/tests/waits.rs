//! A long wait is reported with its cause and delays nothing else: for an older engine's lock (the
//! test's own), and for a slow `faulty:` device.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_device::faulty::{self, Faults};
use forebay_device::{Device, OpenOptions};
use forebay_initiator::{IoOp, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::wait;

const LIMIT: Duration = Duration::from_secs(60);
const SIZE: u64 = 1 << 30;

fn read(daemon: &Daemon) -> Result<Vec<u8>> {
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let host = "nqn.2026-01.test:host";
    let mut session = Session::connect(address, nqn, host, &Options::default())?;
    let mut queue = session.open_queue(1)?;
    let (lba, blocks) = (0, 1);
    let write = IoOp::Write {
        lba,
        blocks,
        fua: true,
    };
    queue.execute(&write, vec![7; 4096], LIMIT)?;
    Ok(queue.execute(&IoOp::Read { lba, blocks }, vec![0; 4096], LIMIT)?)
}

fn pool(device: &str) -> Result<Daemon> {
    let options = DaemonOptions {
        config: "[devices]\nallow_faulty = true\n".to_owned(),
        ..DaemonOptions::default()
    };
    let daemon = Daemon::start(&options)?;
    let spec = device.replace("FOLDER", &daemon.folder().display().to_string());
    daemon.create_pool(&["--device", &spec, "--size", &SIZE.to_string()])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "64M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    read(&daemon)?;
    Ok(daemon)
}

fn warnings(daemon: &Daemon) -> Result<String> {
    Ok(daemon.status()?["warnings"].to_string())
}

#[test]
fn older_engine_is_named() -> Result<()> {
    let mut daemon = pool("file:FOLDER/pool.img")?;
    let devices = daemon.cli(&["device", "list"])?;
    let offset = devices[0]["data_offset_bytes"].as_u64();
    daemon.stop()?;
    let path = daemon.folder().join("pool.img");
    let options = OpenOptions {
        data_offset_bytes: offset.context("data_offset_bytes")?,
        ..OpenOptions::default()
    };
    let older = Device::open(&format!("file:{}", path.display()).parse()?, &options)?;
    older.take_fence(1)?;
    daemon.start_again()?;
    let cause = format!("process {} (", std::process::id());
    let is_named =
        |text: &str| text.contains(&cause) && text.contains("pool.img") && text.contains("t/v");
    wait::until("a warning that names the older engine", LIMIT, || {
        Ok(is_named(&warnings(&daemon)?).then_some(()))
    })?;
    ensure!(daemon.status()?["health"] == "trouble");
    let reported = daemon.cli(&["events"])?.to_string();
    ensure!(is_named(&reported), "{reported}");
    ensure!(!reported.contains("seems to hang"), "a guess: {reported}");
    drop(older);
    wait::until("the warning's end", LIMIT, || {
        Ok((!warnings(&daemon)?.contains(&cause)).then_some(()))
    })?;
    read(&daemon)?;
    daemon.stop()
}

#[test]
fn slow_device_does_not_silence() -> Result<()> {
    let mut daemon = pool("faulty:FOLDER/fast.img")?;
    let slow = daemon.folder().join("slow.img");
    let spec = format!("faulty:{}", slow.display());
    let size = SIZE.to_string();
    daemon.cli(&["device", "add", &spec, "--create", "--size", &size])?;
    daemon.stop()?;
    set_delay(&slow, 4000)?;

    let begin = Instant::now();
    daemon.begin_again()?;
    let status = wait::until("an answer", LIMIT, || Ok(daemon.status().ok()))?;
    ensure!(status["engine_state"] == "opening", "{status}");
    ensure!(
        status["warnings"].to_string().contains("slow.img"),
        "{status}"
    );
    wait::until("the other volume", LIMIT, || Ok(read(&daemon).ok()))?;
    ensure!(
        begin.elapsed() < Duration::from_secs(30),
        "{:?}",
        begin.elapsed()
    );
    let devices = daemon.cli(&["device", "list"])?;
    ensure!(devices[1]["state"] == "missing", "{devices}");
    ensure!(
        devices[1]["why"].to_string().contains("too slowly"),
        "{devices}"
    );

    set_delay(&slow, 0)?;
    wait::until("the slow device", LIMIT, || {
        let devices = daemon.cli(&["device", "list"]).ok();
        Ok(devices.filter(|d| d[1]["state"] == "online").map(drop))
    })?;
    read(&daemon)?;
    daemon.stop()
}

fn set_delay(device: &Path, daemon_delay_ms: u64) -> Result<()> {
    let faults = Faults {
        daemon_delay_ms,
        ..Faults::default()
    };
    Ok(faulty::set(device, &faults)?)
}
