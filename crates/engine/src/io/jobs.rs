//! The internal lane: the owner's zero-fill and flush jobs.
//!
//! **Design.** At most [`MAX_OF_DEVICE`] operations at a device, in pieces of [`PIECE_BYTES`], so
//! that tenants' commands run between. No device takes the last place, so a hung one does not block
//! others. Zero-fill punches: extents read as zeros, and a sparse file shrinks. **Not here:** when
//! an extent counts as clean (the owner flushes, then commits).

use crate::io::devices::{DeviceRing, kind};
use crate::io::settle::{EndedAtDevice, Settles};
use crate::upcall::Upcall;
use forebay_device::{Errno, Finish, Op, Submitted};
use forebay_xlate::boundary::message::{DeviceConfig, Job};
use forebay_xlate::{DeviceIndex, ExtentRange};
use std::collections::VecDeque;

pub(crate) const MAX_ACTIVE: usize = 32;
const MAX_OF_DEVICE: usize = 2;
const PIECE_BYTES: u64 = 16 << 20;

#[derive(Debug)]
struct Active {
    job: u64,
    device: u8,
    /// Device bytes: next piece, and the job's end.
    next: u64,
    end: u64,
    /// The operation at the device, or to be submitted.
    op: Option<Op>,
    at_device: bool,
}

#[derive(Debug)]
pub(crate) struct Jobs {
    pub(crate) queue: VecDeque<(u64, Job)>,
    /// Something changed since the last pass.
    check: bool,
    active: [Option<Active>; MAX_ACTIVE],
    /// Number of active jobs.
    count: usize,
}

impl Jobs {
    pub(crate) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            check: false,
            active: Default::default(),
            count: 0,
        }
    }

    pub(crate) fn at_device(&self, device: DeviceIndex) -> [bool; MAX_ACTIVE] {
        let here = |a: &Active| a.at_device && a.device == device.0;
        std::array::from_fn(|i| self.active[i].as_ref().is_some_and(here))
    }

    #[cfg(test)]
    pub(crate) fn any(&self) -> bool {
        !self.queue.is_empty() || self.count > 0
    }

    pub(crate) fn poll_again(&mut self) {
        self.check = true;
    }

    pub(crate) fn must_turn(&self) -> bool {
        self.check && !self.queue.is_empty()
    }

    fn place(&self, device: DeviceIndex) -> Option<usize> {
        let of_device = self.active.iter().flatten();
        let of_device = of_device.filter(|a| a.device == device.0).count();
        let free = self.active.iter().filter(|a| a.is_none()).count();
        (of_device < MAX_OF_DEVICE && of_device < free)
            .then(|| self.active.iter().position(Option::is_none))
            .flatten()
    }

    pub(crate) fn start(&mut self, job: u64, work: Job) {
        self.queue.push_back((job, work));
        self.check = true;
    }

    pub(crate) fn take_queued(&mut self) -> usize {
        match std::mem::take(&mut self.check) {
            true => self.queue.len(),
            false => 0,
        }
    }

    /// False if the device has enough to do.
    pub(crate) fn zero_fill(
        &mut self,
        job: u64,
        config: &DeviceConfig,
        extents: ExtentRange,
    ) -> bool {
        let Some(place) = self.place(config.device) else {
            return false;
        };
        let at = |extent: u64| config.data_offset_bytes + extent * u64::from(config.extent_bytes);
        self.active[place] = Some(Active {
            job,
            device: config.device.0,
            next: at(extents.first),
            end: at(extents.end()),
            op: None,
            at_device: false,
        });
        self.count += 1;
        true
    }

    pub(crate) fn advance_all(
        &mut self,
        devices: &mut DeviceRing,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        if self.count > 0 {
            for place in 0..MAX_ACTIVE {
                self.advance(place, devices, now_ns, upcalls);
            }
        }
    }

    fn advance(
        &mut self,
        place: usize,
        devices: &mut DeviceRing,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        while let Some(active) = self.active[place].as_mut() {
            if active.at_device {
                return;
            }
            if active.op.is_none() {
                if active.next >= active.end {
                    self.end(place, None, upcalls);
                    return;
                }
                let piece = PIECE_BYTES.min(active.end - active.next);
                active.op = Some(Op::punch(active.next, piece));
                active.next += piece;
            }
            let Some(op) = active.op.as_mut() else {
                return;
            };
            match devices.queue(active.device, op, kind::JOB, place as u64) {
                Some(Submitted::Queued) => active.at_device = true,
                Some(Submitted::RingFull) | None => return,
                Some(Submitted::Done(Ok(()))) => active.op = None,
                Some(Submitted::Done(Err(errno))) => {
                    devices.count_error(active.device, op, errno, now_ns);
                    self.end(place, Some(errno), upcalls);
                }
            }
        }
    }

    fn end(&mut self, place: usize, error: Option<Errno>, upcalls: &mut VecDeque<Upcall>) {
        if let Some(active) = self.active[place].take() {
            self.count -= 1;
            self.check = true;
            upcalls.push_back(Upcall::JobDone {
                job: active.job,
                error,
            });
        }
    }

    pub(crate) fn completed(
        &mut self,
        place: usize,
        result: i32,
        devices: &mut DeviceRing,
        settles: &mut Settles,
        now_ns: u64,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        let Some(active) = self.active.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        let device = active.device;
        let (Some(_), Some(op)) = (devices.get(device), active.op.take()) else {
            return;
        };
        active.at_device = false;
        match devices.finish(device, op, result) {
            Some(Finish::Done) | None => settles.ended(device, EndedAtDevice::Job(place), upcalls),
            Some(Finish::Again(op)) => active.op = Some(op),
            Some(Finish::Failed(errno)) => {
                devices.count_error(device, &op, errno, now_ns);
                settles.ended(device, EndedAtDevice::Job(place), upcalls);
                self.end(place, Some(errno), upcalls);
            }
        }
        self.advance(place, devices, now_ns, upcalls);
    }
}
