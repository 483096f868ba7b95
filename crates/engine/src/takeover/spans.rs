//! Byte ranges where a dead engine's writes may still land.
//!
//! **Design.** A command that continues brings its ranges, so that younger overlapping commands
//! wait. A command that ends leaves them until its devices' fences. A damaged record stands for the
//! whole volume, an unknown volume for all. Ranges without a command go to every reactor. **Not
//! here:** the wait ([`crate::recovery`]).

use super::plan::PlannedQueue;
use super::queue::devices;
use super::snapshot::{OldCommand, commands};
use super::{Next, OldBytes, ServedLane, ServedLanes};
use crate::core::{CommandRef, FenceSet, RecoveredSpan};
use crate::frontend::nvme_tcp::{MDTS_BYTES, NSID};
use forebay_nvme::io::{self, FUSE_FIRST, FUSE_SECOND, IoCommand};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::region::{ControllerConstants, Region};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

struct Aged {
    /// `None`: any reactor, since the volume may move before the fence.
    reactor: Option<usize>,
    turn: FusedTurn,
    taken_ns: u64,
    queue: u32,
    number: u64,
    span: RecoveredSpan,
}

/// Around a fused pair that passed: overlapping commands had ended before the compare, or have not
/// begun, or also compare.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum FusedTurn {
    Begun,
    Passed,
    Later,
}

pub(super) struct Spans {
    all: Vec<Aged>,
    /// Any byte may still change; one span each.
    whole: BTreeSet<VolumeId>,
    lanes: Vec<ServedLane>,
    /// Nothing is served before the fences.
    pub after_fence: bool,
}

struct Touched {
    ranges: Vec<Range<u64>>,
    write: bool,
    /// Its data comes from the host.
    from_host: bool,
}

enum Served<'a> {
    Here(&'a ServedLane),
    /// The export is not served now.
    Of(VolumeId),
    /// The records do not tell.
    Unknown,
}

impl Spans {
    pub(super) fn new(lanes: &ServedLanes) -> Self {
        Self {
            all: Vec::new(),
            whole: BTreeSet::new(),
            lanes: lanes.values().cloned().collect(),
            after_fence: false,
        }
    }

    pub(super) fn by_reactor(mut self, reactors: usize) -> Vec<Vec<RecoveredSpan>> {
        let passed = self.all.iter().any(|a| a.turn == FusedTurn::Passed);
        let turn = |a: &Aged| if passed { a.turn } else { FusedTurn::Begun };
        (self.all).sort_by_key(|a| (turn(a), a.taken_ns, a.queue, a.number, a.span.bytes.start));
        let mut by_reactor = vec![Vec::new(); reactors];
        for aged in self.all {
            match aged.reactor {
                Some(reactor) => {
                    if let Some(of) = by_reactor.get_mut(reactor) {
                        of.push(aged.span);
                    }
                }
                None => {
                    for of in &mut by_reactor {
                        of.push(aged.span.clone());
                    }
                }
            }
        }
        by_reactor
    }

    /// Any byte may change, by any device.
    fn everything(&mut self, volume: VolumeId) {
        if !self.whole.insert(volume) {
            return;
        }
        self.all.push(Aged {
            reactor: None,
            turn: FusedTurn::Begun,
            taken_ns: 0,
            queue: 0,
            number: 0,
            span: RecoveredSpan {
                volume,
                bytes: 0..u64::MAX,
                write: true,
                devices: FenceSet::ALL,
                command: None,
            },
        });
    }

    /// Adds such spans for every volume that is or was served.
    fn everywhere(&mut self, region: &Region) {
        let here = self.lanes.iter().map(|lane| lane.volume.config.volume);
        let there = (region.lanes().iter())
            .filter(|lane| lane.export.load(Relaxed) != 0)
            .map(|lane| VolumeId(lane.volume.load(Relaxed)));
        let volumes: BTreeSet<VolumeId> = here.chain(there).collect();
        for volume in volumes {
            self.everything(volume);
        }
    }

    /// A queue does not continue after all.
    pub(super) fn disown(&mut self, queue: u32) {
        for aged in &mut self.all {
            if aged.span.command.is_some_and(|c| c.queue() == Some(queue)) {
                aged.span.command = None;
                aged.reactor = None;
            }
        }
    }

    pub(super) fn recover(
        &mut self,
        memory: &(impl OldBytes + ?Sized),
        queue: &PlannedQueue,
        lane: Option<&ServedLane>,
    ) {
        let (Some(lane), true) = (lane, queue.old.constants.identity.qid > 0) else {
            return;
        };
        let slot = queue.old.queue;
        let volume = lane.volume.config.volume;
        let mut before = None;
        for (command, next) in queue.commands() {
            let first = before.replace((command, next));
            let (again, devices) = match next {
                // The second of the pair brings the ranges.
                Next::Begin { .. } if command.sqe.fuse() == FUSE_FIRST => continue,
                Next::Begin { fenced } | Next::Passed { fenced } => (true, *fenced),
                Next::Poisoned => (false, devices(command)),
                _ => continue,
            };
            let touched = match touched(command, memory, lane) {
                Some(touched) => touched,
                // The record was sound once.
                None if command.state.submitted_ever() => {
                    self.everything(volume);
                    continue;
                }
                // An invalid command gets an error and touches nothing.
                None => continue,
            };
            // A command without its data may never begin.
            let begins = again
                && (command.buffer.is_some() || !touched.from_host)
                && (command.sqe.fuse() != FUSE_SECOND || first.is_some_and(has_data));
            let may_land = touched.write && command.state.submitted_ever();
            if !(begins || may_land) {
                continue;
            }
            let turn = match next {
                Next::Passed { .. } => FusedTurn::Passed,
                _ if command.state.submitted_ever() && command.sqe.fuse() == 0 => FusedTurn::Begun,
                _ => FusedTurn::Later,
            };
            for bytes in touched.ranges {
                self.all.push(Aged {
                    reactor: again.then_some(lane.served.reactor),
                    turn,
                    taken_ns: command.taken_ns,
                    queue: slot,
                    number: command.number,
                    span: RecoveredSpan {
                        volume,
                        bytes,
                        write: touched.write,
                        devices,
                        command: again.then_some(CommandRef::new(slot, command.slot)),
                    },
                });
            }
        }
    }

