//! Ranges that a former association, or a dead engine, may still have at a device: what is younger
//! and overlaps them waits until they have ended there.
//!
//! **Design.** One list per volume, in order of age; a volume is served by one reactor, so it needs no
//! lock. There are two sources. A successor is told what was in flight when its predecessor died
//! ([`Carried::carry`]): such a command begins only when the fence of the devices that it may have reached
//! has passed, what is older and overlaps it has ended, and nothing that overlaps it waits for a fence; so
//! the order of writes is kept, and it itself never times out. And when a connection closes in life ([`Carried::orphan`]), its commands that aren't at
//! a device end at once and never get there; its writes that are become spans until their slices have
//! ended, so that a host that reconnects, or another one, is not overtaken by them.
//!
//! A younger command that must wait does so for [`crate::io::clock::OWNER_WAIT_LIMIT_NS`] at most, then ends with Command
//! Interrupted, which the host may retry. Two reads never conflict. A flush waits for nobody: it covers
//! what was acknowledged, and nothing of this was. Whoever may go on is looked for at the end of a turn.
//! While the list is empty, all of this is one load and a branch.
//!
//! A successor that dies before the fence hands on what its commands' records say. What is waited for
//! without a record is noted for the whole reactor ([`Carried::leave_spans`]): then the next one has
//! everything wait for the fence.
//!
//! **Not here:** which commands are carried (the take-over decides), and the fence itself (the control
//! thread waits for it, and says so by [`crate::core::Core::fenced`]).

use crate::io::command::{CommandRef, Io, IoOp, Stage};
use crate::io::lanes::Lanes;
use crate::io::slab::Slab;
use crate::lane::LaneIndex;
use forebay_nvme::Status;
use forebay_xlate::boundary::region::{MAX_LANES, MAX_QUEUES, ReactorRecord};
use forebay_xlate::{DeviceIndex, VolumeId, kill_point};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::compiler_fence;

/// The devices whose fence must have passed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Devices {
    /// None: it never got to a device.
    None,
    /// One.
    One(DeviceIndex),
    /// Those of the devices that are served, or expected ([`Carried::expect`]), whose numbers modulo 8 are
    /// among these bits.
    Among(u8),
}

impl Devices {
    /// Every device that is served, or expected.
    pub const ALL: Self = Self::Among(u8::MAX);
}

/// What a dead engine may still have at devices, or had yet to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CarriedSpan {
    /// Whose bytes.
    pub volume: VolumeId,
    /// Which; the whole volume if it isn't known.
    pub bytes: Range<u64>,
    /// Whether they may change.
    pub write: bool,
    /// Where.
    pub devices: Devices,
    /// The command that will be started for it ([`crate::core::NewIo::record`]). It has one span or, with
    /// several ranges, several in a row. `None`: nobody does it again; it ends with the fence.
    pub command: Option<CommandRef>,
}

/// Whose a span is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Of {
    /// A command's that is yet to be started.
    Command(CommandRef),
    /// That of a command in the slab.
    Io(u32),
    /// Nobody's any more: it ends with the fence.
    Nobody,
}

#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) bytes: Range<u64>,
    pub(crate) write: bool,
    pub(crate) devices: Devices,
    pub(crate) of: Of,
    /// The machine whose memory it may still read or write until its fence.
    pub(crate) machine: Option<LaneIndex>,
    /// Set by [`Carried::push`]; rising.
    pub(crate) number: u64,
}

#[derive(Debug, Default)]
struct OfVolume {
    /// The oldest first.
    spans: Vec<Span>,
    /// Something ended since those that wait were looked at.
    freed: bool,
    /// Those that wait are being looked at.
    looking: bool,
}

/// See the module's text.
pub struct Carried {
    /// Whether there is anything else here.
    busy: bool,
    volumes: BTreeMap<VolumeId, OfVolume>,
    next_number: u64,
    /// Something ended since those that wait were looked at.
    look: bool,
    /// The queues whose connection closed in this turn, the lanes whose machine left, and whether there are any.
    closed: Box<[bool]>,
    left: Box<[bool]>,
    any_closed: bool,
    fenced: [bool; 256],
    served: [bool; 256],
    /// Not served yet, but they will be before their fence.
    expected: [bool; 256],
    record: &'static ReactorRecord,
}

