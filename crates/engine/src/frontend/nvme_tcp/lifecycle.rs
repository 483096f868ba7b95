//! How connections and associations continue and end, between visits to connections
//! ([`NvmeTcp::settle`]).
//!
//! When an admin queue's connection ends, so do the controller's I/O queues. A closed connection is
//! *drained* when the core has returned its last command. The controller ends with its last drained
//! connection. If its host reconnects earlier, overlapping commands wait for the old ones
//! (`RecoveredIo::orphan`). A reset or shutdown closes the I/O queues, drains them, flushes on shutdown,
//! and then reports completion.

use super::conn::Life;
use super::controllers::Quiesce;
use super::slots::{Slot, SlotStage, Work};
use super::{BLOCKED_LIMIT_NS, DATA_LIMIT_NS, NvmeTcp, SKIPPED_TURNS, TurnEvent, fused};
use crate::core::Core;
use forebay_nvme::Status;
use forebay_xlate::boundary::region::bump;
use forebay_xlate::kill_point;
use std::collections::BTreeSet;

/// Receives before a connection counts as late: more than a socket holds.
const POLLS: u32 = 32;

/// Discovery controllers per turn whose lists are checked: each list scans all exports.
pub(super) const LISTS_A_TURN: u32 = 1;

impl NvmeTcp {
    /// Closes a connection's socket; [`NvmeTcp::settle`] does the rest.
    pub(super) fn close(&mut self, core: &mut Core, index: u32) {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return;
        };
        if conn.life == Life::Draining {
            return;
        }
        conn.shut(core);
        if let Some(lane) = conn.lane.and_then(|l| core.lane(l)) {
            bump(&lane.record().connections, u64::MAX);
        }
        self.events.push(TurnEvent::Closed(index));
    }

    pub(super) fn settle(&mut self, core: &mut Core) {
        while let Some(event) = self.events.pop() {
            core.blame(None);
            match event {
                TurnEvent::Closed(index) => self.closed(core, index),
                TurnEvent::Drained(index) => self.drained(index),
                TurnEvent::Patience(controller) => self.set_patience(controller),
                TurnEvent::Quiesce(controller) => self.quiesce(core, controller),
                TurnEvent::Abort {
                    admin,
                    slot,
                    sqid,
                    cid,
                } => self.abort(core, admin, slot, sqid, cid),
                TurnEvent::Flushed(controller) => {
                    if let Some(attached) = self.controllers.get_mut(controller)
                        && attached.quiesce == Quiesce::Flushing
                    {
                        self.quiesced(core, controller);
                    }
                }
            }
        }
    }

    fn closed(&mut self, core: &mut Core, index: u32) {
        let Some(Some(conn)) = self.conns.get(index as usize) else {
            return;
        };
        let (controller, admin, quiet) = (conn.controller, conn.qid == 0, conn.in_flight == 0);
        if admin && let Some(attached) = self.controllers.get_mut(controller) {
            attached.admin = None;
            for other in attached.conns.clone() {
                self.close(core, other);
            }
        }
        if quiet {
            self.events.push(TurnEvent::Drained(index));
        }
    }

    fn drained(&mut self, index: u32) {
        let Some(place) = self.conns.get_mut(index as usize) else {
            return;
        };
        if !place
            .as_ref()
            .is_some_and(|c| c.life == Life::Draining && c.in_flight == 0)
        {
            return;
        }
        let Some(conn) = place.take() else { return };
        debug_assert_eq!(
            (conn.slots.used(), conn.charge.bytes, conn.charge.receiving),
            (0, 0, 0)
        );
        conn.records.free(conn.slots.all().count());
        self.shared.pool.borrow_mut().shrink();
        self.active.retain(|i| *i != index);
        self.dirty.retain(|i| *i != index);
        let Some(attached) = self.controllers.get_mut(conn.controller) else {
            return;
        };
        attached.conns.retain(|i| *i != index);
        if conn.qid != 0 {
            attached.controller.io_queue_gone(conn.qid);
            if let Some(Some(admin)) = attached.admin.and_then(|a| self.conns.get_mut(a as usize)) {
                attached.publish(admin);
            }
        }
        if attached.conns.is_empty() {
            self.controllers.remove(conn.controller, self.shared.region);
        } else if attached.quiesce != Quiesce::No {
            self.events.push(TurnEvent::Quiesce(conn.controller));
        }
    }

    fn quiesce(&mut self, core: &mut Core, controller: u32) {
        let Some(attached) = self.controllers.get_mut(controller) else {
            return;
        };
        let (Quiesce::Draining { flush }, Some(admin)) = (attached.quiesce, attached.admin) else {
            return;
        };
        let others: Vec<u32> = attached
            .conns
            .iter()
            .copied()
            .filter(|c| *c != admin)
            .collect();
        if !others.is_empty() {
            for other in others {
                self.close(core, other);
            }
            return;
        }
        let lane = attached.lane.filter(|_| flush);
        match (
            lane,
            self.conns.get_mut(admin as usize).and_then(Option::as_mut),
        ) {
            // Without room in the core, the next tick retries.
            (Some(lane), Some(conn)) => {
                if conn.start_internal_flush(core, lane) {
                    attached.quiesce = Quiesce::Flushing;
                    kill_point!("quiesce.flushing");
                }
            }
            _ => self.quiesced(core, controller),
        }
    }

    /// Abort (Base 2.0, 5.1), as far as possible: a waiting command ends. One at a device, or with
    /// its data in transit, continues.
    fn abort(&mut self, core: &mut Core, admin: u32, abort: u16, sqid: u16, cid: u16) {
        let Some(Some(conn)) = self.conns.get(admin as usize) else {
            return;
        };
        let attached = self.controllers.get(conn.controller);
        let of = |index: &u32| {
            let conn = self.conns.get(*index as usize)?.as_deref()?;
            (conn.qid == sqid && sqid != 0 && conn.is_open()).then_some(*index)
        };
        let target = attached.and_then(|a| a.conns.iter().find_map(of));
        // Commands that have just ended are not aborted.
        self.collect_ended(core);
        let ended = target.is_some_and(|target| self.abort_io(core, target, cid));
        // The aborted command's answer must precede the Abort's.
        if let Some(target) = target {
            self.collect_ended(core);
            self.send(core, target);
        }
        // The admin connection may be ending: then its commands get no answers.
        let conn = self.conns.get_mut(admin as usize).and_then(Option::as_mut);
        let Some(conn) = conn.filter(|conn| conn.is_open()) else {
            return;
        };
        let not_aborted = u64::from(!ended);
        conn.answer(core, abort, Status::SUCCESS, not_aborted, None, 0);
        if let Some(attached) = self.controllers.get(conn.controller) {
            attached.publish(conn);
        }
        self.send(core, admin);
    }

    fn abort_io(&mut self, core: &mut Core, target: u32, cid: u16) -> bool {
        let Some(Some(conn)) = self.conns.get_mut(target as usize) else {
            return false;
        };
        let Some(slot) = conn.slots.by_cid(cid) else {
            return false;
        };
        if let Some(owner) = fused::in_core(conn, slot) {
            return core.end_waiting(Status::COMMAND_ABORT_REQUESTED, |of, _, _| *of == owner) == 0;
        }
        // Both halves of a pair end together or not at all.
        let whole = |s: &Slot| {
            matches!(
                s.work,
                Work::Io(_) | Work::DurableRead(_) | Work::Compare(_)
            )
        };
        match conn.slots.get(slot).filter(|s| whole(s)).map(|s| s.stage) {
            Some(SlotStage::Waiting) if conn.slots.stop_waiting(slot) => {
                conn.refuse(core, slot, Status::COMMAND_ABORT_REQUESTED);
                true
            }
            Some(SlotStage::InFlight) => {
                let owner = conn.owner(slot);
                core.end_waiting(Status::COMMAND_ABORT_REQUESTED, |of, _, _| *of == owner) == 0
            }
            _ => false,
        }
    }

    fn quiesced(&mut self, core: &mut Core, controller: u32) {
        let Some(attached) = self.controllers.get_mut(controller) else {
            return;
        };
        attached.quiesce = Quiesce::No;
        attached.controller.quiesced();
        let Some(Some(conn)) = attached.admin.and_then(|a| self.conns.get_mut(a as usize)) else {
            return;
        };
        if !attached.controller.cc().en() {
            // After a reset, event requests end without an answer (Base 2.0, 3.7.2).
            conn.drop_kept(core);
        }
        conn.deliver_events(core, attached);
        let index = conn.index;
        self.mark_to_send(index);
    }

    pub(super) fn is_late(&mut self, index: usize, now: u64) -> bool {
        let Some(Some(conn)) = self.conns.get_mut(index) else {
            return false;
        };
        let past = |since_ns: u64, limit_ns: u64| now >= since_ns.saturating_add(limit_ns);
        match conn.life {
            Life::Draining => false,
            Life::Leaving { until_ns } => now >= until_ns,
            Life::Open => {
                if conn.rx.stalled() || conn.tx.blocked() {
                    // Its data may be in the socket, which is not read now.
                    conn.slots.asked_now(now);
                }
                (conn.socket.blocked_since_ns > 0
                    && past(conn.socket.blocked_since_ns, BLOCKED_LIMIT_NS))
                    || (conn.charge.receiving > 0
                        && conn
                            .slots
                            .oldest_asked_ns()
                            .is_some_and(|asked| past(asked, DATA_LIMIT_NS)))
            }
        }
    }

    /// Reads a socket until it is empty, with at most [`POLLS`] receives.
    pub(super) fn poll_socket(&mut self, core: &mut Core, index: u32) {
        for _ in 0..POLLS {
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                return;
            };
            // Receive even if its lane is throttled.
            conn.visits.skipped_turns = SKIPPED_TURNS;
            conn.visits.quiet_turns = 0;
            if conn.life != Life::Draining && !conn.visits.listed {
                conn.visits.active = true;
                conn.visits.listed = true;
                self.active.push(index);
            }
            self.visit(core, index);
            let conn = self.conns.get(index as usize).and_then(Option::as_ref);
            if conn.is_none_or(|c| c.visits.quiet_turns > 0 || c.rx.stalled() || c.tx.blocked()) {
                return;
            }
        }
    }

    /// Ends closed connections' waiting commands; returns how many are at devices.
    pub(super) fn end_commands_of(&mut self, core: &mut Core, conns: &[u32]) -> u32 {
        let closed = |index: &u32| {
            let conn = self.conns.get(*index as usize)?.as_deref()?;
            (conn.life == Life::Draining).then_some((conn.index, conn.generation))
        };
        let closed: BTreeSet<(u32, u32)> = conns.iter().filter_map(closed).collect();
        if closed.is_empty() {
            return 0;
        }
        let status = Status::ABORTED_SQ_DELETION;
        let left = core.end_waiting(status, |of, _, _| {
            closed.contains(&(of.conn, of.conn_generation))
        });
        self.collect_ended(core);
        self.settle(core);
        left
    }

    /// Informs hosts whose discovery list changed, a few per turn ([`NvmeTcp::poll_lists`]).
    pub(crate) fn discovery_changed(&mut self) {
        self.lists_left = self.controllers.places();
    }

    pub(super) fn poll_lists(&mut self, core: &mut Core) {
        let mut reported = Vec::new();
        let mut checked = 0;
        while self.lists_left > 0 && checked < LISTS_A_TURN {
            self.lists_left -= 1;
            self.list_at = (self.list_at + 1) % self.controllers.places().max(1);
            let attached = self.controllers.get_mut(self.list_at);
            let Some(attached) = attached.filter(|a| a.exports.is_some()) else {
                continue;
            };
            checked += 1;
            attached.poll_list();
            if let Some(admin) = attached.admin
                && let Some(Some(conn)) = self.conns.get_mut(admin as usize)
            {
                conn.deliver_events(core, attached);
                reported.push(admin);
            }
        }
        self.finish(core, &[], &reported);
    }

    pub(super) fn finish(&mut self, core: &mut Core, unwelcome: &[u32], reported: &[u32]) {
        for index in reported {
            self.send(core, *index);
        }
        for index in unwelcome {
            self.close(core, *index);
        }
        self.settle(core);
    }
}
