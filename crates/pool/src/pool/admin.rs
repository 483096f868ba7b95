//! Administration: tenants, volumes, exports, budgets, and hosts' settings.
//!
//! Each operation validates before it changes anything, and is durable with the open batch. The
//! caller closes an export before it is deleted.
//!
//! **Not here:** extents (`faults`), devices and settings (`devices`).

use super::{
    Pool,
    budgets::{self, of_tenant, of_volume},
    exports::{hosts_bytes, new_nqn, record_bytes},
    tenants::check_name,
};
use crate::{
    error::{PoolError, Result},
    journal::{Journal, batch::Table},
    records::{
        ExportId, ExportRecord, Layering, NewExport, PoolInfo, TenantId, TenantRecord, VolumeRecord,
    },
    volumes::faults::Released,
};
use forebay_device::size::format_bytes;
use forebay_nvme::reservation::Reservations;
use forebay_qos::stated_budget::Stated;
use forebay_xlate::boundary::message::{PathState, ReserveToken};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::collections::BTreeSet;
use uuid::Uuid;

/// The largest volume, in bytes.
pub const MAX_VOLUME_BYTES: u64 = 64 << 40;
/// Rough bound of a catalog record without hosts.
pub(super) const RECORD_BYTES: u64 = 512;

/// A volume to be made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewVolume {
    /// Its tenant's name.
    pub tenant: String,
    /// Its name, unique within the tenant.
    pub name: String,
    /// Its size in bytes, a multiple of the block.
    pub size_bytes: u64,
    /// Its block, 512 or 4096; `None` for the smallest that the devices allow.
    pub block_bytes: Option<u32>,
    /// Its space reservation in bytes.
    pub reserved_bytes: u64,
}

pub(super) fn check_size(size_bytes: u64, block_bytes: u32) -> Result<()> {
    if size_bytes == 0 {
        return Err(PoolError::invalid(format!(
            "a volume of 0 bytes: the minimum is one block, {block_bytes} bytes"
        )));
    }
    if !size_bytes.is_multiple_of(u64::from(block_bytes)) {
        return Err(PoolError::invalid(format!(
            "a volume of {size_bytes} bytes: the size must be a multiple of its block size, {block_bytes}"
        )));
    }
    if size_bytes > MAX_VOLUME_BYTES {
        return Err(PoolError::invalid(format!(
            "a volume of {size_bytes} bytes: the maximum is {} ({MAX_VOLUME_BYTES} bytes)",
            format_bytes(MAX_VOLUME_BYTES)
        )));
    }
    Ok(())
}

pub(super) fn new_id(info: &mut PoolInfo, journal: &mut Journal) -> u64 {
    let id = info.next_id;
    info.next_id += 1;
    journal.touch(Table::Meta, 0, 0);
    id
}

impl Pool {
    /// Adds a tenant.
    pub fn create_tenant(&mut self, name: &str, now_s: u64) -> Result<TenantId> {
        self.tenants.check_new(name)?;
        self.admit(RECORD_BYTES)?;
        let id = TenantId(new_id(&mut self.info, &mut self.journal));
        let record = TenantRecord {
            id,
            name: name.to_owned(),
            created_s: now_s,
        };
        self.tenants.insert(&mut self.journal, record);
        Ok(id)
    }

    /// Removes a tenant without volumes.
    pub fn delete_tenant(&mut self, name: &str) -> Result<()> {
        let id = self.tenants.named(name)?.id;
        let volumes = self.volumes.of_tenant(id).count();
        if volumes > 0 {
            return Err(PoolError::in_use(format!(
                "tenant {name:?} has {volumes} volumes: delete them first"
            )));
        }
        self.tenants.remove(&mut self.journal, id);
        self.budgets.forget(&mut self.journal, of_tenant(id));
        Ok(())
    }

    /// A volume by its tenant's and its own name.
    pub fn volume_by_name(&self, tenant: &str, name: &str) -> Result<&VolumeRecord> {
        let id = self.tenants.named(tenant)?.id;
        self.volumes
            .names
            .get(&(id, name.to_owned()))
            .and_then(|id| self.volumes.by_id.get(id))
            .map(|volume| &volume.record)
            .ok_or_else(|| {
                PoolError::not_found(format!("tenant {tenant:?} has no volume {name:?}"))
            })
    }

