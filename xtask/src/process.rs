//! Programs with a time limit.
//!
//! At the limit the process tree is found in `/proc` and killed by pid, never by name. Programs
//! stay in the caller's process group, so Ctrl-C reaches them.

use std::collections::HashMap;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

const POLL: Duration = Duration::from_millis(20);
/// Time for orphans to close their output.
const GRACE: Duration = Duration::from_secs(2);

/// A program's end.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// Processor seconds, including children that it waited for.
    pub cpu_s: f64,
}

/// Runs `command` with the caller's streams. Fails on a bad status; kills it at `limit`.
pub fn run(command: &mut Command, limit: Duration) -> Result<()> {
    let name = describe(command);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let status = wait(&mut child, limit).with_context(|| name.clone())?;
    if !status.success() {
        bail!("{name}: {status}");
    }
    Ok(())
}

/// As [`run`], but returns standard output; an error includes standard error.
pub fn output(command: &mut Command, limit: Duration) -> Result<Vec<u8>> {
    command.stderr(Stdio::piped());
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let status = pump(command, limit, |stream, bytes| match stream {
        Stream::Output => stdout.extend(bytes),
        Stream::Error => stderr.extend(bytes),
    })?;
    let status = status.status;
    if !status.success() {
        let name = describe(command);
        bail!("{name}: {status}\n{}", String::from_utf8_lossy(&stderr));
    }
    Ok(stdout)
}

/// Passes each output line to `on_line`, also of standard error if that is piped. Returns how
/// `command` ended, also on failure; kills it at `limit`.
pub fn lines(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<Ended> {
    let (mut output, mut error) = (Vec::new(), Vec::new());
    let ended = pump(command, limit, |stream, bytes| {
        let rest = match stream {
            Stream::Output => &mut output,
            Stream::Error => &mut error,
        };
        rest.extend(bytes);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            on_line(&String::from_utf8_lossy(&line[..end]));
        }
    })?;
    for rest in [output, error] {
        if !rest.is_empty() {
            on_line(&String::from_utf8_lossy(&rest));
        }
    }
    Ok(ended)
}

/// As [`output`], as text.
pub fn text(command: &mut Command, limit: Duration) -> Result<String> {
    Ok(String::from_utf8_lossy(&output(command, limit)?).into_owned())
}

/// Waits for `child`; kills its process tree at the limit.
pub fn wait(child: &mut Child, limit: Duration) -> Result<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= end {
            kill_tree(child.id());
            let _ = child.wait();
            bail!("still running after {} s, killed", limit.as_secs());
        }
        std::thread::sleep(POLL);
    }
}

/// Kills a process and its descendants by pid.
pub fn kill_tree(root: u32) {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for (pid, parent) in processes() {
        children.entry(parent).or_default().push(pid);
    }
    let mut tree = vec![root];
    let mut next = 0;
    while let Some(pid) = tree.get(next).copied() {
        tree.extend(children.remove(&pid).unwrap_or_default());
        next += 1;
    }
    for pid in tree {
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Whether a program is on the search path.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|folder| folder.join(program).is_file())
}

/// Pairs of process and parent.
fn processes() -> Vec<(u32, u32)> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // pid (name, may contain anything) state parent ...
            let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
            Some((pid, parent.parse().ok()?))
        })
        .collect()
}

#[derive(Debug, Clone, Copy)]
enum Stream {
    Output,
    Error,
}

type Piece = (Stream, Vec<u8>);

fn pump(
    command: &mut Command,
    limit: Duration,
    mut take: impl FnMut(Stream, Vec<u8>),
) -> Result<Ended> {
    let name = describe(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let (sender, pieces) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        read(Stream::Output, stdout, sender.clone());
    }
    if let Some(stderr) = child.stderr.take() {
        read(Stream::Error, stderr, sender.clone());
    }
    drop(sender);

    let mut end = Instant::now() + limit;
    let mut ended = None;
    let mut are_open = true;
    loop {
        match pieces.recv_timeout(POLL) {
            Ok((stream, bytes)) => take(stream, bytes),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                are_open = false;
                if ended.is_none() {
                    std::thread::sleep(POLL); // it may still be running
                }
            }
        }
        if ended.is_none() {
            ended = try_end(&mut child)?;
            if ended.is_some() {
                // Orphans may hold the streams open forever.
                end = end.min(Instant::now() + GRACE);
            }
        }
        if let Some(ended) = ended
            && !are_open
        {
            return Ok(ended);
        }
        if Instant::now() >= end {
            if let Some(ended) = ended {
                return Ok(ended);
            }
            kill_tree(child.id());
            let _ = child.wait();
            bail!("{name}: still running after {} s, killed", limit.as_secs());
        }
    }
}

