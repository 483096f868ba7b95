//! A machine of its own, for what is installed or typed as on a real one.
//!
//! Purpose: tests may install packages, use fixed paths and ports, and leave processes behind, and nothing
//! of it is seen outside.
//! Design: namespaces of mounts, processes and network (`unshare`, as root). Its root is the machine's own
//! file system below an overlay in memory, so every tool is there; `/srv` and `/root` are folders below the
//! target folder, on a real file system. Processes end with the run.
//! Not here: another kernel (`guest`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use xtask::process;

use crate::daemon::target_folder;

/// See the module's text.
#[derive(Debug)]
pub struct Sandbox {
    folder: TempDir,
}

/// Folders that are on a real file system: direct I/O needs one.
const REAL: [&str; 2] = ["srv", "root"];

/// Sets the machine up and becomes it. `$1` is the sandbox's folder, `$2` the script.
const ENTER: &str = r#"
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1/memory"
mkdir "$1/memory/upper" "$1/memory/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/memory/upper,workdir=$1/memory/work" "$1/machine"
root="$1/machine"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/srv" "$root/root"
mount --bind "$1/srv" "$root/srv"
mount --bind "$1/root" "$root/root"
ip link set lo up
exec chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LC_ALL=C.UTF-8 bash -c 'cd /root && exec bash -euo pipefail /root/.script'
"#;

impl Sandbox {
    /// What is missing on this machine, if anything is.
    #[must_use]
    pub fn unavailable() -> Option<String> {
        if !rustix::process::geteuid().is_root() {
            return Some("root".to_owned());
        }
        let missing = ["unshare", "mount", "chroot", "ip", "bash"]
            .into_iter()
            .find(|program| !process::is_installed(program));
        missing.map(str::to_owned)
    }

    /// A new one.
    ///
    /// # Errors
    /// If its folders can't be made.
    pub fn new() -> Result<Self> {
        let parent = target_folder().join("tmp");
        fs::create_dir_all(&parent)?;
        let parent = parent.canonicalize()?;
        let folder = tempfile::Builder::new().prefix("box-").tempdir_in(parent)?;
        for name in ["memory", "machine"].into_iter().chain(REAL) {
            fs::create_dir(folder.path().join(name))?;
        }
        Ok(Self { folder })
    }

    /// What is `/root` in it, where its commands begin.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    /// Runs a script for bash, which ends at the first command that fails; returns what it printed.
    ///
    /// # Errors
    /// If it fails or takes longer; the error has all that it said.
    pub fn run(&self, script: &str, limit: Duration) -> Result<String> {
        self.start(script)?.wait(limit)
    }

    /// Starts a script as [`run`](Self::run) does; it runs beside the test.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(&self, script: &str) -> Result<Running> {
        let log = self.home().join(".log");
        fs::write(self.home().join(".script"), script)?;
        // To a file: a process that is left behind must not hold a pipe open.
        let out = fs::File::create(&log)?;
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--net",
                "--pid",
                "--ipc",
                "--uts",
                "--fork",
                "--kill-child",
            ])
            .args(["sh", "-c", ENTER, "sh"])
            .arg(self.folder.path())
            .stdin(std::process::Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out);
        let child = command.spawn().context("cannot start unshare")?;
        Ok(Running { child, log })
    }

    /// The sandbox's folder on this machine.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A script that runs. Dropping it ends it, with all that it started.
#[derive(Debug)]
pub struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    /// A process in the sandbox's network, once the script has begun.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for its end; returns what it printed.
    ///
    /// # Errors
    /// If it fails or takes longer; the error has all that it said.
    pub fn wait(mut self, limit: Duration) -> Result<String> {
        let status = process::wait(&mut self.child, limit);
        let said = fs::read(&self.log).unwrap_or_default();
        let said = String::from_utf8_lossy(&said).into_owned();
        match status {
            Ok(status) if status.success() => Ok(said),
            Ok(status) => bail!("the script failed: {status}\n{said}"),
            Err(error) => Err(error.context(said)),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // `--kill-child`: its processes end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
