//! Continues waiting commands after an answer, a new device, free room, or a timeout.
//!
//! **Design.** Commands wait in lists ([`crate::io::waits`], [`crate::io::parked`]); those that an
//! event concerns are first taken out, then continued. After [`super::OWNER_WAIT_LIMIT_NS`] without
//! the daemon's answer they end with Command Interrupted, which the host may retry.

use super::Core;
use crate::io::command::{Io, IoOp, Issuer, Stage, Token};
use crate::io::slab::MAX_IOS;
use crate::lane::LaneIndex;
use forebay_nvme::Status;
use forebay_xlate::boundary::message::FaultFailure;
use forebay_xlate::reactor_side::{Answer, Heard, Parked};
use forebay_xlate::{ExtentRange, VolumeId};
use std::sync::atomic::Ordering::Relaxed;

/// Result of a release.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Released {
    /// Number of released extents.
    Done(u64),
    /// The owner cannot carry it out.
    Failed,
    /// The control thread gave it up.
    Abandoned,
}

impl Core {
    /// The owner answered faults in `range`.
    pub(crate) fn fault_answered(&mut self, volume: VolumeId, range: ExtentRange, answer: Answer) {
        if self.parked.is_empty() {
            return;
        }
        let concerned = |parked: &Parked| parked.hear(volume, range, answer) != Heard::Stay;
        let mut chosen = std::mem::take(&mut self.waits.spare);
        debug_assert!(chosen.is_empty());
        (self.parked).take_concerned(volume, range, concerned, &mut self.slab, &mut chosen);
        for index in chosen.drain(..) {
            let Stage::Parked(parked) = self.slab[index as usize].stage else {
                continue;
            };
            let now_ns = self.clock.now_ns;
            let token = (self.parked).resume(index, &mut self.slab, &self.lanes, now_ns);
            self.blame(Some(index));
            match parked.hear(volume, range, answer) {
                Heard::Fail(reason) => {
                    let read = self.slab[index as usize].op.reads();
                    self.fail(token, status_of_fault(reason, !read));
                }
                Heard::Translate | Heard::Stay => {
                    if self.overwrites.any() {
                        let io = &mut self.slab[index as usize];
                        (self.overwrites).answered(index as usize, io, &self.lanes);
                    }
                    self.dispatch(token);
                }
            }
        }
        self.waits.spare = chosen;
    }

    /// Continues the selected commands by `then`.
    pub(super) fn resume_chosen(
        &mut self,
        which: impl Fn(&Self, &Io) -> bool,
        mut then: impl FnMut(&mut Self, Token),
    ) {
        let mut chosen = std::mem::take(&mut self.waits.spare);
        debug_assert!(chosen.is_empty());
        let mut waiting = std::mem::take(&mut self.waits.all);
        waiting.retain(|&i| {
            let take = which(self, &self.slab[i as usize]);
            if take {
                chosen.push(i);
            }
            !take
        });
        self.waits.all = waiting;
        for i in chosen.drain(..) {
            let io = &mut self.slab[i as usize];
            io.stage = Stage::AtDevices;
            self.blame(Some(i));
            then(self, Token::of(i));
        }
        self.waits.spare = chosen;
    }

    /// Continues commands whose sequence is durable now. After a failed commit, those that wait for
    /// its sequence, or an earlier one, fail.
    pub(crate) fn commit_ended(&mut self, volume: VolumeId, result: Result<(), u64>) {
        if result.is_err() {
            for lane in self.lanes.of_volume(volume) {
                lane.commit_asked = 0;
            }
        }
        self.resume_chosen(
            |core, io| {
                let lane = core.lanes.get(io.lane).filter(|l| l.volume.id() == volume);
                io.stage == Stage::Committing
                    && lane.is_some_and(|l| match result {
                        Ok(()) => l.volume.is_committed(io.commit),
                        Err(sequence) => io.commit <= sequence,
                    })
            },
            |core, token| match result {
                Ok(()) => core.finish(token),
                Err(_) => core.fail(token, Status::INTERNAL_ERROR),
            },
        );
    }

