//! Ranges that a former association, or a dead engine, may still have at a device: what is younger
//! and overlaps them waits until they have ended there.
//!
//! **Design.** One list per volume, in order of age; a volume is served by one reactor, so it needs no
//! lock. There are two sources. A successor is told what was in flight when its predecessor died
//! ([`Core::carry`]): such a command begins only when the fence of the devices that it may have reached
//! has passed, what is older and overlaps it has ended, and nothing that overlaps it waits for a fence; so
//! the order of writes is kept, and it itself never times out. And when a connection closes in life ([`Core::orphan`]), its commands that aren't at
//! a device end at once and never get there; its writes that are become spans until their slices have
//! ended, so that a host that reconnects, or another one, is not overtaken by them.
//!
//! A younger command that must wait does so for [`OWNER_WAIT_LIMIT_NS`] at most, then ends with Command
//! Interrupted, which the host may retry. Two reads never conflict. A flush waits for nobody: it covers
//! what was acknowledged, and nothing of this was. Whoever may go on is looked for at the end of a turn.
//! While the list is empty, all of this is one load and a branch.
//!
//! A successor that dies before the fence hands on what its commands' records say. What is waited for
//! without a record is noted for the whole reactor ([`Core::leave_spans`]): then the next one has
//! everything wait for the fence.
//!
//! **Not here:** which commands are carried (the take-over decides), and the fence itself (the control
//! thread waits for it, and says so by [`Core::fenced`]).

use super::io::{CommandRef, IoOp, Stage, Token};
use super::{Core, OWNER_WAIT_LIMIT_NS, zero};
use crate::lane::LaneIndex;
use forebay_nvme::Status;
use forebay_xlate::boundary::region::{MAX_LANES, MAX_QUEUES};
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
    /// Those of the devices that are served, or expected ([`Core::expect`]), whose numbers modulo 8 are
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
    /// The command that will be started for it ([`super::NewIo::record`]). It has one span or, with
    /// several ranges, several in a row. `None`: nobody does it again; it ends with the fence.
    pub command: Option<CommandRef>,
}

/// Whose a span is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Of {
    /// A command's that is yet to be started.
    Command(CommandRef),
    /// That of a command in the slab.
    Io(u32),
    /// Nobody's any more: it ends with the fence.
    Nobody,
}

#[derive(Debug)]
pub(super) struct Span {
    pub(super) bytes: Range<u64>,
    pub(super) write: bool,
    pub(super) devices: Devices,
    pub(super) of: Of,
    /// The machine whose memory it may still read or write until its fence.
    pub(super) machine: Option<LaneIndex>,
    /// Set by [`Carried::push`]; rising.
    pub(super) number: u64,
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
#[derive(Debug)]
pub(super) struct Carried {
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
    /// Not served yet, but they will be before their fence.
    expected: [bool; 256],
}

impl Carried {
    pub(super) fn new() -> Self {
        Self {
            busy: false,
            volumes: BTreeMap::new(),
            next_number: 0,
            look: false,
            closed: vec![false; MAX_QUEUES].into(),
            left: vec![false; MAX_LANES].into(),
            any_closed: false,
            fenced: [false; 256],
            expected: [false; 256],
        }
    }

    /// Whether there is anything that a command could have to wait for.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.busy
    }

    /// Whether a dead engine had begun this command.
    #[cold]
    pub(super) fn is_carried(&self, record: CommandRef) -> bool {
        let mut spans = self.volumes.values().flat_map(|v| &v.spans);
        spans.any(|span| span.of == Of::Command(record))
    }

    /// Whether those that wait must be looked at.
    pub(super) fn must_turn(&self) -> bool {
        self.look || self.any_closed
    }

    /// Whether nothing of an earlier engine is at this device.
    pub(super) fn is_fenced(&self, device: DeviceIndex) -> bool {
        self.fenced[usize::from(device.0)]
    }

    /// Somebody compares, which is looked at where what is carried is.
    pub(super) fn compares(&mut self) {
        self.busy = true;
    }

    /// The number of the span that is made next.
    pub(super) fn next_number(&self) -> u64 {
        self.next_number
    }

    /// Whether a volume has any span that was made before this one.
    pub(super) fn has(&self, volume: VolumeId, before: u64) -> bool {
        let of_volume = self.volumes.get(&volume);
        of_volume.is_some_and(|v| v.spans.iter().any(|span| span.number < before))
    }

