//! A reactor: a thread with one io_uring that polls when busy and sleeps when idle.
//!
//! **Design.** A turn takes posts, completions and clients' requests, and submits. Without work for
//! some time ([`Spin`]), or at once if busy devices make polling useless
//! ([`Core::waits_for_devices`]), it sleeps in one `io_uring_enter`; the ring polls one epoll set
//! with all sockets and the mailbox. **Not here:** commands ([`crate::core`], [`crate::frontend`])
//! and posts ([`mod@post`]).

pub(crate) mod mailbox;
mod post;
mod sockets;
mod spin;

use crate::core::{Core, monotonic_ns};
use crate::frontend::Frontend;
use crate::upcall::Upcall;
use forebay_xlate::boundary::region::{MAX_SLEEP_NS, bump};
use mailbox::{Post, ReactorEnd};
pub(crate) use sockets::Sockets;
use spin::Spin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Interval of time limit checks.
const TICK_NS: u64 = 100_000_000;
/// Interval of polls of quiet sockets during work; a poll takes about a thousandth of it.
const POLL_NS: u64 = 100_000;
/// Longer polls, of many active sockets, are this many times their duration apart, up to a maximum.
const POLLS_APART: u64 = 16;
const MAX_POLL_NS: u64 = 5_000_000;
/// How long commands may take to end at a stop.
const STOP_LIMIT_NS: u64 = 5_000_000_000;
/// Staging memory is freed after this idle time.
const TRIM_NS: u64 = 500_000_000;
/// Interval of the freeing steps.
const TRIM_STEP_NS: u64 = 1_000_000;
const WAKE_KEY: u64 = u64::MAX;

pub(crate) struct Reactor {
    pub core: Core,
    /// Protocols, in the order in which a turn polls them.
    pub frontends: Vec<Box<dyn Frontend>>,
    pub mailbox: ReactorEnd,
    pub sockets: Sockets,
}

struct Pace {
    now: u64,
    turns: u64,
    was_busy: bool,
    /// Start of the time without work.
    idle_since: u64,
    spin: Spin,
    tick_at: u64,
    poll_at: u64,
    trim_at: Option<u64>,
    /// Latest end after a stop request.
    stop_by: Option<u64>,
}

impl Pace {
    fn new(now: u64) -> Self {
        Self {
            now,
            turns: 0,
            was_busy: false,
            idle_since: now,
            spin: Spin::new(),
            tick_at: now + TICK_NS,
            poll_at: 0,
            trim_at: None,
            stop_by: None,
        }
    }
}

impl Reactor {
    pub(crate) fn run(mut self) {
        let mut pace = Pace::new(self.core.begin_turn());
        // Inherited work may stop it in its first turn.
        self.core.record().last_turn_ns.store(pace.now, Relaxed);
        loop {
            let busy = self.turn(&mut pace);
            if pace
                .stop_by
                .is_some_and(|limit| self.may_stop(pace.now, limit))
            {
                break;
            }
            pace.was_busy = busy;
            if busy {
                self.after_work(&mut pace);
            } else {
                self.rest(&mut pace);
            }
        }
        self.core.upcalls.push_back(Upcall::Stopped);
        self.send_upcalls();
    }

    #[inline]
    fn turn(&mut self, pace: &mut Pace) -> bool {
        let begun = pace.now;
        pace.now = self.core.begin_turn();
        if pace.was_busy {
            // The last turn's end: a long turn is no pause.
            pace.idle_since = pace.now;
            bump(&self.core.record().busy_ns, pace.now - begun);
        }
        pace.turns += 1;
        let ticks = pace.now >= pace.tick_at;
        if ticks {
            // Read the time before the posts that it covers.
            self.core.clock.owner_was_heard(self.mailbox.heard_ns());
        }
        let mut busy = false;
        while let Some(post) = self.mailbox.next() {
            busy = true;
            if matches!(post, Post::Stop) && pace.stop_by.is_none() {
                pace.stop_by = Some(pace.now + STOP_LIMIT_NS);
            }
            self.handle(post);
        }
        busy |= self.core.reap();
        busy |= self.poll_frontends();
        while self.core.begin_throttled() > 0 {
            busy = true;
            let core = &mut self.core;
            self.frontends.iter_mut().any(|one| one.poll_between(core));
        }
        busy |= self.core.carry_out(busy);
        busy |= self.core.end_turn();
        self.send_upcalls();
        if ticks {
            pace.tick_at = pace.now + TICK_NS;
            self.tick(pace.now);
        }
        busy
    }

    /// Between a frontend's clients, others' small requests are served.
    #[inline]
    fn poll_frontends(&mut self) -> bool {
        let core = &mut self.core;
        let mut busy = false;
        for at in 0..self.frontends.len() {
            let (before, rest) = self.frontends.split_at_mut(at);
            let Some((frontend, after)) = rest.split_first_mut() else {
                break;
            };
            busy |= frontend.poll(core, &mut |core| {
                let mut others = before.iter_mut().chain(after.iter_mut());
                others.any(|other| other.poll_between(core))
            });
        }
        busy
    }

    fn tick(&mut self, now: u64) {
        self.core.tick();
        for frontend in &mut self.frontends {
            frontend.tick(&mut self.core);
        }
        if self.core.has_waiting() || self.frontends.iter().any(|one| one.waits_for_control()) {
            self.mailbox.wake_control();
        }
        self.core.record().last_turn_ns.store(now, Relaxed);
    }

