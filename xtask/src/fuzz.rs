//! `cargo xtask fuzz`: hostile bytes for the parsers.
//!
//! Purpose: runs the targets of `fuzz/`, each for a fixed short time, from its kept corpus on.
//! Design: cargo-fuzz drives libFuzzer; without a sanitizer, so that the stable compiler does, and
//! because what is fuzzed has no unsafe code. What a run finds new goes beneath `target/`, never into
//! the kept corpus; what breaks a target stays in `fuzz/artifacts`, with the command that shows it
//! again. cargo-fuzz is installed if it is missing (a minute or two).
//! Not here: the targets (`fuzz/fuzz_targets`), and making the corpora smaller (`cargo fuzz cmin`).

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::process;

use crate::cargo::{cargo, repository, step, target_folder};
use crate::seconds;
use crate::suites::rust_files;
use crate::tally::Tally;

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
/// What a target needs beside its time: its corpus is read first.
const RUN_LIMIT: Duration = Duration::from_secs(5 * 60);
/// How long each target runs in the suite, in seconds; `cargo xtask soak` runs them longer.
const SUITE_SECONDS: u64 = 3;
/// One input may take no longer than this; on a machine that stands still now and then, any may take some seconds.
const INPUT_LIMIT_S: u64 = 60;
const MEMORY_LIMIT_MIB: u64 = 2048;
const MAX_INPUT_BYTES: u64 = 4096;

/// `cargo xtask fuzz [--seconds N] [TARGET...]`; true if nothing broke.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    let mut seconds = SUITE_SECONDS;
    let mut wanted = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--seconds" {
            let value = args.next().context("--seconds needs a number")?;
            seconds = value.parse().context("--seconds")?;
        } else {
            wanted.push(arg.clone());
        }
    }
    let known = targets()?;
    if let Some(unknown) = wanted.iter().find(|name| !known.contains(name)) {
        bail!("no target '{unknown}'; there are: {}", known.join(" "));
    }
    let chosen = if wanted.is_empty() { known } else { wanted };
    let mut tally = Tally::default();
    each(&chosen, seconds, &mut tally)?;
    for note in &tally.notes {
        println!("{note}");
    }
    println!("{}", tally.closing_line());
    Ok(tally.failed == 0)
}

/// The suite: every target, shortly. Each that breaks nothing counts as a test that passed.
pub(crate) fn suite(tally: &mut Tally) -> Result<()> {
    each(&targets()?, SUITE_SECONDS, tally)
}

/// Every target for `seconds`, as `cargo xtask soak` runs them.
pub(crate) fn soak(seconds: u64) -> Result<()> {
    let mut tally = Tally::default();
    each(&targets()?, seconds, &mut tally)?;
    match tally.failed {
        0 => Ok(()),
        _ => bail!("{}", tally.notes.join("\n")),
    }
}

fn each(targets: &[String], seconds: u64, tally: &mut Tally) -> Result<()> {
    install()?;
    build()?;
    for target in targets {
        let start = Instant::now();
        let (end, cpu_s) = match one(target, seconds) {
            Ok(cpu_s) => (Ok(()), cpu_s),
            Err(error) => (Err(error), 0.0),
        };
        let name = format!("fuzz {target}");
        seconds::add("test", &name, start.elapsed().as_secs_f64(), cpu_s);
        match end {
            Ok(()) => tally.passed += 1,
            Err(error) => {
                tally.failed += 1;
                tally.notes.push(format!("failed: {name}: {error:#}"));
            }
        }
    }
    Ok(())
}

fn build_folder() -> PathBuf {
    target_folder().join("fuzz")
}

/// Builds every target.
fn build() -> Result<()> {
    let mut command = cargo(&["fuzz", "build", "--sanitizer", "none", "--target-dir"]);
    command.arg(build_folder());
    step("build", "fuzz targets", &mut command, BUILD_LIMIT)
}

/// Runs a target; returns the processor seconds that it used.
fn one(target: &str, seconds: u64) -> Result<f64> {
    let found = build_folder().join("found").join(target);
    std::fs::create_dir_all(&found).with_context(|| found.display().to_string())?;
    let kept = repository().join("fuzz/corpus").join(target);
    if !std::fs::read_dir(&kept).is_ok_and(|mut files| files.next().is_some()) {
        bail!("it has no corpus: {} is empty", kept.display());
    }
    let artifacts = repository().join("fuzz/artifacts").join(target);
    std::fs::create_dir_all(&artifacts).with_context(|| artifacts.display().to_string())?;
    let program = build_folder()
        .join("x86_64-unknown-linux-gnu/release")
        .join(target);
    let mut command = Command::new(program);
    command.arg(&found).arg(&kept);
    command.args([
        format!("-artifact_prefix={}/", artifacts.display()),
        format!("-max_total_time={seconds}"),
        format!("-timeout={INPUT_LIMIT_S}"),
        format!("-rss_limit_mb={MEMORY_LIMIT_MIB}"),
        format!("-max_len={MAX_INPUT_BYTES}"),
        "-print_final_stats=1".to_owned(),
        "-verbosity=0".to_owned(),
    ]);
    command.stderr(Stdio::piped());
    let limit = RUN_LIMIT + Duration::from_secs(2 * seconds);
    let mut said = String::new();
    let ended = process::lines(&mut command, limit, |line| {
        said.push_str(line);
        said.push('\n');
    })?;
    println!("--- fuzz {target} ---\n{said}");
    if !ended.status.success() {
        bail!(
            "{}; the input is in fuzz/artifacts/{target}, and `cargo fuzz run --sanitizer none {target} FILE` shows it again",
            ended.status
        );
    }
    Ok(ended.cpu_s)
}

/// The targets, by the names of their files.
fn targets() -> Result<Vec<String>> {
    rust_files("fuzz/fuzz_targets")
}

fn install() -> Result<()> {
    let version = cargo(&["fuzz", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !version.is_ok_and(|status| status.success()) {
        println!("cargo-fuzz is missing: building it");
        let mut install = cargo(&["install", "cargo-fuzz", "--locked", "--debug"]);
        step("build", "cargo-fuzz", &mut install, BUILD_LIMIT)?;
    }
    Ok(())
}
