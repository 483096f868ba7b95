//! A sandbox in which tests install packages and use fixed paths and ports.
//!
//! It consists of mount, process and network namespaces (`unshare`, as root). Its root is an
//! overlay in memory over the node's file system; `/srv` and `/root` are on a real one. Its
//! processes end with the run.

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

/// A sandbox.
#[derive(Debug)]
pub struct Sandbox {
    folder: TempDir,
}

/// Folders on a real file system, for direct I/O.
const REAL: [&str; 2] = ["srv", "root"];

/// Enters the sandbox. `$1` is its folder; `$2` is `systemd` if that is its first process.
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

/// The sandbox ends with this unit, with its result.
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
    /// A requirement that this node lacks.
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

    /// A new sandbox.
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

    /// A sandbox with the program's Debian package in `/root`.
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

    /// Its `/root`, where commands start.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    /// Runs a bash script that stops at the first failure; returns its output, also in the error.
    pub fn run(&self, script: &str, limit: Duration) -> Result<String> {
        self.start(script)?.wait(limit)
    }

    /// [`run`](Self::run) without waiting for the end.
    pub fn start(&self, script: &str) -> Result<Running> {
        self.enter(script, None)
    }

    /// A requirement of [`boot`](Self::boot) that this node lacks.
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

    /// [`run`](Self::run) in a sandbox that systemd started.
    pub fn boot(&self, script: &str, limit: Duration) -> Result<String> {
        fs::write(self.folder.path().join("script.service"), SCRIPT_UNIT)?;
        let group = Group::new()?;
        self.enter(script, Some(&group))?.wait(limit)
    }

    fn enter(&self, script: &str, group: Option<&Group>) -> Result<Running> {
        let log = self.home().join(".log");
        fs::write(self.home().join(".script"), script)?;
        // A file, because a leftover process must not hold a pipe open.
        let out = fs::File::create(&log)?;
        let (join, options, manager) = match group {
            // The cgroup namespace begins at its first process's cgroup.
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

    /// The sandbox's folder outside.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A cgroup for the sandbox, so that systemd's cgroups are below it.
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
        // The kernel empties cgroups when the last process exits.
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

/// The mount point of cgroup2.
fn cgroup2() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ');
        let place = words.nth(1)?;
        (words.next() == Some("cgroup2")).then(|| place.into())
    })
}

/// A running script. Dropping it kills it and all its processes.
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
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for its end; returns its output, also in the error.
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
        // `--kill-child` also ends its processes.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
