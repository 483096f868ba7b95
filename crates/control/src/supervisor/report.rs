//! Reports of deaths, for people. The dead engine's state region is untrusted: every number and the
//! report's size are bounded.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use forebay_xlate::boundary::region::{
    CommandStage, CommandState, MAX_CONTROLLERS, MAX_LANES, MAX_REACTORS, QueueIdentity, Region,
    queue_use,
};
use serde::Serialize;

use crate::clock::now_unix_ms;
use crate::files;

const REPORTS_KEPT: usize = 50;
const LOG_TAIL_BYTES: usize = 16 << 10;
const LOG_TAIL_LINES: usize = 40;
const COMMANDS_MAX: usize = 1000;

#[derive(Debug, Serialize)]
struct Report<'a> {
    generation: u64,
    pid: u32,
    at_unix_ms: u64,
    cause: &'a str,
    commands_in_flight: u64,
    reactors: Vec<ReactorReport>,
    lanes: Vec<LaneReport>,
    queues: Vec<QueueReport>,
    commands: Vec<DeadCommand>,
    commands_left_out: u64,
}

#[derive(Debug, Serialize)]
struct ReactorReport {
    number: usize,
    last_turn_age_ns: u64,
    asleep: bool,
    sleeps: u64,
    busy_turns: u64,
    staging_waits: u64,
}

#[derive(Debug, Serialize)]
struct LaneReport {
    export: u64,
    volume: u64,
    reactor: u64,
    in_flight: u64,
    parked: u64,
    faults: u64,
    connections: u64,
}

#[derive(Debug, Serialize)]
struct QueueReport {
    slot: usize,
    export: Option<u64>,
    qid: u16,
    entries: u16,
    commands_taken: u64,
    taken_bytes: u64,
    reactor: u64,
    in_flight: u64,
}

#[derive(Debug, Serialize)]
struct DeadCommand {
    queue: usize,
    number: u64,
    progress: &'static str,
    attempts: u8,
    age_ns: u64,
    opcode: u8,
    nsid: u32,
    lba: u64,
    blocks: u32,
}

#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) path: Option<PathBuf>,
    /// `None` if unknown.
    pub(crate) commands_in_flight: Option<u64>,
}

fn progress_name(state: CommandState) -> &'static str {
    match state.stage() {
        Some(CommandStage::Taken) if state.submitted_ever() => "submitted",
        Some(CommandStage::Taken) => "taken",
        Some(CommandStage::Asked | CommandStage::AskedInParts) => "waiting for data",
        Some(CommandStage::Kept) => "kept",
        Some(CommandStage::Passed) => "compared",
        Some(CommandStage::Free) | None => "damaged",
    }
}

fn gather<'a>(region: Option<&Region>, generation: u64, pid: u32, cause: &'a str) -> Report<'a> {
    let mut report = Report {
        generation,
        pid,
        at_unix_ms: now_unix_ms(),
        cause,
        commands_in_flight: 0,
        reactors: Vec::new(),
        lanes: Vec::new(),
        queues: Vec::new(),
        commands: Vec::new(),
        commands_left_out: 0,
    };
    let Some(region) = region else { return report };
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now_ns =
        now.tv_sec.unsigned_abs().saturating_mul(1_000_000_000) + now.tv_nsec.unsigned_abs();
    report.reactors = reactors(region, now_ns);
    report.lanes = lanes(region);
    for (slot, queue) in region.queues().iter().enumerate() {
        if queue.used.load(Acquire) == queue_use::FREE {
            continue;
        }
        let before = report.commands_in_flight;
        report.add_commands(region, slot, now_ns);
        let identity = QueueIdentity::of_word(queue.identity.load(Relaxed));
        let controller = queue.controller.load(Relaxed);
        let lane = (controller < MAX_CONTROLLERS as u64)
            .then(|| region.controllers()[controller as usize].lane.load(Relaxed))
            .filter(|lane| *lane < MAX_LANES as u64);
        report.queues.push(QueueReport {
            slot,
            export: lane.and_then(|lane| {
                region.lanes()[lane as usize]
                    .export
                    .load(Relaxed)
                    .checked_sub(1)
            }),
            qid: identity.qid,
            entries: identity.entries,
            commands_taken: queue.number.load(Relaxed),
            taken_bytes: queue.taken.load(Relaxed),
            reactor: queue.reactor.load(Relaxed),
            in_flight: report.commands_in_flight - before,
        });
    }
    report
}

fn reactors(region: &Region, now_ns: u64) -> Vec<ReactorReport> {
    let reactors = region.header().reactors.load(Relaxed);
    let reactors = reactors.min(MAX_REACTORS as u64) as usize;
    region.reactors()[..reactors]
        .iter()
        .enumerate()
        .map(|(number, reactor)| ReactorReport {
            number,
            last_turn_age_ns: now_ns.saturating_sub(reactor.last_turn_ns.load(Relaxed)),
            asleep: reactor.asleep.load(Relaxed) == 1,
            sleeps: reactor.sleeps.load(Relaxed),
            busy_turns: reactor.busy_turns.load(Relaxed),
            staging_waits: reactor.staging_waits.load(Relaxed),
        })
        .collect()
}