impl Carried {
    pub(crate) fn new(record: &'static ReactorRecord) -> Self {
        Self {
            busy: false,
            volumes: BTreeMap::new(),
            next_number: 0,
            look: false,
            closed: vec![false; MAX_QUEUES].into(),
            left: vec![false; MAX_LANES].into(),
            any_closed: false,
            fenced: [false; 256],
            served: [false; 256],
            expected: [false; 256],
            record,
        }
    }

    /// Whether anything is carried, or left by connections that closed, that a command could have to wait for.
    #[inline]
    pub fn any(&self) -> bool {
        self.busy
    }

    /// Whether a dead engine had begun this command.
    #[cold]
    pub(crate) fn is_carried(&self, record: CommandRef) -> bool {
        let mut spans = self.volumes.values().flat_map(|v| &v.spans);
        spans.any(|span| span.of == Of::Command(record))
    }

    /// Whether those that wait must be looked at.
    pub(crate) fn must_turn(&self) -> bool {
        self.look || self.any_closed
    }

    /// Whether nothing of an earlier engine is at this device.
    pub(crate) fn is_fenced(&self, device: DeviceIndex) -> bool {
        self.fenced[usize::from(device.0)]
    }

    /// Somebody compares, which is looked at where what is carried is.
    pub(crate) fn compares(&mut self) {
        self.busy = true;
    }

    /// The number of the span that is made next.
    pub(crate) fn next_number(&self) -> u64 {
        self.next_number
    }

    /// Whether a volume has any span that was made before this one.
    pub(crate) fn has(&self, volume: VolumeId, before: u64) -> bool {
        let of_volume = self.volumes.get(&volume);
        of_volume.is_some_and(|v| v.spans.iter().any(|span| span.number < before))
    }

    pub(crate) fn push(&mut self, volume: VolumeId, mut span: Span) {
        span.number = self.next_number;
        self.next_number += 1;
        self.busy = true;
        self.volumes.entry(volume).or_default().spans.push(span);
    }

    /// A command in the slab has ended, but its spans stay until [`Carried::answered`].
    pub(crate) fn hold(&mut self, volume: VolumeId, io: u32, record: CommandRef) {
        let of_volume = self.volumes.get_mut(&volume);
        for span in of_volume.into_iter().flat_map(|v| &mut v.spans) {
            if span.of == Of::Io(io) {
                span.of = Of::Command(record);
            }
        }
    }

    /// Nobody does a command again.
    pub(crate) fn answered(&mut self, record: CommandRef) {
        let known: Vec<VolumeId> = self.volumes.keys().copied().collect();
        for volume in known {
            self.ended(volume, |of| of == Of::Command(record));
        }
    }

    /// Whether any fence is waited for.
    fn is_fencing(&self) -> bool {
        let mut spans = self.volumes.values().flat_map(|v| &v.spans);
        spans.any(|span| span.devices != Devices::None)
    }

    /// Takes from a volume's spans those whose command has ended, or never will begin; true for any.
    fn ended(&mut self, volume: VolumeId, which: impl Fn(Of) -> bool) -> bool {
        let Some(of_volume) = self.volumes.get_mut(&volume) else {
            return false;
        };
        let mut any = false;
        of_volume.spans.retain_mut(|span| {
            if !which(span.of) {
                return true;
            }
            any = true;
            span.of = Of::Nobody;
            span.devices != Devices::None
        });
        of_volume.freed |= any;
        self.look |= any;
        any
    }

    /// Takes over what a dead engine had in flight, the oldest first: before any of its commands, or
    /// any new one, is started, and after every device that is served before its fence, or expected to be.
    pub fn carry(&mut self, carried: &[CarriedSpan]) {
        self.carry_for(None, carried);
    }

