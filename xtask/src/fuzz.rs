//! `cargo xtask fuzz`: hostile bytes for the parsers.
//!
//! Purpose: runs the targets of `fuzz/`, each for a fixed short time, from its kept corpus on.
//! Design: cargo-fuzz drives libFuzzer; without a sanitizer, so that the stable compiler does, and
//! because what is fuzzed has no unsafe code. What a run finds new goes beneath `target/`, never into
//! the kept corpus; what breaks a target stays in `fuzz/artifacts`, with the command that shows it
//! again. cargo-fuzz is installed if it is missing (a minute or two).
//! Not here: the targets (`fuzz/fuzz_targets`), and making the corpora smaller (`cargo fuzz cmin`).

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::process;

use crate::suites::rust_files;
use crate::tally::Tally;
use crate::{cargo, repository, target_folder};

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
/// How long each target runs in the suite, in seconds.
const SUITE_SECONDS: u64 = 10;
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

fn each(targets: &[String], seconds: u64, tally: &mut Tally) -> Result<()> {
    install()?;
    for target in targets {
        println!("--- {target} ---");
        match one(target, seconds) {
            Ok(()) => tally.passed += 1,
            Err(error) => {
                tally.failed += 1;
                tally
                    .notes
                    .push(format!("failed: fuzz {target}: {error:#}"));
            }
        }
    }
    Ok(())
}

fn one(target: &str, seconds: u64) -> Result<()> {
    let build_folder = target_folder().join("fuzz");
    let found = build_folder.join("found").join(target);
    std::fs::create_dir_all(&found).with_context(|| found.display().to_string())?;
    let kept = repository().join("fuzz/corpus").join(target);
    if !std::fs::read_dir(&kept).is_ok_and(|mut files| files.next().is_some()) {
        bail!("it has no corpus: {} is empty", kept.display());
    }
    let mut command = cargo(&["fuzz", "run", "--sanitizer", "none", "--target-dir"]);
    command
        .arg(&build_folder)
        .arg(target)
        .arg(&found)
        .arg(&kept);
    command.args([
        "--".to_owned(),
        format!("-max_total_time={seconds}"),
        format!("-timeout={INPUT_LIMIT_S}"),
        format!("-rss_limit_mb={MEMORY_LIMIT_MIB}"),
        format!("-max_len={MAX_INPUT_BYTES}"),
        "-print_final_stats=1".to_owned(),
        "-verbosity=0".to_owned(),
    ]);
    let limit = BUILD_LIMIT + Duration::from_secs(2 * seconds);
    let status = process::lines(&mut command, limit, |line| println!("{line}"))?;
    if !status.success() {
        bail!("{status}; the input is in fuzz/artifacts/{target}");
    }
    Ok(())
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
        process::run(
            &mut cargo(&["install", "cargo-fuzz", "--locked"]),
            BUILD_LIMIT,
        )?;
    }
    Ok(())
}
