//! `cargo xtask bench recording` and `bench instructions`: instructions per I/O.
//!
//! `recording` counts what an engine records so that a successor can continue after kill -9.
//! Callgrind counts a reactor's turns in two builds, with and without recording: 4 KiB I/O on a
//! null device, single-threaded (`cost.rs` of the engine). The difference includes all effects on
//! the compiler. Kernel instructions are excluded; they are equal. Both builds use rustix's libc
//! backend, because valgrind supports no other program start. [`super::recording_file`] measures
//! time.
//!
//! `instructions`, which CI runs, compares the first build with [`EXPECTED`] and
//! [`EXPECTED_SCHEDULING`]. More for scheduling or an admission is an error with the same compiler;
//! other values may vary, as the C library copies differently on other processors.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::process;

use super::measure::Summary;
use super::{Options, profile};

const LIMIT: Duration = Duration::from_secs(1800);
const TCP: &str = "frontend::nvme_tcp::tests::cost::batches_are_executed";
const PCIE: &str = "frontend::vfio_user::tests::cost::commands_are_executed";
const VHOST: &str = "frontend::vhost_user::tests::cost::requests_are_executed";
const BURST: &str = "scheduler::tests::cost::an_admission_is_counted";
/// Counted functions of the tests.
const COUNTED: [&str; 2] = ["*counted_turn*", "*counted_admission*"];
/// Name and features of each build.
const WITH: (&str, &str) = ("with", "no-kill-points");
const WITHOUT: (&str, &str) = ("without", "no-kill-points,no-recording");
/// Simultaneous I/Os.
const BATCHES: [u64; 2] = [1, 8];
/// Instructions per I/O: test, name, doorbells or ring, operation, simultaneous I/Os. A change
/// needs an explanation.
///
/// Budgets added 4–7 % to TCP: requests are counted per tenant, and throttled time separately. They
/// added 1–5 % to virtio, which checks the ring before it takes a part of the turn. Counting
/// staging memory by size class added 2–3 % to TCP. Cutting the core into parts took 3–5 % from
/// virtio, and added 4–5 % to TCP in the profile `measure` alone, whose units call each other.
const EXPECTED: [(&str, &str, &str, &str, u64, ByProfile); 14] = [
    (BURST, "burst", "", "admission", 1, [29.0, 33.0]),
    (BURST, "burst", "", "changing", 1, [29.0, 33.0]),
    (TCP, "tcp", "", "read", 1, [3522.0, 4756.0]),
    (TCP, "tcp", "", "read", 8, [2455.0, 3439.0]),
    (TCP, "tcp", "", "write", 1, [4121.0, 5517.0]),
    (TCP, "tcp", "", "write", 8, [3015.0, 4161.0]),
    (PCIE, "pcie", "mapped", "read", 1, [2134.0, 2846.0]),
    (PCIE, "pcie", "mapped", "read", 8, [1089.0, 1567.0]),
    (PCIE, "pcie", "mapped", "write", 1, [2133.0, 2845.0]),
    (PCIE, "pcie", "mapped", "write", 8, [1088.0, 1566.0]),
    (VHOST, "vhost", "split", "read", 8, [1557.0, 2032.0]),
    (VHOST, "vhost", "split", "write", 8, [1557.0, 2045.0]),
    (VHOST, "vhost", "packed", "read", 8, [1630.0, 2050.0]),
    (VHOST, "vhost", "packed", "write", 8, [1630.0, 2063.0]),
];
/// For the profiles `release` and `measure`; the latter has separate compilation units.
type ByProfile = [f64; 2];
/// The part due to scheduling, for eight simultaneous I/Os of one tenant and volume with ample
/// budget. The maximum is [`MOST_SCHEDULING`]. Refills are not included
/// (`cargo xtask sim scheduler_time`).
const EXPECTED_SCHEDULING: [(&str, &str, &str, &str, ByProfile); 5] = [
    (TCP, "tcp", "", "read", [62.0, 65.0]),
    (TCP, "tcp", "", "write", [66.0, 70.0]),
    (PCIE, "pcie", "mapped", "read", [63.0, 61.0]),
    (VHOST, "vhost", "split", "read", [64.0, 65.0]),
    (VHOST, "vhost", "packed", "read", [64.0, 65.0]),
];
/// The compiler for which limits are strict.
const COMPILER: &str = "1.95";
/// Variation due to the compiler.
const TOLERANCE: f64 = 40.0;
/// Tolerance by profile, and the release limit, of [`EXPECTED_SCHEDULING`].
const SCHEDULING_TOLERANCE: ByProfile = [5.0, 15.0];
const MOST_SCHEDULING: f64 = 70.0;
/// Tolerance of an admission.
const ADMISSION_TOLERANCE: ByProfile = [1.0, 15.0];

