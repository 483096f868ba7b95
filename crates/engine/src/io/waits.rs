//! Commands that wait: for a device, for the daemon's commit, for a release.
//!
//! **Design.** One list; whoever answers takes up those that the answer is for. What waits for the
//! daemon does so for [`crate::io::clock::OWNER_WAIT_LIMIT_NS`] at most, then ends with Command Interrupted, which the
//! host may retry. A release alone is not ended without the control thread's word.
//!
//! **Not here:** what is asked ([`crate::io::flush`], [`crate::io::zero`]), and those that
//! wait for an extent ([`crate::io::parked`]).

use crate::io::clock::{Clock, OWNER_WAIT_LIMIT_NS};
use crate::io::command::{Stage, Token};
use crate::io::slab::{MAX_IOS, Slab};
use crate::upcall::Upcall;
use std::collections::VecDeque;

/// The commands that wait in this way, and for what.
#[derive(Debug)]
pub(crate) struct Waits {
    /// For the daemon, a device, something older, or room among the slices.
    pub(crate) all: Vec<u32>,
    /// For room in the ring, or the next turn.
    ring: Vec<u32>,
    /// How many wait for room among the slices, and whether there is more now.
    pub(crate) for_slices: usize,
    pub(crate) slices_freed: bool,
    /// A spare list for those that are taken out of one, so that nothing is allocated.
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

    /// Whether none wait for what isn't here.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether some wait for the next turn.
    pub(crate) fn has_ring_wait(&self) -> bool {
        !self.ring.is_empty()
    }

    /// Whether some may have the room among the slices that they wait for.
    pub(crate) fn have_room(&self) -> bool {
        self.slices_freed && self.for_slices > 0
    }

    /// A command waits.
    pub(crate) fn push(&mut self, token: Token, stage: Stage, slab: &mut Slab, clock: &Clock) {
        let io = &mut slab[token.index()];
        io.stage = stage;
        match stage {
            Stage::RingWait => {
                self.ring.push(token.entrust());
                return;
            }
            Stage::SliceWait => {
                // From now on: a long command that gets on is not late.
                io.deadline_ns = clock.owner_deadline_ns();
                self.for_slices += 1;
            }
            _ => {}
        }
        self.all.push(token.entrust());
    }

    /// Takes out those that wait for the next turn, in a list that is given back ([`Waits::spare`]).
    pub(crate) fn take_ring_wait(&mut self) -> Vec<u32> {
        let mut list = std::mem::take(&mut self.spare);
        list.append(&mut self.ring);
        list
    }

    /// Asks the control thread what of a release has become that takes too long.
    pub(crate) fn ask_of_releases(
        &self,
        slab: &mut Slab,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        for index in &self.all {
            let io = &mut slab[*index as usize];
            if io.stage == Stage::Releasing && io.deadline_ns <= now_ns {
                // Asked again, should the answer be that it is being carried out.
                io.deadline_ns = now_ns + OWNER_WAIT_LIMIT_NS / 20;
                upcalls.push_back(Upcall::AbandonRelease {
                    io: *index,
                    generation: io.generation,
                });
            }
        }
    }
}
