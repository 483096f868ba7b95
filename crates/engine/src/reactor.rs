//! A reactor: a thread with one io_uring that polls when busy and sleeps when idle.
//!
//! **Design.** A turn takes posts, completions and network input, and submits. After
//! some time without anything to do ([`Spin`]), or at once where devices have much to do
//! ([`Core::waits_for_devices`]), and with nothing that must be tried again, it arms everything
//! (sockets and mailbox are in one epoll set, which the ring polls) and sleeps in one
//! `io_uring_enter`. **Not here:** what commands mean ([`crate::core`], [`crate::frontend::nvme_tcp`]).

use crate::core::{Core, monotonic_ns};
use crate::frontend::nvme_tcp::Frontend;
use crate::frontend::vm::{self, Machines};
use crate::mailbox::{Post, ToControl, Upcall};
use crate::spin::Spin;
use forebay_nvme::Status;
use forebay_xlate::boundary::region::{MAX_SLEEP_NS, bump};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How often time limits are looked at.
const TICK_NS: u64 = 100_000_000;
/// How long who was quiet is not noticed beside others' work: a fraction of a window, and a look is some thousandth of it.
const LOOK_NS: u64 = 100_000;
/// Where a look takes longer, as many have something, they are so many times as far apart: looking is no work. But no further
/// than that: it may have been the system that took so long.
const LOOKS_APART: u64 = 16;
const MAX_LOOK_NS: u64 = 5_000_000;
/// The longest sleep while a connection waits for memory or room.
const RETRY_NS: u64 = 10_000_000;
/// How long commands may take to end at a stop.
const STOP_LIMIT_NS: u64 = 5_000_000_000;
/// Idle this long, staging memory is given back.
const TRIM_NS: u64 = 500_000_000;
/// And then so much apart.
const TRIM_STEP_NS: u64 = 1_000_000;
/// Machines' rings are not looked at in so many turns after one in which there was something: to make more of what it was just
/// given takes a driver longer, and to look takes the line away from it that it is about to write.
const REST_TURNS: u32 = 2;
/// The epoll key of the mailbox.
pub const WAKE_KEY: u64 = u64::MAX;

/// See the module's text.
pub struct Reactor {
    /// Commands.
    pub core: Core,
    /// Connections.
    pub frontend: Frontend,
    /// Machines' clients.
    pub machines: Machines,
    /// The way to and from the control thread.
    pub mailbox: ToControl,
    /// Sockets and the mailbox's bell.
    pub epoll: Arc<OwnedFd>,
}

