//! Waiting for what is in flight at a device, without asking anything of the device.
//!
//! **Design.** The owner wants to know when nothing that was at a device at some moment can still touch
//! it. Each reactor notes what it has there then: slices by their number, the running flush, the
//! internal lane's operations by their place; and answers when all of these have ended. What begins
//! later doesn't count. On a device that hangs the answer never comes, and costs nobody else anything.
//!
//! **Not here:** collecting the reactors' answers (the control thread does).

use crate::io::jobs::MAX_ACTIVE;
use crate::upcall::Upcall;
use forebay_xlate::DeviceIndex;
use std::collections::VecDeque;

/// One wait.
#[derive(Debug)]
struct Settle {
    job: u64,
    device: u8,
    /// Slices numbered below this were there before.
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

/// What ended at a device.
pub(crate) enum EndedAtDevice {
    /// A slice with this number.
    Slice(u64),
    /// Its flush.
    Flush,
    /// The internal lane's operation in this place.
    Job(usize),
}

/// The waits of a reactor.
#[derive(Debug, Default)]
pub(crate) struct Settles {
    open: Vec<Settle>,
}

impl Settles {
    /// Answers `job` once this has ended at the device. Slices there, so many now, have numbers below `before`.
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

    /// Something ended at a device.
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
