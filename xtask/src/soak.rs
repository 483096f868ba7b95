//! `cargo xtask soak`: all troubles at random, under verification.
//!
//! Purpose: deaths, bad devices, cut connections, commands that kill and changes of volumes, one by one and all at
//! the same time, for as many minutes as asked, from a seed; then many kills in a row, many pairs of points of
//! death, and many kills under machines' disks and of their drivers. Fails on any byte or error that is not explained; prints what was survived.
//! Design: the example `soak` and tests of the crate in `tests/` do the work, against the release build
//! with the devices that only tests use, or the program that `FOREBAY_BIN` names. Everything is built before
//! anything runs.
//! Not here: the troubles; guests, which `cargo xtask test guest` boots.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::process;

use crate::{cargo, target_folder};

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Beyond the time that was asked for: setting up, reading back.
const MORE: Duration = Duration::from_secs(15 * 60);
const KILLS_LIMIT: Duration = Duration::from_secs(60 * 60);

/// What is to be done.
struct Wanted {
    minutes: f64,
    seed: u64,
    kills: u64,
    pairs: u64,
    machine_kills: u64,
    client_kills: u64,
}

/// Runs it; true if all went well.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    let wanted = wanted(args)?;
    let program = program()?;
    let tests = |file: &str| {
        let mut tests = cargo(&["test", "--package", "forebay-tests", "--test", file]);
        tests.env("FOREBAY_BIN", &program);
        tests
    };
    for file in [
        "takeover",
        "takeover_points",
        "machines_vhost",
        "machines_pcie",
        "machines_client_kills",
    ] {
        process::run(tests(file).arg("--no-run"), BUILD_LIMIT)?;
    }
    let minutes = wanted.minutes.to_string();
    let mut soak = cargo(&["run", "--package", "forebay-tests", "--example", "soak"]);
    soak.env("FOREBAY_BIN", &program);
    soak.args(["--", "--minutes", &minutes, "--seed"]);
    soak.arg(wanted.seed.to_string());
    let limit = Duration::from_secs_f64(wanted.minutes * 60.0) + MORE;
    let mut survived = vec![format!("{minutes} minutes of troubles")];
    if let Err(error) = process::run(&mut soak, BUILD_LIMIT + limit) {
        eprintln!("soak: {error:#}");
        return Ok(false);
    }
    for (count, what, variable, file, test) in [
        (
            wanted.kills,
            "kills",
            "FOREBAY_KILLS",
            "takeover",
            "kill9_engine_verified",
        ),
        (
            wanted.pairs,
            "pairs of deaths",
            "FOREBAY_PAIRS",
            "takeover_points",
            "at_pairs",
        ),
        (
            wanted.machine_kills,
            "kills under a machine's virtio disk",
            "FOREBAY_MACHINE_KILLS",
            "machines_vhost",
            "kill9_engine_verified_vhost",
        ),
        (
            wanted.machine_kills,
            "kills under a machine's NVMe disk",
            "FOREBAY_MACHINE_KILLS",
            "machines_pcie",
            "kill9_engine_verified_pcie",
        ),
        (
            wanted.client_kills,
            "killed drivers of each kind of machine's disk",
            "FOREBAY_CLIENT_KILLS",
            "machines_client_kills",
            "client_kill_and_restart",
        ),
    ] {
        if count == 0 {
            continue;
        }
        let mut tests = tests(file);
        tests
            .env(variable, count.to_string())
            .env("FOREBAY_TEST_SEED", wanted.seed.to_string())
            .args([test, "--", "--nocapture", "--test-threads", "1"]);
        if let Err(error) = process::run(&mut tests, BUILD_LIMIT + KILLS_LIMIT) {
            eprintln!("{test}: {error:#}");
            return Ok(false);
        }
        survived.push(format!("{count} {what}"));
    }
    println!("survived: {} (seed {})", survived.join(", "), wanted.seed);
    Ok(true)
}

/// What is tested.
fn program() -> Result<PathBuf> {
    if let Some(program) = std::env::var_os("FOREBAY_BIN") {
        return Ok(program.into());
    }
    let mut build = cargo(&["build", "--release", "--package", "forebay"]);
    process::run(build.args(["--features", "test-device"]), BUILD_LIMIT)?;
    Ok(target_folder().join("release/forebay"))
}

fn wanted(args: &[String]) -> Result<Wanted> {
    let mut wanted = Wanted {
        minutes: 5.0,
        seed: 1,
        kills: 1000,
        pairs: 400,
        machine_kills: 200,
        client_kills: 50,
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let value = args
            .next()
            .with_context(|| format!("{arg} needs a value"))?;
        match arg.as_str() {
            "--minutes" => wanted.minutes = value.parse()?,
            "--seed" => wanted.seed = value.parse()?,
            "--kills" => wanted.kills = value.parse()?,
            "--pairs" => wanted.pairs = value.parse()?,
            "--machine-kills" => wanted.machine_kills = value.parse()?,
            "--client-kills" => wanted.client_kills = value.parse()?,
            other => bail!(
                "unknown argument '{other}'; there are: --minutes N, --seed N, --kills N, --pairs N, --machine-kills N, --client-kills N"
            ),
        }
    }
    Ok(wanted)
}
