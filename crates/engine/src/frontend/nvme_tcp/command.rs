//! I/O commands: from a capsule to the core, and from the core to a response.
//!
//! A command is checked, gets a slot, and goes to the core when it has memory, room and, for larger
//! writes, its R2T data. Otherwise it waits in order in its connection's list, while the stream is
//! read on. Only in-capsule data without memory stalls the stream. R2Ts are limited
//! ([`super::quotas`]), so that hosts which never send data cannot tie up all memory.
//!
//! **Not here:** admin commands ([`super::admin`]), the stream ([`super::rx`]).

pub(super) use super::MDTS_BYTES;
use super::conn::{Conn, Stalled};
use super::restrictions;
use super::rx::Stop;
use super::slots::{NoSlot, SlotStage, Work};
use super::{TcpTurn, fused, r2t, reserve};
use crate::core::staging::StagingBuffer;
use crate::core::{CommandRef, Core, DoneIo, Expected, IoOp, Issuer, NewIo};
use crate::lane::{Lane, LaneIndex};
use forebay_nvme::Status;
use forebay_nvme::io::{self, IoCommand, NamespaceGeometry, Transfer};
use forebay_nvme::tcp::{DataPlace, decode_sgl};
use forebay_xlate::boundary::region::{OpKind, TimesOf};

pub(crate) const NSID: u32 = 1;
/// Commands per connection that may have open R2Ts.
pub(super) const MAX_R2TS_OF_ONE: u32 = 64;

pub(super) struct Capsule<'a> {
    pub sqe: &'a forebay_nvme::Sqe,
    pub data: &'a [u8],
    /// The data digest was right, or there is none.
    pub intact: bool,
    /// The stream position after it.
    pub end: u64,
}

impl Capsule<'_> {
    #[inline]
    pub(super) fn judge(&self, geometry: &NamespaceGeometry) -> Result<Judged, Status> {
        let command = io::decode(self.sqe, NSID, geometry, MDTS_BYTES)?;
        let bytes = |blocks: u64| blocks * u64::from(geometry.block_bytes);
        let work = match command {
            IoCommand::Read { lba, blocks, fua } => {
                let op = IoOp::Read {
                    offset_bytes: bytes(lba),
                    len_bytes: bytes(u64::from(blocks)) as u32,
                };
                if fua {
                    Work::DurableRead(op)
                } else {
                    Work::Io(op)
                }
            }
            IoCommand::Write { lba, blocks, fua } => Work::Io(IoOp::Write {
                offset_bytes: bytes(lba),
                len_bytes: bytes(u64::from(blocks)) as u32,
                fua,
            }),
            IoCommand::Flush => Work::Io(IoOp::Flush),
            IoCommand::WriteZeroes {
                lba,
                blocks,
                fua,
                deallocate,
            } => Work::Io(IoOp::WriteZeroes {
                offset_bytes: bytes(lba),
                len_bytes: bytes(u64::from(blocks)),
                deallocate,
                fua,
            }),
            IoCommand::Deallocate { ranges } => Work::Io(IoOp::Deallocate { ranges }),
            IoCommand::Hint { .. } => Work::Hint,
            IoCommand::Compare { lba, blocks, fua } => {
                let op = IoOp::Compare {
                    offset_bytes: bytes(lba),
                    len_bytes: bytes(u64::from(blocks)) as u32,
                };
                if fua {
                    Work::DurableRead(op)
                } else {
                    Work::Compare(op)
                }
            }
            IoCommand::Reserve { action } => Work::Reserve { action },
            IoCommand::ReservationReport { extended, .. } => Work::Report { extended },
        };
        let transfer = command.transfer(geometry);
        // Linux always sends 4 KiB of ranges.
        let ranges = matches!(
            command,
            IoCommand::Deallocate { .. } | IoCommand::Hint { .. }
        );
        let source = source(self, transfer, !ranges)?;
        Ok(Judged {
            work,
            len_bytes: transfer.bytes(),
            source,
        })
    }
}

pub(super) struct Judged {
    pub work: Work,
    pub len_bytes: u32,
    pub source: Source,
}

