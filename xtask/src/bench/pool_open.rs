//! `cargo xtask bench pool-open`: time to open a full pool, which is proportional to its metadata.
//!
//! 1 TiB of 64 KiB extents is mapped sequentially and at random. It also reports the metadata's
//! size, and that commits do not slow down. The pool's example `open_time` does the work, with warm
//! caches.

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
        let (name, value) = line.split_once(' ').context("a line without a figure")?;
        summary.put(name, value.trim().parse()?);
    }
    summary.print("pool-open", options.json.as_deref())
}
