//! `cargo xtask check`: what must hold besides the tests.
//!
//! Purpose: formatting, clippy with warnings denied, the order of the crates, licences and sources of
//! dependencies, documentation.
//! Design: every step runs, whatever the others say, and prints its seconds. `cargo-deny` is installed
//! if it is missing (two minutes on two cores).
//! Not here: the steps' configuration (`deny.toml`, the workspace's lints), the book (`docs`).

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use xtask::process;

use crate::{cargo, docs};

const LIMIT: Duration = Duration::from_secs(30 * 60);

/// The crates, ground floor first: each may use only those before it.
const ORDER: &[&str] = &[
    "forebay-nvme",
    "forebay-burst",
    "forebay-xlate",
    "forebay-device",
    "forebay-guest",
    "forebay-vfio-user",
    "forebay-virtio",
    "forebay-initiator",
    "forebay-pool",
    "forebay-engine",
    "forebay-control",
    "forebay",
];

type Step = (&'static str, fn() -> Result<()>);

const STEPS: [Step; 5] = [
    ("fmt", fmt),
    ("clippy", clippy),
    ("layers", layers),
    ("licences", licences),
    ("docs", docs::check),
];

/// Runs the steps named in `args`, or all; true if all is well.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    for name in args {
        if !STEPS.iter().any(|(step, _)| step == name) {
            bail!("no step '{name}'; there are: fmt clippy layers licences docs");
        }
    }
    let mut lines = Vec::new();
    let mut good = true;
    for (name, step) in STEPS {
        if !args.is_empty() && !args.iter().any(|wanted| wanted == name) {
            continue;
        }
        println!("=== {name} ===");
        let start = Instant::now();
        let verdict = match step() {
            Ok(()) => "ok",
            Err(error) => {
                println!("{error:#}");
                good = false;
                "FAILED"
            }
        };
        lines.push(format!(
            "check {name:<10}{verdict:<8}{:>8.1} s",
            start.elapsed().as_secs_f64()
        ));
    }
    for line in lines {
        println!("{line}");
    }
    Ok(good)
}

fn fmt() -> Result<()> {
    process::run(&mut cargo(&["fmt", "--all", "--check"]), LIMIT)
}

fn clippy() -> Result<()> {
    process::run(
        &mut cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "--deny",
            "warnings",
        ]),
        LIMIT,
    )
}

/// A crate uses only those below it.
fn layers() -> Result<()> {
    let metadata = process::output(
        &mut cargo(&["metadata", "--format-version", "1", "--no-deps"]),
        LIMIT,
    )?;
    let metadata: Value = serde_json::from_slice(&metadata).context("cargo metadata")?;
    let wrong = wrong_uses(&metadata);
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(())
}

fn wrong_uses(metadata: &Value) -> Vec<String> {
    let floor = |name: &str| ORDER.iter().position(|crate_name| *crate_name == name);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut wrong = Vec::new();
    for package in list(&metadata["packages"]) {
        let name = text(&package["name"]);
        let Some(own) = floor(&name) else {
            if name.starts_with("forebay") && name != "forebay-tests" {
                wrong.push(format!(
                    "{name} has no floor: see ORDER in xtask/src/check.rs"
                ));
            }
            continue;
        };
        for dependency in list(&package["dependencies"]) {
            if dependency["kind"] == "dev" {
                continue; // tests may use anything
            }
            let used = text(&dependency["name"]);
            if floor(&used).is_some_and(|floor| floor >= own) {
                wrong.push(format!("{name} must not use {used}, which is above it"));
            }
        }
    }
    wrong
}

fn licences() -> Result<()> {
    let version = cargo(&["deny", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !version.is_ok_and(|status| status.success()) {
        println!("cargo-deny is missing: building it");
        process::run(&mut cargo(&["install", "cargo-deny", "--locked"]), LIMIT)?;
    }
    let mut command: Command = cargo(&["deny", "check", "licenses", "bans", "sources"]);
    process::run(&mut command, LIMIT)
}

#[cfg(test)]
mod tests {
    use super::wrong_uses;
    use serde_json::json;

    #[test]
    fn a_crate_may_not_use_what_is_above_it() {
        let package = |name: &str, uses: &[&str]| {
            let uses: Vec<_> = uses.iter().map(|used| json!({"name": used})).collect();
            json!({"name": name, "dependencies": uses})
        };
        let good = json!({"packages": [
            package("forebay-engine", &["forebay-nvme", "libc"]),
            package("forebay-tests", &["forebay-engine"]),
            json!({"name": "forebay-nvme", "dependencies": [{"name": "forebay", "kind": "dev"}]}),
        ]});
        assert_eq!(wrong_uses(&good), Vec::<String>::new());
        let bad = json!({"packages": [
            package("forebay-nvme", &["forebay-engine"]),
            package("forebay-attic", &[]),
        ]});
        assert_eq!(wrong_uses(&bad).len(), 2);
    }
}
