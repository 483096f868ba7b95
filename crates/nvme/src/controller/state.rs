//! The part of a controller that a successor needs.
//!
//! Purpose: one plain structure, copied as bytes into the state region. Design: native integers,
//! no padding, no pointers, all bits meaningful to this version of the layout alone; the region's
//! header carries the version. Does NOT include the error log's entries.

use super::events::{EVENT_ALL, REQUEST_ABORTED};
use super::{ControllerConfig, MAX_EVENT_REQUESTS};
use crate::{Nqn, register::Csts};
use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Everything that changes in a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ControllerState {
    /// The host's name, zero-terminated.
    pub hostnqn: [u8; 256],
    /// Host Identifier.
    pub hostid: [u8; 16],
    /// When the keep alive timer last started, by the clock that `now_ns` comes from.
    pub keep_alive_from_ns: u64,
    /// Namespaces changed and not yet read by the host: bit n is NSID n + 1.
    pub changed_namespaces: u64,
    /// Those of them that the host has been shown.
    pub changed_reported: u64,
    /// Errors over the life of the controller.
    pub error_count: u64,
    /// Generation of the Discovery log page when its header was last read.
    pub discovery_generation_seen: u64,
    /// Reservation notifications that ever came into the log (Base 2.0, 5.16.1.24: Log Page Count).
    pub reservation_count: u64,
    /// Connected I/O queues: bit n of the whole is queue n + 1.
    pub io_queues: [u64; 2],
    /// Controller Configuration.
    pub cc: u32,
    /// Controller Status.
    pub csts: u32,
    /// Keep Alive Timeout, rounded up to the granularity; 0: none.
    pub kato_ms: u32,
    /// Asynchronous Event Configuration.
    pub async_event_config: u32,
    /// Arbitration feature.
    pub arbitration: u32,
    /// The last of the volume's reservation notices that was looked at.
    pub reservation_seen: u32,
    /// Controller Identifier.
    pub cntlid: u16,
    /// I/O queues that the host may connect.
    pub granted_io_queues: u16,
    /// Error Recovery feature: Time Limited Error Recovery.
    pub error_recovery: u16,
    /// Write Atomicity Normal feature.
    pub write_atomicity: u16,
    /// Temperature Threshold feature, over.
    pub temperature_over: u16,
    /// Temperature Threshold feature, under.
    pub temperature_under: u16,
    /// Command identifiers of Asynchronous Event Requests.
    pub event_cids: [u16; MAX_EVENT_REQUESTS],
    /// What is in each slot of `event_cids`: 0 nothing, 1 waiting, 2 aborted.
    pub event_slots: [u8; MAX_EVENT_REQUESTS],
    /// Events that wait for a request.
    pub events_pending: u8,
    /// Events reported whose log page the host has not read yet.
    pub events_masked: u8,
    /// Host Behavior Support: Advanced Command Retry Enable.
    pub acre: u8,
    /// Reservation Notification Mask feature: bits 3:1.
    pub reservation_mask: u8,
    /// Reservation notifications that the host has not read yet: how many of those below.
    pub reservation_queued: u8,
    /// Their types, the oldest first.
    pub reservation_queue: [u8; MAX_RESERVATION_NOTICES],
    /// The ANA state that the host was told last, or 0.
    pub ana_told: u8,
    /// The Critical Warning bits that were looked at last.
    pub warnings_told: u8,
    /// Interrupt Coalescing feature: the threshold (0's based), and the time in 100 us.
    pub interrupt_coalescing: [u8; 2],
    /// Interrupt Vector Configuration feature: bit n of the whole is vector n, Coalescing Disable.
    pub coalescing_disabled: [u8; 9],
    /// Zero.
    pub reserved: [u8; 39],
}
const _: () = assert!(size_of::<ControllerState>() == 448);

/// Reservation notifications that are kept for a host; later ones push out the oldest.
pub(super) const MAX_RESERVATION_NOTICES: usize = 7;
/// The bits of the Reservation Notification Mask, and the types of its notifications (1, 2, 3) as bits.
pub(super) const RESERVATION_NOTICES: u8 = 0b1110;
/// The largest ANA state that a host is told: Inaccessible.
const MAX_ANA_STATE: u8 = 3;

/// Why a recorded state can't be continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateError(
    /// The field that is wrong.
    pub &'static str,
);

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the controller's recorded state has a bad {}", self.0)
    }
}

impl std::error::Error for StateError {}

impl ControllerState {
    /// Checks what the rest of the state machine relies on; gives the host's name.
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
        ok(self.ana_told <= MAX_ANA_STATE, "ana_told")?;
        Nqn::host_from_field(&self.hostnqn).map_err(|_| StateError("hostnqn"))
    }
}
