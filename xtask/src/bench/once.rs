//! Loads that use one place of each span of a volume once, in random order, and their medians.
//!
//! The client sleeps, because on a small machine a spinning one would starve the daemon. Medians
//! exclude disturbed runs unless all are.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::process;

use super::forebay::Forebay;
use super::measure::{Clock, DISTURBED_CORES, Sample, Summary, median};

pub(super) const CLIENT_CPU: usize = 1;
pub(super) const DEPTH: u32 = 32;
const LIMIT: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Copy)]
pub(super) struct Once {
    /// `randwrite` or `randread`.
    pub(super) pattern: &'static str,
    pub(super) io_bytes: u64,
    pub(super) once_per: u64,
    pub(super) depth: u32,
}

impl Once {
    pub(super) fn write(io_bytes: u64, once_per: u64) -> Self {
        Self {
            pattern: "randwrite",
            io_bytes,
            once_per,
            depth: DEPTH,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub(super) iops: f64,
    /// 0 if the client does not say.
    pub(super) mean_us: f64,
    pub(super) others_cores: f64,
}

/// A measurement with other programs' processor time, in cores.
pub(super) trait Measured {
    fn others_cores(&self) -> f64;

    fn is_quiet(&self) -> bool {
        self.others_cores() <= DISTURBED_CORES
    }
}

impl Measured for Run {
    fn others_cores(&self) -> f64 {
        self.others_cores
    }
}

impl Measured for Sample {
    fn others_cores(&self) -> f64 {
        self.others_cores
    }
}

/// Runs the load on a whole volume.
pub(super) fn load(program: &Path, forebay: &Forebay, nqn: &str, once: Once) -> Result<Run> {
    let mut command = Command::new(program);
    command
        .args(["--json", "bench", "load", "--addr"])
        .arg(format!("127.0.0.1:{}", forebay.port))
        .args(["--nqn", nqn, "--rw", once.pattern])
        .args(["--bs", &once.io_bytes.to_string()])
        .args(["--once-per", &once.once_per.to_string()])
        .args(["--qd", &once.depth.to_string(), "--seconds", "300"])
        .args(["--cpu", &CLIENT_CPU.to_string()]);
    run(forebay, &mut command)
}

/// Runs `forebay bench load` in any form.
pub(super) fn run(forebay: &Forebay, command: &mut Command) -> Result<Run> {
    let clock = Clock::start(&forebay.processes())?;
    let text = process::text(command, LIMIT)?;
    let others_cores = clock.used()?.others_user_cores;
    let report: serde_json::Value = serde_json::from_str(&text)?;
    let figure = |name: &str| {
        let value = report["lines"][0][name].as_f64();
        value.with_context(|| format!("the load generator gave no {name}"))
    };
    Ok(Run {
        iops: figure("iops")?,
        mean_us: figure("mean_us")?,
        others_cores,
    })
}

/// The median of undisturbed runs.
pub(super) fn quiet_median<T: Measured>(
    summary: &mut Summary,
    runs: &[T],
    figure: impl Fn(&T) -> f64,
) -> f64 {
    let quiet = runs.iter().filter(|run| run.is_quiet());
    let quiet: Vec<f64> = quiet.map(&figure).collect();
    summary.disturbed |= quiet.is_empty();
    match quiet.is_empty() {
        true => median(runs.iter().map(figure).collect()),
        false => median(quiet),
    }
}

/// The median of the quotients of each round, whose two runs were within a minute.
pub(super) fn quiet_ratio<T: Measured>(
    summary: &mut Summary,
    ours: &[T],
    theirs: &[T],
    figure: impl Fn(&T) -> f64,
) -> f64 {
    let pairs: Vec<_> = ours.iter().zip(theirs).collect();
    let ratio = |(ours, theirs): &(&T, &T)| figure(ours) / figure(theirs).max(1e-9);
    let quiet = pairs.iter().filter(|(a, b)| a.is_quiet() && b.is_quiet());
    let quiet: Vec<f64> = quiet.map(ratio).collect();
    summary.disturbed |= quiet.is_empty();
    match quiet.is_empty() {
        true => median(pairs.iter().map(ratio).collect()),
        false => median(quiet),
    }
}
