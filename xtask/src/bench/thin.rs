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
//! the kernel's page allocation. The reactor is on processor 0, the client on 1; the client sleeps,
//! because on a small machine a spinning one would starve the daemon. Medians exclude disturbed
//! runs unless all are.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use xtask::process;

use super::Options;
use super::forebay::{self, Forebay};
use super::measure::{Clock, DISTURBED_CORES, Summary, median};

const TARGET_CPU: usize = 0;
const CLIENT_CPU: usize = 1;
const DEPTH: u32 = 32;
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

#[derive(Debug, Clone, Copy)]
struct Run {
    iops: f64,
    others_cores: f64,
}

impl Run {
    fn is_quiet(&self) -> bool {
        self.others_cores <= DISTURBED_CORES
    }
}

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
                let Run { iops, others_cores } = run;
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
        let quiet = runs.iter().filter(|run| run.is_quiet());
        let quiet: Vec<f64> = quiet.map(|run| run.iops).collect();
        let all = runs.iter().map(|run| run.iops).collect();
        summary.disturbed |= quiet.is_empty();
        let iops = median(if quiet.is_empty() { all } else { quiet });
        summary.put(format!("{kind}_{what}_iops"), iops);
    }
    for (kinds, what, over) in RATIOS {
        for kind in kinds {
            let of = |what| runs.get(&(*kind, what));
            if let (Some(what_runs), Some(over_runs)) = (of(what), of(over)) {
                // Per round: both were measured within a minute.
                let pairs: Vec<_> = what_runs.iter().zip(over_runs).collect();
                let ratio = |(a, b): &(&Run, &Run)| a.iops / b.iops.max(1.0);
                let quiet = pairs.iter().filter(|(a, b)| a.is_quiet() && b.is_quiet());
                let quiet: Vec<f64> = quiet.map(ratio).collect();
                let all = pairs.iter().map(ratio).collect();
                summary.disturbed |= quiet.is_empty();
                let ratio = median(if quiet.is_empty() { all } else { quiet });
                summary.put(format!("{kind}_{what}_over_{over}_ratio"), ratio);
            }
        }
    }
    summary
}

/// The place of a device; dropping it removes its files.
struct Place {
    kind: &'static str,
    bytes: u64,
    spec: String,
    file: PathBuf,
    loop_device: Option<String>,
}

impl Place {
    /// `None`, with a message, if it cannot be made.
    fn make(kind: &'static str, bytes: u64) -> Result<Option<Self>> {
        let name = format!("forebay-thin-{}", std::process::id());
        let file = match kind {
            "file" => crate::cargo::target_folder().join(name),
            _ => Path::new("/dev/shm").join(name),
        };
        let mut place = Self {
            kind,
            bytes,
            spec: match kind {
                "ram" => format!("ram:{}?size={bytes}", file.display()),
                _ => file.display().to_string(),
            },
            file,
            loop_device: None,
        };
        if kind == "ram" {
            return Ok(Some(place));
        }
        std::fs::File::create(&place.file)?.set_len(bytes)?;
        if kind == "block" {
            let mut losetup = Command::new("losetup");
            losetup
                .args(["--find", "--show", "--sector-size", "4096"])
                .arg(&place.file);
            match process::text(&mut losetup, LIMIT) {
                Ok(path) => {
                    place.spec = path.trim().to_owned();
                    place.loop_device = Some(place.spec.clone());
                }
                Err(error) => {
                    println!("no loop device, so no figures for a block device: {error:#}");
                    return Ok(None);
                }
            }
        }
        Ok(Some(place))
    }

    fn path(&self) -> String {
        let file = || self.file.display().to_string();
        self.loop_device.clone().unwrap_or_else(file)
    }

    /// Allocates memory by writing zeros into holes; reserved pages alone would still be cleared on
    /// first use.
    fn take_memory(&self) -> Result<()> {
        if self.kind == "file" {
            return Ok(());
        }
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&self.file)?;
        if file.metadata()?.len() < self.bytes {
            file.set_len(self.bytes)?;
        }
        let no_memory = || format!("no memory for {}", self.file.display());
        let zeros = vec![0; 1 << 20];
        let mut at = 0;
        while at < self.bytes {
            at = rustix::fs::seek(&file, SeekFrom::Hole(at))?;
            let end = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
                Ok(data) => data.min(self.bytes),
                // No more data.
                Err(Errno::NXIO) => self.bytes,
                Err(error) => return Err(error.into()),
            };
            while at < end {
                let count = (end - at).min(zeros.len() as u64) as usize;
                let written = file.write_at(&zeros[..count], at).with_context(no_memory)?;
                at += written as u64;
            }
        }
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(device) = &self.loop_device {
            let _ = Command::new("losetup").args(["-d", device]).status();
        }
        let _ = std::fs::remove_file(&self.file);
    }
}

/// Writes 4 KiB of each `once_per` bytes, in random order.
fn load(program: &Path, forebay: &Forebay, nqn: &str, once_per: u64) -> Result<Run> {
    let mut command = Command::new(program);
    command
        .args(["--json", "bench", "load", "--addr"])
        .arg(format!("127.0.0.1:{}", forebay.port))
        .args(["--nqn", nqn, "--rw", "randwrite"])
        .args(["--bs", &IO_BYTES.to_string()])
        .args(["--once-per", &once_per.to_string()])
        .args(["--qd", &DEPTH.to_string(), "--seconds", "300"])
        .args(["--cpu", &CLIENT_CPU.to_string()]);
    let clock = Clock::start(&forebay.processes())?;
    let text = process::text(&mut command, LIMIT)?;
    let others_cores = clock.used()?.others_user_cores;
    let report: serde_json::Value = serde_json::from_str(&text)?;
    let iops = report["lines"][0]["iops"].as_f64();
    Ok(Run {
        iops: iops.context("the load generator gave no figures")?,
        others_cores,
    })
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
