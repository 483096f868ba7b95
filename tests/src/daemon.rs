//! A running `forebay`, as a person would run it.
//!
//! Purpose: [`Daemon::start`] runs `forebay serve` with its own folder and a free loopback port;
//! [`Daemon::create_pool`] gives it a pool, and with it an engine. Tests use the command line through
//! [`Daemon::cli`], and kill either process whenever they like.
//! Design: the program is the one that `FOREBAY_BIN` names, or the debug build. All its files are in
//! one folder below the target folder, or where the test wants it, on a real filesystem (pools need
//! direct I/O and hole punching).
//! Dropping a [`Daemon`] ends daemon and engines; an engine that outlived its daemon is found by the
//! folder on its command line, and killed by pid. If the test failed, their logs are shown.
//! Not here: what the answers mean; they are JSON values.

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
/// How much of a log an error shows.
const LOG_TAIL_BYTES: usize = 4000;

const CONFIG: &str = "forebay.toml";
const SOCKET: &str = "api.sock";
/// What it writes, by its configuration's defaults.
const LOGS: [&str; 3] = [
    "daemon.log",
    "var/state/log/forebay.log",
    "var/state/log/engine.log",
];

/// How to start a daemon.
#[derive(Debug, Clone, Default)]
pub struct DaemonOptions {
    /// Whether its pool's UUID names it in NQNs; otherwise its name there is `test`.
    pub is_nameless: bool,
    /// More tables for its configuration file; `[listen]` is there already.
    pub config: String,
    /// How many ports it has besides the first.
    pub more_ports: usize,
    /// Where its folder is made; `None`: below the target folder.
    pub folder_parent: Option<PathBuf>,
    /// More environment for it, and with it for its engines.
    pub environment: Vec<(String, String)>,
    /// More arguments for `forebay serve`.
    pub arguments: Vec<String>,
    /// What starts it, if not the test itself: a program that becomes what its last arguments name.
    pub starter: Vec<String>,
}

