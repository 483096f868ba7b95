//! Get and Set Features (Base 2.0, 5.15, 5.27).
//!
//! Implements mandatory features and those in use. Nothing is saved: ONCS says so, and a Save bit
//! is refused.

use super::state::RESERVATION_NOTICES;
use super::supported::feature_scope;
use super::{AdminEnv, Controller, ControllerKind, ControllerState, Reply};
use crate::feature::{self, HostBehavior};
use crate::log_page::SCOPE_NAMESPACE;
use crate::reservation::action_of_persistence;
use crate::{NSID_ALL, Sqe, Status};
use zerocopy::FromBytes;

/// CDW10: Save.
const SAVE: u32 = 1 << 31;
/// Host Identifier CDW11: 128-bit identifier.
const EXHID: u32 = 1 << 0;
/// Interrupt Vector Configuration CDW11: Coalescing Disable.
const CD: u32 = 1 << 16;
/// Error Recovery CDW11: Deallocated or Unwritten Logical Block Error Enable.
const DULBE: u32 = 1 << 16;

fn identifier(sqe: &Sqe) -> u8 {
    sqe.cdw(10) as u8
}

pub(super) fn data_bytes(sqe: &Sqe) -> u32 {
    match identifier(sqe) {
        feature::HOST_BEHAVIOR_SUPPORT => size_of::<HostBehavior>() as u32,
        feature::HOST_IDENTIFIER if sqe.cdw(11) & EXHID != 0 => 16,
        feature::HOST_IDENTIFIER => 8,
        _ => 0,
    }
}

/// TMPSEL (19:16) and THSEL (21:20): true for the over threshold of the composite temperature, the
/// only sensor.
fn threshold_over(cdw11: u32, all_sensors: bool) -> Option<bool> {
    let sensor = (cdw11 >> 16) & 0xF;
    match (cdw11 >> 20) & 3 {
        _ if sensor != 0 && !(all_sensors && sensor == 0xF) => None,
        0 => Some(true),
        1 => Some(false),
        _ => None,
    }
}

fn vector_of(cdw11: u32) -> Result<u16, Status> {
    let vector = cdw11 as u16;
    match vector < crate::pcie::VECTORS {
        true => Ok(vector),
        false => Err(Status::INVALID_FIELD),
    }
}

impl Controller {
    /// Whether interrupts of a vector may be coalesced (Base 2.0, 5.27.1.7).
    pub(crate) fn coalesces(&self, vector: u16) -> bool {
        let byte = self.state.coalescing_disabled.get(usize::from(vector / 8));
        byte.is_some_and(|byte| byte & 1 << (vector % 8) == 0)
    }

    pub(super) fn reset_features(&mut self) {
        self.state.async_event_config = 0;
        self.state.arbitration = 0;
        self.state.error_recovery = 0;
        self.state.write_atomicity = 0;
        self.state.temperature_over = u16::MAX;
        self.state.temperature_under = 0;
        self.state.acre = 0;
        self.state.interrupt_coalescing = [0; 2];
        self.state.coalescing_disabled = [0; 9];
        // The default for hosts that do not set it.
        self.state.granted_io_queues = self.config.max_io_queues;
    }

    /// Settable bits of Asynchronous Event Configuration.
    fn async_events(&self) -> u32 {
        feature_events(self.config.kind)
            | match self.config.kind {
                ControllerKind::Io | ControllerKind::Pcie => feature::AEC_SMART_WARNINGS,
                ControllerKind::Discovery | ControllerKind::Management => 0,
            }
    }

