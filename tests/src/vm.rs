//! Volumes exported to VMs, and the initiator's drivers at work on them. A VM's disk keeps its
//! connection when an engine dies, so a lost connection is a failure.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use forebay_initiator::verify::WriteReport;
use forebay_initiator::verify::pattern;
use forebay_initiator::vm::verify::{VmVerifier, VmVerify};
use forebay_initiator::vm::{self, Disk, DiskCompletion, DiskStatus, Op, Options, Queue, Target};
use serde_json::Value;
use xtask::process;

use crate::daemon::{Daemon, DaemonOptions};
use crate::wait;

const LIMIT: Duration = Duration::from_secs(60);
/// Acknowledged writes between two deaths.
const BETWEEN_DEATHS: u64 = 200;
const PIECE_BYTES: u32 = 64 << 10;

/// A frontend for VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frontend {
    /// vhost-user-blk.
    VhostUser,
    /// NVMe over vfio-user with trapped doorbells.
    NvmePcie,
    /// NVMe over vfio-user with mapped doorbells.
    MappedPcie,
}

/// A daemon with a pool on a file of `size` bytes, and a tenant `t`.
pub fn serve(options: &DaemonOptions, size: &str) -> Result<Daemon> {
    let daemon = Daemon::start(options)?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", size])?;
    daemon.cli(&["tenant", "create", "t"])?;
    Ok(daemon)
}

/// Creates the volume `t/NAME` and exports it to a VM.
pub fn export(daemon: &Daemon, name: &str, size: &str, frontend: Frontend) -> Result<Target> {
    let volume = format!("t/{name}");
    daemon.cli(&["volume", "create", &volume, "--size", size])?;
    export_as(daemon, &volume, frontend, &[])
}

/// Exports an existing volume to a VM.
pub fn export_as(
    daemon: &Daemon,
    volume: &str,
    frontend: Frontend,
    more: &[&str],
) -> Result<Target> {
    let mut args = vec!["export", "create", volume];
    args.extend_from_slice(match frontend {
        Frontend::VhostUser => &["--vhost-user", "--queues", "4"],
        Frontend::NvmePcie => &["--nvme-pcie"],
        Frontend::MappedPcie => &["--nvme-pcie", "--mapped-doorbells"],
    });
    args.extend_from_slice(more);
    let made = daemon.cli(&args)?;
    let socket = made["socket"].as_str().context("an export has a socket")?;
    let socket = PathBuf::from(socket);
    Ok(match frontend {
        Frontend::VhostUser => Target::VhostUser(socket),
        Frontend::NvmePcie | Frontend::MappedPcie => Target::VfioUser(socket),
    })
}

/// The QEMU arguments of `forebay export show`, split as by a shell.
pub fn printed_arguments(daemon: &Daemon, volume: &str) -> Result<Vec<String>> {
    let text = daemon.cli_text(&["export", "show", volume])?;
    let lines = text.split_once("QEMU:\n").and_then(|(_, behind)| {
        let (lines, _) = behind.split_once("cloud-hypervisor:")?;
        Some(lines.replace('\n', " "))
    });
    let lines = lines.with_context(|| format!("it prints no arguments for QEMU:\n{text}"))?;
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("printf '%s\\n' {lines}")]);
    let words = process::output(&mut shell, LIMIT)?;
    Ok(String::from_utf8(words)?
        .lines()
        .map(str::to_owned)
        .collect())
}

/// The socket of a target.
#[must_use]
pub fn socket(target: &Target) -> &PathBuf {
    match target {
        Target::VhostUser(path) | Target::VfioUser(path) => path,
    }
}

/// The only export's statistics.
pub fn lane(daemon: &Daemon) -> Result<Value> {
    let stats = daemon.cli(&["stats"])?;
    Ok(stats["lanes"].get(0).context("no lane")?.clone())
}

/// Connects; waits until an earlier client is gone.
pub fn connect(target: &Target, options: &Options) -> Result<Box<dyn Disk>> {
    let mut last = None;
    let connected = wait::until("a connection", LIMIT, || {
        match vm::connect(target, options) {
            Ok(disk) => Ok(Some(disk)),
            Err(error) => {
                last = Some(error);
                Ok(None)
            }
        }
    });
    connected.with_context(|| format!("the last attempt: {last:?}"))
}

/// Executes a command, which must succeed.
pub fn execute(queue: &mut dyn Queue, op: Op) -> Result<()> {
    match end_of(queue, op)? {
        DiskStatus::Well => Ok(()),
        other => bail!("{op:?} ended with {other:?}"),
    }
}

/// Executes a command and returns its status.
pub fn end_of(queue: &mut dyn Queue, op: Op) -> Result<DiskStatus> {
    queue.submit(0, op)?;
    queue.kick()?;
    let begun = std::time::Instant::now();
    let mut done: Vec<DiskCompletion> = Vec::new();
    while queue.poll(&mut done)? == 0 {
        ensure!(begun.elapsed() < LIMIT, "{op:?} did not complete");
        std::thread::yield_now();
    }
    Ok(done[0].ended)
}

/// The options of [`fill`] and [`poll`].
fn plainly() -> Options {
    Options {
        slot_bytes: PIECE_BYTES as usize,
        depth: 1,
        ..Options::default()
    }
}

