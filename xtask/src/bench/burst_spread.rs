//! `cargo xtask bench burst --only spread`: the gain and cost of `one-to-n` with one queue and two
//! reactors.
//!
//! The engine's test `core::tests::offload::speed` has one thread as host and home reactor, and
//! another as second reactor, idle or equally loaded. Each read of a memory device costs extra
//! processor time on the reactor that does it. Ways alternate; values are medians of undisturbed
//! rounds. Two processors are too few for networks and VMs; `cargo xtask sim balance` has more
//! reactors.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::process;

use super::measure::{Clock, DISTURBED_CORES, Summary, median};
use super::{Options, recording};

const LIMIT: Duration = Duration::from_secs(120);
const TEST: &str = "core::tests::offload::speed::a_queue_is_spread";
/// One reactor, and two in two ways.
const WAYS: [&str; 3] = ["alone", "one-to-one", "one-to-n"];
/// Depth, extra microseconds per read, and whether the second reactor is loaded too.
const LOADS: [(u32, u32, bool); 9] = [
    HEADLINE,
    (64, 10, false),
    (64, 5, false),
    (64, 2, false),
    (64, 0, false),
    (8, 0, false),
    (1, 0, false),
    (64, 5, true),
    (64, 0, true),
];
/// The reported result.
const HEADLINE: (u32, u32, bool) = (64, 20, false);

/// A ratio above this means an idle reactor.
const NOTHING: f64 = 1000.0;

/// Reads a second; ratios of the busiest to the idlest reactor, by reads and by time.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Figures {
    iops: f64,
    reads: f64,
    busy: f64,
}

/// Adds the results to `summary`.
pub(super) fn run(options: &Options, summary: &mut Summary) -> Result<()> {
    let (seconds, rounds) = if options.quick { (0.3, 3) } else { (1.0, 5) };
    let program = recording::build_engine()?;
    println!(
        "{:<6}{:>5}{:>9}  {:<11}{:>10}{:>12}{:>13}{:>15}{:>14}",
        "loads",
        "QD",
        "cost us",
        "way",
        "IOPS",
        "over alone",
        "one-to-one",
        "reads balance",
        "time balance"
    );
    for load in LOADS {
        let (depth, cost_us, both) = load;
        let mut all: [Vec<(Figures, bool)>; 3] = Default::default();
        for _ in 0..rounds {
            for (way, all) in WAYS.iter().zip(&mut all) {
                let clock = Clock::start(&[])?;
                let figures = one(&program, way, load, seconds)?;
                all.push((figures, clock.used()?.others_user_cores <= DISTURBED_CORES));
            }
        }
        let mut of = [Figures::default(); 3];
        for (of, mut all) in of.iter_mut().zip(all) {
            if all.iter().any(|(_, quiet)| *quiet) {
                all.retain(|(_, quiet)| *quiet);
            } else {
                summary.disturbed = true;
            }
            let each =
                |figure: fn(&Figures) -> f64| median(all.iter().map(|(f, _)| figure(f)).collect());
            *of = Figures {
                iops: each(|f| f.iops),
                reads: each(|f| f.reads),
                busy: each(|f| f.busy),
            };
        }
        for (way, figures) in WAYS.iter().zip(&of) {
            println!(
                "{:<6}{depth:>5}{cost_us:>9}  {way:<11}{:>10.0}{:>12.2}{:>13.2}{:>15}{:>14}",
                if both { "both" } else { "one" },
                figures.iops,
                figures.iops / of[0].iops,
                figures.iops / of[1].iops,
                shown(figures.reads),
                shown(figures.busy)
            );
        }
        let [alone, one_to_one, one_to_n] = of;
        let prefix = match (load, both) {
            (HEADLINE, _) => "spread".to_owned(),
            (_, false) => format!("spread_qd{depth}_{cost_us}us"),
            (_, true) => format!("spread_both_qd{depth}_{cost_us}us"),
        };
        for (name, value) in [
            ("one_to_n_throughput_ratio", one_to_n.iops / alone.iops),
            (
                "one_to_n_over_one_to_one_ratio",
                one_to_n.iops / one_to_one.iops,
            ),
            ("one_to_n_busiest_to_idlest", one_to_n.busy),
            ("one_to_n_most_to_least_reads", one_to_n.reads),
        ] {
            if value < NOTHING {
                summary.put(format!("{prefix}_{name}"), value);
            }
        }
    }
    Ok(())
}

/// A ratio, or `-` for an idle reactor.
fn shown(ratio: f64) -> String {
    match ratio < NOTHING {
        true => format!("{ratio:.2}"),
        false => "-".to_owned(),
    }
}

fn one(
    program: &Path,
    way: &str,
    (depth, cost_us, both): (u32, u32, bool),
    seconds: f64,
) -> Result<Figures> {
    let both = if both { ":both" } else { "" };
    let mut command = Command::new(program);
    command.args(["--exact", TEST, "--nocapture"]).env(
        "FOREBAY_SPREAD",
        format!("{way}:{depth}:{seconds}:{}{both}", cost_us * 1000),
    );
    let text = process::text(&mut command, LIMIT)?;
    parse(&text).with_context(|| format!("no figures in the engine's output:\n{text}"))
}

/// `iops I home H there T busy A B`
fn parse(text: &str) -> Option<Figures> {
    let (_, line) = text.lines().find_map(|line| line.split_once("iops "))?;
    let numbers: Vec<f64> = line
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [iops, home, there, here_busy, there_busy] = numbers[..] else {
        return None;
    };
    // Avoids division by zero.
    let over = |a: f64, b: f64| a.max(b) / a.min(b).max(1e-3);
    Some(Figures {
        iops,
        reads: over(home, there),
        busy: over(here_busy, there_busy),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read() {
        let text = "running 1 test\ntest a ... iops 1500.5 home 30 there 20 busy 80 99.5\nok\n";
        let wanted = Figures {
            iops: 1500.5,
            reads: 1.5,
            busy: 99.5 / 80.0,
        };
        assert_eq!(parse(text), Some(wanted));
        assert_eq!(parse("iops 1 home 2\n"), None);
    }
}
