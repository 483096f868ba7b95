//! The demo's own daemon: a guard around `forebay serve` as a child.
//!
//! It is stopped over the API, then by SIGTERM, then by force. If the demo is killed, the kernel
//! sends the child SIGTERM (`--with-parent`). The engine's pidfd excludes signals to another
//! process.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forebay_control::api::client::Client;
use forebay_control::model::{Done, EngineState, Status};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::failure::{Failure, Outcome, While};
use crate::interrupt::Interrupt;

const PORT: u16 = 4420;
const START_TIME_LIMIT: Duration = Duration::from_secs(60);
const STOP_TIME_LIMIT: Duration = Duration::from_secs(20);
/// Tolerated races with other programs for a port.
const PORT_RACES: usize = 5;
const POLL: Duration = Duration::from_millis(50);
const SAID_LINES: usize = 10;

pub(super) struct OwnDaemon {
    child: Child,
    client: Client,
    engine: Option<(u32, OwnedFd)>,
    errors_path: PathBuf,
    pub(super) command: String,
}

impl OwnDaemon {
    pub(super) fn start(dir: &Path, interrupt: &Interrupt) -> Outcome<Self> {
        let run_dir = dir.join("run");
        std::fs::create_dir_all(&run_dir)
            .while_doing(format!("make the folder {}", run_dir.display()))?;
        let client =
            Client::new(&run_dir.join("api.sock")).with_time_limit(Duration::from_secs(30));
        if let Ok(status) = client.get::<Status>("/v1/status") {
            return Err(Failure::new(format!(
                "a daemon (pid {}) already runs on {}",
                status.daemon_pid,
                dir.display()
            ))
            .hint("stop it, or choose another folder with --dir"));
        }
        let mut port = if is_free(PORT) { PORT } else { free_port()? };
        for _race in 0..PORT_RACES {
            let mut daemon = Self::spawn(dir, port, client.clone())?;
            match daemon.wait_until_serving(interrupt) {
                // Another program took the port meanwhile.
                Err(_) if daemon.has_ended() && !is_free(port) => port = free_port()?,
                Err(failure) => return Err(failure),
                Ok(()) => return Ok(daemon),
            }
        }
        Err(Failure::new(
            "each free port on 127.0.0.1 was taken by another program at once",
        ))
    }

    fn spawn(dir: &Path, port: u16, client: Client) -> Outcome<Self> {
        let errors_path = dir.join("run/demo-daemon.err");
        let errors =
            File::create(&errors_path).while_doing(format!("create {}", errors_path.display()))?;
        let program = std::env::current_exe().while_doing("find this program's executable")?;
        let mut command = Command::new(program);
        let called = std::env::args()
            .next()
            .unwrap_or_else(|| "forebay".to_owned());
        let mut shown = format!("{called} serve");
        command
            .arg("serve")
            .arg("--with-parent")
            .arg("--dir")
            .arg(dir);
        if port == PORT {
            if dir != Path::new(crate::config::DEFAULT_DIR) {
                shown.push_str(&format!(" --dir {}", dir.display()));
            }
        } else {
            let config = write_config(dir, port)?;
            command.arg("--config").arg(&config);
            shown.push_str(&format!(" --config {}", config.display()));
        }
        command.env_remove("FOREBAY_SOCKET");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors);
        // The demo handles Ctrl-C and stops the daemon cleanly.
        command.process_group(0);
        let child = command.spawn().while_doing("start a daemon")?;
        Ok(Self {
            child,
            client,
            engine: None,
            errors_path,
            command: shown,
        })
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn engine_pid(&self) -> Option<u32> {
        self.engine.as_ref().map(|(pid, _)| *pid)
    }