/// Writes a disk's beginning with sectors that name their place.
pub fn fill(target: &Target, bytes: u64, seed: u64) -> Result<()> {
    let mut disk = connect(target, &plainly())?;
    let mut queues = disk.take_queues();
    let queue = &mut *queues[0];
    let mut data = vec![0; PIECE_BYTES as usize];
    for offset_bytes in (0..bytes).step_by(data.len()) {
        pattern::fill(&mut data, seed, offset_bytes / 512, 1);
        queue.put(0, &data);
        let bytes = PIECE_BYTES;
        execute(
            queue,
            Op::Write {
                offset_bytes,
                bytes,
            },
        )?;
    }
    execute(queue, Op::Flush)?;
    drop(queues);
    disk.close()?;
    Ok(())
}

/// Checks that a disk's beginning is that of [`fill`].
pub fn poll(target: &Target, bytes: u64, seed: u64) -> Result<()> {
    let mut disk = connect(target, &plainly())?;
    let mut queues = disk.take_queues();
    let queue = &mut *queues[0];
    let mut data = vec![0; PIECE_BYTES as usize];
    for offset_bytes in (0..bytes).step_by(data.len()) {
        let bytes = PIECE_BYTES;
        execute(
            queue,
            Op::Read {
                offset_bytes,
                bytes,
            },
        )?;
        queue.get(0, &mut data);
        for (sector, content) in (offset_bytes / 512..).zip(data.chunks(512)) {
            ensure!(
                pattern::holds(content, seed, sector, 1),
                "sector {sector} holds {}",
                pattern::read(content)
            );
        }
    }
    drop(queues);
    disk.close()?;
    Ok(())
}

/// Progress of the loads of [`during_loads`].
#[derive(Debug)]
pub struct Work {
    written: Vec<AtomicU64>,
    is_over: AtomicBool,
}

impl Work {
    /// Fails if a load has ended.
    pub fn alive(&self) -> Result<()> {
        ensure!(!self.is_over.load(Ordering::Relaxed), "a load has ended");
        Ok(())
    }

    /// Waits until each load has written more.
    pub fn more(&self, what: &str) -> Result<()> {
        let now = || self.written.iter().map(|w| w.load(Ordering::Relaxed));
        let before: Vec<u64> = now().collect();
        wait::until(what, LIMIT, || {
            self.alive()?;
            let mut both = before.iter().zip(now());
            Ok(both
                .all(|(before, now)| now >= before + BETWEEN_DEATHS)
                .then_some(()))
        })
    }
}

/// Runs verified loads on disks during `work`, then reads everything back.
pub fn during_loads(
    daemon: &mut Daemon,
    specs: Vec<VmVerify>,
    work: impl FnOnce(&mut Daemon, &Work) -> Result<()>,
) -> Result<Vec<WriteReport>> {
    let connected = specs.into_iter().map(VmVerifier::connect);
    let mut verifiers = connected.collect::<Result<Vec<_>, _>>()?;
    let done = Work {
        written: verifiers.iter().map(|_| AtomicU64::new(0)).collect(),
        is_over: AtomicBool::new(false),
    };
    let (worked, loads) = std::thread::scope(|scope| {
        let begun = verifiers.iter_mut().zip(&done.written);
        let begun: Vec<_> = begun
            .map(|(verifier, written)| {
                let is_over = &done.is_over;
                scope.spawn(move || {
                    let result = verifier.write(&mut |writes| {
                        written.store(writes, Ordering::Relaxed);
                        if is_over.load(Ordering::Relaxed) {
                            ControlFlow::Break(())
                        } else {
                            ControlFlow::Continue(())
                        }
                    });
                    is_over.store(true, Ordering::Relaxed);
                    result
                })
            })
            .collect();
        let worked = work(daemon, &done);
        done.is_over.store(true, Ordering::Relaxed);
        let loads: Vec<_> = begun
            .into_iter()
            .map(|load| load.join().unwrap_or_else(|_| panic!("a load panicked")))
            .collect();
        (worked, loads)
    });
    let mut all = Vec::new();
    for load in loads {
        // The load's own error says more.
        let load = load.map_err(|error| daemon.with_logs(error.into()))?;
        ensure!(load.errors == 0, "{:?}", load.first_error);
        all.push(load);
    }
    worked?;
    for mut verifier in verifiers {
        verifier.flush()?;
        let read = verifier.read_back()?;
        ensure!(read.is_clean(), "{read}");
        ensure!(read.bytes > 0, "nothing was read");
        verifier.close()?;
    }
    Ok(all)
}

/// Runs a verified load while `deaths` engines are killed, with progress between deaths.
pub fn verified_over_deaths(daemon: &mut Daemon, spec: VmVerify, deaths: u64) -> Result<()> {
    during_loads(daemon, vec![spec], |daemon, work| {
        work.more("the first writes")?;
        for death in 1..=deaths {
            let dead = daemon.kill_engine()?;
            daemon.wait_engine_after(dead.generation, LIMIT)?;
            work.more(&format!("writes after death {death}"))?;
        }
        Ok(())
    })?;
    Ok(())
}
