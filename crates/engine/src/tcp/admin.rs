//! Commands of the admin queue.
//!
//! **Design.** The controller says how much data a command moves; this fetches it (from the capsule, or
//! by R2T like a write's), runs the command, and sends what came of it. What the host did to the
//! controller's properties becomes an [`Event`] that the frontend settles when it has a free hand.
//!
//! **Not here:** the commands themselves (`nvme::controller`).

use super::command::{self, Capsule};
use super::conn::Conn;
use super::controllers::{Attached, Quiesce};
use super::rx::Stop;
use super::slots::{Stage, Work};
use super::{Event, Turn};
use crate::core::Core;
use forebay_nvme::controller::{AdminOutcome, Effect};
use forebay_nvme::io::Transfer;
use forebay_nvme::{Sqe, Status};

/// Takes a command capsule of the admin queue. `Err` says why the stream can't go on; then nothing was
/// taken.
pub(super) fn take(
    conn: &mut Conn,
    turn: &mut Turn<'_>,
    capsule: &Capsule<'_>,
) -> Result<(), Stop> {
    let cid = capsule.sqe.cid();
    let kept = conn.slots.by_cid(cid).filter(|s| {
        let slot = conn.slots.get(*s);
        slot.is_some_and(|slot| slot.stage == Stage::Kept)
    });
    if let Some(kept) = kept {
        // The host has forgotten this event request; see `forget_event_request`.
        if let Some(attached) = turn.controllers.get_mut(conn.controller) {
            attached.controller.forget_event_request(cid);
        }
        conn.release(turn.core, kept);
    }
    let Some(slot) = command::slot_for(conn, turn.core, capsule.sqe)? else {
        return Ok(());
    };
    let Some(attached) = turn.controllers.get(conn.controller) else {
        return Err(Stop::Close);
    };
    let judged = attached
        .controller
        .transfer(capsule.sqe)
        .and_then(|transfer| Ok((transfer, command::admin_source(capsule, transfer)?)));
    match judged {
        Err(status) => conn.answer(turn.core, slot, status, 0, None, 0),
        Ok((transfer, Some(data))) => return run(conn, turn, slot, capsule.sqe, transfer, data),
        Ok((transfer, None)) => {
            if let Some(s) = conn.slots.get_mut(slot) {
                s.work = Work::Admin(Box::new(*capsule.sqe));
                s.len_bytes = transfer.bytes();
                s.by_r2t = true;
            }
            command::begin(conn, turn.core, slot);
        }
    }
    Ok(())
}

/// All data that an R2T asked for is there.
pub(super) fn data_complete(conn: &mut Conn, turn: &mut Turn<'_>, slot: u16) {
    let Some(s) = conn.slots.get_mut(slot) else {
        return;
    };
    let (buffer, damaged) = (s.buffer.take(), s.damaged);
    let work = std::mem::replace(&mut s.work, Work::Hint);
    if damaged {
        conn.answer(
            turn.core,
            slot,
            Status::TRANSIENT_TRANSPORT_ERROR,
            0,
            buffer,
            0,
        );
        return;
    }
    if let (Work::Admin(sqe), Some(buffer)) = (work, buffer) {
        // It brings data, so nothing goes to the host, for which memory could be lacking.
        let _ = run(conn, turn, slot, &sqe, Transfer::None, buffer.as_slice());
        conn.give_buffer(turn.core, buffer);
    }
}

fn run(
    conn: &mut Conn,
    turn: &mut Turn<'_>,
    slot: u16,
    sqe: &Sqe,
    transfer: Transfer,
    data: &[u8],
) -> Result<(), Stop> {
    let mut out = None;
    if let Transfer::ToHost(bytes) = transfer {
        match conn.take_buffer(turn.core, bytes) {
            Some(buffer) => out = Some(buffer),
            None => {
                conn.untake(turn.core, slot);
                return Err(Stop::Stalled);
            }
        }
    }
    let Some(attached) = turn.controllers.get_mut(conn.controller) else {
        return Err(Stop::Close);
    };
    let env = attached.env(turn.core);
    let room = out.as_mut().map_or(&mut [][..], |b| b.as_mut_slice());
    let outcome = attached
        .controller
        .admin(sqe, data, room, &env, turn.core.now_ns());
    match outcome {
        AdminOutcome::Complete {
            status,
            result,
            data_bytes,
            effect,
        } => {
            conn.answer(turn.core, slot, status, result, out, data_bytes);
            let flush = match effect {
                Effect::None | Effect::Enabled => None,
                Effect::Reset => Some(false),
                Effect::Shutdown => Some(true),
            };
            if let Some(flush) = flush {
                let before = matches!(attached.quiesce, Quiesce::Draining { flush: true });
                attached.quiesce = Quiesce::Draining {
                    flush: flush || before,
                };
                turn.events.push(Event::Quiesce(conn.controller));
            }
        }
        AdminOutcome::Parked => {
            if let Some(buffer) = out {
                conn.give_buffer(turn.core, buffer);
            }
            if let Some(s) = conn.slots.get_mut(slot) {
                s.stage = Stage::Kept;
            }
        }
    }
    deliver(conn, turn.core, attached);
    Ok(())
}

/// Ends the Asynchronous Event Requests that have something to say, and publishes the controller.
pub(super) fn deliver(conn: &mut Conn, core: &mut Core, attached: &mut Attached) {
    while let Some(event) = attached.controller.next_event() {
        let slot = conn.slots.by_cid(event.cid);
        let kept = slot.filter(|s| conn.slots.get(*s).is_some_and(|s| s.stage == Stage::Kept));
        if let Some(slot) = kept {
            conn.answer(core, slot, event.status, event.result, None, 0);
        }
    }
    attached.publish(&conn.shared.region);
}
