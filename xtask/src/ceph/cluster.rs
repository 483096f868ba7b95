//! A cluster's life: its start step by step, commands, and its end.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::config::{self, Settings};
use super::daemon::{self, Daemon};
use super::packages::{self, Programs, Release};
use crate::{ports, process};

/// The pool that a cluster has, for images.
pub const POOL: &str = "rbd";
/// The user with all capabilities.
const ADMIN: &str = "client.admin";
/// Programs of which the folder has a script.
const SCRIPTS: [&str; 4] = ["ceph", "fio", "rados", "rbd"];
/// Placement groups of the pool.
const PLACEMENT_GROUPS: &str = "8";
/// A Unix socket's path has at most 107 bytes; the folder's longest one is `/run/osd.100.asok`.
const MOST_FOLDER_BYTES: usize = 90;
const MOST_OSDS: u32 = 100;
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// Until a step of the start, or of a repair, has had its effect.
const STEP_LIMIT: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(100);

/// How to start a cluster.
#[derive(Debug, Clone)]
pub struct Options {
    /// Of the cluster alone: it does not exist, or is empty.
    pub folder: PathBuf,
    /// The release of Ceph.
    pub release: Release,
    /// Number of OSDs, at least 1. Pools have two copies if there are several.
    pub osds: u32,
    /// Whether clients and daemons authenticate with keys.
    pub has_cephx: bool,
    /// Whether its daemons go on after this process, until [`stop`].
    pub is_left_running: bool,
}

impl Options {
    /// A cluster of one OSD without authentication, which ends with its [`Cluster`].
    #[must_use]
    pub fn new(folder: &Path, release: Release) -> Self {
        Self {
            folder: folder.to_owned(),
            release,
            osds: 1,
            has_cephx: false,
            is_left_running: false,
        }
    }
}

/// A running cluster. Its daemons are killed when it is dropped, unless they are left running.
#[derive(Debug)]
pub struct Cluster {
    options: Options,
    programs: Programs,
    folder: PathBuf,
    monitor_port: u16,
    running: BTreeMap<Daemon, Child>,
    /// Whether [`Drop`] leaves the daemons alone.
    is_released: bool,
}

impl Cluster {
    /// Starts a cluster and waits until its pool can be used. Fetches the packages if they are not
    /// in the cache. An error shows the ends of the daemons' logs.
    pub fn start(options: &Options) -> Result<Self> {
        ensure!(
            (1..=MOST_OSDS).contains(&options.osds),
            "a cluster has 1 to {MOST_OSDS} OSDs, not {}",
            options.osds
        );
        let programs = Programs::prepare(options.release)?;
        let folder = make_folder(&options.folder)?;
        let mut cluster = Self {
            options: options.clone(),
            programs,
            folder,
            monitor_port: ports::free_ports(1)?[0],
            running: BTreeMap::new(),
            is_released: false,
        };
        if let Err(error) = cluster.start_all() {
            let logs = daemon::ends_of_logs(&cluster.folder);
            bail!("the cluster did not start: {error:#}\n{logs}");
        }
        cluster.is_released = options.is_left_running;
        Ok(cluster)
    }

    /// The cluster's folder: `ceph.conf`, logs in `log`, keys in `keys`, admin sockets in `run`,
    /// programs in `bin`.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its `ceph.conf`, to use as `CEPH_CONF`.
    #[must_use]
    pub fn config_file(&self) -> PathBuf {
        daemon::config_file(&self.folder)
    }

    /// The file with the key of a user, for example `client.admin`. It exists without
    /// authentication too.
    #[must_use]
    pub fn keyring(&self, user: &str) -> PathBuf {
        self.folder.join(format!("keys/{user}.keyring"))
    }

    /// The monitor's address in Ceph's form.
    #[must_use]
    pub fn monitor(&self) -> String {
        config::monitor_address(self.monitor_port)
    }

    /// The unpacked packages.
    #[must_use]
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// The daemons that run.
    #[must_use]
    pub fn daemons(&self) -> Vec<Daemon> {
        self.running.keys().copied().collect()
    }

