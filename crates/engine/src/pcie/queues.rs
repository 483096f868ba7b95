//! The path of an I/O command: doorbell, fetch, start, completion.
//!
//! **Design.** Each turn looks at each queue's tail once and takes a batch of entries with one copy. A command
//! gets a slot and a record, then its data is found and the core begins it; what is refused, or over at once, is recorded all
//! the same, so that it too is answered once. When the batch is taken, the queue's cursor is recorded, and what is over already is answered. A completion is noted in the command's
//! record with its place, written to the queue (the half with the phase tag last), the cursor is recorded, and
//! the slot is free: a successor that finds the note writes the same to the same place.
//!
//! A command is taken only when its completion has room, so a completion queue is never full, and its head is looked at only
//! when there seems to be none. No allocation, lock, log or system call. **Not here:** the Admin queue ([`super::admin`]).

use super::memory::{ClientMemory, NSID};
use super::record::{Completion, Stage};
use super::{Bells, COMMANDS, Command, MDTS_BYTES, Pcie, Work};
use crate::core::staging::StagingBuffer;
use crate::core::{Core, DoneIo, IoOp, NewIo};
use crate::lane::{Lane, LaneIndex};
use crate::vm::frontend::Turn;
use forebay_guest::PieceError;
use forebay_nvme::io::{self, IoCommand, NamespaceGeometry, Transfer};
use forebay_nvme::pcie::{Doorbell, data, queue, shadow};
use forebay_nvme::{Cqe, Sqe, Status};
use forebay_xlate::boundary::region::TimesOf;
use forebay_xlate::kill_point;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use zerocopy::FromBytes;

/// Entries that are taken from one queue in one turn.
pub(super) const BATCH: usize = 32;
/// What a client's commands may cost in one turn: others are to have theirs.
const BUDGET: u32 = 256;
/// Commands that move more have a list of addresses, which must be read,
const LISTED_BYTES: u32 = 8192;
/// and that costs so many others.
pub(super) const LIST_COST: u32 = 3;
/// The engines that may die of a command.
const MAX_DEATHS: u8 = 3;

/// What is to be done, of a command that makes sense; and its data.
pub(super) fn judge(
    sqe: &Sqe,
    geometry: &NamespaceGeometry,
) -> Result<(Option<Work>, Transfer), Status> {
    let command = io::decode(sqe, NSID, geometry, MDTS_BYTES)?;
    let bytes = |blocks: u64| blocks * u64::from(geometry.block_bytes);
    let durable = |fua, op| match fua {
        true => Work::Durable(op),
        false => Work::Io(op),
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
        IoCommand::Write { lba, blocks, fua } => Some(Work::Io(IoOp::Write {
            offset_bytes: bytes(lba),
            len_bytes: bytes(u64::from(blocks)) as u32,
            fua,
        })),
        IoCommand::Flush => Some(Work::Io(IoOp::Flush)),
        IoCommand::WriteZeroes {
            lba,
            blocks,
            fua,
            deallocate,
        } => Some(Work::Io(IoOp::WriteZeroes {
            offset_bytes: bytes(lba),
            len_bytes: bytes(u64::from(blocks)),
            deallocate,
            fua,
        })),
        IoCommand::Deallocate { ranges } => Some(Work::Io(IoOp::Deallocate { ranges })),
        IoCommand::Hint { .. } => None,
        // Reservations are not offered.
        IoCommand::Reserve { .. } | IoCommand::ReservationReport { .. } => {
            return Err(Status::INVALID_OPCODE.with_dnr());
        }
    };
    Ok((work, command.transfer(geometry)))
}

/// How an attempt to begin a command went.
pub(super) enum Begun {
    Yes,
    /// It ends so, without having begun.
    Ended(Status),
    /// There is no room now.
    NoRoom,
}

