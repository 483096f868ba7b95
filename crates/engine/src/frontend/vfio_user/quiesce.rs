//! Resets and shutdowns: all commands end before the host sees completion.
//!
//! The end of a reset promises that old commands no longer access guest memory. So it waits until
//! the core has returned every command, and until a dead engine's commands at devices have ended. A
//! reset's commands get no completion. A shutdown's do, and their data is made durable.
//!
//! A write of CC is answered at once, since clients give up after some seconds (QEMU after 5);
//! CSTS.RDY and CSTS.SHST show completion (Base 2.0, 3.5.3, 3.6). Function level reset and
//! VFIO_USER_DEVICE_RESET are answered when done, or with an error after [`ANSWER_LIMIT_NS`]. A
//! successor finds unfinished work in the function's state.

use super::record::COMMANDS;
use super::{Pcie, lane_of};
use crate::core::{IoOp, NewIo};
use crate::frontend::vm::protocol::Turn;
use forebay_xlate::kill_point;

const FLUSH: u16 = COMMANDS as u16;
/// How long the answer to a bus reset waits.
const ANSWER_LIMIT_NS: u64 = 3_000_000_000;
/// The same when it waits only for the client ([`super::remote`]): a waiting QEMU answers nothing.
/// It is the time that a function may take (PCI Express Base, 6.6.2), and that hosts always wait.
const CLIENT_LIMIT_NS: u64 = 100_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    Reset,
    Shutdown,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flush {
    Needed,
    Begun,
    Ended,
}

pub(super) struct Quiesce {
    why: Why,
    flush: Flush,
    since_ns: u64,
}

impl Quiesce {
    /// Whether commands end without a completion.
    #[inline]
    pub(super) fn drops(&self) -> bool {
        self.why == Why::Reset
    }

    /// An internal flush ended. A failed one is not retried, as its failure cannot be reported.
    pub(super) fn flushed(&mut self) {
        self.flush = Flush::Ended;
    }

    /// Whether its answer is overdue; `client_alone`: it waits only for the client.
    pub(super) fn is_late(&self, now_ns: u64, client_alone: bool) -> bool {
        let limit_ns = match client_alone {
            true => CLIENT_LIMIT_NS,
            false => ANSWER_LIMIT_NS,
        };
        now_ns.saturating_sub(self.since_ns) >= limit_ns
    }
}

impl Pcie {
    /// Starts no more commands, and drains. The function's state has the reason, and is saved
    /// first.
    pub(super) fn begin_quiescing(&mut self, turn: &mut Turn<'_>, why: Why) {
        self.save();
        let before = self.quiesce.as_ref().map(|q| (q.why, q.flush));
        let flush = match (why, before) {
            // A reset supersedes a shutdown, except a flush in flight.
            (Why::Shutdown, Some((Why::Reset, _))) => return,
            (_, Some((_, Flush::Begun))) => Flush::Begun,
            (Why::Shutdown, _) => Flush::Needed,
            (Why::Reset, _) => Flush::Ended,
        };
        // Before records are dropped: overlapping commands must wait.
        if why == Why::Reset
            && self.commands.in_hand() > 0
            && let Some(lane) = lane_of(turn)
        {
            turn.core.recovered.orphan_vm(lane);
        }
        let since_ns = turn.core.now_ns();
        self.quiesce = Some(Quiesce {
            why,
            flush,
            since_ns,
        });
        self.renew_liveness();
        if why == Why::Reset {
            // Commands that are not in the core never begin.
            while let Some(slot) = self.commands.again.pop_front() {
                self.forget(slot);
            }
            for slot in self.remote.drop_all() {
                self.forget(slot);
            }
            self.give_up_held(turn);
        }
        kill_point!("pcie.quiescing");
        self.go_on_quiescing(turn);
    }

    #[cold]
    pub(super) fn go_on_quiescing(&mut self, turn: &mut Turn<'_>) -> bool {
        let Some(quiesce) = &self.quiesce else {
            return true;
        };
        let may = !quiesce.drops() && self.function.is_bus_master();
        // The host waits for commands in a shutdown: they need no budget.
        let waits = !quiesce.drops() && self.commands.in_hand() > 0;
        if may && !self.commands.again.is_empty() {
            self.begin_again(turn);
        }
        if !self.commands.held.is_empty() && self.function.is_bus_master() {
            self.find_memory(turn);
        }
        if self.remote.busy && self.function.is_bus_master() {
            self.move_remote(turn);
        }
        if waits && let Some(lane) = lane_of(turn) {
            turn.core.begin_owing(lane);
        }
        if self.commands.are_at_devices(turn) || self.remote.may_write() || !self.is_flushed(turn) {
            return false;
        }
        let resets = self.quiesce.take().is_some_and(|q| q.drops());
        for slot in 0..COMMANDS as u16 {
            self.records.free(slot);
        }
        self.function.quiesced();
        if resets {
            self.rings.clear();
            self.deleting = None;
            self.events = false;
            self.more = false;
        }
        self.save();
        kill_point!("pcie.quiesced");
        self.renew_liveness();
        true
    }

    fn is_flushed(&mut self, turn: &mut Turn<'_>) -> bool {
        let Some(quiesce) = &mut self.quiesce else {
            return true;
        };
        let Some(lane) = lane_of(turn) else {
            return true;
        };
        if quiesce.flush == Flush::Needed {
            let new = NewIo {
                owner: turn.client.owner(FLUSH),
                lane,
                op: IoOp::Flush,
                buffer: None,
                record: turn.client.command_ref(lane, FLUSH),
                over_ns: None,
            };
            self.pieces.clear();
            if turn.core.start_vm_io(new, &mut self.pieces).is_ok() {
                quiesce.flush = Flush::Begun;
            }
            turn.core.begin_owing(lane);
        }
        quiesce.flush == Flush::Ended
    }
}
