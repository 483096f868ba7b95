//! `cargo xtask bench takeover`: what hosts see of an engine's death.
//!
//! Purpose: the longest time between two ends of commands, per export and death, above what the same
//! run has without a death; the fences' time apart. 64 exports at 200 commands per second each, every
//! byte judged; an error, a lost or a doubled command fails the benchmark.
//! Design: the example `takeover` of the crate in `tests/` does the work and
//! prints a figure a line.
//! Not here: what recording costs in life (`cargo xtask bench tcp`).

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::process;

use super::measure::{Clock, DISTURBED_CORES, Summary};
use super::{Options, forebay, profile};

const LIMIT: Duration = Duration::from_secs(900);

pub(crate) fn run(options: &Options) -> Result<()> {
    let program = forebay::build()?;
    let mut build = profile::cargo("build");
    build.args(["-p", "forebay-tests", "--example", "takeover"]);
    let mut command = Command::new(profile::build("takeover", &mut build)?);
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
    summary.print("takeover", options.json.as_deref())
}
