//! Waits until operations now at a device have ended, without a request to the device.
//!
//! **Design.** A word is translated and its slice noted in one step, so what an earlier word names
//! is here, or no more: also slices that another reactor submits, or that the ring had no room for.
//! Each reactor notes its slices by number, flush, and internal operations by place, and answers
//! when these have ended. On a hung device the answer never comes, which delays nothing else. **Not
//! here:** collecting the answers (the control thread).

use crate::io::jobs::MAX_ACTIVE;
use crate::upcall::Upcall;
use forebay_xlate::DeviceIndex;
use std::collections::VecDeque;

#[derive(Debug)]
struct Settle {
    job: u64,
    device: u8,
    /// Slices with lower numbers count.
    before: u64,
    slices: u64,
    flush: bool,
    jobs: [bool; MAX_ACTIVE],
}

impl Settle {
    fn is_over(&self) -> bool {
        self.slices == 0 && !self.flush && !self.jobs.contains(&true)
    }
}

pub(crate) enum EndedAtDevice {
    /// A slice, by number.
    Slice(u64),
    Flush,
    /// An internal operation, by place.
    Job(usize),
}

#[derive(Debug, Default)]
pub(crate) struct Settles {
    open: Vec<Settle>,
}

impl Settles {
    /// `slices` are there, all numbered below `before`.
    pub(crate) fn begin(
        &mut self,
        job: u64,
        device: DeviceIndex,
        (slices, before): (u64, u64),
        flush: bool,
        jobs: [bool; MAX_ACTIVE],
        upcalls: &mut VecDeque<Upcall>,
    ) {
        let settle = Settle {
            job,
            device: device.0,
            before,
            slices,
            flush,
            jobs,
        };
        if settle.is_over() {
            upcalls.push_back(Upcall::Settled { job });
        } else {
            self.open.push(settle);
        }
    }

    #[inline]
    pub(crate) fn ended(
        &mut self,
        device: u8,
        ended: EndedAtDevice,
        upcalls: &mut VecDeque<Upcall>,
    ) {
        if self.open.is_empty() {
            return;
        }
        self.open.retain_mut(|settle| {
            if settle.device != device {
                return true;
            }
            match ended {
                EndedAtDevice::Slice(number) => settle.slices -= u64::from(number < settle.before),
                EndedAtDevice::Flush => settle.flush = false,
                EndedAtDevice::Job(place) => settle.jobs[place] = false,
            }
            let over = settle.is_over();
            if over {
                upcalls.push_back(Upcall::Settled { job: settle.job });
            }
            !over
        });
    }
}
