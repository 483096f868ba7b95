//! `cargo xtask`: the project's tasks for contributors and CI.
//!
//! Each task is a module that returns whether all went well. Everything has a time limit.

mod bench;
mod cargo;
mod ceph_command;
mod check;
mod ci;
mod docs;
mod fuzz;
mod jobs;
mod named_code;
mod programs;
mod seconds;
mod shape;
mod sim;
mod soak;
mod suites;
mod tally;
mod words;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use xtask::process;

use crate::cargo::{cargo, repository, target_folder};

const PACKAGE_BUILD_LIMIT: Duration = Duration::from_secs(60 * 60);

const USAGE: &str = "\
cargo xtask test [SUITE...]    run all tests, or the named suites: unit system fuzz guest
cargo xtask ci                 everything that CI runs: check, bench instructions --quick, all tests
cargo xtask check [STEP...]    fmt clippy layers licences docs shape words
cargo xtask fuzz [--seconds N] [TARGET...]
cargo xtask bench NAME [--quick] [--release] [--json FILE] [--only NAME]
cargo xtask sim FIGURE|all [--quick] [--svg FOLDER]
cargo xtask ceph up|down [--osds N] [--release 16|18|20] [--cephx] [FOLDER]
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
        Some("ceph") => ceph_command::run(&args),
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

/// Builds the release program and its package.
fn package(args: &[String]) -> Result<bool> {
    if let Some(arg) = args.first() {
        bail!("`package` takes no argument `{arg}`");
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
