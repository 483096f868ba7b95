//! A VM disk target's processor time per I/O at 200,000 commands a second: shape `rate` of
//! `bench vhost` and `pcie`.
//!
//! See [`super::busy`].

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::process;

use super::busy::{RATE, Run};
use super::measure::Clock;
use super::vm::CLIENT_CPU;

const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn name(device: &str, op: &str) -> String {
    format!("{device}_rate_{op}")
}

/// `busy_ns` returns the target's busy time so far.
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