    pub(super) fn push(&mut self, volume: VolumeId, mut span: Span) {
        span.number = self.next_number;
        self.next_number += 1;
        self.busy = true;
        self.volumes.entry(volume).or_default().spans.push(span);
    }

    /// A command in the slab has ended, but its spans stay until [`Carried::answered`].
    pub(super) fn hold(&mut self, volume: VolumeId, io: u32, record: CommandRef) {
        let of_volume = self.volumes.get_mut(&volume);
        for span in of_volume.into_iter().flat_map(|v| &mut v.spans) {
            if span.of == Of::Io(io) {
                span.of = Of::Command(record);
            }
        }
    }

    /// Nobody does a command again.
    pub(super) fn answered(&mut self, record: CommandRef) {
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
}

pub(super) fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Core {
    /// Takes over what a dead engine had in flight, the oldest first: before any of its commands, or
    /// any new one, is started, and after every device that is served before its fence, or expected to be.
    pub fn carry(&mut self, carried: &[CarriedSpan]) {
        self.carry_for(None, carried);
    }

    /// The same of a machine: what is at devices may still touch its memory ([`Core::may_touch_memory_of`]).
    pub fn carry_machine(&mut self, lane: LaneIndex, carried: &[CarriedSpan]) {
        self.carry_for(Some(lane), carried);
    }

    /// Takes over one command that a machine had in hand when its engine died, as a successor finds it recorded: the
    /// oldest first, all of them before any is started. `again`: it will be started with this name
    /// ([`Core::start_machine`]) or the lane orphaned; otherwise nobody does it again, and it is only waited for.
    /// `ranges` are a Deallocate's, if they are known for certain: they lie in memory that its machine may have changed.
    pub fn carry_command(
        &mut self,
        lane: LaneIndex,
        op: &IoOp,
        ranges: Option<&[u8]>,
        command: CommandRef,
        again: bool,
    ) {
        let Some((volume, block_bytes)) = self
            .lane(lane)
            .map(|l| (l.volume.id(), u64::from(l.volume.config.block_bytes)))
        else {
            return;
        };
        let span = |offset_bytes: u64, len_bytes: u64| CarriedSpan {
            volume,
            bytes: offset_bytes..offset_bytes.saturating_add(len_bytes),
            write: op.writes(),
            devices: Devices::ALL,
            command: again.then_some(command),
        };
        match (*op, ranges) {
            (IoOp::Flush, _) => {}
            (IoOp::Deallocate { ranges: count }, Some(ranges)) => {
                let ranges = ranges.chunks_exact(16).take(usize::from(count));
                for (offset, len) in ranges.filter_map(|r| zero::range_of(r, block_bytes)) {
                    self.carry_machine(lane, &[span(offset, len)]);
                }
            }
            (IoOp::Deallocate { .. }, None) => self.carry_machine(lane, &[span(0, u64::MAX)]),
            _ => self.carry_machine(lane, &[span(op.offset_bytes(), op.len_bytes())]),
        }
    }

    /// Whether a dead engine may still have something at a device that reads or writes a machine's memory. Until it
    /// hasn't, no memory is given back, and no reset is answered.
    pub fn may_touch_memory_of(&self, lane: LaneIndex) -> bool {
        let mut spans = self.carried.volumes.values().flat_map(|v| &v.spans);
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
            self.carried.push(new.volume, span);
            if nobodys {
                self.leave_spans();
            }
        }
    }

    /// A command's record is about to be freed, or there is none, though what it may have at a device is
    /// waited for.
    pub fn leave_spans(&self) {
        if self.carried.any() && self.carried.is_fencing() {
            self.record().orphans.store(1, Relaxed);
            // Before the record is freed.
            compiler_fence(SeqCst);
        }
    }

    /// Nothing of an earlier engine is at this device any more.
    pub fn fenced(&mut self, device: DeviceIndex) {
        self.carried.fenced[usize::from(device.0)] = true;
        self.jobs.look_again();
        self.fences_changed();
    }

    /// A device will be served before its fence, when it is open; or it won't after all. Before
    /// [`Core::carry`].
    pub fn expect(&mut self, device: DeviceIndex, expected: bool) {
        self.carried.expected[usize::from(device.0)] = expected;
        self.fences_changed();
    }

    fn fences_changed(&mut self) {
        let mut volumes = std::mem::take(&mut self.carried.volumes);
        for of_volume in volumes.values_mut() {
            of_volume.spans.retain_mut(|span| {
                span.devices = self.still_to_pass(span.devices);
                span.devices != Devices::None || span.of != Of::Nobody
            });
            of_volume.freed = true;
        }
        self.carried.look |= !volumes.is_empty();
        self.carried.volumes = volumes;
        if !self.carried.is_fencing() {
            self.record().orphans.store(0, Relaxed);
        }
    }

