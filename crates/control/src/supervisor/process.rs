//! One engine process: started, found again, watched, ended.
//!
//! A pidfd watches it, which also works if an earlier daemon started it. `engine.json` in the run
//! folder records it: before the start, so that it is found even if the daemon dies right then, and
//! again with its process id. The recorded start time detects a reused id.

use std::cell::{Cell, RefCell};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Deserializer, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::config::EngineConfig;
use crate::files;
use crate::firmware::Slot;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EngineState {
    Starting,
    #[default]
    Running,
}

/// Earlier daemons wrote 0 before the start.
fn pid<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let pid = Option::deserialize(from)?;
    Ok(pid.filter(|pid| *pid != 0))
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct EngineRecord {
    #[serde(default)]
    pub(crate) state: EngineState,
    /// Set once it runs.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "pid"
    )]
    pub(crate) pid: Option<u32>,
    pub(crate) generation: u64,
    pub(crate) socket: PathBuf,
    /// Clock ticks from boot to its start, as in /proc.
    pub(crate) start_ticks: u64,
    /// The daemon that wrote this; 0 if it left the engine to its successor.
    pub(crate) daemon_pid: u32,
    #[serde(default)]
    pub(crate) formats: String,
    /// The firmware slot of its program.
    #[serde(default)]
    pub(crate) slot: Slot,
}

/// The end of a log that is searched for its last line.
const LAST_WORDS_BYTES: u64 = 1024;

#[derive(Debug)]
pub(crate) struct EngineProcess {
    pub(crate) pid: u32,
    pub(crate) generation: u64,
    pub(crate) socket: PathBuf,
    pub(crate) slot: Slot,
    pidfd: AsyncFd<OwnedFd>,
    /// [`out_of_memory_kills`] at the last two checks.
    kills_before: Cell<[Option<u64>; 2]>,
    pub(crate) log_trouble: Option<String>,
    /// Set if this daemon started it.
    child: RefCell<Option<Child>>,
}

pub(crate) fn record_path(run_dir: &Path) -> PathBuf {
    run_dir.join("engine.json")
}

pub(crate) fn recorded(run_dir: &Path) -> io::Result<Option<EngineRecord>> {
    files::read_json(&record_path(run_dir))
}

/// The 22nd field of /proc/PID/stat, for a process that is not a zombie.
pub(super) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(fields.first(), Some(&("Z" | "X"))) {
        return None;
    }
    fields.get(22 - 3)?.parse().ok()
}

/// Readable when the process has ended.
pub(super) fn watch(pid: u32) -> io::Result<AsyncFd<OwnedFd>> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let number = number.ok_or_else(|| io::Error::other(format!("{pid} is not a process ID")))?;
    let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
    crate::readiness::watch(pidfd, Interest::READABLE)
}

/// A thread waits for the process, because it may hang in the kernel.
pub(super) fn end(mut child: Child) {
    if let Err(error) = child.kill() {
        tracing::error!(pid = child.id(), %error, "can't kill a process that can't be watched");
    }
    std::thread::spawn(move || child.wait());
}

fn cause(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}{}", signal_name(signal)),
        (None, None) => "unknown".to_owned(),
    }
}

/// Added to the cause if the out-of-memory killer was active when the process was killed.
pub(super) const OUT_OF_MEMORY: &str = "the kernel ran out of memory meanwhile";

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Kills before the last period have nothing to do with a death.
const OUT_OF_MEMORY_INTERVAL: Duration = Duration::from_secs(10);

/// Kills by the kernel's out-of-memory killer since boot, if known.
fn out_of_memory_kills() -> Option<u64> {
    let counters = std::fs::read_to_string("/proc/vmstat").ok()?;
    let mut counters = counters.lines();
    let count = counters.find_map(|line| line.strip_prefix("oom_kill "))?;
    count.parse().ok()
}

pub(super) fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        3 => " (SIGQUIT)",
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        31 => " (SIGSYS)",
        _ => "",
    }
}

