//! The cost of recording on a real file, in I/Os a second: the timed part of `bench recording`.
//!
//! 4 KiB random I/O at depth 32 over loopback. Two daemons, one built without recording, alternate
//! in changing order. Each adjacent pair gives a ratio, which holds on a shared machine even if
//! absolute values do not; median and quartiles are printed.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::forebay::{self, Forebay, VOLUME_BYTES};
use super::measure::{Summary, median};
use super::{Options, profile, recording, tcp};

const DEPTH: u32 = 32;

pub(super) fn run(options: &Options, summary: &mut Summary) -> Result<()> {
    let (seconds, pairs) = if options.quick { (1, 8) } else { (3, 20) };
    let programs = [forebay::build()?, build_without()?];
    let files = ["with", "without"].map(|name| {
        let file = format!("bench-recording-{}-{name}.img", std::process::id());
        RemovedAtEnd(crate::cargo::target_folder().join(file))
    });
    let size = VOLUME_BYTES.to_string();
    let start = |program: &Path, file: &RemovedAtEnd| -> Result<Forebay> {
        std::fs::File::create(&file.0)?.set_len(3 << 30)?;
        let spec = format!("file:{}", file.0.display());
        let forebay = Forebay::start_with(program, &spec, tcp::TARGET_CPU, &size)?;
        tcp::fill(program, &forebay)?;
        Ok(forebay)
    };
    let with = start(&programs[0], &files[0])?;
    let without = start(&programs[1], &files[1])?;
    println!(
        "{:<7}{:>6}{:>14}{:>14}{:>10}{:>18}",
        "op", "QD", "with IOPS", "without", "ratio", "half of ratios"
    );
    for op in ["read", "write"] {
        let one = |forebay: &Forebay| -> Result<f64> {
            Ok(tcp::load(
                &programs[0],
                forebay,
                &tcp::Shape::random(op, DEPTH),
                seconds,
            )?
            .iops)
        };
        let mut figures: Vec<(f64, f64)> = Vec::new();
        for pair in 0..pairs {
            figures.push(if pair % 2 == 0 {
                let first = one(&with)?;
                (first, one(&without)?)
            } else {
                let first = one(&without)?;
                (one(&with)?, first)
            });
        }
        let mut ratios: Vec<f64> = figures.iter().map(|(a, b)| a / b).collect();
        ratios.sort_by(f64::total_cmp);
        let (low, high) = (ratios[pairs / 4], ratios[pairs - 1 - pairs / 4]);
        let ratio = median(ratios);
        println!(
            "{op:<7}{DEPTH:>6}{:>14.0}{:>14.0}{ratio:>10.3}{:>18}",
            median(figures.iter().map(|f| f.0).collect()),
            median(figures.iter().map(|f| f.1).collect()),
            format!("{low:.3} to {high:.3}"),
        );
        summary.put(format!("file_{op}_ratio"), ratio);
        summary.put(format!("file_{op}_ratio_low"), low);
        summary.put(format!("file_{op}_ratio_high"), high);
    }
    Ok(())
}

fn build_without() -> Result<PathBuf> {
    let mut cargo = profile::cargo("build");
    cargo
        .args([
            "-p",
            "forebay",
            "--features",
            "no-recording",
            "--target-dir",
        ])
        .arg(recording::folder());
    profile::build("forebay without recording", &mut cargo)
}

pub(super) struct RemovedAtEnd(pub(super) PathBuf);

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