    /// What is left of these when the fences that passed are taken away.
    fn still_to_pass(&self, devices: Devices) -> Devices {
        let fenced = &self.carried.fenced;
        let passed = match devices {
            Devices::None => true,
            Devices::One(device) => fenced[usize::from(device.0)],
            Devices::Among(bits) => {
                let mut each = self.devices.iter().zip(&self.carried.expected).zip(fenced);
                let mut others = (0..u8::BITS).cycle().map(|number| bits >> number & 1 == 0);
                each.all(|((device, expected), fenced)| {
                    let other = others.next().is_some_and(|other| other);
                    other || *fenced || device.is_none() && !expected
                })
            }
        };
        if passed { Devices::None } else { devices }
    }

    /// Whether anything is carried, or left by connections that closed.
    pub fn carries(&self) -> bool {
        self.carried.any()
    }

    /// The connection of a queue is closed. Before the next command begins, and in this turn, what it
    /// has in the core ends, or is waited for by what overlaps it.
    pub fn orphan(&mut self, queue: u32) {
        self.leave_spans();
        if let Some(closed) = self.carried.closed.get_mut(queue as usize) {
            *closed = true;
            self.carried.any_closed = true;
            self.carried.busy = true;
        }
    }

    /// The same of a lane's machine, which left or was reset: of all its commands.
    pub fn orphan_machine(&mut self, lane: LaneIndex) {
        self.leave_spans();
        if let Some(left) = self.carried.left.get_mut(lane.0 as usize) {
            *left = true;
            self.carried.any_closed = true;
            self.carried.busy = true;
        }
    }

    #[cold]
    pub(super) fn settle_orphans(&mut self) {
        if !std::mem::take(&mut self.carried.any_closed) {
            return;
        }
        let mut queues = std::mem::take(&mut self.carried.closed);
        let mut lanes = std::mem::take(&mut self.carried.left);
        let closed = |command: CommandRef| match (command.queue(), command.machine_lane()) {
            (Some(queue), _) => queues.get(queue as usize).is_some_and(|closed| *closed),
            (None, lane) => lane.is_some_and(|lane| lanes.get(lane.0 as usize) == Some(&true)),
        };
        for io in &mut self.ios {
            if io.stage != Stage::Free && closed(io.record) {
                // Nothing more of it goes to a device; what waits, waits no longer.
                io.deadline_ns = 0;
                if io.status == Status::SUCCESS {
                    io.status = Status::COMMAND_INTERRUPTED;
                }
            }
        }
        self.end_late();
        let known: Vec<VolumeId> = self.carried.volumes.keys().copied().collect();
        for volume in known {
            let gone = |of| matches!(of, Of::Command(command) if closed(command));
            self.carried.ended(volume, gone);
        }
        for index in 0..self.ios.len() as u32 {
            let io = &self.ios[index as usize];
            let left = io.slices > 0 || io.stage == Stage::Releasing;
            if !left || !closed(io.record) || !io.op.writes() {
                continue;
            }
            let Some(volume) = self.volume_of(io) else {
                continue;
            };
            let mut ranges = Vec::new();
            self.each_range(index as usize, |range| ranges.push(range));
            // One that was carried has its spans already; a second one does no harm.
            for bytes in ranges {
                let span = Span {
                    bytes,
                    write: true,
                    devices: Devices::None,
                    of: Of::Io(index),
                    machine: None,
                    number: 0,
                };
                self.carried.push(volume, span);
            }
        }
        queues.fill(false);
        lanes.fill(false);
        self.carried.closed = queues;
        self.carried.left = lanes;
    }