    /// A daemon's pid.
    pub fn pid(&self, daemon: Daemon) -> Result<u32> {
        let child = self.running.get(&daemon);
        Ok(child
            .with_context(|| format!("{daemon} does not run"))?
            .id())
    }

    /// Stops a daemon with SIGSTOP, until [`resume`](Self::resume). A manager ends when it resumes
    /// after 30 s or more, as the monitor has given it up.
    pub fn pause(&self, daemon: Daemon) -> Result<()> {
        daemon::signal(self.pid(daemon)?, Signal::STOP)
    }

    /// Continues a daemon.
    pub fn resume(&self, daemon: Daemon) -> Result<()> {
        daemon::signal(self.pid(daemon)?, Signal::CONT)
    }

    /// Kills a daemon with SIGKILL, and waits for its end.
    pub fn kill(&mut self, daemon: Daemon) -> Result<()> {
        self.pid(daemon)?;
        if let Some(mut child) = self.running.remove(&daemon) {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Starts a daemon again after its end. It is not waited for:
    /// [`wait_until_clean`](Self::wait_until_clean) does.
    pub fn start_daemon(&mut self, daemon: Daemon) -> Result<()> {
        if let Some(child) = self.running.get_mut(&daemon)
            && child.try_wait()?.is_none()
        {
            bail!("{daemon} still runs");
        }
        self.start_with(daemon, &[])
    }

    /// One of the release's programs as a client of this cluster, for example `rbd`, `rados` or
    /// `fio`.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.programs.command(program);
        command.env("CEPH_CONF", self.config_file());
        command
    }

    /// Runs `rbd` and returns its output.
    pub fn rbd(&self, args: &[&str]) -> Result<String> {
        process::text(self.command("rbd").args(args), COMMAND_LIMIT)
    }

    /// Runs `ceph` and returns its output.
    pub fn ceph(&self, args: &[&str]) -> Result<String> {
        process::text(self.command("ceph").args(args), COMMAND_LIMIT)
    }

    /// Runs `rbd` with JSON as its output's format.
    pub fn rbd_json(&self, args: &[&str]) -> Result<Value> {
        let said = self.rbd(&[args, &["--format", "json"]].concat())?;
        serde_json::from_str(&said).with_context(|| format!("rbd {args:?}: {said}"))
    }

    /// Runs `ceph` with JSON as its output's format.
    pub fn ceph_json(&self, args: &[&str]) -> Result<Value> {
        let said = self.ceph(&[args, &["--format", "json"]].concat())?;
        serde_json::from_str(&said).with_context(|| format!("ceph {args:?}: {said}"))
    }

    /// Waits until all OSDs are up and all placement groups are active and clean.
    pub fn wait_until_clean(&mut self) -> Result<()> {
        let osds = u64::from(self.options.osds);
        self.until("all placement groups are clean", |cluster| {
            let status = cluster.ceph_json(&["status"])?;
            Ok(is_clean(&status, osds))
        })
    }

    fn start_all(&mut self) -> Result<()> {
        let fsid = uuid()?;
        let settings = Settings {
            folder: &self.folder,
            fsid: &fsid,
            monitor_port: self.monitor_port,
            osds: self.options.osds,
            has_cephx: self.options.has_cephx,
        };
        std::fs::write(self.config_file(), config::text(&settings, &self.programs))?;
        self.make_scripts()?;
        self.make_keys()?;
        self.make_monitor(&fsid)?;
        self.start_daemon(Daemon::Monitor)?;
        let address = ("127.0.0.1", self.monitor_port);
        self.until("the monitor listens", |_| {
            Ok(TcpStream::connect(address).is_ok())
        })?;
        self.start_daemon(Daemon::Manager)?;
        self.make_osds()?;
        // This writes an object, so it waits for the pool.
        self.rbd(&["pool", "init", POOL])?;
        self.wait_until_clean()
    }

    fn start_with(&mut self, daemon: Daemon, more: &[&str]) -> Result<()> {
        let in_background = self.options.is_left_running;
        let child = daemon::start(daemon, more, &self.folder, &self.programs, in_background)?;
        self.running.insert(daemon, child);
        Ok(())
    }

    /// Makes programs that people run.
    fn make_scripts(&self) -> Result<()> {
        for program in SCRIPTS {
            let file = self.folder.join("bin").join(program);
            std::fs::write(&file, packages::script(&self.command(program)))?;
            std::fs::set_permissions(&file, Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// Makes a file with the key of each user, and one with all for the monitor.
    fn make_keys(&self) -> Result<()> {
        let all = ["mon", "osd", "mgr"];
        let mut users: Vec<(String, Vec<(&str, &str)>)> = vec![
            ("mon.".to_owned(), vec![("mon", "allow *")]),
            (
                ADMIN.to_owned(),
                all.map(|service| (service, "allow *")).to_vec(),
            ),
            (
                Daemon::Manager.to_string(),
                vec![("mon", "allow profile mgr"), ("osd", "allow *")],
            ),
        ];
        for number in 0..self.options.osds {
            let profile = "allow profile osd";
            users.push((
                Daemon::Osd(number).to_string(),
                vec![("mon", profile), ("mgr", profile), ("osd", "allow *")],
            ));
        }
        let mut keys = String::new();
        for (user, capabilities) in users {
            let file = self.keyring(&user);
            let mut make = self.command("ceph-authtool");
            make.args(["--create-keyring", "--gen-key", "-n", &user]);
            for (service, capability) in capabilities {
                make.args(["--cap", service, capability]);
            }
            process::output(make.arg(&file), COMMAND_LIMIT)?;
            keys += &std::fs::read_to_string(&file)?;
        }
        std::fs::write(self.keyring("all"), keys).context("keys")
    }

    fn make_monitor(&self, fsid: &str) -> Result<()> {
        let map = self.folder.join("monmap");
        let id = Daemon::Monitor.id();
        let mut make = self.command("monmaptool");
        make.args(["--create", "--fsid", fsid, "--addv", &id, &self.monitor()]);
        process::output(make.arg(&map), COMMAND_LIMIT)?;
        let mut make = self.command(Daemon::Monitor.program());
        make.args(["--mkfs", "-i", &id, "--monmap"]).arg(&map);
        make.arg("--keyring").arg(self.keyring("all"));
        process::output(&mut make, COMMAND_LIMIT).map(drop)
    }

    /// Makes the OSDs, and meanwhile the pool.
    fn make_osds(&mut self) -> Result<()> {
        let osds: Vec<Daemon> = (0..self.options.osds).map(Daemon::Osd).collect();
        let mut uuids = Vec::new();
        for osd in &osds {
            let uuid = uuid()?;
            std::fs::create_dir(self.folder.join(osd.to_string()))?;
            self.start_with(*osd, &["--mkfs", "--osd-uuid", &uuid])?;
            uuids.push(uuid);
        }
        // Their numbers are given in this order, from 0.
        for uuid in &uuids {
            self.ceph(&["osd", "new", uuid])?;
        }
        self.ceph(&["osd", "pool", "create", POOL, PLACEMENT_GROUPS])?;
        // The manager has no modules.
        self.ceph(&["health", "mute", "MGR_MODULE_ERROR", "--sticky"])?;
        for osd in osds {
            if let Some(child) = self.running.get_mut(&osd) {
                let status = process::wait(child, STEP_LIMIT)?;
                ensure!(status.success(), "{osd} cannot be made: {status}");
            }
            self.start_daemon(osd)?;
        }
        Ok(())
    }

    /// Polls until `probe` is true. Fails if a daemon ends.
    fn until(&mut self, what: &str, mut probe: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let end = Instant::now() + STEP_LIMIT;
        while !probe(self)? {
            for (daemon, child) in &mut self.running {
                if let Some(status) = child.try_wait()? {
                    bail!("{daemon} ended: {status}");
                }
            }
            if Instant::now() >= end {
                bail!("waited {} s for this: {what}", STEP_LIMIT.as_secs());
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.is_released {
            return;
        }
        for child in self.running.values_mut() {
            let _ = child.kill();
        }
        for child in self.running.values_mut() {
            let _ = child.wait();
        }
    }
}

/// Kills the daemons of the cluster in `folder`, and removes the folder.
pub fn stop(folder: &Path) -> Result<()> {
    let here = || format!("no cluster in {}", folder.display());
    let folder = folder.canonicalize().with_context(here)?;
    let config = std::fs::read_to_string(daemon::config_file(&folder)).with_context(here)?;
    ensure!(config.starts_with(config::HEADER), "{}", here());
    daemon::kill_all(&folder)?;
    std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
}

fn make_folder(folder: &Path) -> Result<PathBuf> {
    let name = || folder.display().to_string();
    std::fs::create_dir_all(folder).with_context(name)?;
    // Processes are known by this path, so it must have one form.
    let folder = folder.canonicalize().with_context(name)?;
    if std::fs::read_dir(&folder)
        .with_context(name)?
        .next()
        .is_some()
    {
        bail!(
            "{} is not empty; a cluster there is removed by `down`",
            name()
        );
    }
    if folder.as_os_str().len() > MOST_FOLDER_BYTES {
        bail!(
            "{} is longer than {MOST_FOLDER_BYTES} bytes, too long for Unix sockets",
            name()
        );
    }
    for below in ["bin", "keys", "log", "mgr", "modules", "mon", "pids", "run"] {
        std::fs::create_dir(folder.join(below))?;
    }
    std::fs::set_permissions(folder.join("keys"), Permissions::from_mode(0o700))?;
    Ok(folder)
}

fn uuid() -> Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    let text = std::fs::read_to_string(path).context(path)?;
    Ok(text.trim().to_owned())
}

/// Whether `ceph status` says that the cluster is complete.
fn is_clean(status: &Value, osds: u64) -> bool {
    let groups = &status["pgmap"]["pgs_by_state"];
    let is_clean = |state: &Value| state["state_name"] == "active+clean";
    let is_mapped = status["pgmap"]["num_pgs"]
        .as_u64()
        .is_some_and(|count| count > 0);
    status["osdmap"]["num_up_osds"] == osds
        && status["mgrmap"]["available"] == true
        && is_mapped
        && groups
            .as_array()
            .is_some_and(|states| states.iter().all(is_clean))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_cluster_is_clean_with_all_osds_and_groups() {
        let status = |osds: u64, has_manager: bool, groups: u64, states: &[&str]| {
            let states: Vec<Value> = states
                .iter()
                .map(|state| json!({"state_name": state}))
                .collect();
            json!({
                "osdmap": {"num_osds": 2, "num_up_osds": osds},
                "mgrmap": {"available": has_manager},
                "pgmap": {"num_pgs": groups, "pgs_by_state": states},
            })
        };
        assert!(is_clean(&status(2, true, 8, &["active+clean"]), 2));
        assert!(!is_clean(&status(1, true, 8, &["active+clean"]), 2));
        assert!(!is_clean(&status(2, false, 8, &["active+clean"]), 2));
        assert!(!is_clean(&status(2, true, 0, &[]), 2));
        assert!(!is_clean(
            &status(2, true, 8, &["active+clean", "peering"]),
            2
        ));
        assert!(!is_clean(&json!({}), 2));
    }

    #[test]
    fn only_an_empty_folder_is_used_and_only_a_cluster_is_removed() {
        let folder = std::env::temp_dir().join(format!("xtask-ceph-{}", std::process::id()));
        let made = make_folder(&folder).unwrap();
        assert!(made.join("keys").is_dir());
        assert!(make_folder(&folder).is_err());
        std::fs::write(daemon::config_file(&made), "[global]\n").unwrap();
        assert!(stop(&folder).is_err());
        assert!(folder.exists());
        std::fs::write(daemon::config_file(&made), config::HEADER).unwrap();
        stop(&folder).unwrap();
        assert!(!folder.exists());
        assert!(make_folder(&std::env::temp_dir().join("x".repeat(100))).is_err());
    }
}