    /// After a failed release, a Deallocate, which is a hint, skips it; Write Zeroes zeroes in
    /// place.
    pub(crate) fn release_ended(&mut self, io: u32, generation: u32, released: Released) {
        let is_it = |core: &Self, candidate: &Io| {
            candidate.stage == Stage::Releasing
                && std::ptr::eq(candidate, &core.slab[io as usize % MAX_IOS])
                && candidate.generation == generation
        };
        self.resume_chosen(is_it, |core, token| {
            let io = &mut core.slab[token.index()];
            match released {
                Released::Done(extents) => {
                    let lane = core.lanes.get(io.lane);
                    let extent_bytes = lane.map_or(0, |lane| 1 << lane.volume.extent_shift);
                    io.cursor += io.releasing.min(extents.saturating_mul(extent_bytes));
                }
                Released::Failed => match &mut io.op {
                    IoOp::WriteZeroes { deallocate, .. } => *deallocate = false,
                    _ => io.cursor += io.releasing,
                },
                Released::Abandoned => return core.fail(token, Status::COMMAND_INTERRUPTED),
            }
            io.releasing = 0;
            core.dispatch(token);
        });
    }

    /// Ends it once its slices have ended.
    pub(super) fn fail(&mut self, token: Token, status: Status) {
        let io = &mut self.slab[token.index()];
        if io.status == Status::SUCCESS {
            io.status = status;
        }
        if io.slices == 0 {
            self.finish(token);
        } else {
            io.stage = Stage::AtDevices;
            token.entrust();
        }
    }

    /// Ends the selected waiting commands. Returns the number of those at a device or in a release,
    /// which end later.
    pub(crate) fn end_waiting(
        &mut self,
        status: Status,
        which: impl Fn(&Issuer, &IoOp, LaneIndex) -> bool,
    ) -> u32 {
        for io in self.slab.iter_mut() {
            let waits = !matches!(io.stage, Stage::Free | Stage::AtDevices | Stage::RingWait);
            if waits && which(&io.owner, &io.op, io.lane) {
                // Its deadline is now. Only the owner knows how a release ends.
                if io.status == Status::SUCCESS && io.stage != Stage::Releasing {
                    io.status = status;
                }
                io.deadline_ns = 0;
            }
        }
        self.end_late();
        let left = self.slab.iter();
        let left = left.filter(|io| io.stage != Stage::Free && which(&io.owner, &io.op, io.lane));
        left.count() as u32
    }

    /// Periodic work, about every 100 ms.
    pub(crate) fn tick(&mut self) {
        let tiers = self.staging.settle(self.lanes.iter().count() as u32);
        let record = self.records.reactor;
        record.staging_own_bytes.store(tiers.own_bytes, Relaxed);
        (record.staging_borrowed_bytes).store(tiers.borrowed_bytes, Relaxed);
        self.slices.retry_not_ready();
        self.end_late();
    }

    /// A release is not ended here: the owner might still carry it out, over later writes of the
    /// tenant. The control thread, which sees the owner's revoke, decides that.
    pub(super) fn end_late(&mut self) {
        let (now_ns, heard_ns) = (self.clock.now_ns, self.clock.owner_heard_ns());
        let mut late = std::mem::take(&mut self.waits.spare);
        (self.parked).take_late(&mut self.slab, heard_ns, &mut late);
        for index in late.drain(..) {
            let token = (self.parked).resume(index, &mut self.slab, &self.lanes, now_ns);
            self.fail(token, Status::COMMAND_INTERRUPTED);
        }
        if self.flusher.is_busy() {
            // A FLUSH has no data at a device.
            for index in 0..self.slab.len() as u32 {
                let io = &mut self.slab[index as usize];
                if io.stage == Stage::Flushing && io.deadline_ns <= heard_ns {
                    io.flushes = 0;
                    self.flusher.forget(index);
                    self.fail(Token::of(index), Status::COMMAND_INTERRUPTED);
                }
            }
        }
        (self.qos).take_overdue(&mut self.slab, heard_ns, &mut late);
        for index in late.drain(..) {
            (self.qos).waited(&mut self.slab[index as usize], &self.lanes, now_ns);
            self.fail(Token::of(index), Status::COMMAND_INTERRUPTED);
        }
        self.waits.spare = late;
        (self.waits).ask_of_releases(&mut self.slab, heard_ns, &mut self.upcalls);
        self.resume_chosen(
            |_, io| io.deadline_ns <= heard_ns && io.stage != Stage::Releasing,
            |core, token| core.fail(token, Status::COMMAND_INTERRUPTED),
        );
    }
}

fn status_of_fault(reason: FaultFailure, write: bool) -> Status {
    match reason {
        FaultFailure::NoSpace => Status::CAPACITY_EXCEEDED,
        FaultFailure::Internal => Status::INTERNAL_ERROR,
        FaultFailure::Busy => Status::COMMAND_INTERRUPTED,
        FaultFailure::Device if write => Status::WRITE_FAULT,
        FaultFailure::Device => Status::UNRECOVERED_READ_ERROR,
    }
}
