//! The internal lane: the one place where the system itself moves data.
//!
//! **Design.** Jobs come from the owner and are queued; at most [`MAX_ACTIVE`] operations of them are
//! at a device at once, in pieces of [`PIECE_BYTES`], so that tenants' commands keep going between.
//! Laundering punches: afterwards the extents read as zeros, and a sparse file is smaller.
//!
//! **Not here:** when an extent counts as clean (the owner flushes, then commits).

use super::flush::Waiter;
use super::{Core, kind};
use crate::mailbox::Upcall;
use forebay_device::{Errno, Finish, Op, Submitted};
use forebay_xlate::boundary::message::Job;
use std::collections::VecDeque;

const MAX_ACTIVE: usize = 4;
const PIECE_BYTES: u64 = 16 << 20;

#[derive(Debug)]
struct Active {
    job: u64,
    device: u8,
    /// Where the next piece begins, and where the job ends (bytes on the device).
    next: u64,
    end: u64,
    /// The operation at the device, or to be put there.
    op: Option<Op>,
    at_device: bool,
}

/// Jobs waiting and active.
#[derive(Debug)]
pub(super) struct Jobs {
    queue: VecDeque<(u64, Job)>,
    active: [Option<Active>; MAX_ACTIVE],
}

impl Jobs {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            active: Default::default(),
        }
    }
}

impl Core {
    /// Takes a job.
    pub fn start_job(&mut self, job: u64, work: Job) {
        self.jobs.queue.push_back((job, work));
    }

    /// Whether the internal lane has work.
    pub fn has_jobs(&self) -> bool {
        !self.jobs.queue.is_empty() || self.jobs.active.iter().any(Option::is_some)
    }

    fn job_done(&mut self, job: u64, error: Option<Errno>) {
        self.upcalls.push_back(Upcall::JobDone { job, error });
    }

    pub(super) fn advance_jobs(&mut self) {
        while !self.jobs.queue.is_empty() {
            let Some(free) = self.jobs.active.iter().position(Option::is_none) else {
                break;
            };
            let Some((job, work)) = self.jobs.queue.pop_front() else {
                break;
            };
            let (Job::Flush { device } | Job::Launder { device, .. } | Job::Settle { device }) =
                work;
            let Some(served) = &self.devices[usize::from(device.0)] else {
                self.job_done(job, Some(Errno::NODEV));
                continue;
            };
            match work {
                // Every reactor is asked for that by itself.
                Job::Settle { .. } => self.job_done(job, Some(Errno::INVAL)),
                Job::Flush { device } => self.ask_flush(usize::from(device.0), Waiter::Job(job)),
                Job::Launder { device, extents } => {
                    let config = &served.config;
                    if extents.end() > config.extents || extents.count == 0 {
                        self.job_done(job, Some(Errno::INVAL));
                        continue;
                    }
                    let at = |extent: u64| {
                        config.data_offset_bytes + extent * u64::from(config.extent_bytes)
                    };
                    self.jobs.active[free] = Some(Active {
                        job,
                        device: device.0,
                        next: at(extents.first),
                        end: at(extents.end()),
                        op: None,
                        at_device: false,
                    });
                }
            }
        }
        for slot in 0..MAX_ACTIVE {
            self.advance_job(slot);
        }
    }

    fn advance_job(&mut self, slot: usize) {
        while let Some(active) = self.jobs.active[slot].as_mut() {
            if active.at_device {
                return;
            }
            if active.op.is_none() {
                if active.next >= active.end {
                    let job = active.job;
                    self.jobs.active[slot] = None;
                    self.job_done(job, None);
                    return;
                }
                let piece = PIECE_BYTES.min(active.end - active.next);
                active.op = Some(Op::punch(active.next, piece));
                active.next += piece;
            }
            let (Some(served), Some(op)) = (
                &self.devices[usize::from(active.device)],
                active.op.as_mut(),
            ) else {
                return;
            };
            match served
                .device
                .submit(&mut self.ring, op, kind::JOB << kind::SHIFT | slot as u64)
            {
                Submitted::Queued => active.at_device = true,
                Submitted::RingFull => return,
                Submitted::Done(Ok(())) => active.op = None,
                Submitted::Done(Err(errno)) => {
                    let job = active.job;
                    self.jobs.active[slot] = None;
                    self.job_done(job, Some(errno));
                }
            }
        }
    }

    pub(super) fn job_completed(&mut self, slot: usize, result: i32) {
        let Some(active) = self.jobs.active.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        let (Some(served), Some(op)) =
            (&self.devices[usize::from(active.device)], active.op.take())
        else {
            return;
        };
        active.at_device = false;
        match served.device.finish(op, result) {
            Finish::Done => {}
            Finish::Again(op) => active.op = Some(op),
            Finish::Failed(errno) => {
                let job = active.job;
                self.jobs.active[slot] = None;
                self.job_done(job, Some(errno));
            }
        }
        self.advance_job(slot);
    }
}
