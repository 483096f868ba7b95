//! Controller state for a successor, copied as bytes into the state region.
//!
//! No padding or pointers; the region's header has the layout's version. Error log entries are not
//! included.

use super::events::{EVENT_ALL, REQUEST_ABORTED};
use super::{ControllerConfig, MAX_EVENT_REQUESTS};
use crate::{Nqn, register::Csts};
use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A controller's changing state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ControllerState {
    /// Host NQN, zero-terminated.
    pub hostnqn: [u8; 256],
    /// Host Identifier.
    pub hostid: [u8; 16],
    /// Start of the keep alive timer, on the clock of `now_ns`.
    pub keep_alive_from_ns: u64,
    /// Changed namespaces not yet read by the host: bit n is NSID n + 1.
    pub changed_namespaces: u64,
    /// The subset already shown to the host.
    pub changed_reported: u64,
    /// Errors over the controller's life.
    pub error_count: u64,
    /// Discovery generation at the last header read.
    pub discovery_generation_seen: u64,
    /// Reservation notifications ever logged (Base 2.0, 5.16.1.24: Log Page Count).
    pub reservation_count: u64,
    /// Connected I/O queues: bit n is queue n + 1.
    pub io_queues: [u64; 2],
    /// Controller configuration.
    pub cc: u32,
    /// Controller status.
    pub csts: u32,
    /// Keep Alive Timeout, rounded up; 0: none.
    pub kato_ms: u32,
    /// Asynchronous event configuration.
    pub async_event_config: u32,
    /// Arbitration feature.
    pub arbitration: u32,
    /// Last reservation notice processed.
    pub reservation_seen: u32,
    /// Controller identifier.
    pub cntlid: u16,
    /// I/O queues that the host may connect.
    pub granted_io_queues: u16,
    /// Time Limited Error Recovery.
    pub error_recovery: u16,
    /// Write Atomicity Normal.
    pub write_atomicity: u16,
    /// Over temperature threshold.
    pub temperature_over: u16,
    /// Under temperature threshold.
    pub temperature_under: u16,
    /// Identifiers of Asynchronous Event Requests.
    pub event_cids: [u16; MAX_EVENT_REQUESTS],
    /// State of each request: 0 none, 1 waiting, 2 aborted.
    pub event_slots: [u8; MAX_EVENT_REQUESTS],
    /// Events waiting for a request.
    pub events_pending: u8,
    /// Reported events whose log page is unread.
    pub events_masked: u8,
    /// Advanced Command Retry Enable.
    pub acre: u8,
    /// Reservation Notification Mask: bits 3:1.
    pub reservation_mask: u8,
    /// Number of unread reservation notifications.
    pub reservation_queued: u8,
    /// Their types, oldest first.
    pub reservation_queue: [u8; MAX_RESERVATION_NOTICES],
    /// The last ANA state reported, or 0.
    pub ana_reported: u8,
    /// The last critical warnings seen.
    pub warnings_reported: u8,
    /// Interrupt Coalescing: threshold (0's based), time in 100 us.
    pub interrupt_coalescing: [u8; 2],
    /// Coalescing Disable: bit n is vector n.
    pub coalescing_disabled: [u8; 9],
    /// Zero.
    pub reserved: [u8; 39],
}
const _: () = assert!(size_of::<ControllerState>() == 448);

/// Reservation notifications kept; the oldest are dropped.
pub(super) const MAX_RESERVATION_NOTICES: usize = 7;
/// Mask bits of the notification types 1, 2 and 3.
pub(super) const RESERVATION_NOTICES: u8 = 0b1110;
/// The highest reported state, Inaccessible.
const MAX_ANA_STATE: u8 = 3;

/// An invalid recorded state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateError(
    /// The invalid field.
    pub &'static str,
);

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the controller's recorded state has a bad {}", self.0)
    }
}

impl std::error::Error for StateError {}

impl ControllerState {
    /// Validates the state; returns the host's NQN.
    pub(super) fn check(&self, config: &ControllerConfig) -> Result<Nqn, StateError> {
        let ok = |good: bool, field| if good { Ok(()) } else { Err(StateError(field)) };
        let queues = u128::from(self.io_queues[0]) | u128::from(self.io_queues[1]) << 64;
        let known = Csts::new()
            .with_rdy(true)
            .with_cfs(true)
            .with_shst(3)
            .into_bits();
        ok(self.cntlid == config.cntlid, "cntlid")?;
        ok(self.csts & !known == 0, "csts")?;
        ok(
            (1..=config.max_io_queues).contains(&self.granted_io_queues),
            "granted_io_queues",
        )?;
        ok(
            queues
                .checked_shr(self.granted_io_queues.into())
                .unwrap_or(0)
                == 0,
            "io_queues",
        )?;
        ok(
            self.event_slots.iter().all(|&slot| slot <= REQUEST_ABORTED),
            "event_slots",
        )?;
        ok(
            (self.events_pending | self.events_masked) & !EVENT_ALL == 0,
            "events",
        )?;
        ok(
            self.changed_namespaces
                .checked_shr(config.namespaces)
                .unwrap_or(0)
                == 0,
            "changed_namespaces",
        )?;
        ok(
            self.changed_reported & !self.changed_namespaces == 0,
            "changed_reported",
        )?;
        ok(self.acre <= 1, "acre")?;
        ok(
            self.reservation_mask & !RESERVATION_NOTICES == 0,
            "reservation_mask",
        )?;
        let queued = (self.reservation_queue).get(..usize::from(self.reservation_queued));
        let known = |kind: &u8| *kind < 8 && RESERVATION_NOTICES & 1 << kind != 0;
        ok(
            queued.is_some_and(|queued| queued.iter().all(known)),
            "reservation_queue",
        )?;
        ok(self.ana_reported <= MAX_ANA_STATE, "ana_told")?;
        Nqn::host_from_field(&self.hostnqn).map_err(|_| StateError("hostnqn"))
    }
}