fn lanes(region: &Region) -> Vec<LaneReport> {
    let lanes = region.lanes().iter().filter_map(|lane| {
        Some(LaneReport {
            export: lane.export.load(Relaxed).checked_sub(1)?,
            volume: lane.volume.load(Relaxed),
            reactor: lane.reactor.load(Relaxed),
            in_flight: lane.in_flight.load(Relaxed),
            parked: lane.parked.load(Relaxed),
            faults: lane.faults.load(Relaxed),
            connections: lane.connections.load(Relaxed),
        })
    });
    lanes.collect()
}

impl Report<'_> {
    fn add_commands(&mut self, region: &Region, slot: usize, now_ns: u64) {
        for command in region.commands(slot) {
            let state = command.state();
            if state.stage() == Some(CommandStage::Free) {
                continue;
            }
            self.commands_in_flight += 1;
            if self.commands.len() >= COMMANDS_MAX {
                self.commands_left_out += 1;
                continue;
            }
            let sqe = |word: usize| command.sqe[word].load(Relaxed);
            self.commands.push(DeadCommand {
                queue: slot,
                number: command.number.load(Relaxed),
                progress: progress_name(state),
                attempts: state.attempts(),
                age_ns: now_ns.saturating_sub(command.taken_ns.load(Relaxed)),
                // NVMe Base, common command format: CDW0 bits 7:0 OPC, CDW1 NSID; NVM Command Set:
                // CDW10 and CDW11 SLBA, CDW12 bits 15:0 NLB (from 0).
                opcode: sqe(0) as u8,
                nsid: (sqe(0) >> 32) as u32,
                lba: sqe(5),
                blocks: u32::from(sqe(6) as u16) + 1,
            });
        }
    }
}

/// A failure is only logged.
pub(crate) fn write(
    state_dir: &Path,
    region: Option<&Region>,
    generation: u64,
    pid: u32,
    cause: &str,
) -> Written {
    let report = gather(region, generation, pid, cause);
    let name = format!("engine-{generation}-{}.json", report.at_unix_ms / 1000);
    Written {
        commands_in_flight: region.map(|_| report.commands_in_flight),
        path: put(state_dir, &name, &report),
    }
}

/// A death before this daemon's time: its predecessor's, or that of an engine whose state region is
/// gone too.
#[derive(Debug, Serialize)]
pub(crate) struct DeathReport<'a> {
    pub(crate) process: &'a str,
    pub(crate) pid: u32,
    pub(crate) generation: u64,
    pub(crate) noticed_at_unix_ms: u64,
    pub(crate) cause: &'a str,
    pub(crate) log: Vec<String>,
}

/// Empty without a log.
pub(crate) fn log_tail(state_dir: &Path, name: &str) -> Vec<String> {
    let text = std::fs::read(state_dir.join("log").join(name)).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(LOG_TAIL_BYTES)..]);
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].to_vec()
}

pub(crate) fn write_found(state_dir: &Path, found: &DeathReport<'_>) -> Option<PathBuf> {
    let seconds = found.noticed_at_unix_ms / 1000;
    let name = format!("{}-{}-{seconds}.json", found.process, found.pid);
    put(state_dir, &name, found)
}

/// Removes old reports. A failure is only logged.
fn put<T: Serialize>(state_dir: &Path, name: &str, report: &T) -> Option<PathBuf> {
    let folder = state_dir.join("reports");
    let path = folder.join(name);
    let written: io::Result<()> =
        std::fs::create_dir_all(&folder).and_then(|()| files::write_json(&path, report, false));
    if let Err(error) = written {
        tracing::error!(%error, "can't write the report of an engine's death");
        return None;
    }
    let mut all: Vec<_> = std::fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    all.sort();
    for (_, old) in all.iter().rev().skip(REPORTS_KEPT) {
        // One report too many does no harm.
        let _ = std::fs::remove_file(old);
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_region_is_reported_within_bounds() {
        let folder = tempfile::tempdir().unwrap();
        let region = Region::anonymous(4).unwrap();
        region.header().reactors.store(u64::MAX, Relaxed);
        region.lanes()[3].export.store(8, Relaxed);
        region.queues()[5].used.store(1, Relaxed);
        region.queues()[5].controller.store(u64::MAX, Relaxed);
        let command = &region.commands(5)[9];
        command.sqe[0].store(0x0000_0001_0007_0002, Relaxed);
        command.sqe[5].store(1234, Relaxed);
        command.sqe[6].store(7, Relaxed);
        command.state.store(77, Relaxed);
        let written = write(folder.path(), Some(&region), 4, 99, "signal 9 (SIGKILL)");
        assert_eq!(written.commands_in_flight, Some(1));
        let text = std::fs::read_to_string(written.path.unwrap()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["reactors"].as_array().unwrap().len(), MAX_REACTORS);
        assert_eq!(value["lanes"][0]["export"], 7);
        let command = &value["commands"][0];
        assert_eq!(command["progress"], "damaged");
        assert_eq!(
            (command["opcode"].as_u64(), command["nsid"].as_u64()),
            (Some(2), Some(1))
        );
        assert_eq!(
            (command["lba"].as_u64(), command["blocks"].as_u64()),
            (Some(1234), Some(8))
        );
    }
}
