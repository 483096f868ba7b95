//! Runs cargo, and finds the repository and its target folder.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use xtask::process;

use crate::seconds;

pub(crate) fn repository() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_owned()
}

pub(crate) fn target_folder() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => repository().join(folder),
        None => repository().join("target"),
    }
}

/// The cargo that runs this, at the repository's top.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(args).current_dir(repository());
    command
}

/// Runs a command and adds its time to the table. Output appears at the end, as others run beside
/// it; on a terminal immediately.
pub(crate) fn step(
    kind: &'static str,
    name: &str,
    command: &mut Command,
    limit: Duration,
) -> Result<()> {
    let start = Instant::now();
    let is_watched = std::io::stdout().is_terminal();
    let mut said = String::new();
    command.stderr(Stdio::piped());
    let ended = process::lines(command, limit, |line| match is_watched {
        true => println!("{line}"),
        false => {
            said.push_str(line);
            said.push('\n');
        }
    });
    let cpu_s = ended.as_ref().map_or(0.0, |ended| ended.cpu_s);
    let wall_s = start.elapsed().as_secs_f64();
    seconds::add(kind, name, wall_s, cpu_s);
    println!("=== {name}: {wall_s:.1} s ===\n{said}");
    match ended?.status {
        status if status.success() => Ok(()),
        status => bail!("{name}: {status}"),
    }
}

/// In CI nothing may be skipped.
pub(crate) fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}
