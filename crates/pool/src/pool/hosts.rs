//! What hosts have reserved, and the ports that they come by.
//!
//! **Design.** A volume's reservations are a record beside it, that goes with it; there is none where no
//! host ever registered. A command's token is written with what it changed, so that a command which is
//! asked for again, after a death that lost its answer, changes nothing the second time. A port keeps its
//! number and its count of changes for as long as it is configured, and some while after.
//! **Not here:** what a command does to reservations (`forebay_nvme`), sockets.

use crate::{
    error::{PoolError, Result},
    journal::{Journal, batch::Table},
    records::{HostReservations, PortRecord},
};
use forebay_nvme::reservation::Reservations;
use forebay_xlate::boundary::message::{PathState, ReserveToken};
use forebay_xlate::types::VolumeId;
use std::collections::{BTreeMap, BTreeSet};

/// Commands that a volume remembers. Those that may still be asked for again are one for each
/// connection whose answer was lost, at most; one that is forgotten too early is carried out twice.
pub const MAX_RECENT: usize = 128;
/// The most ports at a time.
pub const MAX_PORTS: usize = 64;
/// Ports that are remembered, configured or not.
pub(crate) const PORTS_KEPT: usize = 2 * MAX_PORTS;
/// What a volume's record takes beside a registrant's or a token's bytes, roughly.
const RECORD_BYTES: u64 = 128;
/// A registrant with its notice.
const REGISTRANT_BYTES: u64 = 48;

fn size_bytes(record: &HostReservations) -> u64 {
    let registrants = record.state.registrants().len() as u64;
    RECORD_BYTES + registrants * REGISTRANT_BYTES + record.recent.len() as u64 * 16
}

/// What is known of hosts: what they reserved, and the ports that they come by.
#[derive(Debug, Default)]
pub struct Hosts {
    pub(crate) ports: BTreeMap<u16, PortRecord>,
    pub(crate) reservations: BTreeMap<VolumeId, HostReservations>,
}

impl Hosts {
    /// What hosts have reserved of a volume; nothing if none ever registered.
    pub fn reservations_of(&self, volume: VolumeId) -> Option<&HostReservations> {
        self.reservations.get(&volume)
    }

    /// What hosts have reserved, by volume.
    pub fn all_reservations(&self) -> impl Iterator<Item = (VolumeId, &HostReservations)> {
        self.reservations.iter().map(|(id, record)| (*id, record))
    }

    /// A port that is remembered.
    pub fn port(&self, address: &str) -> Option<&PortRecord> {
        self.ports.values().find(|port| port.address == address)
    }

    /// A volume's record after a command has changed its reservations to this.
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

    /// How many bytes more than now a record takes in the catalog.
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

    /// Drops registrations that are not to outlive a restart of the machine. Gives back whose.
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

    /// Drops what was reserved of a volume that goes.
    pub(super) fn forget(&mut self, journal: &mut Journal, volume: VolumeId) {
        if self.reservations.remove(&volume).is_some() {
            journal.touch(Table::HostReservations, volume.0, 0);
        }
    }

    /// These are the ports: gives a number to those that have none yet. If too many are remembered, those
    /// that are no ports any more are forgotten. True if that changed anything.
    pub(super) fn set_ports(
        &mut self,
        journal: &mut Journal,
        addresses: &BTreeSet<String>,
    ) -> Result<bool> {
        if addresses.len() > MAX_PORTS {
            return Err(PoolError::invalid(format!(
                "{} addresses to listen at: the most is {MAX_PORTS}",
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

    /// Changes how hosts should use a port; false if that is so already.
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
