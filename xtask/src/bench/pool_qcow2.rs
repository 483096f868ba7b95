//! Snapshots of a VM's disk, beside those of qcow2 under qemu-storage-daemon.
//!
//! Both export a disk of 1 GiB (256 MiB with `--quick`) in memory over vhost-user, in clusters of
//! 64 KiB, all written. The client and its sleep are the same. Each round runs both sides:
//! - a snapshot under random writes, as in [`super::pool_stall`]; theirs is
//!   `blockdev-snapshot-internal-sync`;
//! - another snapshot, and then the first write of 4 KiB to each cluster.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use forebay_initiator::vm::Target;
use serde_json::{Value, json};
use xtask::process;

use super::burst_client::{BLOCK, Host};
use super::measure::Clock;
use super::once::{self, Run};
use super::pool::{EXTENT_BYTES, GIB, PoolBench, Rig, TARGET_CPU, settle};
use super::pool_load::{once_per, write_each};
use super::pool_stall::{self, Stall};
use super::vm::{QSD, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// Ours, theirs.
type Sides<T> = [Vec<T>; 2];

pub(super) fn run(bench: &mut PoolBench) -> Result<()> {
    if !process::is_installed(QSD) {
        println!("{QSD} is not installed (package qemu-system-common): skipping the comparison");
        return Ok(());
    }
    let (rounds, bytes) = if bench.quick { (1, GIB / 4) } else { (7, GIB) };
    let rig = Rig::start(bench, "ram", 4 * bytes + GIB, EXTENT_BYTES, "64K")?;
    let (mut stalls, mut firsts): (Sides<Stall>, Sides<Run>) = Default::default();
    for round in 0..rounds {
        let volume = format!("machine{round}");
        let (stall, first) = ours(&rig, &volume, bytes)?;
        stalls[0].push(stall);
        firsts[0].push(first);
        let (stall, first) = theirs(bytes)?;
        stalls[1].push(stall);
        firsts[1].push(first);
    }
    pool_stall::print_header();
    pool_stall::report(bench, "vhost", &stalls[0]);
    pool_stall::report(bench, "qcow2", &stalls[1]);
    let summary = &mut bench.summary;
    let [ours, theirs] = &stalls;
    let stall = once::quiet_ratio(summary, ours, theirs, |stall| stall.gap_ms);
    let write = once::quiet_ratio(summary, ours, theirs, |stall| stall.write_ms);
    let call = once::quiet_ratio(summary, ours, theirs, |stall| stall.call_ms);
    let [ours, theirs] = &firsts;
    let ours_iops = once::quiet_median(summary, ours, |run| run.iops);
    let theirs_iops = once::quiet_median(summary, theirs, |run| run.iops);
    let iops = once::quiet_ratio(summary, ours, theirs, |run| run.iops);
    let latency = once::quiet_ratio(summary, ours, theirs, |run| run.mean_us);
    println!(
        "ours over theirs: stall {stall:.2}, longest write {write:.2}, call {call:.2}; first writes after it: {ours_iops:.0} and {theirs_iops:.0} IOPS, {iops:.2}; latency {latency:.2}"
    );
    for (name, value) in [
        ("stall_gap_latency_ratio", stall),
        ("stall_write_latency_ratio", write),
        ("snapshot_call_latency_ratio", call),
        ("first_write_ours_iops", ours_iops),
        ("first_write_theirs_iops", theirs_iops),
        ("first_write_iops_ratio", iops),
        ("first_write_latency_ratio", latency),
    ] {
        summary.put(format!("qcow2_{name}"), value);
    }
    Ok(())
}

/// One side's round; `snapshot` takes one of this name, and says when it began and ended.
fn side(
    socket: &Path,
    pids: &[u32],
    bytes: u64,
    mut snapshot: impl FnMut(&str) -> Result<(Instant, Instant)>,
) -> Result<(Stall, Run)> {
    let connect = || Host::machine(&Target::VhostUser(socket.to_owned()), true);
    let places = once_per(EXTENT_BYTES, bytes, true);
    write_each(connect, places.clone())?;
    settle();
    let blocks = bytes / u64::from(BLOCK);
    let stall = pool_stall::measure(connect, pids, blocks, || snapshot("one"))?;
    settle();
    snapshot("two")?;
    settle();
    let clock = Clock::start(pids)?;
    let begun = Instant::now();
    let writes = write_each(connect, places)?;
    let first = writes.iter().map(|write| write.begun).min();
    let last = writes.last().map(|write| write.ended);
    let (first, last) = (first.unwrap_or(begun), last.unwrap_or(begun));
    let sum: Duration = writes.iter().map(|write| write.ended - write.begun).sum();
    let run = Run {
        iops: writes.len() as f64 / (last - first).as_secs_f64().max(1e-9),
        mean_us: sum.as_secs_f64() * 1e6 / writes.len().max(1) as f64,
        others_cores: clock.used()?.others_user_cores,
    };
    Ok((stall, run))
}

fn ours(rig: &Rig, name: &str, bytes: u64) -> Result<(Stall, Run)> {
    let volume = format!("bench/{name}");
    let socket = rig.forebay.folder().join(format!("{name}.sock"));
    let path = socket.display().to_string();
    let size = bytes.to_string();
    let cli = |args: &[&str]| rig.forebay.cli(args);
    cli(&["volume", "create", &volume, "--size", &size])?;
    let export = ["export", "create", &volume, "--vhost-user", "--vm-socket"];
    cli(&[&export[..], &[&path]].concat())?;
    let pids = rig.forebay.processes();
    let snapshot = |snapshot: &str| rig.api.snapshot(&format!("{name}@{snapshot}"));
    let figures = side(&socket, &pids, bytes, snapshot)?;
    let cli = |args: &[&str]| rig.forebay.cli(args);
    cli(&["export", "delete", &volume, "--disconnect-hosts"])?;
    for name in ["@one", "@two", ""] {
        cli(&["volume", "delete", &format!("{volume}{name}")])?;
    }
    rig.wait_empty()?;
    Ok(figures)
}

fn theirs(bytes: u64) -> Result<(Stall, Run)> {
    let mut qsd = Qsd::start(bytes)?;
    let (socket, pid) = (qsd.socket.clone(), qsd.child.id());
    side(&socket, &[pid], bytes, |name| {
        let begun = Instant::now();
        let arguments = json!({ "device": "disk", "name": name });
        qsd.monitor
            .execute("blockdev-snapshot-internal-sync", &arguments)?;
        Ok((begun, Instant::now()))
    })
}

/// A qemu-storage-daemon that exports a new qcow2 image in memory.
struct Qsd {
    child: Child,
    monitor: Monitor,
    socket: PathBuf,
    files: [PathBuf; 3],
}

impl Qsd {
    fn start(bytes: u64) -> Result<Self> {
        let number = std::process::id();
        let folder = crate::cargo::target_folder();
        let socket = folder.join(format!("qsd-{number}.sock"));
        let monitor = folder.join(format!("qsd-{number}.qmp"));
        let image = PathBuf::from(format!("/dev/shm/forebay-bench-{number}.qcow2"));
        let files = [socket.clone(), monitor.clone(), image.clone()];
        for file in &files {
            let _ = std::fs::remove_file(file);
        }
        std::fs::File::create(&image)?;
        let file = format!("driver=file,node-name=file,filename={}", image.display());
        let chardev = format!(
            "socket,id=monitor,path={},server=on,wait=off",
            monitor.display()
        );
        let mut child = Command::new("taskset")
            .args(["-c", &TARGET_CPU.to_string(), QSD, "--blockdev", &file])
            .args(["--chardev", &chardev, "--monitor", "chardev=monitor"])
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {QSD}"))?;
        let connected = wait_for(&monitor, &mut child).and_then(|()| Monitor::connect(&monitor));
        let monitor = connected.inspect_err(|_| {
            let _ = child.kill();
            let _ = child.wait();
        })?;
        let mut this = Self {
            child,
            monitor,
            socket,
            files,
        };
        this.export(bytes)?;
        Ok(this)
    }

    /// Makes and exports the image.
    fn export(&mut self, bytes: u64) -> Result<()> {
        let monitor = &mut self.monitor;
        let options = json!({ "driver": "qcow2", "file": "file", "size": bytes, "cluster-size": EXTENT_BYTES });
        monitor.execute(
            "blockdev-create",
            &json!({ "job-id": "create", "options": options }),
        )?;
        let until = Instant::now() + LIMIT;
        loop {
            let jobs = monitor.execute("query-jobs", &json!({}))?;
            if jobs[0]["status"] == "concluded" {
                if let Some(error) = jobs[0]["error"].as_str() {
                    bail!("{QSD} made no image: {error}");
                }
                break;
            }
            if Instant::now() > until {
                bail!("{QSD} made no image within {LIMIT:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        monitor.execute("job-dismiss", &json!({ "id": "create" }))?;
        let disk = json!({ "driver": "qcow2", "node-name": "disk", "file": "file" });
        monitor.execute("blockdev-add", &disk)?;
        let address = json!({ "type": "unix", "path": self.socket });
        let export = json!({
            "type": "vhost-user-blk", "id": "export", "node-name": "disk", "writable": true,
            "addr": address,
        });
        monitor.execute("block-export-add", &export)?;
        wait_for(&self.socket, &mut self.child)
    }
}

impl Drop for Qsd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// QEMU's monitor protocol.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut this = Self(BufReader::new(stream));
        this.execute("qmp_capabilities", &json!({}))?;
        Ok(this)
    }

    /// Returns a command's answer.
    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        let stream = self.0.get_mut();
        stream.write_all(line.as_bytes())?;
        stream.write_all(b"\n")?;
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line)? == 0 {
                bail!("{QSD} ended during {command}");
            }
            // The greeting and events come between.
            let mut answer: Value = serde_json::from_str(&line)?;
            if !answer["error"].is_null() {
                bail!("{QSD}, {command}: {}", answer["error"]);
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }
}
