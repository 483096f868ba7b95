//! `cargo xtask check shape`: limits on the size and the entanglement of the code.
//!
//! Purpose: a stranger can read each part without the rest.
//! Design: the sources are parsed, not compiled. Each check prints its figure and returns what is beyond its
//! limit. Tests don't count, in files of their own or under `cfg(test)`.
//! Not here: the style of a line (`fmt`, `clippy`), the order of the crates (`layers`).

mod functions;
mod imports;
mod lines;
mod names;
mod source;
mod types;

use anyhow::{Result, bail};

use self::source::Source;

/// Prints the figures; an error names all that is beyond a limit.
pub(crate) fn check() -> Result<()> {
    let sources = source::read(&crate::cargo::repository())?;
    let mut beyond = lines::check()?;
    beyond.extend(source::style(&sources));
    beyond.extend(functions::check(&sources));
    beyond.extend(types::check(&sources));
    beyond.extend(names::check(&sources));
    beyond.extend(imports::check(&sources));
    if !beyond.is_empty() {
        bail!("beyond the limits:\n{}", beyond.join("\n"));
    }
    Ok(())
}

/// Prints a figure of a check.
fn print(what: &str, count: usize, limit: &str) {
    println!("shape: {what}: {count} beyond {limit}");
}