    /// The same of a machine: what is at devices may still touch its memory ([`Carried::may_touch_memory_of`]).
    pub fn carry_machine(&mut self, lane: LaneIndex, carried: &[CarriedSpan]) {
        self.carry_for(Some(lane), carried);
    }

    /// Whether a dead engine may still have something at a device that reads or writes a machine's memory. Until it
    /// hasn't, no memory is given back, and no reset is answered.
    pub fn may_touch_memory_of(&self, lane: LaneIndex) -> bool {
        let mut spans = self.volumes.values().flat_map(|v| &v.spans);
        // What a successor knows nothing of but that it is waited for may be anybody's.
        let may_be = |span: &Span| match span.machine {
            Some(machine) => machine == lane,
            None => span.of == Of::Nobody,
        };
        spans.any(|span| may_be(span) && span.devices != Devices::None)
    }

    fn carry_for(&mut self, machine: Option<LaneIndex>, carried: &[CarriedSpan]) {
        for new in carried {
            let span = Span {
                machine,
                bytes: new.bytes.clone(),
                write: new.write,
                devices: self.still_to_pass(new.devices),
                of: new.command.map_or(Of::Nobody, Of::Command),
                number: 0,
            };
            if span.of == Of::Nobody && span.devices == Devices::None {
                continue;
            }
            let nobodys = span.of == Of::Nobody;
            self.push(new.volume, span);
            if nobodys {
                self.leave_spans();
            }
        }
    }

    /// A command's record is about to be freed, or there is none, though what it may have at a device is
    /// waited for.
    pub fn leave_spans(&self) {
        if self.any() && self.is_fencing() {
            self.record.orphans.store(1, Relaxed);
            // Before the record is freed.
            compiler_fence(SeqCst);
        }
    }

    /// A device is served.
    pub(crate) fn serve(&mut self, device: u8) {
        self.served[usize::from(device)] = true;
    }

    /// Nothing of an earlier engine is at this device any more.
    pub(crate) fn fence(&mut self, device: DeviceIndex) {
        self.fenced[usize::from(device.0)] = true;
        self.fences_changed();
    }

    /// A device will be served before its fence, when it is open; or it won't after all. Before
    /// [`Carried::carry`].
    pub fn expect(&mut self, device: DeviceIndex, expected: bool) {
        self.expected[usize::from(device.0)] = expected;
        self.fences_changed();
    }

    fn fences_changed(&mut self) {
        let mut volumes = std::mem::take(&mut self.volumes);
        for of_volume in volumes.values_mut() {
            of_volume.spans.retain_mut(|span| {
                span.devices = self.still_to_pass(span.devices);
                span.devices != Devices::None || span.of != Of::Nobody
            });
            of_volume.freed = true;
        }
        self.look |= !volumes.is_empty();
        self.volumes = volumes;
        if !self.is_fencing() {
            self.record.orphans.store(0, Relaxed);
        }
    }

    /// What is left of these when the fences that passed are taken away.
    fn still_to_pass(&self, devices: Devices) -> Devices {
        let fenced = &self.fenced;
        let passed = match devices {
            Devices::None => true,
            Devices::One(device) => fenced[usize::from(device.0)],
            Devices::Among(bits) => {
                let mut each = self.served.iter().zip(&self.expected).zip(fenced);
                let mut others = (0..u8::BITS).cycle().map(|number| bits >> number & 1 == 0);
                each.all(|((served, expected), fenced)| {
                    let other = others.next().is_some_and(|other| other);
                    other || *fenced || !served && !expected
                })
            }
        };
        if passed { Devices::None } else { devices }
    }

    /// The connection of a queue is closed. Before the next command begins, and in this turn, what it
    /// has in the core ends, or is waited for by what overlaps it.
    pub fn orphan(&mut self, queue: u32) {
        self.leave_spans();
        if let Some(closed) = self.closed.get_mut(queue as usize) {
            *closed = true;
            self.any_closed = true;
            self.busy = true;
        }
    }

