//! The commands that README and book show, for the tests that run them.
//!
//! A block's tag says where it is typed: `sh`, `sh,guest`, `sh,package` or `sh,source`. Commands
//! that a page needs but does not show are in comments: `<!-- sh: COMMAND -->` or
//! `<!-- sh,guest: COMMAND -->`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::daemon::program;
use crate::sandbox::Sandbox;

/// Program, configuration and daemon for every page.
const PRELUDE: &str = r#"
install -d /etc/forebay
cp /root/.packaged.toml /etc/forebay/forebay.toml
printf '[firmware]\nkeys = ["/etc/forebay/firmware.pub"]\n' >> /etc/forebay/forebay.toml
printf '[out_of_band]\nserial = "unix:/run/forebay/mctp.sock"\n' >> /etc/forebay/forebay.toml
printf 'allow = ["namespaces", "budgets", "devices", "format", "configuration", "firmware"]\n' >> /etc/forebay/forebay.toml
printf '[[out_of_band.function]]\nany_host = true\n' >> /etc/forebay/forebay.toml
install -d /srv; truncate -s 8G /srv/c.img
ln -sf /root/target/release/forebay /usr/local/bin/forebay
daemon() {
    forebay serve --config /etc/forebay/forebay.toml &
    for _ in $(seq 600); do forebay status > /dev/null 2>&1 && return; sleep 0.1; done
    return 1
}
set -x
"#;

/// Where a block's commands are typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The storage node (`sh`).
    Vm,
    /// A Linux host that uses it, as root (`sh,guest`).
    Host,
    /// A node on which the package is installed (`sh,package`).
    Package,
    /// A checkout (`sh,source`).
    Source,
    /// A machine with `nvme-cli` and the node's MCTP line (`sh,bmc`).
    Bmc,
}

/// A block of commands, or a comment with one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Where it is typed.
    pub place: Place,
    /// Its lines.
    pub lines: Vec<String>,
    /// Whether the page shows it.
    pub is_shown: bool,
}

/// A page.
#[derive(Debug, Clone)]
pub struct Page {
    /// Its file.
    pub path: PathBuf,
    /// Its commands, in order.
    pub parts: Vec<Part>,
}

impl Page {
    /// Whether it has commands for that place.
    #[must_use]
    pub fn has(&self, place: Place) -> bool {
        self.parts.iter().any(|part| part.place == place)
    }
}

/// The repository's root.
#[must_use]
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// README and the book's pages, in order. A block without a tag is an error.
pub fn pages() -> Result<Vec<Page>> {
    let book = repository().join("docs/src");
    let summary = fs::read_to_string(book.join("SUMMARY.md"))?;
    let links = summary.lines().filter_map(|line| {
        let (_, link) = line.split_once("](")?;
        Some(book.join(link.strip_suffix(')')?))
    });
    std::iter::once(repository().join("README.md"))
        .chain(links)
        .map(|path| {
            let doing = || path.display().to_string();
            let text = fs::read_to_string(&path).with_context(doing)?;
            let parts = parts(&text).with_context(doing)?;
            Ok(Page { path, parts })
        })
        .collect()
}

/// The parts of a page's text.
pub fn parts(text: &str) -> Result<Vec<Part>> {
    const COMMENTS: [(&str, Place); 2] =
        [("<!-- sh: ", Place::Vm), ("<!-- sh,guest: ", Place::Host)];
    let mut parts = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let hidden = COMMENTS
            .iter()
            .find_map(|(begin, place)| Some((line.strip_prefix(begin)?, *place)));
        if let Some((hidden, place)) = hidden {
            let hidden = hidden.strip_suffix(" -->");
            parts.push(Part {
                place,
                lines: vec![hidden.context("a comment without its end")?.to_owned()],
                is_shown: false,
            });
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let Some(kind) = line.trim_start().strip_prefix("```") else {
            continue;
        };
        let mut block = Vec::new();
        loop {
            let line = lines.next().context("a block without its end")?;
            if line.trim() == "```" {
                break;
            }
            block.push(line.get(indent..).unwrap_or_default().to_owned());
        }
        let place = match kind {
            "sh" => Place::Vm,
            "sh,guest" => Place::Host,
            "sh,package" => Place::Package,
            "sh,source" => Place::Source,
            "sh,bmc" => Place::Bmc,
            "" => bail!("a block without a kind: {block:?}"),
            other if other.starts_with("sh") => bail!("a block of an unknown kind: {other}"),
            _ => continue,
        };
        parts.push(Part {
            place,
            lines: block,
            is_shown: true,
        });
    }
    Ok(parts)
}

/// The storage node: a sandbox with the program where pages expect it.
pub fn vm() -> Result<Sandbox> {
    if let Some(missing) = Sandbox::unavailable() {
        bail!("the sandbox needs {missing}");
    }
    let sandbox = Sandbox::new()?;
    let release = sandbox.home().join("target/release");
    fs::create_dir_all(&release)?;
    // Not a link: the sandbox does not see the outer /tmp.
    fs::copy(program(), release.join("forebay"))?;
    let packaged = repository().join("packaging/forebay.toml");
    fs::copy(packaged, sandbox.home().join(".packaged.toml"))?;
    Ok(sandbox)
}

/// A script of these lines for [`vm`].
#[must_use]
pub fn script(lines: &[String]) -> String {
    format!("{PRELUDE}{}\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_taken_apart() {
        let page = "# A\n\n<!-- sh: one -->\n```sh\ntwo\n```\n\n1. x\n\n   ```sh,guest\n   three\n   ```\n```text\nfour\n```\n";
        let found = parts(page).unwrap();
        let reported: Vec<_> = found
            .iter()
            .map(|part| (part.place, part.lines[0].as_str(), part.is_shown))
            .collect();
        let expected = [
            (Place::Vm, "one", false),
            (Place::Vm, "two", true),
            (Place::Host, "three", true),
        ];
        assert_eq!(reported, expected);
        assert!(parts("```\nforebay\n```\n").is_err());
        assert!(parts("```sh,gust\nforebay\n```\n").is_err());
        assert!(parts("```sh\nforebay\n").is_err());
    }
}
