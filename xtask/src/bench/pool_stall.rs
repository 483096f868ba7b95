//! How long a snapshot stops writes, as a host sees it.
//!
//! For each snapshot a host writes 4 KiB at random, at depth 32, for a moment before, during and
//! after the call. Two figures come from it:
//! - `gap`: the longest time without a completion that overlaps the call. This is the stall: the
//!   freeze, and the first copy after it.
//! - `write`: the longest write that was in flight during the call. After the freeze all 32 writes
//!   need a copy, so it also has their wait in the queue of copies.
//!
//! `before` is the longest gap in an equal time before the call. `ram` has 1 GiB in extents of 64
//! KiB: writes still need copies when the next snapshot comes. The others compare sizes, on a null
//! device in extents of 1 MiB: 1 GiB and 1 TiB were mapped in random order, 10 TiB in sequence. All
//! hosts write to the first GiB, so that the copies are equal.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::burst_client::{BLOCK, Host};
use super::measure::Clock;
use super::once::{self, Measured};
use super::pool::{GIB, PoolBench, Rig, settle};
use super::pool_load::{
    Command, Places, during, longest_gap_ms, longest_write_ms, once_per, write_each,
};

const WRITTEN_BYTES: u64 = GIB;
/// A load's time before the call and after it.
const AROUND: Duration = Duration::from_millis(100);
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

struct Case {
    name: &'static str,
    device: &'static str,
    volume_bytes: u64,
    extent_bytes: u64,
    /// For copies.
    more_bytes: u64,
    scattered: bool,
    /// Not with `--quick`.
    is_long: bool,
}

const CASES: [Case; 4] = [
    Case {
        name: "ram",
        device: "ram",
        volume_bytes: GIB,
        extent_bytes: 64 << 10,
        more_bytes: 9 * GIB,
        scattered: true,
        is_long: false,
    },
    Case {
        name: "1gib",
        device: "null",
        volume_bytes: GIB,
        extent_bytes: MIB,
        more_bytes: 64 * GIB,
        scattered: true,
        is_long: false,
    },
    Case {
        name: "1tib",
        device: "null",
        volume_bytes: TIB,
        extent_bytes: MIB,
        more_bytes: 64 * GIB,
        scattered: true,
        is_long: false,
    },
    Case {
        name: "10tib",
        device: "null",
        volume_bytes: 10 * TIB,
        extent_bytes: MIB,
        more_bytes: 64 * GIB,
        scattered: false,
        is_long: true,
    },
];

/// A snapshot's figures.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stall {
    before_ms: f64,
    pub(super) gap_ms: f64,
    pub(super) write_ms: f64,
    pub(super) call_ms: f64,
    after_iops: f64,
    others_cores: f64,
}

impl Measured for Stall {
    fn others_cores(&self) -> f64 {
        self.others_cores
    }
}

pub(super) fn run(bench: &mut PoolBench) -> Result<()> {
    let snapshots = if bench.quick { 5 } else { 20 };
    print_header();
    for case in CASES {
        if !(bench.quick && case.is_long) {
            snapshots_of(bench, &case, snapshots)?;
        }
    }
    let gap_ms = |case: &str| (bench.summary.metrics).get(&format!("stall_{case}_gap_ms"));
    if let (Some(small), Some(large)) = (gap_ms("1gib"), gap_ms("10tib")) {
        let more_ms = large - small;
        println!("10 TiB stalls {more_ms:.2} ms longer than 1 GiB");
        bench
            .summary
            .put("stall_10tib_more_than_1gib_gap_ms", more_ms);
    }
    Ok(())
}

pub(super) fn print_header() {
    println!(
        "{:<8}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}{:>12}{:>8}",
        "volume",
        "before ms",
        "gap ms",
        "longest",
        "write ms",
        "longest",
        "call ms",
        "IOPS after",
        "others"
    );
}

