//! Offload with `one-to-n`, as in the engine (`offload/mod.rs` and `offload/idle.rs`).
//!
//! A queue's home reactor admits its I/Os. It may offload them to an idle reactor: one that began
//! none of its own for some windows. It picks the one with the fewest of its I/Os, if fewer than
//! its own, while its own processor is not enough. A reactor with new work returns remote
//! operations. Home also hands out idle processors. Offloading is free here.

use super::{Io, SimSpread, Simulation};
use forebay_qos::params::{HELP_FROM, HELP_NS, HELP_UNTIL, IDLE_NS};

/// With fewer I/Os a reactor offloads none, or wakes no sleeping one.
const FEW: usize = 4;
const FEW_ASLEEP: usize = 8;
/// Most I/Os offloaded to one reactor.
const MOST: usize = 128;
/// Most remote operations in a turn.
const TURN: usize = 32;

/// Whether one processor is enough for a reactor's work.
#[derive(Debug)]
pub(super) struct Need {
    help: bool,
    is_known: bool,
    since_ns: u64,
    /// The busy time at `since_ns`.
    busy_ns: u64,
}

impl Need {
    pub(super) const UNKNOWN: Self = Self {
        help: true,
        is_known: false,
        since_ns: 0,
        busy_ns: 0,
    };

    fn poll(&mut self, now: u64, busy_ns: u64, idle: usize) {
        let all_ns = now - self.since_ns;
        if all_ns < HELP_NS {
            return;
        }
        let busy = (busy_ns - self.busy_ns) as f64 / all_ns as f64;
        self.help = match self.help && std::mem::replace(&mut self.is_known, true) {
            true => busy * (1 + idle) as f64 > HELP_UNTIL,
            false => busy > HELP_FROM,
        };
        (self.since_ns, self.busy_ns) = (now, busy_ns);
    }
}

impl Simulation {
    fn is_idle(&self, number: usize) -> bool {
        let begun = self.reactors[number].begun_ns;
        begun.is_none_or(|begun| self.now >= begun + IDLE_NS)
    }

    /// At a window's end, counts idle reactors and hands out their processors.
    pub(super) fn poll_others(&mut self, number: usize) {
        if self.spread != SimSpread::OneToN {
            return;
        }
        let all = self.reactors.len();
        let others = (0..all).filter(|other| *other != number);
        let idle = others.filter(|other| self.is_idle(*other)).count();
        let reactor = &mut self.reactors[number];
        reactor.need.poll(self.now, reactor.busy_ns, idle);
        let processors = all as f32 / (all - idle) as f32;
        reactor.scheduler.set_processors(processors);
    }

    /// The reactor for an admitted I/O, unless home.
    pub(super) fn whose(&self, home: usize, lane: usize) -> Option<usize> {
        let own = self.reactors[home].stand() + usize::from(self.reactors[home].busy);
        if self.spread != SimSpread::OneToN || own < FEW || self.in_lane[lane] < 2 {
            return None;
        }
        if !self.reactors[home].need.help {
            return None;
        }
        let has = |other: usize| self.reactors[home].offloaded[other];
        (0..self.reactors.len())
            .filter(|other| *other != home && self.is_idle(*other))
            .filter(|other| own >= FEW_ASLEEP || self.reactors[*other].busy)
            .filter(|other| has(*other) < own.min(MOST))
            .min_by_key(|other| has(*other))
    }

    pub(super) fn hand_over(&mut self, number: usize, io: u32) {
        let home = self.ios[io as usize].reactor as usize;
        self.reactors[home].offloaded[number] += 1;
        self.reactors[number].remote_operations.push_back(io);
        if !self.reactors[number].busy {
            self.serve(number);
        }
    }

    /// Begins one remote operation, or a turn's part. With work of its own, the reactor returns
    /// them all.
    pub(super) fn take_remote_operations(&mut self, number: usize) {
        if !self.is_idle(number) {
            self.give_back(number);
            return;
        }
        let (most, mut left_ns) = match self.model.turn_ns {
            0 => (1, 1),
            _ => (TURN, self.quantum_of(number)),
        };
        for _ in 0..most {
            if left_ns <= 0 {
                break;
            }
            let Some(io) = self.reactors[number].remote_operations.pop_front() else {
                break;
            };
            let cpu = self.cpu_ns(io);
            left_ns -= cpu as i64;
            let reactor = &mut self.reactors[number];
            reactor.ready.push_back(io);
            reactor.ahead_ns += cpu;
        }
    }

    fn give_back(&mut self, number: usize) {
        while let Some(io) = self.reactors[number].remote_operations.pop_back() {
            let Io { reactor, lane, .. } = self.ios[io as usize];
            let home = reactor as usize;
            self.reactors[home].offloaded[number] -= 1;
            let cpu = self.cpu_ns(io);
            let first = self.is_first(home, lane as usize);
            let reactor = &mut self.reactors[home];
            reactor.ahead_ns += cpu;
            match first {
                true => reactor.first.push_front(io),
                false => reactor.ready.push_front(io),
            }
            if !reactor.busy {
                self.serve(home);
            }
        }
    }
}
