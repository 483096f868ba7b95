//! The profile that benchmarks are built with.
//!
//! Purpose: seconds, not minutes, from an edit to a figure.
//! Design: `measure` optimizes as `release` does, without link-time optimization, in many units and
//! incrementally (`Cargo.toml`). Figures that are published come from `--release`, which is what users
//! run. Every run prints which it was.
//! Not here: how far the two differ (the book, `testing.md`).

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::process;

static IS_RELEASE: AtomicBool = AtomicBool::new(false);
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// From here on, `release`.
pub(crate) fn set_release() {
    IS_RELEASE.store(true, Relaxed);
}

/// The profile's name.
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
        // Units are cut otherwise without it, and instructions are others: the same everywhere.
        cargo.env("CARGO_INCREMENTAL", "1");
    }
    cargo
}

/// Runs a cargo command that builds; returns the last program that it names.
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
    built.with_context(|| format!("cargo named no program of {what}"))
}
