//! The real daemon in a temporary folder, for system tests.

#![allow(dead_code)] // Each test program uses a part.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Pools want direct I/O, which a tmpfs may refuse.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("fb-")
        .tempdir_in(env!("CARGO_TARGET_TMPDIR"))
        .unwrap()
}

pub(crate) fn forebay(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null())
        .env_remove("FOREBAY_SOCKET");
    command
}

/// Processes with the folder on their command line.
pub(crate) fn running(folder: &Path) -> Vec<String> {
    let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .is_some_and(|pid| pid.parse::<u32>().is_ok())
        })
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(&name))
        .collect()
}

pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LIMIT, "waited for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub(crate) fn wait(child: &mut Child) -> i32 {
    let mut code = None;
    wait_until("a process to end", || {
        code = child.try_wait().unwrap();
        code.is_some()
    });
    code.unwrap().code().unwrap_or(-1)
}

pub(crate) fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

pub(crate) struct Daemon {
    folder: tempfile::TempDir,
    child: Option<Child>,
}

impl Daemon {
    /// Starts with a pool in a file.
    pub(crate) fn start() -> Self {
        let daemon = Self::with("[pool]\nembedded = { path = \"pool.img\", size = \"1G\" }\n");
        daemon.wait_engine();
        daemon
    }

    /// `config` follows the address.
    pub(crate) fn with(config: &str) -> Self {
        let folder = folder();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let config = format!("[listen]\nnvme_tcp = [\"127.0.0.1:{port}\"]\n{config}");
        std::fs::write(folder.path().join("forebay.toml"), config).unwrap();
        let mut daemon = Self {
            folder,
            child: None,
        };
        daemon.again();
        daemon
    }

    pub(crate) fn again(&mut self) {
        let log = File::create(self.path("err")).unwrap();
        let child = forebay(self.folder.path(), &["serve"])
            .stderr(log)
            .spawn()
            .unwrap();
        self.child = Some(child);
        wait_until("the daemon", || {
            self.run(&["--json", "status"]).status.success()
        });
    }

    pub(crate) fn wait_engine(&self) {
        wait_until("the engine", || {
            self.json(&["status"])["engine_state"] == "running"
        });
    }

    pub(crate) fn stop(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        send(&child, Signal::TERM);
        let code = wait(&mut child);
        if !std::thread::panicking() {
            assert_eq!(code, 0, "{}", self.said());
            assert_eq!(running(self.folder.path()), Vec::<String>::new());
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub(crate) fn said(&self) -> String {
        let log = std::fs::read_to_string(self.path("var/state/log/forebay.log"));
        let err = std::fs::read_to_string(self.path("err"));
        log.unwrap_or_default() + &err.unwrap_or_default()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        forebay(self.folder.path(), args).output().unwrap()
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let mut all = vec!["--json"];
        all.extend(args);
        let output = self.run(&all);
        assert!(output.status.success(), "{args:?}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub(crate) fn refused(&self, args: &[&str], part: &str) {
        let output = self.run(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            matches!(output.status.code(), Some(1 | 4 | 5)),
            "{args:?}: {said}"
        );
        assert!(
            said.starts_with("error: ") && said.contains(part),
            "{args:?}: {said}"
        );
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.said());
        }
        self.stop();
    }
}
