//! When a turn sends. **Not here:** the send queue ([`super::tx`]).

use super::conn::Life;
use super::{NvmeTcp, SEND_ITEMS, TurnEvent, slots};
use crate::core::{CommandRef, Core, DoneIo};
use crate::frontend::Beside;
use forebay_nvme::Status;

impl NvmeTcp {
    pub(super) fn collect_ended(&mut self, core: &mut Core) -> bool {
        let mut any = false;
        while let Some(done) = core.next_ended(self.shared.frontend) {
            if !any {
                // Some may have begun in this very turn: read the clock once for all.
                any = true;
                core.clock.stamp();
            }
            self.handle_done(core, done);
        }
        any
    }

    #[inline]
    fn handle_done(&mut self, core: &mut Core, done: DoneIo) {
        let index = done.owner.conn;
        let conn = self
            .conns
            .get_mut(index as usize)
            .and_then(Option::as_deref_mut);
        let Some(conn) = conn.filter(|c| c.generation == done.owner.conn_generation) else {
            if let Some(buffer) = done.buffer {
                core.staging.release(buffer);
            }
            return;
        };
        conn.in_flight -= 1;
        if done.owner.slot == slots::NONE {
            self.events.push(TurnEvent::Flushed(conn.controller));
        } else if conn.is_open() {
            let interrupted = match done.status {
                Status::SUCCESS => Status::COMMAND_INTERRUPTED,
                _ => self.controllers.note_failure(conn, core, &done),
            };
            conn.command_ended(core, done, interrupted);
            if conn.tx.queued_bytes() >= conn.send_at_bytes
                && conn.tx.count() >= SEND_ITEMS
                && !conn.tx.blocked()
                && !conn.lane.is_some_and(|lane| core.qos.waits_for_turns(lane))
            {
                self.send(core, index);
            } else {
                self.mark_to_send(index);
            }
            return;
        } else {
            conn.records.blame_stream();
            if let Some(buffer) = done.buffer {
                conn.give_buffer(core, buffer);
            }
            core.recovered
                .pair_answered(CommandRef::new(conn.queue, done.owner.slot));
            conn.release(core, done.owner.slot);
        }
        if conn.life == Life::Draining && conn.in_flight == 0 {
            self.events.push(TurnEvent::Drained(index));
        }
    }

    pub(super) fn mark_to_send(&mut self, index: u32) {
        if let Some(Some(conn)) = self.conns.get_mut(index as usize)
            && !conn.visits.dirty
        {
            conn.visits.dirty = true;
            self.dirty.push(index);
        }
    }

    /// Sends for connections that need not wait for more answers.
    pub(super) fn send_all(&mut self, core: &mut Core, beside: Beside<'_>) -> bool {
        let mut any = false;
        // The last one has most likely waited least.
        for at in (0..self.dirty.len()).rev() {
            let index = self.dirty[at];
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                self.dirty.swap_remove(at);
                continue;
            };
            if conn.holds_back(core) {
                continue;
            }
            conn.visits.dirty = false;
            self.dirty.swap_remove(at);
            self.send(core, index);
            any = true;
            beside(core);
        }
        any
    }

    pub(super) fn send(&mut self, core: &mut Core, index: u32) {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return;
        };
        if conn.life == Life::Draining {
            return;
        }
        conn.records.blame_stream();
        let sent = conn.flush(core).and_then(|()| {
            let blocked = conn.tx.blocked();
            conn.socket.watch(&conn.shared.epoll, blocked)
        });
        if conn.tx.blocked() {
            conn.visits.active = false;
        }
        if sent.is_err() {
            self.close(core, index);
        }
    }
}
