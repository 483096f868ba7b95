//! Admin commands of memory-based queues (Base 2.0, 5.4 to 5.8), and the data of all admin
//! commands.
//!
//! The data pointer is walked first, so a bad one changes nothing. Completion and change enter the
//! state together; a successor posts the outbox again, which is harmless. Before a submission queue
//! is deleted, the caller drains it (see [`Function::drains`]).

use super::state::{CqState, OUTBOX, SqState};
use super::{Function, MAX_IO_QUEUES, Memory, PAGE_BYTES, VECTORS, data};
use crate::controller::{AdminEnv, AdminOutcome};
use crate::io::Transfer;
use crate::opcode::admin;
use crate::{Cqe, Sqe, Status};
use zerocopy::IntoBytes;

/// A change that affects the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// A new submission queue.
    SqCreated(u16),
    /// A deleted submission queue.
    SqDeleted(u16),
    /// A new completion queue.
    CqCreated(u16),
    /// A deleted completion queue.
    CqDeleted(u16),
    /// New shadow doorbells.
    Shadow,
    /// A feature may have changed.
    Features,
}

/// An admin command's result. Its completion, if any, is in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminRun {
    /// The change.
    pub change: Change,
    /// `None`: it waits for an event.
    pub status: Option<Status>,
}

/// CDW11: physically contiguous.
const PC: u32 = 1;
/// CDW11: interrupts enabled.
const IEN: u32 = 1 << 1;

impl Function {
    /// The submission queue to drain before this command.
    pub fn drains(&self, sqe: &Sqe) -> Option<u16> {
        let qid = sqe.cdw(10) as u16;
        let there = self.state.sqs.get(usize::from(qid));
        let there = qid > 0 && there.is_some_and(|sq| sq.entries > 0);
        (sqe.opcode() == admin::DELETE_IO_SQ && sqe.fuse() == 0 && there).then_some(qid)
    }

    /// Free outbox entries.
    pub fn outbox_room(&self, posted: u64) -> u64 {
        (OUTBOX as u64).saturating_sub(self.state.admin_completed.saturating_sub(posted))
    }

    /// Admin completions since enable.
    pub fn admin_completed(&self) -> u64 {
        self.state.admin_completed
    }

    /// A completion, without phase tag.
    pub fn completion(&self, number: u64) -> Cqe {
        self.state.completion(number)
    }

    /// Admin commands taken since enable.
    pub fn admin_taken(&self) -> u64 {
        self.state.admin_taken
    }

    /// Runs an admin command. The outbox needs room; `scratch` holds the longest transfer.
    pub fn run_admin<M: Memory>(
        &mut self,
        sqe: &Sqe,
        memory: &M,
        env: &dyn AdminEnv,
        scratch: &mut [u8],
        now_ns: u64,
    ) -> AdminRun {
        self.state.admin_taken = self.state.admin_taken.wrapping_add(1);
        let mut change = Change::None;
        let result = self.carry_out(sqe, memory, env, scratch, now_ns, &mut change);
        let (status, result) = match result {
            Ok(Some(result)) => (Status::SUCCESS, result),
            Ok(None) => {
                return AdminRun {
                    change,
                    status: None,
                };
            }
            // Only our errors are worth a retry.
            Err(status) if status == Status::INTERNAL_ERROR => (status, 0),
            Err(status) => (status.with_dnr(), 0),
        };
        self.complete(sqe.cid(), status, result);
        AdminRun {
            change,
            status: Some(status),
        }
    }

    /// Moves pending events into the outbox. Returns whether there were any.
    pub fn gather_events(&mut self, posted: u64) -> bool {
        let mut any = false;
        while let Some(event) = self.next_event(self.outbox_room(posted)) {
            self.complete(event.cid, event.status, event.result);
            any = true;
        }
        any
    }

    fn complete(&mut self, cid: u16, status: Status, result: u64) {
        let entries = self.state.sqs[0].entries.max(1);
        let head = (self.state.admin_taken % u64::from(entries)) as u16;
        let cqe = Cqe::new(result, head, 0, cid, status);
        let at = (self.state.admin_completed % OUTBOX as u64) as usize;
        self.state.outbox[at].copy_from_slice(cqe.as_bytes());
        self.state.admin_completed += 1;
    }

