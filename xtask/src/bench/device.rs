//! `cargo xtask bench device`: the engine's core against fio on one file.
//!
//! Shows the cost of translation, slicing, recording and the ring: 4 KiB random direct I/O on a
//! prewritten file. The engine's test `core::tests::speed` and `fio --ioengine=io_uring` alternate
//! on one processor, in changing order. Each adjacent pair gives a ratio; the median and quartiles
//! of undisturbed pairs count. The core polls its ring; fio waits in the kernel.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::process;

use super::measure::{Clock, DISTURBED_CORES, Summary, median};
use super::{Options, recording, tcp};

const LIMIT: Duration = Duration::from_secs(120);
const TEST: &str = "core::tests::speed::a_device_is_loaded";
const FILE_BYTES: u64 = 1 << 30;
const DEPTHS: [u32; 3] = [1, 32, 128];

/// I/Os a second, processor ns per I/O.
type Figures = (f64, f64);

pub(crate) fn run(options: &Options) -> Result<()> {
    if !process::is_installed("fio") {
        bail!("fio is not installed: `apt install fio`, or the equivalent of your system");
    }
    let (seconds, pairs) = if options.quick { (1, 4) } else { (2, 12) };
    let program = recording::build_engine()?;
    let file =
        crate::cargo::target_folder().join(format!("bench-device-{}.img", std::process::id()));
    let _removed = RemovedAtEnd(file.clone());
    let mut fill = fio(&file, "write", 8, 0);
    process::text(
        fill.args(["--bs=1M", "--runtime=0", "--time_based=0"]),
        LIMIT,
    )?;
    let mut summary = Summary::default();
    println!(
        "{:<10}{:>4}{:>13}{:>13}{:>8}{:>18}{:>11}{:>9}",
        "op", "QD", "engine IOPS", "fio IOPS", "ratio", "half of ratios", "engine ns", "fio ns"
    );
    for op in ["randread", "randwrite"] {
        for depth in DEPTHS {
            let engine = || engine(&program, &file, op, depth, seconds);
            let bare = || bare(&file, op, depth, seconds);
            let (mut all, mut quiet) = (Vec::new(), Vec::new());
            for pair in 0..pairs {
                let clock = Clock::start(&[])?;
                let figures = if pair % 2 == 0 {
                    let first = engine()?;
                    (first, bare()?)
                } else {
                    let first = bare()?;
                    (engine()?, first)
                };
                all.push(figures);
                // Kernel threads work for both.
                if clock.used()?.others_user_cores <= DISTURBED_CORES {
                    quiet.push(figures);
                }
            }
            if quiet.is_empty() {
                summary.disturbed = true;
            } else {
                all = quiet;
            }
            let mut ratios: Vec<f64> = all.iter().map(|(ours, bare)| ours.0 / bare.0).collect();
            ratios.sort_by(f64::total_cmp);
            let (low, high) = (
                ratios[ratios.len() / 4],
                ratios[ratios.len() - 1 - ratios.len() / 4],
            );
            let ratio = median(ratios);
            let of =
                |figure: fn(&(Figures, Figures)) -> f64| median(all.iter().map(figure).collect());
            println!(
                "{op:<10}{depth:>4}{:>13.0}{:>13.0}{ratio:>8.3}{:>18}{:>11.0}{:>9.0}",
                of(|(ours, _)| ours.0),
                of(|(_, bare)| bare.0),
                format!("{low:.3} to {high:.3}"),
                of(|(ours, _)| ours.1),
                of(|(_, bare)| bare.1),
            );
            let name = format!("{op}_qd{depth}");
            summary.put(format!("{name}_ratio"), ratio);
            summary.put(format!("{name}_ratio_low"), low);
            summary.put(format!("{name}_ratio_high"), high);
            summary.put(format!("{name}_engine_iops"), of(|(ours, _)| ours.0));
            summary.put(format!("{name}_fio_iops"), of(|(_, bare)| bare.0));
        }
    }
    summary.print("device", options.json.as_deref())
}

fn engine(program: &Path, file: &Path, op: &str, depth: u32, seconds: u32) -> Result<Figures> {
    let mut command = Command::new("taskset");
    command
        .args(["-c", &tcp::TARGET_CPU.to_string()])
        .arg(program)
        .args(["--exact", TEST, "--nocapture"])
        .env(
            "FOREBAY_SPEED",
            format!("{}:{op}:{depth}:{seconds}", file.display()),
        );
    let text = process::text(&mut command, LIMIT)?;
    let line = text.lines().find_map(|line| line.split_once("iops "));
    let (iops, ns) = line
        .and_then(|(_, figures)| figures.split_once(" ns "))
        .with_context(|| format!("no figures in the engine's output:\n{text}"))?;
    Ok((iops.parse()?, ns.trim().parse()?))
}

fn bare(file: &Path, op: &str, depth: u32, seconds: u32) -> Result<Figures> {
    let text = process::text(&mut fio(file, op, depth, seconds), LIMIT)?;
    // Skips notes.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: serde_json::Value = serde_json::from_str(json)?;
    let job = &report["jobs"][0];
    let side = &job[op.trim_start_matches("rand")];
    let iops = side["iops"].as_f64().context("no iops in fio's report")?;
    let cores = ["usr_cpu", "sys_cpu"]
        .iter()
        .filter_map(|name| job[name].as_f64())
        .sum::<f64>()
        / 100.0;
    Ok((iops, cores * 1e9 / iops))
}

fn fio(file: &Path, op: &str, depth: u32, seconds: u32) -> Command {
    let mut command = Command::new("fio");
    command
        .args([
            "--name=bare",
            "--thread",
            "--direct=1",
            "--output-format=json",
        ])
        .args(["--ioengine=io_uring", "--fixedbufs=0", "--bs=4k"])
        .args(["--randrepeat=0"])
        .args(["--time_based=1", "--norandommap"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={FILE_BYTES}"))
        .arg(format!("--rw={op}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={seconds}"))
        .arg(format!("--cpus_allowed={}", tcp::TARGET_CPU));
    command
}

struct RemovedAtEnd(PathBuf);

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
