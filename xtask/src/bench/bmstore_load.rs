//! A load for every side of `cargo xtask bench bmstore`: fio on bare files, our clients on a target.
//!
//! All have a sleeping thread for each job, on processor [`CLIENT_CPU`]. Kernel threads work for
//! both sides, so only other programs' user time disturbs a run.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::process;

use super::forebay::Forebay;
use super::measure::{Clock, Sample};
use super::once::{self, CLIENT_CPU, Once};
use super::recording_file::RemovedAtEnd;
use super::spdk::Perf;
use super::tcp::TARGET_CPU;
use super::vm;

const LIMIT: Duration = Duration::from_secs(120);
/// Of a volume, and of a bare file beside it.
pub(super) const VOLUME_BYTES: u64 = 512 << 20;
const POOL_BYTES: u64 = 2 << 30;
const LARGE_BYTES: u32 = 128 << 10;
/// An NVMe/TCP queue of 256 entries holds one command less.
const TCP_DEPTH: u32 = 255;

pub(super) const VFIO_USER: [&str; 1] = ["--vfio-user"];
pub(super) const VHOST_USER: [&str; 1] = ["--vhost-user"];

#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// The name that fio and our clients use.
    pub(super) pattern: &'static str,
    pub(super) block_bytes: u32,
    /// Commands of each job in flight.
    pub(super) depth: u32,
    pub(super) jobs: u32,
}

impl Load {
    /// 4 KiB at random.
    pub(super) const fn random(pattern: &'static str, depth: u32) -> Self {
        Self {
            pattern,
            block_bytes: 4096,
            depth,
            jobs: 4,
        }
    }

    /// 128 KiB in sequence, at depth 256; each job has its own part.
    pub(super) const fn sequential(pattern: &'static str) -> Self {
        Self {
            pattern,
            block_bytes: LARGE_BYTES,
            depth: 256,
            jobs: 4,
        }
    }

    fn is_sequential(&self) -> bool {
        !self.pattern.starts_with("rand")
    }

    /// In metric names.
    pub(super) fn name(&self) -> String {
        let order = if self.is_sequential() { "seq" } else { "" };
        format!("{order}{}_qd{}", self.pattern, self.depth)
    }
}

/// A run, with the processor time of these processes.
pub(super) fn turn(target: &[u32], run: impl FnOnce() -> Result<Perf>) -> Result<Sample> {
    let clock = Clock::start(target)?;
    let perf = run()?;
    let used = clock.used()?;
    Ok(Sample {
        iops: perf.iops,
        mean_us: perf.mean_us,
        p99_us: perf.p99_us,
        target_cores: used.target_cores,
        others_cores: used.others_user_cores,
    })
}

fn pinned(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &CLIENT_CPU.to_string()]).arg(program);
    command
}

/// Our client over NVMe/TCP, on `bench/v`.
pub(super) fn over_tcp(
    program: &Path,
    forebay: &Forebay,
    load: &Load,
    seconds: u32,
) -> Result<Perf> {
    let address = format!("127.0.0.1:{}", forebay.port);
    let mut command = pinned(program);
    command
        .args(["--json", "bench", "load", "--addr", &address])
        .args(["--nqn", &forebay.nqn, "--rw", load.pattern])
        .args(["--bs", &load.block_bytes.to_string()])
        .args(["--qd", &load.depth.min(TCP_DEPTH).to_string()])
        .args(["--queues", &load.jobs.to_string()])
        .args(["--seconds", &seconds.to_string()]);
    Ok(vm::figures(&mut command)?.perf)
}

/// Our client on a VM's disk; `kind` is [`VFIO_USER`] or [`VHOST_USER`].
pub(super) fn on_vm_disk(
    program: &Path,
    kind: &[&str],
    socket: &Path,
    load: &Load,
    seconds: u32,
) -> Result<Perf> {
    let mut command = pinned(program);
    command
        .args(["--json", "bench", "machine", "--interrupts"])
        .args(kind)
        .arg(socket)
        .args(["--rw", load.pattern])
        .args(["--bs", &load.block_bytes.to_string()])
        .args(["--depth", &load.depth.to_string()])
        .args(["--queues", &load.jobs.to_string()])
        .args(["--seconds", &seconds.to_string()]);
    Ok(vm::figures(&mut command)?.perf)
}

/// A file in the build's folder.
pub(super) fn file(name: &str, bytes: u64) -> Result<RemovedAtEnd> {
    let name = format!("bench-bmstore-{}-{name}.img", std::process::id());
    let file = RemovedAtEnd(crate::cargo::target_folder().join(name));
    std::fs::File::create(&file.0)?.set_len(bytes)?;
    Ok(file)
}

/// A written file of this size.
pub(super) fn bare_file(name: &str, bytes: u64) -> Result<RemovedAtEnd> {
    let file = file(name, bytes)?;
    let mut fio = Command::new("fio");
    fio.args(["--name=fill", "--direct=1", "--ioengine=io_uring"])
        .args(["--rw=write", "--bs=1M", "--iodepth=8"])
        .arg(format!("--filename={}", file.0.display()))
        .arg(format!("--size={bytes}"));
    process::text(&mut fio, LIMIT)?;
    Ok(file)
}