    fn may_stop(&self, now: u64, limit: u64) -> bool {
        now >= limit
            || self.core.slab.busy() == 0
                && self.core.offload.is_drained()
                && self.frontends.iter().all(|one| one.count() == 0)
    }

    /// After a turn with work: polls quiet sockets from time to time.
    #[inline]
    fn after_work(&mut self, pace: &mut Pace) {
        bump(&self.core.record().busy_turns, 1);
        if pace.now >= pace.poll_at {
            let from_ns = monotonic_ns();
            self.poll_sockets();
            pace.poll_at = next_poll_ns(from_ns, monotonic_ns());
        }
    }

    /// After a turn without work: polls for a while, then sleeps.
    #[inline]
    fn rest(&mut self, pace: &mut Pace) {
        self.core.is_idle();
        let polls = self.frontends.iter().any(|one| one.prefers_polling());
        let sleeps_at_once = self.core.waits_for_devices(polls);
        let spins = pace.now - pace.idle_since < pace.spin.limit_ns() && !sleeps_at_once;
        if spins || self.core.must_turn() || !self.arm() {
            if pace.turns.is_multiple_of(8) {
                self.poll_sockets();
            }
            return;
        }
        let trim = *pace.trim_at.get_or_insert(pace.now + TRIM_NS);
        if pace.now >= trim {
            // Small steps avoid delays.
            pace.trim_at = (self.core.staging.trim()).then_some(pace.now + TRIM_STEP_NS);
        }
        let window_ends = self.core.qos.window_ends_ns();
        let until = self.wake_at_ns(pace);
        let slept = self.sleep(pace.now, until);
        if slept {
            // New commands find one window's refill, although several ended.
            pace.now = self.core.begin_turn();
            pace.was_busy = false;
            for frontend in &mut self.frontends {
                pace.was_busy |= frontend.poll_after_sleep(&mut self.core);
            }
            bump(&self.core.record().busy_turns, u64::from(pace.was_busy));
        }
        self.poll_sockets();
        let woke = self.core.begin_turn();
        // A window's end is no new request, so the pause continues.
        if !slept || window_ends.is_none_or(|ends| woke < ends) {
            let paused_since = std::mem::replace(&mut pace.idle_since, woke);
            if slept && !sleeps_at_once {
                pace.spin.paused(woke - paused_since);
            }
        }
    }

    fn arm(&mut self) -> bool {
        let core = &mut self.core;
        self.frontends.iter().all(|one| one.is_idle())
            && self.frontends.iter_mut().all(|one| one.arm(core))
    }

    fn wake_at_ns(&self, pace: &Pace) -> u64 {
        let now = pace.now;
        let mut until = now + MAX_SLEEP_NS;
        if pace.stop_by.is_some() || self.core.has_waiting() {
            until = now + TICK_NS;
        }
        for frontend in &self.frontends {
            if let Some(retry_ns) = frontend.retry_within_ns() {
                until = until.min(now + retry_ns);
            }
            if let Some(deadline) = frontend.next_deadline_ns() {
                until = until.min(deadline.max(now + 1_000_000));
            }
        }
        let others = [self.core.qos.window_ends_ns(), pace.trim_at];
        others.into_iter().flatten().fold(until, u64::min)
    }

    /// Sleeps until `until` or until there is work; false if there was work already.
    fn sleep(&mut self, now: u64, until: u64) -> bool {
        let core = &self.core;
        if !self
            .mailbox
            .fall_asleep(|| core.offload.nothing_from_others())
        {
            return false;
        }
        let record = self.core.record();
        bump(&record.sleeps, 1);
        record.asleep.store(1, Relaxed);
        self.core.sleep(
            self.sockets.epoll(),
            Duration::from_nanos(until.saturating_sub(now)),
        );
        self.core.record().asleep.store(0, Relaxed);
        self.mailbox.awake();
        true
    }

    fn poll_sockets(&mut self) {
        let keys = self.sockets.poll();
        if !keys.is_empty() {
            for frontend in &mut self.frontends {
                frontend.sockets_ready(&mut self.core, keys);
            }
        }
    }

    fn send_upcalls(&mut self) {
        let mut sent = false;
        while let Some(upcall) = self.core.upcalls.pop_front() {
            if let Err(upcall) = self.mailbox.send(upcall) {
                self.core.upcalls.push_front(upcall);
                break;
            }
            sent = true;
        }
        if sent {
            self.mailbox.wake_control();
        }
    }
}

fn next_poll_ns(from_ns: u64, to_ns: u64) -> u64 {
    let took_ns = to_ns.saturating_sub(from_ns);
    to_ns + (POLLS_APART.saturating_mul(took_ns)).clamp(POLL_NS, MAX_POLL_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_of_quiet_sockets_take_a_sixteenth_of_the_time() {
        assert_eq!(next_poll_ns(1000, 1500), 1500 + POLL_NS);
        for took_ns in [10_000, 300_000, 1_000_000_000] {
            let apart_ns = next_poll_ns(5000, 5000 + took_ns) - (5000 + took_ns);
            assert_eq!(apart_ns, (16 * took_ns).min(MAX_POLL_NS), "{took_ns}");
        }
    }
}
