//! A running `forebay` with its own folder and a free loopback port.
//!
//! `FOREBAY_BIN` names the program; the default is the debug build. The folder is on a real
//! filesystem, because pools need direct I/O and hole punching. Dropping a [`Daemon`] kills all its
//! processes, which have the folder on their command lines. A failed test shows their logs.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use forebay_device::power::{self, Cut};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use xtask::process;

use crate::system::{free_ports, kill};
use crate::wait;

const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(60);
const CLI_LIMIT: Duration = Duration::from_secs(120);
const STATUS_LIMIT: Duration = Duration::from_secs(60);
const LOG_TAIL_BYTES: usize = 4000;

const CONFIG: &str = "forebay.toml";
const SOCKET: &str = "api.sock";
/// Logs' default paths.
const LOGS: [&str; 3] = [
    "daemon.log",
    "var/state/log/forebay.log",
    "var/state/log/engine.log",
];

/// Options of a daemon.
#[derive(Debug, Clone, Default)]
pub struct DaemonOptions {
    /// Whether NQNs contain the pool's UUID; otherwise they contain `test`.
    pub is_nameless: bool,
    /// More tables for its configuration file, which already has `[listen]`.
    pub config: String,
    /// Number of ports besides the first.
    pub more_ports: usize,
    /// Parent of its folder; `None`: below the target folder.
    pub folder_parent: Option<PathBuf>,
    /// More environment for the daemon and its engines.
    pub environment: Vec<(String, String)>,
    /// More arguments for `forebay serve`.
    pub arguments: Vec<String>,
    /// A program that executes its last arguments, and so starts the daemon.
    pub starter: Vec<String>,
}

/// The running processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processes {
    /// The daemon's pid.
    pub daemon: u32,
    /// The engine's pid.
    pub engine: u32,
    /// The engine's generation, counted from the pool's first.
    pub generation: u64,
}

/// A daemon and its engine.
#[derive(Debug)]
pub struct Daemon {
    folder: TempDir,
    ports: Vec<u16>,
    child: Child,
    /// More environment for it.
    pub environment: Vec<(String, String)>,
    arguments: Vec<String>,
    starter: Vec<String>,
}

impl Daemon {
    /// Starts a daemon and waits until it is ready. Only its configuration can give it a pool.
    pub fn start(options: &DaemonOptions) -> Result<Self> {
        let parent = match &options.folder_parent {
            Some(parent) => parent.clone(),
            None => target_folder().join("tmp"),
        };
        std::fs::create_dir_all(&parent)?;
        // Command lines are searched for this path, so it must be canonical.
        let parent = parent.canonicalize()?;
        let folder = tempfile::Builder::new().prefix("fb-").tempdir_in(parent)?;
        let ports = free_ports(1 + options.more_ports)?;
        let listeners: Vec<String> = ports.iter().map(|p| format!("127.0.0.1:{p}")).collect();
        let node = match options.is_nameless {
            true => "",
            false => "[node]\nname = \"test\"\n",
        };
        let config = format!(
            "{node}[listen]\nnvme_tcp = {listeners:?}\napi = \"{SOCKET}\"\n{}",
            options.config
        );
        std::fs::write(folder.path().join(CONFIG), config)?;
        let environment = options.environment.clone();
        let arguments = options.arguments.clone();
        let starter = options.starter.clone();
        let child = spawn(folder.path(), &environment, &arguments, &starter)?;
        let mut daemon = Self {
            folder,
            ports,
            child,
            environment,
            arguments,
            starter,
        };
        daemon.wait_ready()?;
        Ok(daemon)
    }

    /// Starts the daemon again after its end; its engine may still run.
    pub fn start_again(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_none() {
            bail!("the daemon still runs");
        }
        self.child = self.spawn()?;
        self.wait_ready()
    }

    /// [`start_again`](Self::start_again) without waiting until it is ready.
    pub fn begin_again(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_none() {
            bail!("the daemon still runs");
        }
        self.child = self.spawn()?;
        Ok(())
    }

