//! `cargo xtask test`: builds and runs all test suites.
//!
//! Suites are `unit` (crates), `system` (`tests/`), `fuzz` (briefly) and `guest`:
//! `tests/tests/linux_guest_*.rs`, which boot Linux and are ignored by plain `cargo test`. Programs
//! run concurrently (`jobs`) with time limits; their output is printed at their end. A suite tries
//! to install its prerequisites, otherwise it is skipped, which fails in CI.

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::{debian, process};

use crate::cargo::{in_ci, repository};
use crate::jobs::{self, Company, Job};
use crate::programs::{self, TestProgram};
use crate::tally::Tally;
use crate::{fuzz, seconds};

/// Prefix of the guest suite's files.
const GUEST_FILES: &str = "linux_guest_";
/// Also a guest file: it needs the same programs.
const LIBBLKIO_FILE: &str = "libblkio_vhost_user";
/// Files that mount FUSE, to hold I/O in the kernel.
const MOUNTING_FILES: [&str; 4] = ["claims", "hold_selftest", "own_devices", "takeover_fence"];
/// Files that need namespaces: a root or a network.
const SANDBOX_FILES: [&str; 3] = ["docs_commands_run", "package", "service"];
/// Files that run Debian's programs.
const DEBIAN_FILES: [&str; 2] = ["ceph_cluster", "out_of_band_nvme_cli"];
/// Files that measure, and must run alone.
const ALONE_FILES: [&str; 1] = ["idle"];
const SYSTEM_PACKAGE: &str = "forebay-tests";
const LIMIT: Duration = Duration::from_secs(20 * 60);

const SUITES: [&str; 4] = ["unit", "system", "fuzz", "guest"];

fn suite_of(program: &TestProgram) -> &'static str {
    match program.package == SYSTEM_PACKAGE {
        true if is_guest_file(&program.target) => "guest",
        true => "system",
        false => "unit",
    }
}

fn is_guest_file(file: &str) -> bool {
    file.starts_with(GUEST_FILES) || file == LIBBLKIO_FILE
}

/// A job's result.
pub(crate) struct Done {
    suite: &'static str,
    tally: Tally,
}

impl Done {
    fn skipped(suite: &'static str, why: &str) -> Self {
        let mut tally = Tally::default();
        tally.skip(why);
        Self { suite, tally }
    }

    /// A finished job's tests and end.
    pub(crate) fn new(suite: &'static str, mut tally: Tally, end: Result<()>) -> Self {
        tally.end(end.err().map(|error| format!("{error:#}")));
        Self { suite, tally }
    }
}

/// Runs the named suites or all. Returns whether all passed.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    if let Some(unknown) = args.iter().find(|name| !SUITES.contains(&name.as_str())) {
        bail!("no suite '{unknown}'; the suites are: {}", SUITES.join(" "));
    }
    let is_wanted = |suite: &&str| args.is_empty() || args.iter().any(|name| name == suite);
    let wanted: Vec<&str> = SUITES.into_iter().filter(is_wanted).collect();
    Ok(all(&wanted, Vec::new()))
}

