//! Asynchronous events (Base 2.0, 5.2) and Abort.
//!
//! Requests wait here until an event completes one. A reported event is masked until the host reads
//! its log page with Retain Asynchronous Event clear, so none is lost or repeated. Vendor events
//! and other errors are not reported.

use super::{Controller, ControllerKind, ControllerState, Reply};
use crate::log_page;
use crate::{Sqe, Status, feature};

/// The Changed Namespace List has a new entry.
pub(super) const EVENT_NAMESPACE: u8 = 1 << 0;
/// The Discovery log changed.
pub(super) const EVENT_DISCOVERY: u8 = 1 << 1;
/// The ANA log changed.
pub(super) const EVENT_ANA: u8 = 1 << 2;
/// The Reservation Notification log has an entry.
pub(super) const EVENT_RESERVATION: u8 = 1 << 3;
/// A new SMART / Health warning.
pub(super) const EVENT_SMART: u8 = 1 << 4;
/// Doorbell write of a missing queue (PCIe).
pub(super) const EVENT_DOORBELL_REGISTER: u8 = 1 << 5;
/// Invalid doorbell value (PCIe).
pub(super) const EVENT_DOORBELL_VALUE: u8 = 1 << 6;
/// Events in order of reporting, with dword 0.
const EVENTS: [(u8, u64); 7] = [
    (EVENT_DOORBELL_REGISTER, INVALID_DOORBELL_REGISTER),
    (EVENT_DOORBELL_VALUE, INVALID_DOORBELL_VALUE),
    (EVENT_ANA, ANA_CHANGE),
    (EVENT_NAMESPACE, NAMESPACE_ATTRIBUTE_CHANGED),
    (EVENT_RESERVATION, RESERVATION_LOG_AVAILABLE),
    (EVENT_SMART, HEALTH_STATUS),
    (EVENT_DISCOVERY, DISCOVERY_LOG_CHANGE),
];
pub(super) const EVENT_ALL: u8 = 0b111_1111;

const REQUEST_FREE: u8 = 0;
const REQUEST_WAITING: u8 = 1;
pub(super) const REQUEST_ABORTED: u8 = 2;

/// Completion of an Asynchronous Event Request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventCompletion {
    /// Command identifier.
    pub cid: u16,
    /// Status.
    pub status: Status,
    /// Completion dwords 0 and 1 (Base 2.0, 5.2.1).
    pub result: u64,
}

/// Dword 0: type, information, log page (Base 2.0, 5.2.1).
const fn event(kind: u8, information: u8, log_page: u8) -> u64 {
    kind as u64 | (information as u64) << 8 | (log_page as u64) << 16
}
/// Write to Invalid Doorbell Register: type 0h, error.
const INVALID_DOORBELL_REGISTER: u64 = event(0x0, 0x00, log_page::ERROR_INFORMATION);
/// Invalid Doorbell Write Value: type 0h, error.
const INVALID_DOORBELL_VALUE: u64 = event(0x0, 0x01, log_page::ERROR_INFORMATION);
/// Type 2h: notice.
const fn notice(information: u8, log_page: u8) -> u64 {
    event(0x2, information, log_page)
}
const ANA_CHANGE: u64 = notice(0x03, log_page::ASYMMETRIC_NAMESPACE_ACCESS);
/// Type 6h: I/O command set specific.
const RESERVATION_LOG_AVAILABLE: u64 = event(0x6, 0x00, log_page::RESERVATION_NOTIFICATION);
/// Type 1h: SMART / Health, subsystem reliability.
const HEALTH_STATUS: u64 = event(0x1, 0x00, log_page::SMART_HEALTH);
/// Event information: spare below threshold.
const SPARE_BELOW_THRESHOLD: u64 = 0x02 << 8;
/// Critical warning: spare below threshold.
const WARNING_SPARE: u8 = 1 << 0;
const NAMESPACE_ATTRIBUTE_CHANGED: u64 = notice(0x00, log_page::CHANGED_NAMESPACE_LIST);
const DISCOVERY_LOG_CHANGE: u64 = notice(0xF0, log_page::DISCOVERY);

impl Controller {
    /// The next event completion. After each admin command and change, call it until `None`.
    pub fn next_event(&mut self) -> Option<EventCompletion> {
        if let Some(cid) = self.state.take_request(REQUEST_ABORTED) {
            let status = Status::COMMAND_ABORT_REQUESTED;
            return Some(EventCompletion {
                cid,
                status,
                result: 0,
            });
        }
        if !self.ready() {
            return None;
        }
        let pending = self.state.events_pending;
        let (event, mut result) = *EVENTS.iter().find(|(event, _)| pending & event != 0)?;
        let cid = self.state.take_request(REQUEST_WAITING)?;
        if event == EVENT_SMART && self.state.warnings_reported & WARNING_SPARE != 0 {
            result |= SPARE_BELOW_THRESHOLD;
        }
        self.state.events_pending &= !event;
        self.state.events_masked |= event;
        Some(EventCompletion {
            cid,
            status: Status::SUCCESS,
            result,
        })
    }