    /// Creates a pool, and its files if missing, and waits until an engine runs.
    pub fn create_pool(&self, args: &[&str]) -> Result<Processes> {
        let mut command = vec!["pool", "create", "--create"];
        command.extend(args);
        self.cli(&command)?;
        self.wait_engine_after(0, START_LIMIT)
    }

    /// Its folder, also for the test's files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its NVMe/TCP port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.ports[0]
    }

    /// All its NVMe/TCP ports on 127.0.0.1.
    #[must_use]
    pub fn ports(&self) -> &[u16] {
        &self.ports
    }

    /// Runs `forebay --json ARGS...` and returns its answer.
    pub fn cli(&self, args: &[&str]) -> Result<Value> {
        let mut command = self.cli_command(args);
        let said =
            process::output(&mut command, CLI_LIMIT).map_err(|error| self.with_logs(error))?;
        if said.trim_ascii().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&said).with_context(|| {
            let said = String::from_utf8_lossy(&said);
            format!("forebay {}: not JSON: {said}", args.join(" "))
        })
    }

    /// Runs `forebay ARGS...` and returns its text.
    pub fn cli_text(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new(program());
        command.arg("--socket").arg(self.socket()).args(args);
        let said =
            process::output(&mut command, CLI_LIMIT).map_err(|error| self.with_logs(error))?;
        Ok(String::from_utf8(said)?)
    }

    /// The command `forebay --json ARGS...`.
    #[must_use]
    pub fn cli_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command
            .arg("--json")
            .arg("--socket")
            .arg(self.socket())
            .args(args);
        command
    }

    /// The answer of `GET /v1/status`.
    pub fn status(&self) -> Result<Value> {
        get(&self.socket(), "/v1/status")
    }

    /// The running processes; without an engine, an error.
    pub fn processes(&self) -> Result<Processes> {
        processes(&self.status()?).context("no engine is running")
    }

    /// The engine's number among those that this daemon started.
    pub fn engine_number(&self) -> Result<usize> {
        let engine = self.processes()?.engine;
        let environment = std::fs::read(format!("/proc/{engine}/environ"))?;
        let mut variables = environment.split(|byte| *byte == 0);
        let number = variables.find_map(|variable| {
            let role = std::str::from_utf8(variable).ok()?;
            role.strip_prefix("FOREBAY_KILL_ROLE=engine")?.parse().ok()
        });
        number.context("an engine without a role")
    }

    /// Waits for an engine with a generation above `generation`.
    pub fn wait_engine_after(&self, generation: u64, limit: Duration) -> Result<Processes> {
        wait::until("a new engine", limit, || {
            let now = processes(&self.status()?);
            Ok(now.filter(|now| now.generation > generation))
        })
        .map_err(|error| self.with_logs(error))
    }

    /// `kill -9` of the daemon; its engine continues.
    pub fn kill_daemon(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the daemon has already exited: {status}");
        }
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// `kill -9` of a daemon that can't end yet, and a new one beside it. The caller waits for the
    /// old one's end.
    pub fn replace_hanging_daemon(&mut self) -> Result<Child> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the daemon has already exited: {status}");
        }
        self.child.kill()?;
        // The killed daemon still listens there, but never answers.
        std::fs::remove_file(self.socket())?;
        let next = self.spawn()?;
        let killed = std::mem::replace(&mut self.child, next);
        self.wait_ready().map(|()| killed)
    }

    /// Whether the daemon has died by itself.
    pub fn has_died(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits until the daemon has died by itself.
    pub fn wait_daemon_death(&mut self) -> Result<()> {
        wait::until("the daemon's death", STOP_LIMIT, || {
            Ok(self.child.try_wait()?.map(|_| ()))
        })
    }

    /// Waits for the daemon's end.
    pub fn wait_exit(&mut self) -> Result<ExitStatus> {
        process::wait(&mut self.child, STOP_LIMIT).map_err(|error| self.with_logs(error))
    }

    /// `kill -9` of the engine; returns the processes before.
    pub fn kill_engine(&self) -> Result<Processes> {
        let processes = self.processes()?;
        kill(processes.engine, Signal::KILL)?;
        Ok(processes)
    }

    /// `kill -9` of the daemon and all its engines.
    pub fn kill_all(&mut self) -> Result<()> {
        let _ = self.child.kill();
        self.child.wait()?;
        wait::until("the end of all processes", STOP_LIMIT, || {
            let left = self.left_behind();
            for pid in &left {
                // It may have ended meanwhile.
                let _ = kill(*pid, Signal::KILL);
            }
            Ok(left.is_empty().then_some(()))
        })
    }

    /// A power cut: kills all processes, removes files in memory, and lets `volatile:` devices lose
    /// data as `seed` decides.
    pub fn power_cut(&mut self, devices: &[PathBuf], seed: u64) -> Result<Vec<Cut>> {
        self.kill_all()?;
        let run = self.folder.path().join("var/run");
        if run.exists() {
            std::fs::remove_dir_all(run)?;
        }
        let seeds = seed..;
        let cuts = devices.iter().zip(seeds);
        cuts.map(|(device, seed)| {
            power::cut(device, seed).with_context(|| format!("cutting {}", device.display()))
        })
        .collect()
    }

    /// Fails if `pool check` finds anything.
    pub fn pool_check(&self) -> Result<()> {
        // Findings are the answer, whatever the exit code.
        let output = self.cli_command(&["pool", "check"]).output()?;
        let found = String::from_utf8_lossy(&output.stdout);
        let is_clean = serde_json::from_str::<Value>(&found).is_ok_and(|f| f["clean"] == true);
        if !is_clean || !output.status.success() {
            bail!(
                "the pool's check: {found}{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    /// Ends a daemon by SIGTERM that leaves its engine running.
    pub fn leave_engine(&mut self) -> Result<()> {
        kill(self.child.id(), Signal::TERM)?;
        let status = process::wait(&mut self.child, STOP_LIMIT)
            .context("the daemon does not stop")
            .map_err(|error| self.with_logs(error))?;
        if !status.success() {
            return Err(self.with_logs(anyhow::anyhow!("the daemon failed: {status}")));
        }
        Ok(())
    }

    /// Ends daemon and engine by SIGTERM. An engine left behind is an error.
    pub fn stop(&mut self) -> Result<()> {
        kill(self.child.id(), Signal::TERM)?;
        let status: ExitStatus = process::wait(&mut self.child, STOP_LIMIT)
            .context("the daemon does not stop")
            .map_err(|error| self.with_logs(error))?;
        if !status.success() {
            return Err(self.with_logs(anyhow::anyhow!("the daemon failed: {status}")));
        }
        let left = self.left_behind();
        if !left.is_empty() {
            bail!("the daemon stopped, but left {left:?} running");
        }
        Ok(())
    }

    /// Ends daemon and engine by `forebay shutdown`.
    pub fn shut_down(&mut self) -> Result<()> {
        self.cli(&["shutdown"])?;
        let status = process::wait(&mut self.child, STOP_LIMIT)?;
        if !status.success() {
            bail!("the daemon failed: {status}");
        }
        Ok(())
    }

    /// Its API's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    fn spawn(&self) -> Result<Child> {
        let (folder, environment) = (self.folder.path(), &self.environment);
        spawn(folder, environment, &self.arguments, &self.starter)
    }

    /// Its configuration file.
    #[must_use]
    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join(CONFIG)
    }

    /// Waits until `status` has the wanted warnings.
    pub fn wait_warnings(&self, wanted: impl Fn(&str) -> bool) -> Result<()> {
        wait::until("other warnings", STOP_LIMIT, || {
            let warnings = self.status()?["warnings"].to_string();
            Ok(wanted(&warnings).then_some(()))
        })
        .map_err(|error| self.with_logs(error))
    }

    fn wait_ready(&mut self) -> Result<()> {
        let socket = self.socket();
        let child = &mut self.child;
        let ready = wait::until("daemon and engine are up", START_LIMIT, || {
            if let Some(status) = child.try_wait()? {
                bail!("forebay serve exited at once: {status}");
            }
            let Ok(status) = get(&socket, "/v1/status") else {
                return Ok(None);
            };
            // Without a pool there is no engine.
            let is_ready = status["pool"].is_null() || status["engine_state"] == "running";
            Ok(is_ready.then_some(()))
        });
        ready.map_err(|error| self.with_logs(error))
    }

    fn left_behind(&self) -> Vec<u32> {
        let folder = self.folder.path().as_os_str().as_encoded_bytes();
        let Ok(entries) = std::fs::read_dir("/proc") else {
            return Vec::new();
        };
        entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
            .filter(|pid| *pid != self.child.id() && *pid != std::process::id())
            .filter(|pid| {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.windows(folder.len()).any(|part| part == folder)
            })
            .collect()
    }

    /// Adds the ends of all logs to an error.
    #[must_use]
    pub fn with_logs(&self, error: anyhow::Error) -> anyhow::Error {
        error.context(self.logs())
    }

    fn logs(&self) -> String {
        let mut text = String::new();
        for file in LOGS {
            let path = self.folder.path().join(file);
            let Ok(log) = std::fs::read(&path) else {
                continue;
            };
            let tail = &log[log.len().saturating_sub(LOG_TAIL_BYTES)..];
            text += &format!(
                "--- the end of {file} ---\n{}\n",
                String::from_utf8_lossy(tail)
            );
        }
        text
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in self.left_behind() {
            let _ = kill(pid, Signal::KILL);
        }
    }
}

/// Cargo's target folder.
#[must_use]
pub fn target_folder() -> PathBuf {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => repository.join(folder),
        None => repository.join("target"),
    }
}

