//! Commands that wait for a device, the daemon's commit, a release, or room.
//!
//! **Design.** One list, from which each event selects its commands. After
//! [`crate::io::clock::OWNER_WAIT_LIMIT_NS`] without the daemon they end with Command Interrupted,
//! which the host may retry; a release ends only by the control thread's decision. **Not here:**
//! waits for an extent ([`crate::io::parked`]).

use crate::io::clock::{Clock, OWNER_WAIT_LIMIT_NS};
use crate::io::command::{Stage, Token};
use crate::io::slab::{MAX_IOS, Slab};
use crate::upcall::Upcall;
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct Waits {
    /// Commands with any other wait.
    pub(crate) all: Vec<u32>,
    /// Commands that wait for the ring, or for the next turn.
    ring: Vec<u32>,
    /// Waits for slices, and whether some were freed.
    pub(crate) for_slices: usize,
    pub(crate) slices_freed: bool,
    /// Spare list for commands taken out of another, to avoid allocation.
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
                // From now on: a long command that progresses is not late.
                io.deadline_ns = clock.owner_deadline_ns();
                self.for_slices += 1;
            }
            _ => {}
        }
        self.all.push(token.entrust());
    }

    /// Takes those that wait for the next turn; the list must be returned ([`Waits::spare`]).
    pub(crate) fn take_ring_wait(&mut self) -> Vec<u32> {
        let mut list = std::mem::take(&mut self.spare);
        list.append(&mut self.ring);
        list
    }

    /// Asks whether releases that take too long can be given up.
    pub(crate) fn ask_of_releases(
        &self,
        slab: &mut Slab,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        for index in &self.all {
            let io = &mut slab[*index as usize];
            if io.stage == Stage::Releasing && io.deadline_ns <= now_ns {
                // Asks again if it is being carried out.
                io.deadline_ns = now_ns + OWNER_WAIT_LIMIT_NS / 20;
                upcalls.push_back(Upcall::AbandonRelease {
                    io: *index,
                    generation: io.generation,
                });
            }
        }
    }
}
