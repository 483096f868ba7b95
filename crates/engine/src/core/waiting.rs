//! Commands that wait: for a device, for the daemon's commit, for a release.
//!
//! **Design.** One list; whoever answers takes up those that the answer is for. What waits for the
//! daemon does so for [`OWNER_WAIT_LIMIT_NS`] at most, then ends with Command Interrupted, which the
//! host may retry. A release alone is not ended without the control thread's word.
//!
//! **Not here:** what is asked ([`super::dispatch`], [`super::flush`], [`super::zero`]), and those that
//! wait for an extent ([`super::parked`]).

use super::io::{Io, IoOp, Owner, Stage, Token};
use super::{Core, MAX_IOS, OWNER_WAIT_LIMIT_NS};
use crate::lane::LaneIndex;
use crate::upcall::Upcall;
use forebay_nvme::Status;
use forebay_xlate::VolumeId;
use std::sync::atomic::Ordering::Relaxed;

impl Core {
    /// Sets a command aside until the owner or a device answers.
    pub(super) fn set_aside(&mut self, token: Token, stage: Stage) {
        let io = &mut self.ios[token.index()];
        io.stage = stage;
        match stage {
            Stage::RingWait => {
                self.ring_wait.push(token.entrust());
                return;
            }
            Stage::SliceWait => {
                // From now on: a long command that gets on is not late.
                io.deadline_ns = self.now_ns + OWNER_WAIT_LIMIT_NS;
                self.slice_waits += 1;
            }
            _ => {}
        }
        self.waiting.push(token.entrust());
    }

