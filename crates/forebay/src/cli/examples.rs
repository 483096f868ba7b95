//! An example for each command.
//!
//! Purpose: what people read first in a help text.
//! Design: one table, in the order of a session that works: a test of this program runs it from top to
//! bottom, in an environment of its own. What is behind `help` is clap's.
//! Not here: explanations (the book has those).

use clap::Command;

/// Commands with examples, in the order of a session. `forebay` is left out.
pub(crate) const EXAMPLES: &[&str] = &[
    "serve --config /etc/forebay/forebay.toml",
    "pool create --device /srv/a.img --size 8G",
    "pool show",
    "pool set --warn-percent 70 --critical-percent 90",
    "device list",
    "device add /srv/b.img --size 8G",
    "device show 1",
    "tenant create acme",
    "tenant list",
    "volume create acme/db --size 1G",
    "volume list acme",
    "volume show acme/db",
    "volume resize acme/db --size 2G",
    "volume set acme/db --reserve full",
    "export create acme/db --host nqn.2014-08.org.nvmexpress:uuid:5d3f9a52-1c7b-4a0e-9a55-6d1f0d3c2b11",
    "export list",
    "export show acme/db",
    "export set acme/db --any-host",
    "bench load --addr 127.0.0.1:4420 --nqn nqn.2026-01.io.forebay:acme.db --seconds 1",
    "volume export acme/db /srv/db.raw",
    "volume import /srv/db.raw acme/copy",
    "stats",
    "top --once --sort p99",
    "events",
    "status",
    "pool check --repair",
    "pool open --device /srv/b.img",
    "export resume acme/db",
    "export delete acme/db",
    "volume delete acme/db",
    "volume delete acme/copy",
    "tenant delete acme",
    "pool destroy",
    "bench demo --dir /tmp/demo --seconds 1 --verify 16M",
    "completion bash",
    "man /tmp/man",
];

/// The command's own words in an example: those of the path of subcommands.
fn example_of(path: &str) -> Option<&'static &'static str> {
    EXAMPLES.iter().find(|example| {
        example
            .strip_prefix(path)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    })
}

/// Adds its example to each command that does something by itself.
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
        for example in EXAMPLES {
            let words = std::iter::once("forebay").chain(example.split(' '));
            if let Err(error) = Cli::try_parse_from(words) {
                panic!("{example}: {error}");
            }
            assert!(
                found
                    .iter()
                    .any(|(path, _)| example_of(path) == Some(example))
                    || EXAMPLES
                        .iter()
                        .filter(|e| e.split(' ').take(2).eq(example.split(' ').take(2)))
                        .count()
                        > 1,
                "{example}: no command"
            );
        }
    }
}
