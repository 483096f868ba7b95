//! The start of an I/O command: fetch, record, begin.
//!
//! Each turn copies a batch of entries per queue. Refused commands and those that complete at once
//! are recorded, too, so that they are answered exactly once. After the batch the queue's cursor is
//! recorded. A command is taken only if its completion has room, so a completion queue never
//! overflows; its head is read only when it seems full. No allocation, lock, log or system call.
//!
//! **Not here:** doorbells ([`super::bells`]), the end ([`super::completion`]), the Admin queue
//! ([`super::admin`]).

use super::commands::CommandWork;
use super::memory::{ClientMemory, NSID};
use super::{MDTS_BYTES, Pcie};
use crate::core::staging::StagingBuffer;
use crate::core::{IoOp, NewIo};
use crate::frontend::vm::protocol::Turn;
use crate::lane::{Lane, LaneIndex};
use forebay_guest::PieceError;
use forebay_nvme::io::{self, IoCommand, NamespaceGeometry, Transfer};
use forebay_nvme::pcie::{Doorbell, data};
use forebay_nvme::{Sqe, Status};
use forebay_xlate::kill_point;
use std::sync::atomic::Ordering::Relaxed;
use zerocopy::FromBytes;

/// Entries per queue and turn.
pub(super) const BATCH: usize = 32;
/// Cost of a client's commands per turn.
pub(super) const BUDGET: u32 = 256;
/// Longer commands have an address list, which must be read.
const LISTED_BYTES: u32 = 8192;
/// Its extra cost.
pub(super) const LIST_COST: u32 = 3;
/// After this many deaths a command is not tried again.
const MAX_DEATHS: u8 = 3;

pub(super) fn judge(
    sqe: &Sqe,
    geometry: &NamespaceGeometry,
) -> Result<(Option<CommandWork>, Transfer), Status> {
    let command = io::decode_without_reservations(sqe, NSID, geometry, MDTS_BYTES)?;
    let bytes = |blocks: u64| blocks * u64::from(geometry.block_bytes);
    let durable = |fua, op| match fua {
        true => CommandWork::Durable(op),
        false => CommandWork::Io(op),
    };
    let work = match command {
        IoCommand::Read { lba, blocks, fua } => Some(durable(
            fua,
            IoOp::Read {
                offset_bytes: bytes(lba),
                len_bytes: bytes(u64::from(blocks)) as u32,
            },
        )),
        IoCommand::Compare { lba, blocks, fua } => Some(durable(
            fua,
            IoOp::Compare {
                offset_bytes: bytes(lba),
                len_bytes: bytes(u64::from(blocks)) as u32,
            },
        )),
        IoCommand::Write { lba, blocks, fua } => Some(CommandWork::Io(IoOp::Write {
            offset_bytes: bytes(lba),
            len_bytes: bytes(u64::from(blocks)) as u32,
            fua,
        })),
        IoCommand::Flush => Some(CommandWork::Io(IoOp::Flush)),
        IoCommand::WriteZeroes {
            lba,
            blocks,
            fua,
            deallocate,
        } => Some(CommandWork::Io(IoOp::WriteZeroes {
            offset_bytes: bytes(lba),
            len_bytes: bytes(u64::from(blocks)),
            deallocate,
            fua,
        })),
        IoCommand::Deallocate { ranges } => Some(CommandWork::Io(IoOp::Deallocate { ranges })),
        IoCommand::Hint { .. } => None,
        // Reservation opcodes are refused before.
        IoCommand::Reserve { .. } | IoCommand::ReservationReport { .. } => {
            return Err(Status::INVALID_OPCODE.with_dnr());
        }
    };
    Ok((work, command.transfer(geometry)))
}

pub(super) enum BeginResult {
    Yes,
    Ended(Status),
    NoRoom,
}

impl Pcie {
    /// True if there were any commands.
    #[inline]
    pub(super) fn fetch(&mut self, turn: &mut Turn<'_>, qid: u16) -> bool {
        let tail = self.rings.bell(&self.records, Doorbell::Tail(qid));
        let Some(sq) = self.rings.sqs[usize::from(qid)].as_mut() else {
            return false;
        };
        if tail != sq.cursor.tail() && sq.cursor.set_tail(tail).is_err() {
            self.rings.mend(Doorbell::Tail(qid));
            self.bad_doorbell(false, qid);
            return true;
        }
        if sq.cursor.is_empty() || self.deleting == Some(qid) {
            return false;
        }
        self.fetch_batch(turn, qid)
    }

