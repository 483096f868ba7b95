//! Resets and shutdowns: everything in flight ends before the answer.
//!
//! **Design.** What a guest gets as the answer to a reset is a promise that nobody reads or writes its memory on
//! account of old commands: so the message waits until the core has given every command back, and until what a
//! dead engine may still have at a device has ended there too. Commands that a reset ends get no
//! completion; before a shutdown is complete they do, and what was written is made durable. **Not here:** a client
//! that goes away ([`crate::vm`] waits for its commands).

use super::record::COMMANDS;
use super::{Pcie, lane_of};
use crate::core::{IoOp, NewIo};
use crate::vm::frontend::{Answer, Turn};
use forebay_nvme::Status;
use forebay_xlate::kill_point;

/// The number of a flush of our own: no command's.
const FLUSH: u16 = COMMANDS as u16;

/// What asked for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    /// CC.EN was cleared.
    Controller,
    /// CC.SHN was set.
    Shutdown,
    /// A function level reset.
    Function,
    /// VFIO_USER_DEVICE_RESET.
    Bus,
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
}

impl Quiesce {
    /// Whether commands end without an answer.
    #[inline]
    pub(super) fn drops(&self) -> bool {
        self.why != Why::Shutdown
    }
}

impl Pcie {
    /// Starts nothing more, and waits for what is in flight.
    pub(super) fn begin_quiescing(&mut self, turn: &mut Turn<'_>, why: Why) -> Answer {
        let flush = match why {
            Why::Shutdown => Flush::Needed,
            _ => Flush::Ended,
        };
        let quiesce = Quiesce { why, flush };
        let drops = quiesce.drops();
        // Before anything is forgotten: whatever overlaps it waits.
        if drops
            && self.in_hand() > 0
            && let Some(lane) = lane_of(turn)
        {
            turn.core.orphan_machine(lane);
        }
        self.quiesce = Some(quiesce);
        self.look_alive();
        if drops {
            // Those that nobody has begun yet, or that wait for memory, never will.
            while let Some(slot) = self.again.pop_front() {
                self.forget(slot);
            }
            self.give_up_held(turn);
        }
        kill_point!("pcie.quiescing");
        self.go_on_quiescing(turn)
    }

    /// Commands that have not ended.
    pub(super) fn in_hand(&self) -> usize {
        COMMANDS - self.free.len()
    }

    pub(super) fn go_on_quiescing(&mut self, turn: &mut Turn<'_>) -> Answer {
        let Some(quiesce) = &self.quiesce else {
            self.answer_waiting(turn);
            return Answer::Now;
        };
        if !quiesce.drops() && !self.again.is_empty() {
            self.begin_again(turn);
        }
        let lane = lane_of(turn);
        let touched = lane.is_some_and(|lane| turn.core.may_touch_memory_of(lane));
        if self.in_hand() > 0 || touched {
            return Answer::Later;
        }
        if !self.is_flushed(turn) {
            return Answer::Later;
        }
        let why = self.quiesce.take().map(|q| q.why);
        for slot in 0..COMMANDS as u16 {
            self.records.free(slot);
        }
        match why {
            Some(Why::Shutdown) => self.function.quiesced(),
            Some(Why::Controller) => {
                self.function.quiesced();
                self.drop_queues();
            }
            Some(Why::Function | Why::Bus) => {
                self.function.reset();
                self.drop_queues();
            }
            None => {}
        }
        self.save();
        kill_point!("pcie.quiesced");
        self.look_alive();
        self.answer_waiting(turn);
        Answer::Now
    }

    fn drop_queues(&mut self) {
        self.sqs.iter_mut().for_each(|sq| *sq = None);
        self.cqs.iter_mut().for_each(|cq| *cq = None);
        self.active.clear();
        self.shadow = None;
        self.deleting = None;
        self.events = false;
        self.lost_ns = None;
        self.more = false;
        self.armed = false;
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
            };
            self.pieces.clear();
            if turn.core.start_machine(new, &mut self.pieces).is_ok() {
                quiesce.flush = Flush::Begun;
            }
        }
        quiesce.flush == Flush::Ended
    }

    /// A flush of our own ended. One that failed is not tried again: nobody could be told.
    pub(super) fn flushed(&mut self, _status: Status) {
        if let Some(quiesce) = &mut self.quiesce {
            quiesce.flush = Flush::Ended;
        }
    }
}
