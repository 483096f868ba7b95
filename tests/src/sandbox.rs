//! A machine of its own, for what is installed or typed as on a real one.
//!
//! Purpose: tests may install packages, use fixed paths and ports, and leave processes behind, and nothing
//! of it is seen outside.
//! Design: namespaces of mounts, processes and network (`unshare`, as root). Its root is the machine's own
//! file system below an overlay in memory, so every tool is there; `/srv` and `/root` are folders below the
//! target folder, on a real file system. Processes end with the run.
//! [`Sandbox::boot`] has systemd as its first process, with the service's package to be installed.
//! Not here: another kernel (`guest`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{Access, access};
use tempfile::TempDir;
use xtask::{package, process};

use crate::book::repository;
use crate::daemon::{program, target_folder};

/// See the module's text.
#[derive(Debug)]
pub struct Sandbox {
    folder: TempDir,
}

/// Folders that are on a real file system: direct I/O needs one.
const REAL: [&str; 2] = ["srv", "root"];

/// Sets the machine up and becomes it. `$1` is the sandbox's folder; `$2` is `systemd` where that is to be its first process.
const ENTER: &str = r#"
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1/memory"
mkdir "$1/memory/upper" "$1/memory/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/memory/upper,workdir=$1/memory/work" "$1/machine"
root="$1/machine"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/srv" "$root/root"
mount --bind "$1/srv" "$root/srv"
mount --bind "$1/root" "$root/root"
ip link set lo up
if [ "$2" = systemd ]; then
    # It makes links in /dev and groups of processes; the machine's own services are not wanted.
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for device in null zero full random urandom tty; do
        touch "$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    mkdir "$root/dev/shm"
    mount -t tmpfs tmpfs "$root/dev/shm"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    rm -rf "$root/etc/systemd/system" "$root/etc/fstab"
    mkdir -p "$root/etc/systemd/system"
    : > "$root/etc/machine-id"
    cp "$1/script.service" "$root/etc/systemd/system"
    exec chroot "$root" /usr/bin/env -i container=sandbox PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        /lib/systemd/systemd --unit=script.service --log-target=journal --show-status=no
fi
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
exec chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LC_ALL=C.UTF-8 bash -c 'cd /root && exec bash -euo pipefail /root/.script'
"#;

/// The script as systemd runs it; the machine ends with it, and as it.
const SCRIPT_UNIT: &str = "\
[Unit]
DefaultDependencies=no
SuccessAction=exit-force
FailureAction=exit-force

[Service]
Type=oneshot
WorkingDirectory=/root
Environment=HOME=/root LC_ALL=C.UTF-8 PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
StandardOutput=append:/root/.log
StandardError=append:/root/.log
ExecStart=/bin/bash -euo pipefail /root/.script
";

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

    /// A new one with the Debian package of the program in `/root`.
    ///
    /// # Errors
    /// If that can't be made.
    pub fn with_package() -> Result<Self> {
        let sandbox = Self::new()?;
        let made = package::build(&package::Options {
            repository: repository().canonicalize()?,
            program: program().canonicalize()?,
            output: sandbox.folder().to_owned(),
        })?;
        let name = made.file_name().context("a package has a name")?;
        fs::copy(&made, sandbox.home().join(name))?;
        Ok(sandbox)
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
        self.enter(script, None)
    }

    /// What is missing for [`boot`](Self::boot), if anything is.
    #[must_use]
    pub fn can_not_boot() -> Option<String> {
        let systemd =
            Path::new("/lib/systemd/systemd").exists() && process::is_installed("systemctl");
        let systemd = (!systemd).then(|| "systemd".to_owned());
        let may_write = |groups: &PathBuf| access(groups, Access::WRITE_OK).is_ok();
        let groups = cgroup2().filter(may_write);
        let groups = (groups.is_none()).then(|| "a mounted cgroup2 to write to".to_owned());
        Self::unavailable().or(systemd).or(groups)
    }

    /// Runs a script as [`run`](Self::run) does, on a machine that systemd has started and keeps.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn boot(&self, script: &str, limit: Duration) -> Result<String> {
        fs::write(self.folder.path().join("script.service"), SCRIPT_UNIT)?;
        let group = Group::new()?;
        self.enter(script, Some(&group))?.wait(limit)
    }

    fn enter(&self, script: &str, group: Option<&Group>) -> Result<Running> {
        let log = self.home().join(".log");
        fs::write(self.home().join(".script"), script)?;
        // To a file: a process that is left behind must not hold a pipe open.
        let out = fs::File::create(&log)?;
        let (join, options, manager) = match group {
            // The namespace begins where its first process is.
            Some(group) => (
                format!("echo $$ > '{}/cgroup.procs'; ", group.0.display()),
                "--cgroup",
                "systemd",
            ),
            None => (String::new(), "", ""),
        };
        let unshare = format!(
            "{join}exec unshare --mount --net --pid --ipc --uts {options} --fork --kill-child \
             sh -c \"$1\" sh \"$2\" '{manager}'"
        );
        let mut command = Command::new("sh");
        command
            .args(["-euc", &unshare, "sh", ENTER])
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

/// A group of processes of the sandbox's own, so that systemd's groups are below it.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self> {
        let root = cgroup2().context("no cgroup2 is mounted")?;
        let name = format!("forebay-test-{}", std::process::id());
        let group = root.join(name);
        fs::create_dir(&group).with_context(|| group.display().to_string())?;
        Ok(Self(group))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel empties them as the last process goes; a leftover is an empty folder.
        for _ in 0..50 {
            if remove_groups(&self.0).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn remove_groups(group: &Path) -> Result<()> {
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_groups(&entry.path())?;
        }
    }
    Ok(fs::remove_dir(group)?)
}

/// Where the machine has its groups of processes.
fn cgroup2() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ');
        let place = words.nth(1)?;
        (words.next() == Some("cgroup2")).then(|| place.into())
    })
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
