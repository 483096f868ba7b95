//! A pool file that is missing, truncated, in use, or foreign: each has a clear error, and no data
//! is lost.

use std::fs::OpenOptions;
use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, IoQueue, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};

const HOST: &str = "nqn.2026-01.test:host";
const LIMIT: Duration = Duration::from_secs(60);
const POOL_BYTES: u64 = 1 << 30;

fn open(daemon: &Daemon) -> Result<(Session, IoQueue)> {
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let mut session = Session::connect(address, nqn, HOST, &Options::default())?;
    let queue = session.open_queue(1)?;
    Ok((session, queue))
}

/// The command must fail and say this.
fn refused(result: Result<impl Sized>, says: &str) -> Result<()> {
    let error = result.err().context("it was not refused")?;
    let text = format!("{error:#}");
    ensure!(text.contains(says), "'{says}' is not in: {text}");
    Ok(())
}

/// The daemon must start without the pool and say this.
fn troubled(daemon: &mut Daemon, says: &str) -> Result<()> {
    daemon.start_again()?;
    let trouble = daemon.status()?["pool_trouble"].to_string();
    ensure!(trouble.contains(says), "'{says}' is not in: {trouble}");
    Ok(())
}

#[test]
fn troubles_of_the_pool_file_are_named_and_lose_nothing() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let path = daemon.folder().join("pool.img");
    let spec = format!("file:{}", path.display());
    daemon.create_pool(&["--device", &spec, "--size", &POOL_BYTES.to_string()])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "64M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    let before = daemon.cli(&["volume", "show", "t/v"])?;
    let write = IoOp::Write {
        lba: 0,
        blocks: 16,
        fua: true,
    };
    let (session, mut queue) = open(&daemon)?;
    queue.execute(&write, vec![7; 65536], LIMIT)?;
    drop(queue);
    session.close()?;

    // Another daemon, even with --force.
    let mut other = Daemon::start(&DaemonOptions::default())?;
    let taken = other.cli(&["pool", "create", "--device", &spec, "--force"]);
    refused(taken, "holds this device")?;
    other.stop()?;
    daemon.stop()?;

    // The daemon does not search this folder.
    let away = daemon.folder().join("away/pool.img");
    std::fs::create_dir(daemon.folder().join("away"))?;
    std::fs::rename(&path, &away)?;
    troubled(&mut daemon, "there is no such file")?;
    // The running daemon learns the file's new place.
    let moved = format!("file:{}", away.display());
    daemon.cli(&["pool", "open", "--device", &moved])?;
    daemon.wait_engine_after(0, LIMIT)?;
    let (session, mut queue) = open(&daemon)?;
    queue.execute(&write, vec![7; 65536], LIMIT)?;
    drop(queue);
    session.close()?;
    daemon.stop()?;
    std::fs::rename(&away, &path)?;
    troubled(&mut daemon, "there is no such file")?;
    daemon.cli(&["pool", "open", "--device", &spec])?;
    daemon.stop()?;

    // The second half of the file was never written.
    let file = OpenOptions::new().write(true).open(&path)?;
    file.set_len(POOL_BYTES / 2)?;
    troubled(&mut daemon, "it was truncated")?;
    daemon.stop()?;
    file.set_len(POOL_BYTES)?;

    daemon.start_again()?;
    let after = daemon.cli(&["volume", "show", "t/v"])?;
    ensure!(before["uuid"] == after["uuid"], "{before} became {after}");
    let (session, mut queue) = open(&daemon)?;
    let read = IoOp::Read { lba: 0, blocks: 16 };
    let got = queue.execute(&read, vec![0; 65536], LIMIT)?;
    ensure!(got.iter().all(|byte| *byte == 7), "data was lost");
    drop(queue);
    session.close()?;
    daemon.stop()
}

#[test]
fn a_pool_is_made_only_over_nothing_and_destroyed_to_nothing() -> Result<()> {
    let mut daemon = Daemon::start(&DaemonOptions::default())?;
    let path = daemon.folder().join("pool.img");
    let spec = format!("file:{}", path.display());
    let mut file = std::fs::File::create(&path)?;
    file.write_all(b"somebody's data")?;
    file.set_len(POOL_BYTES)?;
    refused(daemon.cli(&["pool", "create", "--device", &spec]), "force")?;
    ensure!(std::fs::read(&path)?.starts_with(b"somebody's data"));
    daemon.create_pool(&["--device", &spec, "--force"])?;
    daemon.cli(&["pool", "destroy", "pool"])?;
    // Labels that were left would prevent this.
    daemon.create_pool(&["--device", &spec])?;
    daemon.stop()
}
