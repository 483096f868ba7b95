//! Translate, slice, submit; and what happens when a slice ends.
//!
//! **Design.** A command is translated extent by extent; neighbours that lie together on the device
//! become one slice. What is in flight is never translated again; what is not yet submitted when a
//! command parks is translated anew. **Not here:** zeroing and deallocation ([`super::zero`]).

use super::io::{Io, IoOp, Stage, Token};
use super::settle::Ended;
use super::staging::Staging;
use super::{BOUNCED, Core, Slice, kind};
use forebay_device::{Errno, Finish, Op, Submitted};
use forebay_nvme::Status;
use forebay_xlate::drain::SliceSpan;
use forebay_xlate::reactor_side::{Access, Parked, access, claim, run};
use forebay_xlate::table::Table;
use forebay_xlate::{ExtentRange, Word, kill_point};

/// How an attempt to submit a slice went.
pub(super) enum Put {
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

/// The status that a device's error becomes.
pub(super) fn status_of(errno: Errno, write: bool) -> Status {
    match errno {
        Errno::NOSPC | Errno::DQUOT => Status::CAPACITY_EXCEEDED,
        // A machine's memory is gone: no device says so.
        Errno::FAULT => Status::DATA_TRANSFER_ERROR,
        _ if write => Status::WRITE_FAULT,
        _ => Status::UNRECOVERED_READ_ERROR,
    }
}

/// Whether so many extents from `extent` on read as zeros.
fn are_zeros(table: &Table, extent: u64, count: u64) -> bool {
    (extent..extent + count).all(|e| access(table.lookup(e), false) == Access::Zeros)
}

/// Ends a read of zeros: its buffer, to which nothing has gone yet, goes back for one of zeros. False for a command
/// that needs its own.
#[inline]
fn answer_zeros(io: &mut Io, staging: &mut Staging, len: u32) -> bool {
    let (IoOp::Read { .. }, Some(mut zeros)) = (io.op, staging.zeros(len)) else {
        return false;
    };
    let Some(own) = (io.buffer.as_mut()).filter(|own| own.len() == zeros.len()) else {
        staging.give(zeros);
        return false;
    };
    // Whoever counts what a connection holds knows nothing of it.
    zeros.counts_as(own);
    staging.give(std::mem::replace(own, zeros));
    io.cursor = u64::from(len);
    true
}

impl Core {
    /// Carries a command on from wherever it is.
    pub(super) fn dispatch(&mut self, token: Token) {
        if self
            .lane(self.ios[token.index()].lane)
            .is_some_and(|l| l.removed)
        {
            // Somebody else may have the volume by now.
            self.fail(token, Status::INVALID_NAMESPACE_OR_FORMAT);
            return;
        }
        match self.ios[token.index()].op {
            IoOp::Read {
                offset_bytes,
                len_bytes,
            } => self.transfer(token, offset_bytes, len_bytes, false, false),
            IoOp::Write {
                offset_bytes,
                len_bytes,
                fua,
            } => {
                self.transfer(token, offset_bytes, len_bytes, true, fua);
            }
            IoOp::Compare { .. } | IoOp::CompareAndWrite { .. } => self.compare(token),
            IoOp::Flush => self.begin_flush(token),
            IoOp::WriteZeroes { .. } | IoOp::Deallocate { .. } => self.zero(token),
        }
    }

