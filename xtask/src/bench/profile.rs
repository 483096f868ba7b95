//! The build profile of benchmarks.
//!
//! `measure` is `release` without link-time optimization, with many units and incremental, so that
//! edits build in seconds. Published values need `--release`. Every run prints its profile;
//! `testing.md` has the difference.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::process;

static IS_RELEASE: AtomicBool = AtomicBool::new(false);
const LIMIT: Duration = Duration::from_secs(30 * 60);

pub(crate) fn set_release() {
    IS_RELEASE.store(true, Relaxed);
}

pub(crate) fn name() -> &'static str {
    match IS_RELEASE.load(Relaxed) {
        true => "release",
        false => "measure",
    }
}

/// `cargo COMMAND` with the profile.
pub(crate) fn cargo(command: &str) -> Command {
    let mut cargo = crate::cargo::cargo(&[command, "--profile", name()]);
    if !IS_RELEASE.load(Relaxed) {
        // It changes compilation units and hence instructions: set it everywhere.
        cargo.env("CARGO_INCREMENTAL", "1");
    }
    cargo
}

/// Runs a build; returns the last program it names.
pub(crate) fn build(what: &str, command: &mut Command) -> Result<PathBuf> {
    command.args(["--message-format", "json-render-diagnostics"]);
    let start = Instant::now();
    let mut built = None;
    let ended = process::lines(command, LIMIT, |line| {
        let message = serde_json::from_str::<Value>(line).unwrap_or_default();
        if let Some(program) = message["executable"].as_str() {
            built = Some(PathBuf::from(program));
        }
    })?;
    let name = format!("{what} ({})", name());
    crate::seconds::add("build", &name, start.elapsed().as_secs_f64(), ended.cpu_s);
    if !ended.status.success() {
        anyhow::bail!("{what}: {}", ended.status);
    }
    built.with_context(|| format!("cargo built no program of {what}"))
}