    fn fetch_batch(&mut self, turn: &mut Turn<'_>, qid: u16) -> bool {
        let Some(sq) = self.rings.sqs[usize::from(qid)].as_ref() else {
            return false;
        };
        let cqid = sq.cursor.cqid;
        let (from, run) = sq.cursor.run();
        let most = run.min(BATCH as u32).min(self.budget);
        let mut wanted = most;
        let Some(cq) = self.rings.cqs[usize::from(cqid)].as_mut() else {
            return false;
        };
        if cq.cursor.room() < wanted {
            if !self.rings.read_head(&self.records, cqid) {
                self.bad_doorbell(false, cqid);
            }
            let room = self.rings.cqs[usize::from(cqid)].as_ref();
            wanted = wanted.min(room.map_or(0, |cq| cq.cursor.room()));
        }
        let wanted = (wanted as usize).min(self.commands.free.len());
        let lane = turn.client.lane();
        let may_fetch = |turn: &mut Turn<'_>| lane.is_none_or(|lane| turn.core.qos.may_fetch(lane));
        if wanted == 0 || !may_fetch(turn) || !self.read_batch(turn, qid, from, wanted) {
            return false;
        }
        let geometry = lane
            .and_then(|lane| turn.core.lane(lane))
            .map(Lane::geometry);
        let mut taken = 0;
        while self.begin_fetched(turn, qid, taken, geometry.as_ref()) {
            taken += 1;
            if taken == wanted || !may_fetch(turn) {
                break;
            }
        }
        if taken == 0 {
            return false;
        }
        if let Some(sq) = self.rings.sqs[usize::from(qid)].as_ref() {
            self.budget = self.budget.saturating_sub(taken as u32);
            self.records.set_taken(qid, sq.cursor.taken());
            kill_point!("pcie.fetched");
            self.more |= taken == most as usize && !sq.cursor.is_empty();
            self.rings.stay_quiet(qid);
        }
        self.answer_over(turn);
        true
    }

    #[inline]
    pub(super) fn answer_over(&mut self, turn: &mut Turn<'_>) {
        let lane = turn.client.lane();
        self.commands.count_at_once(turn);
        for at in 0..self.commands.over.len() {
            let (slot, status) = self.commands.over[at];
            if let Some(lane) = lane {
                let record = turn.client.command_ref(lane, slot);
                turn.core.record().blame.store(record.blame(), Relaxed);
            }
            self.complete(turn, slot, status);
        }
        self.commands.over.clear();
    }

    /// False: the memory is missing.
    #[inline]
    fn read_batch(&mut self, turn: &mut Turn<'_>, qid: u16, from: u32, count: usize) -> bool {
        let base = self.function.queues().0[usize::from(qid)].base;
        let into = &mut self.batch[..count * 64];
        let memory = turn.client.memory();
        let read = (self.rings).read_entries(memory, base, qid, from, into);
        if !read {
            self.rings.miss_memory(turn.core.now_ns());
        }
        read
    }

    #[inline]
    fn begin_fetched(
        &mut self,
        turn: &mut Turn<'_>,
        qid: u16,
        at: usize,
        geometry: Option<&NamespaceGeometry>,
    ) -> bool {
        let Ok(sqe) = Sqe::ref_from_bytes(&self.batch[at * 64..at * 64 + 64]) else {
            return false;
        };
        let sqe = *sqe;
        let (Some(sq), Some(slot)) = (
            self.rings.sqs[usize::from(qid)].as_mut(),
            self.commands.free.pop(),
        ) else {
            return false;
        };
        self.records
            .record_fetched(slot, qid, sq.cursor.taken(), &sqe);
        kill_point!("pcie.taken");
        let begun = match geometry {
            Some(geometry) => self.begin(turn, qid, slot, &sqe, geometry),
            None => {
                self.commands
                    .note(turn, qid, slot, sqe.cid(), CommandWork::Io(IoOp::Flush));
                BeginResult::Ended(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr())
            }
        };
        match begun {
            BeginResult::Yes => {}
            BeginResult::Ended(status) => self.commands.over.push((slot, status)),
            BeginResult::NoRoom => {
                self.records.free(slot);
                self.commands.free.push(slot);
                return false;
            }
        }
        self.rings.hold_place(qid);
        if let Some(sq) = self.rings.sqs[usize::from(qid)].as_mut() {
            sq.cursor.consume(1);
        }
        true
    }

    #[inline]
    pub(super) fn begin(
        &mut self,
        turn: &mut Turn<'_>,
        qid: u16,
        slot: u16,
        sqe: &Sqe,
        geometry: &NamespaceGeometry,
    ) -> BeginResult {
        if let Some(lane) = turn.client.lane() {
            let record = turn.client.command_ref(lane, slot);
            turn.core.record().blame.store(record.blame(), Relaxed);
        }
        let (work, transfer) = match judge(sqe, geometry) {
            Ok((Some(work), transfer)) => (work, transfer),
            _ if !turn.core.qos.may_answer(turn.client.lane()) => return BeginResult::NoRoom,
            Ok((None, _)) => {
                self.commands
                    .note(turn, qid, slot, sqe.cid(), CommandWork::Io(IoOp::Flush));
                return BeginResult::Ended(Status::SUCCESS);
            }
            Err(status) => {
                self.commands
                    .note(turn, qid, slot, sqe.cid(), CommandWork::Io(IoOp::Flush));
                return BeginResult::Ended(status);
            }
        };
        self.commands.note(turn, qid, slot, sqe.cid(), work);
        if transfer.bytes() > LISTED_BYTES {
            self.budget = self.budget.saturating_sub(LIST_COST);
        }
        self.pieces.clear();
        let to_host = matches!(transfer, Transfer::ToHost(_));
        let memory = turn.client.memory();
        let pieces = &mut self.pieces;
        let found = data::pieces(
            sqe,
            transfer.bytes(),
            &ClientMemory(memory),
            |address, len| match pieces.push(memory, address, len, to_host) {
                Ok(()) => Ok(()),
                Err(PieceError::NotMapped) => Err(Status::DATA_TRANSFER_ERROR),
                Err(PieceError::TooMany) => Err(Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS),
            },
        );
        if let Err(status) = found {
            if status == Status::DATA_TRANSFER_ERROR {
                return self.begin_remote(turn, slot, work, transfer.bytes(), to_host);
            }
            self.pieces.clear();
            // It costs a part of the turn.
            turn.core.qos.may_answer(turn.client.lane());
            return BeginResult::Ended(status.with_dnr());
        }
        match work {
            CommandWork::Io(IoOp::Deallocate { ranges }) => {
                self.begin_deallocating(turn, slot, ranges, geometry)
            }
            CommandWork::Io(op) if self.commands.is_over(turn, &op, &mut self.pieces) => {
                BeginResult::Ended(Status::SUCCESS)
            }
            _ => self.start(turn, slot, work, None),
        }
    }

