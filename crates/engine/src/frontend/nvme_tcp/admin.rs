//! Commands of the admin queue. This fetches a command's data (from the capsule or by R2T), runs it
//! on the controller, and sends the result. Effects on controller properties become a
//! [`TurnEvent`], handled later. **Not here:** the commands themselves (`nvme::controller`).

use super::command::{self, Capsule};
use super::conn::Conn;
use super::controllers::Attached;
use super::reserve;
use super::restrictions;
use super::rx::Stop;
use super::slots::{SlotStage, Work};
use super::{TcpTurn, TurnEvent};
use crate::core::Core;
use crate::core::staging::StagingBuffer;
use forebay_nvme::controller::SubsystemController;
use forebay_nvme::controller::{AdminOutcome, Effect};
use forebay_nvme::io::Transfer;
use forebay_nvme::{Sqe, Status, feature, opcode};
use forebay_xlate::kill_point;

/// `Err`: why the stream must stop; then nothing was taken.
pub(super) fn receive(
    conn: &mut Conn,
    turn: &mut TcpTurn<'_>,
    capsule: &Capsule<'_>,
) -> Result<(), Stop> {
    let cid = capsule.sqe.cid();
    let kept = conn.slots.by_cid(cid).filter(|s| {
        let slot = conn.slots.get(*s);
        slot.is_some_and(|slot| slot.stage == SlotStage::Kept)
    });
    if let Some(kept) = kept {
        // The host has given up this event request; see `forget_event_request`.
        if let Some(attached) = turn.controllers.get_mut(conn.controller) {
            attached.controller.forget_event_request(cid);
        }
        conn.release(turn.core, kept);
    }
    let Some(slot) = command::slot_for(conn, turn.core, capsule)? else {
        return Ok(());
    };
    let Some(attached) = turn.controllers.get(conn.controller) else {
        return Err(Stop::Close);
    };
    let judged = attached
        .controller
        .transfer(capsule.sqe)
        .and_then(|transfer| Ok((transfer, command::admin_source(capsule, transfer)?)));
    let (transfer, data) = match judged {
        Ok(judged) => judged,
        Err(status) => {
            conn.begin_admin_command(slot, capsule.sqe, capsule.end);
            conn.answer(turn.core, slot, status, 0, None, 0);
            return Ok(());
        }
    };
    let Some(data) = data else {
        if let Some(s) = conn.slots.get_mut(slot) {
            s.work = Work::Admin(Box::new(*capsule.sqe));
            s.len_bytes = transfer.bytes();
            s.by_r2t = true;
        }
        conn.begin_admin_command(slot, capsule.sqe, capsule.end);
        conn.begin_or_wait(turn.core, slot);
        return Ok(());
    };
    // In-capsule data goes to a buffer, too, so that a successor finds it.
    let mut buffer = None;
    if transfer.bytes() > 0 {
        let Some(mut taken) = conn.allocate_buffer(turn.core, transfer.bytes()) else {
            conn.slots.release(slot);
            return Err(Stop::Stalled);
        };
        if matches!(transfer, Transfer::FromHost(_)) {
            let n = data.len().min(taken.len());
            taken.as_mut_slice()[..n].copy_from_slice(&data[..n]);
        }
        buffer = Some(taken);
    }
    let mut out = None;
    match (conn.slots.get_mut(slot), transfer) {
        // Held until the answer is sent.
        (Some(s), Transfer::FromHost(_)) => s.buffer = buffer,
        _ => out = buffer,
    }
    conn.begin_admin_command(slot, capsule.sqe, capsule.end);
    run(conn, turn, slot, capsule.sqe, data, out)
}

/// Continues a dead engine's command; `data` came from the host.
pub(super) fn again(
    conn: &mut Conn,
    turn: &mut TcpTurn<'_>,
    slot: u16,
    sqe: &Sqe,
    data: &[u8],
) -> Result<(), Stop> {
    let attached = turn.controllers.get(conn.controller).ok_or(Stop::Close)?;
    let mut out = None;
    match attached.controller.transfer(sqe) {
        Err(status) => {
            conn.answer(turn.core, slot, status, 0, None, 0);
            return Ok(());
        }
        Ok(Transfer::ToHost(bytes)) => {
            let Some(buffer) = conn.allocate_buffer(turn.core, bytes) else {
                return Err(Stop::Stalled);
            };
            out = Some(buffer);
        }
        Ok(_) => {}
    }
    run(conn, turn, slot, sqe, data, out)
}

pub(super) fn data_complete(conn: &mut Conn, turn: &mut TcpTurn<'_>, slot: u16) {
    let Some(s) = conn.slots.get_mut(slot) else {
        return;
    };
    let (buffer, fate) = (s.buffer.take(), s.fate);
    let work = std::mem::replace(&mut s.work, Work::Hint);
    if fate != Status::SUCCESS {
        conn.answer(turn.core, slot, fate, 0, buffer, 0);
        return;
    }
    if let (Work::Admin(sqe), Some(buffer)) = (work, buffer) {
        // Host data is copied, since the buffer is held until the answer is sent.
        let data = buffer.as_slice().to_vec();
        if let Some(s) = conn.slots.get_mut(slot) {
            s.buffer = Some(buffer);
        }
        let _ = run(conn, turn, slot, &sqe, &data, None);
    }
}

