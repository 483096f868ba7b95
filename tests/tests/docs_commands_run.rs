//! Every command that README and book show is run as it stands there.
//!
//! Purpose: a page can't tell of a command or an option that is not there any more.
//! Design: the blocks marked `sh` of a page are one script, in the page's order, in a sandbox of its own with
//! the program on its path; the first command that fails fails the page. Blocks for a Linux host are run in one by
//! `docs_commands_run_in_a_guest` (`linux_guest_docs`), those for an installed package by `docs_commands_run_from_the_package`
//! (`package`). `sh,source` blocks, which build and test, are typed in the checkout by `docs_commands_run_from_source`
//! (`docs_from_source`). What
//! sentences mention is parsed by the command line's own test (`cli::mentioned`).
//! Not here: the page of commands, whose examples are run as one session, from the file they come from.

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
            Place::Machine => lines.extend_from_slice(&part.lines),
            // Other tests'.
            Place::Host | Place::Package | Place::Source => {}
        }
    }
    match lines.is_empty() {
        true => Ok(()),
        false => run(&lines),
    }
}

fn run(lines: &[String]) -> Result<()> {
    let said = book::machine()?.run(&book::script(lines), LIMIT);
    said.map(drop)
}

/// Not tests of the pages, but of this one's teeth: what fails is a failure.
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
