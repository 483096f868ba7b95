//! A Forebay under test: daemon, engine on one processor, a pool on one device, one exported
//! volume.
//!
//! It is driven by the command line. Dropping it stops it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use xtask::process;

use super::profile;

const LIMIT: Duration = Duration::from_secs(120);
/// Several may run at once.
static STARTED: AtomicU32 = AtomicU32::new(0);
pub(crate) const VOLUME_BYTES: u64 = 1 << 30;

/// Builds the program with the benchmarks' profile, unless `FOREBAY_BIN` names one.
pub(crate) fn build() -> Result<PathBuf> {
    if let Some(program) = std::env::var_os("FOREBAY_BIN") {
        return std::path::absolute(program).context("FOREBAY_BIN");
    }
    profile::build("forebay", profile::cargo("build").args(["-p", "forebay"]))
}

fn serve(program: &Path, folder: &Path, environment: &[(String, String)]) -> Result<Child> {
    let log = std::fs::File::create(folder.join("daemon.log"))?;
    let daemon = Command::new(program)
        .args(["serve", "--config", "forebay.toml"])
        .envs(environment.iter().cloned())
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    Ok(daemon)
}

/// What differs between daemons.
#[derive(Debug, Default)]
pub(crate) struct Setup {
    /// More of the configuration, after `[engine]`.
    pub(crate) config: String,
    pub(crate) environment: Vec<(String, String)>,
}

pub(crate) struct Forebay {
    program: PathBuf,
    folder: PathBuf,
    environment: Vec<(String, String)>,
    daemon: Child,
    pub(crate) engine: u32,
    pub(crate) port: u16,
    pub(crate) nqn: String,
}

impl Forebay {
    /// With a `null` or `ram` device, and the reactor on processor `cpu`.
    pub(crate) fn start(program: &Path, device: &str, cpu: usize) -> Result<Self> {
        let size = VOLUME_BYTES.to_string();
        let memory =
            PathBuf::from("/dev/shm").join(format!("forebay-bench-{}", std::process::id()));
        match device {
            "ram" => {
                let spec = format!("ram:{}?size=2G", memory.display());
                Self::start_with(program, &spec, cpu, &size)
            }
            _ => Self::start_with(program, "null:null.img?size=8G", cpu, &size),
        }
    }

    /// With any device and volume size.
    pub(crate) fn start_with(program: &Path, device: &str, cpu: usize, size: &str) -> Result<Self> {
        Self::start_pool(program, device, cpu, size, &[])
    }

    /// [`start_with`](Self::start_with), with more arguments of `pool create`.
    pub(crate) fn start_pool(
        program: &Path,
        device: &str,
        cpu: usize,
        size: &str,
        pool: &[&str],
    ) -> Result<Self> {
        let setup = Setup {
            config: format!("cpus = [{cpu}]\n"),
            ..Setup::default()
        };
        Self::start_as(program, setup, device, size, pool)
    }

    /// [`start_pool`](Self::start_pool), with any configuration.
    pub(crate) fn start_as(
        program: &Path,
        setup: Setup,
        device: &str,
        size: &str,
        pool: &[&str],
    ) -> Result<Self> {
        let (process, number) = (std::process::id(), STARTED.fetch_add(1, Relaxed));
        let folder = crate::cargo::target_folder().join(format!("bench-{process}-{number}"));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let config = format!(
            "[listen]\nnvme_tcp = [\"127.0.0.1:{port}\"]\napi = \"api.sock\"\n[engine]\nreactors = 1\n{}",
            setup.config
        );
        std::fs::write(folder.join("forebay.toml"), config)?;
        let daemon = serve(program, &folder, &setup.environment)?;
        let mut this = Self {
            program: program.to_owned(),
            folder,
            environment: setup.environment,
            daemon,
            engine: 0,
            port,
            nqn: String::new(),
        };
        this.wait_ready(false)?;
        let mut create = vec!["pool", "create", "--device", device, "--force"];
        create.extend(pool);
        this.cli(&create)?;
        this.cli(&["tenant", "create", "bench"])?;
        this.cli(&["volume", "create", "bench/v", "--size", size])?;
        let nqn = this.export("bench/v")?;
        this.nqn = nqn;
        this.note_engine()?;
        Ok(this)
    }

