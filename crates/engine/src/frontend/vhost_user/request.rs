//! A request's path: from its chain to the core, and back to its ring.
//!
//! A request becomes one core command, or several if it exceeds the core's longest transfer.
//! Without room in the core, it waits with its chain ([`Vhost::waiting`]), and is retried every
//! turn.

use super::area::Record;
use super::queue::Slot;
use super::{Vhost, area, count, is_good, slot_of};
use crate::core::staging::MAX_TRANSFER_BYTES;
use crate::core::{DoneIo, IoOp, NewIo};
use crate::frontend::vm::protocol::{Closing, Turn};
use forebay_virtio::blk::{self, BlkStatus, ID_BYTES, Request, Work};
use forebay_virtio::ring::MAX_QUEUE_SIZE;
use std::sync::atomic::Ordering::Relaxed;

#[derive(Clone, Copy, Debug)]
pub(super) struct BegunRequest {
    pub queue: u16,
    tag: u16,
    request: Request,
    work: Work,
    /// Bytes of its data that the core has.
    started: u32,
}

/// A finished request that is not returned yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Over {
    queue: u16,
    tag: u16,
    status: BlkStatus,
    recorded: bool,
    status_address: u64,
    written: u32,
}

enum Tried {
    No,
    Collected,
    Over,
}

enum Try {
    Begun,
    Over,
    NoRoom,
    Failed,
}

/// Writes a Dataset Management range (NVM Command Set 3.2.3.1).
fn put_range(bytes: &mut [u8], block_bytes: u32, offset_bytes: u64, len_bytes: u64) {
    let block = u64::from(block_bytes);
    bytes.fill(0);
    bytes[4..8].copy_from_slice(&((len_bytes / block) as u32).to_le_bytes());
    bytes[8..16].copy_from_slice(&(offset_bytes / block).to_le_bytes());
}

impl Vhost {
    /// Charges the turn for a request that ends without having begun.
    #[cold]
    fn answers(turn: &mut Turn<'_>) {
        turn.core.qos.may_answer(turn.client.lane());
    }

    /// Begins the request in [`Vhost::chain`]; returns about how many bytes it moves. `again`: a
    /// dead engine may have begun it.
    pub(super) fn begin(&mut self, turn: &mut Turn<'_>, queue: u16, tag: u16, again: bool) -> u32 {
        let request = match blk::parse(&self.chain, turn.client.memory(), &self.disk) {
            Ok(request) => request,
            Err(error) => {
                turn.client.fail(Closing(error.text()));
                return 0;
            }
        };
        let written = match request.work {
            Ok(Work::In { .. }) => request.data_bytes + 1,
            Ok(Work::GetId) => request.data_bytes.min(ID_BYTES as u32) + 1,
            _ => 1,
        };
        let over = |status| Over {
            queue,
            tag,
            status,
            recorded: again,
            status_address: request.status_address,
            written,
        };
        let work = match request.work {
            Ok(Work::GetId) => {
                Self::answers(turn);
                Self::not_begun(turn, slot_of(queue, tag));
                let status = self.identify(turn, &request);
                self.finish(turn, &over(status));
                return 0;
            }
            Ok(work) => work,
            Err(status) => {
                Self::answers(turn);
                Self::not_begun(turn, slot_of(queue, tag));
                self.finish(turn, &over(status));
                return 0;
            }
        };
        if self.blamed == Some(slot_of(queue, tag)) && self.kills(turn) {
            Self::not_begun(turn, slot_of(queue, tag));
            self.finish(turn, &over(BlkStatus::IoErr));
            return 0;
        }
        let begun = BegunRequest {
            queue,
            tag,
            request,
            work,
            started: 0,
        };
        let tried = match again {
            true => Tried::No,
            false => self.try_at_once(turn, &begun),
        };
        if matches!(tried, Tried::Over) {
            self.over.push(over(BlkStatus::Ok));
            return request.data_bytes;
        }
        let Some(slot) = self.slot(queue, tag) else {
            return 0;
        };
        *slot = Slot {
            status_address: request.status_address,
            written,
            parts: 0,
            starting: true,
            bad: false,
            recorded: true,
            taken_ns: turn.core.now_ns(),
        };
        area(turn).begin(slot_of(queue, tag), &record_of(&work, request.data_bytes));
        self.start(turn, begun, matches!(tried, Tried::Collected));
        request.data_bytes
    }

    /// Completes a whole read or write at once, if the core can. It needs no record, since it
    /// reaches no device.
    #[inline]
    fn try_at_once(&mut self, turn: &mut Turn<'_>, begun: &BegunRequest) -> Tried {
        let len_bytes = begun.request.data_bytes;
        let op = match begun.work {
            Work::In { offset_bytes } => IoOp::Read {
                offset_bytes,
                len_bytes,
            },
            Work::Out { offset_bytes } => IoOp::Write {
                offset_bytes,
                len_bytes,
                fua: !self.session.writeback(),
            },
            _ => return Tried::No,
        };
        let lane = match turn.client.lane() {
            Some(lane) if len_bytes <= MAX_TRANSFER_BYTES => lane,
            _ => return Tried::No,
        };
        self.pieces.clear();
        if !self.collect(turn, begun, len_bytes) {
            return Tried::No;
        }
        if !turn.core.at_once(lane, &op, &self.pieces) {
            return Tried::Collected;
        }
        self.pieces.clear();
        self.at_once
            .add(matches!(op, IoOp::Write { .. }), len_bytes);
        Tried::Over
    }

