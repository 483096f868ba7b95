//! `cargo xtask ci`: all that CI runs.
//!
//! Purpose: the checks, what an I/O costs in instructions, and every test, as fast as the machine allows.
//! Design: the tests are built first; checks and the other builds then run beside tests that wait. All
//! steps run, whatever the others say. It ends with the table of seconds and the tests' closing line.
//! Not here: the steps.

use anyhow::{Result, bail};

use crate::jobs::{Company, Job};
use crate::suites::{self, Done};
use crate::tally::Tally;
use crate::{bench, check};

/// Runs it; true if all is well.
pub(crate) fn run() -> bool {
    let others = vec![job("checks", checks), job("bench", instructions)];
    suites::all(&["unit", "system", "fuzz", "guest"], others)
}

fn job(name: &'static str, work: fn() -> Result<()>) -> Job<Done> {
    Job {
        company: Company::Any,
        work: Box::new(move || Done::new(name, Tally::default(), work())),
    }
}

fn checks() -> Result<()> {
    let failed = check::all();
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(())
}

fn instructions() -> Result<()> {
    bench::run(&["instructions".to_owned(), "--quick".to_owned()]).map(drop)
}