/// The role for kill points: this daemon's first engine is `engine1`.
#[cfg(feature = "test-device")]
fn next_role() -> String {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    static STARTED: AtomicU32 = AtomicU32::new(0);
    format!("engine{}", STARTED.fetch_add(1, Relaxed) + 1)
}

impl EngineConfig {
    pub(super) fn command(&self, socket: &Path, generation: u64) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("engine")
            .arg("--socket")
            .arg(socket)
            .arg("--generation")
            .arg(generation.to_string())
            .arg("--reactors")
            .arg(self.reactors.to_string());
        if !self.cpus.is_empty() {
            let list: Vec<String> = self.cpus.iter().map(u16::to_string).collect();
            command.arg("--cpus").arg(list.join(","));
        }
        command
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o640).open(path)
}

/// Written if there is room. Without it the engine serves, but the next daemon may not find it.
pub(super) fn note(path: &Path, record: &EngineRecord) {
    if let Err(error) = files::write_json(path, record, false) {
        tracing::warn!(%error, generation = record.generation, "can't record the engine");
    }
}

pub(crate) fn set_daemon(run_dir: &Path, daemon_pid: u32) {
    match recorded(run_dir) {
        Ok(Some(record)) => note(
            &record_path(run_dir),
            &EngineRecord {
                daemon_pid,
                ..record
            },
        ),
        Ok(None) => {}
        Err(error) => tracing::warn!(%error, "can't record which daemon the engine belongs to"),
    }
}

impl EngineProcess {
    /// `generation` must be durable in the catalog. Returns the daemon's end of the first session.
    pub(crate) fn start(
        config: &EngineConfig,
        slot: Slot,
        run_dir: &Path,
        log: &Path,
        generation: u64,
    ) -> io::Result<(Self, OwnedFd)> {
        Self::start_watched(config, slot, run_dir, log, generation, watch)
    }