/// The program: `FOREBAY_BIN`, or the debug build.
#[must_use]
pub fn program() -> PathBuf {
    match std::env::var_os("FOREBAY_BIN") {
        Some(program) => program.into(),
        None => target_folder().join("debug/forebay"),
    }
}

fn spawn(
    folder: &Path,
    environment: &[(String, String)],
    arguments: &[String],
    starter: &[String],
) -> Result<Child> {
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join(LOGS[0]))?;
    let error: File = log.try_clone()?;
    let program = program();
    let mut command = match starter {
        [] => Command::new(&program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(&program);
            command
        }
    };
    command
        .arg("serve")
        .arg("--config")
        .arg(folder.join(CONFIG))
        .args(arguments)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(error)
        .spawn()
        .with_context(|| format!("cannot start {} (cargo build)", program.display()))
}

fn processes(status: &Value) -> Option<Processes> {
    let pid = |key: &str| u32::try_from(status[key].as_u64()?).ok();
    Some(Processes {
        daemon: pid("daemon_pid")?,
        engine: pid("engine_pid")?,
        generation: status["generation"].as_u64()?,
    })
    .filter(|_| status["engine_state"] == "running")
}

fn get(socket: &Path, path: &str) -> Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(STATUS_LIMIT))?;
    stream.set_write_timeout(Some(STATUS_LIMIT))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: forebay\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.take(1 << 20).read_to_string(&mut answer)?;
    body(&answer).with_context(|| format!("GET {path}: {answer}"))
}

fn body(answer: &str) -> Result<Value> {
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP response")?;
    if !head.starts_with("HTTP/1.1 200 ") {
        bail!("not OK");
    }
    Ok(serde_json::from_str(body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_apart() {
        let value = body("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"a\": 1}\n").unwrap();
        assert_eq!(value["a"], 1);
        assert!(body("HTTP/1.1 503 Service Unavailable\r\n\r\n{}").is_err());
        assert!(body("").is_err());
    }
}
