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
