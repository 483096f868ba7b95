//! Programs with a time limit.
//!
//! Purpose: whatever a task or a test starts ends, by itself or at its limit, together with what it
//! started in turn.
//! Design: the caller's process group is kept, so that Ctrl-C in a terminal still reaches everyone; at
//! the limit the process tree is found through `/proc` and killed by pid, children first found, so
//! nothing is ever killed by name.
//! Not here: anything asynchronous; a thread reads what a program prints.

use std::collections::HashMap;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

const POLL: Duration = Duration::from_millis(20);

/// Runs `command` to its end, with the caller's standard streams.
///
/// # Errors
/// If it can't be started, fails, or is still running after `limit` (it is killed then).
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

/// Runs `command` to its end and returns what it printed on standard output.
///
/// # Errors
/// As [`run`]; the error has what the program said on standard error.
pub fn output(command: &mut Command, limit: Duration) -> Result<Vec<u8>> {
    let name = describe(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let status = wait(&mut child, limit).with_context(|| name.clone())?;
    let stdout = stdout.join().unwrap_or_default();
    let stderr = stderr.join().unwrap_or_default();
    if !status.success() {
        bail!("{name}: {status}\n{}", String::from_utf8_lossy(&stderr));
    }
    Ok(stdout)
}

/// As [`output`], as text.
///
/// # Errors
/// As [`run`].
pub fn text(command: &mut Command, limit: Duration) -> Result<String> {
    Ok(String::from_utf8_lossy(&output(command, limit)?).into_owned())
}

/// Waits for `child`; at the limit, kills it and everything below it.
///
/// # Errors
/// If the limit is reached, or the child can't be waited for.
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

/// Kills the process `root` and all its descendants, each by its pid.
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

/// Whether a program of this name is on the search path.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|folder| folder.join(program).is_file())
}

/// All processes, each with its parent.
fn processes() -> Vec<(u32, u32)> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // pid (name, may hold anything) state parent ...
            let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
            Some((pid, parent.parse().ok()?))
        })
        .collect()
}

fn collect<R: Read + Send + 'static>(stream: Option<R>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        bytes
    })
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
        let limit = Duration::from_secs(20);
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
    fn at_the_limit_the_whole_tree_is_killed() {
        let folder = std::env::temp_dir().join(format!("xtask-tree-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pid_file = folder.join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", pid_file.display());
        let error = run(
            Command::new("sh").args(["-c", &script]),
            Duration::from_secs(2),
        )
        .unwrap_err();
        assert!(format!("{error:#}").contains("still running"), "{error:#}");
        let pid = std::fs::read_to_string(&pid_file).unwrap();
        let pid: u32 = pid.trim().parse().unwrap();
        let end = Instant::now() + Duration::from_secs(20);
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