    /// Waits until an engine runs, and notes its process.
    fn note_engine(&mut self) -> Result<()> {
        let status = self.wait_ready(true)?;
        self.engine = status["engine_pid"]
            .as_u64()
            .and_then(|pid| u32::try_from(pid).ok())
            .context("no engine_pid in the status")?;
        Ok(())
    }

    /// Kills the engine, and waits until its successor runs.
    pub(crate) fn replace_engine(&mut self) -> Result<()> {
        let killed = self.engine;
        if let Some(pid) = rustix::process::Pid::from_raw(killed as i32) {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        }
        let until = Instant::now() + LIMIT;
        while self.engine == killed {
            if Instant::now() > until {
                bail!(
                    "no successor of the engine ran within {} s",
                    LIMIT.as_secs()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
            self.note_engine()?;
        }
        Ok(())
    }

    /// Replaces the engine as an operator does.
    pub(crate) fn upgrade(&mut self) -> Result<()> {
        self.cli(&["upgrade"])?;
        self.note_engine()
    }

    /// Stops both processes, and starts them again.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start_again()?;
        self.note_engine()
    }

    pub(crate) fn stop(&mut self) -> Result<()> {
        if let Some(pid) = rustix::process::Pid::from_raw(self.daemon.id() as i32) {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        }
        process::wait(&mut self.daemon, LIMIT).map(drop)
    }

    /// Restarts the daemon without waiting.
    pub(crate) fn start_again(&mut self) -> Result<()> {
        self.daemon = serve(&self.program, &self.folder, &self.environment)?;
        Ok(())
    }

    /// Exports a volume to any host; returns its NQN.
    pub(crate) fn export(&self, volume: &str) -> Result<String> {
        self.cli(&["export", "create", volume, "--any-host"])?;
        let export = self.cli(&["export", "show", volume])?;
        let nqn = export["nqn"].as_str();
        Ok(nqn.context("no nqn in the export")?.to_owned())
    }

    /// Waits until the daemon answers, and if `engine` until its engine runs.
    fn wait_ready(&mut self, engine: bool) -> Result<Value> {
        let until = Instant::now() + LIMIT;
        loop {
            if let Ok(status) = self.cli(&["status"])
                && (!engine || status["engine_state"] == "running")
            {
                return Ok(status);
            }
            if let Some(status) = self.daemon.try_wait()? {
                let log = std::fs::read_to_string(self.folder.join("daemon.log"))?;
                bail!("the daemon exited: {status}\n{log}");
            }
            if Instant::now() > until {
                bail!("the daemon was not ready within {} s", LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The processes under test.
    pub(crate) fn processes(&self) -> [u32; 2] {
        [self.daemon.id(), self.engine]
    }

    /// Waits until no free extent is dirty.
    pub(crate) fn wait_zero_filled(&self) -> Result<()> {
        let until = Instant::now() + LIMIT;
        while self.cli(&["pool", "show"])?["dirty_bytes"] != 0 {
            if Instant::now() > until {
                bail!("space was still dirty after {} s", LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Runs `forebay --json ARGS...` against this daemon.
    pub(crate) fn cli(&self, args: &[&str]) -> Result<Value> {
        let mut command = Command::new(&self.program);
        command
            .args(["--json", "--socket", "api.sock"])
            .args(args)
            .current_dir(&self.folder);
        let text = process::text(&mut command, LIMIT)?;
        Ok(if text.trim().is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&text)?
        })
    }
}

impl Drop for Forebay {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.daemon.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if process::wait(&mut self.daemon, LIMIT).is_err() {
            let _ = self.daemon.kill();
        }
        let memory = format!("/dev/shm/forebay-bench-{}", std::process::id());
        let _ = std::fs::remove_file(memory);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