impl Pcie {
    /// What a doorbell says now.
    #[inline]
    pub(super) fn bell(&self, doorbell: Doorbell) -> u32 {
        let (Doorbell::Tail(qid) | Doorbell::Head(qid)) = doorbell;
        match (&self.shadow, &self.bells) {
            // The Admin queue's are written to their registers, always.
            (Some(shadow), _) if qid > 0 => {
                let bells = shadow.bells.as_ref();
                let value = bells.and_then(|bells| bells.load_u32(doorbell.offset(), Acquire));
                // As it was, where its memory is away.
                value.unwrap_or_else(|| self.known(doorbell))
            }
            (_, Bells::Page(page)) => page.load_u32(doorbell.offset(), Acquire).unwrap_or(0),
            (_, Bells::Registers) => self.records.doorbell(doorbell),
        }
    }

    /// What a doorbell said last.
    fn known(&self, doorbell: Doorbell) -> u32 {
        match doorbell {
            Doorbell::Tail(qid) => {
                let sq = self.sqs.get(usize::from(qid)).and_then(Option::as_ref);
                sq.map_or(0, |sq| sq.cursor.tail())
            }
            Doorbell::Head(qid) => {
                let cq = self.cqs.get(usize::from(qid)).and_then(Option::as_ref);
                cq.map_or(0, |cq| cq.cursor.head())
            }
        }
    }

    /// A doorbell in memory has a value that it can't have: it gets the last one that was sound.
    #[cold]
    pub(super) fn mend_bell(&self, doorbell: Doorbell) {
        let (Doorbell::Tail(qid) | Doorbell::Head(qid)) = doorbell;
        let known = self.known(doorbell);
        let page = match (&self.shadow, &self.bells) {
            (Some(shadow), _) if qid > 0 => shadow.bells.as_ref(),
            (_, Bells::Page(page)) => Some(page),
            (_, Bells::Registers) => None,
        };
        if let Some(page) = page {
            let _ = page.store_u32(doorbell.offset(), known, Relaxed);
        }
    }

    /// A doorbell was written that belongs to no queue, or with a value that it can't have.
    #[cold]
    pub(super) fn bad_doorbell(&mut self, register: bool, qid: u16) {
        let controller = self.function.controller_mut();
        controller.invalid_doorbell(register, qid);
        self.events = true;
        self.save();
    }

    /// The doorbells of a new queue begin at 0.
    pub(super) fn clear_bells(&self, qid: u16, tail: bool, head: bool) {
        if let Bells::Page(page) = &self.bells {
            for (doorbell, clears) in [(Doorbell::Tail(qid), tail), (Doorbell::Head(qid), head)] {
                if clears {
                    let _ = page.store_u32(doorbell.offset(), 0, Relaxed);
                }
            }
        }
    }

    /// Shadow doorbells begin where the queues are that there were before them.
    pub(super) fn fill_shadow(&self) {
        let Some(shadow) = &self.shadow else { return };
        for qid in 1..self.sqs.len() as u16 {
            for doorbell in [Doorbell::Tail(qid), Doorbell::Head(qid)] {
                if let Some(bells) = &shadow.bells {
                    let _ = bells.store_u32(doorbell.offset(), self.known(doorbell), Relaxed);
                }
                if let Some(index) = &shadow.event_index {
                    let _ = index.store_u32(doorbell.offset(), shadow::QUIET, Relaxed);
                }
            }
        }
    }

    #[inline]
    pub(super) fn poll_queues(&mut self, turn: &mut Turn<'_>) -> bool {
        if !self.live {
            return self.quiesce.is_some() && self.go_on_quiescing(turn);
        }
        self.more = false;
        if self.armed {
            self.be_quiet();
        }
        if !self.held.is_empty() || self.lost_ns.is_some() {
            self.find_memory(turn);
        }
        let mut any = false;
        if !self.again.is_empty() {
            any |= self.begin_again(turn);
        }
        if self.remote.busy {
            any |= self.move_remote(turn);
        }
        any |= self.poll_admin(turn);
        self.budget = BUDGET;
        let queues = self.active.len();
        for at in 0..queues {
            // Who comes first when there is too much for a turn changes with each.
            let at = (self.first + at) % queues;
            let Some(qid) = self.active.get(at).copied() else {
                break;
            };
            if self.budget == 0 {
                self.first = at;
                self.more = true;
                break;
            }
            any |= self.fetch(turn, qid);
        }
        any
    }

