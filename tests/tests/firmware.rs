//! Firmware images: a signed program of another version takes over under verified load, and bad
//! ones are refused or left again.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use forebay_nvme::opcode::admin;
use forebay_tests::daemon::{Daemon, program};
use forebay_tests::lab::{self, Lab, LabOptions, MIB, Noticed};
use forebay_tests::out_of_band::{self, ALL_RIGHTS, command};
use forebay_tests::wait;
use serde_json::Value;

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn lab(hosts: u8) -> Result<Lab> {
    let options = LabOptions::volumes(hosts, 64 * MIB);
    let lab = Lab::new(&LabOptions {
        config: format!(
            "{}[firmware]\nkeys = [\"key.pub\"]\n{}",
            options.config,
            out_of_band::table(ALL_RIGHTS, "")
        ),
        arguments: vec!["--keep-engine".into()],
        ..options
    })?;
    lab.daemon
        .cli(&["firmware", "new-key", &at(&lab.daemon, "key")])?;
    Ok(lab)
}

fn at(daemon: &Daemon, name: &str) -> String {
    daemon.folder().join(name).display().to_string()
}

fn executable(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// A copy of the program with the last digit of its version changed, and that version.
fn other_build(daemon: &Daemon) -> Result<(PathBuf, String)> {
    let mut version = VERSION.to_owned();
    let last = version.pop().context("no version")?;
    version.push(if last == '9' { '8' } else { '9' });
    let (from, to) = (
        format!("forebay version {VERSION}"),
        format!("forebay version {version}"),
    );
    let mut bytes = fs::read(program())?;
    let places: Vec<usize> = (0..bytes.len() - from.len())
        .filter(|place| bytes[*place..].starts_with(from.as_bytes()))
        .collect();
    ensure!(!places.is_empty(), "the version is not in the program");
    for place in places {
        bytes[place..place + to.len()].copy_from_slice(to.as_bytes());
    }
    let path = daemon.folder().join("other-build");
    executable(&path, &bytes)?;
    Ok((path, version))
}

/// A script that behaves as the program, except for arguments that match `pattern`.
fn script(daemon: &Daemon, pattern: &str, instead: &str) -> Result<PathBuf> {
    let program = program().canonicalize()?;
    let text = format!(
        "#!/bin/sh\ncase \"$*\" in\n*--check*) ;;\n{pattern}) {instead};;\nesac\nexec {} \"$@\"\n",
        program.display()
    );
    let path = daemon.folder().join("script");
    executable(&path, text.as_bytes())?;
    Ok(path)
}

fn sign(daemon: &Daemon, key: &str, program: &Path) -> Result<String> {
    let image = at(daemon, "image");
    let program = program.display().to_string();
    daemon.cli(&[
        "firmware",
        "sign",
        "--key",
        &at(daemon, key),
        "--program",
        &program,
        &image,
    ])?;
    Ok(image)
}

fn refusal(daemon: &Daemon, args: &[&str]) -> Result<String> {
    let said = daemon.cli_command(args).output()?;
    ensure!(!said.status.success(), "{args:?} was accepted");
    Ok(String::from_utf8_lossy(&said.stderr).into_owned())
}

fn engine_version(daemon: &Daemon) -> Result<Value> {
    Ok(daemon.status()?["engine_version"].clone())
}

fn next(daemon: &Daemon) -> Result<Value> {
    Ok(daemon.cli(&["firmware", "slots"])?["next"].clone())
}

/// The daemon leaves its engine, unless it is told to end both.
fn finish(mut lab: Lab) -> Result<()> {
    lab.check()?;
    lab.daemon.shut_down()
}

#[test]
fn firmware_upgrades_under_load_and_the_slot_survives_restarts() -> Result<()> {
    let mut lab = lab(2)?;
    let (build, version) = other_build(&lab.daemon)?;
    let image = sign(&lab.daemon, "key", &build)?;
    let shown = lab.daemon.cli(&[
        "firmware",
        "show",
        &image,
        "--key",
        &at(&lab.daemon, "key.pub"),
    ])?;
    ensure!(
        shown["version"] == *version && shown["verified"] == true,
        "{shown}"
    );
    ensure!(engine_version(&lab.daemon)? == VERSION);
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work before the upgrade", 100)?;
        let done = daemon.cli(&["firmware", "install", &image])?;
        ensure!(engine_version(daemon)? == *version, "{done}");
        progress.more("work after the upgrade", 100)?;
        let generation = daemon.kill_engine()?.generation;
        daemon.wait_engine_after(generation, lab::MINUTE)?;
        ensure!(
            engine_version(daemon)? == *version,
            "an engine of another slot"
        );
        let engine = daemon.processes()?.engine;
        for _ in 0..2 {
            progress.more("work before the daemon's restart", 100)?;
            daemon.leave_engine()?;
            daemon.start_again()?;
            let status = daemon.status()?;
            ensure!(
                status["version"] == *version,
                "the daemon does not follow: {status}"
            );
            ensure!(status["engine_pid"] == engine, "{status}");
        }
        let slots = daemon.cli(&["firmware", "slots"])?;
        ensure!(slots["slots"][0]["version"] == VERSION, "{slots}");
        ensure!(slots["slots"][1]["version"] == *version, "{slots}");
        daemon.cli(&["firmware", "activate", "1"])?;
        ensure!(engine_version(daemon)? == VERSION);
        daemon.leave_engine()?;
        daemon.start_again()?;
        ensure!(daemon.status()?["version"] == VERSION);
        progress.more("work after the way back", 100)
    })?;
    let events = lab.events()?;
    ensure!(!events.contains_key("firmware_fell_back"), "{events:?}");
    finish(lab)
}