    /// Spans of a queue that ends. `of`: its controller, if known; `lane`: its export's lane, if
    /// served.
    pub(super) fn orphans(
        &mut self,
        region: &Region,
        memory: &(impl OldBytes + ?Sized),
        queue: u32,
        of: Option<&ControllerConstants>,
        lane: Option<&ServedLane>,
    ) {
        let served = match (of, lane) {
            // Discovery: no command reaches a device.
            (Some(of), _) if of.export.is_none() => return,
            (_, Some(lane)) => Served::Here(lane),
            (Some(of), None) => volume_of(region, of).map_or(Served::Unknown, Served::Of),
            (None, None) => Served::Unknown,
        };
        for (_, command) in commands(region, queue) {
            let command = match command {
                Ok(None) => continue,
                Ok(Some(command)) if !command.state.submitted_ever() => continue,
                Ok(Some(command)) => Some(command),
                Err(_) => None,
            };
            let lane = match served {
                Served::Here(lane) => lane,
                Served::Of(volume) => return self.everything(volume),
                Served::Unknown => {
                    // The lane belongs to another export now: it may be any volume.
                    self.after_fence |= of.is_some();
                    return self.everywhere(region);
                }
            };
            let volume = lane.volume.config.volume;
            let known = command.and_then(|c| Some((touched(&c, memory, lane)?, c)));
            let Some((touched, command)) = known else {
                return self.everything(volume);
            };
            if !touched.write {
                continue;
            }
            for bytes in touched.ranges {
                self.all.push(Aged {
                    reactor: None,
                    turn: FusedTurn::Begun,
                    taken_ns: command.taken_ns,
                    queue,
                    number: command.number,
                    span: RecoveredSpan {
                        volume,
                        bytes,
                        write: true,
                        devices: devices(&command),
                        command: None,
                    },
                });
            }
        }
    }
}

/// Valid, as a lane's slot is not reused while its commands are in flight.
fn volume_of(region: &Region, of: &ControllerConstants) -> Option<VolumeId> {
    let lane = region.lanes().get(of.lane? as usize)?;
    let export = lane.export.load(Relaxed).checked_sub(1);
    (export == of.export).then(|| VolumeId(lane.volume.load(Relaxed)))
}

fn has_data((first, next): (&OldCommand, &Next)) -> bool {
    matches!(next, Next::Begin { .. }) && first.buffer.is_some()
}

/// `None` if the command is invalid for this volume.
fn touched(
    command: &OldCommand,
    memory: &(impl OldBytes + ?Sized),
    lane: &ServedLane,
) -> Option<Touched> {
    let geometry = lane.volume.geometry();
    let block = u64::from(geometry.block_bytes);
    let bytes = |lba: u64, blocks: u64| lba * block..(lba + blocks) * block;
    let range = |lba, blocks| -> Vec<Range<u64>> { std::iter::once(bytes(lba, blocks)).collect() };
    let decode = match command.sqe.fuse() {
        0 => io::decode,
        _ => io::decode_fused,
    };
    let decoded = decode(&command.sqe, NSID, &geometry, MDTS_BYTES).ok()?;
    let from_host = matches!(decoded, IoCommand::Write { .. } | IoCommand::Compare { .. });
    let (ranges, write) = match decoded {
        IoCommand::Read { lba, blocks, .. } => (range(lba, u64::from(blocks)), false),
        IoCommand::Write { lba, blocks, .. } => (range(lba, u64::from(blocks)), true),
        IoCommand::WriteZeroes { lba, blocks, .. } => (range(lba, u64::from(blocks)), true),
        IoCommand::Deallocate { ranges } => {
            let buffer = command.buffer?;
            let mut data = vec![0; buffer.len_bytes as usize];
            memory.read(buffer.offset_bytes, &mut data)?;
            let all = io::dsm_ranges(&data, ranges, &geometry).ok()?;
            (
                all.flat_map(|(lba, blocks)| range(lba, u64::from(blocks)))
                    .collect(),
                true,
            )
        }
        IoCommand::Compare { lba, blocks, .. } => (range(lba, u64::from(blocks)), false),
        IoCommand::Flush
        | IoCommand::Hint { .. }
        | IoCommand::Reserve { .. }
        | IoCommand::ReservationReport { .. } => (Vec::new(), false),
    };
    Some(Touched {
        ranges,
        write,
        from_host,
    })
}