pub(super) enum Source {
    None,
    Capsule(u32),
    Host,
}

/// `Err`: why the stream must stop; then nothing was taken.
#[inline]
pub(super) fn receive(
    conn: &mut Conn,
    turn: &mut TcpTurn<'_>,
    capsule: &Capsule<'_>,
) -> Result<(), Stop> {
    let Some(slot) = slot_for(conn, turn.core, capsule)? else {
        return Ok(());
    };
    let judged = match conn.restrictions {
        0 => geometry(conn, turn.core).and_then(|geometry| capsule.judge(&geometry)),
        _ => {
            conn.end_lone_first(turn.core, capsule.sqe);
            judge_gated(conn, turn.core, capsule)
        }
    };
    let judged = match judged {
        Ok(judged) => judged,
        Err(_) if capsule.sqe.fuse() != 0 => return fused::receive_half(conn, turn, slot, capsule),
        Err(_) if !turn.core.qos.may_answer(conn.lane) => return stall(conn, turn.core, slot),
        Err(status) => {
            refuse(conn, turn, slot, capsule, status);
            return Ok(());
        }
    };
    if matches!(judged.work, Work::Hint) && !turn.core.qos.may_answer(conn.lane) {
        return stall(conn, turn.core, slot);
    }
    accept(conn, turn, slot, capsule, judged)
}

#[cold]
pub(super) fn refuse(
    conn: &mut Conn,
    turn: &mut TcpTurn<'_>,
    slot: u16,
    capsule: &Capsule<'_>,
    status: Status,
) {
    let now = turn.core.now_ns();
    conn.record_command(slot, capsule.sqe, capsule.end, now, None, false);
    conn.answer(turn.core, slot, status, 0, None, 0);
}

/// `Err` as in [`receive`].
#[inline]
pub(super) fn accept(
    conn: &mut Conn,
    turn: &mut TcpTurn<'_>,
    slot: u16,
    capsule: &Capsule<'_>,
    judged: Judged,
) -> Result<(), Stop> {
    let mut buffer = None;
    if let Source::Capsule(offset) = judged.source {
        let from = offset as usize;
        let data = capsule
            .data
            .get(from..from + judged.len_bytes as usize)
            .unwrap_or(&[]);
        // In-capsule data must leave the stream. The limits are the lane's commands in flight and
        // the tenant's memory, since both drain without anything from the stream. The connection's
        // own limit does not apply.
        if !may_hold(&judged.work, conn.lane, turn.core) {
            return stall(conn, turn.core, slot);
        }
        match turn.core.staging.allocate(judged.len_bytes) {
            // The first of a fused pair holds its buffer until the second comes.
            Some(taken)
                if !conn.charge.may_have(taken.taken(), &turn.core.staging)
                    && conn.pairs.first_of(slot).is_none() =>
            {
                turn.core.staging.release(taken);
                return stall(conn, turn.core, slot);
            }
            Some(mut taken) => {
                taken.as_mut_slice()[..data.len()].copy_from_slice(data);
                if let Some(lane) = conn.lane {
                    turn.core.lanes.count_copied(lane, data.len() as u32);
                }
                conn.charge.add(taken.taken());
                buffer = Some(taken);
            }
            None => {
                forebay_xlate::boundary::region::bump(&turn.core.record().staging_waits, 1);
                return stall(conn, turn.core, slot);
            }
        }
    }
    let Some(s) = conn.slots.get_mut(slot) else {
        return Err(Stop::Close);
    };
    s.work = judged.work;
    s.len_bytes = judged.len_bytes;
    s.by_r2t = matches!(judged.source, Source::Host);
    if let Some(stalled) = conn.stalled {
        (s.taken_ns, s.over_ns) = (stalled.since_ns, Some(stalled.over_ns));
    }
    let place = buffer.as_ref().map(StagingBuffer::reference);
    s.buffer = buffer;
    let now = turn.core.now_ns();
    conn.record_command(slot, capsule.sqe, capsule.end, now, place, false);
    if matches!(judged.source, Source::Capsule(_)) {
        data_is_there(conn, turn, slot);
    } else {
        conn.begin_or_wait(turn.core, slot);
    }
    Ok(())
}