/// The I/O queues that a Set Features asks for (Base 2.0, 5.27.1.5).
fn wanted_io_queues(sqe: &Sqe) -> Option<u16> {
    let asks = sqe.opcode() == opcode::admin::SET_FEATURES
        && sqe.cdw(10) as u8 == feature::NUMBER_OF_QUEUES;
    let (submission, completion) = (sqe.cdw(11) as u16, (sqe.cdw(11) >> 16) as u16);
    asks.then(|| submission.min(completion).saturating_add(1))
}

/// I/O queues that the command grants are reserved.
fn run_on(
    attached: &mut Attached,
    core: &Core,
    subsystem: Vec<SubsystemController>,
    sqe: &Sqe,
    data: &[u8],
    room: &mut [u8],
) -> AdminOutcome {
    let mut env = attached.env(core, subsystem);
    let promised = wanted_io_queues(sqe).map(|wanted| {
        let before = attached.association.io_queues();
        env.io_queues = attached.association.promise(wanted);
        before
    });
    let outcome = attached
        .controller
        .admin(sqe, data, room, &env, core.now_ns());
    if let Some(before) = promised {
        let granted = match outcome {
            AdminOutcome::Complete { status, .. } if status.is_success() => {
                attached.controller.granted_io_queues()
            }
            _ => before,
        };
        attached.association.keep(granted);
    }
    outcome
}

fn run(
    conn: &mut Conn,
    turn: &mut TcpTurn<'_>,
    slot: u16,
    sqe: &Sqe,
    data: &[u8],
    mut out: Option<StagingBuffer>,
) -> Result<(), Stop> {
    let subsystem = match sqe.opcode() {
        opcode::admin::IDENTIFY => turn.controllers.of_same_export(conn.controller),
        _ => Vec::new(),
    };
    let Some(attached) = turn.controllers.get_mut(conn.controller) else {
        return Err(Stop::Close);
    };
    if let Some(status) = restrictions::admin_refusal(conn.restrictions, sqe) {
        conn.answer(turn.core, slot, status, 0, out, 0);
        attached.publish(conn);
        return Ok(());
    }
    let kato_ms = attached.controller.kato_ms();
    let room = out.as_mut().map_or(&mut [][..], |b| b.as_mut_slice());
    let outcome = run_on(attached, turn.core, subsystem, sqe, data, room);
    if attached.controller.kato_ms() != kato_ms {
        turn.events.push(TurnEvent::Patience(conn.controller));
    }
    match outcome {
        AdminOutcome::Complete {
            status,
            result,
            data_bytes,
            effect,
        } if sqe.opcode() == opcode::admin::ABORT && status.is_success() && result != 0 => {
            // The controller does not keep this command: only the frontend sees all queues, and
            // answers.
            debug_assert_eq!((data_bytes, effect), (0, Effect::None));
            turn.events.push(TurnEvent::Abort {
                admin: conn.index,
                slot,
                sqid: sqe.cdw(10) as u16,
                cid: (sqe.cdw(10) >> 16) as u16,
            });
        }
        AdminOutcome::Complete {
            status,
            result,
            data_bytes,
            effect,
        } => {
            conn.answer(turn.core, slot, status, result, out, data_bytes);
            if attached.begin_quiescing(effect) {
                turn.events.push(TurnEvent::Quiesce(conn.controller));
            }
        }
        AdminOutcome::Reserve { action } => {
            if let Some(buffer) = out {
                conn.give_buffer(turn.core, buffer);
            }
            if let Some(s) = conn.slots.get_mut(slot) {
                s.work = Work::Reserve { action };
            }
            reserve::begin(conn, slot);
        }
        AdminOutcome::Parked => {
            if let Some(buffer) = out {
                conn.give_buffer(turn.core, buffer);
            }
            if let Some(s) = conn.slots.get_mut(slot) {
                s.stage = SlotStage::Kept;
            }
            conn.records.kept_by_controller(slot);
        }
    }
    conn.deliver_events(turn.core, attached);
    Ok(())
}

impl Conn {
    /// Answers Asynchronous Event Requests, and publishes the controller.
    pub(super) fn deliver_events(&mut self, core: &mut Core, attached: &mut Attached) {
        while let Some(event) = attached.controller.next_event() {
            let slot = self.slots.by_cid(event.cid);
            let kept = slot.filter(|s| {
                self.slots
                    .get(*s)
                    .is_some_and(|s| s.stage == SlotStage::Kept)
            });
            if let Some(slot) = kept {
                self.answer(core, slot, event.status, event.result, None, 0);
                kill_point!("aer.delivered");
            }
        }
        attached.publish(self);
    }
}
