//! `forebay completion` and `forebay man`, generated from the command line's definition and the
//! book.

use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_complete::env::Shells;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::{definition, examples};
use crate::failure::{Failure, Outcome, While};
use crate::output::print;

const CONFIGURATION: &str = include_str!("../../../../docs/src/configuration.md");
const EXIT_STATUS: [(&str, &str); 6] = [
    ("0", "Success."),
    ("1", "The command failed, or the daemon refused."),
    ("2", "The command line is wrong."),
    ("3", "No daemon answers."),
    ("4", "The named object does not exist."),
    ("5", "The object to create already exists."),
];
const FILES: [(&str, &str); 4] = [
    ("./forebay.toml", "The configuration, if no other is named."),
    (
        "/etc/forebay/forebay.toml",
        "The configuration of the service.",
    ),
    ("/run/forebay/api.sock", "The API socket of the service."),
    ("/var/lib/forebay", "The state of the service."),
];

const MANUAL: &str = "Forebay";

fn source() -> String {
    format!("forebay {}", env!("CARGO_PKG_VERSION"))
}

/// Our own script keeps `@` within words.
const BASH: &str = include_str!("completion.bash");

pub(crate) fn completion(shell: Shell) -> Outcome {
    print(&String::from_utf8_lossy(&script(shell)?))
}

fn script(shell: Shell) -> Outcome<Vec<u8>> {
    if shell == Shell::Bash {
        return Ok(BASH.as_bytes().to_vec());
    }
    let name = shell.to_string();
    let shells = Shells::builtins();
    let completer = shells.completer(&name);
    let completer =
        completer.ok_or_else(|| Failure::new(format!("there is no completion for {name}")))?;
    let mut script = Vec::new();
    completer
        .write_registration("COMPLETE", "forebay", "forebay", "forebay", &mut script)
        .while_doing("write a completion script")?;
    Ok(script)
}

/// Writes a page for each command, and one for the configuration.
pub(crate) fn manual(folder: &Path) -> Outcome {
    let doing = || format!("write manual pages to {}", folder.display());
    std::fs::create_dir_all(folder).while_doing(doing())?;
    let mut all = definition().disable_help_subcommand(true);
    all.build();
    let mut pages = Vec::new();
    pages_of(&all, "", &mut pages).while_doing(doing())?;
    pages.push(("forebay.toml.5".to_owned(), configuration_page()));
    for (name, page) in pages {
        std::fs::write(folder.join(name), page).while_doing(doing())?;
    }
    Ok(())
}

/// The pages of a command and its subcommands.
fn pages_of(command: &Command, above: &str, pages: &mut Vec<(String, Vec<u8>)>) -> io::Result<()> {
    let name = match above {
        "" => command.get_name().to_owned(),
        above => format!("{above}-{}", command.get_name()),
    };
    let below: Vec<&Command> = command
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
        .collect();
    let man = Man::new(command.clone()).source(source()).manual(MANUAL);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if !below.is_empty() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut rest = Roff::new();
    let path = name.trim_start_matches("forebay").trim_start_matches('-');
    // A command's name may have a hyphen, a group's not.
    let path = match above {
        "" | "forebay" => path.to_owned(),
        _ => path.replacen('-', " ", 1),
    };
    let examples = examples::of_page(&path, &below);
    if !examples.is_empty() {
        rest.control("SH", ["EXAMPLES"]);
        rest.control("EX", []);
        for example in examples {
            rest.text([roman(format!("forebay {example}"))]);
        }
        rest.control("EE", []);
    }
    listed(&mut rest, "EXIT STATUS", &EXIT_STATUS);
    if name == "forebay-status" {
        rest.control("PP", []);
        rest.text([roman(
            "With --check: 0 if all is well, 1 if there are warnings, 2 if something is not served, 3 if no daemon answers.",
        )]);
    }
    listed(&mut rest, "FILES", &FILES);
    let mut others: Vec<String> = below
        .iter()
        .map(|command| format!("{name}-{}(1)", command.get_name()))
        .collect();
    if !above.is_empty() {
        others.push(format!("{above}(1)"));
    }
    others.push("forebay.toml(5)".to_owned());
    rest.control("SH", ["SEE ALSO"]);
    rest.text([roman(others.join(", "))]);
    rest.to_writer(&mut page)?;
    pages.push((format!("{name}.1"), page));
    below
        .into_iter()
        .try_for_each(|command| pages_of(command, &name, pages))
}

