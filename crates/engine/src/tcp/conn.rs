//! One connection, which is one queue.
//!
//! **Design.** Everything a queue needs between two turns: its socket, its commands ([`Slots`]), what it
//! has received of a PDU ([`Rx`]) and what it has yet to send ([`Tx`]), all reserved when it is adopted
//! and none of it touched before it is used. A connection that ends closes its socket at once, but keeps
//! its places here and in the state region until the core has given back every command.
//!
//! **Not here:** what PDUs and commands mean ([`super::rx`], [`super::command`], [`super::admin`]).

use super::pool::Pool;
use super::rx::Rx;
use super::share::{Held, LaneUse};
use super::slots::{NONE, NoSlot, Slots, Stage, Work};
use super::tx::Tx;
use crate::core::staging::StagingBuffer;
use crate::core::{Core, IoOp, Owner};
use crate::lane::LaneIndex;
use forebay_nvme::tcp::{
    self, C2hData, DIGEST_BYTES, MAX_TERM_REQ_BYTES, PduError, Role, TcpParams,
};
use forebay_nvme::{Cqe, Sqe, Status};
use forebay_xlate::boundary::region::{
    CommandRecord, CommandState, OpKind, QueueRecord, Region, bump,
};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::Shutdown;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Staging memory that one connection may hold: what it asks beyond that waits.
pub(super) const MAX_HELD_BYTES: u64 = 8 << 20;
/// How long a host that was told to go may take to hang up.
const CLOSE_LIMIT_NS: u64 = 2_000_000_000;

/// What the connections of a reactor share.
pub(super) struct Shared {
    pub region: Arc<Region>,
    /// R2Ts that hosts have yet to answer; each holds staging memory.
    pub r2ts: Cell<u32>,
    /// What each lane holds, and how many hold anything ([`super::share`]).
    pub lanes: RefCell<BTreeMap<u32, Rc<LaneUse>>>,
    pub lanes_holding: Cell<u32>,
    pub pool: RefCell<Pool>,
}

impl Shared {
    /// For a reactor without connections.
    pub(super) fn new(region: Arc<Region>) -> Self {
        Self {
            region,
            r2ts: Cell::new(0),
            lanes: RefCell::default(),
            lanes_holding: Cell::new(0),
            pool: RefCell::new(Pool::new()),
        }
    }
}

/// How far a connection's life is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    /// It serves.
    Open,
    /// It was told to go (C2HTermReq), and has until then to hang up.
    Leaving { until_ns: u64 },
    /// Its socket is closed; commands are still with the core.
    Draining,
}

/// See the module's text.
pub(super) struct Conn {
    pub index: u32,
    pub generation: u32,
    pub fd: Option<OwnedFd>,
    pub params: TcpParams,
    pub shared: Rc<Shared>,
    /// Its slot among the region's queues.
    pub queue: u32,
    /// Its place among the controllers.
    pub controller: u32,
    pub qid: u16,
    pub entries: u16,
    pub lane: Option<LaneIndex>,
    /// The host does without SQHD (Base 2.0, 6.3, CATTR bit 2): responses to reads may be left out.
    pub no_flow_control: bool,
    pub life: Life,
    pub slots: Slots,
    pub rx: Rx,
    pub tx: Tx,
    /// Commands that the core has.
    pub in_flight: u32,
    /// Commands that wait for their data.
    pub receiving: u32,
    /// Staging memory held.
    pub held: Held,
    sq_head: u16,
    number: u64,
    /// Since when the socket takes nothing.
    pub blocked_since_ns: u64,
    watched: epoll::EventFlags,
    /// Turns without data.
    pub quiet_turns: u32,
    /// To be looked at each turn.
    pub active: bool,
    /// In the list of those that are.
    pub listed: bool,
    /// In the list of those with something to send.
    pub dirty: bool,
}

impl Conn {
    #[expect(clippy::too_many_arguments, reason = "each is a column of one row")]
    pub(super) fn new(
        index: u32,
        generation: u32,
        fd: OwnedFd,
        params: TcpParams,
        shared: Rc<Shared>,
        queue: u32,
        controller: u32,
        qid: u16,
        entries: u16,
        lane: Option<LaneIndex>,
        no_flow_control: bool,
    ) -> Self {
        Self {
            held: Held::new(&shared, lane),
            index,
            generation,
            fd: Some(fd),
            params,
            shared,
            queue,
            controller,
            qid,
            entries,
            lane,
            no_flow_control,
            life: Life::Open,
            slots: Slots::new(usize::from(entries)),
            rx: Rx::new(),
            tx: Tx::new(),
            in_flight: 0,
            receiving: 0,
            sq_head: 0,
            number: 0,
            blocked_since_ns: 0,
            watched: epoll::EventFlags::IN,
            quiet_turns: 0,
            active: false,
            listed: false,
            dirty: false,
        }
    }

