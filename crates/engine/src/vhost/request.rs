//! One request's way: from its chain to the core, and back to its ring.
//!
//! **Design.** A request becomes one command of the core or, longer than that takes at once, several, of which each is
//! told apart only by being one less to wait for. When the core has no room, the request waits ([`Vhost::waiting`]) with
//! its chain, and is tried again every turn. When its last command is back, its status byte is stored and the
//! chain returned.

use super::area::Record;
use super::{Vhost, area, count, is_good, slot_of};
use crate::core::staging::MAX_TRANSFER_BYTES;
use crate::core::{DoneIo, IoOp, NewIo};
use crate::vm::frontend::{Closing, Turn};
use forebay_virtio::blk::{self, ID_BYTES, Request, Status, Work};
use forebay_virtio::ring::MAX_QUEUE_SIZE;
use std::sync::atomic::Ordering::Relaxed;

/// A request that begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    pub queue: u16,
    tag: u16,
    request: Request,
    work: Work,
    /// Bytes of its data that the core has.
    started: u32,
}

/// How the core's try of a command went.
enum Try {
    Begun,
    /// It is over already.
    Over,
    NoRoom,
    Failed,
}

impl Vhost {
    /// Begins the request in [`Vhost::chain`]; about how many bytes it moves.
    pub(super) fn begin(&mut self, turn: &mut Turn<'_>, queue: u16, tag: u16) -> u32 {
        let request = match blk::parse(&self.chain, turn.client.memory(), &self.disk) {
            Ok(request) => request,
            Err(error) => {
                turn.client.fail(Closing(error.text()));
                return 0;
            }
        };
        let Some(Some(line)) = self.lines.get_mut(usize::from(queue)) else {
            return 0;
        };
        let Some(slot) = line.slots.get_mut(usize::from(tag)) else {
            return 0;
        };
        slot.status_address = request.status_address;
        slot.written = 1;
        slot.parts = 0;
        slot.starting = true;
        slot.bad = false;
        let work = match request.work {
            Ok(Work::GetId) => {
                slot.written = request.data_bytes.min(ID_BYTES as u32) + 1;
                Self::not_begun(turn, slot_of(queue, tag));
                let status = self.identify(turn, &request);
                self.finish(turn, queue, tag, status);
                return 0;
            }
            Ok(work) => work,
            Err(status) => {
                Self::not_begun(turn, slot_of(queue, tag));
                self.finish(turn, queue, tag, status);
                return 0;
            }
        };
        if let Work::In { .. } = work {
            slot.written = request.data_bytes + 1;
        }
        if self.blamed == Some(slot_of(queue, tag)) && self.kills(turn) {
            Self::not_begun(turn, slot_of(queue, tag));
            self.finish(turn, queue, tag, Status::IoErr);
            return 0;
        }
        area(turn).begin(slot_of(queue, tag), &record_of(&work, request.data_bytes));
        let begun = Begun {
            queue,
            tag,
            request,
            work,
            started: 0,
        };
        self.start(turn, begun);
        request.data_bytes
    }

