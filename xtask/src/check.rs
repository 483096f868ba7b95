//! `cargo xtask check`: formatting, clippy, crate order, licences, documentation, shape and words.
//!
//! All steps run despite failures. Clippy uses the tests' features, to share artifacts with
//! rustdoc. A missing `cargo-deny` is installed.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use xtask::process;

use crate::cargo::{cargo, step};
use crate::programs::FEATURES;
use crate::{docs, seconds, shape, words};

const LIMIT: Duration = Duration::from_secs(30 * 60);

/// A crate may use only those before it.
const ORDER: &[&str] = &[
    "forebay-nvme",
    "forebay-qos",
    "forebay-sim",
    "forebay-xlate",
    "forebay-rbd",
    "forebay-device",
    "forebay-guest",
    "forebay-vfio-user",
    "forebay-virtio",
    "forebay-mctp",
    "forebay-initiator",
    "forebay-pool",
    "forebay-engine",
    "forebay-control",
    "forebay",
];

type Step = (&'static str, fn() -> Result<()>);

const STEPS: [Step; 7] = [
    ("fmt", fmt),
    ("clippy", clippy),
    ("layers", layers),
    ("licences", licences),
    ("docs", docs::check),
    ("shape", shape::check),
    ("words", words::check),
];

/// Runs the named steps or all. Returns whether all passed.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    for name in args {
        if !STEPS.iter().any(|(step, _)| step == name) {
            bail!("no step '{name}'; the steps are: fmt clippy layers licences docs shape words");
        }
    }
    let start = Instant::now();
    let wanted = |step: &&Step| args.is_empty() || args.iter().any(|name| name == step.0);
    let failed = failures(STEPS.iter().filter(wanted));
    seconds::print(start.elapsed().as_secs_f64());
    for failure in &failed {
        println!("check {failure}");
    }
    Ok(failed.is_empty())
}

/// Runs all steps; returns the failures.
pub(crate) fn all() -> Vec<String> {
    failures(STEPS.iter())
}

fn failures<'a>(steps: impl Iterator<Item = &'a Step>) -> Vec<String> {
    let run = |(name, step): &Step| Some(format!("{name} failed: {:#}", step().err()?));
    steps.filter_map(run).collect()
}

fn fmt() -> Result<()> {
    let mut command = cargo(&["fmt", "--all", "--check"]);
    step("check", "fmt", &mut command, LIMIT)
}

fn clippy() -> Result<()> {
    let mut command = cargo(&["clippy", "--workspace", "--all-targets"]);
    command.args(FEATURES).args(["--", "--deny", "warnings"]);
    step("check", "clippy", &mut command, LIMIT)
}

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
                    "{name} has no layer: add it to ORDER in xtask/src/check.rs"
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
                wrong.push(format!(
                    "{name} must not use {used}, which is in a higher layer"
                ));
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
        // It runs for a second, so skip optimization.
        let mut install = cargo(&["install", "cargo-deny", "--locked", "--debug"]);
        step("build", "cargo-deny", &mut install, LIMIT)?;
    }
    let mut command = cargo(&["deny", "check", "licenses", "bans", "sources"]);
    step("check", "licences", &mut command, LIMIT)
}

#[cfg(test)]
mod tests {
    use super::wrong_uses;
    use serde_json::json;

    #[test]
    fn a_crate_may_not_depend_on_a_higher_layer() {
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
