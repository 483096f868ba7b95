//! Byte ranges that a closed connection or a dead engine may still have at a device. Younger
//! overlapping commands wait until these operations have ended.
//!
//! **Design.** One list of spans per volume, oldest first, without lock, since one reactor serves a
//! volume. A recovered command ([`RecoveredIo::recover`]) begins when its devices' fences have passed,
//! older overlapping commands have ended, and no overlapping span waits for a fence. It never times
//! out. When a connection closes ([`RecoveredIo::orphan`]), its commands that are not at a device end
//! at once. Its writes at a device become spans until they end there.
//!
//! A younger command waits for at most [`crate::io::clock::OWNER_WAIT_LIMIT_NS`], then ends with
//! Command Interrupted, which the host may retry. Two reads never conflict. A flush never waits: it
//! covers only acknowledged writes. An empty list costs one load and a branch.
//!
//! Spans without a command record are noted for the whole reactor ([`RecoveredIo::mark_spans_for_successor`]); a
//! successor then makes every command wait for the fence. **Not here:** the choice of recovered
//! commands (the take-over), and the wait for the fence (the control thread).

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

/// Devices whose fence must have passed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FenceSet {
    /// None: the command never reached a device.
    None,
    /// One device.
    One(DeviceIndex),
    /// Served or expected ([`RecoveredIo::expect`]) devices: bit n stands for those whose number modulo
    /// 8 is n.
    Among(u8),
}

impl FenceSet {
    /// Every served or expected device.
    pub(crate) const ALL: Self = Self::Among(u8::MAX);
}

/// A dead engine's operation, perhaps still at devices or not yet begun.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RecoveredSpan {
    /// Volume.
    pub volume: VolumeId,
    /// Byte range; the whole volume if unknown.
    pub bytes: Range<u64>,
    /// Whether the operation may change these bytes.
    pub write: bool,
    /// Devices that it may have reached.
    pub devices: FenceSet,
    /// The command that will be started for it; with several ranges it has consecutive spans.
    /// `None`: it is not repeated and ends with the fence.
    pub command: Option<CommandRef>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Of {
    Command(CommandRef),
    Io(u32),
    /// The span ends with the fence.
    Nobody,
}

#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) bytes: Range<u64>,
    pub(crate) write: bool,
    pub(crate) devices: FenceSet,
    pub(crate) of: Of,
    /// The VM whose memory it may access until its fence.
    pub(crate) vm: Option<LaneIndex>,
    pub(crate) number: u64,
}

#[derive(Debug, Default)]
struct OfVolume {
    /// Oldest first.
    spans: Vec<Span>,
    /// A span ended since the last check.
    freed: bool,
    checking: bool,
}

pub(crate) struct RecoveredIo {
    busy: bool,
    volumes: BTreeMap<VolumeId, OfVolume>,
    next_number: u64,
    check: bool,
    /// Queues and lanes that closed in this turn.
    closed: Box<[bool]>,
    left: Box<[bool]>,
    any_closed: bool,
    fenced: [bool; 256],
    served: [bool; 256],
    /// Devices to be served before their fence.
    expected: [bool; 256],
    record: &'static ReactorRecord,
}

