//! `cargo xtask test`: every test there is.
//!
//! Purpose: runs the suites one after the other, each with its seconds and a time limit, and ends with
//! a table and the line `N passed, N failed`.
//! Design: the suites are `unit` (every crate's own tests), `system` (the crate in `tests/`, against
//! the built `forebay`), `fuzz` (the targets in `fuzz/`, shortly) and `guest` (the files
//! `tests/tests/linux_guest_*.rs`, which boot a Linux guest and are marked ignored so that a plain
//! `cargo test` leaves them out). A suite that lacks something tries to install it; failing that it is
//! skipped visibly, which in CI is a failure.
//! Not here: the tests.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::{debian, process};

use crate::tally::Tally;
use crate::{cargo, fuzz, in_ci, repository, target_folder};

/// Files in `tests/tests/` that belong to the guest suite begin so.
const GUEST_FILES: &str = "linux_guest_";
/// This one too: it needs the same programs.
const LIBBLKIO_FILE: &str = "libblkio_vhost_user";
/// Files in `tests/tests/` that mount a FUSE file system of their own, to hold I/O in the kernel.
const MOUNTING_FILES: [&str; 3] = ["claims", "hold_selftest", "takeover_fence"];
/// Files in `tests/tests/` that need namespaces of their own: a root, a network.
const SANDBOX_FILES: [&str; 3] = ["docs_commands_run", "package", "service"];
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const SUITE_LIMIT: Duration = Duration::from_secs(20 * 60);

struct Suite {
    name: &'static str,
    run: fn(&mut Tally) -> Result<()>,
}

const SUITES: [Suite; 4] = [
    Suite {
        name: "unit",
        run: unit,
    },
    Suite {
        name: "system",
        run: system,
    },
    Suite {
        name: "fuzz",
        run: fuzz::suite,
    },
    Suite {
        name: "guest",
        run: guest,
    },
];

/// Runs the suites named in `args`, or all; true if all is well.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    for name in args {
        if !SUITES.iter().any(|suite| suite.name == name) {
            bail!("no suite '{name}'; there are: unit system fuzz guest");
        }
    }
    let mut results = Vec::new();
    for suite in SUITES {
        if !args.is_empty() && !args.iter().any(|name| name == suite.name) {
            continue;
        }
        println!("=== {} ===", suite.name);
        let start = Instant::now();
        let mut tally = Tally::default();
        let end = (suite.run)(&mut tally);
        tally.end(end.err().map(|error| format!("{error:#}")));
        if in_ci() {
            tally.refuse_skips();
        }
        let seconds = start.elapsed().as_secs_f64();
        println!("=== {}: {seconds:.1} s ===\n", suite.name);
        results.push((suite.name, seconds, tally));
    }
    Ok(summarize(&results))
}

fn summarize(results: &[(&str, f64, Tally)]) -> bool {
    for (suite, _, tally) in results {
        for note in &tally.notes {
            println!("{suite}: {note}");
        }
    }
    let mut all = Tally::default();
    println!(
        "{:<10}{:>10}{:>10}{:>10}{:>10}",
        "suite", "passed", "failed", "skipped", "seconds"
    );
    for (suite, seconds, tally) in results {
        println!(
            "{suite:<10}{:>10}{:>10}{:>10}{seconds:>10.1}",
            tally.passed, tally.failed, tally.skipped
        );
        all.passed += tally.passed;
        all.failed += tally.failed;
        all.skipped += tally.skipped;
    }
    println!("{}", all.closing_line());
    all.failed == 0
}

fn unit(tally: &mut Tally) -> Result<()> {
    let mut command = cargo(&[
        "test",
        "--workspace",
        "--exclude",
        "forebay-tests",
        "--no-fail-fast",
    ]);
    tests(&mut command, BUILD_LIMIT + SUITE_LIMIT, tally)
}

fn system(tally: &mut Tally) -> Result<()> {
    build_forebay()?;
    let mut command = cargo(&[
        "test",
        "--package",
        "forebay-tests",
        "--no-fail-fast",
        "--lib",
    ]);
    let is_root = rustix::process::geteuid().is_root();
    let can_mount = is_root && Path::new("/dev/fuse").exists();
    for file in test_files()? {
        if !can_mount && MOUNTING_FILES.contains(&file.as_str()) {
            tally.skip(&format!("{file} needs root and /dev/fuse"));
        } else if !is_root && SANDBOX_FILES.contains(&file.as_str()) {
            tally.skip(&format!("{file} needs root"));
        } else if !is_guest_file(&file) {
            command.args(["--test", &file]);
        }
    }
    forebay_is_built(&mut command);
    // A page shows how it is built for use: that is done, too.
    tests(&mut command, BUILD_LIMIT + SUITE_LIMIT, tally)
}

fn is_guest_file(file: &str) -> bool {
    file.starts_with(GUEST_FILES) || file == LIBBLKIO_FILE
}

fn guest(tally: &mut Tally) -> Result<()> {
    if let Some(missing) = debian::unavailable() {
        tally.skip(&format!("the guest's kernel and programs need {missing}"));
        return Ok(());
    }
    let needed = [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("zstd", "zstd"),
        ("xz", "xz-utils"),
        ("linux.uml", "user-mode-linux"),
    ];
    if let Err(error) = debian::install_on_host(&needed) {
        tally.skip(&format!("{error:#}"));
        return Ok(());
    }
    build_forebay()?;
    let mut command = cargo(&["test", "--package", "forebay-tests", "--no-fail-fast"]);
    for file in test_files()? {
        if is_guest_file(&file) {
            command.args(["--test", &file]);
        }
    }
    command.args(["--", "--include-ignored", "--test-threads=1"]);
    forebay_is_built(&mut command);
    tests(&mut command, SUITE_LIMIT, tally)
}

/// The system tests run the program, so cargo does not know that they need it. They need it with the devices that only
/// tests use.
fn build_forebay() -> Result<()> {
    let mut command = cargo(&["build", "--package", "forebay", "--features", "test-device"]);
    process::run(&mut command, BUILD_LIMIT)
}

fn forebay_is_built(command: &mut Command) {
    if std::env::var_os("FOREBAY_BIN").is_none() {
        command.env("FOREBAY_BIN", target_folder().join("debug/forebay"));
    }
}

/// The integration tests of `tests/`, by name.
fn test_files() -> Result<Vec<String>> {
    rust_files("tests/tests")
}

/// The names, sorted and without their ending, of the Rust files right in a folder of the repository.
pub(crate) fn rust_files(folder: &str) -> Result<Vec<String>> {
    let folder = repository().join(folder);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "rs") {
            names.extend(
                path.file_stem()
                    .map(|stem| stem.to_string_lossy().into_owned()),
            );
        }
    }
    names.sort();
    Ok(names)
}

/// Runs a cargo test command: shows and counts what it prints.
fn tests(command: &mut Command, limit: Duration, tally: &mut Tally) -> Result<()> {
    // An error that a test returns should be its message, not a trace of where it was made.
    command.env("RUST_LIB_BACKTRACE", "0");
    let status = process::lines(command, limit, |line| {
        println!("{line}");
        tally.read(line);
    })?;
    if !status.success() {
        bail!("cargo test: {status}");
    }
    Ok(())
}
