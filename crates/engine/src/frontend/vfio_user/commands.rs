//! The commands in flight, by slot: a fixed table, with lists of free, retried, held and finished
//! slots. **Not here:** their records ([`super::record`]).

use super::queues::BATCH;
use super::record::COMMANDS;
use crate::core::IoOp;
use crate::frontend::vm::protocol::Turn;
use crate::lane::AtOnce;
use forebay_guest::Pieces;
use forebay_nvme::Status;
use std::collections::VecDeque;

#[derive(Clone, Copy)]
pub(super) enum CommandWork {
    Io(IoOp),
    /// A flush, then this.
    Durable(IoOp),
}

#[derive(Clone, Copy)]
pub(super) struct Command {
    pub sqid: u16,
    pub cid: u16,
    pub work: CommandWork,
    pub taken_ns: u64,
}

pub(super) struct Commands {
    pub all: Box<[Command]>,
    pub free: Vec<u16>,
    /// To begin again: recovered commands, and those that found no room.
    pub again: VecDeque<u16>,
    /// Ended while their completion queue's memory was missing.
    pub held: Vec<(u16, Status)>,
    /// Commands of the current batch that are over: refused or completed at once.
    pub over: Vec<(u16, Status)>,
    at_once: AtOnce,
}

impl Commands {
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

    pub(super) fn in_hand(&self) -> usize {
        COMMANDS - self.free.len()
    }

    /// Whether any are in flight, or a dead engine's may be at a device.
    pub(super) fn are_at_devices(&self, turn: &Turn<'_>) -> bool {
        self.in_hand() > 0 || turn.client.may_be_touched(turn.core)
    }

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

    #[inline]
    pub(super) fn count_at_once(&mut self, turn: &Turn<'_>) {
        if let Some(lane) = turn.client.lane().and_then(|lane| turn.core.lane(lane)) {
            lane.count_at_once(&mut self.at_once, || {
                turn.core.clock.since(turn.core.now_ns())
            });
        }
    }
}