    /// `None` for commands that concern neither queues nor shadow doorbells.
    fn change_queues<M: Memory>(
        &mut self,
        sqe: &Sqe,
        memory: &M,
    ) -> Result<Option<Change>, Status> {
        Ok(Some(match sqe.opcode() {
            admin::CREATE_IO_CQ => Change::CqCreated(self.create_cq(sqe, memory)?),
            admin::CREATE_IO_SQ => Change::SqCreated(self.create_sq(sqe, memory)?),
            admin::DELETE_IO_CQ => Change::CqDeleted(self.delete_cq(sqe)?),
            admin::DELETE_IO_SQ => Change::SqDeleted(self.delete_sq(sqe)?),
            admin::DOORBELL_BUFFER_CONFIG => {
                self.set_shadow(sqe, memory)?;
                Change::Shadow
            }
            _ => return Ok(None),
        }))
    }

    /// `Ok(None)`: the command waits.
    fn carry_out<M: Memory>(
        &mut self,
        sqe: &Sqe,
        memory: &M,
        env: &dyn AdminEnv,
        scratch: &mut [u8],
        now_ns: u64,
        change: &mut Change,
    ) -> Result<Option<u64>, Status> {
        // Admin commands use neither fusing nor SGLs (PCIe Transport 1.0, 2.2).
        if sqe.fuse() != 0 || sqe.psdt() != 0 {
            return Err(Status::INVALID_FIELD);
        }
        if let Some(changed) = self.change_queues(sqe, memory)? {
            *change = changed;
            return Ok(Some(0));
        }
        if sqe.opcode() == admin::SET_FEATURES {
            *change = Change::Features;
        }
        let transfer = self.controller.transfer(sqe)?;
        let bytes = transfer.bytes();
        let scratch = scratch
            .get_mut(..bytes as usize)
            .ok_or(Status::INTERNAL_ERROR)?;
        let mut at = 0;
        data::pieces(sqe, bytes, memory, |address, len| {
            let there = match transfer {
                Transfer::FromHost(_) => {
                    let to = scratch.get_mut(at..at + len as usize);
                    to.is_some_and(|to| memory.read(address, to))
                }
                _ => memory.holds(address, len.into(), true),
            };
            at += len as usize;
            match there {
                true => Ok(()),
                false => Err(Status::DATA_TRANSFER_ERROR),
            }
        })?;
        let (data_in, out): (&[u8], &mut [u8]) = match transfer {
            Transfer::FromHost(_) => (scratch, &mut []),
            _ => (&[], scratch),
        };
        match self.controller.admin(sqe, data_in, out, env, now_ns) {
            AdminOutcome::Parked => Ok(None),
            // PCIe offers no reservations.
            AdminOutcome::Reserve { .. } => Err(Status::INVALID_FIELD),
            AdminOutcome::Complete { status, .. } if !status.is_success() => Err(status),
            AdminOutcome::Complete {
                result, data_bytes, ..
            } => {
                let out = out.get(..data_bytes as usize).unwrap_or_default();
                let mut at = 0;
                data::pieces(sqe, data_bytes, memory, |address, len| {
                    let from = out.get(at..at + len as usize);
                    at += len as usize;
                    match from.is_some_and(|from| memory.write(address, from)) {
                        true => Ok(()),
                        false => Err(Status::DATA_TRANSFER_ERROR),
                    }
                })?;
                Ok(Some(result))
            }
        }
    }

    /// A valid queue identifier; the queue may not exist.
    fn qid(&self, sqe: &Sqe) -> Result<u16, Status> {
        match sqe.cdw(10) as u16 {
            qid if (1..=MAX_IO_QUEUES).contains(&qid) => Ok(qid),
            _ => Err(Status::INVALID_QUEUE_IDENTIFIER),
        }
    }