    /// The ranges are copied once, so that the checked values are used.
    #[cold]
    pub(super) fn begin_deallocating(
        &mut self,
        turn: &mut Turn<'_>,
        slot: u16,
        ranges: u16,
        geometry: &NamespaceGeometry,
    ) -> BeginResult {
        let bytes = usize::from(ranges) * io::DSM_RANGE_BYTES;
        let Some(mut buffer) = turn.core.staging.allocate(bytes as u32) else {
            self.pieces.clear();
            return BeginResult::NoRoom;
        };
        let list = &mut buffer.as_mut_slice()[..bytes];
        let sound = match self.pieces.read(0, list) {
            true => io::dsm_ranges(list, ranges, geometry).map(drop),
            false => Err(Status::DATA_TRANSFER_ERROR.with_dnr()),
        };
        self.pieces.clear();
        if let Err(status) = sound {
            turn.core.staging.release(buffer);
            turn.core.qos.may_answer(turn.client.lane());
            return BeginResult::Ended(status);
        }
        let work = CommandWork::Io(IoOp::Deallocate { ranges });
        self.start(turn, slot, work, Some(buffer))
    }

    #[inline]
    pub(super) fn start(
        &mut self,
        turn: &mut Turn<'_>,
        slot: u16,
        work: CommandWork,
        buffer: Option<StagingBuffer>,
    ) -> BeginResult {
        let Some(lane) = turn.client.lane() else {
            self.pieces.clear();
            if let Some(buffer) = buffer {
                turn.core.staging.release(buffer);
            }
            return BeginResult::Ended(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        };
        let record = turn.client.command_ref(lane, slot);
        let op = match work {
            // Only the guest's own Flush. It has no buffer to return.
            CommandWork::Io(IoOp::Flush) if turn.core.lanes.keeps_vms_from_writing(lane) => {
                return BeginResult::Ended(Status::RESERVATION_CONFLICT.with_dnr());
            }
            CommandWork::Io(op) => op,
            CommandWork::Durable(_) => IoOp::Flush,
        };
        let new = NewIo {
            owner: turn.client.owner(slot),
            lane,
            op,
            buffer,
            record,
            over_ns: None,
        };
        match turn.core.start_vm_io(new, &mut self.pieces) {
            Ok(()) => BeginResult::Yes,
            Err(new) => {
                self.pieces.clear();
                if let Some(buffer) = new.buffer {
                    turn.core.staging.release(buffer);
                }
                BeginResult::NoRoom
            }
        }
    }

    /// Retries recovered commands, and those that found no room; true if there were any.
    #[cold]
    pub(super) fn begin_again(&mut self, turn: &mut Turn<'_>) -> bool {
        let lane = turn.client.lane();
        let geometry = lane
            .and_then(|lane| turn.core.lane(lane))
            .map(Lane::geometry);
        let mut any = false;
        // The first stays queued until it has begun: see `begin_remote`.
        while let Some(slot) = self.commands.again.front().copied() {
            let sqid = self.commands.get(slot).sqid;
            let sqe = self.records.sqe(slot);
            let dead = self.records.state(slot).deaths() >= MAX_DEATHS;
            let begun = match &geometry {
                _ if dead => BeginResult::Ended(Status::INTERNAL_ERROR.with_dnr()),
                Some(geometry) => self.begin(turn, sqid, slot, &sqe, geometry),
                None => BeginResult::Ended(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()),
            };
            if matches!(begun, BeginResult::NoRoom) {
                break;
            }
            self.commands.again.pop_front();
            if let BeginResult::Ended(status) = begun {
                if let Some(lane) = lane {
                    let record = turn.client.command_ref(lane, slot);
                    turn.core.recovered.refused(record);
                }
                self.complete(turn, slot, status);
            }
            any = true;
        }
        self.commands.count_at_once(turn);
        any
    }
}

pub(super) fn lane_of(turn: &Turn<'_>) -> Option<LaneIndex> {
    turn.client.lane()
}