    pub(super) fn get_features(
        &self,
        sqe: &Sqe,
        out: &mut [u8],
        env: &dyn AdminEnv,
    ) -> Result<Reply, Status> {
        let (fid, cdw11) = (identifier(sqe), sqe.cdw(11));
        let scope = feature_scope(self.config.face(env), fid).ok_or(Status::INVALID_FIELD)?;
        // Only the current value: Save and Select are unsupported (ONCS bit 4).
        if (sqe.cdw(10) >> 8) & 7 != 0 {
            return Err(Status::INVALID_FIELD);
        }
        if scope == SCOPE_NAMESPACE {
            self.check_feature_nsid(sqe, false, env)?;
        }
        let state = &self.state;
        Ok(Reply::result(match fid {
            feature::ARBITRATION => state.arbitration,
            feature::POWER_MANAGEMENT => 0,
            // Fabrics completions are messages, so none are coalesced.
            feature::INTERRUPT_COALESCING => {
                u32::from(u16::from_le_bytes(state.interrupt_coalescing))
            }
            feature::INTERRUPT_VECTOR_CONFIGURATION => {
                let vector = vector_of(cdw11)?;
                u32::from(vector) | u32::from(!self.coalesces(vector)) << 16
            }
            feature::TEMPERATURE_THRESHOLD => {
                match threshold_over(cdw11, false).ok_or(Status::INVALID_FIELD)? {
                    true => u32::from(state.temperature_over),
                    false => u32::from(state.temperature_under),
                }
            }
            feature::ERROR_RECOVERY => u32::from(state.error_recovery),
            feature::VOLATILE_WRITE_CACHE => 1,
            feature::NUMBER_OF_QUEUES => granted(state.granted_io_queues),
            feature::WRITE_ATOMICITY => u32::from(state.write_atomicity),
            feature::ASYNC_EVENT_CONFIGURATION => state.async_event_config,
            feature::KEEP_ALIVE_TIMER => state.kato_ms,
            feature::RESERVATION_NOTIFICATION_MASK => u32::from(state.reservation_mask),
            feature::RESERVATION_PERSISTENCE => u32::from(env.persistent_reservations()),
            feature::HOST_BEHAVIOR_SUPPORT => {
                *out.first_mut().ok_or(Status::INTERNAL_ERROR)? = state.acre;
                return Ok(Reply::data(out.len()));
            }
            feature::HOST_IDENTIFIER => {
                // Fabrics allows only the 128-bit identifier (Base 2.0, 5.27.1.25).
                if cdw11 & EXHID == 0 {
                    return Err(Status::INVALID_FIELD);
                }
                out.copy_from_slice(&state.hostid);
                return Ok(Reply::data(out.len()));
            }
            _ => return Err(Status::INVALID_FIELD),
        }))
    }

