//! One connection, which is one queue: its state between turns. All memory is reserved at adoption,
//! and untouched before use. A connection that ends closes its socket at once, but keeps its index
//! and records until the core has returned every command.
//!
//! **Not here:** what PDUs and commands mean ([`super::rx`], [`super::command`], [`super::admin`]).

use super::fused::Pairs;

use super::epoll_interest::Socket;
use super::quotas::ConnectionCharge;
use super::r2t::Parts;
use super::record::{NewCommand, QueueRecords};
use super::rx::{Inbound, Rx};
use super::shared::Shared;
use super::slots::{NONE, SlotStage, Slots, Work};
use super::tx::Tx;
use crate::core::staging::StagingBuffer;
use crate::core::{CommandRef, Core, IoOp, Issuer};
use crate::lane::LaneIndex;
use crate::upcall::Upcall;
use forebay_nvme::tcp::{
    self, C2hData, DIGEST_BYTES, MAX_TERM_REQ_BYTES, PduError, Role, TcpParams,
};
use forebay_nvme::{Cqe, Sqe, Status};
use forebay_xlate::boundary::region::bump;
use forebay_xlate::boundary::region::check::BufferRef;
use forebay_xlate::kill_point;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::Shutdown;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

/// Staging memory per connection; further commands wait.
pub(super) const MAX_CHARGED_BYTES: u64 = 8 << 20;
/// How long a host may take to hang up after a C2HTermReq.
const CLOSE_LIMIT_NS: u64 = 2_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    Open,
    /// A C2HTermReq was sent; the host must hang up until then.
    Leaving {
        until_ns: u64,
    },
    Draining,
}

pub(super) struct Conn {
    pub index: u32,
    pub generation: u32,
    pub socket: Socket,
    pub params: TcpParams,
    pub shared: Rc<Shared>,
    pub queue: u32,
    pub records: QueueRecords,
    pub controller: u32,
    pub qid: u16,
    pub entries: u16,
    pub lane: Option<LaneIndex>,
    /// The host disabled SQ flow control (Base 2.0, 6.3, CATTR bit 2): responses to reads may be
    /// omitted.
    pub no_flow_control: bool,
    pub life: Life,
    /// Restrictions of its host ([`super::restrictions`]).
    pub restrictions: u8,
    pub slots: Slots,
    pub rx: Rx,
    pub tx: Tx,
    pub in_flight: u32,
    pub parts: Parts,
    pub pairs: Pairs,
    pub charge: ConnectionCharge,
    /// Commands taken, including the Connect.
    pub number: u64,
    /// Send when this many bytes are queued.
    pub send_at_bytes: usize,
    /// Set while the stream waits for memory, and for commands that came behind.
    pub stalled: Option<Stalled>,
    pub visits: Visits,
}

/// List membership and idle turns.
#[derive(Default)]
pub(super) struct Visits {
    /// Visited each turn.
    pub active: bool,
    pub listed: bool,
    pub dirty: bool,
    pub quiet_turns: u32,
    /// Turns without a receive, since the lane had enough waiting commands.
    pub skipped_turns: u32,
    /// Turns in which responses were held back.
    pub held_turns: u32,
}

#[derive(Clone, Copy)]
pub(super) struct Stalled {
    pub since_ns: u64,
    /// The lane's throttled time up to then.
    pub over_ns: u64,
}

pub(super) struct NewConn {
    pub index: u32,
    pub generation: u32,
    pub fd: Arc<OwnedFd>,
    pub socket: u64,
    pub params: TcpParams,
    pub records: QueueRecords,
    pub controller: u32,
    pub qid: u16,
    pub entries: u16,
    pub lane: Option<LaneIndex>,
    pub no_flow_control: bool,
    pub number: u64,
    pub rx: Rx,
    pub tx: Tx,
}

impl Conn {
    pub(super) fn new(shared: &Rc<Shared>, new: NewConn) -> Self {
        let number = u64::from(new.generation) << 32 | u64::from(new.index);
        let key = shared.frontend.key(number);
        Self {
            charge: ConnectionCharge::new(shared, new.lane),
            index: new.index,
            generation: new.generation,
            socket: Socket::new(new.fd, new.socket, key),
            params: new.params,
            shared: shared.clone(),
            queue: new.records.queue(),
            records: new.records,
            controller: new.controller,
            qid: new.qid,
            entries: new.entries,
            lane: new.lane,
            no_flow_control: new.no_flow_control,
            life: Life::Open,
            restrictions: 0,
            slots: Slots::new(usize::from(new.entries)),
            rx: new.rx,
            tx: new.tx,
            in_flight: 0,
            parts: Parts::new(&new.params, new.entries),
            pairs: Pairs::default(),
            number: new.number,
            send_at_bytes: super::SEND_BYTES,
            stalled: None,
            visits: Visits::default(),
        }
    }

