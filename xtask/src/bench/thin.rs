//! `cargo xtask bench thin`: first writes to thin space against overwrites.
//!
//! A first write to an extent asks the daemon for space. Random 4 KiB writes at depth 32 go to
//! fresh thin volumes on a ram device, a loop device over memory and a sparse file:
//! - `fill` writes every block: at first nearly every write asks, at the end none, on average one
//!   in 16. `refill` is the third pass.
//! - `worst` writes one block per extent, so every write asks. `worst_again` repeats it.
//! - `bare_*` are fio's loads on an equal device without Forebay, as a device's own first writes
//!   may cost more too.
//!
//! Each round starts when a new pool has no dirty extents. Memory is allocated before, to exclude
//! the kernel's page allocation. The reactor is on processor 0, the client on 1.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::process;

use super::Options;
use super::forebay::{self, Forebay};
use super::measure::{Clock, Summary};
use super::once::{self, DEPTH, Measured as _, Once, Run};
use super::place::Place;

const TARGET_CPU: usize = 0;
/// The pool's extent, and the distance of writes in `worst`.
const EXTENT_BYTES: u64 = 64 << 10;
const IO_BYTES: u64 = 4 << 10;
/// Volume size of a full `worst`.
const WORST_BYTES: u64 = 4 << 30;
/// Volume size of a full `fill`.
const FILL_BYTES: u64 = 512 << 20;
const LIMIT: Duration = Duration::from_secs(600);

const KINDS: [&str; 3] = ["ram", "block", "file"];
/// Device kinds, dividend, divisor.
const RATIOS: [(&[&str], &str, &str); 5] = [
    (&KINDS, "fill", "refill"),
    (&KINDS, "worst", "worst_again"),
    (&KINDS, "bare_fill", "bare_refill"),
    (&["file"], "fill", "bare_fill"),
    (&["file"], "worst", "bare_worst"),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let program = forebay::build()?;
    let fio = process::is_installed("fio");
    if !fio {
        println!("fio is not installed: skipping the comparison with it");
    }
    let (rounds, divisor) = if options.quick { (1, 8) } else { (5, 1) };
    let mut runs: BTreeMap<(&str, &str), Vec<Run>> = BTreeMap::new();
    let mut without = Vec::new();
    println!(
        "{:<8}{:>14}{:>10}{:>8}",
        "device", "writes", "IOPS", "others"
    );
    for _ in 0..rounds {
        for kind in KINDS {
            if without.contains(&kind) {
                continue;
            }
            let mut note = |what: &'static str, run: Run| {
                let mark = if run.is_quiet() { "" } else { "  disturbed" };
                let Run {
                    iops, others_cores, ..
                } = run;
                println!("{kind:<8}{what:>14}{iops:>10.0}{others_cores:>8.2}{mark}");
                runs.entry((kind, what)).or_default().push(run);
            };
            if !round(kind, &program, divisor, fio, &mut note)? {
                without.push(kind);
            }
        }
    }
    summary(&runs).print("thin", options.json.as_deref())
}