    /// The key of its events.
    pub(super) fn key(&self) -> u64 {
        u64::from(self.generation & 0x00ff_ffff) << 32 | u64::from(self.index)
    }

    pub(super) fn is_open(&self) -> bool {
        self.life == Life::Open
    }

    /// Something here waits for memory or room that others hold, so it must be tried again.
    pub(super) fn must_retry(&self) -> bool {
        self.is_open()
            && !self.tx.blocked()
            && (self.slots.first_waiting().is_some() || self.rx.stalled())
    }

    fn record(&self) -> &QueueRecord {
        &self.shared.region.queues()[self.queue as usize]
    }

    fn command_record(&self, slot: u16) -> Option<&CommandRecord> {
        self.shared
            .region
            .commands(self.queue as usize)
            .get(usize::from(slot))
    }

    /// Counts a command as taken from the submission queue.
    pub(super) fn count_taken(&mut self) {
        self.sq_head = if self.sq_head + 1 >= self.entries {
            0
        } else {
            self.sq_head + 1
        };
        self.number += 1;
        self.record().number.store(self.number, Relaxed);
    }

    /// Gives a command a slot, and records it.
    #[inline]
    pub(super) fn take_slot(&mut self, sqe: &Sqe, now_ns: u64) -> Result<u16, NoSlot> {
        let slot = self.slots.take(sqe.cid(), now_ns)?;
        self.count_taken();
        if let Some(record) = self.command_record(slot) {
            let words: [u64; 8] = zerocopy::transmute!(*sqe);
            record.number.store(self.number, Relaxed);
            record.taken_ns.store(now_ns, Relaxed);
            for (to, from) in record.sqe.iter().zip(words) {
                to.store(from, Relaxed);
            }
            record
                .state
                .store(CommandState::taken(self.number).0, Release);
        }
        Ok(slot)
    }

    /// As if a command had not been taken: it is still in the stream.
    pub(super) fn untake(&mut self, core: &mut Core, slot: u16) {
        self.release(core, slot);
        self.sq_head = self
            .sq_head
            .checked_sub(1)
            .unwrap_or(self.entries.saturating_sub(1));
        self.number -= 1;
        self.record().number.store(self.number, Relaxed);
    }

    /// The name under which the core gives a command back.
    #[inline]
    pub(super) fn owner(&self, slot: u16) -> Owner {
        Owner {
            conn: self.index,
            conn_generation: self.generation,
            slot,
        }
    }

    /// Takes a staging buffer for a command, unless the connection holds enough already.
    #[inline]
    pub(super) fn take_buffer(&mut self, core: &mut Core, len_bytes: u32) -> Option<StagingBuffer> {
        let len = u64::from(len_bytes);
        let own_share = self.held.bytes == 0 || self.held.bytes + len <= MAX_HELD_BYTES;
        if !own_share || !self.held.may_take(len) {
            return None;
        }
        let Some(buffer) = core.staging.take(len_bytes) else {
            bump(&core.record().staging_waits, 1);
            return None;
        };
        self.held.take(len_bytes as usize);
        Some(buffer)
    }

    #[inline]
    pub(super) fn give_buffer(&mut self, core: &mut Core, buffer: StagingBuffer) {
        self.held.give(buffer.len());
        core.staging.give(buffer);
    }

    fn cqe(&self, cid: u16, status: Status, result: u64) -> Cqe {
        let sqhd = if self.no_flow_control {
            0
        } else {
            self.sq_head
        };
        Cqe::new(result, sqhd, 0, cid, status)
    }

    /// Queues a response that belongs to no slot.
    pub(super) fn answer_unslotted(&mut self, cid: u16, status: Status, result: u64) {
        let (params, cqe) = (self.params, self.cqe(cid, status, result));
        self.tx.push(&self.shared.pool, NONE, |out| {
            tcp::put_capsule_resp(out, &params, &cqe)
        });
    }

