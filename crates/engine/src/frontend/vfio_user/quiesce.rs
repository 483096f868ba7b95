//! Resets and shutdowns: everything in flight ends before the host is told that they are over.
//!
//! **Design.** What a guest is told of the end of a reset is a promise that nobody reads or writes its memory on
//! account of old commands: so the end waits until the core has given every command back, and until what a
//! dead engine may still have at a device has ended there too. Commands that a reset ends get no
//! completion; before a shutdown is complete they do, and what was written is made durable.
//!
//! The *message* that asks for it does not wait: a client gives an answer up after some seconds (QEMU after 5), and a
//! device that hangs must not cost a guest its connection. A write of CC is answered at once, and CSTS.RDY and CSTS.SHST
//! say when it is over, as the specification has it (Base 2.0, 3.5.3, 3.6). A function level reset and
//! VFIO_USER_DEVICE_RESET, after which nobody is obliged to look, are answered when they are over, or with an error after
//! [`ANSWER_LIMIT_NS`]; CSTS.RDY tells of the rest.
//!
//! A successor finds what is unfinished in the function's state. **Not here:** a client that goes away
//! ([`crate::frontend::vm`] waits for its commands).

use super::record::COMMANDS;
use super::{Pcie, lane_of};
use crate::core::{IoOp, NewIo};
use crate::frontend::vm::protocol::Turn;
use forebay_xlate::kill_point;

/// The number of a flush of our own: no command's.
const FLUSH: u16 = COMMANDS as u16;
/// How long the answer to a reset by the bus waits.
const ANSWER_LIMIT_NS: u64 = 3_000_000_000;
/// The same when it waits for the client alone ([`super::remote`]): QEMU answers nothing while it waits itself. So long a
/// function may take (PCI Express Base, 6.6.2), and so long hosts wait in any case.
const CLIENT_LIMIT_NS: u64 = 100_000_000;

/// What is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    /// CC.EN was cleared, or the whole function is reset.
    Reset,
    /// CC.SHN was set.
    Shutdown,
}

/// How far the flush of a shutdown is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flush {
    Needed,
    Begun,
    Ended,
}

/// See the module's text.
pub(super) struct Quiesce {
    why: Why,
    flush: Flush,
    since_ns: u64,
}

impl Quiesce {
    /// Whether commands end without an answer.
    #[inline]
    pub(super) fn drops(&self) -> bool {
        self.why == Why::Reset
    }

    /// A flush of our own ended. One that failed is not tried again: nobody could be told.
    pub(super) fn flushed(&mut self) {
        self.flush = Flush::Ended;
    }

    /// Whether its answer has waited too long: so long, or not as long if it waits for the client alone.
    pub(super) fn is_late(&self, now_ns: u64, client_alone: bool) -> bool {
        let limit_ns = match client_alone {
            true => CLIENT_LIMIT_NS,
            false => ANSWER_LIMIT_NS,
        };
        now_ns.saturating_sub(self.since_ns) >= limit_ns
    }
}

impl Pcie {
    /// Starts nothing more, and waits for what is in flight. The function's state says why, and is saved first.
    pub(super) fn begin_quiescing(&mut self, turn: &mut Turn<'_>, why: Why) {
        self.save();
        let before = self.quiesce.as_ref().map(|q| (q.why, q.flush));
        let flush = match (why, before) {
            // A reset ends all else, but for a flush that is under way.
            (Why::Shutdown, Some((Why::Reset, _))) => return,
            (_, Some((_, Flush::Begun))) => Flush::Begun,
            (Why::Shutdown, _) => Flush::Needed,
            (Why::Reset, _) => Flush::Ended,
        };
        // Before anything is forgotten: whatever overlaps it waits.
        if why == Why::Reset
            && self.commands.in_hand() > 0
            && let Some(lane) = lane_of(turn)
        {
            turn.core.carried.orphan_machine(lane);
        }
        let since_ns = turn.core.now_ns();
        self.quiesce = Some(Quiesce {
            why,
            flush,
            since_ns,
        });
        self.look_alive();
        if why == Why::Reset {
            // Those that nobody has begun yet, or that wait for memory, never will.
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

    /// Looks whether it is over; true if it is.
    #[cold]
    pub(super) fn go_on_quiescing(&mut self, turn: &mut Turn<'_>) -> bool {
        let Some(quiesce) = &self.quiesce else {
            return true;
        };
        let may = !quiesce.drops() && self.function.is_bus_master();
        // What a reset doesn't end, its host waits for: not for the budget, too.
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
        self.look_alive();
        true
    }

    /// Whether what was written is durable, as far as a shutdown asks for it.
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
            if turn.core.start_machine(new, &mut self.pieces).is_ok() {
                quiesce.flush = Flush::Begun;
            }
            turn.core.begin_owing(lane);
        }
        quiesce.flush == Flush::Ended
    }
}
