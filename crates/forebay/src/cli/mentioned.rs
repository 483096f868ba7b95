//! Tests that commands in the sentences of README and book exist.
//!
//! Capitals are placeholders, and missing arguments are tolerated. Code blocks are run by
//! `docs_commands_run`.

use std::path::Path;

use clap::error::ErrorKind;

use super::definition;

fn mentioned(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_block = false;
    let mut text = String::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            // A span may continue on the next line.
            text.push_str(line);
            text.push(' ');
        }
    }
    for span in text.split('`').skip(1).step_by(2) {
        let span = span.trim_start_matches("./target/release/");
        if span == "forebay" || span.starts_with("forebay ") {
            found.push(span.to_owned());
        }
    }
    found
}

fn fault(command: &str) -> Option<String> {
    let words = command.split_whitespace().map(|word| match word {
        "COMMAND" => "status",
        "INDEX" | "N" => "1",
        word => word,
    });
    let error = definition().try_get_matches_from(words).err()?;
    let is_fault = !matches!(
        error.kind(),
        ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
            | ErrorKind::DisplayHelp
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            | ErrorKind::DisplayVersion
    );
    is_fault.then(|| format!("`{command}`: {error}"))
}

#[test]
fn commands_that_sentences_mention_are_commands() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![top.join("README.md")];
    for entry in std::fs::read_dir(top.join("docs/src")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "md") {
            pages.push(path);
        }
    }
    let (mut count, mut faults) = (0, Vec::new());
    for page in pages {
        for command in mentioned(&std::fs::read_to_string(&page).unwrap()) {
            count += 1;
            faults.extend(fault(&command).map(|fault| format!("{}: {fault}", page.display())));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count > 20, "only {count} were found");
}

#[test]
fn unknown_commands_in_a_page_are_detected() {
    let page = "It is `forebay volume\nlist`, not `lsblk`.\n```sh\nforebay nothing\n```\n`./target/release/forebay top`";
    assert_eq!(mentioned(page), ["forebay volume list", "forebay top"]);
    for command in [
        "forebay volume show",
        "forebay device show INDEX",
        "forebay pool open --device SPEC --force",
        "forebay help COMMAND",
        "forebay",
    ] {
        assert_eq!(fault(command), None);
    }
    for command in [
        "forebay volumes list",
        "forebay volume list --no-such-option",
        "forebay pool set --placement nowhere",
        "forebay device show one",
    ] {
        assert!(fault(command).is_some(), "{command}");
    }
}