    pub(super) fn inbound(&mut self) -> (&mut Rx, Inbound<'_>) {
        let of = Inbound {
            slots: &mut self.slots,
            parts: &mut self.parts,
            records: &self.records,
        };
        (&mut self.rx, of)
    }

    pub(super) fn is_open(&self) -> bool {
        self.life == Life::Open
    }

    /// Waits for memory or room that others hold, so it must retry.
    pub(super) fn must_retry(&self) -> bool {
        self.is_open()
            && !self.tx.blocked()
            && (self.slots.first_waiting().is_some() || self.rx.stalled())
    }

    /// Records a command, which is taken from here on. `whole`: record the whole entry.
    #[inline]
    pub(super) fn record_command(
        &mut self,
        slot: u16,
        sqe: &Sqe,
        end: u64,
        taken_ns: u64,
        buffer: Option<BufferRef>,
        whole: bool,
    ) {
        self.number += 1;
        let words: [u64; 8] = zerocopy::transmute!(*sqe);
        let new = NewCommand {
            sqe: &words,
            number: self.number,
            end,
            taken_ns,
            buffer,
        };
        self.records.record_command(slot, &new, whole);
    }

    pub(super) fn begin_admin_command(&mut self, slot: u16, sqe: &Sqe, end: u64) {
        if let Some(s) = self.slots.get(slot) {
            let buffer = s.buffer.as_ref().map(StagingBuffer::reference);
            self.record_command(slot, sqe, end, s.taken_ns, buffer, true);
        }
    }

    #[inline]
    pub(super) fn owner(&self, slot: u16) -> Issuer {
        Issuer {
            frontend: self.shared.frontend,
            conn: self.index,
            conn_generation: self.generation,
            slot,
        }
    }

    /// Takes a staging buffer, unless the connection's limit is reached.
    #[inline(always)]
    pub(super) fn allocate_buffer(
        &mut self,
        core: &mut Core,
        len_bytes: u32,
    ) -> Option<StagingBuffer> {
        let len = u64::from(len_bytes);
        let own_share = self.charge.bytes == 0 || self.charge.bytes + len <= MAX_CHARGED_BYTES;
        if !own_share || !self.charge.may_take(len_bytes, &core.staging) {
            return None;
        }
        let Some(buffer) = core.staging.allocate(len_bytes) else {
            bump(&core.record().staging_waits, 1);
            return None;
        };
        self.charge.add(buffer.taken());
        Some(buffer)
    }

    #[inline]
    pub(super) fn give_buffer(&mut self, core: &mut Core, buffer: StagingBuffer) {
        self.charge.remove(buffer.taken());
        core.staging.release(buffer);
    }

    fn sq_head(&self) -> u16 {
        (self.number % u64::from(self.entries.max(1))) as u16
    }

    fn cqe(&self, cid: u16, status: Status, result: u64) -> Cqe {
        let sqhd = if self.no_flow_control {
            0
        } else {
            self.sq_head()
        };
        Cqe::new(result, sqhd, 0, cid, status)
    }

    pub(super) fn push(
        &mut self,
        ends: u16,
        data: Option<(StagingBuffer, u32)>,
        put: impl FnOnce(&mut [u8]) -> usize,
    ) {
        let pool = &self.shared.pool;
        self.tx.push(pool, &self.records, ends, data, put);
    }

    /// Guarantees that the queued items will be sent, even by a successor.
    pub(super) fn publish(&mut self) {
        self.tx.publish(&self.records);
    }

    /// Answers a command that has no slot. It publishes at once, since no other record says that
    /// the command was taken.
    pub(super) fn answer_unslotted(&mut self, cid: u16, status: Status, end: u64) {
        self.number += 1;
        let (params, cqe) = (self.params, self.cqe(cid, status, 0));
        self.push(NONE, None, |out| tcp::put_capsule_resp(out, &params, &cqe));
        self.records.odd(self.number, self.tx.at(), end);
        self.tx.publish(&self.records);
    }