fn listed(page: &mut Roff, title: &str, items: &[(&str, &str)]) {
    page.control("SH", [title]);
    for (name, text) in items {
        page.control("TP", []);
        page.text([bold(*name)]);
        page.text([roman(*text)]);
    }
}

fn configuration_page() -> Vec<u8> {
    let text = CONFIGURATION
        .split("## Finding the daemon")
        .next()
        .unwrap_or("");
    let mut page = Roff::new();
    let source = source();
    page.control("TH", ["forebay.toml", "5", "", &*source, MANUAL]);
    page.control("SH", ["NAME"]);
    page.text([roman(
        "forebay.toml - the configuration of the forebay daemon",
    )]);
    page.control("SH", ["DESCRIPTION"]);
    let mut is_code = false;
    let mut lines = text.lines().skip(1).peekable();
    while let Some(line) = lines.next() {
        let is_title = lines.peek().is_some_and(|next| next.starts_with("| ---"));
        if line.starts_with("```") {
            is_code = !is_code;
            page.control(if is_code { "EX" } else { "EE" }, []);
        } else if is_code {
            page.text([roman(line)]);
        } else if let Some(row) = line.strip_prefix('|') {
            let mut cells = row.split('|').map(|cell| cell.trim().replace('`', ""));
            let (key, value) = (
                cells.next().unwrap_or_default(),
                cells.next().unwrap_or_default(),
            );
            if is_title {
                page.text([roman(format!("Each {key}, and its value {value}:"))]);
            } else if !key.starts_with('-') {
                page.control("TP", []);
                page.text([bold(key)]);
                page.text([roman(value)]);
            }
        } else if line.is_empty() {
            page.control("PP", []);
        } else {
            page.text([roman(plain(line))]);
        }
    }
    listed(&mut page, "FILES", &FILES[..2]);
    page.control("SH", ["SEE ALSO"]);
    page.text([roman("forebay-serve(1), forebay(1)")]);
    page.render().into_bytes()
}

/// `[text](page.md)` becomes its text.
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('[') {
        let link = after.split_once("](").and_then(|(name, target)| {
            let (_, after) = target.split_once(')')?;
            Some((name, after))
        });
        text.push_str(before);
        match link {
            Some((name, after)) => {
                text.push_str(name);
                rest = after;
            }
            None => {
                text.push('[');
                rest = after;
            }
        }
    }
    text.push_str(rest);
    text.replace('`', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_its_page() {
        let folder = tempfile::tempdir().unwrap();
        let pages = folder.path().join("man");
        manual(&pages).unwrap();
        let read = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
        let page = read("forebay-export-set.1");
        for part in [
            "listed",
            "EXAMPLES",
            "EXIT STATUS",
            "FILES",
            "SEE ALSO",
            "forebay\\-export(1)",
            "forebay.toml(5)",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let whole = read("forebay.1");
        assert!(whole.contains("forebay\\-volume(1)"));
        assert!(whole.contains("EXAMPLES") && whole.contains("forebay pool create"));
        let group = read("forebay-pool.1");
        assert!(group.contains("EXAMPLES") && group.contains("forebay pool destroy pool"));
        let source = format!("\"forebay {}\"", env!("CARGO_PKG_VERSION"));
        for name in [
            "forebay.1",
            "forebay-pool.1",
            "forebay-tenant-budget.1",
            "forebay.toml.5",
        ] {
            let page = read(name);
            let head = page.lines().find(|line| line.starts_with(".TH"));
            assert!(
                head.is_some_and(|head| head.contains(&source)),
                "{name}: {head:?}"
            );
        }
        assert!(!pages.join("forebay-engine.1").exists());
        let page = read("forebay.toml.5");
        for part in [
            "NAME",
            "DESCRIPTION",
            "nvme_tcp",
            "log.level",
            "Running a pool",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("pool.md"), "{page}");
        assert!(!page.contains("\\fBkey"), "{page}");
        assert!(
            page.contains("Each key, and its value if not set:"),
            "{page}"
        );
    }

    #[test]
    fn every_shell_gets_its_script() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(script(shell).unwrap()).unwrap();
            assert!(script.contains("COMPLETE"), "{shell}: {script}");
        }
    }
}