/// fio on files of this size, which share the jobs.
pub(super) fn on_bare_files(
    files: &[&Path],
    bytes: u64,
    load: &Load,
    seconds: u32,
) -> Result<Perf> {
    let jobs = u64::from(load.jobs) / files.len().max(1) as u64;
    let mut fio = pinned("fio");
    fio.args(["--output-format=json", "--name=global", "--thread"])
        .args(["--direct=1", "--ioengine=io_uring", "--fixedbufs=0"])
        .args(["--randrepeat=0", "--norandommap", "--group_reporting"])
        .args(["--time_based=1", &format!("--runtime={seconds}")])
        .arg(format!("--rw={}", load.pattern))
        .arg(format!("--bs={}", load.block_bytes))
        .arg(format!("--iodepth={}", load.depth))
        .arg(format!("--numjobs={jobs}"));
    if load.is_sequential() {
        let part = bytes / jobs.max(1);
        fio.arg(format!("--size={part}"))
            .arg(format!("--offset_increment={part}"));
    } else {
        fio.arg(format!("--size={bytes}"));
    }
    for (number, file) in files.iter().enumerate() {
        fio.arg(format!("--name=device{number}"))
            .arg(format!("--filename={}", file.display()));
    }
    parse_fio(&process::text(&mut fio, LIMIT)?, load.pattern)
}

fn parse_fio(text: &str, pattern: &str) -> Result<Perf> {
    // Skips notes.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json).context("fio's report")?;
    let side = &report["jobs"][0][pattern.trim_start_matches("rand")];
    let figure = |value: &Value| value.as_f64().context("fio's report lacks a figure");
    Ok(Perf {
        iops: figure(&side["iops"])?,
        mean_us: figure(&side["lat_ns"]["mean"])? / 1e3,
        p99_us: figure(&side["clat_ns"]["percentile"]["99.000000"])? / 1e3,
    })
}

/// Writes all of a volume.
pub(super) fn fill(program: &Path, forebay: &Forebay, nqn: &str) -> Result<()> {
    let once = Once {
        pattern: "write",
        depth: 8,
        ..Once::write(LARGE_BYTES.into(), LARGE_BYTES.into())
    };
    once::load(program, forebay, nqn, once).map(drop)
}

/// A pool on one file, with the written volume `bench/v` of [`VOLUME_BYTES`].
pub(super) struct Rig {
    pub(super) forebay: Forebay,
    // Removed after the processes have ended.
    _pool: RemovedAtEnd,
}

impl Rig {
    pub(super) fn start(program: &Path) -> Result<Self> {
        let pool = file("pool", POOL_BYTES)?;
        let spec = format!("file:{}", pool.0.display());
        let size = VOLUME_BYTES.to_string();
        let forebay = Forebay::start_with(program, &spec, TARGET_CPU, &size)?;
        forebay.wait_zero_filled()?;
        fill(program, &forebay, &forebay.nqn)?;
        Ok(Self {
            forebay,
            _pool: pool,
        })
    }

    /// A written volume of [`VOLUME_BYTES`] as a VM's disk; returns its socket. `kind` are options
    /// of `export create`.
    pub(super) fn vm_disk(&self, program: &Path, name: &str, kind: &[&str]) -> Result<PathBuf> {
        let volume = format!("bench/{name}");
        let socket = self.forebay.folder().join(format!("{name}.sock"));
        let (size, path) = (VOLUME_BYTES.to_string(), socket.display().to_string());
        let cli = |args: &[&str]| self.forebay.cli(args).map(drop);
        cli(&["volume", "create", &volume, "--size", &size])?;
        fill(program, &self.forebay, &self.forebay.export(&volume)?)?;
        cli(&["export", "delete", &volume, "--disconnect-hosts"])?;
        let export = ["export", "create", &volume, "--vm-socket", &path];
        cli(&[&export[..], kind].concat())?;
        Ok(socket)
    }
}

#[cfg(test)]
mod tests {
    use super::{Load, parse_fio};

    #[test]
    fn fio_reports() {
        let text = r#"note
{"jobs": [{"read": {"iops": 0.0}, "write": {"iops": 1234.5, "lat_ns": {"mean": 5600.0},
"clat_ns": {"percentile": {"50.000000": 1000, "99.000000": 7000}}}}]}"#;
        let perf = parse_fio(text, "randwrite").unwrap();
        assert!((perf.iops - 1234.5).abs() < 1e-9);
        assert!((perf.mean_us - 5.6).abs() < 1e-9);
        assert!((perf.p99_us - 7.0).abs() < 1e-9);
        assert!(parse_fio(text, "read").is_err());
        assert!(parse_fio("note", "read").is_err());
    }

    #[test]
    fn names_of_metrics() {
        assert_eq!(Load::random("randread", 1).name(), "randread_qd1");
        assert_eq!(Load::sequential("write").name(), "seqwrite_qd256");
    }
}
