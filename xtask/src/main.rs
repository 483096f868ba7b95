//! `cargo xtask`: the project's own tasks.
//!
//! Purpose: one entry for whoever works on Forebay, and for CI: test, check, bench.
//! Design: each task is a module that takes its arguments and says whether all went well; nothing
//! runs that has no time limit.
//! Not here: building and running Forebay (`cargo`, `make run`).

mod bench;
mod check;
mod ci;
mod docs;
mod fuzz;
mod jobs;
mod programs;
mod seconds;
mod shape;
mod sim;
mod soak;
mod suites;
mod tally;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use xtask::process;

const PACKAGE_BUILD_LIMIT: Duration = Duration::from_secs(60 * 60);

const USAGE: &str = "\
cargo xtask test [SUITE...]    run every test there is, or the suites named: unit system fuzz guest
cargo xtask ci                 all that CI runs: check, bench instructions --quick, every test
cargo xtask check [STEP...]    fmt clippy layers licences docs shape
cargo xtask fuzz [--seconds N] [TARGET...]
cargo xtask bench NAME [--quick] [--release] [--json FILE] [--only NAME]
cargo xtask sim FIGURE|all [--quick] [--svg FOLDER]
cargo xtask soak [--minutes N] [--seed N] [--only RUN] [--list]
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let task = args.next();
    let args: Vec<String> = args.collect();
    let result = match task.as_deref() {
        Some("test") => suites::run(&args),
        Some("ci") => Ok(ci::run()),
        Some("check") => check::run(&args),
        Some("fuzz") => fuzz::run(&args),
        Some("bench") => bench::run(&args),
        Some("sim") => sim::run(&args),
        Some("soak") => soak::run(&args),
        Some("package") => package(&args),
        Some("help" | "--help" | "-h") => {
            print!("{USAGE}");
            Ok(true)
        }
        _ => {
            eprint!("{USAGE}");
            Ok(false)
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the program as it is shipped, and packs it.
fn package(args: &[String]) -> Result<bool> {
    if let Some(arg) = args.first() {
        bail!("`package` takes no `{arg}`");
    }
    let mut build = cargo(&["build", "--release", "--locked", "--package", "forebay"]);
    process::run(&mut build, PACKAGE_BUILD_LIMIT)?;
    let made = xtask::package::build(&xtask::package::Options {
        repository: repository(),
        program: target_folder().join("release/forebay"),
        output: target_folder().join("package"),
    })?;
    println!("{}", made.display());
    Ok(true)
}

/// The top of the repository.
fn repository() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_owned()
}

/// Where cargo builds.
fn target_folder() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => repository().join(folder),
        None => repository().join("target"),
    }
}

/// The cargo that runs us, at the top of the repository.
fn cargo(args: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(args).current_dir(repository());
    command
}

/// Runs a command to its end and adds its seconds to the table. What it prints is shown when it has
/// ended, because others may run beside it; on a terminal, as it comes.
fn step(kind: &'static str, name: &str, command: &mut Command, limit: Duration) -> Result<()> {
    let start = Instant::now();
    let is_watched = std::io::stdout().is_terminal();
    let mut said = String::new();
    command.stderr(Stdio::piped());
    let ended = process::lines(command, limit, |line| match is_watched {
        true => println!("{line}"),
        false => {
            said.push_str(line);
            said.push('\n');
        }
    });
    let cpu_s = ended.as_ref().map_or(0.0, |ended| ended.cpu_s);
    let wall_s = start.elapsed().as_secs_f64();
    seconds::add(kind, name, wall_s, cpu_s);
    println!("=== {name}: {wall_s:.1} s ===\n{said}");
    match ended?.status {
        status if status.success() => Ok(()),
        status => bail!("{name}: {status}"),
    }
}

/// Whether this is CI, where nothing may be left out.
fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}
