//! Translates, slices and submits a command, as far as it can go now.
//!
//! **Design.** Extents that are adjacent on the device become one slice. Slices in flight are never
//! translated again; the rest of a parked command is. **Not here:** stopped commands (`dispatch`),
//! zeroing ([`crate::io::zero`]).

use crate::io::command::{Io, IoOp, Stage};
use crate::io::devices::{DeviceRing, kind};
use crate::io::guest_memory::VmCommands;
use crate::io::overwrites::Overwrites;
use crate::io::records::Records;
use crate::io::slice::{Slice, Slices};
use crate::io::staging::Staging;
use crate::lane::Lane;
use crate::offload::Offload;
use crate::qos::Qos;
use forebay_device::{Errno, Op, Submitted};
use forebay_nvme::Status;
use forebay_xlate::boundary::region::bump;
use forebay_xlate::drain::SliceSpan;
use forebay_xlate::reactor_side::{Lookup, Parked, access, claim, run};
use forebay_xlate::table::Table;
use forebay_xlate::{ExtentRange, Word, kill_point};

pub(crate) enum Put {
    /// At the device, or done.
    Ok,
    NoRoom,
    /// The lane has its maximum of slices.
    NoSlice,
    NoDevice,
    Failed(Errno),
    NoMemory,
}

pub(crate) enum NextStep {
    /// All slices are submitted.
    Submitted,
    /// The command waits for the owner's answer.
    Park(Parked),
    Wait(Stage),
    /// The owner must release these extents.
    Release(ExtentRange),
}

/// A command's data transfer; `offset_bytes` is on the volume.
#[derive(Clone, Copy)]
pub(crate) struct CommandTransfer {
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u32,
    pub(crate) write: bool,
    pub(crate) fua: bool,
}

impl CommandTransfer {
    #[inline]
    pub(crate) fn of(op: &IoOp) -> Option<Self> {
        let (offset_bytes, len_bytes, write, fua) = match *op {
            IoOp::Read {
                offset_bytes,
                len_bytes,
            } => (offset_bytes, len_bytes, false, false),
            IoOp::Write {
                offset_bytes,
                len_bytes,
                fua,
            } => (offset_bytes, len_bytes, true, fua),
            _ => return None,
        };
        Some(Self {
            offset_bytes,
            len_bytes,
            write,
            fua,
        })
    }
}

#[derive(Clone, Copy)]
struct At {
    extent: u64,
    within: u64,
    extent_bytes: u64,
    left: u64,
}

impl At {
    #[inline]
    fn extents(&self) -> u64 {
        (self.within + self.left).div_ceil(self.extent_bytes)
    }
}

pub(crate) struct Submission<'a> {
    pub(crate) index: usize,
    pub(crate) io: &'a mut Io,
    pub(crate) lane: &'a mut Lane,
    pub(crate) devices: &'a mut DeviceRing,
    pub(crate) slices: &'a mut Slices,
    pub(crate) offload: &'a mut Offload,
    pub(crate) vms: &'a mut VmCommands,
    pub(crate) staging: &'a mut Staging,
    pub(crate) qos: &'a mut Qos,
    pub(crate) overwrites: &'a mut Overwrites,
    pub(crate) records: &'a Records,
    pub(crate) now_ns: u64,
}

fn status_of(errno: Errno, write: bool) -> Status {
    match errno {
        Errno::NOSPC | Errno::DQUOT => Status::CAPACITY_EXCEEDED,
        // A VM's memory is gone.
        Errno::FAULT => Status::DATA_TRANSFER_ERROR,
        // A Ceph client was blocklisted: the next one may do it.
        Errno::SHUTDOWN => Status::COMMAND_INTERRUPTED,
        // An image became smaller.
        Errno::RANGE => Status::LBA_OUT_OF_RANGE,
        _ if write => Status::WRITE_FAULT,
        _ => Status::UNRECOVERED_READ_ERROR,
    }
}

impl Io {
    /// Counts it for the export, unless space ran out.
    #[cold]
    pub(crate) fn device_failed(&mut self, errno: Errno, write: bool, lane: Option<&Lane>) {
        if self.status != Status::SUCCESS {
            return;
        }
        self.status = status_of(errno, write);
        if let Some(lane) = lane.filter(|_| self.status.is_media_error()) {
            bump(&lane.record().media_errors, 1);
        }
    }

