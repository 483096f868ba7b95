//! `cargo xtask check words`: marks of stilted prose in comments and in the book.
//!
//! Purpose: comments and documents stay plain English, so that a newcomer can read them.
//! Design: a list of phrases that plain English rarely needs. Each crate, and the book, may have one mark in 1,000 words.
//! A mark shows a place to look at; the limit leaves room for the few good uses.
//! Not here: spelling and grammar.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use regex::Regex;

use xtask::process;

use crate::cargo::repository;

/// Marks allowed in 1,000 words.
const LIMIT: usize = 1;

/// Phrases that plain English rarely needs. `what is the ...` is good English, so [`marks`] leaves it out.
const PHRASES: &str = r"(?x)
    \b(
        so\ many | so\ much | so\ manieth | whoever
        | who\ (?:is|has|was|had|comes|came|waits|may|asks|finds|sleeps|bursts|rests|reads|needs|wants|begins|began|pays|saves)
        | [Ww]hat\ (?:is|was|has|had|waits|it|they|comes|came|others|nobody|may|lies|begins)\b(?P<the>\ the\b)?
        | [Tt]he\ same\ (?:of|with|to|for|as|where|while|in) | [Aa]ll\ of\ it | any\ more | nobody | somebody
        | nothing\ of | [Ss]ee\ there | is\ had\b | are\ had\b | that\ is\ all\ there\ is | by\ and\ by
        | of\ (?:it|them|that|those|these)\ (?:who|what|which) | other\ than\ by
    )\b
    | ^\s*Of\ (?:it|them|that|those|these|what|which|its|each)\b";

#[derive(Default)]
struct Count {
    words: usize,
    marks: usize,
    /// The first places, to name in an error.
    places: Vec<String>,
}

/// Prints the rate of each crate and of the book; an error names those beyond the limit.
pub(crate) fn check() -> Result<()> {
    let phrases = Regex::new(PHRASES).context("the list of phrases")?;
    let mut rooms: BTreeMap<String, Count> = BTreeMap::new();
    let mut list = Command::new("git");
    list.args(["ls-files", "*.rs", "*.md"])
        .current_dir(repository());
    let list = process::output(&mut list, Duration::from_secs(60))?;
    for path in String::from_utf8_lossy(&list).lines() {
        let text = fs::read_to_string(repository().join(path)).with_context(|| path.to_owned())?;
        let count = rooms.entry(room(path)).or_default();
        for (number, line) in (1..).zip(text.lines()) {
            let Some(prose) = prose(path, line) else {
                continue;
            };
            count.words += prose.split_whitespace().count();
            let marks = marks(&phrases, prose);
            if marks > 0 && count.places.len() < 10 {
                count
                    .places
                    .push(format!("{path}:{number}: {}", prose.trim()));
            }
            count.marks += marks;
        }
    }
    let mut beyond = Vec::new();
    for (room, count) in &rooms {
        let rate = 1000.0 * count.marks as f64 / count.words.max(1) as f64;
        println!(
            "words: {room}: {} words, {rate:.1} marks in 1,000",
            count.words
        );
        if count.marks * 1000 > LIMIT * count.words {
            beyond.push(format!(
                "{room}: {rate:.1} marks in 1,000 words:\n  {}",
                count.places.join("\n  ")
            ));
        }
    }
    if !beyond.is_empty() {
        bail!("say it plainly:\n{}", beyond.join("\n"));
    }
    Ok(())
}

/// A crate, the book, or another folder at the top.
fn room(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').collect();
    match parts.as_slice() {
        ["crates", name, ..] => format!("crates/{name}"),
        ["docs", ..] => "docs".to_owned(),
        [folder, _, ..] => (*folder).to_owned(),
        _ => "README.md".to_owned(),
    }
}

/// The prose of a line: a comment's text, or a document's line outside of code.
fn prose<'a>(path: &str, line: &'a str) -> Option<&'a str> {
    if Path::new(path)
        .extension()
        .is_some_and(|extension| extension == "md")
    {
        return (!line.starts_with("    ") && !line.starts_with("```")).then_some(line);
    }
    let comment = line.trim_start().strip_prefix("//")?;
    Some(comment.strip_prefix(['/', '!']).unwrap_or(comment))
}

fn marks(phrases: &Regex, prose: &str) -> usize {
    let found = phrases.captures_iter(prose);
    found.filter(|mark| mark.name("the").is_none()).count()
}

#[cfg(test)]
mod tests {
    use super::{PHRASES, marks, prose};
    use regex::Regex;

    #[test]
    fn stilted_phrases_are_marks_and_plain_ones_are_not() {
        let phrases = Regex::new(PHRASES).unwrap();
        let count = |text| marks(&phrases, text);
        assert_eq!(count("Of those who wait, whoever came first."), 2);
        assert_eq!(count("what waits for so many others"), 2);
        assert_eq!(count("Asks what is the oldest command of a lane."), 0);
        assert_eq!(count("A throttled lane's unused budget."), 0);
    }

    #[test]
    fn prose_is_comments_and_text_of_documents() {
        assert_eq!(prose("a.rs", "    //! text"), Some(" text"));
        assert_eq!(prose("a.rs", "let a = 1; // not at the line's begin"), None);
        assert_eq!(prose("a.md", "text"), Some("text"));
        assert_eq!(prose("a.md", "    code"), None);
    }
}
