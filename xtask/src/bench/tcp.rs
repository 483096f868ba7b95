//! `cargo xtask bench tcp`: the NVMe/TCP target on loopback.
//!
//! Purpose: 4 KiB random reads and writes at depth 1, 32 and 128 on a null and a ram device, target
//! on processor 0, client on processor 1; with our initiator, and, when `SPDK_DIR` names a built
//! SPDK, with its client against our target and its own in turns.
//! Design: rounds go through all sides in turn, so that a change of the machine's mood meets all of
//! them; medians of the undisturbed runs; ratios are ours over theirs with the same client.
//! Not here: guests, digests, several connections.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::process;

use super::forebay::{self, Forebay};
use super::measure::{Clock, Sample, Summary, median, quiet};
use super::{Options, spdk};

pub(super) const TARGET_CPU: usize = 0;
const CLIENT_CPU: usize = 1;
const DEPTHS: [u32; 3] = [1, 32, 128];

/// Who talks to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    /// Our initiator, our target.
    Ours,
    /// SPDK's client, our target.
    SpdkToOurs,
    /// SPDK's client, SPDK's target.
    SpdkToSpdk,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Ours => "forebay_client",
            Side::SpdkToOurs => "spdk_client",
            Side::SpdkToSpdk => "spdk_both",
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let program = forebay::build()?;
    let peer = spdk::folder();
    if peer.is_none() {
        println!("SPDK_DIR names no built SPDK: the comparison with it is left out");
    }
    let (seconds, rounds) = if options.quick { (1, 1) } else { (4, 3) };
    let mut summary = Summary::default();
    println!(
        "{:<7}{:<6}{:>4}  {:<15}{:>10}{:>10}{:>10}{:>8}{:>8}",
        "device", "op", "QD", "client", "IOPS", "mean us", "p99 us", "target", "others"
    );
    for device in ["null", "ram"] {
        let ours = Forebay::start(&program, device, TARGET_CPU)?;
        fill(&program, &ours)?;
        for op in ["read", "write"] {
            for depth in DEPTHS {
                let mut samples: BTreeMap<Side, Vec<Sample>> = BTreeMap::new();
                for _ in 0..rounds {
                    let sample = load(&program, &ours, op, depth, seconds)?;
                    samples.entry(Side::Ours).or_default().push(sample);
                    let Some(folder) = &peer else { continue };
                    let sample = turn(&[ours.engine], || {
                        spdk::perf(
                            folder,
                            CLIENT_CPU,
                            ours.port,
                            &ours.nqn,
                            &format!("rand{op}"),
                            depth,
                            seconds,
                        )
                    })?;
                    samples.entry(Side::SpdkToOurs).or_default().push(sample);
                    let theirs = spdk::Target::start(folder, device, TARGET_CPU)?;
                    let sample = turn(&[theirs.pid()], || {
                        spdk::perf(
                            folder,
                            CLIENT_CPU,
                            theirs.port,
                            theirs.nqn(),
                            &format!("rand{op}"),
                            depth,
                            seconds,
                        )
                    })?;
                    samples.entry(Side::SpdkToSpdk).or_default().push(sample);
                }
                report(&mut summary, device, op, depth, &samples);
            }
        }
    }
    summary.print("tcp", options.json.as_deref())
}

/// Writes the whole volume once.
pub(super) fn fill(program: &std::path::Path, ours: &Forebay) -> Result<()> {
    let mut command = client(program, ours);
    command.args([
        "--rw",
        "write",
        "--bs",
        "128K",
        "--qd",
        "8",
        "--seconds",
        "4",
    ]);
    process::text(&mut command, Duration::from_secs(60)).map(|_| ())
}

fn client(program: &std::path::Path, ours: &Forebay) -> Command {
    let mut command = Command::new(program);
    command
        .args(["--json", "bench", "load", "--addr"])
        .arg(format!("127.0.0.1:{}", ours.port))
        .args(["--nqn", &ours.nqn]);
    command
}

pub(super) fn load(
    program: &std::path::Path,
    ours: &Forebay,
    op: &str,
    depth: u32,
    seconds: u32,
) -> Result<Sample> {
    let mut command = client(program, ours);
    command
        .args(["--rw", &format!("rand{op}"), "--bs", "4K", "--spin"])
        .args([
            "--qd",
            &depth.to_string(),
            "--seconds",
            &seconds.to_string(),
        ])
        .args(["--cpu", &CLIENT_CPU.to_string()]);
    turn(&[ours.engine], || {
        let text = process::text(&mut command, Duration::from_secs(60))?;
        let report: serde_json::Value = serde_json::from_str(&text)?;
        let line = report["lines"]
            .get(0)
            .context("the load generator gave no figures")?;
        let figure = |name: &str| {
            line[name]
                .as_f64()
                .with_context(|| format!("no {name} in {line}"))
        };
        Ok(spdk::Perf {
            iops: figure("iops")?,
            mean_us: figure("mean_us")?,
            p99_us: figure("p99_us")?,
        })
    })
}

fn turn(target: &[u32], run: impl FnOnce() -> Result<spdk::Perf>) -> Result<Sample> {
    let clock = Clock::start(target)?;
    let perf = run()?;
    let used = clock.used()?;
    Ok(Sample {
        iops: perf.iops,
        mean_us: perf.mean_us,
        p99_us: perf.p99_us,
        target_cores: used.target_cores,
        others_cores: used.others_cores,
    })
}

fn report(
    summary: &mut Summary,
    device: &str,
    op: &str,
    depth: u32,
    samples: &BTreeMap<Side, Vec<Sample>>,
) {
    let mut medians = BTreeMap::new();
    for (side, samples) in samples {
        let (kept, undisturbed) = quiet(samples);
        summary.disturbed |= !undisturbed;
        let of = |figure: fn(&Sample) -> f64| median(kept.iter().map(figure).collect());
        let (iops, mean_us, p99_us) = (of(|s| s.iops), of(|s| s.mean_us), of(|s| s.p99_us));
        println!(
            "{device:<7}{op:<6}{depth:>4}  {:<15}{iops:>10.0}{mean_us:>10.1}{p99_us:>10.1}{:>8.2}{:>8.2}{}",
            side.name(),
            of(|s| s.target_cores),
            of(|s| s.others_cores),
            if undisturbed { "" } else { "  disturbed" },
        );
        let name = format!("{device}_{op}_qd{depth}_{}", side.name());
        summary.put(format!("{name}_iops"), iops);
        summary.put(format!("{name}_mean_us"), mean_us);
        summary.put(format!("{name}_p99_us"), p99_us);
        medians.insert(*side, (iops, mean_us));
    }
    if let (Some(ours), Some(theirs)) = (
        medians.get(&Side::SpdkToOurs),
        medians.get(&Side::SpdkToSpdk),
    ) {
        let name = format!("{device}_{op}_qd{depth}");
        summary.put(format!("{name}_iops_ratio"), ours.0 / theirs.0);
        summary.put(format!("{name}_latency_ratio"), ours.1 / theirs.1);
    }
}
