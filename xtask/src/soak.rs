//! `cargo xtask soak`: repeats fault injection, kills, power cuts, models and fuzzing.
//!
//! Each of [`RUNS`] is a test or example with its count and seed in the environment. It repeats
//! with the next seed for its share of the minutes, at least once, whatever the others' results.
//! Any unexplained byte or error fails. The program has the benchmarks' profile and test devices,
//! unless `FOREBAY_BIN` names one.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::process;

use crate::bench::profile;
use crate::cargo::cargo;
use crate::programs::{self, FEATURES, TestProgram};
use crate::tally::Tally;
use crate::{fuzz, seconds};

/// Per repetition.
const LIMIT: Duration = Duration::from_secs(60 * 60);

struct Run {
    name: &'static str,
    /// Relative share of the time.
    share: u32,
    kind: Kind,
    /// Units per repetition.
    count: u64,
    unit: &'static str,
}

#[derive(Clone, Copy)]
enum Kind {
    /// The example `soak` in `tests/`, for `count` seconds.
    Troubles,
    /// Matching tests of a package and file.
    Test(&'static str, &'static str, &'static str, Variables),
    /// Every fuzz target, for `count` seconds.
    Fuzz,
}

/// Environment variables of count and seed.
type Variables = (&'static str, &'static str);

const SYSTEM: &str = "forebay-tests";
const KILLS: Variables = ("FOREBAY_KILLS", "FOREBAY_TEST_SEED");
const PAIRS: Variables = ("FOREBAY_PAIRS", "FOREBAY_TEST_SEED");
const MACHINE_KILLS: Variables = ("FOREBAY_MACHINE_KILLS", "FOREBAY_TEST_SEED");
const CLIENT_KILLS: Variables = ("FOREBAY_CLIENT_KILLS", "FOREBAY_TEST_SEED");
const GUEST_KILLS: Variables = ("FOREBAY_GUEST_KILLS", "FOREBAY_TEST_SEED");
const ROUNDS: Variables = ("FOREBAY_TEST_ROUNDS", "FOREBAY_TEST_SEED");
const CHANGES: Variables = ("FOREBAY_STORM_CHANGES", "FOREBAY_TEST_SEED");
const MODEL: Variables = ("POOL_MODEL_CASES", "POOL_MODEL_FIRST");

const RUNS: [Run; 14] = [
    Run {
        name: "troubles",
        share: 4,
        kind: Kind::Troubles,
        count: 60,
        unit: "seconds of faults, one by one and all at once",
    },
    Run {
        name: "fuzz",
        share: 2,
        kind: Kind::Fuzz,
        count: 10,
        unit: "seconds of each fuzz target",
    },
    test(
        "kills",
        "takeover",
        "kill9_engine_verified",
        KILLS,
        100,
        "kills of an engine under hosts",
    ),
    test(
        "streams",
        "takeover_stream",
        "",
        KILLS,
        20,
        "kills of an engine under raw connections, in each of 3 tests",
    ),
    test(
        "pairs",
        "takeover_points",
        "at_pairs",
        PAIRS,
        40,
        "pairs of points of death",
    ),
    test(
        "vhost",
        "machines_vhost",
        "kill9",
        MACHINE_KILLS,
        40,
        "kills of an engine under a virtio disk",
    ),
    test(
        "pcie",
        "machines_pcie",
        "kill9",
        MACHINE_KILLS,
        40,
        "kills of an engine under an NVMe disk",
    ),
    test(
        "clients",
        "machines_client_kills",
        "",
        CLIENT_KILLS,
        20,
        "kills of each kind of driver",
    ),
    test(
        "guest",
        "linux_guest_survives_kill9",
        "",
        GUEST_KILLS,
        20,
        "kills of an engine under a Linux guest",
    ),
    test(
        "allocation",
        "kill9_during_allocation",
        "",
        ROUNDS,
        9,
        "deaths during first writes",
    ),
    test(
        "reuse",
        "extents_reused",
        "",
        ROUNDS,
        8,
        "deaths while space changes hands, in each of 2 tests",
    ),
    test(
        "powercuts",
        "powercut_volatile_cache",
        "",
        ROUNDS,
        10,
        "power cuts, with one device and with two",
    ),
    test(
        "storm",
        "storm",
        "qos_set_storm",
        CHANGES,
        10_000,
        "changes of budgets under load",
    ),
    Run {
        name: "model",
        share: 1,
        kind: Kind::Test("forebay-pool", "pool_model", "", MODEL),
        count: 4000,
        unit: "lives of a pool against its model",
    },
];

const fn test(
    name: &'static str,
    file: &'static str,
    test: &'static str,
    variables: Variables,
    count: u64,
    unit: &'static str,
) -> Run {
    Run {
        name,
        share: 1,
        kind: Kind::Test(SYSTEM, file, test, variables),
        count,
        unit,
    }
}

/// Returns whether all passed.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    let wanted = Wanted::parse(args)?;
    let runs: Vec<&Run> = RUNS
        .iter()
        .filter(|run| wanted.only.as_ref().is_none_or(|only| run.name == only))
        .collect();
    if runs.is_empty() {
        let names: Vec<&str> = RUNS.iter().map(|run| run.name).collect();
        bail!("no such run; the runs are: {}", names.join(" "));
    }
    let shares: u32 = runs.iter().map(|run| run.share).sum();
    let time = |run: &Run| {
        Duration::from_secs_f64(wanted.minutes * 60.0)
            .mul_f64(f64::from(run.share) / f64::from(shares))
    };
    println!("{} minutes, from seed {}:", wanted.minutes, wanted.seed);
    println!("{:<12}{:>9}  a turn", "run", "minutes");
    for run in &runs {
        let minutes = time(run).as_secs_f64() / 60.0;
        println!("{:<12}{minutes:>9.1}  {} {}", run.name, run.count, run.unit);
    }
    if wanted.is_list {
        return Ok(true);
    }
    let start = Instant::now();
    let built = Built::all()?;
    let mut tally = Tally::default();
    for run in runs {
        println!("=== {} ===", run.name);
        let begin = Instant::now();
        let (turns, end) = repeat(time(run), wanted.seed, |seed| run.turn(&built, seed));
        let wall_s = begin.elapsed().as_secs_f64();
        seconds::add("run", run.name, wall_s, 0.0);
        let done = turns * run.count;
        println!(
            "{}: {done} {} in {:.1} minutes",
            run.name,
            run.unit,
            wall_s / 60.0
        );
        match end {
            Ok(()) => tally.passed += 1,
            Err(error) => {
                tally.failed += 1;
                tally.notes.push(format!("{} failed: {error:#}", run.name));
            }
        }
    }
    seconds::print(start.elapsed().as_secs_f64());
    for note in &tally.notes {
        println!("{note}");
    }
    println!("{}", tally.closing_line());
    Ok(tally.failed == 0)
}

