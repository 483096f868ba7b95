//! Builds the workspace and its tests once, with one set of features, and finds the programs in
//! cargo's JSON.
//!
//! `forebay` includes the devices for tests. `cargo test -p CRATE` shares artifacts if its features
//! are equal.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use xtask::process;

use crate::cargo::cargo;
use crate::seconds;

const LIMIT: Duration = Duration::from_secs(30 * 60);
/// Devices and kill points for tests.
pub(crate) const FEATURES: [&str; 2] = ["--features", "forebay/test-device"];

#[derive(Debug, Clone)]
pub(crate) struct TestProgram {
    /// For example `forebay-pool`.
    pub(crate) package: String,
    /// A file in `tests/`, or the library's or program's name.
    pub(crate) target: String,
    /// The package's folder, where tests run.
    pub(crate) folder: PathBuf,
    pub(crate) path: PathBuf,
}

impl TestProgram {
    /// In the table of seconds.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }
}

pub(crate) struct Programs {
    /// In cargo's order.
    pub(crate) tests: Vec<TestProgram>,
    pub(crate) forebay: PathBuf,
}

pub(crate) fn build() -> Result<Programs> {
    let mut command = cargo(&["test", "--workspace", "--tests", "--no-run"]);
    command
        .args(FEATURES)
        .args(["--message-format", "json-render-diagnostics"]);
    let start = Instant::now();
    let mut lines = Vec::new();
    let ended = process::lines(&mut command, LIMIT, |line| lines.push(line.to_owned()))?;
    seconds::add("build", "tests", start.elapsed().as_secs_f64(), ended.cpu_s);
    if !ended.status.success() {
        bail!("the tests do not build: {}", ended.status);
    }
    let (mut tests, mut forebay) = (Vec::new(), None);
    for line in &lines {
        let message: Value = serde_json::from_str(line).context("cargo's messages")?;
        let Some(program) = message["executable"].as_str() else {
            continue;
        };
        let target = message["target"]["name"].as_str().unwrap_or_default();
        if message["profile"]["test"] == true {
            tests.push(test_program(&message, target, program)?);
        } else if target == "forebay" {
            forebay = Some(PathBuf::from(program));
        }
    }
    let forebay = forebay.context("cargo built no program `forebay`")?;
    Ok(Programs { tests, forebay })
}

fn test_program(message: &Value, target: &str, program: &str) -> Result<TestProgram> {
    let manifest = message["manifest_path"].as_str().map(Path::new);
    let folder = manifest.and_then(Path::parent);
    let id = message["package_id"].as_str().unwrap_or_default();
    Ok(TestProgram {
        package: package_name(id).context("cargo's messages")?.to_owned(),
        target: target.to_owned(),
        folder: folder.context("a manifest without a folder")?.to_owned(),
        path: program.into(),
    })
}

/// `path+file:///here/NAME#0.1.0`, or `path+file:///here/folder#NAME@0.1.0`.
fn package_name(id: &str) -> Option<&str> {
    let (folder, version) = id.rsplit_once('#')?;
    match version.split_once('@') {
        Some((name, _)) => Some(name),
        None => folder.rsplit('/').next(),
    }
}

/// Runs `program` as cargo would, with piped streams.
pub(crate) fn command(program: &TestProgram) -> Command {
    let mut command = Command::new(&program.path);
    command
        .current_dir(&program.folder)
        .env("CARGO_MANIFEST_DIR", &program.folder)
        // Shows a returned error's message without a backtrace.
        .env("RUST_LIB_BACKTRACE", "0")
        .stderr(Stdio::piped());
    command
}

#[cfg(test)]
mod tests {
    use super::package_name;

    #[test]
    fn packages_have_names() {
        let here = "path+file:///here";
        let name = |rest: &str| package_name(&format!("{here}/{rest}")).map(str::to_owned);
        assert_eq!(name("xtask#0.1.0").as_deref(), Some("xtask"));
        assert_eq!(
            name("tests#forebay-tests@0.1.0").as_deref(),
            Some("forebay-tests")
        );
        assert_eq!(package_name("xtask"), None);
    }
}