    /// Queues the answer to the Connect that made this queue: SQHD is FFFFh where the host is told that
    /// it is not kept (Base 2.0, 6.3).
    pub(super) fn answer_connect(&mut self, cid: u16, cntlid: u16) {
        self.count_taken();
        let sqhd = if self.no_flow_control {
            0xffff
        } else {
            self.sq_head
        };
        let (params, cqe) = (
            self.params,
            Cqe::new(u64::from(cntlid), sqhd, 0, cid, Status::SUCCESS),
        );
        self.tx.push(&self.shared.pool, NONE, |out| {
            tcp::put_capsule_resp(out, &params, &cqe)
        });
    }

    /// Ends a command: queues its response, and the first `data_bytes` of `buffer` before it. The slot
    /// is free when all of that is sent.
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
        s.stage = Stage::Answering;
        let cid = s.cid;
        let kept = s.buffer.take();
        self.count_ended(core, slot, status);
        if let Some(kept) = kept {
            self.give_buffer(core, kept);
        }
        let params = self.params;
        match buffer {
            Some(buffer) if data_bytes > 0 => {
                // SUCCESS stands for the response where the host needs nothing else of it (TCP 3.6.2.9).
                let alone = self.no_flow_control && status == Status::SUCCESS && result == 0;
                let header = C2hData {
                    cid,
                    offset_bytes: 0,
                    length_bytes: data_bytes,
                    last: true,
                    success: alone,
                };
                let digest = params
                    .data_digest
                    .then(|| tcp::crc32c(&buffer.as_slice()[..data_bytes as usize]));
                let ends = if alone && digest.is_none() {
                    slot
                } else {
                    NONE
                };
                self.tx
                    .push_data(&self.shared.pool, ends, buffer, data_bytes, |out| {
                        tcp::put_c2h_data(out, &params, &header)
                    });
                if ends == slot {
                    return;
                }
                let cqe = self.cqe(cid, status, result);
                self.tx.push(&self.shared.pool, slot, |out| {
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
                if let Some(buffer) = other {
                    self.give_buffer(core, buffer);
                }
                let cqe = self.cqe(cid, status, result);
                self.tx.push(&self.shared.pool, slot, |out| {
                    tcp::put_capsule_resp(out, &params, &cqe)
                });
            }
        }
    }

    /// The lane's statistics.
    fn count_ended(&self, core: &Core, slot: u16, status: Status) {
        let (Some(s), Some(lane)) = (self.slots.get(slot), self.lane.and_then(|l| core.lane(l)))
        else {
            return;
        };
        let (Work::Io(op) | Work::DurableRead(op)) = &s.work else {
            return;
        };
        let (kind, bytes) = match *op {
            IoOp::Read { len_bytes, .. } => (OpKind::Read, u64::from(len_bytes)),
            IoOp::Write { len_bytes, .. } => (OpKind::Write, u64::from(len_bytes)),
            IoOp::Flush => (OpKind::Flush, 0),
            IoOp::WriteZeroes { len_bytes, .. } => (OpKind::Deallocate, len_bytes),
            IoOp::Deallocate { .. } => (OpKind::Deallocate, 0),
        };
        let error = !status.is_success();
        // What ended in the turn in which it was taken was not timed by the turn's clock.
        let now_ns = match core.now_ns() {
            now if now == s.taken_ns => crate::core::monotonic_ns(),
            now => now,
        };
        let ns = now_ns.saturating_sub(s.taken_ns);
        lane.record().ops[kind as usize].record(if error { 0 } else { bytes }, ns, error);
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    /// When the connection is gone.
    pub(super) fn flush(&mut self, core: &mut Core) -> Result<(), Errno> {
        let Some(fd) = &self.fd else { return Ok(()) };
        let was_blocked = self.blocked_since_ns != 0;
        let before = self.tx.queued_bytes();
        let (slots, region, queue) = (&mut self.slots, &self.shared.region, self.queue as usize);
        let held = &mut self.held;
        self.tx.flush(&self.shared.pool, fd, |slot, buffer| {
            sent(core, slots, region, queue, held, slot, buffer)
        })?;
        if self.tx.blocked() {
            if !was_blocked || self.tx.queued_bytes() < before {
                self.blocked_since_ns = core.now_ns().max(1);
            }
        } else {
            self.blocked_since_ns = 0;
            if let Life::Leaving { .. } = self.life
                && self.tx.is_empty()
            {
                rustix::net::shutdown(fd, Shutdown::Write)?;
            }
        }
        Ok(())
    }

    /// Has the socket watched for what the connection waits for now.
    pub(super) fn watch(&mut self, epoll: &OwnedFd) -> Result<(), Errno> {
        // While the host doesn't take what it asked for, it gets to ask for nothing more.
        let wanted = if self.tx.blocked() {
            epoll::EventFlags::OUT
        } else {
            epoll::EventFlags::IN
        };
        if wanted != self.watched
            && let Some(fd) = &self.fd
        {
            epoll::modify(epoll, fd, epoll::EventData::new_u64(self.key()), wanted)?;
            self.watched = wanted;
        }
        Ok(())
    }

    /// Says why in a C2HTermReq (TCP 3.6.2.5); nothing more is taken from the host.
    pub(super) fn terminate(&mut self, core: &mut Core, error: &PduError, header: &[u8]) {
        if !self.is_open() {
            return;
        }
        self.life = Life::Leaving {
            until_ns: core.now_ns().saturating_add(CLOSE_LIMIT_NS),
        };
        self.rx.forget(&self.shared.pool);
        self.drop_pending(core);
        self.tx.push(&self.shared.pool, NONE, |out| {
            let room = &mut out[..MAX_TERM_REQ_BYTES];
            tcp::put_term_req(room, Role::Controller, error, header)
        });
    }

    /// Frees the slots of commands that nobody has but us.
    pub(super) fn drop_pending(&mut self, core: &mut Core) {
        core.leave_spans();
        while let Some(slot) = self.slots.first_waiting() {
            self.slots.take_waiting();
            self.release(core, slot);
        }
        for slot in 0..self.entries {
            if matches!(
                self.slots.get(slot).map(|s| s.stage),
                Some(Stage::Receiving | Stage::Kept | Stage::Taken)
            ) {
                self.release(core, slot);
            }
        }
    }

    /// Frees the slots of event requests, which end without an answer.
    pub(super) fn drop_kept(&mut self, core: &mut Core) {
        for slot in 0..self.entries {
            if self.slots.get(slot).is_some_and(|s| s.stage == Stage::Kept) {
                self.release(core, slot);
            }
        }
    }

    /// Frees a slot without an answer.
    pub(super) fn release(&mut self, core: &mut Core, slot: u16) {
        if self
            .slots
            .get(slot)
            .is_some_and(|s| s.stage == Stage::Receiving)
        {
            self.count_received_all();
        }
        let buffer = self.slots.release(slot);
        if let Some(record) = self.command_record(slot) {
            record.state.store(0, Relaxed);
        }
        if let Some(buffer) = buffer {
            self.give_buffer(core, buffer);
        }
    }

    /// Closes the socket and drops whatever the core doesn't have.
    pub(super) fn shut(&mut self, core: &mut Core) {
        if self.life == Life::Draining {
            return;
        }
        self.life = Life::Draining;
        self.fd = None;
        self.rx.forget(&self.shared.pool);
        self.drop_pending(core);
        if self.in_flight > 0 || core.carries() {
            core.orphan(self.queue);
        }
        let (slots, region, queue) = (&mut self.slots, &self.shared.region, self.queue as usize);
        let held = &mut self.held;
        self.tx.abandon(&self.shared.pool, |slot, buffer| {
            sent(core, slots, region, queue, held, slot, buffer)
        });
    }

    /// An R2T was sent.
    pub(super) fn count_asked(&mut self) {
        self.receiving += 1;
        self.held.asked();
    }

    /// An R2T is answered, or given up.
    pub(super) fn count_received_all(&mut self) {
        self.receiving -= 1;
        self.held.answered();
    }
}

/// A command's last byte is sent, or never will be; or a buffer is free.
#[inline]
fn sent(
    core: &mut Core,
    slots: &mut Slots,
    region: &Region,
    queue: usize,
    held: &mut Held,
    slot: u16,
    buffer: Option<StagingBuffer>,
) {
    if let Some(buffer) = buffer {
        held.give(buffer.len());
        core.staging.give(buffer);
    }
    if slot != NONE {
        let rest = slots.release(slot);
        debug_assert!(rest.is_none(), "an answered command holds no buffer");
        if let Some(record) = region.commands(queue).get(usize::from(slot)) {
            record.state.store(0, Relaxed);
        }
    }
}
