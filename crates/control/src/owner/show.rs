//! What the pool holds, as the API says it.
//!
//! Purpose: records into answers.
//! Design: reads only. What connects is read from the engine's state region.
//! Not here: counters (`stats`).

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use forebay_pool::{ExportRecord, Space, TenantRecord, VolumeRecord};
use forebay_xlate::boundary::region::{MAX_LANES, Region};

use super::push::serial;
use super::session::DeviceState;
use super::{Core, Owner};
use crate::api::error::ApiError;
use crate::api::model::{DeviceInfo, Export, PoolInfo, PoolState, Tenant, Volume};
use crate::devices::api_error;

fn allocated_bytes(core: &Core, volume: &VolumeRecord) -> u64 {
    let extents = core
        .pool
        .volume_space(volume.id)
        .map_or(0, |space| space.mapped + space.reserved);
    extents.saturating_mul(core.pool.info().extent_bytes)
}

fn show_tenant(core: &Core, tenant: &TenantRecord) -> Tenant {
    let mut shown = Tenant {
        name: tenant.name.clone(),
        volumes: 0,
        provisioned_bytes: 0,
        allocated_bytes: 0,
    };
    for volume in core.pool.volumes_of(tenant.id) {
        shown.volumes += 1;
        shown.provisioned_bytes = shown.provisioned_bytes.saturating_add(volume.size_bytes);
        shown.allocated_bytes = shown
            .allocated_bytes
            .saturating_add(allocated_bytes(core, volume));
    }
    shown
}

/// The name of a volume's tenant.
pub(super) fn tenant_name(core: &Core, volume: &VolumeRecord) -> String {
    core.pool
        .tenant_by_id(volume.tenant)
        .map_or_else(|_| String::new(), |t| t.name.clone())
}

fn show_volume(core: &Core, volume: &VolumeRecord) -> Volume {
    Volume {
        tenant: tenant_name(core, volume),
        name: volume.name.clone(),
        id: volume.id.0,
        uuid: volume.uuid.to_string(),
        serial: serial(volume),
        size_bytes: volume.size_bytes,
        block_bytes: volume.block_bytes,
        allocated_bytes: allocated_bytes(core, volume),
        exported: core.pool.export_of(volume.id).is_some(),
    }
}

/// The hosts that are connected to an export. Another process writes the region: every value is
/// bounded before use.
fn connected_hosts(region: &Region, export: u64) -> Vec<String> {
    let lanes = region.lanes();
    let mut hosts: Vec<String> = region
        .controllers()
        .iter()
        .filter(|controller| controller.used.load(Acquire) == 1)
        .filter(|controller| {
            let lane = controller.lane.load(Relaxed);
            lane < MAX_LANES as u64
                && lanes[lane as usize].export.load(Relaxed) == export.wrapping_add(1)
        })
        .map(|controller| {
            let bytes: Vec<u8> = controller
                .host_nqn
                .iter()
                .flat_map(|word| word.load(Relaxed).to_le_bytes())
                .take_while(|byte| *byte != 0)
                .collect();
            String::from_utf8_lossy(&bytes).into_owned()
        })
        .collect();
    hosts.sort_unstable();
    hosts.dedup();
    hosts
}

impl Owner {
    /// All tenants.
    pub(crate) fn tenant_list(&self) -> Vec<Tenant> {
        let core = self.core.borrow();
        let mut tenants: Vec<_> = core.pool.tenants().map(|t| show_tenant(&core, t)).collect();
        tenants.sort_by(|a, b| a.name.cmp(&b.name));
        tenants
    }

    /// One tenant.
    pub(crate) fn tenant_show(&self, name: &str) -> Result<Tenant, ApiError> {
        let core = self.core.borrow();
        let tenant = core.pool.tenant(name).map_err(api_error)?;
        Ok(show_tenant(&core, tenant))
    }

    /// Volumes of one tenant, or of all.
    pub(crate) fn volume_list(&self, tenant: Option<&str>) -> Result<Vec<Volume>, ApiError> {
        let core = self.core.borrow();
        let mut volumes: Vec<Volume> = match tenant {
            Some(name) => {
                let id = core.pool.tenant(name).map_err(api_error)?.id;
                core.pool
                    .volumes_of(id)
                    .map(|volume| show_volume(&core, volume))
                    .collect()
            }
            None => core
                .pool
                .volumes()
                .map(|volume| show_volume(&core, volume))
                .collect(),
        };
        volumes.sort_by(|a, b| (&a.tenant, &a.name).cmp(&(&b.tenant, &b.name)));
        Ok(volumes)
    }

    /// One volume.
    pub(crate) fn volume_show(&self, tenant: &str, name: &str) -> Result<Volume, ApiError> {
        let core = self.core.borrow();
        let volume = core.pool.volume_by_name(tenant, name).map_err(api_error)?;
        Ok(show_volume(&core, volume))
    }

