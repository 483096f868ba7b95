//! What a target of machines is busy for, per I/O, at a pace that every target keeps: where the client is the limit, its
//! rates say little of the target.
//!
//! Purpose: of `cargo xtask bench vhost` and `pcie`, the shape `rate`: our client, 200,000 commands of 4 KiB a second.
//! Design: as [`super::busy`]: busy is what each target says of itself, the turns that found something to do.
//! Not here: who is compared with whom.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::process;

use super::busy::{RATE, Run};
use super::machine::CLIENT_CPU;
use super::measure::Clock;

const LIMIT: Duration = Duration::from_secs(60);

/// The name of a figure.
pub(super) fn name(device: &str, op: &str) -> String {
    format!("{device}_rate_{op}")
}

/// One run with a client, against a target of which `busy_ns` says how long it was busy so far.
pub(super) fn run(
    client: &mut Command,
    op: &str,
    seconds: u32,
    pid: u32,
    busy_ns: &dyn Fn() -> Result<f64>,
) -> Result<Run> {
    client
        .args([
            "--rw",
            &format!("rand{op}"),
            "--bs",
            "4096",
            "--depth",
            "32",
        ])
        .args(["--rate", &RATE.to_string()])
        .args(["--seconds", &seconds.to_string()])
        .args(["--cpu", &CLIENT_CPU.to_string()]);
    let before = busy_ns()?;
    let clock = Clock::start(&[pid])?;
    let text = process::text(client, LIMIT)?;
    let used = clock.used()?;
    let after = busy_ns()?;
    let report: Value = serde_json::from_str(&text)?;
    let figure = |name: &str| {
        let figure = report["lines"][0][name].as_f64();
        figure.with_context(|| format!("no {name} in {report}"))
    };
    Ok(Run {
        busy_ns: (after - before) / figure("ops")?.max(1.0),
        iops: figure("iops")?,
        others_cores: used.others_cores,
    })
}