    /// The bytes of its volume that a command concerns.
    pub(super) fn each_range(&self, index: usize, mut each: impl FnMut(Range<u64>)) {
        match self.ios[index].op {
            IoOp::Read {
                offset_bytes,
                len_bytes,
            }
            | IoOp::Compare {
                offset_bytes,
                len_bytes,
            }
            | IoOp::Write {
                offset_bytes,
                len_bytes,
                ..
            }
            | IoOp::CompareAndWrite {
                offset_bytes,
                len_bytes,
                ..
            } => each(offset_bytes..offset_bytes.saturating_add(u64::from(len_bytes))),
            IoOp::WriteZeroes {
                offset_bytes,
                len_bytes,
                ..
            } => each(offset_bytes..offset_bytes.saturating_add(len_bytes)),
            IoOp::Deallocate { ranges } => {
                let lane = self.lane(self.ios[index].lane);
                let block_bytes = lane.map_or(0, |l| u64::from(l.volume.config.block_bytes));
                for at in 0..ranges {
                    if let Some((offset_bytes, len_bytes)) =
                        self.deallocated(index, at, block_bytes)
                    {
                        each(offset_bytes..offset_bytes.saturating_add(len_bytes));
                    }
                }
            }
            IoOp::Flush => {}
        }
    }

    /// Begins a command while something is carried.
    #[cold]
    pub(super) fn begin_beside_carried(&mut self, token: Token) {
        self.blame(Some(token.index() as u32));
        let io = &self.ios[token.index()];
        let mut has_own = false;
        // A flush may be the first half of a command that is carried: its span stays.
        if io.op != IoOp::Flush
            && let Some(volume) = self.volume_of(io)
            && let Some(of_volume) = self.carried.volumes.get_mut(&volume)
        {
            let record = Of::Command(io.record);
            let own = of_volume.spans.iter_mut().filter(|s| s.of == record);
            for span in own {
                span.of = Of::Io(token.index() as u32);
                has_own = true;
            }
            if has_own {
                self.ios[token.index()].deadline_ns = u64::MAX;
                kill_point!("over.waiting");
            }
        }
        let op = &self.ios[token.index()].op;
        if !has_own && matches!(op, IoOp::CompareAndWrite { .. }) {
            self.exclude(token.index() as u32);
        }
        self.go_on(token);
    }

    /// Begins a command, or has it wait for what is older.
    fn go_on(&mut self, token: Token) {
        let io = &self.ios[token.index()];
        if io.status == Status::SUCCESS && self.must_wait(token.index()) {
            self.set_aside(token, Stage::CarriedWait);
            return;
        }
        let io = &mut self.ios[token.index()];
        if io.deadline_ns == u64::MAX {
            // Its time begins.
            io.deadline_ns = self.now_ns + OWNER_WAIT_LIMIT_NS;
        }
        self.dispatch(token);
    }

    fn must_wait(&self, index: usize) -> bool {
        let io = &self.ios[index];
        let of_volume = self
            .volume_of(io)
            .and_then(|volume| self.carried.volumes.get(&volume));
        let Some(of_volume) = of_volume else {
            return false;
        };
        let writes = self.ios[index].op.writes();
        let mut older = true;
        of_volume.spans.iter().any(|span| {
            let fencing = span.devices != Devices::None;
            if span.of == Of::Io(index as u32) {
                // What comes after its own is younger.
                older = false;
                return fencing;
            }
            // A younger one's predecessor may land at any time, until its fence has passed.
            let mut overlaps = false;
            if (older || fencing) && (span.write || writes) {
                self.each_range(index, |range| overlaps |= overlap(&range, &span.bytes));
            }
            overlaps
        })
    }

    /// A command ends.
    #[cold]
    pub(super) fn carried_ended(&mut self, index: u32) {
        let io = &self.ios[index as usize];
        let Some(volume) = self.volume_of(io) else {
            return;
        };
        // A flush that failed may have been the first half of a command: there is no second one.
        let (record, failed) = (io.record, io.status != Status::SUCCESS);
        let any = self.carried.ended(volume, |of| {
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
    pub(crate) fn carried_refused(&mut self, record: CommandRef) {
        self.leave_spans();
        self.carried.answered(record);
    }

    /// The end of a turn: whoever has nothing older before it any more goes on.
    #[cold]
    pub(super) fn advance_carried(&mut self) {
        self.settle_orphans();
        if std::mem::take(&mut self.carried.look) {
            for of_volume in self.carried.volumes.values_mut() {
                of_volume.looking = std::mem::take(&mut of_volume.freed);
            }
            self.take_up(
                |core, io| {
                    let of_volume = core
                        .volume_of(io)
                        .and_then(|volume| core.carried.volumes.get(&volume));
                    io.stage == Stage::CarriedWait && of_volume.is_none_or(|v| v.looking)
                },
                Self::go_on,
            );
            self.carried
                .volumes
                .retain(|_, of_volume| of_volume.freed || !of_volume.spans.is_empty());
        }
        self.carried.busy =
            !self.carried.volumes.is_empty() || self.carried.any_closed || self.fused.any();
    }
}
