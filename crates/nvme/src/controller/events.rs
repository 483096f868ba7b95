//! Asynchronous events (Base 2.0, 5.2) and Abort.
//!
//! Purpose: requests park here, and an event takes one of them. Design: an event is reported once
//! and then masked until the host reads its log page with Retain Asynchronous Event clear, so no
//! change is lost and none is reported twice. Does NOT report errors or vendor events.

use super::{Controller, ControllerState, Reply};
use crate::log_page;
use crate::{Sqe, Status, feature};

/// The Changed Namespace List has something new.
pub(super) const EVENT_NAMESPACE: u8 = 1 << 0;
/// The Discovery log page has changed.
pub(super) const EVENT_DISCOVERY: u8 = 1 << 1;
/// The ANA log page has changed.
pub(super) const EVENT_ANA: u8 = 1 << 2;
/// The Reservation Notification log page has something.
pub(super) const EVENT_RESERVATION: u8 = 1 << 3;
/// There is a new warning in the SMART / Health Information log page.
pub(super) const EVENT_SMART: u8 = 1 << 4;
/// A doorbell of a queue that there isn't was written (PCI Express).
pub(super) const EVENT_DOORBELL_REGISTER: u8 = 1 << 5;
/// A doorbell was given a value that it can't have (PCI Express).
pub(super) const EVENT_DOORBELL_VALUE: u8 = 1 << 6;
/// Each event, which are reported in this order, and its dword 0.
const EVENTS: [(u8, u64); 7] = [
    (EVENT_DOORBELL_REGISTER, INVALID_DOORBELL_REGISTER),
    (EVENT_DOORBELL_VALUE, INVALID_DOORBELL_VALUE),
    (EVENT_ANA, ANA_CHANGE),
    (EVENT_NAMESPACE, NAMESPACE_ATTRIBUTE_CHANGED),
    (EVENT_RESERVATION, RESERVATION_LOG_AVAILABLE),
    (EVENT_SMART, HEALTH_STATUS),
    (EVENT_DISCOVERY, DISCOVERY_LOG_CHANGE),
];
/// All events.
pub(super) const EVENT_ALL: u8 = 0b111_1111;

const REQUEST_FREE: u8 = 0;
const REQUEST_WAITING: u8 = 1;
pub(super) const REQUEST_ABORTED: u8 = 2;

/// The completion of an Asynchronous Event Request that was parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventCompletion {
    /// Command identifier.
    pub cid: u16,
    /// Status field.
    pub status: Status,
    /// Dwords 0 and 1 of the completion (Base 2.0, 5.2.1).
    pub result: u64,
}

/// Dword 0: the type, its information, and the log page to read (Base 2.0, 5.2.1).
const fn event(kind: u8, information: u8, log_page: u8) -> u64 {
    kind as u64 | (information as u64) << 8 | (log_page as u64) << 16
}
/// Write to Invalid Doorbell Register: type 0h, an error (Base 2.0, 5.2.1).
const INVALID_DOORBELL_REGISTER: u64 = event(0x0, 0x00, log_page::ERROR_INFORMATION);
/// Invalid Doorbell Write Value: type 0h, an error (Base 2.0, 5.2.1).
const INVALID_DOORBELL_VALUE: u64 = event(0x0, 0x01, log_page::ERROR_INFORMATION);
/// Type 2h: a Notice.
const fn notice(information: u8, log_page: u8) -> u64 {
    event(0x2, information, log_page)
}
/// Asymmetric Namespace Access Change (Base 2.0, 5.2.1).
const ANA_CHANGE: u64 = notice(0x03, log_page::ASYMMETRIC_NAMESPACE_ACCESS);
/// Reservation Log Page Available: an I/O command specific status, type 6h (Base 2.0, 5.2.1).
const RESERVATION_LOG_AVAILABLE: u64 = event(0x6, 0x00, log_page::RESERVATION_NOTIFICATION);
/// SMART / Health status, type 1h, NVM subsystem Reliability (Base 2.0, 5.2.1).
const HEALTH_STATUS: u64 = event(0x1, 0x00, log_page::SMART_HEALTH);
/// Its information for a spare that is below its threshold.
const SPARE_BELOW_THRESHOLD: u64 = 0x02 << 8;
/// Critical Warning bit 0: the spare is below its threshold.
const WARNING_SPARE: u8 = 1 << 0;
/// Namespace Attribute Changed (Base 2.0, 5.2.1).
const NAMESPACE_ATTRIBUTE_CHANGED: u64 = notice(0x00, log_page::CHANGED_NAMESPACE_LIST);
/// Discovery Log Page Change (Base 2.0, 5.2.1).
const DISCOVERY_LOG_CHANGE: u64 = notice(0xF0, log_page::DISCOVERY);