fn try_end(child: &mut Child) -> Result<Option<Ended>> {
    // The kernel keeps the times until it is reaped.
    let pid = Pid::from_child(child);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    if waitid(WaitId::Pid(pid), options)?.is_none() {
        return Ok(None);
    }
    let cpu_s = cpu_seconds(child.id()).unwrap_or_default();
    let status = child.wait()?;
    Ok(Some(Ended { status, cpu_s }))
}

/// proc_pid_stat(5): utime, stime, cutime and cstime are fields 14 to 17, in clock ticks.
fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields = stat.rsplit_once(')')?.1.split_whitespace();
    let ticks = fields
        .skip(14 - 3)
        .take(4)
        .map(|field| field.parse::<u64>().ok());
    let ticks: u64 = ticks.sum::<Option<u64>>()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn read(stream: Stream, mut from: impl Read + Send + 'static, to: mpsc::Sender<Piece>) {
    std::thread::spawn(move || {
        let mut buffer = [0; 8192];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if to.send((stream, buffer[..length].to_vec())).is_err() {
                break;
            }
        }
    });
}

fn describe(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(
        command
            .get_args()
            .take(8)
            .map(|word| word.to_string_lossy().into_owned()),
    );
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_returned_and_failure_is_an_error() {
        let limit = Duration::from_secs(120);
        let said = text(Command::new("sh").args(["-c", "echo out"]), limit).unwrap();
        assert_eq!(said, "out\n");
        let error = text(
            Command::new("sh").args(["-c", "echo why >&2; exit 3"]),
            limit,
        )
        .unwrap_err();
        assert!(error.to_string().contains("why"), "{error}");
    }

    #[test]
    fn lines_arrive_singly_and_left_behind_children_are_not_awaited() {
        let mut lines_seen = Vec::new();
        let script = "echo one; printf 'two\\nthree'; sleep 1000 & echo $! >&2";
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec 2>&1; {script}")]);
        let status = lines(&mut command, Duration::from_secs(60), |line| {
            lines_seen.push(line.to_owned());
        });
        assert!(status.unwrap().status.success());
        let (pid, text) = lines_seen.split_last().unwrap();
        assert_eq!(text, ["one", "two"]);
        let pid = pid.trim_start_matches("three").parse().unwrap();
        assert!(is_alive(pid));
        kill_tree(pid);
    }

    #[test]
    fn both_streams_are_lines_and_the_time_used_is_known() {
        let script =
            "printf o; echo e >&2; i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo ut";
        let mut seen = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", script]).stderr(Stdio::piped());
        let ended = lines(&mut command, Duration::from_secs(120), |line| {
            seen.push(line.to_owned());
        });
        assert_eq!(seen, ["e", "out"]);
        assert!(ended.unwrap().cpu_s > 0.0);
    }

    #[test]
    fn at_the_limit_the_whole_tree_is_killed() {
        let folder = std::env::temp_dir().join(format!("xtask-tree-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pid_file = folder.join("pid");
        let script = format!(
            "sleep 1000 >/dev/null 2>&1 & echo $! > {}; wait",
            pid_file.display()
        );
        // Longer limits for slow machines, so that there is a tree.
        for limit in [2, 20, 120] {
            let mut command = Command::new("sh");
            let ran = run(command.args(["-c", &script]), Duration::from_secs(limit));
            let error = format!("{:#}", ran.unwrap_err());
            assert!(error.contains("still running"), "{error}");
            if std::fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n')) {
                break;
            }
        }
        let pid = std::fs::read_to_string(&pid_file).unwrap();
        let pid: u32 = pid.trim().parse().unwrap();
        let end = Instant::now() + Duration::from_secs(120);
        while is_alive(pid) {
            assert!(Instant::now() < end, "the grandchild {pid} survived");
            std::thread::sleep(POLL);
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    fn is_alive(pid: u32) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .ok()
            .and_then(|stat| Some(!stat.rsplit_once(") ")?.1.starts_with('Z')))
            .unwrap_or(false)
    }
}
