//! Reservation commands: decided by the daemon, answered when hosts that lost access can no longer
//! write.
//!
//! Reservation Report uses the lane's copy. All else goes to the daemon, which commits before it
//! answers. The token (socket number and command number) survives the engine, so a successor's
//! repetition counts once. With the answer comes the new state, which updates the gates. The
//! losers' waiting commands end, and the answer waits for their commands at devices ([`Drain`]).
//! After [`OWNER_WAIT_LIMIT_NS`](crate::core::OWNER_WAIT_LIMIT_NS) the command ends with Command
//! Interrupted, even if it was carried out. This path may allocate.

use super::NvmeTcp;
use super::conn::Conn;
use super::restrictions;
use super::slots::{NONE, SlotStage, Work};
use crate::core::{Core, Drain, Issuer};
use crate::frontend::Frontend;
use crate::upcall::Upcall;
use forebay_nvme::reservation::{self, HostId, NO_CONTROLLER, Reservations};
use forebay_nvme::{Status, opcode::nvm};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{ReserveAsk, ReserveToken};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Reserving {
    token: ReserveToken,
    volume: VolumeId,
    action: u32,
    owner: Issuer,
    deadline_ns: u64,
    /// Carried out; the commands that must end before the answer.
    drain: Option<Drain>,
}

/// A command has all that it needs: the frontend handles it in this turn.
#[cold]
pub(super) fn begin(conn: &mut Conn, slot: u16) -> bool {
    if let Some(s) = conn.slots.get_mut(slot) {
        s.stage = SlotStage::Reserving;
        (conn.shared.reserve.borrow_mut()).push((conn.index, conn.generation, slot));
    }
    true
}

/// Whether a command may revoke a host's access: registering doesn't.
fn may_take(action: u32) -> bool {
    let unregister = action & 7 == 1;
    (action >> 16) as u8 != nvm::RESERVATION_REGISTER || unregister
}

/// The status of waiting commands whose host loses access: Preempt and Abort aborts them.
fn ends_others_with(action: u32) -> Status {
    match (action >> 16) as u8 == nvm::RESERVATION_ACQUIRE && action & 7 == 2 {
        true => Status::COMMAND_ABORT_REQUESTED,
        false => Status::RESERVATION_CONFLICT.with_dnr(),
    }
}

impl NvmeTcp {
    #[cold]
    pub(super) fn reserve(&mut self, core: &mut Core) -> bool {
        let new = std::mem::take(&mut *self.shared.reserve.borrow_mut());
        let mut any = !new.is_empty();
        for (conn, generation, slot) in new {
            if let Some(Some(conn)) = self.conns.get(conn as usize)
                && conn.generation == generation
                && (conn.slots.get(slot)).is_some_and(|s| s.stage == SlotStage::Reserving)
            {
                let owner = conn.owner(slot);
                self.begin_reserving(core, owner);
            }
        }
        let mut all = std::mem::take(&mut self.reserving);
        all.retain_mut(|reserving| {
            let drain = reserving.drain.as_mut();
            let status = match drain.is_some_and(|drain| drain.is_over(core)) {
                true => Status::SUCCESS,
                _ if !self.is_reserving(&reserving.owner) => Status::COMMAND_INTERRUPTED,
                _ if core.clock.owner_is_late(reserving.deadline_ns) => Status::COMMAND_INTERRUPTED,
                _ => return true,
            };
            any = true;
            if reserving.drain.is_none() {
                core.upcalls
                    .push_back(Upcall::ReserveGone(reserving.volume, reserving.token));
            }
            self.reserving_ended(core, reserving.owner, status);
            false
        });
        self.reserving = all;
        any
    }

    /// Whether any waits for commands that may end without an event.
    pub(super) fn is_draining(&self) -> bool {
        self.reserving.iter().any(|r| r.drain.is_some())
    }

    pub(super) fn reserving_deadline_ns(&self) -> Option<u64> {
        self.reserving.iter().map(|r| r.deadline_ns).min()
    }

    fn is_reserving(&self, owner: &Issuer) -> bool {
        let conn = self.conns.get(owner.conn as usize).and_then(Option::as_ref);
        conn.is_some_and(|conn| {
            conn.generation == owner.conn_generation
                && conn.is_open()
                && (conn.slots.get(owner.slot)).is_some_and(|s| s.stage == SlotStage::Reserving)
        })
    }

    fn begin_reserving(&mut self, core: &mut Core, owner: Issuer) {
        let slot = owner.slot;
        let Some(Some(conn)) = self.conns.get_mut(owner.conn as usize) else {
            return;
        };
        let attached = self.controllers.get(conn.controller);
        let lane = attached
            .and_then(|attached| attached.lane)
            .and_then(|lane| core.lane(lane));
        let (Some(attached), Some(lane)) = (attached, lane) else {
            let status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
            return self.reserving_ended(core, owner, status);
        };
        let (volume, state) = (lane.volume.id(), lane.reservations.clone());
        let host = attached.controller.state().hostid;
        let Some(s) = conn.slots.get_mut(slot) else {
            return;
        };
        match s.work {
            Work::Report { extended } => {
                let mut buffer = s.buffer.take();
                let out = buffer.as_mut().map_or(&mut [][..], |b| b.as_mut_slice());
                out.fill(0);
                let len_bytes = out.len() as u32;
                let cntlid = |host: &HostId| {
                    let of = |attached: &super::controllers::Attached| {
                        attached
                            .lane
                            .and_then(|l| core.lane(l))
                            .map(|l| l.volume.id())
                            == Some(volume)
                            && attached.controller.state().hostid == *host
                    };
                    let mut all = self.controllers.iter();
                    let found = all.find(|(_, attached)| of(attached));
                    found.map_or(NO_CONTROLLER, |(_, a)| a.controller.cntlid())
                };
                let status = match state.report(extended, cntlid, out) {
                    Ok(()) => Status::SUCCESS,
                    Err(status) => status,
                };
                let sent = if status.is_success() { len_bytes } else { 0 };
                conn.answer(core, slot, status, 0, buffer, sent);
                self.mark_to_send(owner.conn);
            }
            Work::Reserve { action } => {
                let keys = s
                    .buffer
                    .as_ref()
                    .map_or([0; 2], |b| reservation::keys_of(b.as_slice()));
                let token = ReserveToken {
                    socket: conn.socket.number,
                    number: conn.records.number_of(slot),
                };
                core.upcalls.push_back(Upcall::Reserve(ReserveAsk {
                    token,
                    volume,
                    host,
                    action,
                    keys,
                }));
                self.reserving.push(Reserving {
                    token,
                    volume,
                    action,
                    owner,
                    deadline_ns: core.clock.owner_deadline_ns(),
                    drain: None,
                });
            }
            _ => {}
        }
    }