    /// Gives the rest of a request to the core, or queues it. `collected`: its pieces are, and it
    /// cannot complete at once.
    pub(super) fn start(
        &mut self,
        turn: &mut Turn<'_>,
        mut begun: BegunRequest,
        mut collected: bool,
    ) {
        loop {
            let data_bytes = match begun.work {
                Work::In { .. } | Work::Out { .. } => begun.request.data_bytes,
                _ => 0,
            };
            let part = (data_bytes - begun.started).min(MAX_TRANSFER_BYTES);
            let tried = self.try_part(turn, &begun, part, std::mem::take(&mut collected));
            if !matches!(tried, Try::Begun) {
                self.pieces.clear();
            }
            let Some(slot) = self.slot(begun.queue, begun.tag) else {
                return;
            };
            match tried {
                Try::NoRoom => {
                    self.waiting = Some(begun);
                    return;
                }
                Try::Begun => {
                    slot.parts += 1;
                    begun.started += part;
                }
                Try::Over => begun.started += part,
                Try::Failed => {
                    Self::answers(turn);
                    slot.bad = true;
                    begun.started = data_bytes;
                }
            }
            if begun.started == data_bytes {
                slot.starting = false;
                if slot.parts == 0 {
                    let over = slot.over(begun.queue, begun.tag);
                    Self::not_begun(turn, slot_of(begun.queue, begun.tag));
                    self.over.push(over);
                }
                return;
            }
        }
    }

    fn slot(&mut self, queue: u16, tag: u16) -> Option<&mut Slot> {
        let line = self.lines.get_mut(usize::from(queue))?.as_mut()?;
        line.slots.get_mut(usize::from(tag))
    }

    /// Gives the core the next `part` bytes of the request.
    fn try_part(
        &mut self,
        turn: &mut Turn<'_>,
        begun: &BegunRequest,
        part: u32,
        collected: bool,
    ) -> Try {
        let Some(lane) = turn.client.lane() else {
            return Try::Failed;
        };
        let slot = slot_of(begun.queue, begun.tag);
        let durable = !self.session.writeback();
        let mut buffer = None;
        if !collected {
            self.pieces.clear();
        }
        let op = match begun.work {
            Work::In { offset_bytes } => IoOp::Read {
                offset_bytes: offset_bytes + u64::from(begun.started),
                len_bytes: part,
            },
            Work::Out { offset_bytes } => IoOp::Write {
                offset_bytes: offset_bytes + u64::from(begun.started),
                len_bytes: part,
                fua: durable,
            },
            Work::Flush if turn.core.lanes.keeps_vms_from_writing(lane) => return Try::Failed,
            Work::Flush => IoOp::Flush,
            Work::WriteZeroes {
                offset_bytes,
                len_bytes,
                unmap,
            } => IoOp::WriteZeroes {
                offset_bytes,
                len_bytes,
                deallocate: unmap,
                fua: durable,
            },
            Work::Discard {
                offset_bytes,
                len_bytes,
            } => {
                let Some(mut range) = turn.core.staging.allocate(16) else {
                    return Try::NoRoom;
                };
                put_range(
                    range.as_mut_slice(),
                    self.disk.block_bytes,
                    offset_bytes,
                    len_bytes,
                );
                buffer = Some(range);
                IoOp::Deallocate { ranges: 1 }
            }
            Work::GetId => return Try::Failed,
        };
        if part > 0 && !collected && !self.collect(turn, begun, part) {
            return Try::Failed;
        }
        let record = turn.client.command_ref(lane, slot);
        if buffer.is_none() && !collected {
            turn.core.record().blame.store(record.blame(), Relaxed);
            if turn.core.at_once(lane, &op, &self.pieces) {
                self.pieces.clear();
                self.at_once.add(matches!(op, IoOp::Write { .. }), part);
                return Try::Over;
            }
        }
        let new = NewIo {
            owner: turn.client.owner(slot),
            lane,
            op,
            buffer,
            record,
            over_ns: None,
        };
        self.start_part(turn, new)
    }

    #[inline]
    fn start_part(&mut self, turn: &mut Turn<'_>, new: NewIo) -> Try {
        match turn.core.start_vm_io(new, &mut self.pieces) {
            Ok(()) => Try::Begun,
            Err(new) => {
                if let Some(buffer) = new.buffer {
                    turn.core.staging.release(buffer);
                }
                Try::NoRoom
            }
        }
    }