    pub(super) fn transfer(&mut self, token: Token, offset: u64, len: u32, write: bool, fua: bool) {
        let i = token.index();
        while self.ios[i].cursor < u64::from(len) && self.ios[i].status == Status::SUCCESS {
            let io = &mut self.ios[i];
            let Some(lane) = self.lanes[io.lane.0 as usize].as_ref() else {
                io.status = Status::INVALID_NAMESPACE_OR_FORMAT;
                break;
            };
            let volume = &lane.volume;
            let extent_bytes = 1u64 << volume.extent_shift;
            let at = offset + io.cursor;
            let extent = at >> volume.extent_shift;
            let within = at & (extent_bytes - 1);
            let left = u64::from(len) - io.cursor;
            let mut n = left.min(extent_bytes - within);
            let word = match access(volume.table.lookup(extent), write) {
                Access::Device(word) => word,
                Access::Zeros => {
                    if io.cursor == 0
                        && are_zeros(
                            &volume.table,
                            extent,
                            (within + left).div_ceil(extent_bytes),
                        )
                        && answer_zeros(io, &mut self.staging, len)
                    {
                        continue;
                    }
                    if let Some(buffer) = io.buffer.as_mut() {
                        let from = io.cursor as usize;
                        buffer.as_mut_slice()[from..from + n as usize].fill(0);
                    } else if self.machines.moved_enough(io.lane) {
                        self.set_aside(token, Stage::RingWait);
                        return;
                    } else if !self.machines.zero(i, io, n as u32) {
                        io.status = Status::INTERNAL_ERROR;
                        break;
                    }
                    io.cursor += n;
                    continue;
                }
                Access::Claim => {
                    let count = (within + left).div_ceil(extent_bytes);
                    claim(&volume.table, ExtentRange::new(extent, count));
                    continue;
                }
                Access::Park => {
                    let parked = Parked {
                        volume: volume.id(),
                        extent,
                        write,
                    };
                    self.park(token, parked);
                    return;
                }
            };
            let limit = (within + left).div_ceil(extent_bytes);
            let run = run(&volume.table, extent, word, limit);
            n = left.min(run * extent_bytes - within);
            let (id, from) = (volume.id(), io.cursor as u32);
            let part = io.buffer.as_ref().and_then(|b| b.part(from, n as u32));
            let Some(device_at) = self.device_offset(word, within) else {
                self.set_aside(token, Stage::DeviceWait);
                return;
            };
            if n == u64::from(len)
                && self.reads_zeros(word, run, device_at)
                && answer_zeros(&mut self.ios[i], &mut self.staging, len)
            {
                continue;
            }
            let span = SliceSpan {
                volume: id,
                range: ExtentRange::new(extent, run),
                write,
                number: 0,
            };
            let put = match part {
                Some(part) => {
                    let op = match (write, fua) {
                        (false, _) => Op::read(device_at, part),
                        (true, false) => Op::write(device_at, part),
                        (true, true) => Op::write(device_at, part).with_dsync(),
                    };
                    self.put(i, word, op, span)
                }
                None => self.put_pieces(i, word, device_at, &mut n, fua, span),
            };
            match put {
                Put::Ok => {
                    self.ios[i].cursor += n;
                }
                Put::NoRoom => {
                    self.set_aside(token, Stage::RingWait);
                    return;
                }
                Put::NoSlice => {
                    self.set_aside(token, Stage::SliceWait);
                    return;
                }
                Put::NoDevice => {
                    self.set_aside(token, Stage::DeviceWait);
                    return;
                }
                Put::Failed(errno) => self.device_failed(i, errno, write),
                Put::NoMemory => self.ios[i].status = Status::INTERNAL_ERROR,
            }
        }
        self.moved(token);
    }

    /// Whether the device has nothing but zeros from `device_at` on, which is in a run that begins at `word`.
    #[inline]
    fn reads_zeros(&self, word: Word, run: u64, device_at: u64) -> bool {
        self.devices[usize::from(word.device().0)]
            .as_ref()
            .is_some_and(|served| {
                served.device.reads_zeros(device_at)
                    && word.extent().0 + run <= served.config.extents
            })
    }

    /// Where byte `within` of the word's extent lies on its device; `None` while it isn't served.
    pub(super) fn device_offset(&self, word: Word, within: u64) -> Option<u64> {
        let config = &self.devices[usize::from(word.device().0)].as_ref()?.config;
        Some(config.data_offset_bytes + word.extent().0 * u64::from(config.extent_bytes) + within)
    }

    /// Puts a slice to its device. Counts it in its command when it is in flight.
    pub(super) fn put(&mut self, io: usize, word: Word, mut op: Op, span: SliceSpan) -> Put {
        let device = word.device().0;
        let Some(served) = &self.devices[usize::from(device)] else {
            return Put::NoDevice;
        };
        // The run's last extent must exist there too, whatever the word says.
        if word.extent().0 + span.range.count > served.config.extents {
            return Put::Failed(Errno::INVAL);
        }
        let lane = self.ios[io].lane.0 as usize;
        // As with commands ([`Core::may_start`]): never more than what is left to all others.
        let in_use = self.lanes[lane].as_ref().map_or(0, |l| l.slices);
        if in_use as usize > self.free_slices.len() {
            return Put::NoSlice;
        }
        let Some(index) = self.free_slices.pop() else {
            return Put::NoSlice;
        };
        if self.away.is_helped()
            && let Some(whose) = self.whose(self.ios[io].lane, 1)
        {
            let slice = self.begin_slice(io, device, op, span, true);
            self.slices[index as usize] = Some(slice);
            self.hand_over(whose, index as usize);
            return Put::Ok;
        }
        match served.device.submit(
            &mut self.ring,
            &mut op,
            kind::SLICE << kind::SHIFT | u64::from(index),
        ) {
            Submitted::Queued => {
                // What was done at once has no end that could come late.
                let slice = self.begin_slice(io, device, op, span, false);
                self.slices[index as usize] = Some(slice);
                self.away.began(false);
                kill_point!("core.put");
                self.feed_devices();
                Put::Ok
            }
            Submitted::Done(result) => {
                self.free_slices.push(index);
                if self.away.spreads() {
                    self.away.began(true);
                    // None, as its bytes are counted elsewhere.
                    self.machines.moves(self.ios[io].lane, 0);
                }
                match result {
                    Ok(()) => Put::Ok,
                    Err(errno) => {
                        self.count_error(device, &op, errno);
                        Put::Failed(errno)
                    }
                }
            }
            Submitted::RingFull => {
                self.free_slices.push(index);
                Put::NoRoom
            }
        }
    }

