//! Translate, slice, submit.
//!
//! **Purpose.** Takes a command as far as it can go now: every byte of it that is translated goes to its device.
//! **Design.** A command is translated extent by extent; neighbours that lie together on the device become one slice. What
//! is in flight is never translated again; what is not yet submitted when a command parks is translated anew.
//! **Not here:** what follows when it can't go on (`dispatch`), zeroing and deallocation ([`crate::io::zero`]).

use crate::io::command::{Io, IoOp, Stage};
use crate::io::devices::{DeviceRing, kind};
use crate::io::machine::VmCommands;
use crate::io::records::Records;
use crate::io::slice::{Slice, Slices};
use crate::io::staging::Staging;
use crate::lane::Lane;
use crate::offload::Away;
use crate::qos::Qos;
use forebay_device::{Errno, Op, Submitted};
use forebay_nvme::Status;
use forebay_xlate::boundary::region::bump;
use forebay_xlate::drain::SliceSpan;
use forebay_xlate::reactor_side::{Lookup, Parked, access, claim, run};
use forebay_xlate::table::Table;
use forebay_xlate::{ExtentRange, Word, kill_point};

/// How an attempt to submit a slice went.
pub(crate) enum Put {
    /// It is at the device, or done.
    Ok,
    /// No room in the ring.
    NoRoom,
    /// The lane has as many slices as it may.
    NoSlice,
    /// The device isn't served yet.
    NoDevice,
    /// Refused.
    Failed(Errno),
    /// It has no memory for it.
    NoMemory,
}

/// How a command goes on.
pub(crate) enum Next {
    /// All of it is submitted.
    Moved,
    /// When the owner has answered.
    Park(Parked),
    /// When what this stage waits for is there.
    Wait(Stage),
    /// When the owner has released these.
    Release(ExtentRange),
}

/// A transfer of all or a part of a command: where it begins in the volume, and how.
#[derive(Clone, Copy)]
pub(crate) struct SliceTransfer {
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u32,
    pub(crate) write: bool,
    pub(crate) fua: bool,
}

impl SliceTransfer {
    /// All that a Read or a Write moves.
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

/// Where the next byte of a command lies in its volume.
#[derive(Clone, Copy)]
struct At {
    extent: u64,
    within: u64,
    extent_bytes: u64,
    /// Bytes from there to the transfer's end.
    left: u64,
}

impl At {
    /// Extents from here to the transfer's end.
    #[inline]
    fn extents(&self) -> u64 {
        (self.within + self.left).div_ceil(self.extent_bytes)
    }
}

/// A command, and what its slices need to get to their devices.
pub(crate) struct Submission<'a> {
    /// The command's place in the slab.
    pub(crate) index: usize,
    pub(crate) io: &'a mut Io,
    pub(crate) lane: &'a mut Lane,
    pub(crate) devices: &'a mut DeviceRing,
    pub(crate) slices: &'a mut Slices,
    pub(crate) away: &'a mut Away,
    pub(crate) machines: &'a mut VmCommands,
    pub(crate) staging: &'a mut Staging,
    pub(crate) qos: &'a mut Qos,
    pub(crate) records: &'a Records,
    pub(crate) now_ns: u64,
}

/// The status that a device's error becomes.
fn status_of(errno: Errno, write: bool) -> Status {
    match errno {
        Errno::NOSPC | Errno::DQUOT => Status::CAPACITY_EXCEEDED,
        // A machine's memory is gone: no device says so.
        Errno::FAULT => Status::DATA_TRANSFER_ERROR,
        _ if write => Status::WRITE_FAULT,
        _ => Status::UNRECOVERED_READ_ERROR,
    }
}

impl Io {
    /// A device's error becomes a command's: counted for its export. What a device has no room for is no media's.
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

    /// Ends a read of zeros: its buffer, to which nothing has gone yet, goes back for one of zeros. False for a command
    /// that needs its own.
    #[inline]
    fn answer_zeros(&mut self, staging: &mut Staging, len: u32) -> bool {
        let (IoOp::Read { .. }, Some(mut zeros)) = (self.op, staging.zeros(len)) else {
            return false;
        };
        let Some(own) = (self.buffer.as_mut()).filter(|own| own.len() == zeros.len()) else {
            staging.give(zeros);
            return false;
        };
        // Whoever counts what a connection holds knows nothing of it.
        zeros.counts_as(own);
        staging.give(std::mem::replace(own, zeros));
        self.cursor = u64::from(len);
        true
    }
}

/// Whether so many extents from `extent` on read as zeros.
fn are_zeros(table: &Table, extent: u64, count: u64) -> bool {
    (extent..extent + count).all(|e| access(table.lookup(e), false) == Lookup::Zeros)
}