    /// Gives the core what it hasn't got of a request, or keeps the rest waiting.
    pub(super) fn start(&mut self, turn: &mut Turn<'_>, mut begun: Begun) {
        loop {
            let data_bytes = match begun.work {
                Work::In { .. } | Work::Out { .. } => begun.request.data_bytes,
                _ => 0,
            };
            let part = (data_bytes - begun.started).min(MAX_TRANSFER_BYTES);
            let tried = self.try_part(turn, &begun, part);
            if !matches!(tried, Try::Begun) {
                // They may hold memory, for which its removal would wait.
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
                    slot.bad = true;
                    begun.started = data_bytes;
                }
            }
            if begun.started == data_bytes {
                slot.starting = false;
                if slot.parts == 0 {
                    let status = if slot.bad { Status::IoErr } else { Status::Ok };
                    Self::not_begun(turn, slot_of(begun.queue, begun.tag));
                    self.over.push((begun.queue, begun.tag, status));
                }
                return;
            }
        }
    }

    fn slot(&mut self, queue: u16, tag: u16) -> Option<&mut super::queue::Slot> {
        let line = self.lines.get_mut(usize::from(queue))?.as_mut()?;
        line.slots.get_mut(usize::from(tag))
    }

    /// Gives the core one command of a request: `part` bytes of its data.
    fn try_part(&mut self, turn: &mut Turn<'_>, begun: &Begun, part: u32) -> Try {
        let Some(lane) = turn.client.lane() else {
            return Try::Failed;
        };
        let slot = slot_of(begun.queue, begun.tag);
        let durable = !self.session.writeback();
        let mut buffer = None;
        self.pieces.clear();
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
                let Some(mut range) = turn.core.staging.take(16) else {
                    return Try::NoRoom;
                };
                // A Dataset Management range (NVM Command Set 3.2.3.1).
                let block = u64::from(self.disk.block_bytes);
                let bytes = range.as_mut_slice();
                bytes.fill(0);
                bytes[4..8].copy_from_slice(&((len_bytes / block) as u32).to_le_bytes());
                bytes[8..16].copy_from_slice(&(offset_bytes / block).to_le_bytes());
                buffer = Some(range);
                IoOp::Deallocate { ranges: 1 }
            }
            Work::GetId => return Try::Failed,
        };
        if part > 0 && !self.collect(turn, begun, part) {
            return Try::Failed;
        }
        let record = turn.client.command_ref(lane, slot);
        if buffer.is_none() {
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
        };
        match turn.core.start_machine(new, &mut self.pieces) {
            Ok(()) => Try::Begun,
            Err(new) => {
                if let Some(buffer) = new.buffer {
                    turn.core.staging.give(buffer);
                }
                Try::NoRoom
            }
        }
    }

    /// Finds `part` bytes of a request's data in memory, from those on that the core has.
    #[inline]
    fn collect(&mut self, turn: &Turn<'_>, begun: &Begun, part: u32) -> bool {
        let (mut skip, mut left) = (begun.started, part);
        let write = matches!(begun.work, Work::In { .. });
        let memory = turn.client.memory();
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

    fn identify(&self, turn: &Turn<'_>, request: &Request) -> Status {
        let mut id = [0; ID_BYTES];
        let serial = turn.client.export().serial.as_bytes();
        let n = serial.len().min(ID_BYTES);
        id[..n].copy_from_slice(&serial[..n]);
        let mut rest = &id[..];
        for piece in request.data(&self.chain) {
            let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
            if !turn.client.memory().write(piece.address, now) {
                return Status::IoErr;
            }
            rest = later;
        }
        Status::Ok
    }

    /// Returns the chains of what was over as soon as it was begun: together, so that the driver is shown them together.
    #[inline]
    pub(super) fn finish_over(&mut self, turn: &mut Turn<'_>) {
        if let Some(lane) = turn.client.lane().and_then(|lane| turn.core.lane(lane)) {
            lane.count_at_once(&mut self.at_once);
        }
        for at in 0..self.over.len() {
            let (queue, tag, status) = self.over[at];
            self.finish(turn, queue, tag, status);
        }
        self.over.clear();
    }

    /// Returns a chain with its status.
    fn finish(&mut self, turn: &mut Turn<'_>, queue: u16, tag: u16, status: Status) {
        let number = slot_of(queue, tag);
        area(turn).end(number);
        if self.blamed == Some(number) {
            self.blamed = None;
            area(turn).set_blamed(None);
        }
        let Some(Some(line)) = self.lines.get_mut(usize::from(queue)) else {
            return;
        };
        let Some(slot) = line.slots.get(usize::from(tag)) else {
            return;
        };
        // Without a place for it there is nobody to tell.
        let _ = turn
            .client
            .memory()
            .write(slot.status_address, &[status as u8]);
        let written = match status {
            Status::Ok => slot.written,
            _ => 1,
        };
        line.queue.put(tag, written);
        line.ended = true;
    }

    /// A command came back from the core.
    #[inline]
    pub(super) fn ended(&mut self, turn: &mut Turn<'_>, done: DoneIo) {
        let number = done.owner.slot;
        let (queue, tag) = (number / MAX_QUEUE_SIZE, number % MAX_QUEUE_SIZE);
        let good = is_good(done.status);
        count(turn.core, done.lane, &done.op, good, done.started_ns);
        if let Some(buffer) = done.buffer {
            turn.core.staging.give(buffer);
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
            let status = if slot.bad { Status::IoErr } else { Status::Ok };
            self.finish(turn, queue, tag, status);
        }
    }
}

/// What a request may have at devices.
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
