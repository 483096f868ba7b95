//! The core's part of a turn: clock, completions, submission, sleep.
//!
//! **Design.** The ring is entered at a turn's end, and before if devices have little to do. **Not
//! here:** the loop ([`crate::reactor`]).

use super::Core;
use crate::io::command::{Stage, Token};
use crate::io::devices::kind;
use forebay_device::ring::Completion;
use forebay_xlate::kill_point;

/// With this many slices at devices, sleep is better: they end by interrupt, and polling may delay
/// the kernel's work.
pub(super) const SLEEP_SLICES: usize = 8;
/// Without an end for this long, devices are slow or hang, and polling continues.
pub(super) const LIVELY_NS: u64 = 1_000_000;

impl Core {
    /// Handles completions; true if any.
    pub(crate) fn reap(&mut self) -> bool {
        let mut any = self.offload.out > 0 && self.take_answers();
        if !self.devices.ring.has_completions() {
            return any;
        }
        let mut batch = [Completion::default(); 64];
        loop {
            let n = self.devices.completions(&mut batch);
            for completion in &batch[..n] {
                any = true;
                let at = (completion.user_data & ((1 << kind::SHIFT) - 1)) as usize;
                let result = completion.result;
                match completion.user_data >> kind::SHIFT {
                    kind::SLICE => {
                        self.blame(self.slices.get(at).map(|slice| slice.io));
                        kill_point!("core.completed");
                        if let Some(result) = self.slices.completed(at, result, &mut self.devices) {
                            self.slice_ended(at, result);
                        }
                    }
                    kind::REMOTE => {
                        let now = (self.slices.in_flight(), self.clock.now_ns);
                        let record = self.records.reactor;
                        (self.offload).completed(at, result, &mut self.devices, record, now);
                    }
                    kind::FLUSH => {
                        self.blame(None);
                        let device = at as u8;
                        let ended = self.flusher.completed(device, result, &mut self.devices);
                        if let Some(result) = ended {
                            self.flush_ended(device, result);
                        }
                    }
                    kind::JOB => {
                        self.blame(None);
                        self.jobs.completed(
                            at,
                            result,
                            &mut self.devices,
                            &mut self.settles,
                            self.clock.now_ns,
                            &mut self.upcalls,
                        );
                    }
                    kind::WAKE => self.devices.wake_armed = false,
                    _ => {}
                }
            }
            if n < batch.len() {
                return any;
            }
        }
    }

    /// Ends a turn: retries operations, enters the ring.
    pub(crate) fn end_turn(&mut self) -> bool {
        self.blame(None);
        self.vms.turn();
        if self.offload.spreads() {
            self.offload.turn(self.clock.now_ns);
        }
        if self.recovered.any() {
            self.advance_recovered();
            self.blame(None);
        }
        let mut admitted = false;
        while self.begin_throttled() > 0 {
            admitted = true;
        }
        let again = self.try_again();
        self.advance_jobs();
        self.devices.enter();
        if self.offload.has_peers() {
            self.offload.ring_others();
        }
        again || admitted
    }

    /// Those that found no room in the ring or among the slices.
    fn try_again(&mut self) -> bool {
        let again = self.waits.has_ring_wait() || !self.slices.again.is_empty();
        if again {
            for _ in 0..self.slices.again.len() {
                let index = self.slices.again.swap_remove(0) as usize;
                let io = self.slices.get(index).map(|slice| slice.io);
                self.blame(io);
                if let Some(result) = self.slices.queue_again(index, &mut self.devices) {
                    self.slice_ended(index, result);
                }
            }
            let mut waiting = self.waits.take_ring_wait();
            for i in waiting.drain(..) {
                self.slab[i as usize].stage = Stage::AtDevices;
                self.blame(Some(i));
                self.dispatch(Token::of(i));
            }
            self.waits.spare = waiting;
            self.blame(None);
        }
        if std::mem::take(&mut self.waits.slices_freed) && self.waits.for_slices > 0 {
            self.waits.for_slices = 0;
            self.resume_chosen(|_, io| io.stage == Stage::SliceWait, Self::dispatch);
            self.blame(None);
        }
        if self.flusher.must_retry() {
            for device in 0..=u8::MAX {
                if let Some(result) = self.flusher.try_again(device, &mut self.devices) {
                    self.flush_ended(device, result);
                }
            }
        }
        again
    }

    /// Reads the clock for a new turn.
    #[inline]
    pub(crate) fn begin_turn(&mut self) -> u64 {
        self.blame(None);
        self.clock.stamp();
        let now_ns = self.clock.now_ns;
        if self.offload.spreads() && self.offload.begin_turn(now_ns) {
            // The idle reactors may have changed.
            self.qos.set_processors(self.offload.check(now_ns));
        }
        self.qos
            .begin_turn(now_ns, self.records.reactor, &self.region);
        now_ns
    }

    /// Call it when there is no work.
    #[inline]
    pub(crate) fn is_idle(&mut self) {
        self.qos.is_idle(&self.region);
        self.offload.is_idle();
    }

    /// Whether anything must be retried without an event.
    pub(crate) fn must_turn(&self) -> bool {
        !self.ended.is_empty()
            || self.waits.has_ring_wait()
            || !self.slices.again.is_empty()
            || self.waits.have_room()
            || !self.upcalls.is_empty()
            || self.qos.has_ready()
            || self.jobs.must_turn()
            || self.recovered.must_turn()
            || self.offload.must_turn()
    }

    /// Whether to sleep at once: enough operations end fast, and no frontend `polls`; or only other
    /// threads of this process have work, whose processor polling would take.
    #[inline]
    pub(crate) fn waits_for_devices(&self, polls: bool) -> bool {
        let at_devices = self.offload.at_devices(self.slices.in_flight());
        let since = |ended_ns: u64| self.clock.now_ns.saturating_sub(ended_ns);
        let elsewhere = self.devices.ring.remote_in_flight();
        // Devices with interrupts had none lately.
        let is_elsewhere = elsewhere > 0
            && elsewhere >= at_devices
            && since(self.devices.own_ended_ns) >= LIVELY_NS;
        is_elsewhere
            || !polls && at_devices >= SLEEP_SLICES && since(self.devices.ended_ns) < LIVELY_NS
    }

    /// Sleeps until a completion, readiness of `epoll`, or the time limit.
    pub(crate) fn sleep(&mut self, epoll: impl std::os::fd::AsFd, limit: std::time::Duration) {
        self.offload.rests(self.clock.now_ns);
        self.devices.sleep(epoll, limit);
        self.clock.stamp();
        self.qos.woke(self.clock.now_ns);
    }
}
