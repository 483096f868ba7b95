//! Get Log Page (Base 2.0, 5.16).
//!
//! Any part can be read. Bytes past the end are zeros; an offset past it is an Invalid Field.

use super::supported::{self, Face};
use super::{AdminEnv, Controller, ControllerConfig, ControllerKind, Firmware, Reply, events};
use crate::fabrics::{DiscoveryLogEntry, DiscoveryLogHeader};
use crate::identify::CSI_NVM;
use crate::log_page::{self, ErrorEntry, FirmwareSlots, SmartHealth};
use crate::{NSID_ALL, Sqe, Status};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromZeros, IntoBytes};

pub(super) const ERROR_ENTRIES: usize = 4;

/// Size of a Discovery record or header.
const RECORD_BYTES: u64 = 1024;

/// An error for the Error Information log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorReport {
    /// Submission queue; FFFFh: no command.
    pub sqid: u16,
    /// Command identifier; FFFFh: no command.
    pub cid: u16,
    /// The command's status.
    pub status: Status,
    /// First block in error.
    pub lba: u64,
    /// Namespace; 0: none.
    pub nsid: u32,
}

impl Default for ErrorReport {
    fn default() -> Self {
        Self {
            sqid: 0xFFFF,
            cid: 0xFFFF,
            status: Status::SUCCESS,
            lba: 0,
            nsid: 0,
        }
    }
}

/// NUMD, 0's based dwords: NUMDL in CDW10 31:16, NUMDU in CDW11 15:0.
pub(super) fn requested_bytes(sqe: &Sqe) -> u64 {
    let dwords = u64::from(sqe.cdw(10) >> 16) | u64::from(sqe.cdw(11) & 0xFFFF) << 16;
    (dwords + 1) * 4
}

/// Copies from `offset`; excess bytes stay unchanged.
pub(super) fn part(page: &[u8], offset: u64, out: &mut [u8]) -> Result<(), Status> {
    let tail = usize::try_from(offset)
        .ok()
        .and_then(|offset| page.get(offset..));
    let tail = tail.ok_or(Status::INVALID_FIELD)?;
    let bytes = tail.len().min(out.len());
    out[..bytes].copy_from_slice(&tail[..bytes]);
    Ok(())
}

