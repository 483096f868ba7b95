//! What a turn sends, and when.
//!
//! **Design.** What the core has ended becomes answers, and connections that have some are in a list; the turn's end sends them.
//! Who is within its base is sent to first. Bursts send much at once, and who is within its base may have asked meanwhile: so after
//! each of them there is a look at those, [`LOOK_NS`] apart, and further if it takes long, so that many do not make it work.
//! **Not here:** what is sent ([`super::tx`]), who is listened to ([`super`]).

use super::conn::{Conn, Life};
use super::{Beside, Event, Frontend, SEND_ITEMS, command, slots};
use crate::core::{CommandRef, Core, DoneIo};
use forebay_nvme::Status;

/// So much of a turn passes without a look at who is within its base.
const LOOK_NS: u64 = 3_000;
/// Looks take so small a part of the time.
const LOOKS_APART: u64 = 8;

/// When there was a look, and when the next one is due.
struct Looked {
    begun_ns: u64,
    due_ns: u64,
}

impl Looked {
    fn at(now_ns: u64) -> Self {
        Self {
            begun_ns: now_ns,
            due_ns: now_ns + LOOK_NS,
        }
    }

    /// Whether one is due, which begins now.
    fn is_due(&mut self, now_ns: u64) -> bool {
        self.begun_ns = now_ns;
        now_ns >= self.due_ns
    }

    fn ended(&mut self, now_ns: u64) {
        let took_ns = now_ns.saturating_sub(self.begun_ns);
        self.due_ns = now_ns + LOOK_NS.max(LOOKS_APART * took_ns);
    }
}

/// Reads the clock.
fn now_ns(core: &mut Core) -> u64 {
    core.stamp();
    core.now_ns()
}

impl Frontend {
    /// Takes what the core has ended.
    pub(super) fn complete(&mut self, core: &mut Core) -> bool {
        let mut any = false;
        while let Some(done) = core.next_done() {
            if !any {
                // Some of them may have begun in this very turn: one look at the clock for all.
                any = true;
                core.stamp();
            }
            self.take_done(core, done);
        }
        any
    }

    #[inline]
    fn take_done(&mut self, core: &mut Core, done: DoneIo) {
        let index = done.owner.conn;
        let conn = self
            .conns
            .get_mut(index as usize)
            .and_then(Option::as_deref_mut);
        let Some(conn) = conn.filter(|c| c.generation == done.owner.conn_generation) else {
            if let Some(buffer) = done.buffer {
                core.staging.give(buffer);
            }
            return;
        };
        conn.in_flight -= 1;
        if done.owner.slot == slots::NONE {
            self.events.push(Event::Flushed(conn.controller));
        } else if conn.is_open() {
            let interrupted = match done.status {
                Status::SUCCESS => Status::COMMAND_INTERRUPTED,
                _ => self.controllers.note_failure(conn, core, &done),
            };
            command::ended(conn, core, done, interrupted);
            if conn.tx.queued_bytes() >= conn.send_at_bytes
                && conn.tx.count() >= SEND_ITEMS
                && !conn.tx.blocked()
                && !conn.lane.is_some_and(|lane| core.waits_for_turns(lane))
            {
                self.send(core, index);
            } else {
                self.mark_dirty(index);
            }
            return;
        } else {
            conn.records.blame_stream();
            if let Some(buffer) = done.buffer {
                conn.give_buffer(core, buffer);
            }
            core.pair_answered(CommandRef::new(conn.queue, done.owner.slot));
            conn.release(core, done.owner.slot);
        }
        if conn.life == Life::Draining && conn.in_flight == 0 {
            self.events.push(Event::Drained(index));
        }
    }

    pub(super) fn mark_dirty(&mut self, index: u32) {
        if let Some(Some(conn)) = self.conns.get_mut(index as usize)
            && !conn.dirty
        {
            conn.dirty = true;
            self.dirty.push(index);
        }
    }

    /// Sends what waits for no more. While some are above their base, first of who is not: it takes a while to send what bursts have
    /// come to, so between them there is a look at who is quiet.
    pub(super) fn send_all(&mut self, core: &mut Core, beside: Beside<'_>) -> bool {
        if !core.somebody_bursts() {
            return self.send_of(core, |_, _| true);
        }
        let mut looked = Looked::at(now_ns(core));
        let mut any = self.send_of(core, |core, conn| !conn.bursts(core));
        // Bursts that end meanwhile are sent in the next turn.
        for at in (0..self.dirty.len()).rev() {
            let Some(index) = self.dirty.get(at).copied() else {
                continue;
            };
            any |= self.send_dirty(core, at, |core, conn| conn.bursts(core));
            if self.dirty.get(at) == Some(&index) {
                continue;
            }
            beside(core);
            if looked.is_due(now_ns(core)) {
                any |= self.look_at_calm(core);
                looked.ended(now_ns(core));
            }
        }
        any
    }

    fn send_of(&mut self, core: &mut Core, which: impl Fn(&Core, &Conn) -> bool) -> bool {
        // Who was last has most likely waited least.
        let mut any = false;
        for at in (0..self.dirty.len()).rev() {
            any |= self.send_dirty(core, at, &which);
        }
        any
    }

    /// Sends what the one at this place of the list has, if it is such a one and holds nothing back; then it is in the list no more.
    #[inline]
    fn send_dirty(
        &mut self,
        core: &mut Core,
        at: usize,
        which: impl Fn(&Core, &Conn) -> bool,
    ) -> bool {
        let index = self.dirty[at];
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            self.dirty.swap_remove(at);
            return false;
        };
        if !which(core, conn) || conn.holds_back(core) {
            return false;
        }
        conn.dirty = false;
        self.dirty.swap_remove(at);
        self.send(core, index);
        true
    }

    /// Receives from who is within its base, and answers what ends at once. True if anything came.
    pub(super) fn look_at_calm(&mut self, core: &mut Core) -> bool {
        let mut any = false;
        for at in 0..self.active.len() {
            let index = self.active[at];
            let Some(Some(conn)) = self.conns.get(index as usize) else {
                continue;
            };
            if conn.qid == 0 || conn.bursts(core) {
                continue;
            }
            let quiet_turns = conn.quiet_turns;
            let came = self.visit(core, index);
            any |= came;
            // A look is no turn: who is looked at often is not to leave the list of those that are looked at sooner.
            if let Some(Some(conn)) = self.conns.get_mut(index as usize)
                && !came
                && conn.active
            {
                conn.quiet_turns = quiet_turns;
            }
        }
        if any {
            self.complete(core);
            self.send_of(core, |core, conn| !conn.bursts(core));
        }
        any
    }

    /// Sends what a connection's socket takes.
    pub(super) fn send(&mut self, core: &mut Core, index: u32) {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return;
        };
        if conn.life == Life::Draining {
            return;
        }
        conn.records.blame_stream();
        let sent = conn.flush(core).and_then(|()| conn.watch());
        if conn.tx.blocked() {
            conn.active = false;
        }
        if sent.is_err() {
            self.close(core, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_a_small_part_of_the_time_however_long_they_take() {
        let mut looked = Looked::at(1000);
        assert!(!looked.is_due(1000 + LOOK_NS - 1));
        for took_ns in [10, LOOK_NS, 1_000_000] {
            let begun_ns = looked.due_ns;
            assert!(looked.is_due(begun_ns));
            looked.ended(begun_ns + took_ns);
            let apart_ns = looked.due_ns - (begun_ns + took_ns);
            assert_eq!(apart_ns, LOOK_NS.max(8 * took_ns), "{took_ns}");
        }
    }
}
