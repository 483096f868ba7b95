//! Names of code in the book: each pair "`function` (`file`)" of the page on the architecture must exist.
//!
//! A name may be `function`, `Type::function`, `module::function` or `Type`. The file is relative to `crates/`.

use anyhow::{Context, Result, bail};
use regex::Regex;

use crate::cargo::repository;

const PAGE: &str = "docs/src/architecture.md";

pub(crate) fn check() -> Result<()> {
    let page = std::fs::read_to_string(repository().join(PAGE)).context(PAGE)?;
    let crates = repository().join("crates");
    let read = |file: &str| std::fs::read_to_string(crates.join(file)).unwrap_or_default();
    match &missing(&page, read)?[..] {
        [] => Ok(()),
        missing => bail!("{PAGE} names missing code:\n{}", missing.join("\n")),
    }
}

/// The pairs that the code lacks. `read` returns no text for a missing file. A page without pairs is an error.
fn missing(page: &str, read: impl Fn(&str) -> String) -> Result<Vec<String>> {
    let pairs = Regex::new(r"`([A-Za-z0-9_:]+)`\s+\(`([^`\s]+\.rs)`\)")?;
    let (mut missing, mut any) = (Vec::new(), false);
    for pair in pairs.captures_iter(page) {
        any = true;
        let (name, file, text) = (&pair[1], &pair[2], read(&pair[2]));
        let (of, last) = name.rsplit_once("::").unwrap_or(("", name));
        let defined = Regex::new(&format!(r"\b(fn|struct|enum|trait|const) {last}\b"))?;
        let of_type = !of.starts_with(char::is_uppercase) || text.contains(of);
        if !defined.is_match(&text) || !of_type {
            missing.push(format!("`{name}` (`{file}`)"));
        }
    }
    if !any {
        bail!("no pair of a function and its file");
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_pair_names_a_file_and_a_function_in_it() {
        let read = |file: &str| match file {
            "a.rs" => "impl A { fn go_on() {} }".to_owned(),
            _ => String::new(),
        };
        let missing = |page| super::missing(page, read);
        let good = "1. `A::go_on` (`a.rs`): x.\n2. `b` and `a::go_on`\n   (`a.rs`)";
        assert!(missing(good).unwrap().is_empty());
        for bad in ["`go` (`a.rs`)", "`B::go_on` (`a.rs`)", "`go_on` (`b.rs`)"] {
            assert_eq!(missing(bad).unwrap(), [bad]);
        }
        assert!(missing("`go_on` is in `a.rs`").is_err());
    }
}