impl Controller {
    pub(super) fn get_log_page(
        &mut self,
        sqe: &Sqe,
        out: &mut [u8],
        env: &dyn AdminEnv,
    ) -> Result<Reply, Status> {
        let lid = sqe.cdw(10) as u8;
        let retain = sqe.cdw(10) & 1 << 15 != 0;
        let offset = sqe.cdw64(12);
        let face = self.config.face(env);
        // Not Invalid Log Page (Base 2.0, 5.16).
        if !supported::supports_log(face, lid) {
            return Err(Status::INVALID_FIELD);
        }
        // LPO counts dwords. CDW14 bit 23 (OT) would make it an index, which no page has.
        if !offset.is_multiple_of(4) || sqe.cdw(14) & 1 << 23 != 0 {
            return Err(Status::INVALID_FIELD);
        }
        match lid {
            log_page::SUPPORTED_LOG_PAGES => {
                part(logs_supported(face, env).as_bytes(), offset, out)?;
            }
            log_page::ERROR_INFORMATION => {
                part(self.errors.as_bytes(), offset, out)?;
                if !retain {
                    self.state.clear_event(events::EVENT_DOORBELL_REGISTER);
                    self.state.clear_event(events::EVENT_DOORBELL_VALUE);
                }
            }
            log_page::SMART_HEALTH => {
                // LPA bit 0 is 0: the page is per controller.
                if sqe.nsid() != 0 && sqe.nsid() != NSID_ALL {
                    return Err(Status::INVALID_FIELD);
                }
                part(self.smart(env).as_bytes(), offset, out)?;
                if !retain {
                    self.state.clear_event(events::EVENT_SMART);
                }
            }
            log_page::FIRMWARE_SLOT => {
                part(self.config.firmware_slots(env).as_bytes(), offset, out)?;
            }
            log_page::CHANGED_NAMESPACE_LIST if self.config.kind == ControllerKind::Management => {
                self.changed.read(offset, retain, out)?;
            }
            log_page::CHANGED_NAMESPACE_LIST => self.changed_namespaces(offset, retain, out)?,
            log_page::COMMANDS_SUPPORTED_AND_EFFECTS => {
                // CSI.
                if (sqe.cdw(14) >> 24) as u8 != CSI_NVM {
                    return Err(Status::IO_COMMAND_SET_NOT_SUPPORTED);
                }
                part(commands_supported(face, env).as_bytes(), offset, out)?;
            }
            log_page::FEATURES_SUPPORTED_AND_EFFECTS => {
                part(features_supported(face).as_bytes(), offset, out)?;
            }
            // No NVMe-MI commands are supported.
            log_page::MI_COMMANDS_SUPPORTED_AND_EFFECTS => {
                part(&[0; log_page::MI_COMMANDS_SUPPORTED_BYTES], offset, out)?;
            }
            log_page::ASYMMETRIC_NAMESPACE_ACCESS => {
                self.ana_log(sqe.cdw(10), offset, retain, out, env)?;
            }
            log_page::RESERVATION_NOTIFICATION => {
                self.state.reservation_log(offset, retain, out)?
            }
            log_page::DISCOVERY => self.discovery(offset, retain, out, env)?,
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(Reply::data(out.len()))
    }

    /// Adds an entry to the error log and counts it.
    pub fn record_error(&mut self, report: ErrorReport) {
        self.state.error_count = self.state.error_count.saturating_add(1);
        self.errors.rotate_right(1);
        let entry = &mut self.errors[0];
        *entry = ErrorEntry::new_zeroed();
        entry.error_count = U64::new(self.state.error_count);
        entry.sqid = U16::new(report.sqid);
        entry.cid = U16::new(report.cid);
        entry.status = U16::new(report.status.0 << 1);
        entry.parameter_location = U16::new(0xFFFF);
        entry.lba = U64::new(report.lba);
        entry.nsid = U32::new(report.nsid);
    }

    fn smart(&self, env: &dyn AdminEnv) -> SmartHealth {
        let health = env.health();
        // Thousands of 512 bytes.
        let units = |bytes: u128| U128::new(bytes.div_ceil(512_000));
        let mut page = SmartHealth::new_zeroed();
        let kelvin = health.temperature_kelvin;
        let outside =
            kelvin >= self.state.temperature_over || kelvin <= self.state.temperature_under;
        page.critical_warning = health.critical_warning;
        // 0 is unknown.
        if kelvin != 0 && outside {
            page.critical_warning |= log_page::TEMPERATURE_WARNING;
        }
        page.composite_temperature = U16::new(health.temperature_kelvin);
        page.available_spare = health.available_spare_percent;
        page.available_spare_threshold = health.spare_threshold_percent;
        page.percentage_used = health.percentage_used;
        page.data_units_read = units(health.bytes_read);
        page.data_units_written = units(health.bytes_written);
        page.host_read_commands = U128::new(health.host_reads);
        page.host_write_commands = U128::new(health.host_writes);
        page.controller_busy_minutes = U128::new(health.busy_minutes);
        page.power_cycles = U128::new(health.power_cycles);
        page.power_on_hours = U128::new(health.power_on_hours);
        page.unsafe_shutdowns = U128::new(health.unsafe_shutdowns);
        page.media_errors = U128::new(health.media_errors);
        page.error_log_entries = U128::new(u128::from(self.state.error_count));
        page
    }

    fn changed_namespaces(
        &mut self,
        offset: u64,
        retain: bool,
        out: &mut [u8],
    ) -> Result<(), Status> {
        let mut page = [U32::new(0); log_page::CHANGED_NAMESPACE_LIST_BYTES / 4];
        let changed = self.state.changed_namespaces;
        let list = (1..=self.config.namespaces).filter(|nsid| changed & 1 << (nsid - 1) != 0);
        for (to, nsid) in page.iter_mut().zip(list) {
            *to = U32::new(nsid);
        }
        part(page.as_bytes(), offset, out)?;
        // Hosts may clear Retain with the last piece only. A change after the first must not be
        // lost.
        if offset == 0 {
            self.state.changed_reported = changed;
        }
        if !retain {
            self.state.changed_namespaces_read();
        }
        Ok(())
    }

    /// Read in any pieces. Hosts compare generations before and after; if a piece has vanished,
    /// they must restart.
    fn discovery(
        &mut self,
        offset: u64,
        retain: bool,
        out: &mut [u8],
        env: &dyn AdminEnv,
    ) -> Result<(), Status> {
        let host = self.hostnqn;
        let generation = env.discovery_generation(&host);
        let count = env.discovery_count(&host);
        let total = count.saturating_add(1).saturating_mul(RECORD_BYTES);
        if offset > total {
            return Err(match generation == self.state.discovery_generation_seen {
                true => Status::INVALID_FIELD,
                false => Status::DISCOVER_RESTART,
            });
        }
        let mut at = offset;
        let mut rest = &mut out[..];
        while at < total && !rest.is_empty() {
            let (index, within) = (at / RECORD_BYTES, (at % RECORD_BYTES) as usize);
            let mut record = [0; RECORD_BYTES as usize];
            if index == 0 {
                let mut header = DiscoveryLogHeader::new_zeroed();
                header.genctr = U64::new(generation);
                header.numrec = U64::new(count);
                record.copy_from_slice(header.as_bytes());
            } else if let Some(entry) = env.discovery_entry(&host, index - 1) {
                let entry: &DiscoveryLogEntry = &entry;
                record.copy_from_slice(entry.as_bytes());
            }
            let bytes = (record.len() - within).min(rest.len());
            let (now, later) = rest.split_at_mut(bytes);
            now.copy_from_slice(&record[within..within + bytes]);
            rest = later;
            at += bytes as u64;
        }
        if offset == 0 {
            self.state.discovery_generation_seen = generation;
        }
        // The event stays if the page changed since the first piece.
        if !retain && generation == self.state.discovery_generation_seen {
            self.state.clear_event(events::EVENT_DISCOVERY);
        }
        Ok(())
    }
}

impl ControllerConfig {
    fn firmware_slots(&self, env: &dyn AdminEnv) -> FirmwareSlots {
        let firmware = env.firmware().unwrap_or(Firmware {
            active_slot: 1,
            next_slot: 0,
            revisions: [Some(self.firmware), None],
        });
        let mut page = FirmwareSlots::new_zeroed();
        page.afi = firmware.active_slot & 7 | (firmware.next_slot & 7) << 4;
        for (to, revision) in page.frs.iter_mut().zip(firmware.revisions) {
            *to = revision.unwrap_or_default();
        }
        page
    }
}

/// 256 admin commands, then 256 I/O commands.
fn commands_supported(
    face: Face,
    env: &dyn AdminEnv,
) -> [U32; log_page::COMMANDS_SUPPORTED_BYTES / 4] {
    let mut page = [U32::new(0); log_page::COMMANDS_SUPPORTED_BYTES / 4];
    let descriptor =
        |effects: Option<u32>| U32::new(effects.map_or(0, |e| log_page::SUPPORTED | e));
    for op in 0..=255 {
        page[usize::from(op)] = descriptor(supported::admin_effects(face, op));
        page[256 + usize::from(op)] = descriptor(supported::io_effects(face, op));
    }
    for op in env.vendor_commands() {
        page[usize::from(*op)] = descriptor(Some(log_page::SCOPE_SUBSYSTEM));
    }
    page
}

fn features_supported(face: Face) -> [U32; log_page::FEATURES_SUPPORTED_BYTES / 4] {
    std::array::from_fn(|fid| {
        let scope = supported::feature_scope(face, fid as u8);
        U32::new(scope.map_or(0, |scope| log_page::SUPPORTED | scope))
    })
}

fn logs_supported(
    face: Face,
    env: &dyn AdminEnv,
) -> [U32; log_page::SUPPORTED_LOG_PAGES_BYTES / 4] {
    std::array::from_fn(|lid| {
        let lid = lid as u8;
        let there = supported::supports_log(face, lid) || env.vendor_logs().contains(&lid);
        U32::new(u32::from(there) * log_page::SUPPORTED)
    })
}