impl Submission<'_> {
    /// Moves what is left of a transfer.
    #[inline]
    pub(crate) fn transfer(&mut self, transfer: SliceTransfer) -> Next {
        let len = u64::from(transfer.len_bytes);
        while self.io.cursor < len && self.io.status == Status::SUCCESS {
            if let Some(next) = self.step(&transfer) {
                return next;
            }
        }
        Next::Moved
    }

    /// Moves the next run of extents. Something else comes first if it says so.
    #[inline]
    fn step(&mut self, transfer: &SliceTransfer) -> Option<Next> {
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
            Lookup::Device(word) => self.step_to_device(word, &at, transfer),
            Lookup::Zeros => self.step_over_zeros(&at, transfer.len_bytes),
            Lookup::Claim => {
                claim(&volume.table, ExtentRange::new(at.extent, at.extents()));
                None
            }
            Lookup::Park => Some(Next::Park(Parked {
                volume: volume.id(),
                extent: at.extent,
                write: transfer.write,
            })),
        }
    }

    /// The next extent reads as zeros.
    fn step_over_zeros(&mut self, at: &At, len: u32) -> Option<Next> {
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
        } else if self.machines.moved_enough(io.lane) {
            return Some(Next::Wait(Stage::RingWait));
        } else if !self.machines.zero(self.index, io, n as u32) {
            io.status = Status::INTERNAL_ERROR;
            return None;
        }
        io.cursor += n;
        None
    }

    /// The next extents lie together on a device from `word` on.
    #[inline]
    fn step_to_device(&mut self, word: Word, at: &At, transfer: &SliceTransfer) -> Option<Next> {
        let volume = &self.lane.volume;
        let run = run(&volume.table, at.extent, word, at.extents());
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
            return Some(Next::Wait(Stage::DeviceWait));
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

    /// So many bytes were put to a device, or not.
    #[inline]
    pub(crate) fn after(&mut self, put: Put, n: u64, write: bool) -> Option<Next> {
        match put {
            Put::Ok => self.io.cursor += n,
            Put::NoRoom => return Some(Next::Wait(Stage::RingWait)),
            Put::NoSlice => return Some(Next::Wait(Stage::SliceWait)),
            Put::NoDevice => return Some(Next::Wait(Stage::DeviceWait)),
            Put::Failed(errno) => self.io.device_failed(errno, write, Some(self.lane)),
            Put::NoMemory => self.io.status = Status::INTERNAL_ERROR,
        }
        None
    }

    /// Puts a slice to its device. Counts it in its command when it is in flight.
    pub(crate) fn put(&mut self, word: Word, mut op: Op, span: SliceSpan) -> Put {
        let device = word.device().0;
        let Some(served) = self.devices.get(device) else {
            return Put::NoDevice;
        };
        // The run's last extent must exist there too, whatever the word says.
        if word.extent().0 + span.range.count > served.config.extents {
            return Put::Failed(Errno::INVAL);
        }
        // As with commands ([`crate::core::Core::may_start`]): never more than what is left to all others.
        if self.lane.slices as usize > self.slices.left() {
            return Put::NoSlice;
        }
        let Some(index) = self.slices.free.pop() else {
            return Put::NoSlice;
        };
        if self.away.is_helped()
            && let Some(helper) = self.helper()
        {
            let same = std::sync::Arc::as_ptr(&served.device).addr();
            let mut slice = self.begin_slice(device, op, span, true);
            let blame = self.io.record.blame();
            if self.away.hand_over(helper, index, &mut slice, same, blame) {
                self.lane.away += 1;
                bump(&self.records.reactor.handed_over, 1);
            } else {
                // It never has more than there is room for.
                self.slices.again.push(index);
            }
            self.slices.put(index, slice);
            return Put::Ok;
        }
        match (self.devices).submit(device, &mut op, kind::SLICE, u64::from(index)) {
            Some(Submitted::Queued) => {
                // What was done at once has no end that could come late.
                let slice = self.begin_slice(device, op, span, false);
                self.slices.put(index, slice);
                self.away.began(false);
                kill_point!("core.put");
                let at_devices = self.away.at_devices(self.slices.in_flight());
                self.devices.feed(at_devices);
                Put::Ok
            }
            Some(Submitted::Done(result)) => {
                self.slices.free.push(index);
                if self.away.spreads() {
                    self.away.began(true);
                    // None, as its bytes are counted elsewhere.
                    self.machines.moves(self.io.lane, 0);
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
            None => {
                self.slices.free.push(index);
                Put::NoDevice
            }
        }
    }

    /// Who of the other reactors is to carry the next slice out.
    #[cold]
    #[inline(never)]
    fn helper(&self) -> Option<usize> {
        let moved_any = self.machines.moved_any(self.lane.index);
        let waits = self.qos.waits_for_processor(self.lane.index);
        // The next slice has its place already.
        let in_flight = self.slices.in_flight();
        self.away.helper(self.lane, 1, in_flight, moved_any, waits)
    }

    /// Counts a slice that begins now, as part of its command.
    fn begin_slice(&mut self, device: u8, op: Op, span: SliceSpan, away: bool) -> Slice {
        // From when the ring is entered on, a successor must reckon with it.
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
            away: false,
            begun_ns: self.qos.slice_begins(device, &op, away),
            op,
            span,
        }
    }
}