    /// Takes commands from a submission queue. True if there were any.
    #[inline]
    fn fetch(&mut self, turn: &mut Turn<'_>, qid: u16) -> bool {
        let tail = self.bell(Doorbell::Tail(qid));
        let Some(sq) = self.sqs[usize::from(qid)].as_mut() else {
            return false;
        };
        if tail != sq.cursor.tail() && sq.cursor.set_tail(tail).is_err() {
            self.mend_bell(Doorbell::Tail(qid));
            self.bad_doorbell(false, qid);
            return true;
        }
        if sq.cursor.is_empty() || self.deleting == Some(qid) {
            return false;
        }
        self.take_batch(turn, qid)
    }

    fn take_batch(&mut self, turn: &mut Turn<'_>, qid: u16) -> bool {
        let Some(sq) = self.sqs[usize::from(qid)].as_ref() else {
            return false;
        };
        let cqid = sq.cursor.cqid;
        let (from, run) = sq.cursor.run();
        let most = run.min(BATCH as u32).min(self.budget);
        let mut wanted = most;
        let Some(cq) = self.cqs[usize::from(cqid)].as_mut() else {
            return false;
        };
        if cq.cursor.room() < wanted {
            self.look_at_head(cqid);
            let room = self.cqs[usize::from(cqid)].as_ref();
            wanted = wanted.min(room.map_or(0, |cq| cq.cursor.room()));
        }
        let wanted = (wanted as usize).min(self.free.len());
        if wanted == 0 || !self.read_entries(turn, qid, from, wanted) {
            return false;
        }
        let lane = turn.client.lane();
        let geometry = lane
            .and_then(|lane| turn.core.lane(lane))
            .map(Lane::geometry);
        let mut taken = 0;
        while taken < wanted {
            if !self.take_one(turn, qid, taken, geometry.as_ref()) {
                break;
            }
            taken += 1;
        }
        if taken == 0 {
            return false;
        }
        if let Some(sq) = self.sqs[usize::from(qid)].as_ref() {
            self.budget = self.budget.saturating_sub(taken as u32);
            self.records.set_taken(qid, sq.cursor.taken());
            kill_point!("pcie.fetched");
            self.more |= taken == most as usize && !sq.cursor.is_empty();
        }
        self.count_at_once(turn);
        for at in 0..self.over.len() {
            let (slot, status) = self.over[at];
            if let Some(lane) = lane {
                let record = turn.client.command_ref(lane, slot);
                turn.core.record().blame.store(record.blame(), Relaxed);
            }
            self.complete(turn, slot, status);
        }
        self.over.clear();
        true
    }

    /// Counts what was over at once.
    #[inline]
    fn count_at_once(&mut self, turn: &Turn<'_>) {
        if let Some(lane) = turn.client.lane().and_then(|lane| turn.core.lane(lane)) {
            lane.count_at_once(&mut self.at_once);
        }
    }

    /// Copies entries out of a queue's memory. False if that isn't there.
    #[inline]
    fn read_entries(&mut self, turn: &mut Turn<'_>, qid: u16, from: u32, count: usize) -> bool {
        let Some(sq) = self.sqs[usize::from(qid)].as_mut() else {
            return false;
        };
        if sq.ring.is_none() {
            let state = &self.function.queues().0[usize::from(qid)];
            let bytes = state.entries as usize * 64;
            sq.ring = turn.client.memory().area(state.base, bytes);
        }
        let read = sq.ring.as_ref().is_some_and(|ring| {
            let into = &mut self.batch[..count * 64];
            ring.read(from as usize * 64, into)
        });
        if !read {
            self.miss_memory(turn.core.now_ns());
        }
        read
    }