    pub(super) fn set_features(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        env: &dyn AdminEnv,
        now_ns: u64,
    ) -> Result<Reply, Status> {
        let (fid, cdw11) = (identifier(sqe), sqe.cdw(11));
        let scope = feature_scope(self.config.face(env), fid).ok_or(Status::INVALID_FIELD)?;
        if sqe.cdw(10) & SAVE != 0 {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        if scope == SCOPE_NAMESPACE {
            self.check_feature_nsid(sqe, true, env)?;
        } else if sqe.nsid() != 0 && sqe.nsid() != NSID_ALL {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
        }
        match fid {
            feature::ARBITRATION => self.state.arbitration = cdw11,
            // NPSS is 0: only power state 0, and hints have no effect.
            feature::POWER_MANAGEMENT => {
                if cdw11 & 0x1F != 0 {
                    return Err(Status::INVALID_FIELD);
                }
            }
            feature::TEMPERATURE_THRESHOLD => self.state.set_temperature(cdw11)?,
            feature::ERROR_RECOVERY => {
                // NSFEAT excludes this error.
                if cdw11 & DULBE != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.state.error_recovery = cdw11 as u16;
            }
            // Thin volumes always have a write cache: a mapping becomes durable with the next
            // flush.
            feature::VOLATILE_WRITE_CACHE => {
                if cdw11 & 1 == 0 {
                    return Err(Status::FEATURE_NOT_CHANGEABLE);
                }
            }
            feature::INTERRUPT_COALESCING if self.config.kind == ControllerKind::Pcie => {
                self.state.interrupt_coalescing = (cdw11 as u16).to_le_bytes();
            }
            feature::INTERRUPT_COALESCING => return Err(Status::FEATURE_NOT_CHANGEABLE),
            feature::INTERRUPT_VECTOR_CONFIGURATION => self.state.set_vector(cdw11)?,
            feature::RESERVATION_NOTIFICATION_MASK => {
                self.state.reservation_mask = cdw11 as u8 & RESERVATION_NOTICES;
            }
            feature::RESERVATION_PERSISTENCE => {
                return Ok(Reply {
                    action: Some(action_of_persistence(cdw11 & 1 != 0)),
                    ..Reply::default()
                });
            }
            feature::NUMBER_OF_QUEUES => {
                return self.set_number_of_queues(cdw11, env.io_queues_left());
            }
            feature::WRITE_ATOMICITY => self.state.write_atomicity = cdw11 as u16 & 1,
            feature::ASYNC_EVENT_CONFIGURATION => {
                if cdw11 & !self.async_events() != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.state.async_event_config = cdw11;
            }
            feature::KEEP_ALIVE_TIMER => {
                self.state.set_kato_ms(cdw11);
                self.state.keep_alive(now_ns);
            }
            feature::HOST_BEHAVIOR_SUPPORT => self.state.set_host_behavior(data)?,
            // In Fabrics, Connect sets it (Base 2.0, 5.27.1.25).
            feature::HOST_IDENTIFIER => return Err(Status::COMMAND_SEQUENCE_ERROR),
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(Reply::default())
    }

    /// NSQR 15:0, NCQR 31:16, both 0's based.
    fn set_number_of_queues(&mut self, cdw11: u32, left: u16) -> Result<Reply, Status> {
        let (submission, completion) = (cdw11 as u16, (cdw11 >> 16) as u16);
        if submission == u16::MAX || completion == u16::MAX {
            return Err(Status::INVALID_FIELD);
        }
        if self.state.io_queues != [0; 2] {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        // Fabrics queues are pairs, so the smaller number counts. PCIe submission queues may share
        // a completion queue, and more than requested may be granted (Base 2.0, 5.27.1.5).
        let wanted = match self.config.kind {
            ControllerKind::Pcie => submission.max(completion) + 1,
            _ => submission.min(completion) + 1,
        };
        let most = self.config.max_io_queues.min(left.max(1));
        self.state.granted_io_queues = wanted.min(most);
        Ok(Reply::result(granted(self.state.granted_io_queues)))
    }

    /// NSID of namespace features: active, or all for Set Features.
    fn check_feature_nsid(&self, sqe: &Sqe, set: bool, env: &dyn AdminEnv) -> Result<(), Status> {
        if sqe.nsid() == NSID_ALL && set {
            return Ok(());
        }
        // Reservation features have their own status (Base 2.0, 5.27.1.26, 5.27.1.27).
        if sqe.nsid() == NSID_ALL && identifier(sqe) != feature::ERROR_RECOVERY {
            return Err(Status::INVALID_FIELD);
        }
        // The state has one namespace's features.
        match self.config.namespace(sqe.nsid(), env)? {
            Some(_) if sqe.nsid() == super::FEATURES_NSID => Ok(()),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Status to retry a command later, without Do Not Retry.
    ///
    /// Command Interrupted needs Advanced Command Retry Enable (Base 2.0, 3.3.3.2.1) and has delay
    /// CRDT1. Other hosts get Namespace Not Ready.
    pub fn interrupted_status(&self) -> Status {
        if self.state.acre == 0 {
            return Status::NAMESPACE_NOT_READY;
        }
        // CRD 1 selects CRDT1.
        Status(Status::COMMAND_INTERRUPTED.0 | 1 << 11)
    }
}

impl ControllerState {
    /// Base 2.0, 5.27.1.3.
    fn set_temperature(&mut self, cdw11: u32) -> Result<(), Status> {
        let threshold = cdw11 as u16;
        match threshold_over(cdw11, true).ok_or(Status::INVALID_FIELD)? {
            true => self.temperature_over = threshold,
            false => self.temperature_under = threshold,
        }
        Ok(())
    }

    /// Base 2.0, 5.27.1.7.
    fn set_vector(&mut self, cdw11: u32) -> Result<(), Status> {
        let vector = vector_of(cdw11)?;
        let (byte, bit) = (usize::from(vector / 8), 1 << (vector % 8));
        let disabled = &mut self.coalescing_disabled[byte];
        *disabled = match cdw11 & CD {
            0 => *disabled & !bit,
            _ => *disabled | bit,
        };
        Ok(())
    }

    /// Base 2.0, 5.27.1.18.
    fn set_host_behavior(&mut self, data: &[u8]) -> Result<(), Status> {
        let host = HostBehavior::ref_from_bytes(data).map_err(|_| Status::INVALID_FIELD)?;
        if host.acre > 1 {
            return Err(Status::INVALID_FIELD);
        }
        // Other fields concern missing features.
        self.acre = host.acre;
        Ok(())
    }
}

pub(super) fn feature_events(kind: ControllerKind) -> u32 {
    match kind {
        ControllerKind::Io => feature::AEC_NAMESPACE_ATTRIBUTE | feature::AEC_ANA_CHANGE,
        ControllerKind::Pcie => feature::AEC_NAMESPACE_ATTRIBUTE,
        ControllerKind::Discovery => feature::AEC_DISCOVERY_LOG_CHANGE,
        ControllerKind::Management => 0,
    }
}

/// NSQA 15:0, NCQA 31:16, both 0's based.
fn granted(queues: u16) -> u32 {
    u32::from(queues - 1) * 0x1_0001
}
