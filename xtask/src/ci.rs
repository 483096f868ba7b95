//! `cargo xtask ci`: checks, instruction counts and all tests.
//!
//! Tests are built first; checks and other builds then run beside waiting tests. All steps run
//! despite failures.

use anyhow::{Result, bail};

use crate::jobs::{Company, Job};
use crate::suites::{self, Done};
use crate::tally::Tally;
use crate::{bench, check};

/// Returns whether all passed.
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
