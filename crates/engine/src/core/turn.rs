//! A turn of a reactor, as far as it is the core's: the clock, what the ring completed, what is given to it, and sleep.
//!
//! **Design.** The ring is entered when a turn ends, and before that where devices have little to do. **Not here:** the loop
//! itself ([`crate::reactor`]).

use super::io::{Stage, Token};
use super::{Core, kind};
use forebay_device::ring::Completion;
use forebay_xlate::kill_point;

/// With so many slices at devices, the wait for one of them is not worth a processor: they end by interrupt, and
/// whoever polls meanwhile may keep the kernel from its side of the work.
pub(super) const SLEEP_SLICES: usize = 8;
/// Devices at which nothing ended for so long are slow, or hang: others are polled for as ever.
pub(super) const LIVELY_NS: u64 = 1_000_000;

impl Core {
    /// Takes what the ring completed; true if there was anything.
    pub fn reap(&mut self) -> bool {
        let mut any = self.away.out > 0 && self.take_answers();
        if !self.ring.has_completions() {
            return any;
        }
        let mut batch = [Completion::default(); 64];
        loop {
            let n = self.ring.drain(&mut batch);
            for completion in &batch[..n] {
                any = true;
                let at = (completion.user_data & ((1 << kind::SHIFT) - 1)) as usize;
                match completion.user_data >> kind::SHIFT {
                    kind::SLICE => self.slice_completed(at, completion.result),
                    kind::AWAY => self.away_completed(at, completion.result),
                    kind::FLUSH => {
                        self.blame(None);
                        self.flush_completed(at, completion.result);
                    }
                    kind::JOB => {
                        self.blame(None);
                        self.job_completed(at, completion.result);
                    }
                    kind::WAKE => self.wake_armed = false,
                    _ => {}
                }
            }
            if n < batch.len() {
                return any;
            }
        }
    }

    /// The end of a turn: what found no room in the ring is tried again, and the ring is submitted.
    pub fn submit(&mut self) -> bool {
        self.blame(None);
        self.machines.turn();
        if self.away.spreads() {
            self.away.turn(self.now_ns);
        }
        if self.carried.any() {
            self.advance_carried();
            self.blame(None);
        }
        let mut admitted = false;
        while self.begin_throttled() > 0 {
            admitted = true;
        }
        let again = !self.ring_wait.is_empty() || !self.slice_again.is_empty();
        if again {
            self.retry_slices();
            let mut waiting = std::mem::take(&mut self.scratch);
            waiting.append(&mut self.ring_wait);
            for i in waiting.drain(..) {
                self.ios[i as usize].stage = Stage::Moving;
                self.blame(Some(i));
                self.dispatch(Token::take(i));
            }
            self.scratch = waiting;
            self.blame(None);
        }
        if std::mem::take(&mut self.slices_freed) && self.slice_waits > 0 {
            self.slice_waits = 0;
            self.take_up(|_, io| io.stage == Stage::SliceWait, Self::dispatch);
            self.blame(None);
        }
        self.retry_flushes();
        self.advance_jobs();
        self.enter();
        if self.away.has_peers() {
            self.tell_others();
        }
        again || admitted
    }

    /// Hands what is queued to the kernel. What fails of it stays queued: the next turn tries again.
    pub(super) fn enter(&mut self) {
        if self.ring.queued() > 0 {
            self.pulse.check();
        }
        if self.ring.submit().is_ok_and(|entered| entered > 0) {
            kill_point!("core.entered");
        }
    }

    /// The same before the turn ends, as soon as devices have no more than what is queued for them. So one that is idle has
    /// its first command at once, and works while the rest of a batch is prepared; a busy one gets batches.
    #[inline]
    pub(super) fn feed_devices(&mut self) {
        if 2 * self.ring.queued() >= self.at_devices() {
            self.enter();
        }
    }

    /// Reads the clock for the turn that begins.
    #[inline]
    pub fn begin_turn(&mut self) -> u64 {
        self.blame(None);
        self.stamp();
        if self.away.spreads() && self.away.begin_turn(self.now_ns) {
            self.look_at_others();
        }
        if self.admission.is_some() {
            self.begin_admission();
        }
        self.now_ns
    }

    /// Reads the clock within a turn.
    #[inline]
    pub fn stamp(&mut self) {
        self.now_ns = self.clock();
    }

    #[inline]
    pub(super) fn clock(&self) -> u64 {
        #[cfg(test)]
        if let Some(clock_ns) = self.clock_ns {
            return clock_ns;
        }
        monotonic_ns()
    }

    /// Whether anything must be tried again without an event to wait for.
    pub fn must_turn(&self) -> bool {
        !self.ended.is_empty()
            || !self.ring_wait.is_empty()
            || !self.slice_again.is_empty()
            || self.slices_freed && self.slice_waits > 0
            || self.has_upcalls()
            || self.has_ready()
            || self.jobs.must_turn()
            || self.carried.must_turn()
            || self.away.must_turn()
    }

    /// Whether devices have so much, and end it so fast, that who finds nothing to do should sleep at once until one of them
    /// has something.
    #[inline]
    pub fn waits_for_devices(&self) -> bool {
        self.at_devices() >= SLEEP_SLICES
            && self.now_ns.saturating_sub(self.slice_ended_ns) < LIVELY_NS
    }

    /// Sleeps until a completion, readiness of `epoll`, or the time limit.
    pub fn sleep(&mut self, epoll: impl std::os::fd::AsFd, limit: std::time::Duration) {
        if !self.wake_armed {
            let events = rustix::event::PollFlags::IN.bits() as u32;
            self.wake_armed = self
                .ring
                .poll_add(epoll, events, kind::WAKE << kind::SHIFT)
                .is_ok();
        }
        self.away.rests(self.now_ns);
        if self.ring.queued() > 0 {
            self.pulse.check();
        }
        let _ = self.ring.wait(1, Some(limit));
        self.stamp();
        self.woke();
    }
}

/// CLOCK_MONOTONIC in ns.
pub fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
