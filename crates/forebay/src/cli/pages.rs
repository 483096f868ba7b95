//! `forebay completion` and `forebay man`.
//!
//! Purpose: what a package installs beside the program, made by the program itself.
//! Design: generated from the command line's definition, so it can't fall behind it.
//! Not here: where a package puts it (`cargo xtask package`).

use std::path::Path;

use clap_complete::Shell;

use super::definition;
use crate::failure::{Outcome, While};
use crate::output::print;

/// Prints the completion script for a shell.
pub(crate) fn completion(shell: Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut definition(), "forebay", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Writes a manual page for each command to a folder, which is made if it is missing.
pub(crate) fn manual(folder: &Path) -> Outcome {
    let doing = || format!("write manual pages to {}", folder.display());
    std::fs::create_dir_all(folder).while_doing(doing())?;
    clap_mangen::generate_to(definition(), folder).while_doing(doing())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_its_page() {
        let folder = tempfile::tempdir().unwrap();
        let pages = folder.path().join("man");
        manual(&pages).unwrap();
        let page = std::fs::read_to_string(pages.join("forebay-export-set.1")).unwrap();
        assert!(
            page.contains("listed") && page.contains("Example"),
            "{page}"
        );
        assert!(pages.join("forebay.1").exists());
        assert!(!pages.join("forebay-engine.1").exists());
    }

    #[test]
    fn every_shell_gets_its_script() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut definition(), "forebay", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["export", "any-host", "completion"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