    /// Takes one of the entries that were copied. False: there is no room for it now.
    #[inline]
    fn take_one(
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
        let (Some(sq), Some(slot)) = (self.sqs[usize::from(qid)].as_mut(), self.free.pop()) else {
            return false;
        };
        self.records.take(slot, qid, sq.cursor.taken(), &sqe);
        kill_point!("pcie.taken");
        let begun = match geometry {
            Some(geometry) => self.begin(turn, qid, slot, &sqe, geometry),
            // The export is removed.
            None => {
                self.note(turn, qid, slot, sqe.cid(), Work::Io(IoOp::Flush));
                Begun::Ended(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr())
            }
        };
        match begun {
            Begun::Yes => {}
            Begun::Ended(status) => self.over.push((slot, status)),
            Begun::NoRoom => {
                self.records.free(slot);
                self.free.push(slot);
                return false;
            }
        }
        self.hold_place(qid);
        if let Some(sq) = self.sqs[usize::from(qid)].as_mut() {
            sq.cursor.take(1);
        }
        true
    }

    /// A command of a submission queue is in hand: its completion has a place.
    #[inline]
    pub(super) fn hold_place(&mut self, qid: u16) {
        if let Some(sq) = self.sqs[usize::from(qid)].as_mut() {
            sq.in_flight += 1;
            if let Some(cq) = self.cqs[usize::from(sq.cursor.cqid)].as_mut() {
                cq.cursor.reserve();
            }
        }
    }

    #[inline]
    fn note(&mut self, turn: &Turn<'_>, sqid: u16, slot: u16, cid: u16, work: Work) {
        self.commands[usize::from(slot) % COMMANDS] = Command {
            sqid,
            cid,
            work,
            taken_ns: turn.core.now_ns(),
        };
    }