    /// The same of a lane's machine, which left or was reset: of all its commands.
    pub fn orphan_machine(&mut self, lane: LaneIndex) {
        self.leave_spans();
        if let Some(left) = self.left.get_mut(lane.0 as usize) {
            *left = true;
            self.any_closed = true;
            self.busy = true;
        }
    }

    /// What closed since this was asked last.
    pub(crate) fn take_closed(&mut self) -> Option<Closed> {
        std::mem::take(&mut self.any_closed).then(|| Closed {
            queues: std::mem::take(&mut self.closed),
            lanes: std::mem::take(&mut self.left),
        })
    }

    /// What overlaps the writes that closed connections and machines have left at devices waits for them from now on.
    pub(crate) fn leave(&mut self, mut closed: Closed, slab: &Slab, lanes: &Lanes) {
        let known: Vec<VolumeId> = self.volumes.keys().copied().collect();
        for volume in known {
            self.ended(
                volume,
                |of| matches!(of, Of::Command(command) if closed.has(command)),
            );
        }
        for (index, io) in (0..).zip(slab.iter()) {
            let left = io.slices > 0 || io.stage == Stage::Releasing;
            if !left || !closed.has(io.record) || !io.op.writes() {
                continue;
            }
            let Some(volume) = lanes.volume_of(io) else {
                continue;
            };
            // One that was carried has its spans already; a second one does no harm.
            each_range(io, lanes, |bytes| {
                self.push(volume, Span::of_command(index, bytes));
            });
        }
        closed.queues.fill(false);
        closed.lanes.fill(false);
        self.closed = closed.queues;
        self.left = closed.lanes;
    }

    /// A command begins: what a dead engine had of it is its own from now on. Whether that was anything.
    pub(crate) fn adopt(&mut self, index: u32, io: &Io, lanes: &Lanes) -> bool {
        // A flush may be the first half of a command that is carried: its span stays.
        if io.op == IoOp::Flush {
            return false;
        }
        let volume = lanes.volume_of(io);
        let of_volume = volume.and_then(|volume| self.volumes.get_mut(&volume));
        let mut has_own = false;
        for span in of_volume.into_iter().flat_map(|v| &mut v.spans) {
            if span.of == Of::Command(io.record) {
                span.of = Of::Io(index);
                has_own = true;
            }
        }
        has_own
    }

    /// A compare-and-write begins: it waits for what is in hand and overlaps it, and what is younger waits for it.
    pub(crate) fn exclude(&mut self, index: u32, slab: &Slab, lanes: &Lanes) {
        let io = &slab[index as usize];
        let Some(volume) = lanes.volume_of(io) else {
            return;
        };
        let mut own = 0..0;
        each_range(io, lanes, |range| own = range);
        let mut left = slab.busy();
        for (other, io) in (0..).zip(slab.iter()) {
            if left == 0 {
                break;
            }
            if io.stage == Stage::Free {
                continue;
            }
            left -= 1;
            // What waits for its budget has yet to begin, and comes after this one then.
            let waits = io.stage == Stage::Throttled;
            if other == index || waits || !io.op.writes() || lanes.volume_of(io) != Some(volume) {
                continue;
            }
            each_range(io, lanes, |range| {
                if overlap(&range, &own) {
                    self.push(volume, Span::of_command(other, range));
                }
            });
        }
        self.push(volume, Span::of_command(index, own));
    }

    /// Whether a command must wait for something older.
    pub(crate) fn must_wait(&self, index: u32, io: &Io, lanes: &Lanes) -> bool {
        let volume = lanes.volume_of(io);
        let of_volume = volume.and_then(|volume| self.volumes.get(&volume));
        let Some(of_volume) = of_volume else {
            return false;
        };
        let writes = io.op.writes();
        let mut older = true;
        of_volume.spans.iter().any(|span| {
            let fencing = span.devices != Devices::None;
            if span.of == Of::Io(index) {
                // What comes after its own is younger.
                older = false;
                return fencing;
            }
            // A younger one's predecessor may land at any time, until its fence has passed.
            let mut overlaps = false;
            if (older || fencing) && (span.write || writes) {
                each_range(io, lanes, |range| overlaps |= overlap(&range, &span.bytes));
            }
            overlaps
        })
    }

