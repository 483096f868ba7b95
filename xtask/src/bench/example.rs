//! Benchmarks that are examples of `tests/`, which print a figure a line.
//!
//! `cargo xtask bench takeover`: hosts' view of an engine's death. It reports the longest time between completions per export and death, less that of a run without
//! deaths, and separately the fences' time. 64 exports run 200 commands a second each; an error,
//! wrong byte, lost or doubled command fails.
//!
//! `cargo xtask bench mi`: answers of the out-of-band endpoint under load, and while engines die.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::process;

use super::measure::{Clock, DISTURBED_CORES, Summary};
use super::{Options, forebay, profile};

const LIMIT: Duration = Duration::from_secs(900);

pub(crate) fn run_takeover(options: &Options) -> Result<()> {
    run("takeover", options)
}

pub(crate) fn run_mi(options: &Options) -> Result<()> {
    run("mi", options)
}

fn run(example: &str, options: &Options) -> Result<()> {
    let program = forebay::build()?;
    let mut build = profile::cargo("build");
    build.args(["-p", "forebay-tests", "--example", example]);
    let mut command = Command::new(profile::build(example, &mut build)?);
    command.env("FOREBAY_BIN", program);
    if options.quick {
        command.arg("--quick");
    }
    let clock = Clock::start(&[])?;
    let printed = process::text(&mut command, LIMIT)?;
    let mut summary = Summary {
        disturbed: clock.used()?.others_cores > DISTURBED_CORES,
        ..Summary::default()
    };
    for line in printed.lines() {
        println!("{line}");
        let figure = line.split_once(' ').and_then(|(name, value)| {
            let value: f64 = value.trim().parse().ok()?;
            Some((name, value))
        });
        let (name, value) = figure.with_context(|| format!("no figure: {line}"))?;
        summary.put(name, value);
    }
    summary.print(example, options.json.as_deref())
}
