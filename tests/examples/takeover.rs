//! Measures for `cargo xtask bench takeover` what hosts see of an engine's death.
//!
//! 64 exports run at 200 commands of 4 KiB per second. For each it prints the longest gap between
//! completions around each death, and in a second without one. Wrong data, bad, duplicate or
//! missing completions, and lost connections are errors. The caller ensures a quiet node.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_tests::host::{Dice, Habits};
use forebay_tests::lab::{self, Lab, LabOptions, MIB, MINUTE, Noticed};

const EXPORTS: u8 = 64;
const PER_SECOND: u32 = 200;
/// Observed time before and after a death.
const WINDOW: Duration = Duration::from_secs(1);

fn main() -> Result<()> {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let kills = if quick { 3 } else { 20 };
    let mut options = LabOptions::volumes(0, 0);
    options.config = "[engine]\nreactors = 1\n".into();
    options.volumes = (0..EXPORTS).map(|i| (format!("v{i}"), 4 * MIB)).collect();
    let mut lab = Lab::new(&options)?;
    for host in &mut lab.hosts {
        host.fill()?;
        host.habits = Habits {
            reads: 50,
            holes: 0,
            flushes: 0,
            fua: 0,
            longest_bytes: 4096,
            depth: 16,
            per_second: Some(PER_SECOND),
        };
    }
    let mut deaths = Vec::new();
    let mut fences_ms = Vec::new();
    let mut pauses_ms = Vec::new();
    let mut dice = Dice::with_seed(1);
    let loads = lab.during_load(Noticed::Nothing, |daemon, progress| {
        progress.more("every export is under load", 2 * u64::from(PER_SECOND))?;
        for _ in 0..kills {
            std::thread::sleep(2 * WINDOW + Duration::from_millis(dice.u64(..100)));
            let engine = daemon.processes()?;
            deaths.push(Instant::now());
            daemon.kill_engine()?;
            daemon.wait_engine_after(engine.generation, MINUTE)?;
        }
        std::thread::sleep(2 * WINDOW);
        let events = lab::events(daemon)?;
        let ms = |kind: &str, of: &dyn Fn(&serde_json::Value) -> Option<u64>| -> Vec<f64> {
            let all = events.get(kind).into_iter().flatten();
            all.filter_map(of).map(|ns| ns as f64 / 1e6).collect()
        };
        fences_ms = ms("fence_passed", &|event| event["fence"]["fence_ns"].as_u64());
        pauses_ms = ms("took_over", &|event| event["pause_ns"].as_u64());
        ensure!(
            pauses_ms.len() == kills,
            "{} take-overs of {kills}",
            pauses_ms.len()
        );
        Ok(())
    })?;
    let (mut gaps, mut baselines, mut above) = (Vec::new(), Vec::new(), Vec::new());
    for death in &deaths {
        for host in &lab.hosts {
            let before = longest_gap_ms(&host.ends, *death - WINDOW, *death)?;
            let after = longest_gap_ms(&host.ends, *death, *death + WINDOW)?;
            gaps.push(after);
            baselines.push(before);
            above.push((after - before).max(0.0));
        }
    }
    let commands: u64 = loads.iter().map(|load| load.commands).sum();
    for host in &mut lab.hosts {
        host.check()?;
    }
    lab.finish()?;
    for (name, mut values) in [
        ("gap", gaps),
        ("baseline", baselines),
        ("above_baseline", above),
        ("pause", pauses_ms),
        ("fence", fences_ms),
    ] {
        values.sort_by(f64::total_cmp);
        let at = |part: usize| values.get((values.len() - 1) * part / 100).copied();
        println!("{name}_median_ms {:.2}", at(50).unwrap_or(0.0));
        println!("{name}_max_ms {:.2}", at(100).unwrap_or(0.0));
    }
    println!("kills {kills}");
    println!("exports {EXPORTS}");
    println!("commands {commands}");
    let errors: u64 = loads
        .iter()
        .map(|load| load.interrupted + load.no_space + load.device_errors)
        .sum();
    let reconnects = loads.iter().filter(|load| load.lost).count();
    println!("errors {errors}");
    println!("reconnects {reconnects}");
    // Lost data or a duplicate completion would have ended the run with an error.
    println!("lost 0");
    println!("double 0");
    Ok(())
}

/// The longest gap between completions that overlaps this time.
fn longest_gap_ms(ends: &[Instant], from: Instant, to: Instant) -> Result<f64> {
    let pairs = ends
        .windows(2)
        .filter(|pair| pair[1] > from && pair[0] < to);
    let longest = pairs.map(|pair| pair[1] - pair[0]).max();
    Ok(longest.context("no command ended")?.as_secs_f64() * 1e3)
}