/// Repeats with increasing seeds until time is over or one fails; returns the number of successes.
fn repeat(
    time: Duration,
    first: u64,
    mut turn: impl FnMut(u64) -> Result<()>,
) -> (u64, Result<()>) {
    let start = Instant::now();
    for turns in 0.. {
        if let Err(error) = turn(first + turns) {
            return (turns, Err(error.context(format!("seed {}", first + turns))));
        }
        if start.elapsed() >= time {
            return (turns + 1, Ok(()));
        }
    }
    (0, Ok(()))
}

struct Built {
    forebay: PathBuf,
    troubles: PathBuf,
    tests: Vec<TestProgram>,
}

impl Built {
    fn all() -> Result<Self> {
        let forebay = match std::env::var_os("FOREBAY_BIN") {
            Some(program) => program.into(),
            None => profile::build(
                "forebay for tests",
                profile::cargo("build")
                    .args(["-p", "forebay"])
                    .args(FEATURES),
            )?,
        };
        let mut example = cargo(&["build", "-p", "forebay-tests", "--example", "soak"]);
        let troubles = profile::build("soak", &mut example)?;
        Ok(Self {
            forebay,
            troubles,
            tests: programs::build()?.tests,
        })
    }
}

impl Run {
    fn turn(&self, built: &Built, seed: u64) -> Result<()> {
        // The model's seed is its first case number.
        let seed = match self.kind {
            Kind::Test(.., MODEL) => seed * self.count,
            _ => seed,
        };
        let (count, seed) = (self.count.to_string(), seed.to_string());
        let mut command = match self.kind {
            Kind::Fuzz => return fuzz::soak(self.count),
            Kind::Troubles => {
                let mut command = Command::new(&built.troubles);
                let minutes = (self.count as f64 / 60.0).to_string();
                command.args(["--minutes", &minutes, "--seed", &seed]);
                command
            }
            Kind::Test(package, file, test, (counts, seeds)) => {
                let program = built
                    .tests
                    .iter()
                    .find(|program| program.package == package && program.target == file);
                let program = program.with_context(|| format!("{package} has no test {file}"))?;
                let mut command = programs::command(program);
                command.stderr(Stdio::inherit());
                command.args([test, "--include-ignored", "--nocapture", "--test-threads=1"]);
                command.env(counts, count).env(seeds, seed);
                command
            }
        };
        process::run(command.env("FOREBAY_BIN", &built.forebay), LIMIT)
    }
}

