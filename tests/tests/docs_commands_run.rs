//! Runs every `sh` block of README and book.
//!
//! A page is one script in its own sandbox; the commands' page is one session. `linux_guest_docs`,
//! `package` and `docs_from_source` run other blocks.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forebay_tests::book::{self, Page, Place};

const LIMIT: Duration = Duration::from_secs(600);

#[test]
fn docs_commands_run() -> Result<()> {
    let mut blocks = 0;
    let mut failed = Vec::new();
    for page in book::pages()? {
        blocks += page.parts.iter().filter(|part| part.is_shown).count();
        if let Err(error) = run_page(&page) {
            failed.push(format!("=== {}\n{error:#}", page.path.display()));
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    ensure!(blocks > 10, "only {blocks} blocks were found");
    Ok(())
}

#[test]
fn the_examples_of_commands_are_a_session() -> Result<()> {
    let file = book::repository().join("crates/forebay/src/cli/examples.txt");
    let examples = fs::read_to_string(file)?;
    let lines = examples
        .lines()
        .map(|example| match example.starts_with("serve ") {
            true => "daemon".to_owned(),
            false => format!("forebay {example}"),
        });
    run(&lines.collect::<Vec<_>>())
}

fn run_page(page: &Page) -> Result<()> {
    let mut lines = Vec::new();
    for part in &page.parts {
        match part.place {
            Place::Vm => lines.extend_from_slice(&part.lines),
            Place::Host | Place::Package | Place::Source | Place::Bmc => {}
        }
    }
    match lines.is_empty() {
        true => Ok(()),
        false => run(&lines),
    }
}

fn run(lines: &[String]) -> Result<()> {
    let said = book::vm()?.run(&book::script(lines), LIMIT);
    said.map(drop)
}

/// Tests this file's own detection of failures.
#[test]
fn a_command_that_fails_is_seen() -> Result<()> {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    run(&lines("forebay --version\ntrue"))?;
    let error = run(&lines("forebay status --no-such-option\ntrue")).err();
    let error = error.context("an unknown option went by")?;
    ensure!(
        format!("{error:#}").contains("--no-such-option"),
        "{error:#}"
    );
    Ok(())
}