    fn reserving_ended(&mut self, core: &mut Core, owner: Issuer, status: Status) {
        if !self.is_reserving(&owner) {
            return;
        }
        if let Some(Some(conn)) = self.conns.get_mut(owner.conn as usize) {
            let status = match status {
                Status::COMMAND_INTERRUPTED => self
                    .controllers
                    .get(conn.controller)
                    .map_or(status, |a| a.controller.interrupted_status()),
                status => status,
            };
            conn.answer(core, owner.slot, status, 0, None, 0);
            self.mark_to_send(owner.conn);
        }
    }

    pub(crate) fn reserved(
        &mut self,
        core: &mut Core,
        token: ReserveToken,
        volume: VolumeId,
        status: Status,
        state: &Arc<Reservations>,
    ) {
        let at = (self.reserving.iter()).position(|r| r.token == token && r.drain.is_none());
        let action = at.map_or(0, |at| self.reserving[at].action);
        let drain = self.set_reservations(core, volume, state, ends_others_with(action));
        let Some(at) = at else { return };
        if status.is_success() && may_take(action) {
            self.reserving[at].drain = Some(drain);
        } else {
            let reserving = self.reserving.swap_remove(at);
            self.reserving_ended(core, reserving.owner, status);
        }
    }

    /// Ends the losers' waiting commands with `status`; returns their commands at devices.
    pub(crate) fn set_reservations(
        &mut self,
        core: &mut Core,
        volume: VolumeId,
        state: &Arc<Reservations>,
        status: Status,
    ) -> Drain {
        core.lanes.set_reservations(volume, state);
        self.volume_changed(core, volume);
        let (conns, frontend) = (&self.conns, self.shared.frontend);
        let vm_access = state.access_of_strangers();
        let drain = Drain::begin(core, volume, status, |owner, op| {
            if owner.frontend != frontend {
                return !op.is_let_by(&vm_access);
            }
            if owner.slot == NONE {
                // A shutdown's own flush changes nothing that others see.
                return false;
            }
            let conn = conns.get(owner.conn as usize).and_then(Option::as_ref);
            conn.is_some_and(|conn| {
                // A flush may be the first part of a read.
                let op = match conn.slots.get(owner.slot).map(|s| &s.work) {
                    Some(Work::DurableRead(op)) => op,
                    _ => op,
                };
                conn.generation == owner.conn_generation
                    && restrictions::keeps_out(conn.restrictions, op)
            })
        });
        self.refuse_waiting(core, status);
        drain
    }

    pub(super) fn refuse_waiting(&mut self, core: &mut Core, status: Status) {
        for index in 0..self.conns.len() {
            if let Some(Some(conn)) = self.conns.get_mut(index)
                && conn.restrictions != 0
                && conn.is_open()
                && conn.refuse_kept_out(core, status)
            {
                self.mark_to_send(index as u32);
            }
        }
    }
}

impl Conn {
    /// Commands with data in transit end when it has come.
    fn refuse_kept_out(&mut self, core: &mut Core, status: Status) -> bool {
        let kept_out = |conn: &Conn, slot: u16| {
            conn.slots.get(slot).is_some_and(|s| match &s.work {
                Work::Io(op)
                | Work::DurableRead(op)
                | Work::Compare(op)
                | Work::First { op, .. }
                | Work::Second(op) => restrictions::keeps_out(conn.restrictions, op),
                _ => false,
            })
        };
        let mut any = false;
        let mut waiting = Vec::new();
        while let Some(slot) = self.slots.first_waiting() {
            self.slots.unlink_first_waiting();
            waiting.push(slot);
        }
        for slot in waiting {
            if self
                .slots
                .get(slot)
                .is_none_or(|s| s.stage != SlotStage::Taken)
            {
                // It was answered with the other half of its pair.
                continue;
            }
            if kept_out(self, slot) {
                self.fail_other_half(core, slot);
                self.refuse(core, slot, status);
                any = true;
            } else {
                self.slots.wait(slot);
            }
        }
        let made: Vec<u16> = self.slots.all().map(|(slot, _)| slot).collect();
        for slot in made {
            if !kept_out(self, slot) {
                continue;
            }
            match self.slots.get_mut(slot) {
                Some(s) if s.stage == SlotStage::Receiving => s.fate = status,
                Some(s) if s.stage == SlotStage::Paired => {
                    any |= self.refuse_half(core, slot, status);
                }
                _ => {}
            }
        }
        any
    }
}