    /// Finds the next `part` bytes of a request's data in memory.
    #[inline]
    fn collect(&mut self, turn: &Turn<'_>, begun: &BegunRequest, part: u32) -> bool {
        let write = matches!(begun.work, Work::In { .. });
        let memory = turn.client.memory();
        if part == begun.request.data_bytes
            && let Some(pieces) = begun.request.plain_data(&self.chain)
        {
            let mut pieces = pieces.iter();
            return pieces.all(|p| self.pieces.push(memory, p.address, p.len, write).is_ok());
        }
        let (mut skip, mut left) = (begun.started, part);
        for piece in begun.request.data(&self.chain) {
            let skipped = skip.min(piece.len);
            skip -= skipped;
            let len = (piece.len - skipped).min(left);
            if len == 0 {
                continue;
            }
            let address = piece.address + u64::from(skipped);
            if self.pieces.push(memory, address, len, write).is_err() {
                return false;
            }
            left -= len;
        }
        left == 0
    }

    fn identify(&self, turn: &Turn<'_>, request: &Request) -> BlkStatus {
        let mut id = [0; ID_BYTES];
        let serial = turn.client.export().serial.as_bytes();
        let n = serial.len().min(ID_BYTES);
        id[..n].copy_from_slice(&serial[..n]);
        let mut rest = &id[..];
        for piece in request.data(&self.chain) {
            let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
            if !turn.client.memory().write(piece.address, now) {
                return BlkStatus::IoErr;
            }
            rest = later;
        }
        BlkStatus::Ok
    }

    /// Together, so that the driver sees them together.
    #[inline]
    pub(super) fn finish_over(&mut self, turn: &mut Turn<'_>) {
        if self.over.is_empty() && self.at_once.is_none() {
            return;
        }
        if let Some(lane) = turn.client.lane().and_then(|lane| turn.core.lane(lane)) {
            lane.count_at_once(&mut self.at_once, || {
                turn.core.clock.since(turn.core.now_ns())
            });
        }
        for at in 0..self.over.len() {
            let over = self.over[at];
            self.finish(turn, &over);
        }
        self.over.clear();
    }

    #[inline]
    fn finish(&mut self, turn: &mut Turn<'_>, over: &Over) {
        let number = slot_of(over.queue, over.tag);
        if over.recorded {
            area(turn).end(number);
        }
        if self.blamed == Some(number) {
            self.blamed = None;
            area(turn).set_blamed(None);
        }
        let Some(Some(line)) = self.lines.get_mut(usize::from(over.queue)) else {
            return;
        };
        // A status address that is gone cannot be reported.
        let memory = turn.client.memory();
        let _ = memory.store_u8(over.status_address, over.status as u8);
        let written = match over.status {
            BlkStatus::Ok => over.written,
            _ => 1,
        };
        line.queue.put(over.tag, written);
        line.ended = true;
    }

    #[inline]
    pub(super) fn ended(&mut self, turn: &mut Turn<'_>, done: DoneIo) {
        let number = done.owner.slot;
        let (queue, tag) = (number / MAX_QUEUE_SIZE, number % MAX_QUEUE_SIZE);
        let good = is_good(done.status);
        let slot = self.slot(queue, tag);
        // It includes throttled time, and time at the daemon.
        let since_ns = slot.map_or(done.started_ns, |slot| slot.taken_ns);
        if let Some(lane) = turn.core.lane(done.lane) {
            count(lane, &done.op, good, turn.core.clock.since(since_ns));
        }
        if let Some(buffer) = done.buffer {
            turn.core.staging.release(buffer);
        }
        if self.closed {
            return;
        }
        let Some(slot) = self.slot(queue, tag) else {
            return;
        };
        slot.parts = slot.parts.saturating_sub(1);
        slot.bad |= !good;
        if slot.parts == 0 && !slot.starting {
            let over = slot.over(queue, tag);
            self.finish(turn, &over);
        }
    }
}

impl Slot {
    fn over(&self, queue: u16, tag: u16) -> Over {
        Over {
            queue,
            tag,
            status: if self.bad {
                BlkStatus::IoErr
            } else {
                BlkStatus::Ok
            },
            recorded: self.recorded,
            status_address: self.status_address,
            written: self.written,
        }
    }
}

/// The device bytes that a request may touch.
fn record_of(work: &Work, data_bytes: u32) -> Record {
    match *work {
        Work::In { offset_bytes } => Record {
            offset_bytes,
            len_bytes: u64::from(data_bytes),
            write: false,
        },
        Work::Out { offset_bytes } => Record {
            offset_bytes,
            len_bytes: u64::from(data_bytes),
            write: true,
        },
        Work::Discard {
            offset_bytes,
            len_bytes,
        }
        | Work::WriteZeroes {
            offset_bytes,
            len_bytes,
            ..
        } => Record {
            offset_bytes,
            len_bytes,
            write: true,
        },
        Work::Flush | Work::GetId => Record {
            offset_bytes: 0,
            len_bytes: 0,
            write: false,
        },
    }
}