#[test]
fn refused_firmware_changes_nothing() -> Result<()> {
    let lab = lab(1)?;
    let daemon = &lab.daemon;
    let image = sign(daemon, "key", &program())?;
    let good = fs::read(&image)?;
    let install = ["firmware", "install", &image];
    let mut unsigned = good.clone();
    let end = unsigned.len();
    unsigned[end - 64..].fill(0);
    let mut changed = good.clone();
    changed[1000] ^= 1;
    for (bytes, why) in [
        (&unsigned[..], "it is not signed"),
        (&changed, "it was changed afterwards"),
        (&good[..end - 4096], "its end is missing"),
        (&good[..4000], "4000 bytes"),
    ] {
        fs::write(&image, bytes)?;
        let said = refusal(daemon, &install)?;
        ensure!(said.contains(why), "{said}");
    }
    daemon.cli(&["firmware", "new-key", &at(daemon, "other")])?;
    sign(daemon, "other", &program())?;
    let said = refusal(daemon, &install)?;
    ensure!(said.contains("another key signed it"), "{said}");
    let formats = script(daemon, "formats", "echo 0.0; exit 0")?;
    sign(daemon, "key", &formats)?;
    let said = refusal(daemon, &install)?;
    let ours = forebay_xlate::boundary::formats();
    ensure!(
        said.contains("0.0") && said.contains(&ours) && said.contains(VERSION),
        "{said}"
    );
    fs::remove_file(daemon.folder().join("key.pub"))?;
    let said = refusal(daemon, &install)?;
    ensure!(said.contains("key.pub"), "{said}");
    let said = refusal(daemon, &["firmware", "activate", "2"])?;
    ensure!(said.contains("slot 2 is empty"), "{said}");
    ensure!(next(daemon)? == 1 && daemon.processes()?.generation == 1);
    finish(lab)
}

#[test]
fn firmware_that_does_not_serve_goes_back() -> Result<()> {
    let mut lab = lab(2)?;
    let broken = script(&lab.daemon, "engine*", "exit 7")?;
    let image = sign(&lab.daemon, "key", &broken)?;
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work before the upgrade", 100)?;
        let said = refusal(daemon, &["firmware", "install", &image])?;
        ensure!(said.contains("exit code 7"), "{said}");
        ensure!(engine_version(daemon)? == VERSION && next(daemon)? == 1);
        progress.more("work after it", 100)
    })?;
    let events = lab.events()?;
    ensure!(events.contains_key("firmware_fell_back"), "{events:?}");
    finish(lab)
}

