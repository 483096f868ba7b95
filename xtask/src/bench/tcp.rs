//! `cargo xtask bench tcp`: the NVMe/TCP target on loopback.
//!
//! 4 KiB random I/O, also with digests, and 128 KiB sequential I/O on null and ram devices; target
//! on processor 0, client on processor 1. Clients are our initiator and, with `SPDK_DIR`, SPDK's
//! client on both targets; only the latter measures digests. Rounds alternate between all sides.
//! Values are medians of undisturbed runs; ratios compare equal clients. [`busy`] has the processor
//! time at a fixed rate.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::process;

use super::forebay::{self, Forebay};
use super::measure::{Clock, Sample, Summary, median, quiet};
use super::{Options, busy, spdk};

pub(super) const TARGET_CPU: usize = 0;
pub(super) const CLIENT_CPU: usize = 1;

/// A load.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// `read` or `write`.
    pub(super) op: &'static str,
    /// Random, sequential or with digests.
    pub(super) kind: &'static str,
    pub(super) block_bytes: u32,
    pub(super) depth: u32,
}

const RANDOM: &str = "rand";
const SEQUENTIAL: &str = "seq";
const DIGESTS: &str = "digest";

impl Shape {
    pub(super) const fn random(op: &'static str, depth: u32) -> Self {
        Self {
            op,
            kind: RANDOM,
            block_bytes: 4096,
            depth,
        }
    }

    /// Both clients' name for it.
    pub(super) fn pattern(&self) -> String {
        match self.kind {
            SEQUENTIAL => self.op.into(),
            _ => format!("rand{}", self.op),
        }
    }

    pub(super) fn has_digests(&self) -> bool {
        self.kind == DIGESTS
    }

    /// In metric names.
    pub(super) fn name(&self) -> String {
        let (op, depth) = (self.op, self.depth);
        match self.kind {
            RANDOM => format!("{op}_qd{depth}"),
            kind => format!("{kind}_{op}_qd{depth}"),
        }
    }
}

fn shapes(op: &'static str) -> [Shape; 5] {
    let random = |depth| Shape::random(op, depth);
    [
        random(1),
        random(32),
        random(128),
        Shape {
            kind: DIGESTS,
            ..random(32)
        },
        Shape {
            kind: SEQUENTIAL,
            block_bytes: 128 << 10,
            ..random(16)
        },
    ]
}

/// Client and target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    /// Our initiator, Forebay.
    Ours,
    /// SPDK's client, Forebay.
    SpdkToOurs,
    /// SPDK's client, SPDK.
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
        println!("SPDK_DIR names no built SPDK: skipping the comparison with it");
    }
    let (seconds, rounds) = if options.quick { (1, 1) } else { (4, 3) };
    let mut summary = Summary::default();
    println!(
        "{:<7}{:<7}{:<6}{:>4}  {:<15}{:>10}{:>10}{:>10}{:>8}{:>8}",
        "device", "", "op", "QD", "client", "IOPS", "mean us", "p99 us", "target", "others"
    );
    for device in ["null", "ram"] {
        let wanted = |shape: &Shape| {
            let name = format!("{device}_{}", shape.name());
            options.only.as_ref().is_none_or(|only| name.contains(only))
        };
        let all: Vec<Shape> = (["read", "write"].into_iter().flat_map(shapes))
            .filter(wanted)
            .collect();
        if all.is_empty() {
            continue;
        }
        let ours = Forebay::start(&program, device, TARGET_CPU)?;
        fill(&program, &ours)?;
        for shape in all {
            let mut samples: BTreeMap<Side, Vec<Sample>> = BTreeMap::new();
            for _ in 0..rounds {
                if !shape.has_digests() {
                    let sample = load(&program, &ours, &shape, seconds)?;
                    samples.entry(Side::Ours).or_default().push(sample);
                }
                let Some(folder) = &peer else { continue };
                let spdk = |pid, port, nqn: &str| {
                    turn(&[pid], || {
                        spdk::perf(folder, CLIENT_CPU, port, nqn, &shape, seconds)
                    })
                };
                let sample = spdk(ours.engine, ours.port, &ours.nqn)?;
                samples.entry(Side::SpdkToOurs).or_default().push(sample);
                let theirs = spdk::Target::start(folder, device, TARGET_CPU)?;
                let sample = spdk(theirs.pid(), theirs.port, theirs.nqn())?;
                samples.entry(Side::SpdkToSpdk).or_default().push(sample);
            }
            report(&mut summary, device, &shape, &samples);
        }
        for op in ["read", "write"] {
            // SPDK's target shows the client's own loss.
            for side in [Side::SpdkToOurs, Side::SpdkToSpdk].map(Side::name) {
                let of = |kind: &str| {
                    (summary.metrics).get(&format!("{device}_{kind}{op}_qd32_{side}_iops"))
                };
                if let (Some(with), Some(plain)) = (of("digest_"), of("")) {
                    let ratio = with / plain;
                    println!("{device:<7}{op:<6}  32  {side:<15}digests over none: {ratio:.2}");
                    summary.put(
                        format!("{device}_{op}_qd32_{side}_digests_over_none"),
                        ratio,
                    );
                }
            }
        }
    }
    for device in ["null", "ram"] {
        busy::run(options, &mut summary, &program, peer.as_deref(), device)?;
    }
    summary.print("tcp", options.json.as_deref())
}

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
    load_on(program, &format!("127.0.0.1:{}", ours.port), &ours.nqn)
}