    /// Queues and publishes the Connect's answer. SQHD is FFFFh without SQ flow control (Base 2.0,
    /// 6.3).
    pub(super) fn answer_connect(&mut self, cid: u16, cntlid: u16) {
        let sqhd = if self.no_flow_control {
            0xffff
        } else {
            self.sq_head()
        };
        let (params, cqe) = (
            self.params,
            Cqe::new(u64::from(cntlid), sqhd, 0, cid, Status::SUCCESS),
        );
        self.push(NONE, None, |out| tcp::put_capsule_resp(out, &params, &cqe));
        self.tx.publish(&self.records);
    }

    /// Ends a command: queues the first `data_bytes` of `buffer`, then the response. The slot is
    /// freed when all is sent.
    pub(super) fn answer(
        &mut self,
        core: &mut Core,
        slot: u16,
        status: Status,
        result: u64,
        buffer: Option<StagingBuffer>,
        data_bytes: u32,
    ) {
        let Some(s) = self.slots.get_mut(slot) else {
            return;
        };
        debug_assert_ne!(s.stage, SlotStage::Answering, "answered twice");
        s.stage = SlotStage::Answering;
        let cid = s.cid;
        // Host data is held until the answer is sent: see `tx`.
        let mut charge = s.buffer.take();
        self.count_ended(core, slot, status);
        let params = self.params;
        match buffer {
            Some(buffer) if data_bytes > 0 => {
                // The SUCCESS flag replaces a response that carries nothing else (TCP 3.6.2.9).
                let alone = self.no_flow_control && status == Status::SUCCESS && result == 0;
                let header = C2hData {
                    cid,
                    offset_bytes: 0,
                    length_bytes: data_bytes,
                    last: true,
                    success: alone,
                };
                let digest =
                    (params.data_digest).then(|| self.shared.digest(&buffer, data_bytes as usize));
                let last = alone && digest.is_none() && charge.is_none();
                let ends = if last { slot } else { NONE };
                self.push(ends, Some((buffer, data_bytes)), |out| {
                    tcp::put_c2h_data(out, &params, &header)
                });
                if last {
                    return;
                }
                let cqe = self.cqe(cid, status, result);
                self.push(slot, charge.map(|h| (h, 0)), |out| {
                    let at = digest.map_or(0, |digest| {
                        out[..DIGEST_BYTES].copy_from_slice(&digest.to_le_bytes());
                        DIGEST_BYTES
                    });
                    at + if alone {
                        0
                    } else {
                        tcp::put_capsule_resp(&mut out[at..], &params, &cqe)
                    }
                });
            }
            other => {
                if let Some(buffer) = other
                    && let Some(second) = charge.replace(buffer)
                {
                    self.give_buffer(core, second);
                }
                let cqe = self.cqe(cid, status, result);
                self.push(slot, charge.map(|h| (h, 0)), |out| {
                    tcp::put_capsule_resp(out, &params, &cqe)
                });
            }
        }
    }

    /// Ends a command that is not in the core. If it is a recovered one, this releases commands
    /// that wait for it.
    #[cold]
    pub(super) fn refuse(&mut self, core: &mut Core, slot: u16, status: Status) {
        if core.recovered.any() {
            core.recovered.refused(CommandRef::new(self.queue, slot));
        }
        self.answer(core, slot, status, 0, None, 0);
    }

