//! An example for each command, from `examples.txt`: a working session, which a test runs.

use clap::Command;

/// One per line, without `forebay`.
const EXAMPLES: &str = include_str!("examples.txt");

fn example_of(path: &str) -> Option<&'static str> {
    EXAMPLES.lines().find(|example| {
        example
            .strip_prefix(path)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    })
}

/// A first session.
const FIRST: [&str; 7] = [
    "pool create",
    "tenant create",
    "volume create",
    "export create",
    "export show",
    "status",
    "top",
];

/// A group's page has one per command, the program's a first session.
pub(super) fn of_page(path: &str, below: &[&Command]) -> Vec<&'static str> {
    match (path, below) {
        ("", _) => FIRST.into_iter().filter_map(example_of).collect(),
        (path, []) => example_of(path).into_iter().collect(),
        (path, below) => {
            let paths = below.iter().map(|sub| format!("{path} {}", sub.get_name()));
            paths.filter_map(|path| example_of(&path)).collect()
        }
    }
}

/// Adds an example to each leaf command.
pub(super) fn add(command: Command) -> Command {
    below(command, "")
}

fn below(mut command: Command, path: &str) -> Command {
    let names: Vec<String> = command
        .get_subcommands()
        .map(|sub| sub.get_name().to_owned())
        .collect();
    for name in names {
        let path = format!("{path} {name}").trim_start().to_owned();
        command = command.mut_subcommand(&name, |sub| {
            let sub = below(sub, &path);
            match example_of(&path) {
                Some(example) if !sub.has_subcommands() => {
                    sub.after_help(format!("Example:\n  forebay {example}"))
                }
                _ => sub,
            }
        });
    }
    command
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, definition};
    use super::*;
    use clap::Parser;

    fn leaves(command: &Command, path: &str, found: &mut Vec<(String, bool)>) {
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let path = format!("{path} {}", sub.get_name()).trim_start().to_owned();
            if sub.has_subcommands() {
                leaves(sub, &path, found);
            } else {
                found.push((path, sub.get_after_help().is_some()));
            }
        }
    }

    #[test]
    fn every_command_has_an_example_that_is_understood() {
        let mut found = Vec::new();
        leaves(&definition(), "", &mut found);
        assert!(found.len() > 25, "{found:?}");
        for (path, has_example) in &found {
            assert!(has_example, "{path}");
        }
        for example in EXAMPLES.lines() {
            let words = std::iter::once("forebay").chain(example.split(' '));
            if let Err(error) = Cli::try_parse_from(words) {
                panic!("{example}: {error}");
            }
        }
    }
}
