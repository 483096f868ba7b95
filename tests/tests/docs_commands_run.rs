//! Every command that README and book show is run as it stands there.
//!
//! Purpose: a page can't tell of a command or an option that is not there any more.
//! Design: the blocks marked `sh` of a page are one script, in the page's order, in a sandbox of its own with
//! the program on its path; the first command that fails fails the page. What a page needs and does not show
//! is in comments, `<!-- sh: ... -->`. Blocks marked `sh,guest` belong to a Linux host and `sh,package` to an
//! installed package: their own tests run them (`linux_guest_*`, `package`). Of `sh,source` blocks, which
//! build and test, it is looked up that make and cargo know them.
//! Not here: the page of commands, whose examples are run as one session, from the file they come from.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use forebay_tests::daemon::target_folder;
use forebay_tests::sandbox::Sandbox;
use xtask::process;

const LIMIT: Duration = Duration::from_secs(180);

/// What every page may use: the program, the packaged configuration, and a daemon that is up.
const PRELUDE: &str = r#"
install -d /etc/forebay
cp /root/.packaged.toml /etc/forebay/forebay.toml
ln -sf /root/target/release/forebay /usr/local/bin/forebay
daemon() {
    forebay serve --config /etc/forebay/forebay.toml &
    for _ in $(seq 200); do forebay status > /dev/null 2>&1 && return; sleep 0.1; done
    return 1
}
set -x
"#;

#[test]
fn docs_commands_run() -> Result<()> {
    if let Some(missing) = Sandbox::unavailable() {
        bail!("the sandbox needs {missing}");
    }
    let mut blocks = 0;
    let mut failed = Vec::new();
    for page in pages()? {
        let text = fs::read_to_string(&page)?;
        let script = script(&text).with_context(|| page.display().to_string())?;
        blocks += script.blocks;
        if script.lines.is_empty() {
            continue;
        }
        if let Err(error) = run(&script.lines) {
            failed.push(format!("=== {}\n{error:#}", page.display()));
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    ensure!(blocks > 10, "only {blocks} blocks were found");
    Ok(())
}

#[test]
fn the_examples_of_commands_are_a_session() -> Result<()> {
    if let Some(missing) = Sandbox::unavailable() {
        bail!("the sandbox needs {missing}");
    }
    let examples = fs::read_to_string(repository().join("crates/forebay/src/cli/examples.txt"))?;
    let lines = examples
        .lines()
        .map(|example| match example.starts_with("serve ") {
            true => "daemon".to_owned(),
            false => format!("forebay {example}"),
        });
    run(&lines.collect::<Vec<_>>())
}

fn run(lines: &[String]) -> Result<()> {
    let sandbox = Sandbox::new()?;
    let release = sandbox.home().join("target/release");
    fs::create_dir_all(&release)?;
    let program = match std::env::var_os("FOREBAY_BIN") {
        Some(program) => PathBuf::from(program),
        None => target_folder().join("debug/forebay"),
    };
    // Not a link: what is below /tmp outside is not seen in the sandbox.
    fs::copy(program, release.join("forebay"))?;
    let packaged = repository().join("packaging/forebay.toml");
    fs::copy(packaged, sandbox.home().join(".packaged.toml"))?;
    let script = format!("{PRELUDE}{}\n", lines.join("\n"));
    sandbox.run(&script, LIMIT).map(drop)
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// README and the book's pages, in the book's order.
fn pages() -> Result<Vec<PathBuf>> {
    let book = repository().join("docs/src");
    let summary = fs::read_to_string(book.join("SUMMARY.md"))?;
    let links = summary.lines().filter_map(|line| {
        let (_, link) = line.split_once("](")?;
        Some(book.join(link.strip_suffix(')')?))
    });
    Ok(std::iter::once(repository().join("README.md"))
        .chain(links)
        .collect())
}

#[derive(Default)]
struct Script {
    lines: Vec<String>,
    /// Blocks of commands, of whatever kind.
    blocks: usize,
}

fn script(page: &str) -> Result<Script> {
    let mut script = Script::default();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(hidden) = line.strip_prefix("<!-- sh: ") {
            let hidden = hidden
                .strip_suffix(" -->")
                .context("a comment without its end")?;
            script.lines.push(hidden.to_owned());
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
        match kind {
            "sh" => script.lines.append(&mut block),
            "sh,source" => block.iter().try_for_each(|line| is_known(line))?,
            "sh,guest" | "sh,package" => {}
            "" => bail!("a block that does not say what it is: {block:?}"),
            _ => continue,
        }
        script.blocks += 1;
    }
    Ok(script)
}

/// Whether make or cargo know what a line of a `sh,source` block asks for.
fn is_known(line: &str) -> Result<()> {
    let line = line.split('#').next().unwrap_or_default();
    let words: Vec<&str> = line.split_whitespace().collect();
    let known = match words.as_slice() {
        [] => true,
        ["make", target] => Command::new("make")
            .args(["--dry-run", target])
            .current_dir(repository())
            .output()?
            .status
            .success(),
        ["cargo", "xtask", task, ..] => {
            let tasks = fs::read_to_string(repository().join("xtask/src/main.rs"))?;
            tasks.contains(&format!("Some(\"{task}\")"))
        }
        ["cargo", "build", ..] => true,
        _ => bail!("{line}: what is built from source is make's or cargo's"),
    };
    ensure!(known, "{line}: not known");
    Ok(())
}

#[test]
fn a_page_is_taken_apart() -> Result<()> {
    let page = "# A\n\n<!-- sh: one -->\n```sh\ntwo\n```\n\n1. x\n\n   ```sh\n   three\n   ```\n```text\nfour\n```\n";
    let script = script(page)?;
    assert_eq!(script.lines, ["one", "two", "three"]);
    assert_eq!(script.blocks, 2);
    assert!(self::script("```\nforebay\n```\n").is_err());
    assert!(self::script("```sh,source\nmake nothing-like-this\n```\n").is_err());
    self::script("```sh,source\nmake run     # it\ncargo xtask check\n```\n")?;
    Ok(())
}

/// Not a test of the pages, but of this one's teeth: a script that fails is a failure.
#[test]
fn a_command_that_fails_is_seen() -> Result<()> {
    if let Some(missing) = Sandbox::unavailable() {
        bail!("the sandbox needs {missing}");
    }
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    run(&lines("forebay --version\ntrue"))?;
    let error = run(&lines("forebay status --no-such-option\ntrue")).err();
    let error = error.context("an unknown option went by")?;
    ensure!(
        format!("{error:#}").contains("--no-such-option"),
        "{error:#}"
    );
    ensure!(process::is_installed("bash"), "bash");
    Ok(())
}
