//! `cargo xtask fuzz`: runs each target of `fuzz/` for a fixed time from its corpus.
//!
//! cargo-fuzz drives libFuzzer without sanitizer: this allows the stable compiler, and the fuzzed
//! code is safe. Findings go below `target/`; failures stay in `fuzz/artifacts`, with a command to
//! reproduce them. A missing cargo-fuzz is installed. `cargo fuzz cmin` minimizes corpora.

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
/// Extra time, to read the corpus.
const RUN_LIMIT: Duration = Duration::from_secs(5 * 60);
/// Seconds per target in the suite; `cargo xtask soak` runs longer.
const SUITE_SECONDS: u64 = 3;
/// Time limit per input; on a machine that stalls, any may take seconds.
const INPUT_LIMIT_S: u64 = 60;
const MEMORY_LIMIT_MIB: u64 = 2048;
const MAX_INPUT_BYTES: u64 = 4096;

/// Runs the command. Returns whether all passed.
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
        bail!(
            "no target '{unknown}'; the targets are: {}",
            known.join(" ")
        );
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

/// Every target briefly; each counts as a test.
pub(crate) fn suite(tally: &mut Tally) -> Result<()> {
    each(&targets()?, SUITE_SECONDS, tally)
}

/// Every target for `seconds`.
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

fn build() -> Result<()> {
    let mut command = cargo(&["fuzz", "build", "--sanitizer", "none", "--target-dir"]);
    command.arg(build_folder());
    step("build", "fuzz targets", &mut command, BUILD_LIMIT)
}

/// Runs a target; returns its processor seconds.
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
            "{}; the input is in fuzz/artifacts/{target}, and `cargo fuzz run --sanitizer none {target} FILE` repeats it",
            ended.status
        );
    }
    Ok(ended.cpu_s)
}

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