#[test]
fn firmware_whose_daemon_does_not_start_goes_back() -> Result<()> {
    let mut lab = lab(1)?;
    let broken = script(&lab.daemon, "serve*", "exit 7")?;
    let image = sign(&lab.daemon, "key", &broken)?;
    lab.daemon.cli(&["firmware", "install", &image])?;
    let engine = lab.daemon.processes()?.engine;
    lab.daemon.leave_engine()?;
    for _ in 0..3 {
        lab.daemon.begin_again()?;
        let ended = lab.daemon.wait_exit()?;
        ensure!(ended.code() == Some(7), "{ended}");
    }
    lab.daemon.start_again()?;
    wait::until("the way back", lab::MINUTE, || {
        Ok((next(&lab.daemon)? == 1).then_some(()))
    })?;
    ensure!(
        lab.daemon.processes()?.engine == engine,
        "the engine goes on"
    );
    let events = lab.events()?;
    ensure!(events.contains_key("firmware_fell_back"), "{events:?}");
    finish(lab)
}

/// The arguments of `forebay mi firmware`.
fn over_the_wire(daemon: &Daemon, image: &str) -> Vec<String> {
    let line = out_of_band::socket(daemon).display().to_string();
    ["mi", "--line", &line, "firmware", image]
        .map(str::to_owned)
        .to_vec()
}

fn as_text(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

#[test]
fn mi_firmware_commit_upgrades_under_load() -> Result<()> {
    let mut lab = lab(2)?;
    let (build, version) = other_build(&lab.daemon)?;
    let image = sign(&lab.daemon, "key", &build)?;
    let install = over_the_wire(&lab.daemon, &image);
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work before the upgrade", 100)?;
        daemon.cli(&as_text(&install))?;
        ensure!(engine_version(daemon)? == *version);
        progress.more("work after the upgrade", 100)?;
        // An active slot 2 takes the next image.
        let generation = daemon.processes()?.generation;
        daemon.cli(&as_text(&install))?;
        ensure!(daemon.processes()?.generation > generation);
        progress.more("work after the second upgrade", 100)
    })?;
    let mut client = out_of_band::client(&lab.daemon)?;
    let log = command(admin::GET_LOG_PAGE, 0, 0x03 | 127 << 16, 0);
    let (_, slots) = client.admin_read(0, log, 512)?;
    let revision = |at: usize| {
        String::from_utf8_lossy(&slots[at..at + 8])
            .trim()
            .to_owned()
    };
    ensure!(slots[0] == 2, "slot 2 runs: {:?}", &slots[..24]);
    ensure!(revision(8) == VERSION && revision(16) == version);
    let identify = command(admin::IDENTIFY, 0, 1, 0);
    let (_, controller) = client.admin_read(0, identify, 4096)?;
    ensure!(String::from_utf8_lossy(&controller[64..72]).trim() == version);
    finish(lab)
}

#[test]
fn mi_unsigned_image_is_refused() -> Result<()> {
    let lab = lab(1)?;
    let daemon = &lab.daemon;
    let image = sign(daemon, "key", &program())?;
    let mut unsigned = fs::read(&image)?;
    let end = unsigned.len();
    unsigned[end - 64..].fill(0);
    fs::write(&image, &unsigned)?;
    let install = over_the_wire(daemon, &image);
    let said = refusal(daemon, &as_text(&install))?;
    ensure!(said.contains("invalid firmware image"), "{said}");
    // The node says why.
    let audit = daemon
        .cli(&["events", "--audit", "--since", "2h"])?
        .to_string();
    ensure!(audit.contains("it is not signed"), "{audit}");
    ensure!(next(daemon)? == 1 && daemon.processes()?.generation == 1);
    finish(lab)
}

#[test]
fn mi_bad_image_goes_back() -> Result<()> {
    let mut lab = lab(2)?;
    let broken = script(&lab.daemon, "engine*", "exit 7")?;
    let image = sign(&lab.daemon, "key", &broken)?;
    let install = over_the_wire(&lab.daemon, &image);
    lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("work before the upgrade", 100)?;
        let said = refusal(daemon, &as_text(&install))?;
        ensure!(said.contains("firmware activation prohibited"), "{said}");
        ensure!(engine_version(daemon)? == VERSION && next(daemon)? == 1);
        progress.more("work after it", 100)
    })?;
    let events = lab.events()?;
    ensure!(events.contains_key("firmware_fell_back"), "{events:?}");
    finish(lab)
}
