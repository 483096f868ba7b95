//! `cargo xtask bench pool-open`: how long a full pool takes to open.
//!
//! Purpose: opening takes time proportional to the metadata; this says how long it takes for 1 TiB of
//! 64 KiB extents, all mapped, in a row and at random, how large the metadata is, and that a commit does
//! not take longer in a full catalog.
//! Design: the pool crate's example `open_time` does the work and prints a figure a line.
//! Not here: cold caches, the daemon's own start.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::process;

use super::measure::{Clock, DISTURBED_CORES, Summary};
use super::{Options, profile};

const LIMIT: Duration = Duration::from_secs(1800);

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut build = profile::cargo("build");
    build.args(["-p", "forebay-pool", "--example", "open_time"]);
    let mut command = Command::new(profile::build("open_time", &mut build)?);
    if options.quick {
        command.arg("--quick");
    }
    let clock = Clock::start(&[])?;
    let printed = process::text(&mut command, LIMIT)?;
    let mut summary = Summary {
        disturbed: clock.used()?.others_cores > DISTURBED_CORES,
        ..Summary::default()
    };
    println!("{printed}");
    for line in printed.lines() {
        let (name, value) = line.split_once(' ').context("a line that is no figure")?;
        summary.put(name, value.trim().parse()?);
    }
    summary.print("pool-open", options.json.as_deref())
}
