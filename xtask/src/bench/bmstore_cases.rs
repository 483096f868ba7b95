//! BM-Store's six cases, beside the bare device: NVMe/TCP, vfio-user, vhost-user, and SPDK's vhost
//! if `SPDK_DIR` names it.
//!
//! SPDK serves the bare file (`bdev_aio`) to our client. Each round runs all sides, and begins with
//! another one. Ratios are medians over rounds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::bmstore::Evaluation;
use super::bmstore_load::{
    Load, Rig, VFIO_USER, VHOST_USER, VOLUME_BYTES, bare_file, on_bare_files, on_vm_disk, over_tcp,
    turn,
};
use super::measure::{Sample, Summary};
use super::once::{Measured as _, quiet_median, quiet_ratio};
use super::recording_file::RemovedAtEnd;
use super::spdk;
use super::spdk_machine::SpdkTarget;
use super::tcp::TARGET_CPU;
use super::vm::Kind;

const LOADS: [Load; 6] = [
    Load::random("randread", 1),
    Load::random("randread", 128),
    Load::random("randwrite", 1),
    Load::random("randwrite", 16),
    Load::sequential("read"),
    Load::sequential("write"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Bare,
    Tcp,
    VfioUser,
    VhostUser,
    SpdkVhost,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Tcp => "tcp",
            Self::VfioUser => "vfio_user",
            Self::VhostUser => "vhost_user",
            Self::SpdkVhost => "spdk_vhost",
        }
    }
}

struct Targets<'a> {
    program: &'a Path,
    rig: Rig,
    vfio_user: PathBuf,
    vhost_user: PathBuf,
    bare: RemovedAtEnd,
    spdk: Option<PathBuf>,
    seconds: u32,
}

pub(super) fn run(evaluation: &mut Evaluation) -> Result<()> {
    let (seconds, rounds) = if evaluation.quick { (1, 1) } else { (3, 5) };
    let program = evaluation.program.clone();
    let rig = Rig::start(&program)?;
    let targets = Targets {
        vfio_user: rig.vm_disk(&program, "nvme", &["--nvme-pcie"])?,
        vhost_user: rig.vm_disk(&program, "virtio", &["--vhost-user", "--queues", "4"])?,
        program: &program,
        rig,
        bare: bare_file("bare", VOLUME_BYTES)?,
        spdk: spdk::folder(),
        seconds,
    };
    let mut sides = vec![Side::Bare, Side::Tcp, Side::VfioUser, Side::VhostUser];
    match targets.spdk {
        Some(_) => sides.push(Side::SpdkVhost),
        None => println!("SPDK_DIR names no built SPDK: skipping SPDK vhost"),
    }
    println!(
        "{:<16}{:<12}{:>10}{:>11}{:>11}{:>8}{:>9}{:>8}{:>8}",
        "load", "side", "IOPS", "mean us", "p99 us", "IOPS", "latency", "target", "others"
    );
    for load in LOADS {
        let mut samples: BTreeMap<Side, Vec<Sample>> = BTreeMap::new();
        for _ in 0..rounds {
            for side in &sides {
                let sample = targets.turn(*side, &load)?;
                samples.entry(*side).or_default().push(sample);
            }
            sides.rotate_left(1);
        }
        report(&mut evaluation.summary, &load, &samples);
    }
    for side in sides.iter().filter(|side| **side != Side::Bare) {
        extremes(&mut evaluation.summary, side.name());
    }
    Ok(())
}

impl Targets<'_> {
    fn turn(&self, side: Side, load: &Load) -> Result<Sample> {
        let (program, seconds) = (self.program, self.seconds);
        let forebay = &self.rig.forebay;
        let pids = forebay.processes();
        let disk = |kind: &[&str], socket: &Path| on_vm_disk(program, kind, socket, load, seconds);
        match side {
            Side::Bare => turn(&pids, || {
                on_bare_files(&[&self.bare.0], VOLUME_BYTES, load, seconds)
            }),
            Side::Tcp => turn(&pids, || over_tcp(program, forebay, load, seconds)),
            Side::VfioUser => turn(&pids, || disk(&VFIO_USER, &self.vfio_user)),
            Side::VhostUser => turn(&pids, || disk(&VHOST_USER, &self.vhost_user)),
            Side::SpdkVhost => {
                let folder = self.spdk.as_ref().context("no SPDK")?;
                let file = self.bare.0.display().to_string();
                let target = SpdkTarget::start(folder, &file, Kind::Vhost, TARGET_CPU)?;
                turn(&[target.pid()], || disk(&VHOST_USER, target.socket()))
            }
        }
    }
}

fn report(summary: &mut Summary, load: &Load, samples: &BTreeMap<Side, Vec<Sample>>) {
    let load = load.name();
    let bare = samples.get(&Side::Bare).map_or(&[][..], Vec::as_slice);
    let bare_us = quiet_median(summary, bare, |run| run.mean_us);
    for (side, runs) in samples {
        let mut of = |figure: fn(&Sample) -> f64| quiet_median(summary, runs, figure);
        let (iops, mean_us, p99_us) = (of(|s| s.iops), of(|s| s.mean_us), of(|s| s.p99_us));
        let (target, others) = (of(|s| s.target_cores), of(|s| s.others_cores));
        let iops_ratio = quiet_ratio(summary, runs, bare, |run| run.iops);
        let latency_ratio = quiet_ratio(summary, runs, bare, |run| run.mean_us);
        let disturbed = !runs.iter().any(Sample::is_quiet);
        println!(
            "{load:<16}{:<12}{iops:>10.0}{mean_us:>11.1}{p99_us:>11.1}{iops_ratio:>8.3}{latency_ratio:>9.3}{target:>8.2}{others:>8.2}{}",
            side.name(),
            if disturbed { "  disturbed" } else { "" },
        );
        let name = format!("{}_{load}", side.name());
        summary.put(format!("{name}_iops"), iops);
        summary.put(format!("{name}_mean_us"), mean_us);
        summary.put(format!("{name}_p99_us"), p99_us);
        if *side != Side::Bare {
            summary.put(format!("{name}_iops_ratio"), iops_ratio);
            summary.put(format!("{name}_latency_ratio"), latency_ratio);
            summary.put(format!("{name}_added_us"), mean_us - bare_us);
            summary.put(format!("{name}_target_cores"), target);
        }
    }
}

/// The lowest and the highest of a side's IOPS ratios.
fn extremes(summary: &mut Summary, side: &str) {
    let ratio = |load: &Load| {
        let name = format!("{side}_{}_iops_ratio", load.name());
        summary.metrics.get(&name).copied()
    };
    let ratios: Vec<f64> = LOADS.iter().filter_map(ratio).collect();
    let lowest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = ratios.iter().copied().fold(0.0, f64::max);
    summary.put(format!("{side}_iops_ratio_lowest"), lowest);
    summary.put(format!("{side}_iops_ratio_highest"), highest);
}