    /// Begins a command that has a record.
    #[inline]
    pub(super) fn begin(
        &mut self,
        turn: &mut Turn<'_>,
        qid: u16,
        slot: u16,
        sqe: &Sqe,
        geometry: &NamespaceGeometry,
    ) -> Begun {
        if let Some(lane) = turn.client.lane() {
            let record = turn.client.command_ref(lane, slot);
            turn.core.record().blame.store(record.blame(), Relaxed);
        }
        let (work, transfer) = match judge(sqe, geometry) {
            Ok((Some(work), transfer)) => (work, transfer),
            Ok((None, _)) => {
                self.note(turn, qid, slot, sqe.cid(), Work::Io(IoOp::Flush));
                return Begun::Ended(Status::SUCCESS);
            }
            Err(status) => {
                self.note(turn, qid, slot, sqe.cid(), Work::Io(IoOp::Flush));
                return Begun::Ended(status);
            }
        };
        self.note(turn, qid, slot, sqe.cid(), work);
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
            return Begun::Ended(status.with_dnr());
        }
        match work {
            Work::Io(IoOp::Deallocate { ranges }) => {
                self.begin_deallocating(turn, slot, ranges, geometry)
            }
            Work::Io(op) if self.is_over(turn, &op) => Begun::Ended(Status::SUCCESS),
            _ => self.start(turn, slot, work, None),
        }
    }

    /// Whether a command could be carried out at once: then it was.
    #[inline]
    fn is_over(&mut self, turn: &mut Turn<'_>, op: &IoOp) -> bool {
        let Some(lane) = turn.client.lane() else {
            return false;
        };
        if !turn.core.at_once(lane, op, &self.pieces) {
            return false;
        }
        let write = matches!(op, IoOp::Write { .. });
        self.at_once.add(write, self.pieces.len_bytes());
        self.pieces.clear();
        true
    }

    /// Ranges are copied once: what was checked is what is done.
    #[cold]
    pub(super) fn begin_deallocating(
        &mut self,
        turn: &mut Turn<'_>,
        slot: u16,
        ranges: u16,
        geometry: &NamespaceGeometry,
    ) -> Begun {
        let bytes = usize::from(ranges) * io::DSM_RANGE_BYTES;
        let Some(mut buffer) = turn.core.staging.take(bytes as u32) else {
            self.pieces.clear();
            return Begun::NoRoom;
        };
        let list = &mut buffer.as_mut_slice()[..bytes];
        let sound = match self.pieces.read(0, list) {
            true => io::dsm_ranges(list, ranges, geometry).map(drop),
            false => Err(Status::DATA_TRANSFER_ERROR.with_dnr()),
        };
        self.pieces.clear();
        if let Err(status) = sound {
            turn.core.staging.give(buffer);
            return Begun::Ended(status);
        }
        let work = Work::Io(IoOp::Deallocate { ranges });
        self.start(turn, slot, work, Some(buffer))
    }

    /// Gives a command to the core; its pieces are there.
    #[inline]
    pub(super) fn start(
        &mut self,
        turn: &mut Turn<'_>,
        slot: u16,
        work: Work,
        buffer: Option<StagingBuffer>,
    ) -> Begun {
        let Some(lane) = turn.client.lane() else {
            self.pieces.clear();
            if let Some(buffer) = buffer {
                turn.core.staging.give(buffer);
            }
            return Begun::Ended(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        };
        let record = turn.client.command_ref(lane, slot);
        let op = match work {
            // Only the guest's own: no buffer comes with one.
            Work::Io(IoOp::Flush) if turn.core.keeps_machines_from_writing(lane) => {
                return Begun::Ended(Status::RESERVATION_CONFLICT.with_dnr());
            }
            Work::Io(op) => op,
            Work::Durable(_) => IoOp::Flush,
        };
        let new = NewIo {
            owner: turn.client.owner(slot),
            lane,
            op,
            buffer,
            record,
        };
        match turn.core.start_machine(new, &mut self.pieces) {
            Ok(()) => Begun::Yes,
            Err(new) => {
                self.pieces.clear();
                if let Some(buffer) = new.buffer {
                    turn.core.staging.give(buffer);
                }
                Begun::NoRoom
            }
        }
    }

    /// The core ended a command.
    #[inline]
    pub(super) fn ended(&mut self, turn: &mut Turn<'_>, done: &DoneIo) {
        let slot = done.owner.slot;
        if usize::from(slot) >= COMMANDS {
            return self.flushed(done.status);
        }
        let record = turn.client.command_ref(done.lane, slot);
        turn.core.record().blame.store(record.blame(), Relaxed);
        let command = self.commands[usize::from(slot)];
        let status = match done.status {
            Status::COMMAND_INTERRUPTED => self.function.controller().interrupted_status(),
            status => status,
        };
        if let (Work::Durable(op), true) = (command.work, status.is_success())
            && !self.answers_nobody()
        {
            return self.after_flush(turn, slot, op);
        }
        let (Work::Io(op) | Work::Durable(op)) = &command.work;
        let times = (command.taken_ns, done.started_ns);
        count(turn.core, done.lane, op, status, times);
        if self.remote.busy && self.goes_out(slot, status, self.answers_nobody()) {
            return;
        }
        self.complete(turn, slot, status);
    }

    /// What there was is durable: now the command itself, whose entry is in its record.
    #[cold]
    fn after_flush(&mut self, turn: &mut Turn<'_>, slot: u16, op: IoOp) {
        let command = &mut self.commands[usize::from(slot) % COMMANDS];
        command.work = Work::Io(op);
        if self.remote.busy && self.goes_on(slot, op) {
            return;
        }
        let sqe = self.records.sqe(slot);
        let (to_host, bytes) = match op {
            IoOp::Read { len_bytes, .. } => (true, len_bytes),
            IoOp::Compare { len_bytes, .. } => (false, len_bytes),
            _ => (false, 0),
        };
        self.pieces.clear();
        let memory = turn.client.memory();
        let pieces = &mut self.pieces;
        let found = data::pieces(&sqe, bytes, &ClientMemory(memory), |address, len| {
            let pushed = pieces.push(memory, address, len, to_host);
            pushed.map_err(|_| Status::DATA_TRANSFER_ERROR)
        });
        let begun = match found {
            Ok(()) => self.start(turn, slot, Work::Io(op), None),
            Err(Status::DATA_TRANSFER_ERROR) => {
                self.begin_remote(turn, slot, Work::Io(op), bytes, to_host)
            }
            Err(status) => Begun::Ended(status.with_dnr()),
        };
        match begun {
            Begun::Yes => {}
            Begun::Ended(status) => self.complete(turn, slot, status),
            // From its beginning, when there is.
            Begun::NoRoom => self.again.push_back(slot),
        }
    }

    /// Whether nobody waits for answers.
    #[inline]
    fn answers_nobody(&self) -> bool {
        self.closed || self.quiesce.as_ref().is_some_and(|q| q.drops())
    }

    /// Answers a command, and frees its slot.
    #[inline]
    pub(super) fn complete(&mut self, turn: &mut Turn<'_>, slot: u16, status: Status) {
        let command = self.commands[usize::from(slot) % COMMANDS];
        if self.answers_nobody() {
            self.forget(slot);
            return;
        }
        let Some(sq) = self.sqs[usize::from(command.sqid)].as_mut() else {
            self.forget(slot);
            return;
        };
        let (cqid, head) = (sq.cursor.cqid, sq.cursor.head());
        let Some(cq) = self.cqs[usize::from(cqid)].as_mut() else {
            self.forget(slot);
            return;
        };
        let is_master = cq.ring.is_some() || self.function.is_bus_master();
        if cq.ring.is_none() && is_master {
            let state = &self.function.queues().1[usize::from(cqid)];
            let bytes = state.entries as usize * 16;
            cq.ring = turn.client.memory().area(state.base, bytes);
        }
        let Some(ring) = cq.ring.as_ref() else {
            self.held.push((slot, status));
            if is_master {
                self.miss_memory(turn.core.now_ns());
            }
            return;
        };
        let (index, phase) = cq.cursor.next();
        let number = cq.cursor.posted() as u32;
        let noted = Completion {
            number,
            status: status.0,
        };
        self.records.complete(slot, noted);
        kill_point!("pcie.completing");
        let cqe = Cqe::new(0, head, command.sqid, command.cid, status).with_phase(phase);
        let words: [[u8; 8]; 2] = zerocopy::transmute!(cqe);
        let [first, last] = words.map(u64::from_ne_bytes);
        let at = index as usize * 16;
        // Both are inside: the ring is as long as the queue. One that may not be written loses its host's answers.
        let _ = ring.store_u64(at, first, Relaxed);
        let _ = ring.store_u64(at + 8, last, Release);
        kill_point!("pcie.posted");
        cq.cursor.post();
        self.records.set_posted(cqid, cq.cursor.posted());
        sq.in_flight -= 1;
        let raises = cq.cursor.vector.filter(|_| {
            !cq.coalescing.is_on() || cq.gathered.posted(&cq.coalescing, turn.core.now_ns())
        });
        self.records.free(slot);
        kill_point!("pcie.freed");
        self.free.push(slot);
        if let Some(vector) = raises {
            self.raise(turn.client, vector);
        }
    }

    /// A command ends without an answer.
    #[cold]
    pub(super) fn forget(&mut self, slot: u16) {
        let sqid = self.commands[usize::from(slot) % COMMANDS].sqid;
        if let Some(sq) = self.sqs[usize::from(sqid)].as_mut() {
            sq.in_flight = sq.in_flight.saturating_sub(1);
        }
        // Until a reset is answered, a successor must find what may be at a device.
        if !self.quiesce.as_ref().is_some_and(|q| q.drops()) {
            self.records.free(slot);
        }
        self.free.push(slot);
    }

    /// The head of a completion queue, as its host says.
    #[cold]
    fn look_at_head(&mut self, cqid: u16) {
        let doorbell = Doorbell::Head(cqid);
        let head = self.bell(doorbell);
        let bad = match self.cqs[usize::from(cqid)].as_mut() {
            Some(cq) => cq.cursor.set_head(head).is_err(),
            None => false,
        };
        if bad {
            self.mend_bell(doorbell);
            self.bad_doorbell(false, cqid);
        }
    }

    /// Looks for memory that was missed.
    #[cold]
    pub(super) fn find_memory(&mut self, turn: &mut Turn<'_>) {
        let memory = turn.client.memory();
        let (sq_states, cq_states) = self.function.queues();
        let mut missing = false;
        for (sq, state) in self.sqs.iter_mut().zip(sq_states).skip(1) {
            if let Some(sq) = sq.as_mut().filter(|sq| sq.ring.is_none()) {
                sq.ring = memory.area(state.base, state.entries as usize * 64);
                missing |= sq.ring.is_none();
            }
        }
        for (cq, state) in self.cqs.iter_mut().zip(cq_states).skip(1) {
            if let Some(cq) = cq.as_mut().filter(|cq| cq.ring.is_none()) {
                cq.ring = memory.area(state.base, state.entries as usize * 16);
                missing |= cq.ring.is_none();
            }
        }
        for (base, bytes) in [
            (sq_states[0].base, sq_states[0].entries as usize * 64),
            (cq_states[0].base, cq_states[0].entries as usize * 16),
        ] {
            missing |= bytes > 0 && memory.area(base, bytes).is_none();
        }
        if self.shadow.as_ref().is_some_and(|s| s.bells.is_none()) {
            self.make_shadow(turn.client.memory());
            missing |= self.shadow.as_ref().is_some_and(|s| s.bells.is_none());
        }
        if !missing {
            self.lost_ns = None;
        }
        for _ in 0..self.held.len() {
            let (slot, status) = self.held.swap_remove(0);
            self.complete(turn, slot, status);
        }
    }

    /// What waits for memory to come back waits no longer.
    pub(super) fn give_up_held(&mut self, _turn: &mut Turn<'_>) {
        while let Some((slot, _)) = self.held.pop() {
            self.forget(slot);
        }
    }

    /// Begins what a dead engine had in hand, or what found no room. True if there was any.
    #[cold]
    pub(super) fn begin_again(&mut self, turn: &mut Turn<'_>) -> bool {
        let lane = turn.client.lane();
        let geometry = lane
            .and_then(|lane| turn.core.lane(lane))
            .map(Lane::geometry);
        let mut any = false;
        // The first stays there until it is begun: see `begin_remote`.
        while let Some(slot) = self.again.front().copied() {
            let sqid = self.commands[usize::from(slot) % COMMANDS].sqid;
            let sqe = self.records.sqe(slot);
            let dead = self.records.state(slot).deaths() >= MAX_DEATHS;
            let begun = match &geometry {
                _ if dead => Begun::Ended(Status::INTERNAL_ERROR.with_dnr()),
                Some(geometry) => self.begin(turn, sqid, slot, &sqe, geometry),
                None => Begun::Ended(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()),
            };
            if matches!(begun, Begun::NoRoom) {
                break;
            }
            self.again.pop_front();
            if let Begun::Ended(status) = begun {
                if let Some(lane) = lane {
                    let record = turn.client.command_ref(lane, slot);
                    turn.core.carried_refused(record);
                }
                self.complete(turn, slot, status);
            }
            any = true;
        }
        self.count_at_once(turn);
        any
    }

    /// Event indexes say that nobody need ring.
    #[cold]
    fn be_quiet(&mut self) {
        self.armed = false;
        let Some(shadow) = &self.shadow else { return };
        let Some(index) = &shadow.event_index else {
            return;
        };
        for qid in &self.active {
            let _ = index.store_u32(Doorbell::Tail(*qid).offset(), shadow::QUIET, Relaxed);
        }
    }

    /// Has the host ring, and looks once more. False: there is something to do.
    pub(super) fn ask_to_ring(&mut self, turn: &mut Turn<'_>) -> bool {
        let _ = turn;
        if !self.live {
            return true;
        }
        if self.more || matches!(self.bells, Bells::Page(_)) && self.shadow.is_none() {
            return false;
        }
        if matches!(self.bells, Bells::Page(_)) {
            // The Admin queue's doorbells are in the page.
            return false;
        }
        let Some(shadow) = &self.shadow else {
            return true;
        };
        let Some(index) = &shadow.event_index else {
            return true;
        };
        self.armed = true;
        for qid in &self.active {
            let Some(sq) = &self.sqs[usize::from(*qid)] else {
                continue;
            };
            let tail = sq.cursor.tail();
            let _ = index.store_u32(Doorbell::Tail(*qid).offset(), tail, Relaxed);
            if let (false, Some(cq)) =
                (sq.cursor.is_empty(), &self.cqs[usize::from(sq.cursor.cqid)])
            {
                // It may wait for room there.
                let doorbell = Doorbell::Head(sq.cursor.cqid);
                let _ = index.store_u32(doorbell.offset(), cq.cursor.head(), Relaxed);
            }
        }
        // Either the host sees the event index, or we see its doorbell.
        fence(SeqCst);
        !self.active.iter().any(|qid| {
            let Some(sq) = &self.sqs[usize::from(*qid)] else {
                return false;
            };
            let cqid = sq.cursor.cqid;
            let rang = self.bell(Doorbell::Tail(*qid)) != sq.cursor.tail();
            let room = !sq.cursor.is_empty()
                && self.bell(Doorbell::Head(cqid)) != self.known(Doorbell::Head(cqid));
            rang || room
        })
    }

    /// What a dead engine left of the commands of a queue. See [`super::resume`].
    pub(super) fn inherited(&self, slot: u16) -> Option<(Stage, u16, u64)> {
        let state = self.records.state(slot);
        let stage = state.stage()?;
        let sq = self.sqs.get(usize::from(state.qid()))?.as_ref();
        match (stage, sq) {
            (Stage::Free, _) => Some((stage, 0, 0)),
            (_, Some(sq)) if state.qid() > 0 => {
                let number = queue::near(sq.cursor.taken(), state.number());
                let (behind, ahead) = (
                    sq.cursor.taken().wrapping_sub(number),
                    number.wrapping_sub(sq.cursor.taken()),
                );
                // One of the last that were taken, or one of a batch that was being taken.
                let sound =
                    behind <= u64::from(u32::MAX / 2) || ahead < u64::from(sq.cursor.entries());
                sound.then_some((stage, state.qid(), number))
            }
            _ => None,
        }
    }
}