    fn wait_until_serving(&mut self, interrupt: &Interrupt) -> Outcome {
        let started = Instant::now();
        loop {
            interrupt.check()?;
            self.check("at its start")?;
            if let Ok(status) = self.client.get::<Status>("/v1/status") {
                self.hold_engine(status.engine_pid);
                if status.engine_state == EngineState::Running {
                    return Ok(());
                }
            }
            if started.elapsed() > START_TIME_LIMIT {
                return Err(Failure::new(format!(
                    "the daemon's engine was not ready within {} s",
                    START_TIME_LIMIT.as_secs()
                ))
                .hint("its log is in the folder state/log"));
            }
            std::thread::sleep(POLL);
        }
    }

    pub(super) fn check(&mut self, when: &str) -> Outcome {
        let Some(status) = self.child.try_wait().while_doing("watch the daemon")? else {
            return Ok(());
        };
        let said = std::fs::read_to_string(&self.errors_path).unwrap_or_default();
        let said: Vec<_> = said
            .lines()
            .map(|line| line.trim_start_matches("error: "))
            .collect();
        let said = &said[said.len().saturating_sub(SAID_LINES)..];
        Err(Failure::new(format!(
            "the daemon exited {when} ({status}): {}",
            said.join("\n")
        )))
    }

    fn hold_engine(&mut self, pid: Option<u32>) {
        let Some(number) = pid else { return };
        if self.engine_pid() == pid {
            return;
        }
        let handle = i32::try_from(number)
            .ok()
            .and_then(Pid::from_raw)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        self.engine = handle.map(|handle| (number, handle));
    }

    pub(super) fn stop(mut self) -> Outcome {
        if let Ok(status) = self.client.get::<Status>("/v1/status") {
            self.hold_engine(status.engine_pid);
        }
        let asked = self.client.post::<_, Done>("/v1/shutdown", &());
        let ended = self.wait(STOP_TIME_LIMIT);
        let engine_left = self.engine_runs();
        asked?;
        match ended {
            Some(status) if !status.success() => {
                Err(Failure::new(format!("the daemon exited with {status}")))
            }
            Some(_) if engine_left => Err(Failure::new("the daemon left its engine running")),
            Some(_) => Ok(()),
            None => Err(Failure::new(format!(
                "the daemon did not stop within {} s",
                STOP_TIME_LIMIT.as_secs()
            ))),
        }
    }

    fn wait(&mut self, limit: Duration) -> Option<std::process::ExitStatus> {
        let started = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Err(_) => return None,
                Ok(None) if started.elapsed() > limit => return None,
                Ok(None) => std::thread::sleep(POLL),
            }
        }
    }

    fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    fn engine_runs(&self) -> bool {
        self.engine.as_ref().is_some_and(|(_, handle)| {
            let mut fds = [rustix::event::PollFd::new(
                handle,
                rustix::event::PollFlags::IN,
            )];
            // Readable: it has ended.
            !matches!(
                rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default())),
                Ok(1)
            )
        })
    }
}

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        if !self.has_ended() {
            if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::TERM);
            }
            if self.wait(STOP_TIME_LIMIT).is_none() {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
        }
        if self.engine_runs()
            && let Some((_, handle)) = &self.engine
        {
            let _ = pidfd_send_signal(handle, Signal::TERM);
            std::thread::sleep(Duration::from_millis(500));
            let _ = pidfd_send_signal(handle, Signal::KILL);
        }
    }
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn free_port() -> Outcome<u16> {
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .while_doing("find a free port on 127.0.0.1")?;
    Ok(address.port())
}

fn write_config(dir: &Path, port: u16) -> Outcome<PathBuf> {
    let path = dir.join("demo.toml");
    let text = format!(
        "# Written by `forebay bench demo`, because port {PORT} was taken.\n\
         state_dir = \"state\"\nrun_dir = \"run\"\n\n\
         [listen]\nnvme_tcp = [\"127.0.0.1:{port}\"]\n\n\
         [pool]\nembedded = {{ path = \"pool.img\", size = \"16G\" }}\n"
    );
    std::fs::write(&path, text).while_doing(format!("write {}", path.display()))?;
    Ok(path)
}