/// Leaves a command with its data, and all behind it, in the stream.
#[cold]
fn stall(conn: &mut Conn, core: &Core, slot: u16) -> Result<(), Stop> {
    conn.slots.release(slot);
    conn.stalled.get_or_insert(Stalled {
        since_ns: core.now_ns(),
        over_ns: conn
            .lane
            .map_or(0, |lane| core.qos.over_ns(lane, core.now_ns())),
    });
    Err(Stop::Stalled)
}

/// Whether the lane may hold memory for one more command. Only device operations need budget.
#[inline]
fn may_hold(work: &Work, lane: Option<LaneIndex>, core: &Core) -> bool {
    lane.is_none_or(|lane| match work {
        Work::Reserve { .. } | Work::Report { .. } | Work::Hint => core.has_room(lane),
        _ => core.may_start(lane),
    })
}

/// A slot for a command still in the stream; `None`: it was taken and answered without one.
#[inline(always)]
pub(super) fn slot_for(
    conn: &mut Conn,
    core: &Core,
    capsule: &Capsule<'_>,
) -> Result<Option<u16>, Stop> {
    let cid = capsule.sqe.cid();
    match conn.slots.claim(cid, core.now_ns()) {
        Ok(slot) => Ok(Some(slot)),
        // The host cannot tell which of both commands the answer is for (Base 2.0, 3.3.3.1).
        Err(NoSlot::Conflict) if conn.tx.has_room(conn.slots.used()) => {
            let status = Status::COMMAND_ID_CONFLICT.with_dnr();
            conn.answer_unslotted(cid, status, capsule.end);
            Ok(None)
        }
        Err(NoSlot::Conflict) => Err(Stop::Stalled),
        Err(NoSlot::Full) => Err(Stop::Close),
    }
}

/// [`Capsule::judge`], for a connection whose host is restricted.
#[cold]
pub(super) fn judge_gated(
    conn: &Conn,
    core: &Core,
    capsule: &Capsule<'_>,
) -> Result<Judged, Status> {
    match restrictions::refusal(conn.restrictions, capsule.sqe) {
        Some(status) => Err(status),
        None => capsule.judge(&geometry(conn, core)?),
    }
}

#[inline]
pub(super) fn geometry(conn: &Conn, core: &Core) -> Result<NamespaceGeometry, Status> {
    match conn.lane.and_then(|l| core.lane(l)) {
        Some(lane) => Ok(lane.geometry()),
        None => Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()),
    }
}

/// Where a command's data is, by its SGL, which must describe exactly that length (`exact`), or at
/// least.
pub(super) fn source(
    capsule: &Capsule<'_>,
    transfer: Transfer,
    exact: bool,
) -> Result<Source, Status> {
    let fits = |length: u32| {
        let wanted = transfer.bytes();
        if length == wanted || (length > wanted && !exact) {
            Ok(())
        } else {
            Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr())
        }
    };
    match transfer {
        Transfer::None => Ok(Source::None),
        Transfer::ToHost(_) => match decode_sgl(capsule.sqe, capsule.data.len() as u32)? {
            DataPlace::Transport { length_bytes } => fits(length_bytes).map(|()| Source::None),
            // In-capsule data cannot go to the host.
            DataPlace::InCapsule { .. } => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr()),
        },
        Transfer::FromHost(_) => match decode_sgl(capsule.sqe, capsule.data.len() as u32)? {
            DataPlace::InCapsule { .. } if !capsule.intact => {
                Err(Status::TRANSIENT_TRANSPORT_ERROR)
            }
            DataPlace::InCapsule {
                offset_bytes,
                length_bytes,
            } => fits(length_bytes).map(|()| Source::Capsule(offset_bytes)),
            DataPlace::Transport { length_bytes } => fits(length_bytes).map(|()| Source::Host),
        },
    }
}

