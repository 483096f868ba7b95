//! Keep alive (Base 2.0, 3.9): a deadline as data.
//!
//! Purpose: says when an association has been silent for too long. Does NOT wait: the owner
//! compares [`Controller::deadline_ns`] with its own clock, looks at its input, and calls
//! [`Controller::expire`] with the time from before that look.
//! Traffic Based Keep Alive is not offered, so reactors need not report traffic.

use super::{Controller, ControllerKind, ControllerState, ErrorReport};
use crate::{Sqe, Status, opcode};

/// KAS: the granularity of the timer, in 100 ms (Base 2.0, figure 275).
pub(super) const KAS_100_MS: u16 = 1;

/// How long a host may leave a controller neither enabled nor closed, and how long a Discovery
/// controller without keep alive lives after its last command (Base 2.0, 3.1.2.3: two minutes).
const IDLE_TIMEOUT_NS: u64 = 120_000_000_000;

impl Controller {
    /// When the association ends unless something is heard from the host.
    pub fn deadline_ns(&self) -> Option<u64> {
        if self.config.kind == ControllerKind::Pcie {
            return None;
        }
        let timeout_ns = match (self.ready(), self.state.kato_ms, self.config.kind) {
            (true, 0, ControllerKind::Io | ControllerKind::Pcie) => return None,
            (false, ..) | (true, 0, ControllerKind::Discovery) => IDLE_TIMEOUT_NS,
            (true, kato_ms, _) => u64::from(kato_ms) * 1_000_000,
        };
        Some(self.state.keep_alive_from_ns.saturating_add(timeout_ns))
    }

    /// If the deadline has passed, sets Controller Fatal Status and records the error (Base 2.0,
    /// 3.9.5): then the owner must end the association.
    pub fn expire(&mut self, now_ns: u64) -> bool {
        if self
            .deadline_ns()
            .is_none_or(|deadline_ns| now_ns < deadline_ns)
        {
            return false;
        }
        self.record_error(ErrorReport {
            status: Status::KEEP_ALIVE_TIMER_EXPIRED,
            ..ErrorReport::default()
        });
        self.fail();
        true
    }

    /// The Keep Alive Timeout; 0: there is none.
    pub fn kato_ms(&self) -> u32 {
        self.state.kato_ms
    }

    /// Starts the time anew: what the host says is not looked at, as this side has no room for it.
    pub fn is_not_heard(&mut self, now_ns: u64) {
        self.state.keep_alive(now_ns);
    }

    /// Any command keeps a controller without a keep alive timer from being idle.
    pub(super) fn note_command(&mut self, sqe: &Sqe, now_ns: u64) {
        let timed = self.state.kato_ms != 0 && self.ready();
        if !timed || sqe.opcode() == opcode::admin::KEEP_ALIVE {
            self.state.keep_alive(now_ns);
        }
    }
}

impl ControllerState {
    /// Takes a Keep Alive Timeout, rounded up to the granularity.
    pub(super) fn set_kato_ms(&mut self, kato_ms: u32) {
        let unit = u32::from(KAS_100_MS) * 100;
        self.kato_ms = kato_ms.div_ceil(unit).saturating_mul(unit);
    }

    pub(super) fn keep_alive(&mut self, now_ns: u64) {
        self.keep_alive_from_ns = now_ns;
    }
}
