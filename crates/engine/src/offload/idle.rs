//! Which reactors are idle and may help, and which need help.
//!
//! **Design.** A reactor publishes when its own lanes last began something; others read it at a
//! turn's start. After [`IDLE_NS`] it counts as idle, without waking to report that. Busy reactors
//! share the idle ones' processors equally. **Not here:** handing over ([`super`]).

use super::Offload;
use forebay_qos::params::{HELP_FROM, HELP_NS, HELP_UNTIL, IDLE_NS};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Interval at which reactors publish and read this.
pub(crate) const SAY_NS: u64 = 50_000;

const AT_WORK: u64 = u64::MAX;

#[derive(Default)]
#[repr(align(64))]
pub(super) struct Said {
    /// The time until which its own lanes had work.
    until_ns: AtomicU64,
}

impl Said {
    fn is_idle(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.until_ns.load(Relaxed)) >= IDLE_NS
    }
}

#[derive(Default)]
pub(super) struct Need {
    help: bool,
    is_known: bool,
    was_idle: bool,
    turn_ns: u64,
    since_ns: u64,
    idle_ns: u64,
}

impl Need {
    /// Allows help until the need is known.
    pub(super) fn new(now_ns: u64) -> Self {
        Self {
            help: true,
            turn_ns: now_ns,
            since_ns: now_ns,
            ..Self::default()
        }
    }

    #[inline]
    pub(super) fn is_idle(&mut self) {
        self.was_idle = true;
    }

    #[inline]
    fn turn(&mut self, now_ns: u64) {
        if std::mem::take(&mut self.was_idle) {
            self.idle_ns += now_ns.saturating_sub(self.turn_ns);
        }
        self.turn_ns = now_ns;
    }

    fn help(&mut self, now_ns: u64, idle: usize) -> bool {
        let all_ns = now_ns.saturating_sub(self.since_ns);
        if all_ns >= HELP_NS {
            let busy = 1.0 - self.idle_ns as f64 / all_ns as f64;
            self.help = match self.help && std::mem::replace(&mut self.is_known, true) {
                true => busy * (1 + idle) as f64 > HELP_UNTIL,
                false => busy > HELP_FROM,
            };
            (self.since_ns, self.idle_ns) = (now_ns, 0);
        }
        self.help
    }
}

impl Offload {
    /// Whether to look for idle reactors.
    #[inline]
    pub(crate) fn begin_turn(&mut self, now_ns: u64) -> bool {
        self.need.turn(now_ns);
        now_ns.saturating_sub(self.checked_ns) >= SAY_NS
    }

    #[inline]
    pub(crate) fn turn(&mut self, now_ns: u64) {
        self.done_now = 0;
        self.begun_before = std::mem::take(&mut self.begun);
        if self.begun_before > 0 {
            self.begun_ns = now_ns;
            if !std::mem::replace(&mut self.at_work, true) {
                self.said.until_ns.store(AT_WORK, Relaxed);
            }
        } else if self.at_work && now_ns.saturating_sub(self.begun_ns) >= SAY_NS {
            self.rests(now_ns);
        }
    }

    pub(crate) fn rests(&mut self, now_ns: u64) {
        if std::mem::take(&mut self.at_work) {
            self.said.until_ns.store(now_ns, Relaxed);
        }
    }

    /// Whether this reactor has work of its own, so that remote operations go back.
    pub(crate) fn gives_back(&self, now_ns: u64) -> bool {
        self.spreads() && (self.begun > 0 || !self.said.is_idle(now_ns))
    }

    /// Returns the processors that this reactor has at work.
    pub(crate) fn check(&mut self, now_ns: u64) -> f32 {
        self.checked_ns = now_ns;
        let mut idle = 0;
        for peer in &mut self.peers {
            peer.idle = peer.said.is_idle(now_ns);
            idle += usize::from(peer.idle);
        }
        self.is_helped = self.spreads() && self.need.help(now_ns, idle) && idle > 0;
        let all = 1 + self.peers.len();
        match self.spreads() {
            true => all as f32 / (all - idle) as f32,
            false => 1.0,
        }
    }
}
