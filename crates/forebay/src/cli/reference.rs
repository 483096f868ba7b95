//! Generates `docs/src/commands.md`; a test compares it with the committed page (`UPDATE_DOCS=1`
//! rewrites it).

use clap::{Arg, Command};

use super::definition;

const HEAD: &str = "\
# Commands

This page is generated from the program; `forebay help COMMAND` and `man forebay-COMMAND` show the same text. Every
command takes `--json`, which prints the API's answer, and `--socket PATH`, which names the daemon's socket
([finding the daemon](configuration.md#finding-the-daemon)). Sizes are binary (`512`, `64K`, `1.5G`,
`10GiB`) or decimal (`500GB`).

A command that fails prints the reason in a line that begins with `error:`, and often a remedy in a line that begins
with `hint:`. Both go to standard error; with `--json`, they are one JSON object there. Its exit code is 1 for a
refusal, 2 for wrong usage, 3 if the daemon can't be reached, 4 if a named object does not exist, and 5 if it already
exists.
";

fn page() -> String {
    let mut text = HEAD.to_owned();
    let mut definition = definition();
    definition.build();
    below(&definition, &mut text);
    text
}

fn below(command: &Command, text: &mut String) {
    for sub in command.get_subcommands() {
        if sub.is_hide_set() || sub.get_name() == "help" {
            continue;
        }
        if sub.has_subcommands() {
            below(sub, text);
        } else {
            one(sub, text);
        }
    }
}

fn one(command: &Command, text: &mut String) {
    let name = command.get_bin_name().unwrap_or_default();
    let about = command.get_about().map(ToString::to_string);
    text.push_str(&format!("\n## {name}\n\n{}.\n", about.unwrap_or_default()));
    let own = |arg: &&Arg| !arg.is_global_set() && !arg.is_hide_set() && arg.get_id() != "help";
    let args: Vec<_> = command.get_arguments().filter(own).collect();
    if !args.is_empty() {
        text.push_str("\n| | |\n| --- | --- |\n");
    }
    for arg in args {
        text.push_str(&format!("| `{}` | {} |\n", spelling(arg), meaning(arg)));
    }
    if let Some(example) = command.get_after_help() {
        let example = example.to_string();
        let line = example.lines().last().unwrap_or_default().trim();
        text.push_str(&format!("\n```text\n{line}\n```\n"));
    }
}

fn spelling(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default();
    let value = values.iter().map(ToString::to_string).collect::<Vec<_>>();
    let value = value.join(" ").replace('|', "\\|");
    let takes_value = arg.get_action().takes_values();
    match arg.get_long() {
        Some(long) if takes_value => format!("--{long} {value}"),
        Some(long) => format!("--{long}"),
        None if arg.is_required_set() => value,
        None => format!("[{value}]"),
    }
}

fn meaning(arg: &Arg) -> String {
    let mut text = arg.get_help().map(ToString::to_string).unwrap_or_default();
    if !arg.get_action().takes_values() {
        return text;
    }
    let possible: Vec<_> = arg
        .get_possible_values()
        .iter()
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !possible.is_empty() {
        text.push_str(&format!(": {}", possible.join(", ")));
    }
    if arg.is_required_set() && arg.get_long().is_some() {
        text.push_str(" (required)");
    }
    let defaults: Vec<_> = arg
        .get_default_values()
        .iter()
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    if !defaults.is_empty() {
        text.push_str(&format!(" (default: {})", defaults.join(", ")));
    }
    text
}

#[test]
fn the_page_of_commands_has_not_drifted() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/commands.md");
    let page = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == page,
        "docs/src/commands.md differs from the command line; rewrite it with \
         UPDATE_DOCS=1 cargo test -p forebay the_page_of_commands_has_not_drifted"
    );
}