/// Returns false if the device cannot be made.
fn round(
    kind: &'static str,
    program: &Path,
    divisor: u64,
    fio: bool,
    note: &mut impl FnMut(&'static str, Run),
) -> Result<bool> {
    let (worst_bytes, fill_bytes) = (WORST_BYTES / divisor, FILL_BYTES / divisor);
    let Some(place) = Place::make(kind, worst_bytes + fill_bytes + (512 << 20))? else {
        return Ok(false);
    };
    let size = worst_bytes.to_string();
    let forebay = Forebay::start_with(program, &place.spec, TARGET_CPU, &size)?;
    forebay.wait_zero_filled()?;
    place.take_memory()?;
    let nqn = &forebay.nqn;
    note("worst", load(program, &forebay, nqn, EXTENT_BYTES)?);
    load(program, &forebay, nqn, EXTENT_BYTES)?;
    note("worst_again", load(program, &forebay, nqn, EXTENT_BYTES)?);
    let size = fill_bytes.to_string();
    forebay.cli(&["volume", "create", "bench/fill", "--size", &size])?;
    let nqn = &forebay.export("bench/fill")?;
    note("fill", load(program, &forebay, nqn, IO_BYTES)?);
    load(program, &forebay, nqn, IO_BYTES)?;
    note("refill", load(program, &forebay, nqn, IO_BYTES)?);
    drop(forebay);
    drop(place);
    if fio && let Some(place) = Place::make(kind, fill_bytes)? {
        place.take_memory()?;
        note("bare_fill", bare(&place, fill_bytes, IO_BYTES)?);
        bare(&place, fill_bytes, IO_BYTES)?;
        note("bare_refill", bare(&place, fill_bytes, IO_BYTES)?);
        drop(place);
        if kind == "file"
            && let Some(place) = Place::make(kind, worst_bytes)?
        {
            note("bare_worst", bare(&place, worst_bytes, EXTENT_BYTES)?);
        }
    }
    Ok(true)
}

fn summary(runs: &BTreeMap<(&str, &str), Vec<Run>>) -> Summary {
    let mut summary = Summary::default();
    for ((kind, what), runs) in runs {
        let iops = once::quiet_median(&mut summary, runs, |run| run.iops);
        summary.put(format!("{kind}_{what}_iops"), iops);
    }
    for (kinds, what, over) in RATIOS {
        for kind in kinds {
            let of = |what| runs.get(&(*kind, what));
            if let (Some(ours), Some(theirs)) = (of(what), of(over)) {
                let ratio = once::quiet_ratio(&mut summary, ours, theirs, |run| run.iops);
                summary.put(format!("{kind}_{what}_over_{over}_ratio"), ratio);
            }
        }
    }
    summary
}

/// Writes 4 KiB of each `once_per` bytes, in random order.
fn load(program: &Path, forebay: &Forebay, nqn: &str, once_per: u64) -> Result<Run> {
    once::load(program, forebay, nqn, Once::write(IO_BYTES, once_per))
}

fn bare(place: &Place, bytes: u64, once_per: u64) -> Result<Run> {
    let file = place.path();
    let mut log = format!("fio version 2 iolog\n{file} add\n{file} open\n");
    // fio's random order has blocks of the I/O's size, so pass offsets explicitly.
    for at in shuffled(bytes / once_per) {
        writeln!(log, "{file} write {} {IO_BYTES}", at * once_per)?;
    }
    writeln!(log, "{file} close")?;
    let log_file = place.file.with_extension("iolog");
    std::fs::write(&log_file, log)?;
    let mut fio = Command::new("fio");
    fio.args([
        "--name=bare",
        "--output-format=json",
        "--allow_file_create=0",
    ])
    .arg(format!("--cpus_allowed={TARGET_CPU}"))
    .arg(format!("--read_iolog={}", log_file.display()));
    if place.kind == "ram" {
        fio.arg("--ioengine=psync");
    } else {
        fio.args(["--direct=1", "--ioengine=io_uring"])
            .arg(format!("--iodepth={DEPTH}"));
    }
    let clock = Clock::start(&[])?;
    let text = process::text(&mut fio, LIMIT);
    let others_cores = clock.used()?.others_user_cores;
    let _ = std::fs::remove_file(&log_file);
    let report: serde_json::Value = serde_json::from_str(&text?)?;
    let write = &report["jobs"][0]["write"];
    if write["total_ios"].as_u64() != Some(bytes / once_per) {
        bail!("fio did not write everything: {write}");
    }
    Ok(Run {
        iops: write["iops"].as_f64().context("no iops in fio's report")?,
        mean_us: 0.0,
        others_cores,
    })
}

/// A fixed pseudorandom order.
fn shuffled(count: u64) -> Vec<u64> {
    let mut all: Vec<u64> = (0..count).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut all);
    all
}

#[cfg(test)]
mod tests {
    use super::shuffled;

    #[test]
    fn each_place_once() {
        let mut all = shuffled(1000);
        assert!(all.windows(2).filter(|w| w[0] + 1 == w[1]).count() < 20);
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
    }
}