    fn count_ended(&self, core: &Core, slot: u16, status: Status) {
        let (Some(s), Some(lane)) = (self.slots.get(slot), self.lane.and_then(|l| core.lane(l)))
        else {
            return;
        };
        let (Work::Io(op)
        | Work::DurableRead(op)
        | Work::Compare(op)
        | Work::First { op, .. }
        | Work::Second(op)) = &s.work
        else {
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
        let kind = op.kind();
        let error = !status.is_success();
        let ns = core.clock.since(s.taken_ns);
        lane.record().ops[kind as usize].record(if error { 0 } else { bytes }, ns, error);
    }

    /// Sends what the socket takes; an error means the connection is gone.
    pub(super) fn flush(&mut self, core: &mut Core) -> Result<(), Errno> {
        let Some(fd) = &self.socket.fd else {
            return Ok(());
        };
        let was_blocked = self.socket.blocked_since_ns != 0;
        let before = self.tx.queued_bytes();
        let (slots, charge, records) = (&mut self.slots, &mut self.charge, &self.records);
        self.tx
            .flush(&self.shared.pool, records, fd, |slot, buffer| {
                sent(core, slots, records, charge, slot, buffer)
            })?;
        if self.tx.blocked() {
            if !was_blocked || self.tx.queued_bytes() < before {
                self.socket.blocked_since_ns = core.now_ns().max(1);
            }
        } else {
            self.socket.blocked_since_ns = 0;
            if let Life::Leaving { .. } = self.life
                && self.tx.is_empty()
            {
                rustix::net::shutdown(fd, Shutdown::Write)?;
            }
        }
        Ok(())
    }

    /// Whether to delay sending, since more of the lane's commands will surely begin soon.
    pub(super) fn holds_back(&mut self, core: &Core) -> bool {
        let holds = self.lane.is_some_and(|lane| core.qos.waits_for_turns(lane))
            && self.is_open()
            && !self.tx.blocked()
            && self.tx.queued_bytes() < super::HELD_BYTES
            && self.visits.held_turns < super::HELD_TURNS;
        self.visits.held_turns = if holds { self.visits.held_turns + 1 } else { 0 };
        holds
    }

    pub(super) fn terminate(&mut self, core: &mut Core, error: &PduError, header: &[u8]) {
        if !self.is_open() {
            return;
        }
        self.life = Life::Leaving {
            until_ns: core.now_ns().saturating_add(CLOSE_LIMIT_NS),
        };
        self.records.leaving();
        self.rx.forget();
        self.drop_pending(core);
        self.push(NONE, None, |out| {
            let room = &mut out[..MAX_TERM_REQ_BYTES];
            tcp::put_term_req(room, Role::Controller, error, header)
        });
    }

    pub(super) fn drop_pending(&mut self, core: &mut Core) {
        core.recovered.mark_spans_for_successor();
        while let Some(slot) = self.slots.first_waiting() {
            self.slots.unlink_first_waiting();
            self.release(core, slot);
        }
        for slot in 0..self.entries {
            if matches!(
                self.slots.get(slot).map(|s| s.stage),
                Some(
                    SlotStage::Receiving
                        | SlotStage::Kept
                        | SlotStage::Taken
                        | SlotStage::Paired
                        | SlotStage::Reserving
                )
            ) {
                self.release(core, slot);
            }
        }
    }

    pub(super) fn drop_kept(&mut self, core: &mut Core) {
        for slot in 0..self.entries {
            if self
                .slots
                .get(slot)
                .is_some_and(|s| s.stage == SlotStage::Kept)
            {
                self.release(core, slot);
            }
        }
    }

    pub(super) fn release(&mut self, core: &mut Core, slot: u16) {
        if self
            .slots
            .get(slot)
            .is_some_and(|s| s.stage == SlotStage::Receiving)
        {
            self.charge.answered();
        }
        let buffer = self.slots.release(slot);
        self.records.end_command(slot);
        if let Some(buffer) = buffer {
            self.give_buffer(core, buffer);
        }
    }

    /// Closes the socket and drops all that the core doesn't have.
    pub(super) fn shut(&mut self, core: &mut Core) {
        if self.life == Life::Draining {
            return;
        }
        self.life = Life::Draining;
        if let Some(fd) = self.socket.fd.take() {
            // The daemon has the socket too, so closing ours would not end the connection.
            let _ = rustix::net::shutdown(&fd, Shutdown::Both);
            kill_point!("close.shutdown");
            let _ = epoll::delete(&self.shared.epoll, &fd);
        }
        self.records.leaving();
        kill_point!("close.freed");
        core.upcalls
            .push_back(Upcall::SocketGone(self.socket.number));
        kill_point!("close.withdrawn");
        self.rx.forget();
        self.drop_pending(core);
        if self.in_flight > 0 || core.recovered.any() {
            core.recovered.orphan(self.queue);
        }
        let (slots, charge, records) = (&mut self.slots, &mut self.charge, &self.records);
        self.tx.abandon(&self.shared.pool, |slot, buffer| {
            sent(core, slots, records, charge, slot, buffer)
        });
    }
}

#[inline(always)]
fn sent(
    core: &mut Core,
    slots: &mut Slots,
    records: &QueueRecords,
    charge: &mut ConnectionCharge,
    slot: u16,
    buffer: Option<StagingBuffer>,
) {
    // First the record: a buffer named by a record must not be reused.
    if slot != NONE {
        let rest = slots.release(slot);
        debug_assert!(rest.is_none(), "an answered command holds no buffer");
        records.end_command(slot);
    }
    if let Some(buffer) = buffer {
        charge.remove(buffer.taken());
        core.staging.release(buffer);
    }
}
