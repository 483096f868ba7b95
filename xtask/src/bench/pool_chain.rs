//! Reads through a chain of 100 snapshots, beside a chain of one.
//!
//! Two volumes of 1 GiB (256 MiB with `--quick`) on one ram device are written alike, with a snapshot
//! after each hundredth of the extents. `long` keeps all 100; `short` keeps the last, and the layers
//! of the others are merged. So both are scattered alike on the device. All runs are in turns, and
//! the first of a pair changes with the round:
//! - `hit`: random reads of 4 KiB at depth 32 of extents that were read before.
//! - `after_takeover`: each extent's first read, at depth 1, after the engine's death. The successor
//!   gets the grants that the table lists.
//! - `after_restart`: the same after a restart of both processes, when nothing is granted. Each read
//!   asks the daemon, which goes through the chain.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::Result;

use super::burst_client::Host;
use super::once::{self, CLIENT_CPU, DEPTH, Measured as _, Once, Run};
use super::pool::{EXTENT_BYTES, GIB, PoolBench, Rig, settle};
use super::pool_load::{once_per, write_each};

const SNAPSHOTS: usize = 100;
const IO_BYTES: u64 = 4 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reads {
    Hit,
    AfterTakeover,
    AfterRestart,
}

impl Reads {
    fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::AfterTakeover => "after_takeover",
            Self::AfterRestart => "after_restart",
        }
    }
}

/// Long, short.
type Sides = [Vec<Run>; 2];

pub(super) fn run(bench: &mut PoolBench) -> Result<()> {
    let (rounds, bytes) = if bench.quick { (2, GIB / 4) } else { (6, GIB) };
    let mut rig = Rig::start(bench, "ram", 2 * bytes + GIB, bytes, "64K")?;
    let long = rig.forebay.nqn.clone();
    let short = rig.volume("bench/short", bytes)?;
    let port = rig.forebay.port;
    let all = once_per(EXTENT_BYTES, bytes, true);
    let parts = all.chunks(all.len().div_ceil(SNAPSHOTS));
    let last = parts.len() - 1;
    for (number, part) in parts.enumerate() {
        for (volume, nqn) in [("v", &long), ("short", &short)] {
            write_each(|| Host::tcp(port, nqn), part.to_vec())?;
            rig.api.snapshot(&format!("{volume}@s{number}"))?;
        }
    }
    for number in 0..last {
        let snapshot = format!("bench/short@s{number}");
        rig.forebay.cli(&["volume", "delete", &snapshot])?;
    }
    // The layers are merged meanwhile.
    rig.wait_catalog_still()?;
    println!(
        "{:<16}{:<7}{:>10}{:>10}{:>8}",
        "reads", "chain", "IOPS", "mean us", "others"
    );
    let nqns = [long.as_str(), short.as_str()];
    let mut sides: BTreeMap<Reads, Sides> = BTreeMap::new();
    for round in 0..rounds {
        for reads in [Reads::AfterRestart, Reads::AfterTakeover, Reads::Hit] {
            match reads {
                Reads::Hit => {}
                Reads::AfterTakeover => rig.forebay.replace_engine()?,
                Reads::AfterRestart => rig.forebay.restart()?,
            }
            settle();
            for at in [round % 2, 1 - round % 2] {
                let run = read(bench, &rig, reads, nqns[at])?;
                let (what, which) = (reads.name(), ["long", "short"][at]);
                let mark = if run.is_quiet() { "" } else { "  disturbed" };
                println!(
                    "{what:<16}{which:<7}{:>10.0}{:>10.1}{:>8.2}{mark}",
                    run.iops, run.mean_us, run.others_cores
                );
                sides.entry(reads).or_default()[at].push(run);
            }
        }
    }
    for (reads, [long, short]) in sides {
        report(bench, reads.name(), &long, &short);
    }
    Ok(())
}

fn read(bench: &PoolBench, rig: &Rig, reads: Reads, nqn: &str) -> Result<Run> {
    if reads != Reads::Hit {
        let once = Once {
            pattern: "randread",
            depth: 1,
            ..Once::write(IO_BYTES, EXTENT_BYTES)
        };
        return once::load(&bench.program, &rig.forebay, nqn, once);
    }
    let mut command = Command::new(&bench.program);
    command
        .args(["--json", "bench", "load", "--addr"])
        .arg(format!("127.0.0.1:{}", rig.forebay.port))
        .args(["--nqn", nqn, "--rw", "randread"])
        .args(["--bs", &IO_BYTES.to_string()])
        .args(["--qd", &DEPTH.to_string(), "--spin"])
        .args(["--seconds", if bench.quick { "1" } else { "3" }])
        .args(["--cpu", &CLIENT_CPU.to_string()]);
    once::run(&rig.forebay, &mut command)
}

fn report(bench: &mut PoolBench, what: &str, long: &[Run], short: &[Run]) {
    let summary = &mut bench.summary;
    let long_us = once::quiet_median(summary, long, |run| run.mean_us);
    let short_us = once::quiet_median(summary, short, |run| run.mean_us);
    let iops = once::quiet_ratio(summary, long, short, |run| run.iops);
    let latency = once::quiet_ratio(summary, long, short, |run| run.mean_us);
    println!("{what:<16}100 snapshots over one: IOPS {iops:.3}, latency {latency:.3}");
    for (name, value) in [
        ("long_mean_us", long_us),
        ("short_mean_us", short_us),
        ("iops_ratio", iops),
        ("latency_ratio", latency),
    ] {
        summary.put(format!("chain_{what}_{name}"), value);
    }
}
