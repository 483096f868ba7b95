//! Commands that wait: for a device, the daemon's commit, a release, or room.
//!
//! **Design.** One list, from which each event selects its commands. A command waits for the daemon
//! for at most [`crate::io::clock::OWNER_WAIT_LIMIT_NS`], then ends with Command Interrupted, which
//! the host may retry. Only a release ends by the control thread's decision.
//!
//! **Not here:** the requests ([`crate::io::flush`], [`crate::io::zero`]), and commands that wait
//! for an extent ([`crate::io::parked`]).

use crate::io::clock::{Clock, OWNER_WAIT_LIMIT_NS};
use crate::io::command::{Stage, Token};
use crate::io::slab::{MAX_IOS, Slab};
use crate::upcall::Upcall;
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct Waits {
    /// Wait for the daemon, a device, an older operation, or room among the slices.
    pub(crate) all: Vec<u32>,
    /// Wait for room in the ring, or the next turn.
    ring: Vec<u32>,
    /// Number of waits for room among the slices, and whether slices were freed.
    pub(crate) for_slices: usize,
    pub(crate) slices_freed: bool,
    /// A spare list for commands taken out of another, to avoid allocation.
    pub(crate) spare: Vec<u32>,
}

impl Waits {
    pub(crate) fn new() -> Self {
        Self {
            all: Vec::with_capacity(MAX_IOS),
            ring: Vec::with_capacity(MAX_IOS),
            for_slices: 0,
            slices_freed: false,
            spare: Vec::with_capacity(MAX_IOS),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn has_ring_wait(&self) -> bool {
        !self.ring.is_empty()
    }

    /// Whether some may now have room among the slices.
    pub(crate) fn have_room(&self) -> bool {
        self.slices_freed && self.for_slices > 0
    }

    pub(crate) fn push(&mut self, token: Token, stage: Stage, slab: &mut Slab, clock: &Clock) {
        let io = &mut slab[token.index()];
        io.stage = stage;
        match stage {
            Stage::RingWait => {
                self.ring.push(token.entrust());
                return;
            }
            Stage::SliceWait => {
                // The time counts from now: a long command that progresses is not late.
                io.deadline_ns = clock.owner_deadline_ns();
                self.for_slices += 1;
            }
            _ => {}
        }
        self.all.push(token.entrust());
    }

    /// Takes those that wait for the next turn, in a list to be returned ([`Waits::spare`]).
    pub(crate) fn take_ring_wait(&mut self) -> Vec<u32> {
        let mut list = std::mem::take(&mut self.spare);
        list.append(&mut self.ring);
        list
    }

    /// Asks the control thread whether releases that take too long can be given up.
    pub(crate) fn ask_of_releases(
        &self,
        slab: &mut Slab,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        for index in &self.all {
            let io = &mut slab[*index as usize];
            if io.stage == Stage::Releasing && io.deadline_ns <= now_ns {
                // Asks again later if the release is being carried out.
                io.deadline_ns = now_ns + OWNER_WAIT_LIMIT_NS / 20;
                upcalls.push_back(Upcall::AbandonRelease {
                    io: *index,
                    generation: io.generation,
                });
            }
        }
    }
}
