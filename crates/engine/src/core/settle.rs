//! Waiting for what is in flight at a device, without asking anything of the device.
//!
//! **Design.** The owner wants to know when nothing that was at a device at some moment can still touch
//! it. Each reactor notes what it has there then: slices by their number, the running flush, the
//! internal lane's operations by their place; and answers when all of these have ended. What begins
//! later doesn't count. On a device that hangs the answer never comes, and costs nobody else anything.
//!
//! **Not here:** collecting the reactors' answers (the control thread does).

use super::Core;
use super::flush::Running;
use super::jobs::MAX_ACTIVE;
use crate::upcall::Upcall;
use forebay_xlate::DeviceIndex;

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
pub(super) enum Ended {
    /// A slice with this number.
    Slice(u64),
    /// Its flush.
    Flush,
    /// The internal lane's operation in this place.
    Job(usize),
}

/// The waits of a reactor.
#[derive(Debug, Default)]
pub(super) struct Settles {
    open: Vec<Settle>,
}

impl Core {
    /// Answers `job` once everything that is in flight here at the device now has ended.
    pub fn settle(&mut self, job: u64, device: DeviceIndex) {
        let before = self.drains.begin();
        let here = self.slices.iter().flatten();
        let settle = Settle {
            job,
            device: device.0,
            before,
            slices: here.filter(|s| s.device == device.0).count() as u64,
            flush: matches!(self.flusher.running(device), Running::Yes(_)),
            jobs: self.jobs.at_device(device),
        };
        if settle.is_over() {
            self.upcalls.push_back(Upcall::Settled { job });
        } else {
            self.settles.open.push(settle);
        }
    }

    /// Something ended at a device.
    #[inline]
    pub(super) fn settled(&mut self, device: u8, ended: Ended) {
        if self.settles.open.is_empty() {
            return;
        }
        let upcalls = &mut self.upcalls;
        self.settles.open.retain_mut(|settle| {
            if settle.device != device {
                return true;
            }
            match ended {
                Ended::Slice(number) => settle.slices -= u64::from(number < settle.before),
                Ended::Flush => settle.flush = false,
                Ended::Job(place) => settle.jobs[place] = false,
            }
            let over = settle.is_over();
            if over {
                upcalls.push_back(Upcall::Settled { job: settle.job });
            }
            !over
        });
    }
}