impl Controller {
    /// The next completion of a parked request, if there is one. Call it until there is none,
    /// after each Admin command and after each report of a change.
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
        if event == EVENT_SMART && self.state.warnings_told & WARNING_SPARE != 0 {
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

    /// A namespace has changed (its size, or its presence): adds it to the Changed Namespace List
    /// and reports it if the host wants that.
    pub fn namespace_changed(&mut self, nsid: u32) {
        if (1..=self.config.namespaces).contains(&nsid) {
            let bit = 1 << (nsid - 1);
            self.state.changed_namespaces |= bit;
            self.state.changed_reported &= !bit;
            self.state
                .raise(EVENT_NAMESPACE, feature::AEC_NAMESPACE_ATTRIBUTE);
        }
    }

    /// The generation of the list that the host may see (Discovery controllers), at the start and
    /// whenever the list may have changed: if it is another than what the host has seen, it is told.
    pub fn discovery_is(&mut self, generation: u64) {
        let seen = &mut self.state.discovery_generation_seen;
        if *seen == 0 {
            *seen = generation;
        } else if *seen != generation {
            self.state
                .raise(EVENT_DISCOVERY, feature::AEC_DISCOVERY_LOG_CHANGE);
        }
    }

    /// The Critical Warning bits of the SMART / Health Information log page: a new one is reported
    /// where the host wants that.
    pub fn warnings_are(&mut self, warnings: u8) {
        let new = warnings & !std::mem::replace(&mut self.state.warnings_told, warnings);
        self.state
            .raise(EVENT_SMART, u32::from(new) & feature::AEC_SMART_WARNINGS);
    }

    /// A doorbell was written that belongs to no queue (`register`), or with a value that it can't have;
    /// it was of this submission or completion queue (PCI Express).
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

    /// Drops a parked request without completing it. A host may give the identifier of a parked
    /// request to another command when it is about to shut the controller down (SPDK's does): it has
    /// forgotten the request, so answering either with an error would only confuse it.
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

    /// Reports an event, if the host has enabled it.
    pub(super) fn raise(&mut self, event: u8, enabled_by: u32) {
        if self.async_event_config & enabled_by != 0 {
            self.raise_always(event);
        }
    }

    /// Reports an event that no host has to enable.
    pub(super) fn raise_always(&mut self, event: u8) {
        if self.events_masked & event == 0 {
            self.events_pending |= event;
        }
    }

    /// The host has read the Changed Namespace List with Retain Asynchronous Event clear. What
    /// changed since the first bytes of it were read is reported again.
    pub(super) fn changed_namespaces_read(&mut self) {
        self.changed_namespaces &= !self.changed_reported;
        self.changed_reported = 0;
        self.clear_event(EVENT_NAMESPACE);
        if self.changed_namespaces != 0 {
            self.raise(EVENT_NAMESPACE, feature::AEC_NAMESPACE_ATTRIBUTE);
        }
    }

    /// The host has read an event's log page with Retain Asynchronous Event clear.
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

    /// Abort (Base 2.0, 5.1). Event requests are the only commands that wait in here; of others
    /// the answer is that they were not aborted (bit 0 of dword 0).
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
