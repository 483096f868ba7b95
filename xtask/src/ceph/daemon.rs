//! A cluster's daemons as processes.

use std::fmt::{self, Display, Formatter};
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::packages::Programs;

/// Lines of a log that an error shows.
const LOG_LINES: usize = 15;
const KILL_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);

/// One of a cluster's daemons. Its text is Ceph's name for it, for example `osd.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Daemon {
    /// The monitor, `mon.a`.
    Monitor,
    /// The manager, `mgr.x`.
    Manager,
    /// An OSD, counted from 0.
    Osd(u32),
}

impl Display for Daemon {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Monitor => formatter.write_str("mon.a"),
            Self::Manager => formatter.write_str("mgr.x"),
            Self::Osd(number) => write!(formatter, "osd.{number}"),
        }
    }
}

impl Daemon {
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::Monitor => "ceph-mon",
            Self::Manager => "ceph-mgr",
            Self::Osd(_) => "ceph-osd",
        }
    }

    /// The part of its name after the dot.
    pub(super) fn id(self) -> String {
        let name = self.to_string();
        name.rsplit('.').next().unwrap_or_default().to_owned()
    }
}

/// The folder's `ceph.conf`. It is an argument of each daemon, by which its process is known.
pub(super) fn config_file(folder: &Path) -> PathBuf {
    folder.join("ceph.conf")
}

/// The folder with a file for each daemon that runs, which contains its pid.
pub(super) fn pid_folder(folder: &Path) -> PathBuf {
    folder.join("pids")
}

/// Starts a daemon's program with more arguments. One `in_background` is not reached by Ctrl-C.
pub(super) fn start(
    daemon: Daemon,
    more: &[&str],
    folder: &Path,
    programs: &Programs,
    in_background: bool,
) -> Result<Child> {
    let output = folder.join(format!("log/{daemon}.out"));
    let output = OpenOptions::new().create(true).append(true).open(output)?;
    let mut command = programs.command(daemon.program());
    command
        .args(["-f", "-i", &daemon.id(), "-c"])
        .arg(config_file(folder))
        .args(more)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output);
    if in_background {
        command.process_group(0);
    }
    let child = command.spawn();
    let child = child.with_context(|| format!("cannot start {daemon}"))?;
    let file = pid_folder(folder).join(daemon.to_string());
    std::fs::write(&file, child.id().to_string()).with_context(|| file.display().to_string())?;
    Ok(child)
}

/// Sends a signal to a process.
pub(super) fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(pid.context("no such process")?, signal).context("cannot send a signal")
}

/// Kills the folder's daemons by the pids of its files, and waits until all have ended.
pub(super) fn kill_all(folder: &Path) -> Result<()> {
    let config = config_file(folder);
    let mut pids = Vec::new();
    for entry in std::fs::read_dir(pid_folder(folder)).context("no folder with pids")? {
        let text = std::fs::read_to_string(entry?.path())?;
        pids.extend(text.parse::<u32>().ok());
    }
    // Another process may have the pid of a daemon that ended.
    pids.retain(|pid| has_argument(*pid, &config));
    for pid in &pids {
        // It may end at any time.
        let _ = signal(*pid, Signal::KILL);
    }
    let end = Instant::now() + KILL_LIMIT;
    while let Some(pid) = pids.iter().find(|pid| has_argument(**pid, &config)) {
        if Instant::now() >= end {
            bail!(
                "process {pid} still exists {} s after SIGKILL",
                KILL_LIMIT.as_secs()
            );
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// Whether a process exists and has this path among its arguments. A process that has ended, but
/// that no parent has waited for, has no arguments.
fn has_argument(pid: u32, path: &Path) -> bool {
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    arguments
        .split(|byte| *byte == 0)
        .any(|argument| argument == path.as_os_str().as_bytes())
}

/// The ends of all logs in the folder, for an error.
pub(super) fn ends_of_logs(folder: &Path) -> String {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder.join("log"))
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    files.sort();
    let mut text = String::new();
    for file in files {
        let Some(lines) = last_lines(&file) else {
            continue;
        };
        text.push_str(&format!("--- the end of {}\n{lines}", file.display()));
    }
    text
}

fn last_lines(file: &Path) -> Option<String> {
    /// Of the file's end, which is all that is read.
    const BYTES: u64 = 16 << 10;
    let file = File::open(file).ok()?;
    let length = file.metadata().ok()?.len();
    let from = length.saturating_sub(BYTES);
    let mut bytes = vec![0; usize::try_from(length - from).ok()?];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, from).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines.get(lines.len().saturating_sub(LOG_LINES)..)?;
    (!last.is_empty()).then(|| last.join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_known_by_its_argument() {
        let config = Path::new("/a/ceph.conf");
        let mut child = Command::new("sh")
            .args(["-c", "while read line; do :; done", "/a/ceph.conf"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id();
        let end = Instant::now() + KILL_LIMIT;
        while !has_argument(pid, config) && Instant::now() < end {
            std::thread::sleep(POLL); // until it is exec'd
        }
        assert!(has_argument(pid, config));
        assert!(!has_argument(pid, Path::new("/a/ceph")));
        signal(pid, Signal::KILL).unwrap();
        while has_argument(pid, config) && Instant::now() < end {
            std::thread::sleep(POLL);
        }
        assert!(!has_argument(pid, config));
        child.wait().unwrap();
    }

    #[test]
    fn only_the_end_of_a_log_is_shown() {
        let file = std::env::temp_dir().join(format!("xtask-log-{}", std::process::id()));
        let lines: String = (0..10_000).map(|line| format!("line {line}\n")).collect();
        std::fs::write(&file, lines).unwrap();
        let last = last_lines(&file).unwrap();
        assert_eq!(last.lines().count(), LOG_LINES);
        assert!(last.ends_with("line 9999\n"));
        std::fs::write(&file, "").unwrap();
        assert_eq!(last_lines(&file), None);
        std::fs::remove_file(&file).unwrap();
    }
}
