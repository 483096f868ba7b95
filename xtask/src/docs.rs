//! Builds the documentation: `cargo doc`, the book in `docs/`, and checks of links between pages.
//!
//! mdbook comes from the search path or its Debian package in the cache, as compiling it takes
//! minutes. It checks no links, so relative links and the table of contents are checked here; web
//! links and anchors are not. Names of code are checked in [`named_code`].

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::cache;
use xtask::debian::{self, PrivateApt, Sysroot};
use xtask::process;

use crate::cargo::{cargo, in_ci, repository, step};
use crate::named_code;
use crate::programs::FEATURES;

/// Suite of mdbook.
const SUITE: &str = "trixie";
/// In the cache.
const MDBOOK: &str = "mdbook-trixie";
const LIMIT: Duration = Duration::from_secs(20 * 60);

pub(crate) fn check() -> Result<()> {
    let pages = pages()?;
    let broken = broken_links(&pages)?;
    if !broken.is_empty() {
        bail!("broken links:\n{}", broken.join("\n"));
    }
    let missing = missing_chapters(&pages)?;
    if !missing.is_empty() {
        bail!("not in docs/src/SUMMARY.md:\n{}", missing.join("\n"));
    }
    named_code::check()?;
    book()?;
    // Documentation is for contributors, so it may link to private items.
    let flags = "--deny warnings --allow rustdoc::private_intra_doc_links";
    let args = [
        "doc",
        "--no-deps",
        "--workspace",
        "--document-private-items",
    ];
    let mut command = cargo(&args);
    command.args(FEATURES).env("RUSTDOCFLAGS", flags);
    step("check", "rustdoc", &mut command, LIMIT)
}

fn book() -> Result<()> {
    match mdbook() {
        Ok(mut mdbook) => {
            mdbook.arg("build").arg(repository().join("docs"));
            step("check", "book", &mut mdbook, LIMIT)
        }
        Err(error) if in_ci() => Err(error),
        Err(error) => {
            println!("skipped: the book, because mdbook is missing: {error:#}");
            Ok(())
        }
    }
}

fn mdbook() -> Result<Command> {
    if process::is_installed("mdbook") {
        return Ok(Command::new("mdbook"));
    }
    let folder = cache::get(MDBOOK, |work| {
        if let Some(missing) = debian::unavailable() {
            bail!("missing: {missing}");
        }
        let apt = PrivateApt::open(&work.join("apt"), SUITE)?;
        for package in apt.download_with_dependencies(&["mdbook"])? {
            debian::unpack(&package, &work.join("result"))?;
        }
        Ok(())
    })?;
    Ok(Sysroot::new(folder).command("usr/bin/mdbook", "mdbook"))
}

/// Pages at the repository's top and in the book.
fn pages() -> Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    let mut folders = vec![repository().join("docs")];
    let is_page = |path: &Path| path.extension().is_some_and(|ending| ending == "md");
    for entry in std::fs::read_dir(repository())? {
        let path = entry?.path();
        if is_page(&path) {
            pages.push(path);
        }
    }
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() && path.file_name().is_none_or(|name| name != "book") {
                folders.push(path);
            } else if is_page(&path) {
                pages.push(path);
            }
        }
    }
    Ok(pages)
}

fn broken_links(pages: &[PathBuf]) -> Result<Vec<String>> {
    let mut broken = Vec::new();
    for page in pages {
        let text = std::fs::read_to_string(page)?;
        let folder = page.parent().unwrap_or(Path::new("."));
        for link in relative_links(&text) {
            if !folder.join(link).exists() {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    Ok(broken)
}

/// Pages missing from the table of contents.
fn missing_chapters(pages: &[PathBuf]) -> Result<Vec<String>> {
    let source = repository().join("docs/src");
    let summary = source.join("SUMMARY.md");
    let text = std::fs::read_to_string(&summary).context("docs/src/SUMMARY.md")?;
    let chapters: Vec<PathBuf> = relative_links(&text)
        .into_iter()
        .map(|link| source.join(link))
        .collect();
    Ok(pages
        .iter()
        .filter(|page| page.starts_with(&source) && **page != summary)
        .filter(|page| !chapters.contains(page))
        .map(|page| page.display().to_string())
        .collect())
}

/// Relative link targets outside code, without anchors.
fn relative_links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        // odd pieces between backticks are code
        for prose in line.split('`').step_by(2) {
            for rest in prose.split("](").skip(1) {
                let target = rest.split([')', ' ']).next().unwrap_or_default();
                let target = target.split('#').next().unwrap_or_default();
                if !target.is_empty() && !target.contains(':') {
                    links.push(target);
                }
            }
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::relative_links;

    #[test]
    fn finds_links_to_pages_only() {
        let text = "[a](a.md) and [b](sub/b.md#part), [w](https://example.org/x.md), [here](#x)\n\
                    `[code](c.md)` [d](d.md)\n```\n[block](e.md)\n```\n![picture](p.svg \"title\")\n";
        assert_eq!(relative_links(text), ["a.md", "sub/b.md", "d.md", "p.svg"]);
    }
}
