//! Volumes shown to virtual machines, and drivers at work on them.
//!
//! Purpose: what the tests of both of machines' frontends have in common: a daemon with such an export, known content
//! written and looked for, and a verified load that goes on while engines die.
//! Design: the drivers are the initiator's; a machine's disk keeps its connection whatever dies, so every lost connection
//! is a failure. What is waited for is a condition: so many commands more.
//! Not here: guests.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use forebay_initiator::machine::verify::{MachineVerifier, MachineVerify};
use forebay_initiator::machine::{
    self, Disk, DiskCompletion, DiskStatus, Op, Options, Queue, Target,
};
use forebay_initiator::verify::WriteReport;
use forebay_initiator::verify::pattern;
use serde_json::Value;
use xtask::process;

use crate::daemon::{Daemon, DaemonOptions};
use crate::wait;

const LIMIT: Duration = Duration::from_secs(60);
/// Writes that must be acknowledged between two deaths.
const BETWEEN_DEATHS: u64 = 200;
/// Of a command of [`fill`] and [`look`].
const PIECE_BYTES: u32 = 64 << 10;

/// A frontend of machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frontend {
    /// vhost-user-blk.
    VhostUser,
    /// NVMe over vfio-user, its doorbells trapped.
    NvmePcie,
    /// NVMe over vfio-user, its doorbells mapped.
    MappedPcie,
}

/// A daemon with a pool on a file of `size` bytes, and a tenant `t`.
///
/// # Errors
/// If it can't be had.
pub fn serve(options: &DaemonOptions, size: &str) -> Result<Daemon> {
    let daemon = Daemon::start(options)?;
    let device = format!("file:{}", daemon.folder().join("pool.img").display());
    daemon.create_pool(&["--device", &device, "--size", size])?;
    daemon.cli(&["tenant", "create", "t"])?;
    Ok(daemon)
}

/// Makes the volume `t/NAME` and exports it to a machine; where its disk is.
///
/// # Errors
/// If either fails.
pub fn export(daemon: &Daemon, name: &str, size: &str, frontend: Frontend) -> Result<Target> {
    let volume = format!("t/{name}");
    daemon.cli(&["volume", "create", &volume, "--size", size])?;
    export_as(daemon, &volume, frontend, &[])
}

/// Exports a volume that there is to a machine; where its disk is.
///
/// # Errors
/// If it is refused.
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

/// The arguments for QEMU that `forebay export show` prints, as a shell has them.
///
/// # Errors
/// If it prints none.
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

/// What `forebay stats` says of the only export.
///
/// # Errors
/// If there is none.
pub fn lane(daemon: &Daemon) -> Result<Value> {
    let stats = daemon.cli(&["stats"])?;
    Ok(stats["lanes"].get(0).context("no lane")?.clone())
}

/// Connects; an earlier client may have to be gone first.
///
/// # Errors
/// If that does not succeed within a minute.
pub fn connect(target: &Target, options: &Options) -> Result<Box<dyn Disk>> {
    let mut last = None;
    let connected = wait::until("a connection", LIMIT, || {
        match machine::connect(target, options) {
            Ok(disk) => Ok(Some(disk)),
            Err(error) => {
                last = Some(error);
                Ok(None)
            }
        }
    });
    connected.with_context(|| format!("the last attempt: {last:?}"))
}

/// One command to its end.
///
/// # Errors
/// If it does not end well within a minute.
pub fn execute(queue: &mut dyn Queue, op: Op) -> Result<()> {
    match end_of(queue, op)? {
        DiskStatus::Well => Ok(()),
        other => bail!("{op:?} ended with {other:?}"),
    }
}

/// One command to its end, whichever that is.
///
/// # Errors
/// If it does not end within a minute.
pub fn end_of(queue: &mut dyn Queue, op: Op) -> Result<DiskStatus> {
    queue.submit(0, op)?;
    queue.kick()?;
    let begun = std::time::Instant::now();
    let mut done: Vec<DiskCompletion> = Vec::new();
    while queue.poll(&mut done)? == 0 {
        ensure!(begun.elapsed() < LIMIT, "{op:?} does not end");
        std::thread::yield_now();
    }
    Ok(done[0].ended)
}

/// How [`fill`] and [`look`] drive a disk.
fn plainly() -> Options {
    Options {
        slot_bytes: PIECE_BYTES as usize,
        depth: 1,
        ..Options::default()
    }
}

/// Writes the first `bytes` of a disk so that each sector says where it belongs.
///
/// # Errors
/// If anything does not end well.
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

/// Reads the first `bytes` of a disk: they must be what [`fill`] wrote.
///
/// # Errors
/// If anything does not end well, or is something else.
pub fn look(target: &Target, bytes: u64, seed: u64) -> Result<()> {
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

/// What the loads of [`during_loads`] have done so far.
#[derive(Debug)]
pub struct Work {
    written: Vec<AtomicU64>,
    is_over: AtomicBool,
}

impl Work {
    /// Fails if a load has ended.
    ///
    /// # Errors
    /// As said.
    pub fn alive(&self) -> Result<()> {
        ensure!(!self.is_over.load(Ordering::Relaxed), "a load has ended");
        Ok(())
    }

    /// Waits until each load has written more.
    ///
    /// # Errors
    /// If one has ended, or does not within a minute.
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

/// Verified loads on disks, each by a thread, while `work` does what it likes; at the end everything is read back.
///
/// # Errors
/// If a connection is lost, a command ends with an error, or anything is wrong on a disk; or `work`'s.
pub fn during_loads(
    daemon: &mut Daemon,
    specs: Vec<MachineVerify>,
    work: impl FnOnce(&mut Daemon, &Work) -> Result<()>,
) -> Result<Vec<WriteReport>> {
    let connected = specs.into_iter().map(MachineVerifier::connect);
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

/// A verified load on a disk while `deaths` engines are killed under it. Between two deaths commands must end; at the end
/// everything is read back.
///
/// # Errors
/// If a connection is lost, a command ends with an error, or anything is wrong on the disk.
pub fn verified_over_deaths(daemon: &mut Daemon, spec: MachineVerify, deaths: u64) -> Result<()> {
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