pub(crate) fn run_instructions(options: &Options) -> Result<()> {
    if !process::is_installed("valgrind") {
        println!("instructions per I/O: not counted, valgrind is not installed");
        return Ok(());
    }
    let rounds = if options.quick { 50 } else { 500 };
    let mut programs: [Option<PathBuf>; 2] = [None, None];
    let mut summary = Summary::default();
    let mut changes = Changes::default();
    println!(
        "{:<14}{:<7}{:>6}{:>18}{:>12}",
        "frontend", "op", "batch", "instructions/IO", "expected"
    );
    let by_profile = usize::from(profile::name() != "release");
    for (test, frontend, way, op, batch, expected) in EXPECTED {
        let expected = expected[by_profile];
        let name = format!("{frontend} {way}");
        if (options.only.as_ref()).is_some_and(|only| !name.contains(only)) {
            continue;
        }
        let is_burst = test == BURST;
        let program = match &mut programs[usize::from(is_burst)] {
            Some(program) => program,
            none => none.insert(if is_burst {
                build_burst()?
            } else {
                build(WITH)?
            }),
        };
        // Admissions are small, so their windows must be negligible.
        let rounds = if is_burst { 100_000 } else { rounds };
        let what = match is_burst {
            true if op == "changing" => format!("{rounds}:{op}"),
            true => rounds.to_string(),
            false => format!("{op}:{batch}:{rounds}:{way}"),
        };
        let ios = (batch * rounds) as f64;
        let each = count(program, test, &what)? as f64 / ios;
        println!("{name:<14}{op:<7}{batch:>6}{each:>18.1}{expected:>12.1}");
        let metric = match frontend {
            "tcp" => format!("{op}_batch{batch}_instructions"),
            "burst" => format!("{op}_instructions"),
            _ => format!("{frontend}_{way}_{op}_batch{batch}_instructions"),
        };
        summary.put(metric.clone(), each);
        let tolerance = match is_burst {
            true => ADMISSION_TOLERANCE[by_profile],
            false => TOLERANCE,
        };
        let row = format!("{name} {op} {batch}");
        changes.note(row, expected, each, tolerance, is_burst);
        let scheduling = EXPECTED_SCHEDULING
            .iter()
            .find(|row| (row.0, row.2, row.3, 8) == (test, way, op, batch));
        if let Some((.., expected)) = scheduling {
            let expected = expected[by_profile];
            let more = count(program, test, &format!("{what}:admitted"))? as f64 / ios - each;
            println!(
                "{name:<14}{op:<7}{:>6}{more:>18.1}{expected:>12.1}",
                "sched."
            );
            summary.put(format!("{metric}_scheduling"), more);
            let what = format!("{name} {op} scheduling");
            let tolerance = match by_profile {
                0 => SCHEDULING_TOLERANCE[0].min(MOST_SCHEDULING - expected),
                _ => SCHEDULING_TOLERANCE[1],
            };
            changes.note(what, expected, more, tolerance, true);
        }
    }
    changes.print();
    summary.print("instructions", options.json.as_deref())?;
    let version = process::text(Command::new("rustc").arg("--version"), LIMIT)?;
    if changes.is_worse && is_compiler(&version) {
        bail!(
            "scheduling costs more instructions than before: reduce them, or explain them in EXPECTED"
        );
    }
    Ok(())
}

/// Deviations from the expected counts.
#[derive(Default)]
struct Changes {
    grown: Vec<String>,
    less: Vec<String>,
    /// A strict count grew beyond its tolerance.
    is_worse: bool,
}