fn snapshots_of(bench: &mut PoolBench, case: &Case, snapshots: usize) -> Result<()> {
    let device_bytes = case.volume_bytes + case.volume_bytes / 128 + case.more_bytes;
    let extent = case.extent_bytes.to_string();
    let rig = Rig::start(bench, case.device, device_bytes, case.volume_bytes, &extent)?;
    let (port, nqn) = (rig.forebay.port, rig.forebay.nqn.clone());
    let places = once_per(case.extent_bytes, case.volume_bytes, case.scattered);
    let begun = Instant::now();
    let mapped = write_each(|| Host::tcp(port, &nqn), places)?.len();
    println!(
        "{:<8}mapped {mapped} extents in {:.1} s",
        case.name,
        begun.elapsed().as_secs_f64()
    );
    let mut stalls = Vec::new();
    for number in 0..snapshots {
        settle();
        let pids = rig.forebay.processes();
        let blocks = WRITTEN_BYTES / u64::from(BLOCK);
        let snapshot = || rig.api.snapshot(&format!("v@s{number}"));
        stalls.push(measure(|| Host::tcp(port, &nqn), &pids, blocks, snapshot)?);
    }
    report(bench, case.name, &stalls);
    Ok(())
}

/// Takes a snapshot while a host writes; `snapshot` says when the call began and ended.
pub(super) fn measure(
    connect: impl FnOnce() -> Result<Host> + Send,
    pids: &[u32],
    blocks: u64,
    snapshot: impl FnOnce() -> Result<(Instant, Instant)>,
) -> Result<Stall> {
    let clock = Clock::start(pids)?;
    let around = || {
        std::thread::sleep(AROUND);
        let called = snapshot()?;
        std::thread::sleep(AROUND);
        Ok(called)
    };
    let ((begun, ended), writes) = during(connect, Places::Random(blocks), around)?;
    Ok(Stall {
        others_cores: clock.used()?.others_user_cores,
        ..stall(&writes, begun, ended)?
    })
}

fn stall(writes: &[Command], begun: Instant, ended: Instant) -> Result<Stall> {
    let call = ended - begun;
    let before = begun.checked_sub(call.min(AROUND / 2)).unwrap_or(begun);
    let after = writes.iter().filter(|write| write.ended > ended).count();
    let last = writes.last().map_or(ended, |write| write.ended);
    Ok(Stall {
        before_ms: longest_gap_ms(writes, before, begun)?,
        gap_ms: longest_gap_ms(writes, begun, ended)?,
        write_ms: longest_write_ms(writes, begun, ended)?,
        call_ms: call.as_secs_f64() * 1e3,
        after_iops: after as f64 / (last - ended).as_secs_f64().max(1e-9),
        others_cores: 0.0,
    })
}

pub(super) fn report(bench: &mut PoolBench, name: &str, stalls: &[Stall]) {
    let summary = &mut bench.summary;
    let undisturbed = stalls.iter().filter(|stall| stall.is_quiet()).count();
    let mut of = |figure: fn(&Stall) -> f64| once::quiet_median(summary, stalls, figure);
    let (before_ms, gap_ms) = (of(|stall| stall.before_ms), of(|stall| stall.gap_ms));
    let (write_ms, call_ms) = (of(|stall| stall.write_ms), of(|stall| stall.call_ms));
    let (iops, others) = (of(|stall| stall.after_iops), of(|stall| stall.others_cores));
    let kept = |stall: &&Stall| undisturbed == 0 || stall.is_quiet();
    let longest = |figure: fn(&Stall) -> f64| {
        let kept = stalls.iter().filter(kept);
        kept.map(figure).fold(0.0, f64::max)
    };
    let (gap_max_ms, write_max_ms) = (longest(|s| s.gap_ms), longest(|s| s.write_ms));
    println!(
        "{name:<8}{before_ms:>11.2}{gap_ms:>11.2}{gap_max_ms:>11.2}{write_ms:>11.2}{write_max_ms:>11.2}{call_ms:>11.2}{iops:>12.0}{others:>8.2}   {undisturbed} of {} undisturbed",
        stalls.len()
    );
    for (what, value) in [
        ("before_ms", before_ms),
        ("gap_ms", gap_ms),
        ("gap_max_ms", gap_max_ms),
        ("write_ms", write_ms),
        ("write_max_ms", write_max_ms),
        ("call_ms", call_ms),
        ("iops", iops),
    ] {
        bench.summary.put(format!("stall_{name}_{what}"), value);
    }
}
