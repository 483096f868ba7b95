//! The end of an I/O command: its completion, interrupt and slot.
//!
//! The completion is recorded with its place, then written to the queue, the half with the phase
//! tag last. A successor that finds the record writes the same entry to the same place. Completions
//! whose queue memory is missing are held. No allocation, lock, log or system call.

use super::commands::{Command, CommandWork};
use super::memory::{ClientMemory, NSID};
use super::queues::BeginResult;
use super::record::PostedCompletion;
use super::{COMMANDS, Pcie};
use crate::core::{Core, DoneIo, IoOp};
use crate::frontend::vm::protocol::Turn;
use crate::io::clock::Clock;
use crate::lane::Lane;
use forebay_nvme::controller::ErrorReport;
use forebay_nvme::pcie::data;
use forebay_nvme::{Cqe, Status};
use forebay_xlate::boundary::region::TimesOf;
use forebay_xlate::kill_point;
use std::sync::atomic::Ordering::{Relaxed, Release};

impl Pcie {
    /// Logs a device's failure in the error log. Returns the host's status.
    #[cold]
    pub(super) fn note_failure(&mut self, core: &Core, done: &DoneIo, command: &Command) -> Status {
        if done.status.is_media_error() || done.status.code() == Status::INTERNAL_ERROR {
            let lane = core.lane(done.lane);
            let block_bytes = lane.map_or(1, |lane| u64::from(lane.volume.config.block_bytes));
            self.function.controller_mut().record_error(ErrorReport {
                sqid: command.sqid,
                cid: command.cid,
                status: done.status,
                lba: done.op.offset_bytes() / block_bytes.max(1),
                nsid: NSID,
            });
            self.save();
        }
        match done.status {
            Status::COMMAND_INTERRUPTED => self.function.controller().interrupted_status(),
            status => status,
        }
    }

    /// The flush is done: begins the command from its recorded entry.
    #[cold]
    pub(super) fn after_flush(&mut self, turn: &mut Turn<'_>, slot: u16, op: IoOp) {
        let command = &mut self.commands.all[usize::from(slot) % COMMANDS];
        command.work = CommandWork::Io(op);
        if self.remote.busy && self.remote.goes_on(slot, op) {
            self.more = true;
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
            Ok(()) => self.start(turn, slot, CommandWork::Io(op), None),
            Err(Status::DATA_TRANSFER_ERROR) => {
                self.begin_remote(turn, slot, CommandWork::Io(op), bytes, to_host)
            }
            Err(status) => BeginResult::Ended(status.with_dnr()),
        };
        match begun {
            BeginResult::Yes => {}
            BeginResult::Ended(status) => self.complete(turn, slot, status),
            // It begins again from the start.
            BeginResult::NoRoom => self.commands.again.push_back(slot),
        }
    }

    /// Whether commands end without a completion.
    #[inline]
    pub(super) fn answers_nobody(&self) -> bool {
        self.closed || self.quiesce.as_ref().is_some_and(|q| q.drops())
    }

    #[inline]
    pub(super) fn complete(&mut self, turn: &mut Turn<'_>, slot: u16, status: Status) {
        let command = self.commands.get(slot);
        if self.answers_nobody() {
            self.forget(slot);
            return;
        }
        let Some(sq) = self.rings.sqs[usize::from(command.sqid)].as_mut() else {
            self.forget(slot);
            return;
        };
        let (cqid, head) = (sq.cursor.cqid, sq.cursor.head());
        let Some(cq) = self.rings.cqs[usize::from(cqid)].as_mut() else {
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
            self.commands.held.push((slot, status));
            if is_master {
                self.rings.miss_memory(turn.core.now_ns());
            }
            return;
        };
        let (index, phase) = cq.cursor.next();
        let number = cq.cursor.posted() as u32;
        let noted = PostedCompletion {
            number,
            status: status.0,
        };
        self.records.complete(slot, noted);
        kill_point!("pcie.completing");
        let cqe = Cqe::new(0, head, command.sqid, command.cid, status).with_phase(phase);
        let words: [[u8; 8]; 2] = zerocopy::transmute!(cqe);
        let [first, last] = words.map(u64::from_ne_bytes);
        let at = index as usize * 16;
        // Both are inside the ring. A host with a read-only ring loses its answers.
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
        self.commands.free.push(slot);
        if let Some(vector) = raises {
            self.vectors.raise(&self.records, turn.client, vector);
        }
    }

    /// Ends a command without a completion.
    #[cold]
    pub(super) fn forget(&mut self, slot: u16) {
        let sqid = self.commands.get(slot).sqid;
        if let Some(sq) = self.rings.sqs[usize::from(sqid)].as_mut() {
            sq.in_flight = sq.in_flight.saturating_sub(1);
        }
        // During a reset a successor must still find commands that may be at a device.
        if !self.quiesce.as_ref().is_some_and(|q| q.drops()) {
            self.records.free(slot);
        }
        self.commands.free.push(slot);
    }

    #[cold]
    pub(super) fn find_memory(&mut self, turn: &mut Turn<'_>) {
        let memory = turn.client.memory();
        let mut missing = self.rings.find(&self.function, memory);
        let (sq_states, cq_states) = self.function.queues();
        for (base, bytes) in [
            (sq_states[0].base, sq_states[0].entries as usize * 64),
            (cq_states[0].base, cq_states[0].entries as usize * 16),
        ] {
            missing |= bytes > 0 && memory.area(base, bytes).is_none();
        }
        if self.rings.misses_shadow() {
            self.rings
                .place_shadow(self.function.shadow(), turn.client.memory());
            missing |= self.rings.misses_shadow();
        }
        if !missing {
            self.rings.lost_ns = None;
        }
        for _ in 0..self.commands.held.len() {
            let (slot, status) = self.commands.held.swap_remove(0);
            self.complete(turn, slot, status);
        }
    }

    pub(super) fn give_up_held(&mut self, _turn: &mut Turn<'_>) {
        while let Some((slot, _)) = self.commands.held.pop() {
            self.forget(slot);
        }
    }
}

/// Counts a command that the core began on fetch.
#[inline]
pub(super) fn count(
    lane: &Lane,
    clock: &Clock,
    op: &IoOp,
    status: Status,
    (taken_ns, started_ns): (u64, u64),
) {
    let bytes = match *op {
        IoOp::Read { len_bytes, .. }
        | IoOp::Compare { len_bytes, .. }
        | IoOp::Write { len_bytes, .. }
        | IoOp::CompareAndWrite { len_bytes, .. } => u64::from(len_bytes),
        IoOp::WriteZeroes { len_bytes, .. } => len_bytes,
        IoOp::Flush | IoOp::Deallocate { .. } => 0,
    };
    let error = !status.is_success();
    let now_ns = clock.now_ns;
    let statistics = &lane.record().ops[op.kind() as usize];
    let ns = clock.since(taken_ns);
    statistics.record(if error { 0 } else { bytes }, ns, error);
    if started_ns != now_ns {
        let at_device = now_ns.saturating_sub(started_ns);
        statistics.times[TimesOf::Device as usize].record(at_device);
    }
}