    /// Adds a thin volume.
    pub fn create_volume(&mut self, new: &NewVolume, now_s: u64) -> Result<VolumeId> {
        check_name("volume", &new.name)?;
        let tenant = self.tenants.named(&new.tenant)?.id;
        if self.volumes.names.contains_key(&(tenant, new.name.clone())) {
            return Err(PoolError::exists(format!(
                "tenant {:?} already has a volume {:?}",
                new.tenant, new.name
            )));
        }
        let smallest = self
            .devices
            .iter()
            .map(|device| device.block_bytes)
            .max()
            .unwrap_or(512);
        let block_bytes = new.block_bytes.unwrap_or(smallest);
        if !matches!(block_bytes, 512 | 4096) {
            return Err(PoolError::invalid(format!(
                "a block of {block_bytes} bytes: a volume's block is 512 or 4096 bytes"
            )));
        }
        if block_bytes < smallest {
            return Err(PoolError::invalid(format!(
                "a block of {block_bytes} bytes: the pool's devices have blocks of {smallest}, use that size"
            )));
        }
        check_size(new.size_bytes, block_bytes)?;
        self.admit(RECORD_BYTES)?;
        if new.reserved_bytes > 0 {
            self.ready()?;
        }
        self.volumes.make_room_for_reservation(
            &mut self.allocator,
            &mut self.journal,
            None,
            new.reserved_bytes,
            new.size_bytes,
        )?;
        let uuid = Uuid::new_v4();
        let id = VolumeId(new_id(&mut self.info, &mut self.journal));
        self.volumes.insert(VolumeRecord {
            id,
            uuid,
            tenant,
            name: new.name.clone(),
            size_bytes: new.size_bytes,
            block_bytes,
            reserved_bytes: new.reserved_bytes,
            created_s: now_s,
            layering: Layering::default(),
        });
        self.journal.touch(Table::Volumes, id.0, 0);
        Ok(id)
    }

    /// Grows a volume. The caller tells hosts once it is durable.
    pub fn grow_volume(&mut self, volume: VolumeId, size_bytes: u64) -> Result<()> {
        self.volumes.writable(volume)?;
        let record = &mut self.volumes.get_mut(volume)?.record;
        if size_bytes < record.size_bytes {
            return Err(PoolError::invalid(format!(
                "volume {:?} already has {} and can only grow",
                record.name,
                format_bytes(record.size_bytes)
            )));
        }
        check_size(size_bytes, record.block_bytes)?;
        record.size_bytes = size_bytes;
        self.volumes.settle_account(volume);
        self.journal.touch(Table::Volumes, volume.0, 0);
        Ok(())
    }