impl Reactor {
    /// Runs until it is told to stop.
    pub fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(256);
        let mut keys: Vec<u64> = Vec::with_capacity(256);
        let mut now = self.core.begin_turn();
        let (mut idle_since, mut tick_at, mut turn) = (now, now + TICK_NS, 0u64);
        let mut trim_at = None;
        let mut stop_by = None;
        let mut was_busy = false;
        let mut spin = Spin::new();
        let mut rest = 0;
        let mut look_at_ns = 0;
        // What it inherits may stop it in its first turn.
        self.core.record().last_turn_ns.store(now, Relaxed);
        loop {
            let begun = now;
            now = self.core.begin_turn();
            if was_busy {
                // From its end on: a long turn is no pause.
                idle_since = now;
                bump(&self.core.record().busy_ns, now - begun);
            }
            turn += 1;
            let mut busy = false;
            let ticks = now >= tick_at;
            if ticks {
                // First when, then what.
                self.core.owner_was_heard(self.mailbox.heard_ns());
            }
            while let Some(post) = self.mailbox.next() {
                busy = true;
                if matches!(post, Post::Stop) && stop_by.is_none() {
                    stop_by = Some(now + STOP_LIMIT_NS);
                }
                self.take(post);
            }
            busy |= self.core.reap();
            let machines = &mut self.machines;
            busy |= (self.frontend).poll(&mut self.core, &mut |core| machines.look(core));
            if rest > 0 && self.core.next_machine_done_is_none() && !self.core.has_ready() {
                rest -= 1;
            } else if self.machines.poll(&mut self.core) {
                busy = true;
                rest = REST_TURNS;
            }
            while self.core.begin_throttled() > 0 {
                busy = true;
                self.machines.look(&mut self.core);
            }
            busy |= self.core.carry_out(busy);
            busy |= self.core.submit();
            self.send_upcalls();
            if ticks {
                tick_at = now + TICK_NS;
                self.core.tick();
                self.frontend.tick(&mut self.core);
                self.machines.tick(&mut self.core);
                if self.core.has_waiting() || self.frontend.has_reserving() {
                    self.mailbox.wake_control();
                }
                self.core.record().last_turn_ns.store(now, Relaxed);
            }
            if let Some(limit) = stop_by
                && (now >= limit
                    || self.core.busy_ios() == 0
                        && self.core.may_leave()
                        && self.frontend.connections() == 0
                        && self.machines.count() == 0)
            {
                break;
            }
            was_busy = busy;
            if busy {
                bump(&self.core.record().busy_turns, 1);
                if now >= look_at_ns {
                    let from_ns = monotonic_ns();
                    self.look_at_sockets(&mut events, &mut keys);
                    look_at_ns = next_look_ns(from_ns, monotonic_ns());
                }
                continue;
            }
            self.core.is_idle();
            // A machine that is asked to ring for what it has would pay more for it.
            let sleeps_at_once = self.core.waits_for_devices() && self.machines.count() == 0;
            if now - idle_since < spin.limit_ns() && !sleeps_at_once
                || self.core.must_turn()
                || !self.frontend.is_idle()
                || !self.machines.is_idle()
                || !self.frontend.arm(&mut self.core)
                || !self.machines.arm(&mut self.core)
            {
                if turn.is_multiple_of(8) {
                    self.look_at_sockets(&mut events, &mut keys);
                }
                continue;
            }
            let trim = *trim_at.get_or_insert(now + TRIM_NS);
            if now >= trim {
                // A little at a time: nobody is to wait for it.
                trim_at = self.core.staging.trim().then_some(now + TRIM_STEP_NS);
            }
            let window_ends = self.core.window_ends_ns();
            let slept = self.sleep(now, stop_by.is_some(), trim_at);
            if slept {
                // Most often it is a machine that rang. All that comes before it is answered is cold by now.
                // Windows have ended meanwhile: who comes now finds what one gives.
                now = self.core.begin_turn();
                was_busy = self.machines.poll(&mut self.core);
                bump(&self.core.record().busy_turns, u64::from(was_busy));
            }
            self.look_at_sockets(&mut events, &mut keys);
            let woke = self.core.begin_turn();
            // A window's end is no host that asks anew: the pause goes on.
            if !slept || window_ends.is_none_or(|ends| woke < ends) {
                let paused_since = std::mem::replace(&mut idle_since, woke);
                if slept && !sleeps_at_once {
                    spin.paused(idle_since - paused_since);
                }
            }
        }
        self.core.upcall(Upcall::Stopped);
        self.send_upcalls();
    }

    /// Sleeps until there is something to do. False if there was already.
    fn sleep(&mut self, now: u64, stopping: bool, trim_at: Option<u64>) -> bool {
        let mut until = now + MAX_SLEEP_NS;
        if stopping || self.core.has_waiting() || self.machines.is_draining() {
            until = now + TICK_NS;
        }
        if self.frontend.must_retry() {
            // Whatever gives memory or room back wakes us; that is not to be the only hope.
            until = now + RETRY_NS;
        }
        if self.machines.must_retry() {
            until = until.min(now + vm::RETRY_NS);
        }
        let deadlines = [
            self.frontend.next_deadline_ns(),
            self.machines.next_deadline_ns(),
        ];
        if let Some(deadline) = deadlines.into_iter().flatten().min() {
            until = until.min(deadline.max(now + 1_000_000));
        }
        if let Some(window_ends) = self.core.window_ends_ns() {
            until = until.min(window_ends);
        }
        if let Some(trim) = trim_at {
            until = until.min(trim);
        }
        let core = &self.core;
        if !self.mailbox.fall_asleep(|| core.nothing_from_others()) {
            return false;
        }
        let record = self.core.record();
        bump(&record.sleeps, 1);
        record.asleep.store(1, Relaxed);
        self.core.sleep(
            &*self.epoll,
            Duration::from_nanos(until.saturating_sub(now)),
        );
        self.core.record().asleep.store(0, Relaxed);
        self.mailbox.awake();
        true
    }

    fn look_at_sockets(&mut self, events: &mut Vec<epoll::Event>, keys: &mut Vec<u64>) {
        events.clear();
        keys.clear();
        let none = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let _ = epoll::wait(&*self.epoll, spare_capacity(events), Some(&none));
        keys.extend(
            events
                .iter()
                .map(|e| e.data.u64())
                .filter(|k| *k != WAKE_KEY),
        );
        if !keys.is_empty() {
            self.frontend.sockets_ready(keys);
            self.machines.ready(&mut self.core, keys);
        }
    }

    fn send_upcalls(&mut self) {
        let mut sent = false;
        while let Some(upcall) = self.core.next_upcall() {
            if let Err(upcall) = self.mailbox.send(upcall) {
                self.core.unsend(upcall);
                break;
            }
            sent = true;
        }
        if sent {
            self.mailbox.wake_control();
        }
    }

    fn take(&mut self, post: Post) {
        let core = &mut self.core;
        core.blame_nobody();
        match post {
            Post::Device(served) => core.set_device(served),
            Post::Ports(ports) => self.frontend.set_ports(core, ports),
            Post::Figures(volume, figures) => {
                core.set_figures(volume, figures);
                self.frontend.volume_changed(core, volume);
            }
            Post::Admission(admission) => core.set_admission(admission),
            Post::NewTenant(tenant) => core.begin_tenant(tenant),
            Post::Budget(tenant, budget, guaranteed) => {
                core.set_budget(tenant, &budget, guaranteed);
            }
            Post::Share(volume, share) => {
                core.set_share(volume, share);
                self.frontend.shares_changed(core);
            }
            Post::Fenced(device) => core.fenced(device),
            Post::Expect(device, expected) => core.expect(device, expected),
            Post::Lane(lane, request) => {
                let export = lane.export.export;
                core.set_lane(*lane);
                self.frontend.shares_changed(core);
                let at_devices = self.frontend.export_changed(core, export);
                self.machines.export_changed(core, export);
                core.upcall(Upcall::ExportSettled {
                    request,
                    at_devices,
                });
            }
            Post::RemoveLane(lane, export, request) => {
                let at_devices = self.frontend.export_removed(core, export)
                    + self.machines.export_removed(core, export);
                core.remove_lane(lane);
                core.upcall(Upcall::ExportSettled {
                    request,
                    at_devices,
                });
            }
            Post::Volume(volume) => {
                core.set_volume(&volume);
                for export in core.exports_of(volume.id()) {
                    self.frontend.export_changed(core, export);
                    self.machines.export_changed(core, export);
                }
            }
            Post::Granted(volume, range) => core.granted(volume, range),
            Post::FaultFailed(volume, range, write, reason) => {
                core.fault_failed(volume, range, write, reason);
            }
            Post::Revoke {
                revoke,
                volume,
                range,
                keep,
            } => core.revoke(revoke, volume, range, keep),
            Post::Abandon(revoke) => core.abandon(revoke),
            Post::Settle(job, device) => core.settle(job, device),
            Post::Committed(volume) => core.committed(volume),
            Post::CommitFailed(volume, sequence) => core.commit_failed(volume, sequence),
            Post::ReleaseDone(io, generation, extents) => {
                core.release_done(io, generation, extents);
            }
            Post::ReleaseFailed(io, generation) => core.release_failed(io, generation),
            Post::ReleaseAbandoned(io, generation) => core.release_abandoned(io, generation),
            Post::Job(job, work) => core.start_job(job, work),
            Post::Connection(new) => self.frontend.adopt(core, *new),
            Post::Inherit(mut part) => {
                let machines = std::mem::take(&mut part.machines);
                self.frontend.inherit(core, *part);
                for machine in machines {
                    self.machines.adopt(core, machine);
                }
            }
            Post::Machine(new) => self.machines.adopt(core, *new),
            Post::Deposited(socket, last, kept) => self.machines.deposited(socket, last, kept),
            Post::Reservations(volume, state) => {
                let status = Status::RESERVATION_CONFLICT.with_dnr();
                (self.frontend).set_reservations(core, volume, &state, status);
            }
            Post::Reserved(token, volume, status, state) => {
                self.frontend.reserved(core, token, volume, status, &state);
            }
            Post::Spread(spread) => core.set_spread(spread),
            Post::DiscoveryChanged => self.frontend.discovery_changed(),
            Post::Stop => {
                core.be_quiet();
                self.frontend.close_all(core);
                self.machines.close_all(core);
            }
        }
    }
}

/// When who was quiet is looked at again, after a look that took so long.
fn next_look_ns(from_ns: u64, to_ns: u64) -> u64 {
    let took_ns = to_ns.saturating_sub(from_ns);
    to_ns + (LOOKS_APART.saturating_mul(took_ns)).clamp(LOOK_NS, MAX_LOOK_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_at_who_was_quiet_are_a_sixteenth_of_the_time_at_most() {
        // A thousandth of the interval, or so.
        assert_eq!(next_look_ns(1000, 1500), 1500 + LOOK_NS);
        for took_ns in [10_000, 300_000, 1_000_000_000] {
            let apart_ns = next_look_ns(5000, 5000 + took_ns) - (5000 + took_ns);
            assert_eq!(apart_ns, (16 * took_ns).min(MAX_LOOK_NS), "{took_ns}");
        }
    }
}
