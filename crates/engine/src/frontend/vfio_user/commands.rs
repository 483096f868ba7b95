//! The commands in hand, by their slots.
//!
//! **Purpose.** Says what each command is, and which wait for what.
//! **Design.** A table of fixed size; lists of slots that are free, to be begun again, held, or over already.
//! **Not here:** what a successor finds of them ([`super::record`]).

use super::queues::BATCH;
use super::record::COMMANDS;
use crate::core::IoOp;
use crate::frontend::vm::protocol::Turn;
use crate::lane::AtOnce;
use forebay_guest::Pieces;
use forebay_nvme::Status;
use std::collections::VecDeque;

/// What is to be done with a command.
#[derive(Clone, Copy)]
pub(super) enum CommandWork {
    /// This.
    Io(IoOp),
    /// Make everything durable, then this.
    Durable(IoOp),
}

/// A command in hand.
#[derive(Clone, Copy)]
pub(super) struct Command {
    pub sqid: u16,
    pub cid: u16,
    pub work: CommandWork,
    pub taken_ns: u64,
}

/// See the module's text.
pub(super) struct Commands {
    pub all: Box<[Command]>,
    pub free: Vec<u16>,
    /// Those that a dead engine had in hand, or that found no room: to be begun again.
    pub again: VecDeque<u16>,
    /// Those that ended while their completion queue's memory was away.
    pub held: Vec<(u16, Status)>,
    /// Those of the batch that is being taken that are over already: refused, or carried out at once.
    pub over: Vec<(u16, Status)>,
    /// Those of them that were carried out.
    at_once: AtOnce,
}

impl Commands {
    /// None in hand.
    pub(super) fn new() -> Self {
        let nothing = Command {
            sqid: 0,
            cid: 0,
            work: CommandWork::Io(IoOp::Flush),
            taken_ns: 0,
        };
        Self {
            all: vec![nothing; COMMANDS].into(),
            free: (0..COMMANDS as u16).rev().collect(),
            again: VecDeque::with_capacity(COMMANDS),
            held: Vec::with_capacity(COMMANDS),
            over: Vec::with_capacity(BATCH),
            at_once: AtOnce::default(),
        }
    }

    /// The command in a slot.
    #[inline]
    pub(super) fn get(&self, slot: u16) -> Command {
        self.all[usize::from(slot) % COMMANDS]
    }

    #[inline]
    pub(super) fn note(
        &mut self,
        turn: &Turn<'_>,
        sqid: u16,
        slot: u16,
        cid: u16,
        work: CommandWork,
    ) {
        self.all[usize::from(slot) % COMMANDS] = Command {
            sqid,
            cid,
            work,
            taken_ns: turn.core.now_ns(),
        };
    }

    /// Commands that have not ended.
    pub(super) fn in_hand(&self) -> usize {
        COMMANDS - self.free.len()
    }

    /// Whether there are any in hand, or a dead engine's may be at a device.
    pub(super) fn are_at_devices(&self, turn: &Turn<'_>) -> bool {
        self.in_hand() > 0 || turn.client.may_be_touched(turn.core)
    }

    /// Whether a command could be carried out at once: then it was.
    #[inline]
    pub(super) fn is_over(&mut self, turn: &mut Turn<'_>, op: &IoOp, pieces: &mut Pieces) -> bool {
        let Some(lane) = turn.client.lane() else {
            return false;
        };
        if !turn.core.at_once(lane, op, pieces) {
            return false;
        }
        let write = matches!(op, IoOp::Write { .. });
        self.at_once.add(write, pieces.len_bytes());
        pieces.clear();
        true
    }

    /// Counts what was over at once.
    #[inline]
    pub(super) fn count_at_once(&mut self, turn: &Turn<'_>) {
        if let Some(lane) = turn.client.lane().and_then(|lane| turn.core.lane(lane)) {
            lane.count_at_once(&mut self.at_once, || {
                turn.core.clock.since(turn.core.now_ns())
            });
        }
    }
}
