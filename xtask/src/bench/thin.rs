//! `cargo xtask bench thin`: first writes to thin space against overwrites.
//!
//! Purpose: every first write to an extent asks the daemon where it may go; this says what that costs.
//! Random 4 KiB writes at depth 32, one into each extent of a fresh volume in random order (`first`:
//! every one asks), then the same again in the same order (`overwrite`: the third pass, in which
//! nothing is new any more); and one into each block of a
//! smaller fresh volume (`fill`: what filling a disk at random is like, where one in sixteen asks),
//! then the same again (`refill`). On a ram device, on a block device (a loop device over a sparse file
//! in memory, where one can be made) and on a sparse file, beside fio's own first writes, one for each
//! 64 KiB in random order, to such a file.
//! Design: a fresh pool for each round, so that nothing is laundered meanwhile; all kinds in turn. The
//! reactor is on processor 0, the client on processor 1; the daemon and the engine's control thread
//! run where the kernel likes. The client sleeps: on a small machine one that spins takes the
//! processor that the daemon needs.
//! Not here: several volumes, other depths.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::process;

use super::Options;
use super::forebay::{self, Forebay};
use super::measure::{Summary, median};

const TARGET_CPU: usize = 0;
const CLIENT_CPU: usize = 1;
const DEPTH: u32 = 32;
/// The pool's extent, and so from one write to the next.
const EXTENT_BYTES: u64 = 64 << 10;
const IO_BYTES: u64 = 4 << 10;
/// The volume of which every block is written.
const FILL_BYTES: u64 = 512 << 20;
const LIMIT: Duration = Duration::from_secs(600);

/// A kind of device.
struct Kind {
    name: &'static str,
    /// Bytes of the volume, in a full run.
    volume_bytes: u64,
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "ram",
        volume_bytes: 8 << 30,
    },
    Kind {
        name: "block",
        volume_bytes: 8 << 30,
    },
    Kind {
        name: "file",
        volume_bytes: 4 << 30,
    },
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let program = forebay::build()?;
    let fio = process::is_installed("fio");
    if !fio {
        println!("fio is not installed: the comparison with it is left out");
    }
    let (rounds, divisor) = if options.quick { (1, 8) } else { (5, 1) };
    let mut figures: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut without = Vec::new();
    println!("{:<8}{:>16}{:>10}", "device", "writes", "IOPS");
    for _ in 0..rounds {
        for kind in &KINDS {
            let bytes = kind.volume_bytes / divisor;
            let mut note = |what: &str, iops: f64| {
                println!("{:<8}{what:>16}{iops:>10.0}", kind.name);
                let name = format!("{}_{what}_iops", kind.name);
                figures.entry(name).or_default().push(iops);
            };
            if without.contains(&kind.name) {
                continue;
            }
            let Some(place) = Place::make(kind.name, bytes + (1 << 30))? else {
                without.push(kind.name);
                continue;
            };
            let size = bytes.to_string();
            let forebay = Forebay::start_with(&program, &place.spec, TARGET_CPU, &size)?;
            note(
                "first",
                load(&program, &forebay, &forebay.nqn, EXTENT_BYTES)?,
            );
            note(
                "overwrite",
                load(&program, &forebay, &forebay.nqn, EXTENT_BYTES)?,
            );
            let size = (FILL_BYTES / divisor).to_string();
            forebay.cli(&["volume", "create", "bench/fill", "--size", &size])?;
            let nqn = forebay.export("bench/fill")?;
            note("fill", load(&program, &forebay, &nqn, IO_BYTES)?);
            load(&program, &forebay, &nqn, IO_BYTES)?;
            note("refill", load(&program, &forebay, &nqn, IO_BYTES)?);
            drop(forebay);
            if kind.name == "file" && fio {
                note("fio_first", fio_first_writes(bytes)?);
            }
        }
    }
    let mut summary = Summary::default();
    for (name, iops) in &figures {
        summary.put(name.clone(), median(iops.clone()));
    }
    for kind in &KINDS {
        for (what, over) in [
            ("first", "overwrite"),
            ("fill", "refill"),
            ("first", "fio_first"),
        ] {
            let of = |what: &str| figures.get(&format!("{}_{what}_iops", kind.name));
            if let (Some(what_iops), Some(over_iops)) = (of(what), of(over)) {
                // Of each round by itself: both were measured in the same minute.
                let ratios = what_iops.iter().zip(over_iops).map(|(a, b)| a / b.max(1.0));
                let over = over.trim_end_matches("_first");
                let name = format!("{}_{what}_over_{over}_iops_ratio", kind.name);
                summary.put(name, median(ratios.collect()));
            }
        }
    }
    summary.print("thin", options.json.as_deref())
}