/// [`source`] for an admin command: `Some` is the capsule's data.
pub(super) fn admin_source<'a>(
    capsule: &Capsule<'a>,
    transfer: Transfer,
) -> Result<Option<&'a [u8]>, Status> {
    Ok(match source(capsule, transfer, false)? {
        Source::Capsule(offset) => {
            let from = offset as usize;
            capsule.data.get(from..from + transfer.bytes() as usize)
        }
        Source::None => Some(&[]),
        Source::Host => None,
    })
}

impl Conn {
    /// Begins a command, or queues it. A command with memory goes before those without: they need
    /// the memory that it will release.
    pub(super) fn begin_or_wait(&mut self, core: &mut Core, slot: u16) {
        let Some(s) = self.slots.get(slot) else {
            return;
        };
        let others_wait = match &s.work {
            Work::Reserve { .. } => false,
            _ if s.is_ready() => self.slots.ready_waits(),
            _ => self.slots.first_waiting().is_some(),
        };
        if others_wait || !self.advance(core, slot) {
            note_over_budget(self, core, slot);
            self.slots.wait(slot);
        }
    }

    /// True if any advanced.
    pub(super) fn retry_waiting(&mut self, core: &mut Core) -> bool {
        let mut any = false;
        while let Some(slot) = self.slots.first_waiting() {
            self.slots.unlink_first_waiting();
            self.records.blame(slot);
            if !self.advance(core, slot) {
                self.slots.wait_first(slot);
                break;
            }
            any = true;
        }
        any
    }

    #[inline]
    fn advance(&mut self, core: &mut Core, slot: u16) -> bool {
        let Some(s) = self.slots.get(slot) else {
            return true;
        };
        let (by_r2t, len_bytes) = (s.by_r2t, s.len_bytes);
        if !s.is_ready() {
            let may_ask = self.charge.receiving < MAX_R2TS_OF_ONE
                && self.charge.may_ask()
                && (self.lane).is_none_or(|lane| core.qos.may_ask(&core.staging, lane, len_bytes));
            if by_r2t && !may_ask || !may_hold(&s.work, self.lane, core) {
                return false;
            }
            let Some(buffer) = self.allocate_buffer(core, len_bytes) else {
                return false;
            };
            if let Some(s) = self.slots.get_mut(slot) {
                s.buffer = Some(buffer);
            }
            if by_r2t {
                note_over_budget(self, core, slot);
                r2t::ask(self, core, slot);
                return true;
            }
        }
        self.start_in_core(core, slot)
    }

    #[inline]
    fn start_in_core(&mut self, core: &mut Core, slot: u16) -> bool {
        let (owner, queue, lane) = (self.owner(slot), self.queue, self.lane);
        let Some(s) = self.slots.get_mut(slot) else {
            return true;
        };
        let Some(lane) = lane else { return true };
        let (op, buffer) = match &s.work {
            Work::Io(op) => (*op, s.buffer.take()),
            // The buffer stays here for the read.
            Work::DurableRead(_) => (IoOp::Flush, None),
            Work::Compare(_) => return self.start_comparing(core, slot, Expected::default()),
            Work::First { .. } | Work::Second(_) => return self.start_half(core, slot),
            Work::Reserve { .. } | Work::Report { .. } => return reserve::begin(self, slot),
            Work::Hint | Work::Admin(_) => return true,
        };
        let over_ns = s.over_ns;
        let new = NewIo {
            owner,
            lane,
            op,
            buffer,
            record: CommandRef::new(queue, slot),
            over_ns,
        };
        match core.start(new) {
            Ok(()) => {
                s.stage = SlotStage::InFlight;
                s.over_ns = None;
                self.in_flight += 1;
                let over_ns = over_ns.map_or(0, |then| {
                    core.qos.over_ns(lane, core.now_ns()).saturating_sub(then)
                });
                let since_ns = s.taken_ns + over_ns;
                if since_ns < core.now_ns() {
                    let ns = core.now_ns().saturating_sub(since_ns);
                    count_part(core.lane(lane), op.kind(), TimesOf::Waiting, ns);
                }
                true
            }
            Err(new) => {
                if new.buffer.is_some() {
                    s.buffer = new.buffer;
                }
                false
            }
        }
    }

