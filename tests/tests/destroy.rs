//! Destructive commands need the name of their object, and are refused while a host or VM uses it.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_initiator::{IoOp, IoQueue, Options, Session};
use forebay_tests::daemon::{Daemon, DaemonOptions};
use forebay_tests::vm::{self, Frontend};

const LIMIT: Duration = Duration::from_secs(60);
const HOST: &str = "nqn.2026-01.test:host";

fn refused(daemon: &Daemon, args: &[&str], says: &[&str]) -> Result<()> {
    let output = daemon.cli_command(args).output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "{args:?} was not refused");
    for part in says {
        ensure!(text.contains(part), "{args:?}: '{part}' is not in: {text}");
    }
    Ok(())
}

fn connect(daemon: &Daemon) -> Result<(Session, IoQueue)> {
    let address: SocketAddr = format!("127.0.0.1:{}", daemon.port()).parse()?;
    let nqn = "nqn.2026-01.io.forebay:test:t.v";
    let mut session = Session::connect(address, nqn, HOST, &Options::default())?;
    let queue = session.open_queue(1)?;
    Ok((session, queue))
}

fn works(queue: &mut IoQueue) -> Result<()> {
    let read = IoOp::Read { lba: 0, blocks: 1 };
    queue.execute(&read, vec![0; 4096], LIMIT)?;
    Ok(())
}

#[test]
fn destroy_needs_the_name() -> Result<()> {
    let daemon = Daemon::start(&DaemonOptions::default())?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", "512M", "--name", "fast"])?;
    daemon.cli(&["tenant", "create", "t"])?;
    daemon.cli(&["volume", "create", "t/v", "--size", "16M"])?;
    daemon.cli(&["export", "create", "t/v", "--any-host"])?;
    let (session, mut queue) = connect(&daemon)?;

    refused(&daemon, &["pool", "destroy"], &["NAME|UUID"])?;
    refused(
        &daemon,
        &[
            "pool",
            "destroy",
            "pool",
            "--delete-volumes",
            "--disconnect-hosts",
        ],
        &["no pool pool", "fast"],
    )?;
    refused(&daemon, &["pool", "destroy", "fast"], &["--delete-volumes"])?;
    refused(
        &daemon,
        &["pool", "destroy", "fast", "--delete-volumes"],
        &[HOST, "t/v", "--disconnect-hosts"],
    )?;
    refused(&daemon, &["pool", "destroy", "fast", "--forget"], &["open"])?;
    let says = &[HOST, "t/v", "--disconnect-hosts"];
    refused(&daemon, &["export", "delete", "t/v"], says)?;
    refused(&daemon, &["export", "set", "t/v", "--listed-hosts"], says)?;
    works(&mut queue)?;
    let listed = ["export", "set", "t/v", "--listed-hosts", "--add-host", HOST];
    daemon.cli(&listed)?;
    works(&mut queue)?;
    let removed = ["export", "set", "t/v", "--remove-host", HOST];
    refused(&daemon, &removed, says)?;
    refused(&daemon, &["volume", "delete", "t/v"], &["exported"])?;
    refused(&daemon, &["tenant", "delete", "t"], &["volume"])?;
    works(&mut queue)?;
    daemon.cli(&[&removed[..], &["--disconnect-hosts"]].concat())?;
    ensure!(works(&mut queue).is_err(), "the host was not disconnected");
    drop((queue, session));
    daemon.cli(&["export", "set", "t/v", "--any-host"])?;
    // A command waits for a host that is disconnecting.
    let (session, queue) = connect(&daemon)?;
    drop((queue, session));
    daemon.cli(&["export", "delete", "t/v"])?;

    let target = vm::export_as(&daemon, "t/v", Frontend::NvmePcie, &[])?;
    let disk = vm::connect(&target, &Default::default())?;
    let says = &["a VM", "t/v"];
    refused(&daemon, &["export", "delete", "t/v"], says)?;
    let destroy = ["pool", "destroy", "fast", "--delete-volumes"];
    refused(&daemon, &destroy, says)?;
    let pool = daemon.cli(&["pool", "show"])?;
    let uuid = pool["uuid"].as_str().context("a UUID")?.to_owned();
    let destroy = [
        "pool",
        "destroy",
        &uuid,
        "--delete-volumes",
        "--disconnect-hosts",
    ];
    daemon.cli(&destroy)?;
    drop(disk);
    refused(&daemon, &["pool", "show"], &["no pool"])
}