    /// Common checks: a free, granted number, a size, contiguous memory.
    fn new_queue<M: Memory>(
        &self,
        sqe: &Sqe,
        there: impl Fn(usize) -> bool,
        entry_bytes: u64,
        write: bool,
        memory: &M,
    ) -> Result<(u16, u32, u64), Status> {
        let qid = self.qid(sqe)?;
        if there(usize::from(qid)) || qid > self.controller.granted_io_queues() {
            return Err(Status::INVALID_QUEUE_IDENTIFIER);
        }
        let entries = (sqe.cdw(10) >> 16) + 1;
        let most = self.controller.config().max_queue_entries;
        if entries < 2 || entries > most || !self.controller.may_make_queues() {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        // CAP.CQR: contiguous queues only.
        if sqe.cdw(11) & PC == 0 {
            return Err(Status::INVALID_FIELD);
        }
        let base = sqe.cdw64(6);
        if base == 0 || !base.is_multiple_of(PAGE_BYTES) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        match memory.holds(base, u64::from(entries) * entry_bytes, write) {
            true => Ok((qid, entries, base)),
            false => Err(Status::INVALID_FIELD),
        }
    }

    fn create_cq<M: Memory>(&mut self, sqe: &Sqe, memory: &M) -> Result<u16, Status> {
        let vector = (sqe.cdw(11) >> 16) as u16;
        let there = |qid: usize| self.state.cqs[qid].entries > 0;
        let (qid, entries, base) = self.new_queue(sqe, there, 16, true, memory)?;
        if vector >= VECTORS {
            return Err(Status::INVALID_INTERRUPT_VECTOR);
        }
        self.state.cqs[usize::from(qid)] = CqState {
            base,
            entries,
            vector,
            interrupts: u16::from(sqe.cdw(11) & IEN != 0),
        };
        self.controller.io_queue_there(qid);
        Ok(qid)
    }

    fn create_sq<M: Memory>(&mut self, sqe: &Sqe, memory: &M) -> Result<u16, Status> {
        let cqid = (sqe.cdw(11) >> 16) as u16;
        let there = |qid: usize| self.state.sqs[qid].entries > 0;
        let (qid, entries, base) = self.new_queue(sqe, there, 64, false, memory)?;
        // Invalid and missing queues have different statuses (Base 2.0, 5.5).
        if cqid == 0 || cqid > self.controller.granted_io_queues() {
            return Err(Status::INVALID_QUEUE_IDENTIFIER);
        }
        if self.state.cqs[usize::from(cqid)].entries == 0 {
            return Err(Status::COMPLETION_QUEUE_INVALID);
        }
        self.state.sqs[usize::from(qid)] = SqState {
            base,
            entries,
            cqid,
            reserved: 0,
        };
        self.controller.io_queue_there(qid);
        Ok(qid)
    }

    fn delete_sq(&mut self, sqe: &Sqe) -> Result<u16, Status> {
        let qid = self.qid(sqe)?;
        let sq = &mut self.state.sqs[usize::from(qid)];
        if sq.entries == 0 {
            return Err(Status::INVALID_QUEUE_IDENTIFIER);
        }
        *sq = SqState::default();
        self.gone(qid);
        Ok(qid)
    }

    fn delete_cq(&mut self, sqe: &Sqe) -> Result<u16, Status> {
        let qid = self.qid(sqe)?;
        if self.state.cqs[usize::from(qid)].entries == 0 {
            return Err(Status::INVALID_QUEUE_IDENTIFIER);
        }
        let mut sqs = self.state.sqs.iter();
        if sqs.any(|sq| sq.entries > 0 && sq.cqid == qid) {
            return Err(Status::INVALID_QUEUE_DELETION);
        }
        self.state.cqs[usize::from(qid)] = CqState::default();
        self.gone(qid);
        Ok(qid)
    }

    fn gone(&mut self, qid: u16) {
        let at = usize::from(qid);
        if self.state.sqs[at].entries == 0 && self.state.cqs[at].entries == 0 {
            self.controller.io_queue_gone(qid);
        }
    }

    /// Doorbell Buffer Config (Base 2.0, 5.8): two pages.
    fn set_shadow<M: Memory>(&mut self, sqe: &Sqe, memory: &M) -> Result<(), Status> {
        let (shadow, event_index) = (sqe.cdw64(6), sqe.cdw64(8));
        for address in [shadow, event_index] {
            let good = address != 0
                && address.is_multiple_of(PAGE_BYTES)
                && memory.holds(address, PAGE_BYTES, true);
            if !good {
                return Err(Status::INVALID_FIELD);
            }
        }
        self.state.shadow = shadow;
        self.state.event_index = event_index;
        Ok(())
    }
}
