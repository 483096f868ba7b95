//! What README and book show to those who have the source is typed in a checkout.
//!
//! Purpose: a page can't tell of a command that does not work from a clean checkout.
//! Design: a file of its own, because it builds with all processors, and others have time limits. Its checkout is the one that is
//! tested, and what it builds is kept.
//! Not here: the other blocks (`docs_commands_run`).

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::book::{self, Page, Place};
use xtask::process;

/// It may build all of it.
const LIMIT: Duration = Duration::from_secs(1800);

/// The lines of `sh,source` blocks, in the order of the pages, without comments and without those that were there before.
fn from_source(pages: &[Page]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let parts = pages.iter().flat_map(|page| &page.parts);
    for part in parts.filter(|part| part.place == Place::Source) {
        for line in &part.lines {
            let line = line.split('#').next().unwrap_or_default().trim().to_owned();
            if !line.is_empty() && !lines.contains(&line) {
                lines.push(line);
            }
        }
    }
    lines
}

/// What this test is a part of: it can't run it.
const WHOLE: &str = "make test";

/// The book's `sh,source` blocks run in this checkout.
#[test]
fn docs_commands_run_from_source() -> Result<()> {
    let lines = from_source(&book::pages()?);
    ensure!(lines.len() > 1, "only {lines:?} was found");
    ensure!(
        lines.iter().any(|line| line == WHOLE),
        "no page shows {WHOLE}"
    );
    for line in lines.iter().filter(|line| *line != WHOLE) {
        println!("+ {line}");
        typed(line)?;
    }
    Ok(())
}

/// Types a line in the checkout, as somebody who has just cloned it.
fn typed(line: &str) -> Result<()> {
    let mut command = Command::new("bash");
    command
        .args(["-euo", "pipefail", "-c", line])
        .current_dir(book::repository());
    // What the test's own cargo has set is none of theirs.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let is_theirs = ["CARGO_HOME", "CARGO_TERM_COLOR", "CARGO_NET_OFFLINE"].contains(&&*text);
        if text.starts_with("CARGO") && !is_theirs || text.starts_with("FOREBAY_") {
            command.env_remove(&name);
        }
    }
    process::run(&mut command, LIMIT).with_context(|| line.to_owned())
}

/// Not a test of the pages, but of this one's teeth.
#[test]
fn what_is_not_known_is_seen() -> Result<()> {
    typed("make --dry-run run > /dev/null")?;
    ensure!(typed("make nothing-like-this").is_err(), "make");
    Ok(())
}