    /// Starts a flush that belongs to no host command. It needs no budget unless the lane's debt
    /// exceeds a second's worth. False: the core has no room.
    pub(super) fn start_internal_flush(&mut self, core: &mut Core, lane: LaneIndex) -> bool {
        let owner = Issuer {
            slot: super::slots::NONE,
            ..self.owner(0)
        };
        let record = CommandRef::new(self.queue, super::INTERNAL_SLOT);
        core.begin_owing(lane);
        let started = core
            .start(NewIo {
                owner,
                lane,
                op: IoOp::Flush,
                buffer: None,
                record,
                over_ns: None,
            })
            .is_ok();
        core.begin_owing(lane);
        self.in_flight += u32::from(started);
        started
    }

    #[inline]
    pub(super) fn command_ended(&mut self, core: &mut Core, done: DoneIo, interrupted: Status) {
        let slot = done.owner.slot;
        self.records.blame(slot);
        let Some(s) = self.slots.get_mut(slot) else {
            return;
        };
        s.stage = SlotStage::Taken;
        if done.started_ns != core.now_ns() {
            let kind = done.op.kind();
            let ns = core.now_ns().saturating_sub(done.started_ns);
            count_part(core.lane(done.lane), kind, TimesOf::Device, ns);
        }
        let status = match done.status {
            Status::COMMAND_INTERRUPTED => interrupted,
            status => status,
        };
        match s.work {
            Work::DurableRead(op) if done.op == IoOp::Flush && status.is_success() => {
                if restrictions::keeps_out(self.restrictions, &op) {
                    // Its host lost access meanwhile.
                    let status = Status::RESERVATION_CONFLICT.with_dnr();
                    self.answer(core, slot, status, 0, done.buffer, 0);
                    return;
                }
                s.work = match op {
                    IoOp::Compare { .. } => Work::Compare(op),
                    _ => Work::Io(op),
                };
                self.begin_or_wait(core, slot);
                return;
            }
            Work::Second(_) => return self.pair_ended(core, slot, done, status),
            _ => {}
        }
        let data_bytes = match done.op {
            IoOp::Read { len_bytes, .. } if status.is_success() => len_bytes,
            _ => 0,
        };
        self.answer(core, slot, status, 0, done.buffer, data_bytes);
    }
}

/// A command begins to wait: from now on it may be throttled.
pub(super) fn note_over_budget(conn: &mut Conn, core: &Core, slot: u16) {
    if let (Some(lane), Some(s)) = (conn.lane, conn.slots.get_mut(slot)) {
        s.over_ns
            .get_or_insert(core.qos.over_ns(lane, core.now_ns()));
    }
}

#[inline(never)]
fn count_part(lane: Option<&Lane>, kind: OpKind, of: TimesOf, ns: u64) {
    if let Some(lane) = lane {
        lane.record().ops[kind as usize].times[of as usize].record(ns);
    }
}

pub(super) fn data_complete(conn: &mut Conn, turn: &mut TcpTurn<'_>, slot: u16) {
    let fate = conn.slots.get(slot).map_or(Status::SUCCESS, |s| s.fate);
    if fate != Status::SUCCESS {
        conn.fail_other_half(turn.core, slot);
        conn.answer(turn.core, slot, fate, 0, None, 0);
    } else {
        data_is_there(conn, turn, slot);
    }
}

#[inline]
pub(super) fn data_is_there(conn: &mut Conn, turn: &mut TcpTurn<'_>, slot: u16) {
    let Some(s) = conn.slots.get(slot) else {
        return;
    };
    match s.work {
        Work::Io(IoOp::Deallocate { ranges }) => {
            let data = s.buffer.as_ref().map_or(&[][..], |b| b.as_slice());
            let sound = geometry(conn, turn.core)
                .and_then(|geometry| io::dsm_ranges(data, ranges, &geometry).map(drop));
            if let Err(status) = sound {
                conn.answer(turn.core, slot, status, 0, None, 0);
                return;
            }
        }
        Work::Hint => {
            conn.answer(turn.core, slot, Status::SUCCESS, 0, None, 0);
            return;
        }
        _ => {}
    }
    conn.begin_or_wait(turn.core, slot);
}