    fn start_watched(
        config: &EngineConfig,
        slot: Slot,
        run_dir: &Path,
        log: &Path,
        generation: u64,
        watch: impl FnOnce(u32) -> io::Result<AsyncFd<OwnedFd>>,
    ) -> io::Result<(Self, OwnedFd)> {
        let socket = run_dir.join(format!("engine-{generation}.sock"));
        let mut record = EngineRecord {
            state: EngineState::Starting,
            pid: None,
            generation,
            socket: socket.clone(),
            start_ticks: 0,
            daemon_pid: std::process::id(),
            formats: forebay_xlate::boundary::formats(),
            slot,
        };
        let record_at = record_path(run_dir);
        note(&record_at, &record);
        let (log, log_trouble) = match open_log(log) {
            Ok(file) => (file, None),
            Err(error) => {
                let trouble = format!(
                    "the engine's log {} can't be written: {error}; the messages of this engine are lost, and the next \
                    one tries again",
                    log.display()
                );
                (File::create("/dev/null")?, Some(trouble))
            }
        };
        let mut command = config.command(&socket, generation);
        command.arg("--run-dir").arg(run_dir);
        let (channel, theirs) = forebay_xlate::boundary::socket::pair()?;
        #[cfg(feature = "test-device")]
        command.env(forebay_xlate::kill::ROLE_VARIABLE, next_role());
        command
            .arg("--daemon-on-stdin")
            .stdin(Stdio::from(theirs))
            .stdout(log.try_clone()?)
            .stderr(log)
            // Keeps signals to the daemon's terminal from the engine.
            .process_group(0);
        let child = command.spawn().map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("can't start {}: {error}", config.program.display()),
            )
        })?;
        let pid = child.id();
        let pidfd = match watch(pid) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                end(child);
                return Err(io::Error::new(
                    error.kind(),
                    format!("can't watch the engine (pid {pid}), which is killed: {error}"),
                ));
            }
        };
        let process = Self {
            pid,
            generation,
            socket,
            slot,
            pidfd,
            kills_before: Cell::new([out_of_memory_kills(); 2]),
            log_trouble,
            child: RefCell::new(Some(child)),
        };
        record.state = EngineState::Running;
        record.pid = Some(pid);
        record.start_ticks = start_ticks(pid).unwrap_or(0);
        note(&record_at, &record);
        Ok((process, channel))
    }

    pub(crate) fn find(record: &EngineRecord) -> io::Result<Option<Self>> {
        let gone = Some(rustix::io::Errno::SRCH.raw_os_error());
        let Some(pid) = record.pid else {
            return Ok(None);
        };
        let pidfd = match watch(pid) {
            Ok(pidfd) => pidfd,
            Err(error) if error.raw_os_error() == gone => return Ok(None),
            Err(error) => return Err(error),
        };
        // After `pidfd_open`, the number can't be reused unnoticed.
        if start_ticks(pid) != Some(record.start_ticks) {
            return Ok(None);
        }
        Ok(Some(Self::recorded_as(record, pid, pidfd)))
    }

    /// An engine that was recorded before its process id was known, and has reported it since.
    pub(crate) fn reported(record: &EngineRecord, pid: u32) -> io::Result<Self> {
        let pidfd = watch(pid)?;
        Ok(Self::recorded_as(record, pid, pidfd))
    }

    fn recorded_as(record: &EngineRecord, pid: u32, pidfd: AsyncFd<OwnedFd>) -> Self {
        Self {
            pid,
            generation: record.generation,
            socket: record.socket.clone(),
            slot: record.slot,
            pidfd,
            kills_before: Cell::new([out_of_memory_kills(); 2]),
            log_trouble: None,
            child: RefCell::new(None),
        }
    }

    /// Returns how the process ended, as far as known.
    pub(crate) async fn ended(&self) -> String {
        loop {
            match tokio::time::timeout(OUT_OF_MEMORY_INTERVAL, self.pidfd.readable()).await {
                Ok(Ok(_)) => break,
                Ok(Err(error)) => {
                    // The runtime's watch failed: poll the descriptor.
                    tracing::error!(%error, pid = self.pid, "can't watch the engine");
                    while !self.has_ended() {
                        tokio::time::sleep(POLL_INTERVAL).await;
                    }
                    break;
                }
                Err(_) => {
                    let [_, last] = self.kills_before.get();
                    self.kills_before.set([last, out_of_memory_kills()]);
                }
            }
        }
        // It has ended, so this doesn't wait.
        let status = self.child.borrow_mut().as_mut().map(Child::wait);
        let how = match status {
            Some(Ok(status)) => cause(status),
            Some(Err(_)) | None => "unknown (an earlier daemon started it)".to_owned(),
        };
        let [before, _] = self.kills_before.get();
        let at_work = out_of_memory_kills() > before;
        match how == cause(ExitStatus::from_raw(Signal::KILL.as_raw())) && at_work {
            true => format!("{how}; {OUT_OF_MEMORY}"),
            false => how,
        }
    }

    fn has_ended(&self) -> bool {
        let mut fd = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        let now = rustix::event::Timespec::default();
        rustix::event::poll(&mut fd, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Whether this daemon started it.
    pub(super) fn is_own(&self) -> bool {
        self.child.borrow().is_some()
    }

    pub(crate) fn kill(&self) {
        match rustix::process::pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::error!(pid = self.pid, %error, "can't kill the engine"),
        }
    }
}