    /// Lists a namespace whose size, presence or attachment changed, and reports it if enabled.
    pub fn namespace_changed(&mut self, nsid: u32) {
        if self.config.kind == ControllerKind::Management {
            self.changed.add(nsid);
            return;
        }
        if (1..=self.config.namespaces).contains(&nsid) {
            let bit = 1 << (nsid - 1);
            self.state.changed_namespaces |= bit;
            self.state.changed_reported &= !bit;
            self.state
                .raise(EVENT_NAMESPACE, feature::AEC_NAMESPACE_ATTRIBUTE);
        }
    }

    /// Sets the host's current discovery generation. A change since the host's last reading is
    /// reported.
    pub fn discovery_is(&mut self, generation: u64) {
        let seen = &mut self.state.discovery_generation_seen;
        if *seen == 0 {
            *seen = generation;
        } else if *seen != generation {
            self.state
                .raise(EVENT_DISCOVERY, feature::AEC_DISCOVERY_LOG_CHANGE);
        }
    }

    /// Sets the SMART / Health critical warnings. New ones are reported if enabled.
    pub fn warnings_are(&mut self, warnings: u8) {
        let new = warnings & !std::mem::replace(&mut self.state.warnings_reported, warnings);
        self.state
            .raise(EVENT_SMART, u32::from(new) & feature::AEC_SMART_WARNINGS);
    }

    /// Records a doorbell write of a missing queue (`register`) or with an invalid value (PCIe).
    pub fn invalid_doorbell(&mut self, register: bool, qid: u16) {
        self.record_error(super::ErrorReport {
            sqid: qid,
            status: Status::INVALID_FIELD,
            ..super::ErrorReport::default()
        });
        self.state.raise_always(match register {
            true => EVENT_DOORBELL_REGISTER,
            false => EVENT_DOORBELL_VALUE,
        });
    }

    /// Drops a parked request without completion. A host about to shut down may reuse its
    /// identifier, as SPDK does; an error for either command would confuse it.
    pub fn forget_event_request(&mut self, cid: u16) {
        for slot in 0..self.state.event_slots.len() {
            if self.state.event_slots[slot] != REQUEST_FREE && self.state.event_cids[slot] == cid {
                self.state.event_slots[slot] = REQUEST_FREE;
            }
        }
    }
}

impl ControllerState {
    fn take_request(&mut self, what: u8) -> Option<u16> {
        let slot = self.event_slots.iter().position(|&slot| slot == what)?;
        self.event_slots[slot] = REQUEST_FREE;
        Some(self.event_cids[slot])
    }

    /// Reports an event if the host enabled it.
    pub(super) fn raise(&mut self, event: u8, enabled_by: u32) {
        if self.async_event_config & enabled_by != 0 {
            self.raise_always(event);
        }
    }

    /// Reports an event that needs no enabling.
    pub(super) fn raise_always(&mut self, event: u8) {
        if self.events_masked & event == 0 {
            self.events_pending |= event;
        }
    }

    /// The host read the list with Retain Asynchronous Event clear. Changes since its first piece
    /// are reported again.
    pub(super) fn changed_namespaces_read(&mut self) {
        self.changed_namespaces &= !self.changed_reported;
        self.changed_reported = 0;
        self.clear_event(EVENT_NAMESPACE);
        if self.changed_namespaces != 0 {
            self.raise(EVENT_NAMESPACE, feature::AEC_NAMESPACE_ATTRIBUTE);
        }
    }

    /// The host read the event's log page with Retain Asynchronous Event clear.
    pub(super) fn clear_event(&mut self, event: u8) {
        self.events_pending &= !event;
        self.events_masked &= !event;
    }

    pub(super) fn event_request(&mut self, cid: u16) -> Result<(), Status> {
        let free = self
            .event_slots
            .iter()
            .position(|&slot| slot == REQUEST_FREE);
        let slot = free.ok_or(Status::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED)?;
        self.event_cids[slot] = cid;
        self.event_slots[slot] = REQUEST_WAITING;
        Ok(())
    }

    /// Abort (Base 2.0, 5.1). Only event requests can be aborted; others get dword 0 bit 0, "not
    /// aborted".
    pub(super) fn abort(&mut self, sqe: &Sqe) -> Reply {
        let (sqid, cid) = (sqe.cdw(10) as u16, (sqe.cdw(10) >> 16) as u16);
        if sqid == 0 {
            for slot in 0..self.event_slots.len() {
                let waiting = self.event_slots[slot] == REQUEST_WAITING;
                if waiting && self.event_cids[slot] == cid {
                    self.event_slots[slot] = REQUEST_ABORTED;
                    return Reply::result(0);
                }
            }
        }
        Reply::result(1)
    }

    pub(super) fn reset_events(&mut self) {
        self.event_slots = [REQUEST_FREE; super::MAX_EVENT_REQUESTS];
        self.events_pending = 0;
        self.events_masked = 0;
        self.changed_namespaces = 0;
        self.changed_reported = 0;
        self.reset_notices();
    }
}
