//! Where a dead engine's writes may still land.
//!
//! **Design.** A command that goes on carries its ranges with it, so that what overlaps it and is younger
//! waits. A command that ends with its connection leaves them behind, until the fence of the devices that
//! it was given to: nobody does it again, but its bytes may come. Where its record is too damaged to
//! say which, it is the whole volume; where not even the volume is known, every volume. What nobody does
//! again is told to every reactor, also for a volume that is not served: it may be, before the fence.
//!
//! **Not here:** how they are waited for ([`crate::recovery`]).

use super::plan::PlannedQueue;
use super::queue::devices;
use super::snapshot::{OldCommand, commands};
use super::{Next, OldBytes, ServedLane, ServedLanes};
use crate::core::{CarriedSpan, CommandRef, Devices};
use crate::frontend::nvme_tcp::{MDTS_BYTES, NSID};
use forebay_nvme::io::{self, FUSE_FIRST, FUSE_SECOND, IoCommand, NamespaceGeometry};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::region::{ControllerConstants, Region};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// A span, and what it is sorted by.
struct Aged {
    /// Whose command it is. What nobody does again is every reactor's: its volume may be exported anew
    /// elsewhere before the fence.
    reactor: Option<usize>,
    turn: FusedTurn,
    taken_ns: u64,
    queue: u32,
    number: u64,
    span: CarriedSpan,
}

/// Where a fused pair has passed its compare: what overlaps it and had begun was over when it compared; what had not
/// begun, or compares too, comes after it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum FusedTurn {
    Begun,
    Passed,
    Later,
}

/// See the module's text.
pub(super) struct Spans {
    all: Vec<Aged>,
    /// Volumes that may still change anywhere. One span says it, however much is damaged.
    whole: BTreeSet<VolumeId>,
    lanes: Vec<ServedLane>,
    /// Not even the volume is known: nothing is served before the fences have passed.
    pub after_fence: bool,
}

/// What a command does to its volume.
struct Touched {
    ranges: Vec<Range<u64>>,
    write: bool,
    /// Its data comes from the host.
    from_host: bool,
}

/// Where a queue was served.
enum Served<'a> {
    /// There still.
    Here(&'a ServedLane),
    /// Its export is not served any more, or not yet again.
    Of(VolumeId),
    /// Its records don't say.
    Unknown,
}

impl Spans {
    /// None, for an engine with these lanes.
    pub(super) fn new(lanes: &ServedLanes) -> Self {
        Self {
            all: Vec::new(),
            whole: BTreeSet::new(),
            lanes: lanes.values().cloned().collect(),
            after_fence: false,
        }
    }

    /// What each reactor is to be told, the oldest first.
    pub(super) fn by_reactor(mut self, reactors: usize) -> Vec<Vec<CarriedSpan>> {
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

    /// All of a volume may still change, by any device.
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
            span: CarriedSpan {
                volume,
                bytes: 0..u64::MAX,
                write: true,
                devices: Devices::ALL,
                command: None,
            },
        });
    }

    /// All of every volume that is, or was, served.
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

    /// A queue doesn't go on after all.
    pub(super) fn disown(&mut self, queue: u32) {
        for aged in &mut self.all {
            if aged.span.command.is_some_and(|c| c.queue() == Some(queue)) {
                aged.span.command = None;
                aged.reactor = None;
            }
        }
    }

    /// Those of a queue that goes on.
    pub(super) fn carry(
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
                // With its second, or never.
                Next::Begin { .. } if command.sqe.fuse() == FUSE_FIRST => continue,
                Next::Begin { fenced } | Next::Passed { fenced } => (true, *fenced),
                Next::Poisoned => (false, devices(command)),
                _ => continue,
            };
            let touched = match touched(command, memory, lane) {
                Some(touched) => touched,
                // It made sense once.
                None if command.state.submitted_ever() => {
                    self.everything(volume);
                    continue;
                }
                // One that makes no sense is answered so, and touches nothing.
                None => continue,
            };
            // Whose data is yet to be asked for may never begin.
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
                    span: CarriedSpan {
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

    /// Those of a queue that doesn't. `of` is its controller, as far as that is known, and `lane` its
    /// export's if that is served.
    pub(super) fn orphans(
        &mut self,
        region: &Region,
        memory: &(impl OldBytes + ?Sized),
        queue: u32,
        of: Option<&ControllerConstants>,
        lane: Option<&ServedLane>,
    ) {
        let served = match (of, lane) {
            // Discovery: nothing gets to a device.
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
                    // With a sound controller, the lane it names was another's: it may be any volume.
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
                    span: CarriedSpan {
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

/// The volume that a controller's export was of. Its lane's slot is nobody else's while commands of it
/// are in flight.
fn volume_of(region: &Region, of: &ControllerConstants) -> Option<VolumeId> {
    let lane = region.lanes().get(of.lane? as usize)?;
    let export = lane.export.load(Relaxed).checked_sub(1);
    (export == of.export).then(|| VolumeId(lane.volume.load(Relaxed)))
}

/// Whether the first of a pair has the data that it waits for.
fn has_data((first, next): (&OldCommand, &Next)) -> bool {
    matches!(next, Next::Begin { .. }) && first.buffer.is_some()
}

/// What a command touches; `None` if it makes no sense for this volume.
fn touched(
    command: &OldCommand,
    memory: &(impl OldBytes + ?Sized),
    lane: &ServedLane,
) -> Option<Touched> {
    let geometry = NamespaceGeometry {
        block_bytes: lane.volume.config.block_bytes,
        block_count: lane.volume.blocks(),
    };
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