/// Runs suites beside `others` and prints the tables. Returns whether all passed.
pub(crate) fn all(suites: &[&'static str], others: Vec<Job<Done>>) -> bool {
    let start = Instant::now();
    let mut results: Vec<Done> = suites
        .iter()
        .map(|suite| Done::new(suite, Tally::default(), Ok(())))
        .collect();
    let mut add = |done: Done| match results.iter_mut().find(|known| known.suite == done.suite) {
        Some(known) => known.tally.add(done.tally),
        None => results.push(done),
    };
    let mut queue = Vec::new();
    let mut short = Vec::new();
    if suites.iter().any(|suite| *suite != "fuzz") {
        match programs::build() {
            Ok(built) => {
                for program in built.tests {
                    let suite = suite_of(&program);
                    if !suites.contains(&suite) {
                        continue;
                    }
                    match lacks(suite, &program.target) {
                        Some(why) => add(Done::skipped(suite, &why)),
                        None if suite == "unit" => short.push(job(suite, program, &built.forebay)),
                        None => queue.push(job(suite, program, &built.forebay)),
                    }
                }
            }
            Err(error) => add(Done::new("unit", Tally::default(), Err(error))),
        }
    }
    // Longest first: guests, then system tests.
    queue.sort_by_key(|job| job.company != Company::Guest);
    queue.extend(others);
    if suites.contains(&"fuzz") {
        queue.push(Job {
            company: Company::Any,
            work: Box::new(|| {
                let mut tally = Tally::default();
                let end = fuzz::suite(&mut tally);
                Done::new("fuzz", tally, end)
            }),
        });
    }
    queue.extend(short);
    jobs::run(queue, &mut add);
    if in_ci() {
        results
            .iter_mut()
            .for_each(|done| done.tally.refuse_skips());
    }
    seconds::print(start.elapsed().as_secs_f64());
    summarize(&results)
}

fn summarize(results: &[Done]) -> bool {
    for Done { suite, tally } in results {
        for note in &tally.notes {
            println!("{suite}: {note}");
        }
    }
    let mut all = Tally::default();
    println!(
        "{:<10}{:>10}{:>10}{:>10}",
        "suite", "passed", "failed", "skipped"
    );
    for Done { suite, tally } in results {
        println!(
            "{suite:<10}{:>10}{:>10}{:>10}",
            tally.passed, tally.failed, tally.skipped
        );
        all.passed += tally.passed;
        all.failed += tally.failed;
        all.skipped += tally.skipped;
    }
    println!("{}", all.closing_line());
    all.failed == 0
}

/// Runs a test program and prints its output.
fn job(suite: &'static str, program: TestProgram, forebay: &Path) -> Job<Done> {
    let company = match suite {
        "guest" => Company::Guest,
        _ if ALONE_FILES.contains(&program.target.as_str()) => Company::Alone,
        _ => Company::Any,
    };
    let mut command = programs::command(&program);
    if suite == "guest" {
        command.args(["--include-ignored", "--test-threads=1"]);
    }
    if std::env::var_os("FOREBAY_BIN").is_none() {
        command.env("FOREBAY_BIN", forebay);
    }
    let work = move || {
        let (mut tally, mut said) = (Tally::default(), String::new());
        let start = Instant::now();
        let ended = process::lines(&mut command, LIMIT, |line| {
            tally.read(line);
            said.push_str(line);
            said.push('\n');
        });
        let wall_s = start.elapsed().as_secs_f64();
        let name = program.name();
        let cpu_s = ended.as_ref().map_or(0.0, |ended| ended.cpu_s);
        seconds::add("test", &name, wall_s, cpu_s);
        println!("=== {name}: {wall_s:.1} s ===\n{said}");
        let end = ended.and_then(|ended| match ended.status.success() {
            true => Ok(()),
            false => bail!("{name}: {}", ended.status),
        });
        Done::new(suite, tally, end)
    };
    Job {
        company,
        work: Box::new(work),
    }
}

/// Why a test program cannot run here, if so.
fn lacks(suite: &str, file: &str) -> Option<String> {
    let is_root = rustix::process::geteuid().is_root();
    let can_mount = is_root && Path::new("/dev/fuse").exists();
    match suite {
        "system" if !can_mount && MOUNTING_FILES.contains(&file) => {
            Some(format!("{file} needs root and /dev/fuse"))
        }
        "system" if !is_root && SANDBOX_FILES.contains(&file) => Some(format!("{file} needs root")),
        "system" if DEBIAN_FILES.contains(&file) => {
            debian::unavailable().map(|missing| format!("{file} needs {missing}"))
        }
        "guest" => guests_lack(),
        _ => None,
    }
}

/// What guests lack here, after an attempt to install it.
fn guests_lack() -> Option<String> {
    static LACK: OnceLock<Option<String>> = OnceLock::new();
    let poll = || {
        if let Some(missing) = debian::unavailable() {
            return Some(format!("the guest's kernel and programs need {missing}"));
        }
        let needed = [
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("zstd", "zstd"),
            ("xz", "xz-utils"),
            ("linux.uml", "user-mode-linux"),
        ];
        let installed = debian::install_on_host(&needed);
        installed.err().map(|error| format!("{error:#}"))
    };
    LACK.get_or_init(poll).clone()
}

/// Sorted stems of the Rust files directly in a folder.
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