    /// Counts a slice that begins now, as part of its command.
    fn begin_slice(&mut self, io: usize, device: u8, op: Op, span: SliceSpan, away: bool) -> Slice {
        // From when the ring is entered on, a successor must reckon with it.
        let record = self.ios[io].record;
        if !record.is_machine() {
            self.commands[record.place()].submit_to(device);
        }
        let span = SliceSpan {
            number: self.drains.begin(),
            ..span
        };
        self.ios[io].slices += 1;
        if let Some(lane) = self.lanes[self.ios[io].lane.0 as usize].as_mut() {
            lane.slices += 1;
        }
        let begun_ns = match &mut self.admission {
            Some(admission) => admission.delays.begun(device, &op, away),
            None => 0,
        };
        Slice {
            io: io as u32,
            device,
            marks: 0,
            away: false,
            begun_ns,
            op,
            span,
        }
    }

    /// The ring says that a slice's operation ended.
    pub(super) fn slice_completed(&mut self, index: usize, result: i32) {
        let Some(slice) = self.slices.get(index).and_then(Option::as_ref) else {
            return;
        };
        let Some(served) = &self.devices[usize::from(slice.device)] else {
            return;
        };
        self.blame(Some(slice.io));
        kill_point!("core.completed");
        match served.device.finish(slice.op, result) {
            Finish::Done => self.slice_ended(index, None),
            Finish::Failed(errno) => self.slice_ended(index, Some(errno)),
            Finish::Again(op) => {
                if let Some(slice) = self.slices[index].as_mut() {
                    slice.op = op;
                }
                self.submit_again(index);
            }
        }
    }

    /// Submits the rest of a slice's operation; it stays the same slice.
    pub(super) fn submit_again(&mut self, index: usize) {
        let Some(slice) = self.slices[index].as_mut() else {
            return;
        };
        let Some(served) = &self.devices[usize::from(slice.device)] else {
            return;
        };
        let data = kind::SLICE << kind::SHIFT | index as u64;
        match served.device.submit(&mut self.ring, &mut slice.op, data) {
            Submitted::Queued => {}
            Submitted::Done(result) => self.slice_ended(index, result.err()),
            Submitted::RingFull => self.slice_again.push(index as u32),
        }
    }

    pub(super) fn retry_slices(&mut self) {
        for _ in 0..self.slice_again.len() {
            let index = self.slice_again.swap_remove(0);
            let io = self.slices[index as usize].as_ref().map(|slice| slice.io);
            self.blame(io);
            self.submit_again(index as usize);
        }
    }

    pub(super) fn slice_ended(&mut self, index: usize, error: Option<Errno>) {
        let Some(slice) = self.slices[index].take() else {
            return;
        };
        self.free_slices.push(index as u32);
        self.slice_ended_ns = self.now_ns;
        if slice.begun_ns != 0 {
            self.timed_ended(&slice, error.is_none());
        }
        if slice.marks & BOUNCED != 0 {
            self.bounce_ended(index, &slice, error.is_none());
        }
        if let Some(errno) = error {
            self.count_error(slice.device, &slice.op, errno);
        }
        let upcalls = &mut self.upcalls;
        self.drains.ended(&slice.span, |revoke| {
            upcalls.push_back(crate::upcall::Upcall::Drained { revoke });
        });
        self.settled(slice.device, Ended::Slice(slice.span.number));
        let io = &mut self.ios[slice.io as usize];
        io.slices -= 1;
        self.slices_freed = true;
        if let Some(lane) = self.lanes[io.lane.0 as usize].as_mut() {
            lane.slices -= 1;
        }
        if let Some(errno) = error {
            self.device_failed(slice.io as usize, errno, slice.span.write);
        }
        let io = &mut self.ios[slice.io as usize];
        // Elsewhere (parked, waiting for room), whoever takes it up again sees the count.
        if io.slices == 0 && io.stage == Stage::Moving {
            self.moved(Token::take(slice.io));
        }
    }

    /// All slices are submitted: goes on when they have ended.
    pub(super) fn moved(&mut self, token: Token) {
        let io = &mut self.ios[token.index()];
        if io.slices > 0 {
            io.stage = Stage::Moving;
            token.entrust();
            return;
        }
        let fua = match io.op {
            IoOp::Write { fua, .. } | IoOp::WriteZeroes { fua, .. } => fua,
            _ => false,
        };
        let zeroed = matches!(io.op, IoOp::WriteZeroes { .. });
        let lane = io.lane;
        if io.status == Status::SUCCESS
            && fua
            && self
                .lane(lane)
                .is_some_and(|l| zeroed || l.volume.uncommitted() != 0)
        {
            self.begin_flush(token);
        } else {
            self.finish(token);
        }
    }
}