/// Where a device of some kind lies; what was made for it goes when this does.
struct Place {
    spec: String,
    file: PathBuf,
    loop_device: Option<String>,
}

impl Place {
    /// `None`, and said so, where there can be none.
    fn make(kind: &str, bytes: u64) -> Result<Option<Self>> {
        let name = format!("forebay-thin-{}", std::process::id());
        let file = match kind {
            "file" => crate::target_folder().join(name),
            _ => Path::new("/dev/shm").join(name),
        };
        let mut place = Self {
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
                    println!("no loop device, so no figures of a block device: {error:#}");
                    return Ok(None);
                }
            }
        }
        Ok(Some(place))
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

/// Writes 4 KiB of every so many bytes, once; IOPS.
fn load(program: &Path, forebay: &Forebay, nqn: &str, once_per: u64) -> Result<f64> {
    let mut command = Command::new(program);
    command
        .args(["--json", "bench", "load", "--addr"])
        .arg(format!("127.0.0.1:{}", forebay.port))
        .args(["--nqn", nqn, "--rw", "randwrite"])
        .args(["--bs", &IO_BYTES.to_string()])
        .args(["--once-per", &once_per.to_string()])
        .args(["--qd", &DEPTH.to_string(), "--seconds", "300"])
        .args(["--cpu", &CLIENT_CPU.to_string()]);
    let report: serde_json::Value = serde_json::from_str(&process::text(&mut command, LIMIT)?)?;
    report["lines"][0]["iops"]
        .as_f64()
        .context("the load generator gave no figures")
}

/// The same with fio, straight to a sparse file; IOPS.
fn fio_first_writes(bytes: u64) -> Result<f64> {
    let Some(place) = Place::make("file", bytes)? else {
        bail!("no file");
    };
    let file = place.file.display();
    // Its own random order counts in blocks of the I/O's size, so it is told where to write.
    let mut log = format!("fio version 2 iolog\n{file} add\n{file} open\n");
    for extent in shuffled(bytes / EXTENT_BYTES) {
        writeln!(log, "{file} write {} 4096", extent * EXTENT_BYTES)?;
    }
    writeln!(log, "{file} close")?;
    let log_file = place.file.with_extension("iolog");
    std::fs::write(&log_file, log)?;
    let mut fio = Command::new("fio");
    fio.args(["--name=first", "--direct=1", "--ioengine=io_uring"])
        .args(["--output-format=json", "--allow_file_create=0"])
        .arg(format!("--iodepth={DEPTH}"))
        .arg(format!("--read_iolog={}", log_file.display()));
    let text = process::text(&mut fio, LIMIT);
    let _ = std::fs::remove_file(&log_file);
    let report: serde_json::Value = serde_json::from_str(&text?)?;
    let write = &report["jobs"][0]["write"];
    if write["total_ios"].as_u64() != Some(bytes / EXTENT_BYTES) {
        bail!("fio did not write what it was told: {write}");
    }
    write["iops"].as_f64().context("no iops in fio's report")
}

/// `0..count` in an order without a pattern that matters, always the same.
fn shuffled(count: u64) -> Vec<u64> {
    let mut all: Vec<u64> = (0..count).collect();
    let mut state = 1u64;
    for i in (1..all.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        all.swap(i, ((u128::from(state) * (i as u128 + 1)) >> 64) as usize);
    }
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
