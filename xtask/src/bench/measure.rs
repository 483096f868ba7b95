//! Medians, ratios and detection of disturbed runs.
//!
//! [`Clock`] compares the machine's busy time with that of the processes under test; the rest is
//! other programs' processor time. Runs with more than [`DISTURBED_CORES`] of it are excluded from
//! medians, unless all are.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};

/// Threshold of a disturbed run, in cores.
pub(crate) const DISTURBED_CORES: f64 = 0.15;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) iops: f64,
    pub(crate) mean_us: f64,
    pub(crate) p99_us: f64,
    /// Processor time of the target, in cores.
    pub(crate) target_cores: f64,
    /// Processor time of programs other than target and client, in cores.
    pub(crate) others_cores: f64,
}

pub(crate) struct Clock {
    at: Instant,
    machine_ticks: u64,
    target_ticks: u64,
    children_ticks: u64,
    others_user_ticks: u64,
    target: Vec<u32>,
}

pub(crate) struct Used {
    pub(crate) target_cores: f64,
    pub(crate) others_cores: f64,
    /// Other programs' user time, for benchmarks where kernel threads work for the target.
    pub(crate) others_user_cores: f64,
}

pub(super) const TICKS_PER_SECOND: f64 = 100.0;

impl Clock {
    /// `target` are the processes under test. The client must be a child that ends before
    /// [`Clock::used`].
    pub(crate) fn start(target: &[u32]) -> Result<Self> {
        Ok(Self {
            machine_ticks: machine_ticks()?,
            target_ticks: ticks_of(target)?,
            children_ticks: children_ticks()?,
            others_user_ticks: others_user_ticks(target)?,
            target: target.to_vec(),
            at: Instant::now(),
        })
    }

    pub(crate) fn used(&self) -> Result<Used> {
        let seconds = self.at.elapsed().as_secs_f64();
        let cores = |ticks: u64| ticks as f64 / TICKS_PER_SECOND / seconds;
        let target = cores(ticks_of(&self.target)?.saturating_sub(self.target_ticks));
        let client = cores(children_ticks()?.saturating_sub(self.children_ticks));
        let vm = cores(machine_ticks()?.saturating_sub(self.machine_ticks));
        let others_user = others_user_ticks(&self.target)?;
        Ok(Used {
            others_user_cores: cores(others_user.saturating_sub(self.others_user_ticks)),
            target_cores: target,
            others_cores: (vm - target - client).max(0.0),
        })
    }
}

/// Processor times: user, nice, system, idle, iowait, irq, softirq, steal.
fn machine_fields() -> Result<Vec<u64>> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    Ok(line
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect())
}

/// Including steal.
fn machine_ticks() -> Result<u64> {
    let fields = machine_fields()?;
    let busy = [0, 1, 2, 5, 6, 7];
    Ok(busy.iter().filter_map(|i| fields.get(*i)).sum())
}

/// User time except of `target`, this process and its ended children.
fn others_user_ticks(target: &[u32]) -> Result<u64> {
    let fields = machine_fields()?;
    let all: u64 = fields.iter().take(2).sum();
    // utime and cutime.
    let own = stat_fields("self")?;
    let mut ours: u64 = [11, 13].iter().filter_map(|i| own.get(*i)).sum();
    for pid in target {
        ours += stat_fields(&pid.to_string())?.get(11).copied().unwrap_or(0);
    }
    Ok(all.saturating_sub(ours))
}

fn stat_fields(pid: &str) -> Result<Vec<u64>> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let rest = stat.rsplit_once(')').context("no ')' in a stat file")?.1;
    Ok(rest
        .split_whitespace()
        .map(|field| field.parse().unwrap_or(0))
        .collect())
}

/// Processor time of processes, in [`TICKS_PER_SECOND`].
pub(super) fn ticks_of(pids: &[u32]) -> Result<u64> {
    let mut sum = 0;
    for pid in pids {
        let fields = stat_fields(&pid.to_string())?;
        // proc(5): utime and stime are fields 14 and 15; the state after ')' is field 3.
        sum += fields.get(11).copied().unwrap_or(0) + fields.get(12).copied().unwrap_or(0);
    }
    Ok(sum)
}

/// This process and its ended children.
pub(super) fn children_ticks() -> Result<u64> {
    let fields = stat_fields("self")?;
    Ok((11..15).filter_map(|i| fields.get(i)).sum())
}

/// The middle value, or 0.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// The undisturbed samples, or all with `false`.
pub(crate) fn quiet(samples: &[Sample]) -> (Vec<Sample>, bool) {
    let quiet: Vec<Sample> = samples
        .iter()
        .filter(|s| s.others_cores <= DISTURBED_CORES)
        .copied()
        .collect();
    if quiet.is_empty() {
        (samples.to_vec(), false)
    } else {
        (quiet, true)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Summary {
    pub(crate) disturbed: bool,
    pub(crate) metrics: BTreeMap<String, f64>,
}

impl Summary {
    pub(crate) fn put(&mut self, name: impl Into<String>, value: f64) {
        // Noise exceeds four digits.
        let digits = 4 - 1 - value.abs().max(1e-9).log10().floor() as i32;
        let scale = 10f64.powi(digits.clamp(0, 9));
        self.metrics
            .insert(name.into(), (value * scale).round() / scale);
    }

    /// Prints one line of JSON, and writes it to `file`.
    pub(crate) fn print(&self, bench: &str, file: Option<&std::path::Path>) -> Result<()> {
        let line = serde_json::json!({
            "bench": bench,
            "disturbed": self.disturbed,
            "metrics": self.metrics,
        });
        if let Some(file) = file {
            std::fs::write(file, format!("{line}\n"))
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        println!("{line}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quiet_samples() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        let sample = |others_cores| Sample {
            iops: 1.0,
            mean_us: 1.0,
            p99_us: 1.0,
            target_cores: 1.0,
            others_cores,
        };
        let (kept, quiet_found) = quiet(&[sample(0.0), sample(0.5)]);
        assert_eq!((kept.len(), quiet_found), (1, true));
        let (kept, quiet_found) = quiet(&[sample(0.4), sample(0.5)]);
        assert_eq!((kept.len(), quiet_found), (2, false));
    }
}
