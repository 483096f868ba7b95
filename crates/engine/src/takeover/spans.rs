//! Where a dead engine's writes may still land.
//!
//! **Design.** A command that goes on carries its ranges with it, so that what overlaps it and is younger
//! waits. A command that ends with its connection leaves them behind, until the fence of the devices that
//! it was given to: nobody does it again, but its bytes may come. Where its record is too damaged to
//! say which, it is the whole volume; where not even the volume is known, every volume.
//!
//! **Not here:** how they are waited for (`core::carried`).

use super::plan::PlannedQueue;
use super::queue::devices;
use super::snapshot::{OldCommand, commands};
use super::{Next, OldBytes, ServedLane, ServedLanes};
use crate::core::{CarriedSpan, CommandRef, Devices};
use crate::tcp::{MDTS_BYTES, NSID};
use forebay_nvme::io::{self, IoCommand, NamespaceGeometry};
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::region::Region;
use std::ops::Range;

/// A span, and what it is sorted by.
struct Aged {
    reactor: usize,
    taken_ns: u64,
    queue: u32,
    number: u64,
    span: CarriedSpan,
}

/// See the module's text.
pub(super) struct Spans {
    all: Vec<Aged>,
    lanes: Vec<ServedLane>,
}

/// What a command does to its volume.
struct Touched {
    ranges: Vec<Range<u64>>,
    write: bool,
}

impl Spans {
    /// None, for an engine with these lanes.
    pub(super) fn new(lanes: &ServedLanes) -> Self {
        Self {
            all: Vec::new(),
            lanes: lanes.values().cloned().collect(),
        }
    }

    /// What a reactor is to be told, the oldest first.
    pub(super) fn of_reactor(&mut self, reactor: usize) -> Vec<CarriedSpan> {
        self.all
            .sort_by_key(|a| (a.taken_ns, a.queue, a.number, a.span.bytes.start));
        let of = self.all.iter().filter(|a| a.reactor == reactor);
        of.map(|a| a.span.clone()).collect()
    }

    fn push(&mut self, lane: &ServedLane, queue: u32, age: Option<&OldCommand>, span: CarriedSpan) {
        self.all.push(Aged {
            reactor: lane.served.reactor,
            taken_ns: age.map_or(0, |c| c.taken_ns),
            queue,
            number: age.map_or(0, |c| c.number),
            span,
        });
    }

    /// A queue doesn't go on after all.
    pub(super) fn disown(&mut self, queue: u32) {
        for aged in &mut self.all {
            if aged.span.command.is_some_and(|c| c.queue == queue) {
                aged.span.command = None;
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
        for (command, next) in queue.commands() {
            let (again, devices) = match next {
                Next::Begin { fenced } => (true, *fenced),
                Next::Poisoned => (false, devices(command)),
                _ => continue,
            };
            // One that makes no sense is answered so, and touches nothing.
            let Some(touched) = touched(command, memory, lane) else {
                continue;
            };
            if !again && !touched.write {
                continue;
            }
            for bytes in touched.ranges {
                let span = CarriedSpan {
                    volume: lane.volume.config.volume,
                    bytes,
                    write: touched.write,
                    devices,
                    command: again.then_some(CommandRef {
                        queue: slot,
                        slot: command.slot,
                    }),
                };
                self.push(lane, slot, Some(command), span);
            }
        }
    }

    /// Those of a queue that doesn't. `lane` is where it was served, as far as that is known: its export
    /// (`None` for discovery), and that export's lane if there is one.
    pub(super) fn orphans(
        &mut self,
        region: &Region,
        memory: &(impl OldBytes + ?Sized),
        queue: u32,
        lane: Option<(Option<ExportId>, Option<&ServedLane>)>,
    ) {
        let lanes = match lane {
            None => self.lanes.clone(),
            Some((_, Some(lane))) => vec![lane.clone()],
            // Discovery, or an export that is not served: its volume is then nobody's to write to.
            Some((_, None)) => return,
        };
        for (_, command) in commands(region, queue) {
            let command = match command {
                Ok(None) => continue,
                Ok(Some(command)) if !command.state.submitted_ever() => continue,
                Ok(Some(command)) => Some(command),
                Err(_) => None,
            };
            for lane in &lanes {
                let whole = || Touched {
                    ranges: std::iter::once(0..lane.volume.config.size_bytes).collect(),
                    write: true,
                };
                let touched = match &command {
                    Some(command) => touched(command, memory, lane).unwrap_or_else(whole),
                    None => whole(),
                };
                if !touched.write {
                    continue;
                }
                for bytes in touched.ranges {
                    let span = CarriedSpan {
                        volume: lane.volume.config.volume,
                        bytes,
                        write: true,
                        devices: command.as_ref().map_or(Devices::All, devices),
                        command: None,
                    };
                    self.push(lane, queue, command.as_ref(), span);
                }
            }
        }
    }
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
    let (ranges, write) = match io::decode(&command.sqe, NSID, &geometry, MDTS_BYTES).ok()? {
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
        IoCommand::Flush | IoCommand::Hint { .. } => (Vec::new(), false),
    };
    Some(Touched { ranges, write })
}