    /// Removes a volume's name, its reservation and some extents in one transaction;
    /// [`Pool::delete_more`] frees the rest. Extents become dirty. Every grant must be revoked and
    /// drained before. Extents on `hanging` devices are quarantined, as a write may be in flight.
    pub fn delete_volume(
        &mut self,
        volume: VolumeId,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        self.ready()?;
        let record = self.volumes.record(volume)?;
        if self.exports.shows(volume) {
            return Err(PoolError::in_use(format!(
                "volume {:?} is exported: delete the export first",
                record.name
            )));
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        let released = self.volumes.delete(allocator, journal, volume, hanging)?;
        self.hosts.forget(journal, volume);
        self.budgets.forget(journal, of_volume(volume));
        self.images.forget(journal, volume);
        Ok(released)
    }

    /// Frees more extents of deleted volumes: dirty once the open batch is durable. Repeat, with
    /// commits, until none is left.
    pub fn delete_more(&mut self) -> Result<Released> {
        self.ready()?;
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        Ok(self.volumes.delete_more(allocator, journal))
    }

    /// The number of extents that [`Pool::delete_volume`] and [`Pool::delete_more`] free at once.
    pub fn set_delete_slice(&mut self, extents: u64) {
        self.volumes.delete_slice = extents;
    }

    /// Exports a volume to hosts or a VM.
    pub fn create_export_as(
        &mut self,
        volume: VolumeId,
        new: NewExport,
        now_s: u64,
    ) -> Result<ExportId> {
        let record = self.volumes.record(volume)?;
        let nqn = match self.exports.first_of(volume) {
            // A host refuses one namespace in two subsystems.
            Some(other) => other.nqn.clone(),
            None => {
                let tenant = self.tenants.get(record.tenant)?;
                new_nqn(self.info.uuid, tenant, record, new.node.as_deref())?
            }
        };
        self.exports.check_new(record, &new)?;
        self.admit(RECORD_BYTES + record_bytes(&new))?;
        let id = ExportId(new_id(&mut self.info, &mut self.journal));
        let export = ExportRecord {
            id,
            volume,
            nqn,
            hosts: new.hosts,
            any_host: new.any_host,
            created_s: now_s,
            frontend: new.frontend,
            socket: new.socket,
            socket_owner: new.socket_owner,
            shared: new.shared,
        };
        self.exports.insert(&mut self.journal, export, new.function);
        Ok(id)
    }

    /// Changes the hosts of an export; an empty list is valid.
    pub fn set_export_hosts(
        &mut self,
        export: ExportId,
        hosts: Vec<String>,
        any_host: bool,
    ) -> Result<()> {
        self.exports.check_hosts(export, &hosts)?;
        self.admit(hosts_bytes(&hosts))?;
        self.exports
            .set_hosts(&mut self.journal, export, hosts, any_host);
        Ok(())
    }

    /// Removes an export. The caller must disconnect its hosts.
    pub fn delete_export(&mut self, export: ExportId) -> Result<()> {
        self.exports.remove(&mut self.journal, export)
    }

    /// Sets or removes a tenant's budget; `false` if nothing changes.
    pub fn set_tenant_budget(&mut self, tenant: TenantId, stated: Option<Stated>) -> Result<bool> {
        self.tenants.get(tenant)?;
        let (key, budget) = (of_tenant(tenant), budgets::stated_budget(stated)?);
        if !self.budgets.differs(key, budget.as_ref(), stated) {
            return Ok(false);
        }
        self.budgets
            .check_tenant(&self.volumes, tenant, budget.as_ref())?;
        if budget.is_some() {
            self.admit(budgets::RECORD_BYTES)?;
        }
        self.budgets.set(&mut self.journal, key, budget, stated);
        Ok(true)
    }

    /// Sets or removes a volume's budget within its tenant's; `false` if nothing changes.
    pub fn set_volume_budget(&mut self, volume: VolumeId, stated: Option<Stated>) -> Result<bool> {
        let tenant = self.volumes.record(volume)?.tenant;
        let (key, budget) = (of_volume(volume), budgets::stated_budget(stated)?);
        if !self.budgets.differs(key, budget.as_ref(), stated) {
            return Ok(false);
        }
        self.budgets
            .check_volume(&self.volumes, tenant, volume, budget.as_ref())?;
        if budget.is_some() {
            self.admit(budgets::RECORD_BYTES)?;
        }
        self.budgets.set(&mut self.journal, key, budget, stated);
        Ok(true)
    }

    /// Records a volume's reservations and the command that changed them.
    pub fn set_host_reservations(
        &mut self,
        volume: VolumeId,
        state: Reservations,
        by: ReserveToken,
    ) -> Result<()> {
        self.volumes.record(volume)?;
        let record = self.hosts.changed(volume, state, by);
        self.admit(self.hosts.grows(volume, &record))?;
        self.hosts.set(&mut self.journal, volume, record);
        Ok(())
    }

    /// After a reboot: drops registrations that don't persist. Returns their volumes.
    pub fn lose_host_reservations(&mut self) -> Vec<VolumeId> {
        self.hosts.lose_reservations(&mut self.journal)
    }

    /// Sets and numbers the ports; forgets former ones if there are too many. `true` if anything
    /// changed.
    pub fn set_ports(&mut self, addresses: &BTreeSet<String>) -> Result<bool> {
        self.hosts.set_ports(&mut self.journal, addresses)
    }

    /// Sets a port's ANA state; `false` if nothing changes.
    pub fn set_port_ana(&mut self, address: &str, ana: PathState) -> Result<bool> {
        self.hosts.set_port_ana(&mut self.journal, address, ana)
    }
}
