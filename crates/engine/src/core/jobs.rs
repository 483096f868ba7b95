//! Starts jobs of the internal lane, when their devices are served, fenced and have room. **Not
//! here:** their work ([`crate::io::jobs`]).

use super::Core;
use crate::io::flush::Waiter;
use crate::io::jobs::Stretch;
use crate::upcall::Upcall;
use forebay_device::Errno;
use forebay_xlate::boundary::message::Job;
use forebay_xlate::{DeviceIndex, ExtentRange};

impl Core {
    pub(super) fn advance_jobs(&mut self) {
        // Jobs of a busy device stay in order, and do not block others.
        for _ in 0..self.jobs.take_queued() {
            if let Some((job, work)) = self.jobs.queue.pop_front()
                && !self.begin_job(job, work)
            {
                self.jobs.queue.push_back((job, work));
            }
        }
        (self.jobs).advance_all(&mut self.devices, self.clock.now_ns, &mut self.upcalls);
    }

    /// False if a device is busy, or before its fence. An earlier engine's late writes could destroy
    /// newer data, or reach the source of a copy.
    fn begin_job(&mut self, job: u64, work: Job) -> bool {
        let devices = match work {
            Job::ZeroFill { device, .. } | Job::Flush { device } => [device, device],
            Job::Copy { from, to, .. } => [from, to],
            Job::Settle { device } => {
                self.settle(job, device);
                return true;
            }
            Job::Overwrite { to, .. } => [to, to],
        };
        if !self.devices.has_all(devices.into_iter()) {
            let error = Some(Errno::NODEV);
            self.upcalls.push_back(Upcall::JobDone { job, error });
            return true;
        }
        if !devices.iter().all(|d| self.recovered.is_fenced(*d)) {
            return false;
        }
        let stretch = |device: DeviceIndex, first, count| {
            let served = self.devices.get(device.0)?;
            Stretch::of(&served.config, ExtentRange::new(first, count))
        };
        let begun = match work {
            Job::ZeroFill { device, extents } => {
                let extents = stretch(device, extents.first, extents.count);
                extents.map(|extents| Ok(self.jobs.zero_fill(job, extents)))
            }
            Job::Copy {
                from,
                source,
                to,
                target,
                count,
            } => {
                let source = stretch(from, source.0, count);
                let target = stretch(to, target.0, count);
                let both = source.zip(target);
                both.map(|(source, target)| self.jobs.copy(job, source, target))
            }
            Job::Flush { device } => {
                let waiter = Waiter::Job(job);
                if let Some(result) = self.flusher.ask(device.0, waiter, &mut self.devices) {
                    self.flush_ended(device.0, result);
                }
                return true;
            }
            Job::Overwrite { .. } => {
                let parts = (&mut self.parked, &mut self.slab, &self.lanes);
                let begun = self.overwrites.begin(job, work, parts);
                let Some(index) = begun else {
                    let error = Some(Errno::NOENT);
                    self.upcalls.push_back(Upcall::JobDone { job, error });
                    return true;
                };
                let now_ns = self.clock.now_ns;
                let token = (self.parked).resume(index, &mut self.slab, &self.lanes, now_ns);
                self.blame(Some(index));
                self.dispatch(token);
                return true;
            }
            Job::Settle { .. } => return true,
        };
        match begun.unwrap_or(Err(Errno::INVAL)) {
            Ok(begun) => begun,
            Err(errno) => {
                let error = Some(errno);
                self.upcalls.push_back(Upcall::JobDone { job, error });
                true
            }
        }
    }

    /// Answers `job` once all operations now at the device have ended.
    pub(crate) fn settle(&mut self, job: u64, device: DeviceIndex) {
        let here = self.slices.iter().filter(|s| s.device == device.0);
        let slices = here.count() as u64;
        self.settles.begin(
            job,
            device,
            (slices, self.slices.number()),
            self.flusher.is_at_device(device),
            self.jobs.at_device(device),
            &mut self.upcalls,
        );
    }
}
