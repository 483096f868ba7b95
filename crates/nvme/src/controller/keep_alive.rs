//! Keep alive (Base 2.0, 3.9) as a deadline.
//!
//! The owner compares [`Controller::deadline_ns`] with its clock, polls its input, then calls
//! [`Controller::expire`] with the time before the poll. Traffic Based Keep Alive is not offered,
//! so reactors need not report traffic.

use super::{Controller, ControllerKind, ControllerState, ErrorReport};
use crate::{Sqe, Status, opcode};

/// KAS: timer granularity (Base 2.0, figure 275).
pub(super) const KAS_100_MS: u16 = 1;

/// Limit for a controller neither enabled nor closed, and for a Discovery controller without keep
/// alive (Base 2.0, 3.1.2.3: two minutes).
const IDLE_TIMEOUT_NS: u64 = 120_000_000_000;

impl Controller {
    /// The association's deadline if the host stays silent.
    pub fn deadline_ns(&self) -> Option<u64> {
        if !self.config.kind.is_fabrics() {
            return None;
        }
        let discovery = self.config.kind == ControllerKind::Discovery;
        let timeout_ns = match (self.ready(), self.state.kato_ms) {
            (true, 0) if !discovery => return None,
            (false, _) | (true, 0) => IDLE_TIMEOUT_NS,
            (true, kato_ms) => u64::from(kato_ms) * 1_000_000,
        };
        Some(self.state.keep_alive_from_ns.saturating_add(timeout_ns))
    }

    /// After the deadline, sets Controller Fatal Status and records the error (Base 2.0, 3.9.5).
    /// The owner must then end the association.
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

    /// Keep Alive Timeout; 0: none.
    pub fn kato_ms(&self) -> u32 {
        self.state.kato_ms
    }

    /// Restarts the timer while this side lacks room to read the host's input.
    pub fn is_not_heard(&mut self, now_ns: u64) {
        self.state.keep_alive(now_ns);
    }

    /// Without a keep alive timer, any command counts.
    pub(super) fn note_command(&mut self, sqe: &Sqe, now_ns: u64) {
        let timed = self.state.kato_ms != 0 && self.ready();
        if !timed || sqe.opcode() == opcode::admin::KEEP_ALIVE {
            self.state.keep_alive(now_ns);
        }
    }
}

impl ControllerState {
    /// Rounds up to the granularity.
    pub(super) fn set_kato_ms(&mut self, kato_ms: u32) {
        let unit = u32::from(KAS_100_MS) * 100;
        self.kato_ms = kato_ms.div_ceil(unit).saturating_mul(unit);
    }

    pub(super) fn keep_alive(&mut self, now_ns: u64) {
        self.keep_alive_from_ns = now_ns;
    }
}
