//! The command line's words, and its completion.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use super::definition;

/// Without hidden commands, which clap offers as a last resort.
pub(crate) fn completed() -> clap::Command {
    // Clap keeps names for the program's life.
    static ALL: OnceLock<clap::Command> = OnceLock::new();
    without_hidden(ALL.get_or_init(definition))
}

fn without_hidden(command: &'static clap::Command) -> clap::Command {
    let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    if !command.has_subcommands() {
        return command.clone();
    }
    let mut without = clap::Command::new(command.get_name())
        .args(command.get_arguments().cloned())
        .subcommands(shown.map(without_hidden));
    if let Some(about) = command.get_about() {
        without = without.about(about.clone());
    }
    without
}

/// Joins a negative number to its option, so that it is refused as a number.
pub(crate) fn words(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = Vec::new();
    for arg in args {
        let is_negative = matches!(arg.as_bytes(), [b'-', b'0'..=b'9', ..]);
        match words.last_mut() {
            Some(option) if is_negative && is_bare_option(option) => {
                option.push("=");
                option.push(arg);
            }
            _ => words.push(arg),
        }
    }
    words
}

fn is_bare_option(word: &OsStr) -> bool {
    let bytes = word.as_bytes();
    bytes.len() > 2 && bytes.starts_with(b"--") && !bytes.contains(&b'=')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_commands_are_not_completed() {
        fn hidden(command: &clap::Command) -> Vec<String> {
            let below = command.get_subcommands().flat_map(hidden);
            let own = command.is_hide_set().then(|| command.get_name().to_owned());
            own.into_iter().chain(below).collect()
        }
        assert!(!hidden(&definition()).is_empty());
        assert_eq!(hidden(&completed()), Vec::<String>::new());
        let names = |of: clap::Command| {
            of.find_subcommand("bench")
                .unwrap()
                .get_subcommands()
                .count()
        };
        assert_eq!(names(completed()) + 1, names(definition()));
        completed().debug_assert();
    }

    #[test]
    fn a_negative_number_is_its_option_s() {
        let line = "forebay volume create a/b --size -1 --block-size -5M x -3";
        let words = words(line.split(' ').map(OsString::from));
        let joined = words.join(OsStr::new(" ")).into_string().unwrap();
        assert_eq!(
            joined,
            "forebay volume create a/b --size=-1 --block-size=-5M x -3"
        );
    }
}