/// The lane's statistics, of a command that was taken and given to the core then.
#[inline]
fn count(
    core: &Core,
    lane: LaneIndex,
    op: &IoOp,
    status: Status,
    (taken_ns, started_ns): (u64, u64),
) {
    let Some(lane) = core.lane(lane) else {
        return;
    };
    let bytes = match *op {
        IoOp::Read { len_bytes, .. }
        | IoOp::Compare { len_bytes, .. }
        | IoOp::Write { len_bytes, .. }
        | IoOp::CompareAndWrite { len_bytes, .. } => u64::from(len_bytes),
        IoOp::WriteZeroes { len_bytes, .. } => len_bytes,
        IoOp::Flush | IoOp::Deallocate { .. } => 0,
    };
    let error = !status.is_success();
    let now_ns = core.now_ns();
    let figures = &lane.record().ops[op.kind() as usize];
    let ns = now_ns.saturating_sub(taken_ns);
    figures.record(if error { 0 } else { bytes }, ns, error);
    if started_ns != now_ns {
        let at_device = now_ns.saturating_sub(started_ns);
        figures.times[TimesOf::Device as usize].record(at_device);
    }
}

/// The lane's index, for whoever has none.
pub(super) fn lane_of(turn: &Turn<'_>) -> Option<LaneIndex> {
    turn.client.lane()
}