impl RecoveredIo {
    pub(crate) fn new(record: &'static ReactorRecord) -> Self {
        Self {
            busy: false,
            volumes: BTreeMap::new(),
            next_number: 0,
            check: false,
            closed: vec![false; MAX_QUEUES].into(),
            left: vec![false; MAX_LANES].into(),
            any_closed: false,
            fenced: [false; 256],
            served: [false; 256],
            expected: [false; 256],
            record,
        }
    }

    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.busy
    }

    #[cold]
    pub(crate) fn is_recovered(&self, record: CommandRef) -> bool {
        let mut spans = self.volumes.values().flat_map(|v| &v.spans);
        spans.any(|span| span.of == Of::Command(record))
    }

    pub(crate) fn must_turn(&self) -> bool {
        self.check || self.any_closed
    }

    pub(crate) fn is_fenced(&self, device: DeviceIndex) -> bool {
        self.fenced[usize::from(device.0)]
    }

    /// A compare is in progress; it uses the same checks.
    pub(crate) fn compares(&mut self) {
        self.busy = true;
    }

    pub(crate) fn next_number(&self) -> u64 {
        self.next_number
    }

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

    /// The command has ended, but its spans stay until [`RecoveredIo::answered`].
    pub(crate) fn hold(&mut self, volume: VolumeId, io: u32, record: CommandRef) {
        let of_volume = self.volumes.get_mut(&volume);
        for span in of_volume.into_iter().flat_map(|v| &mut v.spans) {
            if span.of == Of::Io(io) {
                span.of = Of::Command(record);
            }
        }
    }

    pub(crate) fn answered(&mut self, record: CommandRef) {
        let known: Vec<VolumeId> = self.volumes.keys().copied().collect();
        for volume in known {
            self.ended(volume, |of| of == Of::Command(record));
        }
    }

    fn is_fencing(&self) -> bool {
        let mut spans = self.volumes.values().flat_map(|v| &v.spans);
        spans.any(|span| span.devices != FenceSet::None)
    }

    /// Removes spans whose command ended or will never begin; true if any.
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
            span.devices != FenceSet::None
        });
        of_volume.freed |= any;
        self.check |= any;
        any
    }

    /// Takes over a dead engine's commands, oldest first. Call it before any command starts, and
    /// after devices served before their fence are served or expected.
    pub(crate) fn recover(&mut self, recovered: &[RecoveredSpan]) {
        self.recover_for(None, recovered);
    }

    pub(crate) fn recover_vm(&mut self, lane: LaneIndex, recovered: &[RecoveredSpan]) {
        self.recover_for(Some(lane), recovered);
    }

    /// Whether a dead engine may still access a VM's memory. Until then no memory is given back and
    /// no reset is answered.
    pub(crate) fn may_touch_memory_of(&self, lane: LaneIndex) -> bool {
        let mut spans = self.volumes.values().flat_map(|v| &v.spans);
        // A span without a known command may belong to any VM.
        let may_be = |span: &Span| match span.vm {
            Some(vm) => vm == lane,
            None => span.of == Of::Nobody,
        };
        spans.any(|span| may_be(span) && span.devices != FenceSet::None)
    }

    fn recover_for(&mut self, vm: Option<LaneIndex>, recovered: &[RecoveredSpan]) {
        for new in recovered {
            let span = Span {
                vm,
                bytes: new.bytes.clone(),
                write: new.write,
                devices: self.still_to_pass(new.devices),
                of: new.command.map_or(Of::Nobody, Of::Command),
                number: 0,
            };
            if span.of == Of::Nobody && span.devices == FenceSet::None {
                continue;
            }
            let nobodys = span.of == Of::Nobody;
            self.push(new.volume, span);
            if nobodys {
                self.mark_spans_for_successor();
            }
        }
    }

    /// Call it when a command's spans still wait for a fence, but it has no record or its record is
    /// about to be freed.
    pub(crate) fn mark_spans_for_successor(&self) {
        if self.any() && self.is_fencing() {
            self.record.orphans.store(1, Relaxed);
            // The store must precede the freeing of the record.
            compiler_fence(SeqCst);
        }
    }

    pub(crate) fn serve(&mut self, device: u8) {
        self.served[usize::from(device)] = true;
    }

    pub(crate) fn fence(&mut self, device: DeviceIndex) {
        self.fenced[usize::from(device.0)] = true;
        self.fences_changed();
    }

    /// Sets whether a device will be served before its fence. Call it before [`RecoveredIo::recover`].
    pub(crate) fn expect(&mut self, device: DeviceIndex, expected: bool) {
        self.expected[usize::from(device.0)] = expected;
        self.fences_changed();
    }

    fn fences_changed(&mut self) {
        let mut volumes = std::mem::take(&mut self.volumes);
        for of_volume in volumes.values_mut() {
            of_volume.spans.retain_mut(|span| {
                span.devices = self.still_to_pass(span.devices);
                span.devices != FenceSet::None || span.of != Of::Nobody
            });
            of_volume.freed = true;
        }
        self.check |= !volumes.is_empty();
        self.volumes = volumes;
        if !self.is_fencing() {
            self.record.orphans.store(0, Relaxed);
        }
    }

    /// Removes the devices whose fence has passed.
    fn still_to_pass(&self, devices: FenceSet) -> FenceSet {
        let fenced = &self.fenced;
        let passed = match devices {
            FenceSet::None => true,
            FenceSet::One(device) => fenced[usize::from(device.0)],
            FenceSet::Among(bits) => {
                let mut each = self.served.iter().zip(&self.expected).zip(fenced);
                let mut others = (0..u8::BITS).cycle().map(|number| bits >> number & 1 == 0);
                each.all(|((served, expected), fenced)| {
                    let other = others.next().is_some_and(|other| other);
                    other || *fenced || !served && !expected
                })
            }
        };
        if passed { FenceSet::None } else { devices }
    }

    /// A queue's connection closed: its commands end or become spans in this turn, before the next
    /// command begins.
    pub(crate) fn orphan(&mut self, queue: u32) {
        self.mark_spans_for_successor();
        if let Some(closed) = self.closed.get_mut(queue as usize) {
            *closed = true;
            self.any_closed = true;
            self.busy = true;
        }
    }

    /// Like [`RecoveredIo::orphan`], for all commands of a lane whose VM detached or was reset.
    pub(crate) fn orphan_vm(&mut self, lane: LaneIndex) {
        self.mark_spans_for_successor();
        if let Some(left) = self.left.get_mut(lane.0 as usize) {
            *left = true;
            self.any_closed = true;
            self.busy = true;
        }
    }

    pub(crate) fn take_closed(&mut self) -> Option<Closed> {
        std::mem::take(&mut self.any_closed).then(|| Closed {
            queues: std::mem::take(&mut self.closed),
            lanes: std::mem::take(&mut self.left),
        })
    }

    /// Makes spans of writes that closed connections and VMs have at devices.
    pub(crate) fn add_spans_of_closed(&mut self, mut closed: Closed, slab: &Slab, lanes: &Lanes) {
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
            // A recovered command has spans already; a second span does no harm.
            each_range(io, lanes, |bytes| {
                self.push(volume, Span::of_command(index, bytes));
            });
        }
        closed.queues.fill(false);
        closed.lanes.fill(false);
        self.closed = closed.queues;
        self.left = closed.lanes;
    }

    /// A command begins with its recovered spans; true if there were any.
    pub(crate) fn assign_spans(&mut self, index: u32, io: &Io, lanes: &Lanes) -> bool {
        // A flush may be the first half of a recovered command, so its span stays.
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

    /// A compare-and-write waits for overlapping commands in flight, and younger ones wait for it.
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
            // A throttled command has not begun, so it comes after this one.
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

    pub(crate) fn must_wait(&self, index: u32, io: &Io, lanes: &Lanes) -> bool {
        let volume = lanes.volume_of(io);
        let of_volume = volume.and_then(|volume| self.volumes.get(&volume));
        let Some(of_volume) = of_volume else {
            return false;
        };
        let writes = io.op.writes();
        let mut older = true;
        of_volume.spans.iter().any(|span| {
            let fencing = span.devices != FenceSet::None;
            if span.of == Of::Io(index) {
                // The spans after its own are younger.
                older = false;
                return fencing;
            }
            // A recovered operation behind a younger span may land at any time until its fence.
            let mut overlaps = false;
            if (older || fencing) && (span.write || writes) {
                each_range(io, lanes, |range| overlaps |= overlap(&range, &span.bytes));
            }
            overlaps
        })
    }

    #[cold]
    pub(crate) fn command_ended(&mut self, index: u32, io: &Io, lanes: &Lanes) {
        let Some(volume) = lanes.volume_of(io) else {
            return;
        };
        // If the first half, a flush, fails, the second never begins.
        let (record, failed) = (io.record, io.status != Status::SUCCESS);
        let any = self.ended(volume, |of| {
            of == Of::Io(index) || failed && of == Of::Command(record)
        });
        if any && failed {
            self.mark_spans_for_successor();
        }
        if any {
            kill_point!("over.reexecuted");
        }
    }

    #[cold]
    pub(crate) fn refused(&mut self, record: CommandRef) {
        self.mark_spans_for_successor();
        self.answered(record);
    }

    /// The answers are published, or never will be: commands that wait for the pair continue.
    pub(crate) fn pair_answered(&mut self, record: CommandRef) {
        if self.any() {
            self.answered(record);
        }
    }

    /// Whether waiting commands must be checked; [`RecoveredIo::may_go_on`] then selects volumes where
    /// a span ended.
    pub(crate) fn begin_check(&mut self) -> bool {
        let check = std::mem::take(&mut self.check);
        if check {
            for of_volume in self.volumes.values_mut() {
                of_volume.checking = std::mem::take(&mut of_volume.freed);
            }
        }
        check
    }

    pub(crate) fn may_go_on(&self, io: &Io, lanes: &Lanes) -> bool {
        let volume = lanes.volume_of(io);
        let of_volume = volume.and_then(|volume| self.volumes.get(&volume));
        io.stage == Stage::RecoveryWait && of_volume.is_none_or(|v| v.checking)
    }

    pub(crate) fn end_turn(&mut self, compares: bool) {
        self.busy = !self.volumes.is_empty() || self.any_closed || compares;
    }

    pub(crate) fn end_check(&mut self) {
        self.volumes
            .retain(|_, of_volume| of_volume.freed || !of_volume.spans.is_empty());
    }
}

pub(crate) struct Closed {
    queues: Box<[bool]>,
    lanes: Box<[bool]>,
}

impl Closed {
    pub(crate) fn has(&self, command: CommandRef) -> bool {
        match (command.queue(), command.vm_lane()) {
            (Some(queue), _) => (self.queues.get(queue as usize)).is_some_and(|closed| *closed),
            (None, lane) => lane.is_some_and(|l| self.lanes.get(l.0 as usize) == Some(&true)),
        }
    }
}

impl Span {
    fn of_command(index: u32, bytes: Range<u64>) -> Self {
        Self {
            bytes,
            write: true,
            devices: FenceSet::None,
            of: Of::Io(index),
            vm: None,
            number: 0,
        }
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

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