impl Changes {
    fn note(&mut self, what: String, expected: f64, each: f64, tolerance: f64, is_strict: bool) {
        self.is_worse |= is_strict && each - expected > tolerance;
        let line = format!("{what}: {expected:.0} -> {each:.0}");
        match each - expected {
            more if more > tolerance => self.grown.push(line),
            more if more < -tolerance => self.less.push(line),
            _ => {}
        }
    }

    fn print(&self) {
        for (lines, how) in [(&self.grown, "more"), (&self.less, "less")] {
            if !lines.is_empty() {
                println!(
                    "instructions per I/O, {how} than EXPECTED in xtask/src/bench/recording.rs by more than the tolerance: {}",
                    lines.join(", ")
                );
            }
        }
    }
}

/// Whether this is [`COMPILER`]; others may need more instructions.
fn is_compiler(version: &str) -> bool {
    let number = version.split_whitespace().nth(1).unwrap_or_default();
    let rest = number.strip_prefix(COMPILER);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if !process::is_installed("valgrind") {
        bail!(
            "valgrind is not installed: `apt install valgrind`, or the equivalent of your system"
        );
    }
    let rounds = if options.quick { 50 } else { 500 };
    let (with, without) = (build(WITH)?, build(WITHOUT)?);
    let mut summary = Summary::default();
    println!(
        "{:<7}{:>6}{:>18}{:>18}{:>12}",
        "op", "batch", "instructions/IO", "without record", "recording"
    );
    for op in ["read", "write"] {
        for batch in BATCHES {
            let what = format!("{op}:{batch}:{rounds}");
            let ios = (batch * rounds) as f64;
            let all = count(&with, TCP, &what)? as f64 / ios;
            let rest = count(&without, TCP, &what)? as f64 / ios;
            println!(
                "{op:<7}{batch:>6}{all:>18.1}{rest:>18.1}{:>12.1}",
                all - rest
            );
            let name = format!("{op}_batch{batch}");
            summary.put(format!("{name}_instructions"), all);
            summary.put(format!("{name}_recording_instructions"), all - rest);
        }
    }
    super::recording_file::run(options, &mut summary)?;
    summary.print("recording", options.json.as_deref())
}

pub(super) fn build_engine() -> Result<PathBuf> {
    build(WITH)
}

pub(super) fn folder() -> PathBuf {
    crate::cargo::target_folder().join("recording")
}

fn build((name, features): (&str, &str)) -> Result<PathBuf> {
    build_tests("forebay-engine", features, name)
}

fn build_burst() -> Result<PathBuf> {
    build_tests("forebay-qos", "", "burst")
}

fn build_tests(package: &str, features: &str, name: &str) -> Result<PathBuf> {
    let folder = folder();
    let mut cargo = profile::cargo("test");
    cargo
        .args(["--no-run", "--lib", "--target-dir"])
        .arg(&folder)
        .args(["--package", package, "--features", features])
        .env("RUSTFLAGS", "--cfg=rustix_use_libc");
    let built = profile::build(&format!("{package}'s tests"), &mut cargo)?;
    // The next build may overwrite it.
    let program = folder.join(name);
    std::fs::copy(&built, &program).with_context(|| built.display().to_string())?;
    Ok(program)
}

fn count(program: &Path, test: &str, what: &str) -> Result<u64> {
    let file = program.with_extension("callgrind");
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--quiet", "--tool=callgrind"])
        .args(COUNTED.map(|function| format!("--toggle-collect={function}")))
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(program)
        .args(["--exact", test])
        .env("FOREBAY_COST", what);
    process::text(&mut valgrind, LIMIT)?;
    let text = std::fs::read_to_string(&file)?;
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
    let total: u64 = total.context("callgrind counted nothing")?.trim().parse()?;
    if total == 0 {
        bail!(
            "callgrind did not find the code to count in {}",
            program.display()
        );
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::is_compiler;

    #[test]
    fn the_compiler_is_known_by_its_number() {
        assert!(is_compiler("rustc 1.95.0 (59807616e 2026-04-14)"));
        assert!(!is_compiler("rustc 1.96.0 (59807616e 2026-05-28)"));
        assert!(!is_compiler("rustc 1.950.0"));
        assert!(!is_compiler(""));
    }
}
