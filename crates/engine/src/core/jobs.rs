//! Starts jobs of the internal lane, when their device is served, fenced and has room. **Not
//! here:** their work ([`crate::io::jobs`]).

use super::Core;
use crate::io::flush::Waiter;
use crate::upcall::Upcall;
use forebay_device::Errno;
use forebay_xlate::DeviceIndex;
use forebay_xlate::boundary::message::Job;

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

    /// False if its device is busy, or before its fence: an earlier engine's zero-fill could land
    /// late and destroy newer data.
    fn begin_job(&mut self, job: u64, work: Job) -> bool {
        let (device, extents) = match work {
            Job::ZeroFill { device, extents } => (device, Some(extents)),
            Job::Flush { device } => (device, None),
            Job::Settle { device } => {
                self.settle(job, device);
                return true;
            }
        };
        let Some(served) = self.devices.get(device.0) else {
            let error = Some(Errno::NODEV);
            self.upcalls.push_back(Upcall::JobDone { job, error });
            return true;
        };
        if !self.recovered.is_fenced(device) {
            return false;
        }
        match extents {
            None => {
                let waiter = Waiter::Job(job);
                if let Some(result) = self.flusher.ask(device.0, waiter, &mut self.devices) {
                    self.flush_ended(device.0, result);
                }
            }
            Some(extents) if extents.end() > served.config.extents || extents.count == 0 => {
                let error = Some(Errno::INVAL);
                self.upcalls.push_back(Upcall::JobDone { job, error });
            }
            Some(extents) => return self.jobs.zero_fill(job, &served.config, extents),
        }
        true
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
