//! `cargo xtask check shape`: limits on the size and entanglement of production code.
//!
//! Sources are parsed, not compiled. Each check prints a number and returns violations.

mod functions;
mod imports;
mod lines;
mod names;
mod source;
mod types;

use anyhow::{Result, bail};

use self::source::Source;

/// Prints all checks; the error lists the violations.
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

fn print(what: &str, count: usize, limit: &str) {
    println!("shape: {what}: {count} beyond {limit}");
}
