//! Rollback and deletion of snapshots, and snapshots in a full pool.

use anyhow::{Context, Result, ensure};
use forebay_tests::daemon::Daemon;
use forebay_tests::host::is_no_space;
use forebay_tests::lab::{BLOCK, Lab, LabOptions, MIB, MINUTE};
use forebay_tests::snapshots::{
    EXTENT_BLOCKS, SIZE, content, delete, ensure_same, export, host, read, read_all, refused,
    snapshot, wait_all_space_free, write,
};
use forebay_tests::wait;

fn done(daemon: &Daemon, args: &[&str]) -> Result<String> {
    let said = daemon.cli(args)?;
    Ok(said["done"].as_str().context("no `done`")?.to_owned())
}

#[test]
fn rollback_and_deletion() -> Result<()> {
    let mut lab = Lab::new(&LabOptions::volumes(2, SIZE))?;
    let address = lab.address;
    lab.hosts[0].fill()?;
    for name in ["t/a@one", "t/a@two"] {
        snapshot(&lab.daemon, name)?;
        export(&lab.daemon, name)?;
        lab.hosts[0].load(|commands| commands < 200)?;
    }
    snapshot(&lab.daemon, "t/b@one")?;
    let (one, two) = (content(address, "t/a@one")?, content(address, "t/a@two")?);
    ensure!(one != two && content(address, "t/a")? != two);

    let daemon = &lab.daemon;
    let to_one = ["volume", "rollback", "t/a@one"];
    {
        let (_session, mut queue) = host(address, "t/a").connect_soon()?;
        let before = read_all(&mut queue)?;
        refused(daemon, &to_one, &["t/a", "connected", "--while-connected"])?;
        ensure_same("t/a", &read_all(&mut queue)?, &before)?;
        daemon.cli(&["volume", "rollback", "t/a@one", "--while-connected"])?;
        ensure_same("t/a", &read_all(&mut queue)?, &one)?;
        let written = vec![9; BLOCK as usize];
        write(&mut queue, 5, written.clone())?;
        ensure!(read(&mut queue, 5, 1)? == written);
    }
    // The daemon needs a moment to see that the host is gone.
    wait::until("a rollback", MINUTE, || {
        let output = daemon
            .cli_command(&["volume", "rollback", "t/a@two"])
            .output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        let done = output.status.success();
        ensure!(done || text.contains("--while-connected"), "{text}");
        Ok(done.then_some(()))
    })?;
    for (name, wanted) in [("t/a", &two), ("t/a@one", &one), ("t/a@two", &two)] {
        ensure_same(name, &content(address, name)?, wanted)?;
    }
    refused(
        daemon,
        &["volume", "snapshot", "t/a@one"],
        &["already has", "a@one"],
    )?;
    refused(
        daemon,
        &["volume", "delete", "t/a@one"],
        &["t/a@one is exported", "forebay export delete t/a@one"],
    )?;
    refused(
        daemon,
        &["volume", "delete", "t/a"],
        &["t/a is exported", "forebay export delete t/a"],
    )?;

    daemon.cli(&["tenant", "create", "u"])?;
    let cloned = daemon.cli(&["volume", "clone", "t/a@one", "u/c"])?;
    ensure!(cloned["tenant"] == "u" && cloned["snapshot"].is_null());
    export(daemon, "u/c")?;
    daemon.cli(&["export", "delete", "t/a"])?;
    let said = done(daemon, &["volume", "delete", "t/a"])?;
    ensure!(
        said.contains("t/a@one") && said.contains("t/a@two") && said.contains("stay"),
        "{said}"
    );
    refused(daemon, &to_one, &["has no volume"])?;
    refused(daemon, &["tenant", "delete", "t"], &["snapshots"])?;
    daemon.cli(&["export", "delete", "t/a@one"])?;
    let said = done(daemon, &["volume", "delete", "t/a@one"])?;
    ensure!(
        said.contains("t/a@one") && said.contains("stays in use"),
        "{said}"
    );
    for (name, wanted) in [("u/c", &one), ("t/a@two", &two)] {
        ensure_same(name, &content(address, name)?, wanted)?;
    }
    daemon.cli(&["volume", "delete", "t/b@one"])?;
    for name in ["t/b", "t/a@two", "u/c"] {
        delete(daemon, name)?;
    }
    wait_all_space_free(daemon)?;
    daemon.cli(&["tenant", "delete", "t"])?;
    daemon.pool_check()
}

/// The number of MiB after some words.
fn mib_after(text: &str, words: &str) -> Result<f64> {
    let (_, rest) = text
        .split_once(words)
        .with_context(|| format!("no '{words}' in: {text}"))?;
    let (number, _) = rest
        .split_once(" MiB")
        .with_context(|| format!("no MiB: {text}"))?;
    Ok(number.trim().parse()?)
}

#[test]
fn a_small_pool_refuses_snapshots_and_copies() -> Result<()> {
    let mut lab = Lab::new(&LabOptions {
        devices: vec!["ram:FOLDER/small?size=64M".into()],
        ..LabOptions::volumes(1, 32 * MIB)
    })?;
    let reserve = |size| lab.daemon.cli(&["volume", "set", "t/a", "--reserve", size]);
    let take = ["volume", "snapshot", "t/a@s"];
    reserve("full")?;
    lab.hosts[0].fill()?;
    let text = refused(&lab.daemon, &take, &["forebay volume set --reserve"])?;
    let needed = mib_after(&text, "need")?;
    let promised = mib_after(&text, "can promise")?;
    ensure!(needed > promised && promised > 0.0, "{text}");

    reserve("0")?;
    lab.daemon.cli(&take)?;
    export(&lab.daemon, "t/a@s")?;
    let taken = content(lab.address, "t/a@s")?;
    let (_session, mut queue) = lab.hosts[0].connect_soon()?;
    let mut extents = (0..lab.hosts[0].shadow.blocks()).step_by(EXTENT_BLOCKS as usize);
    let full = extents.find(|lba| {
        let written = lab.hosts[0].write_with(&mut queue, lba + 1, 1);
        written.is_err()
    });
    let full = full.context("a copy needs no space")? + 1;
    let written = lab.hosts[0].write_with(&mut queue, full, 1);
    ensure!(is_no_space(&written), "{written:?}");
    // Reads continue. So do writes to extents that are already copied.
    lab.hosts[0].check()?;
    lab.hosts[0].write_with(&mut queue, 2, 1)?;
    ensure_same("t/a@s", &content(lab.address, "t/a@s")?, &taken)?;
    delete(&lab.daemon, "t/a@s")?;
    wait::until("space for writes", MINUTE, || {
        let written = lab.hosts[0].write_with(&mut queue, full, 1);
        ensure!(written.is_ok() || is_no_space(&written), "{written:?}");
        Ok(written.is_ok().then_some(()))
    })?;
    lab.hosts[0].fill()?;
    lab.finish()
}
