//! IOPS over time while `forebay upgrade` replaces the engine by another one of the same program.
//!
//! A host at depth 32 reads or writes 4 KiB at random, over NVMe/TCP and vfio-user. The time from a
//! second before the call to a second after its end is printed in steps of 100 ms.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forebay_initiator::vm::Target;

use super::bmstore::Evaluation;
use super::bmstore_clients::name;
use super::bmstore_load::{Rig, VOLUME_BYTES};
use super::burst_client::{BLOCK, Host};
use super::burst_rig::Way;
use super::forebay::Forebay;
use super::measure::Clock;
use super::once::{Measured, quiet_median};
use super::pool_load::{Command, Places, during, longest_gap_ms};

const STEP: Duration = Duration::from_millis(100);
const STEPS_PER_SECOND: usize = 10;
const SECOND: Duration = Duration::from_secs(1);

struct Upgrade {
    /// The longest time without a completion.
    gap_ms: f64,
    /// IOPS of the worst second over those of the second before.
    second_share: f64,
    call_ms: f64,
    /// Completions in each step.
    series: Vec<u32>,
    others_cores: f64,
}

impl Measured for Upgrade {
    fn others_cores(&self) -> f64 {
        self.others_cores
    }
}

pub(super) fn run(evaluation: &mut Evaluation) -> Result<()> {
    let (rounds, around_ms) = if evaluation.quick {
        (1, 1500)
    } else {
        (5, 4000)
    };
    let around = Duration::from_millis(around_ms);
    let mut rig = Rig::start(&evaluation.program)?;
    let socket = rig.vm_disk(&evaluation.program, "nvme", &["--nvme-pcie"])?;
    for way in [Way::Tcp, Way::Pcie] {
        for (pattern, is_read) in [("randread", true), ("randwrite", false)] {
            let mut runs = Vec::new();
            for _ in 0..rounds {
                let run = upgrade(&mut rig.forebay, way, &socket, is_read, around)?;
                runs.push(run);
            }
            report(evaluation, name(way), pattern, &runs);
        }
    }
    Ok(())
}

fn upgrade(
    forebay: &mut Forebay,
    way: Way,
    socket: &Path,
    is_read: bool,
    around: Duration,
) -> Result<Upgrade> {
    let (port, nqn) = (forebay.port, forebay.nqn.clone());
    let connect = || match way {
        Way::Tcp => Host::tcp(port, &nqn),
        Way::Pcie => Host::machine(&Target::VfioUser(socket.to_owned()), true),
    };
    let blocks = VOLUME_BYTES / u64::from(BLOCK);
    let places = match is_read {
        true => Places::Reads(blocks),
        false => Places::Random(blocks),
    };
    let act = || {
        let before = others_during(forebay, around)?;
        let begun = Instant::now();
        forebay.upgrade()?;
        let ended = Instant::now();
        let after = others_during(forebay, around)?;
        Ok((begun, ended, before.max(after)))
    };
    let ((begun, ended, others_cores), commands) = during(connect, places, act)?;
    let from = begun.checked_sub(SECOND).context("no second before")?;
    let series = series(&commands, from, ended + SECOND);
    Ok(Upgrade {
        gap_ms: longest_gap_ms(&commands, begun, ended)?,
        second_share: worst_second(&series).context("too short a time")?,
        call_ms: (ended - begun).as_secs_f64() * 1e3,
        series,
        others_cores,
    })
}

/// Other programs' user time; the engine's process must not change meanwhile.
fn others_during(forebay: &Forebay, time: Duration) -> Result<f64> {
    let clock = Clock::start(&forebay.processes())?;
    std::thread::sleep(time);
    Ok(clock.used()?.others_user_cores)
}

/// Completions in each whole step.
fn series(commands: &[Command], from: Instant, to: Instant) -> Vec<u32> {
    let steps = (to.saturating_duration_since(from).as_millis() / STEP.as_millis()) as usize;
    let mut series = vec![0; steps];
    for command in commands {
        if let Some(since) = command.ended.checked_duration_since(from) {
            let step = (since.as_nanos() / STEP.as_nanos()) as usize;
            if let Some(count) = series.get_mut(step) {
                *count += 1;
            }
        }
    }
    series
}

/// The lowest sum of a second after the first, over that of the first.
fn worst_second(series: &[u32]) -> Option<f64> {
    let mut seconds = series
        .windows(STEPS_PER_SECOND)
        .map(|second| second.iter().sum::<u32>());
    let before = seconds.next()?;
    Some(f64::from(seconds.min()?) / f64::from(before.max(1)))
}

fn report(evaluation: &mut Evaluation, way: &str, pattern: &str, runs: &[Upgrade]) {
    let summary = &mut evaluation.summary;
    let mut of = |figure: fn(&Upgrade) -> f64| quiet_median(summary, runs, figure);
    let (gap_ms, share) = (of(|run| run.gap_ms), of(|run| run.second_share));
    let call_ms = of(|run| run.call_ms);
    let any_quiet = runs.iter().any(Upgrade::is_quiet);
    let kept = runs.iter().filter(|run| run.is_quiet() || !any_quiet);
    let longest_ms = kept.map(|run| run.gap_ms).fold(0.0, f64::max);
    println!(
        "{way} {pattern}: gap {gap_ms:.1} ms (longest {longest_ms:.1}), the worst second {share:.3} of the one before, the call {call_ms:.0} ms"
    );
    if let Some(run) = runs.iter().find(|run| run.is_quiet()).or(runs.first()) {
        print!("  thousands of IOPS in each 100 ms, the call at |:");
        for (at, count) in run.series.iter().enumerate() {
            let mark = if at == STEPS_PER_SECOND { " |" } else { "" };
            let iops = f64::from(*count) * STEPS_PER_SECOND as f64;
            print!("{mark} {:.1}", iops / 1e3);
        }
        println!();
    }
    let name = format!("{way}_{pattern}_upgrade");
    summary.put(format!("{name}_gap_ms"), gap_ms);
    summary.put(format!("{name}_longest_gap_ms"), longest_ms);
    summary.put(format!("{name}_second_share"), share);
    summary.put(format!("{name}_call_ms"), call_ms);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_in_steps() {
        let from = Instant::now() + SECOND;
        let command = |ms| Command {
            begun: from,
            ended: from + Duration::from_millis(ms),
        };
        let mut commands: Vec<Command> = [0, 99, 100, 250, 299, 300].map(command).into();
        commands.push(Command {
            begun: from,
            ended: from - STEP,
        });
        let to = from + Duration::from_millis(350);
        assert_eq!(series(&commands, from, to), [2, 1, 2]);
    }

    #[test]
    fn worst_second_over_the_first() {
        let mut steps = vec![100; 30];
        steps[12] = 0;
        steps[13] = 50;
        let share = worst_second(&steps).unwrap();
        assert!((share - 0.85).abs() < 1e-9);
        assert!(worst_second(&steps[..10]).is_none());
    }
}
