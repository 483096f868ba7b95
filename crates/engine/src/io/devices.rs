//! The served devices, and the ring for all their operations.
//!
//! **Design.** The ring is entered at the end of a turn, or before if devices have little to do.
//! Nothing is submitted before [`Pulse`] confirms that the pool is still this engine's. An
//! operation's user data tells its purpose ([`kind`]).

use crate::device_heartbeat::Pulse;
use forebay_device::Device;
use forebay_device::ring::{Completion, Ring};
use forebay_device::{Errno, Finish, Op, OpKind, Pinned, Registration, Submitted};
use forebay_xlate::boundary::message::DeviceConfig;
use forebay_xlate::boundary::region::{DeviceOp, Region};
use forebay_xlate::{DeviceIndex, Word, kill_point};
use std::sync::Arc;
use std::time::Duration;

/// The top byte of a completion's user data.
pub(crate) mod kind {
    pub(crate) const SLICE: u64 = 1;
    pub(crate) const FLUSH: u64 = 2;
    pub(crate) const JOB: u64 = 3;
    pub(crate) const WAKE: u64 = 4;
    pub(crate) const REMOTE: u64 = 5;
    pub(crate) const SHIFT: u32 = 56;
}

/// A served device. Its fence may still have to pass ([`crate::core::Core::fenced`]).
#[derive(Clone, Debug)]
pub(crate) struct ServedDevice {
    /// Its configuration, with the place of its extents.
    pub config: Arc<DeviceConfig>,
    /// The open device.
    pub device: Arc<Device>,
}

pub(crate) struct DeviceRing {
    pub(crate) ring: Ring,
    pulse: Arc<Pulse>,
    pub(crate) served: Vec<Option<ServedDevice>>,
    pub(crate) ended_ns: u64,
    /// Without operations that other threads of this process carry out.
    pub(crate) own_ended_ns: u64,
    pub(crate) wake_armed: bool,
    region: Arc<Region>,
}

impl DeviceRing {
    pub(crate) fn new(ring: Ring, region: Arc<Region>) -> Self {
        Self {
            ring,
            pulse: Arc::default(),
            served: (0..256).map(|_| None).collect(),
            ended_ns: 0,
            own_ended_ns: 0,
            wake_armed: false,
            region,
        }
    }

    pub(crate) fn set_pulse(&mut self, pulse: Arc<Pulse>) {
        self.pulse = pulse;
    }

    #[inline]
    pub(crate) fn get(&self, device: u8) -> Option<&ServedDevice> {
        self.served[usize::from(device)].as_ref()
    }

    pub(crate) fn set(&mut self, served: ServedDevice) {
        if served.device.is_native() {
            // Otherwise it is used as any block device.
            let _ = self.ring.prepare_native();
        }
        let at = usize::from(served.config.device.0);
        self.served[at] = Some(served);
    }

    pub(crate) fn has_all(&self, mut devices: impl Iterator<Item = DeviceIndex>) -> bool {
        devices.all(|device| self.get(device.0).is_some())
    }

    pub(crate) fn some_end_at_once(&self) -> bool {
        let mut served = self.served.iter().flatten();
        served.any(|served| served.device.ends_at_once())
    }

    /// Device offset of byte `within`; `None` while not served.
    #[inline]
    pub(crate) fn offset_of(&self, word: Word, within: u64) -> Option<u64> {
        let config = &self.get(word.device().0)?.config;
        Some(config.data_offset_bytes + word.extent().0 * u64::from(config.extent_bytes) + within)
    }

    /// Whether only zeros follow from `device_at` to the end of a run from `word`.
    #[inline]
    pub(crate) fn reads_zeros(&self, word: Word, run: u64, device_at: u64) -> bool {
        self.get(word.device().0).is_some_and(|served| {
            served.device.reads_zeros(device_at) && word.extent().0 + run <= served.config.extents
        })
    }

    #[inline]
    pub(crate) fn queue(
        &mut self,
        device: u8,
        op: &mut Op,
        kind: u64,
        at: u64,
    ) -> Option<Submitted> {
        let served = self.served[usize::from(device)].as_ref()?;
        let data = kind << kind::SHIFT | at;
        Some(served.device.queue(&mut self.ring, op, data))
    }

    #[inline]
    pub(crate) fn finish(&self, device: u8, op: Op, result: i32) -> Option<Finish> {
        Some(self.get(device)?.device.finish(op, result))
    }

    #[inline]
    pub(crate) fn ended(&mut self, device: u8, now_ns: u64) {
        self.ended_ns = now_ns;
        if !self
            .get(device)
            .is_some_and(|served| served.device.prefers_sleep())
        {
            self.own_ended_ns = now_ns;
        }
    }

    #[cold]
    pub(crate) fn count_error(&self, device: u8, op: &Op, errno: Errno, now_ns: u64) {
        if errno == Errno::FAULT {
            // The VM's memory was gone, no fault of the device.
            return;
        }
        let what = match op.kind() {
            OpKind::Read => DeviceOp::Read,
            OpKind::Flush => DeviceOp::Flush,
            OpKind::Write | OpKind::WriteZeroes | OpKind::Punch => DeviceOp::Write,
        };
        let is_no_room = matches!(errno, Errno::NOSPC | Errno::DQUOT);
        let errno = errno.raw_os_error();
        self.region.devices()[usize::from(device)].record(
            what,
            errno,
            is_no_room,
            op.offset_bytes(),
            now_ns,
        );
    }

    /// The next turn retries those that fail.
    pub(crate) fn enter(&mut self) {
        if self.ring.queued() > 0 {
            self.pulse.check();
        }
        if self.ring.submit().is_ok_and(|entered| entered > 0) {
            kill_point!("core.entered");
        }
    }

    /// Enters before the turn's end once devices have no more than the queued operations. So an
    /// idle device starts at once, and a busy one gets batches.
    #[inline]
    pub(crate) fn feed(&mut self, at_devices: usize) {
        if 2 * self.ring.queued() >= at_devices {
            self.enter();
        }
    }

    #[inline]
    pub(crate) fn completions(&mut self, batch: &mut [Completion]) -> usize {
        self.ring.drain(batch)
    }

    pub(crate) fn sleep(&mut self, epoll: impl std::os::fd::AsFd, limit: Duration) {
        if !self.wake_armed {
            let events = rustix::event::PollFlags::IN.bits() as u32;
            let data = kind::WAKE << kind::SHIFT;
            self.wake_armed = self.ring.poll_add(epoll, events, data).is_ok();
        }
        if self.ring.queued() > 0 {
            self.pulse.check();
        }
        let _ = self.ring.wait(1, Some(limit));
    }

    pub(crate) fn register(&mut self, pinned: Pinned) -> Result<Registration, Pinned> {
        self.ring.register(pinned).map_err(|(pinned, _)| pinned)
    }

    /// No operation may use it; the caller drops it on another thread.
    pub(crate) fn unregister(&mut self, name: Registration) -> Option<Pinned> {
        self.ring.unregister(name)
    }

    #[cfg(test)]
    pub(crate) fn fixed_requests(&self) -> u64 {
        self.ring.fixed_requests()
    }
}
