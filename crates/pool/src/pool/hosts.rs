//! Hosts' reservations and ports.
//!
//! A volume's reservations record has the tokens of commands that changed it. So a command repeated
//! after a crash has no second effect. A port keeps its number and change count while configured,
//! and some time longer.

use crate::{
    error::{PoolError, Result},
    journal::{Journal, batch::Table},
    records::{HostReservations, PortRecord},
};
use forebay_nvme::reservation::Reservations;
use forebay_xlate::boundary::message::{PathState, ReserveToken};
use forebay_xlate::types::VolumeId;
use std::collections::{BTreeMap, BTreeSet};

/// Commands that a volume remembers. Each connection may repeat one after a lost answer; a
/// forgotten one would run twice.
pub const MAX_RECENT: usize = 128;
/// The most configured ports.
pub const MAX_PORTS: usize = 64;
/// Remembered ports, configured or not.
pub(crate) const PORTS_KEPT: usize = 2 * MAX_PORTS;
/// Rough size of a volume's record, without registrants and tokens.
const RECORD_BYTES: u64 = 128;
/// A registrant with its notice.
const REGISTRANT_BYTES: u64 = 48;

fn size_bytes(record: &HostReservations) -> u64 {
    let registrants = record.state.registrants().len() as u64;
    RECORD_BYTES + registrants * REGISTRANT_BYTES + record.recent.len() as u64 * 16
}

/// Hosts' reservations and ports.
#[derive(Debug, Default)]
pub struct Hosts {
    pub(crate) ports: BTreeMap<u16, PortRecord>,
    pub(crate) reservations: BTreeMap<VolumeId, HostReservations>,
}

impl Hosts {
    /// A volume's reservations; `None` if no host ever registered.
    pub fn reservations_of(&self, volume: VolumeId) -> Option<&HostReservations> {
        self.reservations.get(&volume)
    }

    /// All reservations by volume.
    pub fn all_reservations(&self) -> impl Iterator<Item = (VolumeId, &HostReservations)> {
        self.reservations.iter().map(|(id, record)| (*id, record))
    }

    /// A remembered port.
    pub fn port(&self, address: &str) -> Option<&PortRecord> {
        self.ports.values().find(|port| port.address == address)
    }

    pub(super) fn changed(
        &self,
        volume: VolumeId,
        state: Reservations,
        by: ReserveToken,
    ) -> HostReservations {
        let before = self.reservations.get(&volume);
        let mut record = HostReservations {
            state,
            recent: before.map_or_else(Vec::new, |before| before.recent.clone()),
        };
        if record.recent.len() >= MAX_RECENT {
            record.recent.remove(0);
        }
        record.recent.push(by);
        record
    }

    /// By how many bytes a record grows.
    pub(super) fn grows(&self, volume: VolumeId, record: &HostReservations) -> u64 {
        let before = self.reservations.get(&volume).map_or(0, size_bytes);
        size_bytes(record).saturating_sub(before)
    }

    pub(super) fn set(
        &mut self,
        journal: &mut Journal,
        volume: VolumeId,
        record: HostReservations,
    ) {
        self.reservations.insert(volume, record);
        journal.touch(Table::HostReservations, volume.0, 0);
    }

    /// Drops registrations that don't persist over a reboot. Returns their volumes.
    pub(super) fn lose_reservations(&mut self, journal: &mut Journal) -> Vec<VolumeId> {
        let records = self.reservations.iter_mut();
        let lost: Vec<VolumeId> = records
            .filter_map(|(id, record)| record.state.power_loss().then_some(*id))
            .collect();
        for volume in &lost {
            journal.touch(Table::HostReservations, volume.0, 0);
        }
        lost
    }

    pub(super) fn forget(&mut self, journal: &mut Journal, volume: VolumeId) {
        if self.reservations.remove(&volume).is_some() {
            journal.touch(Table::HostReservations, volume.0, 0);
        }
    }

    /// Numbers new ports; forgets former ones if too many are remembered. `true` if anything
    /// changed.
    pub(super) fn set_ports(
        &mut self,
        journal: &mut Journal,
        addresses: &BTreeSet<String>,
    ) -> Result<bool> {
        if addresses.len() > MAX_PORTS {
            return Err(PoolError::invalid(format!(
                "{} addresses to listen at: the maximum is {MAX_PORTS}",
                addresses.len()
            )));
        }
        let mut changed = false;
        for address in addresses {
            if self.port(address).is_some() {
                continue;
            }
            while self.ports.len() >= PORTS_KEPT {
                let gone = |port: &&PortRecord| !addresses.contains(&port.address);
                let Some(id) = self.ports.values().find(gone).map(|port| port.port_id) else {
                    break;
                };
                self.ports.remove(&id);
                journal.touch(Table::Ports, u64::from(id), 0);
            }
            let free = (1..=u16::MAX).find(|id| !self.ports.contains_key(id));
            let Some(port_id) = free else {
                continue;
            };
            let port = PortRecord {
                address: address.clone(),
                port_id,
                ana: PathState::default(),
                changes: 0,
            };
            self.ports.insert(port_id, port);
            journal.touch(Table::Ports, u64::from(port_id), 0);
            changed = true;
        }
        Ok(changed)
    }

    /// `false` if nothing changes.
    pub(super) fn set_port_ana(
        &mut self,
        journal: &mut Journal,
        address: &str,
        ana: PathState,
    ) -> Result<bool> {
        let port = (self.ports.values_mut()).find(|port| port.address == address);
        let port = port.ok_or_else(|| PoolError::not_found(format!("no port at {address}")))?;
        if port.ana == ana {
            return Ok(false);
        }
        port.ana = ana;
        port.changes = port.changes.saturating_add(1);
        let id = u64::from(port.port_id);
        journal.touch(Table::Ports, id, 0);
        Ok(true)
    }
}
