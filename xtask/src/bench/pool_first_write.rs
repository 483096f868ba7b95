//! The first write to each extent of 64 KiB after a snapshot, beside that to a fresh thin volume.
//!
//! The fresh volume's is `worst` of [`super::thin`], where one fault may map up to 64 neighbours. A
//! write of 4 KiB after the snapshot copies its extent; `whole` writes whole extents, fresh and
//! after a snapshot. Each round runs all four in turns, on a ram device and on a sparse file, and
//! starts without dirty extents.

use std::collections::BTreeMap;

use anyhow::Result;

use super::once::{self, Measured as _, Once, Run};
use super::pool::{EXTENT_BYTES, GIB, PoolBench, Rig, settle};

const IO_BYTES: u64 = 4 << 10;
/// Metric's part, bytes of a write.
const WRITES: [(&str, u64); 2] = [
    ("first_write", IO_BYTES),
    ("first_whole_write", EXTENT_BYTES),
];

/// Fresh, after a snapshot.
type Sides = [Vec<Run>; 2];

pub(super) fn run(bench: &mut PoolBench) -> Result<()> {
    let (rounds, bytes) = if bench.quick {
        (1, GIB / 2)
    } else {
        (5, 2 * GIB)
    };
    println!(
        "{:<7}{:<19}{:<16}{:>10}{:>10}{:>8}",
        "device", "writes", "extents", "IOPS", "mean us", "others"
    );
    for kind in ["ram", "file"] {
        let mut sides: BTreeMap<&str, Sides> = BTreeMap::new();
        let rig = Rig::start(bench, kind, 3 * bytes + GIB, IO_BYTES, "64K")?;
        for round in 0..rounds {
            for (what, io_bytes) in WRITES {
                let name = format!("{}{round}", what.replace('_', "-"));
                let runs = sides.entry(what).or_default();
                turn(bench, &rig, &name, bytes, io_bytes, |at, run: Run| {
                    let which = ["fresh", "after snapshot"][at];
                    let mark = if run.is_quiet() { "" } else { "  disturbed" };
                    println!(
                        "{kind:<7}{what:<19}{which:<16}{:>10.0}{:>10.1}{:>8.2}{mark}",
                        run.iops, run.mean_us, run.others_cores
                    );
                    runs[at].push(run);
                })?;
            }
        }
        for (what, [fresh, after]) in sides {
            report(bench, kind, what, &fresh, &after);
        }
    }
    Ok(())
}

/// A new volume's first writes, then those after a snapshot; then all space is freed.
fn turn(
    bench: &PoolBench,
    rig: &Rig,
    name: &str,
    bytes: u64,
    io_bytes: u64,
    mut note: impl FnMut(usize, Run),
) -> Result<()> {
    let volume = format!("bench/{name}");
    let nqn = rig.volume(&volume, bytes)?;
    let once = Once::write(io_bytes, EXTENT_BYTES);
    note(0, once::load(&bench.program, &rig.forebay, &nqn, once)?);
    rig.api.snapshot(&format!("{name}@s"))?;
    settle();
    note(1, once::load(&bench.program, &rig.forebay, &nqn, once)?);
    let forebay = &rig.forebay;
    forebay.cli(&["export", "delete", &volume, "--disconnect-hosts"])?;
    forebay.cli(&["volume", "delete", &format!("{volume}@s")])?;
    forebay.cli(&["volume", "delete", &volume])?;
    rig.wait_empty()
}

fn report(bench: &mut PoolBench, kind: &str, what: &str, fresh: &[Run], after: &[Run]) {
    let summary = &mut bench.summary;
    let fresh_iops = once::quiet_median(summary, fresh, |run| run.iops);
    let after_iops = once::quiet_median(summary, after, |run| run.iops);
    let iops = once::quiet_ratio(summary, after, fresh, |run| run.iops);
    let latency = once::quiet_ratio(summary, after, fresh, |run| run.mean_us);
    println!(
        "{kind:<7}{what:<19}after a snapshot over fresh: IOPS {iops:.2}, latency {latency:.2}"
    );
    for (name, value) in [
        ("fresh_iops", fresh_iops),
        ("after_snapshot_iops", after_iops),
        ("after_snapshot_iops_ratio", iops),
        ("after_snapshot_latency_ratio", latency),
    ] {
        summary.put(format!("{kind}_{what}_{name}"), value);
    }
}
