//! A load for every side of `cargo xtask bench ceph`, with its processor time per I/O.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::process;

use super::ceph::Rig;
use super::measure::{Clock, TICKS_PER_SECOND, children_ticks, ticks_of};
use super::once::Measured;

const LIMIT: Duration = Duration::from_secs(120);
/// In metric names.
pub(super) const LATENCIES: [&str; 6] = ["mean", "p50", "p90", "p99", "p999", "p9999"];
const PERCENTILES: [&str; 5] = ["50", "90", "99", "99.9", "99.99"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Fio,
    Tcp,
    VfioUser,
}

impl Side {
    /// In metric names.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fio => "fio",
            Self::Tcp => "tcp",
            Self::VfioUser => "vfio",
        }
    }

    pub(super) fn image(self) -> &'static str {
        self.name()
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// `read` or `write`.
    pub(super) op: &'static str,
    pub(super) depth: u32,
}

impl Load {
    /// In metric names.
    pub(super) fn name(self) -> String {
        format!("{}_qd{}", self.op, self.depth)
    }
}

/// A run of a load.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) iops: f64,
    /// As [`LATENCIES`].
    pub(super) latency_us: [f64; 6],
    /// Processor time per I/O of the client, the engine and the OSD.
    pub(super) cpu_us: [f64; 3],
    pub(super) others_cores: f64,
}

impl Measured for Turn {
    fn others_cores(&self) -> f64 {
        self.others_cores
    }
}

struct Figures {
    ios: f64,
    iops: f64,
    latency_us: [f64; 6],
}

impl Rig {
    /// `fio_start_s`: as of [`fio_start_s`](Self::fio_start_s).
    pub(super) fn turn(
        &self,
        side: Side,
        load: Load,
        seconds: u32,
        fio_start_s: f64,
    ) -> Result<Turn> {
        let (engine, osd) = (self.forebay.engine, self.osd()?);
        let mut pids = self.ceph()?;
        pids.extend(self.forebay.processes());
        let ticks = || anyhow::Ok([children_ticks()?, ticks_of(&[engine])?, ticks_of(&[osd])?]);
        let clock = Clock::start(&pids)?;
        let before = ticks()?;
        let figures = match side {
            Side::Fio => self.fio_load(load, seconds)?,
            Side::Tcp | Side::VfioUser => ours(&mut self.client(side, load, seconds))?,
        };
        let after = ticks()?;
        let used = clock.used()?;
        let mut cpu_s = [0, 1, 2].map(|at| (after[at] - before[at]) as f64 / TICKS_PER_SECOND);
        if side == Side::Fio {
            cpu_s[0] = (cpu_s[0] - fio_start_s).max(0.0);
        }
        Ok(Turn {
            iops: figures.iops,
            latency_us: figures.latency_us,
            cpu_us: cpu_s.map(|seconds| seconds * 1e6 / figures.ios.max(1.0)),
            others_cores: used.others_user_cores,
        })
    }

    /// Processor time of fio until its first command: it connects each time, our engine does not.
    pub(super) fn fio_start_s(&self) -> Result<f64> {
        let before = children_ticks()?;
        let mut fio = self.fio(Side::Fio.image());
        fio.args(["--rw=randread", "--bs=4k", "--number_ios=1"]);
        process::text(&mut fio, LIMIT)?;
        Ok((children_ticks()? - before) as f64 / TICKS_PER_SECOND)
    }

    fn fio_load(&self, load: Load, seconds: u32) -> Result<Figures> {
        let mut fio = self.fio(Side::Fio.image());
        fio.args([&format!("--rw=rand{}", load.op), "--bs=4k"])
            .args(["--time_based=1", &format!("--runtime={seconds}")])
            .args(["--randrepeat=0", "--norandommap", "--lat_percentiles=1"])
            .arg(format!("--percentile_list={}", PERCENTILES.join(":")))
            .arg(format!("--iodepth={}", load.depth));
        parse_fio(&process::text(&mut fio, LIMIT)?, load.op)
    }

    fn client(&self, side: Side, load: Load, seconds: u32) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["--json", "bench"]);
        let depth = match side {
            Side::VfioUser => {
                let socket = self.socket.as_os_str();
                command.args(["machine", "--interrupts", "--vfio-user"]);
                command.arg(socket);
                "--depth"
            }
            _ => {
                let address = format!("127.0.0.1:{}", self.forebay.port);
                command.args(["load", "--addr", &address, "--nqn", &self.nqn]);
                "--qd"
            }
        };
        command
            .args(["--rw", &format!("rand{}", load.op), "--bs", "4K"])
            .args([depth, &load.depth.to_string()])
            .args(["--seconds", &seconds.to_string()]);
        command
    }
}

fn parse_fio(text: &str, op: &str) -> Result<Figures> {
    // Skips notes.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json).context("fio's report")?;
    let side = &report["jobs"][0][op];
    let figure = |value: &Value| value.as_f64().context("fio's report lacks a figure");
    let mut latency_us = [figure(&side["lat_ns"]["mean"])? / 1e3; 6];
    for (latency, percentile) in latency_us.iter_mut().skip(1).zip(PERCENTILES) {
        let percentile = percentile.parse::<f64>()?;
        let percentile = &side["lat_ns"]["percentile"][format!("{percentile:.6}")];
        *latency = figure(percentile)? / 1e3;
    }
    Ok(Figures {
        ios: figure(&side["total_ios"])?,
        iops: figure(&side["iops"])?,
        latency_us,
    })
}

fn ours(command: &mut Command) -> Result<Figures> {
    let report: Value = serde_json::from_str(&process::text(command, LIMIT)?)?;
    let line = &report["lines"][0];
    let figure = |name: &str| {
        let value = line[name].as_f64();
        value.with_context(|| format!("the load generator gave no {name}: {report}"))
    };
    let mut latency_us = [0.0; 6];
    for (latency, name) in latency_us.iter_mut().zip(LATENCIES) {
        *latency = figure(&format!("{name}_us"))?;
    }
    Ok(Figures {
        ios: figure("ops")?,
        iops: figure("iops")?,
        latency_us,
    })
}

#[cfg(test)]
mod tests {
    use super::parse_fio;

    #[test]
    fn fio_reports() {
        let text = r#"note
{"jobs": [{"write": {"iops": 0.0}, "read": {"iops": 1234.5, "total_ios": 7, "lat_ns": {"mean": 5600.0,
"percentile": {"50.000000": 1000, "90.000000": 2000, "99.000000": 3000, "99.900000": 4000,
"99.990000": 5000}}}}]}"#;
        let figures = parse_fio(text, "read").unwrap();
        assert!((figures.iops - 1234.5).abs() < 1e-9);
        assert!((figures.ios - 7.0).abs() < 1e-9);
        let wanted = [5.6, 1.0, 2.0, 3.0, 4.0, 5.0];
        let pairs = figures.latency_us.iter().zip(wanted);
        assert!(
            pairs
                .into_iter()
                .all(|(us, wanted)| (us - wanted).abs() < 1e-9)
        );
        assert!(parse_fio(text, "write").is_err());
        assert!(parse_fio("note", "read").is_err());
    }
}
