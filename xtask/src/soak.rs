//! `cargo xtask soak`: all troubles at random, under verification.
//!
//! Purpose: deaths, bad devices, cut connections and changes of volumes for as many minutes as asked,
//! from a seed; fails on any byte or error that is not explained. Then as many kills in a row as
//! `FOREBAY_KILLS` says (1000), and as many pairs of points of death as `FOREBAY_PAIRS` says (400).
//! Design: the example `soak` and tests of the crate in `tests/` do the work, against the release build
//! with the devices that only tests use, in its own target folder.
//! Not here: the troubles.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::process;

use crate::{cargo, target_folder};

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Beyond the time that was asked for: setting up, reading back.
const MORE: Duration = Duration::from_secs(15 * 60);
const KILLS_LIMIT: Duration = Duration::from_secs(60 * 60);

/// Runs it; true if all went well.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    let minutes = minutes(args)?;
    let mut build = cargo(&["build", "--release", "--package", "forebay"]);
    process::run(build.args(["--features", "test-device"]), BUILD_LIMIT)?;
    let program = target_folder().join("release/forebay");
    let limit = Duration::from_secs_f64(minutes * 60.0) + MORE;
    let mut soak = cargo(&["run", "--release", "--package", "forebay-tests"]);
    soak.args(["--example", "soak", "--"]).args(args);
    let soaked = process::run(soak.env("FOREBAY_BIN", &program), BUILD_LIMIT + limit);
    if let Err(error) = soaked {
        eprintln!("soak: {error:#}");
        return Ok(false);
    }
    for (variable, count, file, test) in [
        ("FOREBAY_KILLS", "1000", "takeover", "kill9_engine_verified"),
        ("FOREBAY_PAIRS", "400", "takeover_points", "kill_at_pairs"),
    ] {
        let count = std::env::var(variable).unwrap_or_else(|_| count.to_owned());
        if count == "0" {
            continue;
        }
        let mut tests = cargo(&["test", "--package", "forebay-tests", "--test", file, test]);
        tests
            .env("FOREBAY_BIN", &program)
            .args(["--", "--nocapture"]);
        if let Err(error) = process::run(&mut tests, BUILD_LIMIT + KILLS_LIMIT) {
            eprintln!("{test}: {error:#}");
            return Ok(false);
        }
    }
    Ok(true)
}

fn minutes(args: &[String]) -> Result<f64> {
    let mut minutes = 5.0;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let value = args
            .next()
            .with_context(|| format!("{arg} needs a value"))?;
        match arg.as_str() {
            "--minutes" => minutes = value.parse()?,
            "--seed" => drop(value.parse::<u64>()?),
            other => bail!("unknown argument '{other}'; there are: --minutes N, --seed N"),
        }
    }
    Ok(minutes)
}