/// Who runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processes {
    /// The daemon.
    pub daemon: u32,
    /// Its engine.
    pub engine: u32,
    /// Which engine it is, counted from the first on this pool.
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
    /// Starts one that has no pool yet, unless its configuration makes one, and waits until it is ready.
    ///
    /// # Errors
    /// If the program is missing, ends at once, or is not ready within a minute.
    pub fn start(options: &DaemonOptions) -> Result<Self> {
        let parent = match &options.folder_parent {
            Some(parent) => parent.clone(),
            None => target_folder().join("tmp"),
        };
        std::fs::create_dir_all(&parent)?;
        // The folder is searched for on command lines, so its path must be the plain one.
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

    /// Starts the daemon again after it has ended; its engine may still be there.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_again(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_none() {
            bail!("the daemon still runs");
        }
        self.child = self.spawn()?;
        self.wait_ready()
    }

    /// Starts the daemon again after it has ended, and does not wait until it is ready.
    ///
    /// # Errors
    /// If it still runs, or the program is missing.
    pub fn begin_again(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_none() {
            bail!("the daemon still runs");
        }
        self.child = self.spawn()?;
        Ok(())
    }

    /// Makes a pool, of files that need not exist, and waits until an engine runs.
    ///
    /// # Errors
    /// If either fails.
    pub fn create_pool(&self, args: &[&str]) -> Result<Processes> {
        let mut command = vec!["pool", "create", "--create"];
        command.extend(args);
        self.cli(&command)?;
        self.wait_engine_after(0, START_LIMIT)
    }

    /// Where it keeps everything; the test's own files may be there too.
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

    /// Runs `forebay --json ARGS...` and returns what it answers.
    ///
    /// # Errors
    /// If it fails; the error has what it said.
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

    /// Runs `forebay ARGS...` and returns what people are told.
    ///
    /// # Errors
    /// If it fails, or has not ended in time.
    pub fn cli_text(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new(program());
        command.arg("--socket").arg(self.socket()).args(args);
        let said =
            process::output(&mut command, CLI_LIMIT).map_err(|error| self.with_logs(error))?;
        Ok(String::from_utf8(said)?)
    }

    /// The command `forebay --json ARGS...`, to be run in another way.
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

    /// What `GET /v1/status` answers.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn status(&self) -> Result<Value> {
        get(&self.socket(), "/v1/status")
    }

    /// Who runs now.
    ///
    /// # Errors
    /// If the daemon does not answer, or has no engine.
    pub fn processes(&self) -> Result<Processes> {
        processes(&self.status()?).context("no engine runs")
    }

    /// The number of the engine that runs, among those that its daemon started.
    ///
    /// # Errors
    /// If none runs.
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

    /// Waits until an engine runs whose generation is above `generation`.
    ///
    /// # Errors
    /// If there is none within `limit`.
    pub fn wait_engine_after(&self, generation: u64, limit: Duration) -> Result<Processes> {
        wait::until("a new engine", limit, || {
            let now = processes(&self.status()?);
            Ok(now.filter(|now| now.generation > generation))
        })
        .map_err(|error| self.with_logs(error))
    }

    /// `kill -9` of the daemon; its engine goes on.
    ///
    /// # Errors
    /// If it has ended already.
    pub fn kill_daemon(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the daemon has ended already: {status}");
        }
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// `kill -9` of a daemon that can't end yet, and another one beside it. The caller waits for the end of the first.
    ///
    /// # Errors
    /// If it has ended already, or the other one is not ready within a minute.
    pub fn replace_hanging_daemon(&mut self) -> Result<Child> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the daemon has ended already: {status}");
        }
        self.child.kill()?;
        // The killed one still listens there, and would never answer.
        std::fs::remove_file(self.socket())?;
        let next = self.spawn()?;
        let killed = std::mem::replace(&mut self.child, next);
        self.wait_ready().map(|()| killed)
    }

    /// Whether the daemon has died by itself.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn has_died(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits until the daemon has died by itself.
    ///
    /// # Errors
    /// If it lives on for a minute.
    pub fn wait_daemon_death(&mut self) -> Result<()> {
        wait::until("the daemon's death", STOP_LIMIT, || {
            Ok(self.child.try_wait()?.map(|_| ()))
        })
    }

    /// Waits for the daemon's end; says how it ended.
    ///
    /// # Errors
    /// If it lives on for a minute.
    pub fn wait_exit(&mut self) -> Result<ExitStatus> {
        process::wait(&mut self.child, STOP_LIMIT).map_err(|error| self.with_logs(error))
    }

    /// `kill -9` of the engine; returns who it was.
    ///
    /// # Errors
    /// If none runs.
    pub fn kill_engine(&self) -> Result<Processes> {
        let processes = self.processes()?;
        kill(processes.engine, Signal::KILL)?;
        Ok(processes)
    }

    /// `kill -9` of the daemon and of every engine of its, whoever is still there.
    ///
    /// # Errors
    /// If one of them can't be killed.
    pub fn kill_all(&mut self) -> Result<()> {
        // The engine first or last, as a power cut would: the order is no order.
        let _ = self.child.kill();
        self.child.wait()?;
        wait::until("everybody is gone", STOP_LIMIT, || {
            let left = self.left_behind();
            for pid in &left {
                // It may have ended by itself meanwhile.
                let _ = kill(*pid, Signal::KILL);
            }
            Ok(left.is_empty().then_some(()))
        })
    }

    /// What a power cut does: kills everybody, has the devices (`volatile:` ones, by path) lose what they lose with this
    /// seed, and removes what is in memory only.
    ///
    /// # Errors
    /// If that can't be done.
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

    /// The pool's own check must find nothing.
    ///
    /// # Errors
    /// If it finds something.
    pub fn pool_check(&self) -> Result<()> {
        // What it found is the answer, whatever the exit code.
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

    /// SIGTERM to a daemon that leaves its engine running, and waits for its end.
    ///
    /// # Errors
    /// If it does not end, or ends badly.
    pub fn leave_engine(&mut self) -> Result<()> {
        kill(self.child.id(), Signal::TERM)?;
        let status = process::wait(&mut self.child, STOP_LIMIT)
            .context("the daemon does not stop")
            .map_err(|error| self.with_logs(error))?;
        if !status.success() {
            return Err(self.with_logs(anyhow::anyhow!("the daemon ended badly: {status}")));
        }
        Ok(())
    }

    /// Ends daemon and engine in good order.
    ///
    /// # Errors
    /// If the daemon does not end, ends badly, or leaves an engine behind.
    pub fn stop(&mut self) -> Result<()> {
        kill(self.child.id(), Signal::TERM)?;
        let status: ExitStatus = process::wait(&mut self.child, STOP_LIMIT)
            .context("the daemon does not stop")
            .map_err(|error| self.with_logs(error))?;
        if !status.success() {
            return Err(self.with_logs(anyhow::anyhow!("the daemon ended badly: {status}")));
        }
        let left = self.left_behind();
        if !left.is_empty() {
            bail!("the daemon stopped, but left {left:?} running");
        }
        Ok(())
    }

    /// Asks daemon and engine to end in good order, and waits for the daemon's end.
    ///
    /// # Errors
    /// If it refuses, does not end, or ends badly.
    pub fn shut_down(&mut self) -> Result<()> {
        self.cli(&["shutdown"])?;
        let status = process::wait(&mut self.child, STOP_LIMIT)?;
        if !status.success() {
            bail!("the daemon ended badly: {status}");
        }
        Ok(())
    }

    /// Where its API listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    fn spawn(&self) -> Result<Child> {
        let (folder, environment) = (self.folder.path(), &self.environment);
        spawn(folder, environment, &self.arguments, &self.starter)
    }

    /// Where its configuration is.
    #[must_use]
    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join(CONFIG)
    }

    /// Waits until `status` warns as wanted.
    ///
    /// # Errors
    /// If it does not within a minute.
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
                bail!("forebay serve ended at once: {status}");
            }
            let Ok(status) = get(&socket, "/v1/status") else {
                return Ok(None);
            };
            // Without a pool there is nothing for an engine to do.
            let is_ready = status["pool"].is_null() || status["engine_state"] == "running";
            Ok(is_ready.then_some(()))
        });
        ready.map_err(|error| self.with_logs(error))
    }

    /// Processes, other than the daemon, that have our folder on their command line.
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

    /// The error with what daemon and engines said last.
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

/// Where cargo builds.
#[must_use]
pub fn target_folder() -> PathBuf {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => repository.join(folder),
        None => repository.join("target"),
    }
}

/// The program: the one that `FOREBAY_BIN` names, or the debug build.
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

/// One HTTP request over a Unix socket, its answer as JSON.
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
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
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