    /// A command ends.
    #[cold]
    pub(crate) fn command_ended(&mut self, index: u32, io: &Io, lanes: &Lanes) {
        let Some(volume) = lanes.volume_of(io) else {
            return;
        };
        // A flush that failed may have been the first half of a command: there is no second one.
        let (record, failed) = (io.record, io.status != Status::SUCCESS);
        let any = self.ended(volume, |of| {
            of == Of::Io(index) || failed && of == Of::Command(record)
        });
        if any && failed {
            self.leave_spans();
        }
        if any {
            kill_point!("over.reexecuted");
        }
    }

    /// A command was refused before it began, and its record is about to be freed.
    #[cold]
    pub(crate) fn refused(&mut self, record: CommandRef) {
        self.leave_spans();
        self.answered(record);
    }

    /// The answers to a compare-and-write are published, or never will be: what waited for it goes on.
    pub fn pair_answered(&mut self, record: CommandRef) {
        if self.any() {
            self.answered(record);
        }
    }

    /// Whether those that wait are to be looked at; then those of volumes where something ended ([`Carried::may_go_on`]).
    pub(crate) fn begin_look(&mut self) -> bool {
        let look = std::mem::take(&mut self.look);
        if look {
            for of_volume in self.volumes.values_mut() {
                of_volume.looking = std::mem::take(&mut of_volume.freed);
            }
        }
        look
    }

    /// Whether a command that waits is to be looked at.
    pub(crate) fn may_go_on(&self, io: &Io, lanes: &Lanes) -> bool {
        let volume = lanes.volume_of(io);
        let of_volume = volume.and_then(|volume| self.volumes.get(&volume));
        io.stage == Stage::CarriedWait && of_volume.is_none_or(|v| v.looking)
    }

    /// A turn ends; `compares`: somebody compares, which is looked at where what is carried is.
    pub(crate) fn end_turn(&mut self, compares: bool) {
        self.busy = !self.volumes.is_empty() || self.any_closed || compares;
    }

    pub(crate) fn end_look(&mut self) {
        self.volumes
            .retain(|_, of_volume| of_volume.freed || !of_volume.spans.is_empty());
    }
}

/// The queues whose connection closed, and the lanes whose machine left.
pub(crate) struct Closed {
    queues: Box<[bool]>,
    lanes: Box<[bool]>,
}

impl Closed {
    pub(crate) fn has(&self, command: CommandRef) -> bool {
        match (command.queue(), command.machine_lane()) {
            (Some(queue), _) => (self.queues.get(queue as usize)).is_some_and(|closed| *closed),
            (None, lane) => lane.is_some_and(|l| self.lanes.get(l.0 as usize) == Some(&true)),
        }
    }
}

impl Span {
    /// What a command in the slab writes.
    fn of_command(index: u32, bytes: Range<u64>) -> Self {
        Self {
            bytes,
            write: true,
            devices: Devices::None,
            of: Of::Io(index),
            machine: None,
            number: 0,
        }
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The bytes of its volume that a command concerns.
fn each_range(io: &Io, lanes: &Lanes, mut each: impl FnMut(Range<u64>)) {
    match io.op {
        IoOp::Flush => {}
        IoOp::Deallocate { ranges } => {
            let lane = lanes.get(io.lane);
            let block_bytes = lane.map_or(0, |l| u64::from(l.volume.config.block_bytes));
            for at in 0..ranges {
                if let Some((offset_bytes, len_bytes)) = io.deallocated(at, block_bytes) {
                    each(offset_bytes..offset_bytes.saturating_add(len_bytes));
                }
            }
        }
        op => {
            let from = op.offset_bytes();
            each(from..from.saturating_add(op.len_bytes()));
        }
    }
}