/// Our client on any target.
pub(super) fn load_on(program: &std::path::Path, address: &str, nqn: &str) -> Command {
    let mut command = Command::new(program);
    command
        .args(["--json", "bench", "load", "--addr", address])
        .args(["--nqn", nqn]);
    command
}

pub(super) fn load(
    program: &std::path::Path,
    ours: &Forebay,
    shape: &Shape,
    seconds: u32,
) -> Result<Sample> {
    let mut command = client(program, ours);
    command
        .args(["--rw", &shape.pattern(), "--spin"])
        .args(["--bs", &shape.block_bytes.to_string()])
        .args(["--qd", &shape.depth.to_string()])
        .args(["--seconds", &seconds.to_string()])
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

/// A run with its processor time.
pub(super) fn turn(target: &[u32], run: impl FnOnce() -> Result<spdk::Perf>) -> Result<Sample> {
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
    shape: &Shape,
    samples: &BTreeMap<Side, Vec<Sample>>,
) {
    let mut medians = BTreeMap::new();
    let (kind, op, depth) = (shape.kind, shape.op, shape.depth);
    for (side, samples) in samples {
        let (kept, undisturbed) = quiet(samples);
        summary.disturbed |= !undisturbed;
        let of = |figure: fn(&Sample) -> f64| median(kept.iter().map(figure).collect());
        let (iops, mean_us, p99_us) = (of(|s| s.iops), of(|s| s.mean_us), of(|s| s.p99_us));
        println!(
            "{device:<7}{kind:<7}{op:<6}{depth:>4}  {:<15}{iops:>10.0}{mean_us:>10.1}{p99_us:>10.1}{:>8.2}{:>8.2}{}",
            side.name(),
            of(|s| s.target_cores),
            of(|s| s.others_cores),
            if undisturbed { "" } else { "  disturbed" },
        );
        let name = format!("{device}_{}_{}", shape.name(), side.name());
        summary.put(format!("{name}_iops"), iops);
        summary.put(format!("{name}_mean_us"), mean_us);
        summary.put(format!("{name}_p99_us"), p99_us);
        medians.insert(*side, (iops, mean_us));
    }
    if let (Some(ours), Some(theirs)) = (
        medians.get(&Side::SpdkToOurs),
        medians.get(&Side::SpdkToSpdk),
    ) {
        let name = format!("{device}_{}", shape.name());
        summary.put(format!("{name}_iops_ratio"), ours.0 / theirs.0);
        summary.put(format!("{name}_latency_ratio"), ours.1 / theirs.1);
    }
}