    /// Takes up every waiting command that `which` chooses, and carries each on with `then`.
    pub(super) fn take_up(
        &mut self,
        which: impl Fn(&Self, &Io) -> bool,
        mut then: impl FnMut(&mut Self, Token),
    ) {
        let mut chosen = std::mem::take(&mut self.scratch);
        debug_assert!(chosen.is_empty());
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|&i| {
            let take = which(self, &self.ios[i as usize]);
            if take {
                chosen.push(i);
            }
            !take
        });
        self.waiting = waiting;
        for i in chosen.drain(..) {
            let io = &mut self.ios[i as usize];
            io.stage = Stage::Moving;
            self.blame(Some(i));
            then(self, Token::take(i));
        }
        self.scratch = chosen;
    }

    pub(super) fn volume_of(&self, io: &Io) -> Option<VolumeId> {
        Some(self.lane(io.lane)?.volume.id())
    }

    /// The owner committed: whoever waits for what is durable now goes on.
    pub fn committed(&mut self, volume: VolumeId) {
        self.take_up(
            |core, io| {
                io.stage == Stage::Committing
                    && core.lane(io.lane).is_some_and(|l| {
                        l.volume.id() == volume && l.volume.is_committed(io.commit)
                    })
            },
            Self::finish,
        );
    }

    /// A commit failed: whoever waits for it fails.
    pub fn commit_failed(&mut self, volume: VolumeId, sequence: u64) {
        for lane in self.lanes.iter_mut().flatten() {
            if lane.volume.id() == volume {
                lane.commit_asked = 0;
            }
        }
        self.take_up(
            |core, io| {
                io.stage == Stage::Committing
                    && io.commit <= sequence
                    && core.volume_of(io) == Some(volume)
            },
            |core, token| core.fail(token, Status::INTERNAL_ERROR),
        );
    }

    /// The owner has released the first `extents` extents of a release.
    pub fn release_done(&mut self, io: u32, generation: u32, extents: u64) {
        self.take_up_release(io, generation, |core, token| {
            let io = &mut core.ios[token.index()];
            let lane = core.lanes[io.lane.0 as usize].as_ref();
            let extent_bytes = lane.map_or(0, |lane| 1 << lane.volume.extent_shift);
            io.cursor += io.releasing.min(extents.saturating_mul(extent_bytes));
            io.releasing = 0;
            core.dispatch(token);
        });
    }

    /// The owner can't carry a release out. Deallocating is a hint, which goes on behind it; what
    /// must read as zeros is zeroed in place.
    pub fn release_failed(&mut self, io: u32, generation: u32) {
        self.take_up_release(io, generation, |core, token| {
            let io = &mut core.ios[token.index()];
            match &mut io.op {
                IoOp::WriteZeroes { deallocate, .. } => *deallocate = false,
                _ => io.cursor += io.releasing,
            }
            io.releasing = 0;
            core.dispatch(token);
        });
    }

    /// The control thread has given a release up.
    pub fn release_abandoned(&mut self, io: u32, generation: u32) {
        self.take_up_release(io, generation, |core, token| {
            core.fail(token, Status::COMMAND_INTERRUPTED);
        });
    }

    pub(super) fn take_up_release(
        &mut self,
        io: u32,
        generation: u32,
        then: impl FnMut(&mut Self, Token),
    ) {
        self.take_up(
            |core, candidate| {
                candidate.stage == Stage::Releasing
                    && std::ptr::eq(candidate, &core.ios[io as usize % MAX_IOS])
                    && candidate.generation == generation
            },
            then,
        );
    }

    /// Ends a command with an error, once its slices have ended.
    pub(super) fn fail(&mut self, token: Token, status: Status) {
        let io = &mut self.ios[token.index()];
        if io.status == Status::SUCCESS {
            io.status = status;
        }
        if io.slices == 0 {
            self.finish(token);
        } else {
            io.stage = Stage::Moving;
            token.entrust();
        }
    }

    /// Ends what waits in a lane, as if its time were over.
    pub(super) fn end_waiting_of(&mut self, lane: LaneIndex) {
        self.end_waiting(Status::COMMAND_INTERRUPTED, |_, _, of| of == lane);
    }

    /// Ends with `status` those of the commands chosen that wait, and gives the number of those that
    /// have not ended: what is at a device, and what the owner may be releasing, has to come back first.
    pub fn end_waiting(
        &mut self,
        status: Status,
        which: impl Fn(&Owner, &IoOp, LaneIndex) -> bool,
    ) -> u32 {
        for io in &mut self.ios {
            let waits = !matches!(io.stage, Stage::Free | Stage::Moving | Stage::RingWait);
            if waits && which(&io.owner, &io.op, io.lane) {
                // What it ends with when its time is over, which is now. What a release comes to, only the
                // owner knows.
                if io.status == Status::SUCCESS && io.stage != Stage::Releasing {
                    io.status = status;
                }
                io.deadline_ns = 0;
            }
        }
        self.end_late();
        let left = self.ios.iter();
        let left = left.filter(|io| io.stage != Stage::Free && which(&io.owner, &io.op, io.lane));
        left.count() as u32
    }

    /// What bursts borrowed of staging memory goes back when they have ended.
    fn tick_staging(&mut self) {
        let lanes = self.lanes.iter().flatten().count() as u32;
        let tiers = self.staging.settle(lanes);
        let record = self.record();
        record.staging_own_bytes.store(tiers.own_bytes, Relaxed);
        (record.staging_borrowed_bytes).store(tiers.borrowed_bytes, Relaxed);
    }

    /// Every ~100 ms: what time alone brings about.
    pub fn tick(&mut self) {
        self.tick_staging();
        self.end_late();
    }

    /// Ends commands that waited for the daemon too long. A release is not ended
    /// here: the owner might carry it out afterwards, over what the tenant has written since. The
    /// control thread, which hears the owner's revoke, says whether it is too late to give it up.
    pub(super) fn end_late(&mut self) {
        let now = self.heard_ns.min(self.now_ns);
        self.tick_parked(now);
        self.tick_flushes(now);
        self.tick_throttled(now);
        for at in 0..self.waiting.len() {
            let index = self.waiting[at];
            let io = &mut self.ios[index as usize];
            if io.stage == Stage::Releasing && io.deadline_ns <= now {
                // Asked again, should the answer be that it is being carried out.
                io.deadline_ns = now + OWNER_WAIT_LIMIT_NS / 20;
                self.upcalls.push_back(Upcall::AbandonRelease {
                    io: index,
                    generation: io.generation,
                });
            }
        }
        self.take_up(
            |_, io| io.deadline_ns <= now && io.stage != Stage::Releasing,
            |core, token| core.fail(token, Status::COMMAND_INTERRUPTED),
        );
    }
}
