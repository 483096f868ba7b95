//! Runs the `sh,source` blocks of README and book in this checkout. It has its own file, because it
//! builds with all processors, and other tests have time limits.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::book::{self, Page, Place};
use xtask::{debian, process};

/// It may build the whole workspace.
const LIMIT: Duration = Duration::from_secs(1800);

/// Without comments and duplicates.
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

/// Contains this test, so it can't be run here.
const WHOLE: &str = "make test";

#[test]
fn docs_commands_run_from_source() -> Result<()> {
    let lines = from_source(&book::pages()?);
    ensure!(lines.len() > 1, "only {lines:?} was found");
    ensure!(
        lines.iter().any(|line| line == WHOLE),
        "no page shows {WHOLE}"
    );
    let has_packages = debian::unavailable().is_none();
    for line in lines.iter().filter(|line| *line != WHOLE) {
        if line.contains("ceph") && !has_packages {
            println!("skipped, as it needs Debian's packages: {line}");
            continue;
        }
        println!("+ {line}");
        typed(line)?;
    }
    Ok(())
}

/// Runs a line as in a fresh clone.
fn typed(line: &str) -> Result<()> {
    let mut command = Command::new("bash");
    command
        .args(["-euo", "pipefail", "-c", line])
        .current_dir(book::repository());
    // Remove what the test's own cargo has set.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let is_theirs = ["CARGO_HOME", "CARGO_TERM_COLOR", "CARGO_NET_OFFLINE"].contains(&&*text)
            || text.starts_with("CARGO_PROFILE_");
        if text.starts_with("CARGO") && !is_theirs || text.starts_with("FOREBAY_") {
            command.env_remove(&name);
        }
    }
    process::run(&mut command, LIMIT).with_context(|| line.to_owned())
}

/// Tests this file's own detection of failures.
#[test]
fn unknown_make_targets_are_detected() -> Result<()> {
    typed("make --dry-run run > /dev/null")?;
    ensure!(typed("make nothing-like-this").is_err(), "make");
    Ok(())
}
