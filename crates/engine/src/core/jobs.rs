//! The internal lane: the one place where the system itself moves data.
//!
//! **Design.** Jobs come from the owner and are queued; at most [`MAX_OF_DEVICE`] operations of them
//! are at a device at once, in pieces of [`PIECE_BYTES`], so that tenants' commands keep going between.
//! A device never takes the last place, so one that hangs keeps the others' jobs from nothing.
//! Laundering punches: afterwards the extents read as zeros, and a sparse file is smaller.
//!
//! **Not here:** when an extent counts as clean (the owner flushes, then commits).

use super::flush::Waiter;
use super::settle::Ended;
use super::{Core, kind};
use crate::upcall::Upcall;
use forebay_device::{Errno, Finish, Op, Submitted};
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::Job;
use std::collections::VecDeque;

/// Operations at all devices.
pub(super) const MAX_ACTIVE: usize = 32;
const MAX_OF_DEVICE: usize = 2;
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
    /// Something has changed since the queue was looked through.
    look: bool,
    active: [Option<Active>; MAX_ACTIVE],
    /// How many of those there are.
    count: usize,
}

impl Jobs {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            look: false,
            active: Default::default(),
            count: 0,
        }
    }

    /// The places whose operation is at this device.
    pub(super) fn at_device(&self, device: DeviceIndex) -> [bool; MAX_ACTIVE] {
        let here = |a: &Active| a.at_device && a.device == device.0;
        std::array::from_fn(|i| self.active[i].as_ref().is_some_and(here))
    }

    /// A queued job may be able to begin.
    pub(super) fn look_again(&mut self) {
        self.look = true;
    }

    /// Whether a queued job may be able to begin.
    pub(super) fn must_turn(&self) -> bool {
        self.look && !self.queue.is_empty()
    }

    /// A place for another operation at this device.
    fn place(&self, device: DeviceIndex) -> Option<usize> {
        let of_device = self.active.iter().flatten();
        let of_device = of_device.filter(|a| a.device == device.0).count();
        let free = self.active.iter().filter(|a| a.is_none()).count();
        (of_device < MAX_OF_DEVICE && of_device < free)
            .then(|| self.active.iter().position(Option::is_none))
            .flatten()
    }
}

impl Core {
    /// Takes a job.
    pub fn start_job(&mut self, job: u64, work: Job) {
        self.jobs.queue.push_back((job, work));
        self.jobs.look = true;
    }

    /// Whether the internal lane has work.
    pub fn has_jobs(&self) -> bool {
        !self.jobs.queue.is_empty() || self.jobs.count > 0
    }

    fn job_done(&mut self, job: u64, error: Option<Errno>) {
        self.upcalls.push_back(Upcall::JobDone { job, error });
    }

    pub(super) fn advance_jobs(&mut self) {
        if std::mem::take(&mut self.jobs.look) {
            // Those of a device that has enough to do stay, in their order, and hold up no other's.
            for _ in 0..self.jobs.queue.len() {
                let Some((job, work)) = self.jobs.queue.pop_front() else {
                    break;
                };
                if !self.begin_job(job, work) {
                    self.jobs.queue.push_back((job, work));
                }
            }
        }
        if self.jobs.count > 0 {
            for slot in 0..MAX_ACTIVE {
                self.advance_job(slot);
            }
        }
    }

    /// Begins a job; false when its device has enough to do, or an earlier engine may have something
    /// there: its own job of the same kind, landing late, would destroy what was written since.
    fn begin_job(&mut self, job: u64, work: Job) -> bool {
        let (device, extents) = match work {
            Job::Launder { device, extents } => (device, extents),
            Job::Flush { device } => {
                if self.devices[usize::from(device.0)].is_some() {
                    if !self.carried.is_fenced(device) {
                        return false;
                    }
                    self.ask_flush(usize::from(device.0), Waiter::Job(job));
                } else {
                    self.job_done(job, Some(Errno::NODEV));
                }
                return true;
            }
            Job::Settle { device } => {
                self.settle(job, device);
                return true;
            }
        };
        let Some(served) = &self.devices[usize::from(device.0)] else {
            self.job_done(job, Some(Errno::NODEV));
            return true;
        };
        if !self.carried.is_fenced(device) {
            return false;
        }
        let config = &served.config;
        if extents.end() > config.extents || extents.count == 0 {
            self.job_done(job, Some(Errno::INVAL));
            return true;
        }
        let Some(place) = self.jobs.place(device) else {
            return false;
        };
        let at = |extent: u64| config.data_offset_bytes + extent * u64::from(config.extent_bytes);
        self.jobs.active[place] = Some(Active {
            job,
            device: device.0,
            next: at(extents.first),
            end: at(extents.end()),
            op: None,
            at_device: false,
        });
        self.jobs.count += 1;
        true
    }

    /// A job of the internal lane has ended.
    fn end_job(&mut self, place: usize, error: Option<Errno>) {
        if let Some(active) = self.jobs.active[place].take() {
            self.jobs.count -= 1;
            self.jobs.look = true;
            self.job_done(active.job, error);
        }
    }

    fn advance_job(&mut self, slot: usize) {
        while let Some(active) = self.jobs.active[slot].as_mut() {
            if active.at_device {
                return;
            }
            if active.op.is_none() {
                if active.next >= active.end {
                    self.end_job(slot, None);
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
                    let (device, op) = (active.device, *op);
                    self.count_error(device, &op, errno);
                    self.end_job(slot, Some(errno));
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
        let device = active.device;
        match served.device.finish(op, result) {
            Finish::Done => self.settled(device, Ended::Job(slot)),
            Finish::Again(op) => active.op = Some(op),
            Finish::Failed(errno) => {
                self.count_error(device, &op, errno);
                self.settled(device, Ended::Job(slot));
                self.end_job(slot, Some(errno));
            }
        }
        self.advance_job(slot);
    }
}