/// Adds the log's path, and its last line after `from` bytes.
pub(super) fn with_last_words(cause: String, log: &Path, from: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let file = File::open(log)?;
        let end = file.metadata()?.len();
        let from = from.max(end.saturating_sub(LAST_WORDS_BYTES)).min(end);
        let mut said = vec![0; (end - from) as usize];
        file.read_exact_at(&mut said, from)?;
        Ok(said)
    };
    let said = read().unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let last = said.lines().map(str::trim).rfind(|line| !line.is_empty());
    match last {
        Some(line) => format!("{cause}; its last line in {}: {line}", log.display()),
        None => format!("{cause}; {} says nothing about it", log.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(folder: &Path, script: &str) -> EngineConfig {
        use std::os::unix::fs::PermissionsExt;
        let program = folder.join("engine.sh");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        EngineConfig {
            program,
            reactors: 1,
            cpus: vec![0, 1],
            stuck_after: std::time::Duration::ZERO,
        }
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    }

    #[test]
    fn a_process_is_started_found_again_and_its_exit_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        runtime().block_on(async {
            let config = program(folder.path(), "echo \"$@\"; exec sleep 1000");
            let log = folder.path().join("log/engine.log");
            let (process, _channel) =
                EngineProcess::start(&config, Slot::Installed, folder.path(), &log, 7).unwrap();
            let record = recorded(folder.path()).unwrap().unwrap();
            assert_eq!((record.pid, record.generation), (Some(process.pid), 7));
            let again = EngineProcess::find(&record).unwrap().unwrap();
            assert_eq!(again.pid, process.pid);
            let other = EngineRecord {
                start_ticks: record.start_ticks + 1,
                ..record.clone()
            };
            assert!(
                EngineProcess::find(&other).unwrap().is_none(),
                "a number used again"
            );
            again.kill();
            assert_eq!(process.ended().await, "signal 9 (SIGKILL)");
            again.ended().await;
            assert!(EngineProcess::find(&record).unwrap().is_none());
        });
    }

    #[test]
    fn an_engine_that_is_not_started_yet_has_no_process() {
        let folder = tempfile::tempdir().unwrap();
        runtime().block_on(async {
            let mut config = program(folder.path(), "");
            config.program = folder.path().join("missing");
            let log = folder.path().join("engine.log");
            EngineProcess::start(&config, Slot::Installed, folder.path(), &log, 3).unwrap_err();
            let record = recorded(folder.path()).unwrap().unwrap();
            assert_eq!((record.state, record.pid), (EngineState::Starting, None));
            assert!(EngineProcess::find(&record).unwrap().is_none());
            let at = record_path(folder.path());
            let said: serde_json::Value = files::read_json(&at).unwrap().unwrap();
            assert_eq!(
                (&said["state"], said.get("pid")),
                (&"starting".into(), None)
            );
            let mut old = said;
            old["pid"] = 0.into();
            old.as_object_mut().unwrap().remove("state");
            files::write_json(&at, &old, false).unwrap();
            assert_eq!(recorded(folder.path()).unwrap().unwrap().pid, None);
        });
    }

    #[test]
    fn arguments_and_exit_code() {
        let folder = tempfile::tempdir().unwrap();
        runtime().block_on(async {
            let config = program(folder.path(), "echo \"$@\"; exit 3");
            let log = folder.path().join("engine.log");
            let (process, _channel) =
                EngineProcess::start(&config, Slot::Installed, folder.path(), &log, 2).unwrap();
            assert_eq!(process.ended().await, "exit code 3");
            let reported = std::fs::read_to_string(&log).unwrap();
            let at = folder.path().display();
            assert_eq!(
                reported.trim(),
                format!(
                    "engine --socket {at}/engine-2.sock --generation 2 --reactors 1 --cpus 0,1 --run-dir {at} --daemon-on-stdin"
                )
            );
        });
    }

    #[test]
    fn an_engine_that_can_not_be_watched_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        runtime().block_on(async {
            let config = program(folder.path(), "exec sleep 1000");
            let log = folder.path().join("engine.log");
            let mut started = 0;
            let fails = |pid| {
                started = pid;
                Err(io::Error::other("no descriptor is left"))
            };
            let path = folder.path();
            let error =
                EngineProcess::start_watched(&config, Slot::Installed, path, &log, 2, fails)
                    .unwrap_err();
            assert!(error.to_string().contains("no descriptor is left"));
            let until = std::time::Instant::now() + Duration::from_secs(20);
            while start_ticks(started).is_some() {
                assert!(std::time::Instant::now() < until, "it lives on");
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    }

    #[test]
    fn a_missing_program_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let config = EngineConfig {
            program: folder.path().join("none"),
            reactors: 1,
            cpus: vec![],
            stuck_after: std::time::Duration::ZERO,
        };
        let log = folder.path().join("engine.log");
        let error =
            EngineProcess::start(&config, Slot::Installed, folder.path(), &log, 1).unwrap_err();
        assert!(error.to_string().contains("none"), "{error}");
    }
}