#[derive(Debug, PartialEq)]
struct Wanted {
    minutes: f64,
    seed: u64,
    only: Option<String>,
    is_list: bool,
}

impl Wanted {
    fn parse(args: &[String]) -> Result<Self> {
        let mut wanted = Self {
            minutes: 15.0,
            seed: 1,
            only: None,
            is_list: false,
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || {
                let value = args.next();
                value.with_context(|| format!("{arg} needs a value"))
            };
            match arg.as_str() {
                "--list" => wanted.is_list = true,
                "--minutes" => wanted.minutes = value()?.parse().context("--minutes")?,
                "--seed" => wanted.seed = value()?.parse().context("--seed")?,
                "--only" => wanted.only = Some(value()?.clone()),
                other => bail!(
                    "unknown argument '{other}'; the arguments are: --minutes N, --seed N, --only RUN, --list"
                ),
            }
        }
        if !(0.0..=1e6).contains(&wanted.minutes) {
            bail!("--minutes {}: must be 0 to 1000000", wanted.minutes);
        }
        Ok(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments() {
        let parse = |words: &[&str]| -> Result<Wanted> {
            let words: Vec<String> = words.iter().map(|word| (*word).into()).collect();
            Wanted::parse(&words)
        };
        let wanted = parse(&[
            "--minutes",
            "0.5",
            "--seed",
            "7",
            "--only",
            "fuzz",
            "--list",
        ]);
        let all = Wanted {
            minutes: 0.5,
            seed: 7,
            only: Some("fuzz".into()),
            is_list: true,
        };
        assert_eq!(wanted.unwrap(), all);
        for wrong in [
            &["--minutes"][..],
            &["--minutes", "-1"],
            &["--minutes", "NaN"],
            &["--kills", "3"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn turns_go_on_until_the_time_is_over_or_one_fails() {
        assert_eq!(repeat(Duration::ZERO, 5, |_| Ok(())).0, 1);
        let mut seeds = Vec::new();
        let (turns, end) = repeat(Duration::from_secs(600), 5, |seed| {
            seeds.push(seed);
            match seed {
                7 => bail!("broken"),
                _ => Ok(()),
            }
        });
        assert_eq!((turns, seeds), (2, vec![5, 6, 7]));
        assert_eq!(format!("{:#}", end.unwrap_err()), "seed 7: broken");
    }
}