    fn show_export(&self, core: &Core, export: &ExportRecord) -> Option<Export> {
        let volume = core.pool.volume(export.volume).ok()?;
        let session = self.session();
        Some(Export {
            tenant: tenant_name(core, volume),
            volume: volume.name.clone(),
            nqn: export.nqn.clone(),
            nsid: 1,
            hosts: export.hosts.clone(),
            any_host: export.any_host,
            addresses: self.addresses(),
            connected_hosts: session
                .map(|session| connected_hosts(&session.region, export.id.0))
                .unwrap_or_default(),
        })
    }

    /// The addresses of the listeners.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.listeners.borrow().keys().cloned().collect()
    }

    /// All exports.
    pub(crate) fn export_list(&self) -> Vec<Export> {
        let core = self.core.borrow();
        let mut exports: Vec<Export> = core
            .pool
            .exports()
            .filter_map(|export| self.show_export(&core, export))
            .collect();
        exports.sort_by(|a, b| (&a.tenant, &a.volume).cmp(&(&b.tenant, &b.volume)));
        exports
    }

    /// One export.
    pub(crate) fn export_show(&self, tenant: &str, volume: &str) -> Result<Export, ApiError> {
        let id = self.export_id(tenant, volume)?;
        let core = self.core.borrow();
        let export = core.pool.export(id).map_err(api_error)?;
        self.show_export(&core, export)
            .ok_or_else(|| ApiError::internal(format!("{id} has no volume")))
    }

    /// The pool's devices.
    pub(crate) fn device_list(&self) -> Vec<DeviceInfo> {
        let core = self.core.borrow();
        let session = self.session();
        core.pool
            .devices()
            .iter()
            .map(|record| {
                let open = self
                    .devices
                    .iter()
                    .find(|device| device.index == record.index);
                let state = match session.as_ref().and_then(|s| s.device(record.index)) {
                    Some(DeviceState::Failed(error)) => format!("failed: {error}"),
                    Some(DeviceState::Opening) => "opening".to_owned(),
                    Some(DeviceState::Ready) | None => "online".to_owned(),
                };
                let info = open.map(|device| device.store.0.info());
                DeviceInfo {
                    index: record.index.0,
                    spec: open.map_or_else(|| record.spec.clone(), |device| device.spec.clone()),
                    kind: info.map_or_else(String::new, |info| info.kind.to_string()),
                    capacity_bytes: info.map_or(0, |info| info.capacity_bytes),
                    data_offset_bytes: record.data_offset_bytes,
                    block_bytes: record.block_bytes,
                    can_punch: info.is_some_and(|info| info.can_punch),
                    state,
                }
            })
            .collect()
    }

    /// The pool.
    pub(crate) fn pool_show(&self) -> PoolInfo {
        let devices = self.device_list();
        let failed = devices
            .iter()
            .any(|device| device.state.starts_with("failed"));
        let core = self.core.borrow();
        let pool = &core.pool;
        let info = pool.info();
        let space = pool.space();
        let bytes = |extents: u64| extents.saturating_mul(info.extent_bytes);
        PoolInfo {
            name: info.name.clone(),
            uuid: info.uuid.to_string(),
            state: if failed || self.committer.trouble().is_some() {
                PoolState::Degraded
            } else {
                PoolState::Online
            },
            extent_bytes: info.extent_bytes,
            capacity_bytes: bytes(total_extents(&space)),
            clean_bytes: bytes(space.clean),
            reserved_bytes: bytes(space.reserved),
            owned_bytes: bytes(space.owned),
            dirty_bytes: bytes(space.dirty),
            quarantined_bytes: bytes(space.quarantined),
            provisioned_bytes: pool
                .volumes()
                .fold(0, |sum: u64, volume| sum.saturating_add(volume.size_bytes)),
            tenants: pool.tenants().count() as u64,
            volumes: pool.volumes().count() as u64,
            devices,
        }
    }

    /// The pool's name.
    pub(crate) fn pool_name(&self) -> String {
        self.core.borrow().pool.info().name.clone()
    }

    /// Why the catalog can't be written at present.
    pub(crate) fn catalog_trouble(&self) -> Option<String> {
        self.committer.trouble()
    }

    /// Things an operator should know.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(trouble) = self.committer.trouble() {
            warnings.push(format!("the pool's catalog can't be written: {trouble}"));
        }
        if !self.is_open() {
            warnings.push("taking over what an earlier daemon granted is not finished".to_owned());
        }
        for device in self.device_list() {
            if device.state.starts_with("failed") {
                warnings.push(format!("device {}: {}", device.spec, device.state));
            }
        }
        for device in &self.devices {
            for note in &device.store.0.info().notes {
                warnings.push(format!("device {}: {note}", device.spec));
            }
        }
        let core = self.core.borrow();
        let space = core.pool.space();
        let total = total_extents(&space);
        let free = space.clean + space.dirty + space.reserved;
        if total > 0 && free.saturating_mul(20) < total {
            warnings.push(format!(
                "the pool is nearly full: {free} of {total} extents are left"
            ));
        }
        warnings
    }
}

/// All extents of the pool.
pub(super) fn total_extents(space: &Space) -> u64 {
    space.total
}