    /// Ends a read of zeros with a shared buffer. False if it needs its own.
    #[inline]
    fn answer_zeros(&mut self, staging: &mut Staging, len: u32) -> bool {
        let (IoOp::Read { .. }, Some(mut zeros)) = (self.op, staging.zeros(len)) else {
            return false;
        };
        let Some(own) = (self.buffer.as_mut()).filter(|own| own.len() == zeros.len()) else {
            staging.release(zeros);
            return false;
        };
        // The connection's buffer accounting must not change.
        zeros.counts_as(own);
        staging.release(std::mem::replace(own, zeros));
        self.cursor = u64::from(len);
        true
    }
}

fn are_zeros(table: &Table, extent: u64, count: u64) -> bool {
    (extent..extent + count).all(|e| access(table.lookup(e), false) == Lookup::Zeros)
}

impl Submission<'_> {
    #[inline]
    pub(crate) fn transfer(&mut self, transfer: CommandTransfer) -> NextStep {
        let len = u64::from(transfer.len_bytes);
        while self.io.cursor < len && self.io.status == Status::SUCCESS {
            if let Some(next) = self.step(&transfer) {
                return next;
            }
        }
        NextStep::Submitted
    }

    #[inline]
    fn step(&mut self, transfer: &CommandTransfer) -> Option<NextStep> {
        let volume = &self.lane.volume;
        let extent_bytes = 1u64 << volume.extent_shift;
        let from = transfer.offset_bytes + self.io.cursor;
        let at = At {
            extent: from >> volume.extent_shift,
            within: from & (extent_bytes - 1),
            extent_bytes,
            left: u64::from(transfer.len_bytes) - self.io.cursor,
        };
        match access(volume.table.lookup(at.extent), transfer.write) {
            Lookup::Device(word) => {
                let run = run(&volume.table, at.extent, word, at.extents());
                self.step_to_device(word, run, &at, transfer)
            }
            Lookup::Zeros => self.step_over_zeros(&at, transfer.len_bytes),
            Lookup::Claim => {
                claim(&volume.table, ExtentRange::new(at.extent, at.extents()));
                None
            }
            Lookup::Park => {
                if self.overwrites.any()
                    && transfer.write
                    && let Some(next) = self.overwrite(&at, transfer)
                {
                    return next;
                }
                Some(NextStep::Park(Parked {
                    volume: self.lane.volume.id(),
                    extent: at.extent,
                    write: transfer.write,
                }))
            }
        }
    }

    fn step_over_zeros(&mut self, at: &At, len: u32) -> Option<NextStep> {
        let io = &mut *self.io;
        if io.cursor == 0
            && are_zeros(&self.lane.volume.table, at.extent, at.extents())
            && io.answer_zeros(self.staging, len)
        {
            return None;
        }
        let n = at.left.min(at.extent_bytes - at.within);
        if let Some(buffer) = io.buffer.as_mut() {
            let from = io.cursor as usize;
            buffer.as_mut_slice()[from..from + n as usize].fill(0);
        } else if self.vms.moved_enough(io.lane) {
            return Some(NextStep::Wait(Stage::RingWait));
        } else if !self.vms.zero(self.index, io, n as u32) {
            io.status = Status::INTERNAL_ERROR;
            return None;
        }
        io.cursor += n;
        None
    }

    /// Writes to the place of the command's overwrite, if it has one here. It stops at its end: the next
    /// extent waits for the grant.
    #[cold]
    fn overwrite(&mut self, at: &At, transfer: &CommandTransfer) -> Option<Option<NextStep>> {
        let word = self.overwrites.place(self.index, at.extent)?;
        let before = self.io.cursor;
        let next = self.step_to_device(word, 1, at, transfer);
        self.overwrites.wrote(self.index, self.io.cursor - before);
        let is_complete = self.overwrites.place(self.index, at.extent).is_none();
        Some(next.or(is_complete.then_some(NextStep::Submitted)))
    }

    #[inline]
    fn step_to_device(
        &mut self,
        word: Word,
        run: u64,
        at: &At,
        transfer: &CommandTransfer,
    ) -> Option<NextStep> {
        let volume = &self.lane.volume;
        let span = SliceSpan {
            volume: volume.id(),
            range: ExtentRange::new(at.extent, run),
            write: transfer.write,
            number: 0,
        };
        let mut n = at.left.min(run * at.extent_bytes - at.within);
        let from = self.io.cursor as u32;
        let part = (self.io.buffer.as_ref()).and_then(|b| b.part(from, n as u32));
        let Some(device_at) = self.devices.offset_of(word, at.within) else {
            return Some(NextStep::Wait(Stage::DeviceWait));
        };
        if n == u64::from(transfer.len_bytes)
            && self.devices.reads_zeros(word, run, device_at)
            && self.io.answer_zeros(self.staging, transfer.len_bytes)
        {
            return None;
        }
        let put = match part {
            Some(part) => {
                let op = match (transfer.write, transfer.fua) {
                    (false, _) => Op::read(device_at, part),
                    (true, false) => Op::write(device_at, part),
                    (true, true) => Op::write(device_at, part).with_dsync(),
                };
                self.put(word, op, span)
            }
            None => self.put_pieces(word, device_at, &mut n, transfer.fua, span),
        };
        self.after(put, n, transfer.write)
    }

    #[inline]
    pub(crate) fn after(&mut self, put: Put, n: u64, write: bool) -> Option<NextStep> {
        match put {
            Put::Ok => self.io.cursor += n,
            Put::NoRoom => return Some(NextStep::Wait(Stage::RingWait)),
            Put::NoSlice => return Some(NextStep::Wait(Stage::SliceWait)),
            Put::NoDevice => return Some(NextStep::Wait(Stage::DeviceWait)),
            Put::Failed(errno) => self.io.device_failed(errno, write, Some(self.lane)),
            Put::NoMemory => self.io.status = Status::INTERNAL_ERROR,
        }
        None
    }

    /// Counts a queued slice in its command.
    pub(crate) fn put(&mut self, word: Word, mut op: Op, span: SliceSpan) -> Put {
        let device = word.device().0;
        let Some(served) = self.devices.get(device) else {
            return Put::NoDevice;
        };
        // A bad word must not reach beyond the device's end.
        if word.extent().0 + span.range.count > served.config.extents {
            return Put::Failed(Errno::INVAL);
        }
        // Never more than it leaves to others, as [`crate::core::Core::may_start`].
        if self.lane.slices as usize > self.slices.left() {
            return Put::NoSlice;
        }
        let Some(index) = self.slices.free.pop() else {
            return Put::NoSlice;
        };
        if self.offload.is_helped()
            && let Some(helper) = self.helper()
        {
            let same = std::sync::Arc::as_ptr(&served.device).addr();
            let mut slice = self.begin_slice(device, op, span, true);
            let blame = self.io.record.blame();
            if self.offload.offer(helper, index, &mut slice, same, blame) {
                self.lane.remote += 1;
                bump(&self.records.reactor.handed_over, 1);
            } else {
                // The list has capacity for all slices.
                self.slices.again.push(index);
            }
            self.slices.put(index, slice);
            return Put::Ok;
        }
        match (self.devices).queue(device, &mut op, kind::SLICE, u64::from(index)) {
            Some(Submitted::Queued) => {
                // A slice that was done at once cannot end late.
                let slice = self.begin_slice(device, op, span, false);
                self.slices.put(index, slice);
                self.offload.began(false);
                kill_point!("core.put");
                let at_devices = self.offload.at_devices(self.slices.in_flight());
                self.devices.feed(at_devices);
                Put::Ok
            }
            Some(Submitted::Done(result)) => {
                self.slices.free.push(index);
                if self.offload.spreads() {
                    self.offload.began(true);
                    // Zero: its bytes are counted elsewhere.
                    self.vms.moves(self.io.lane, 0);
                }
                match result {
                    Ok(()) => Put::Ok,
                    Err(errno) => {
                        (self.devices).count_error(device, &op, errno, self.now_ns);
                        Put::Failed(errno)
                    }
                }
            }
            Some(Submitted::RingFull) => {
                self.slices.free.push(index);
                Put::NoRoom
            }
            Some(Submitted::NotReady) | None => {
                self.slices.free.push(index);
                Put::NoDevice
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn helper(&self) -> Option<usize> {
        let moved_any = self.vms.moved_any(self.lane.index);
        let waits = self.qos.waits_for_processor(self.lane.index);
        // The next slice has its place already.
        let in_flight = self.slices.in_flight();
        self.offload
            .helper(self.lane, 1, in_flight, moved_any, waits)
    }

    fn begin_slice(&mut self, device: u8, op: Op, span: SliceSpan, offload: bool) -> Slice {
        // A successor must expect it at the device once the ring is entered.
        self.records.submits(self.io.record, device);
        let span = SliceSpan {
            number: self.slices.number(),
            ..span
        };
        self.io.slices += 1;
        self.lane.slices += 1;
        Slice {
            io: self.index as u32,
            device,
            bounced: false,
            remote: false,
            begun_ns: self.qos.slice_begins(device, &op, offload),
            op,
            span,
        }
    }
}
