//! A target's processor time per I/O at a fixed rate, as a busy client limits throughput.
//!
//! Part of `cargo xtask bench tcp`: `burst` (32 commands at once, 200,000 a second), `rate` (one at
//! a time) and `burst_digest`. Our client alternates between our target and SPDK's. Each target
//! reports its busy time: turns with work (`working_ns` in `forebay stats`), or pollers with work
//! (`framework_get_reactors`). Idle polling does not count. A rate not kept is reported; it shows
//! the client's limit.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::process;

use super::forebay::Forebay;
use super::measure::{Clock, DISTURBED_CORES, Summary, median};
use super::{Options, spdk, tcp};

/// Commands a second.
pub(super) const RATE: u32 = 200_000;
/// The part of the rate that must be kept.
const KEPT: f64 = 0.98;
const LIMIT: Duration = Duration::from_secs(60);

struct Pace {
    name: &'static str,
    burst: u32,
    digests: bool,
}

const PACES: [Pace; 3] = [
    Pace {
        name: "burst",
        burst: 32,
        digests: false,
    },
    Pace {
        name: "rate",
        burst: 1,
        digests: false,
    },
    Pace {
        name: "burst_digest",
        burst: 32,
        digests: true,
    },
];

fn name(device: &str, pace: &Pace, op: &str) -> String {
    format!("{device}_{}_{op}", pace.name)
}

fn is_wanted(options: &Options, name: &str) -> bool {
    options.only.as_ref().is_none_or(|only| name.contains(only))
}

#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) busy_ns: f64,
    pub(super) iops: f64,
    pub(super) others_cores: f64,
}

/// Runs the wanted shapes on a device.
pub(super) fn run(
    options: &Options,
    summary: &mut Summary,
    program: &Path,
    peer: Option<&Path>,
    device: &str,
) -> Result<()> {
    let wanted = |pace: &&Pace| {
        ["read", "write"]
            .iter()
            .any(|op| is_wanted(options, &name(device, pace, op)))
    };
    let paces: Vec<&Pace> = PACES.iter().filter(wanted).collect();
    if paces.is_empty() {
        return Ok(());
    }
    let ours = Forebay::start(program, device, tcp::TARGET_CPU)?;
    tcp::fill(program, &ours)?;
    let rounds = if options.quick { 1 } else { 3 };
    for pace in paces {
        for op in ["read", "write"] {
            let name = name(device, pace, op);
            if !is_wanted(options, &name) {
                continue;
            }
            let mut all: [Vec<Run>; 2] = Default::default();
            for _ in 0..rounds {
                let load = Load {
                    program,
                    pace,
                    op,
                    seconds: if options.quick { 1 } else { 4 },
                };
                let busy = || busy_of_ours(&ours);
                all[0].push(load.run(ours.engine, ours.port, &ours.nqn, busy)?);
                let Some(folder) = peer else { continue };
                let theirs = spdk::Target::start(folder, device, tcp::TARGET_CPU)?;
                let busy = || theirs.busy_ns(folder);
                all[1].push(load.run(theirs.pid(), theirs.port, theirs.nqn(), busy)?);
            }
            report(summary, &name, &all);
        }
    }
    Ok(())
}

/// Busy time of our reactors since the engine began.
pub(super) fn busy_of_ours(ours: &Forebay) -> Result<f64> {
    let stats = ours.cli(&["stats"])?;
    let working = stats["engine"]["working_ns"].as_f64();
    working.with_context(|| format!("no working_ns in {stats}"))
}

struct Load<'a> {
    program: &'a Path,
    pace: &'a Pace,
    op: &'a str,
    seconds: u32,
}

impl Load<'_> {
    fn run(
        &self,
        pid: u32,
        port: u16,
        nqn: &str,
        busy_ns: impl Fn() -> Result<f64>,
    ) -> Result<Run> {
        let address = format!("127.0.0.1:{port}");
        let mut command = tcp::load_on(self.program, &address, nqn);
        command
            .args(["--rw", &format!("rand{}", self.op), "--spin"])
            .args(["--bs", "4096", "--qd", "64"])
            .args(["--rate", &RATE.to_string()])
            .args(["--burst", &self.pace.burst.to_string()])
            .args(["--seconds", &self.seconds.to_string()])
            .args(["--cpu", &tcp::CLIENT_CPU.to_string()]);
        if self.pace.digests {
            command.arg("--digests");
        }
        let before = busy_ns()?;
        let clock = Clock::start(&[pid])?;
        let text = process::text(&mut command, LIMIT)?;
        let used = clock.used()?;
        let after = busy_ns()?;
        let report: Value = serde_json::from_str(&text)?;
        let figure = |value: &Value, name: &str| {
            let figure = value[name].as_f64();
            figure.with_context(|| format!("no {name} in {report}"))
        };
        Ok(Run {
            busy_ns: (after - before) / figure(&report["lines"][0], "ops")?.max(1.0),
            iops: figure(&report["lines"][0], "iops")?,
            others_cores: used.others_cores,
        })
    }
}

/// Prints both sides: ours, then SPDK's.
pub(super) fn report(summary: &mut Summary, name: &str, all: &[Vec<Run>; 2]) {
    let mut busy = Vec::new();
    for (side, runs) in ["forebay", "spdk"].iter().zip(all) {
        if runs.is_empty() {
            continue;
        }
        let quiet = |run: &&Run| run.others_cores <= DISTURBED_CORES;
        let mut kept: Vec<Run> = runs.iter().filter(quiet).copied().collect();
        let is_quiet = !kept.is_empty();
        if !is_quiet {
            summary.disturbed = true;
            kept.clone_from(runs);
        }
        let of = |figure: fn(&Run) -> f64| median(kept.iter().map(figure).collect());
        let (busy_ns, iops) = (of(|run| run.busy_ns), of(|run| run.iops));
        println!(
            "{name:<26}{side:<9}{iops:>10.0} IOPS{busy_ns:>8.0} ns busy per I/O{}{}",
            if iops < KEPT * f64::from(RATE) {
                "  pace not kept"
            } else {
                ""
            },
            if is_quiet { "" } else { "  disturbed" },
        );
        summary.put(format!("{name}_{side}_busy_ns"), busy_ns);
        summary.put(format!("{name}_{side}_iops"), iops);
        busy.push(busy_ns);
    }
    if let [ours, theirs] = busy[..] {
        println!("{name:<26}ours over theirs: {:.2}", ours / theirs);
        summary.put(format!("{name}_busy_ratio"), ours / theirs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pace_is_chosen_by_its_name() {
        let of = |only: &str| Options {
            only: Some(only.into()),
            ..Options::default()
        };
        let chosen = |only: &str| {
            let names = PACES.iter().map(|pace| name("null", pace, "read"));
            let chosen = names.filter(|name| is_wanted(&of(only), name));
            chosen.collect::<Vec<_>>()
        };
        assert_eq!(chosen("rate"), ["null_rate_read"]);
        assert_eq!(chosen("burst_digest"), ["null_burst_digest_read"]);
        assert_eq!(chosen("burst").len(), 2);
        assert!(chosen("qd32").is_empty() && chosen("ram_rate").is_empty());
    }
}
