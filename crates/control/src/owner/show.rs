//! What the pool holds, as the API says it.
//!
//! Purpose: records into answers.
//! Design: reads only. What connects is read from the engine's state region.
//! Not here: counters (`stats`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use forebay_pool::{DeviceRecord, ExportId, ExportRecord, Space, TenantRecord, VolumeRecord};
use forebay_xlate::boundary::message::Frontend;
use forebay_xlate::boundary::region::Region;
use forebay_xlate::{DeviceIndex, VolumeId};

use crate::api::error::ApiError;
use crate::api::model::{
    CheckProblem, CheckResult, DeviceDetails, DeviceInfo, DeviceState, Export, ExportFrontend,
    MachineClient, Placement, PoolCheck, PoolInfo, PoolState, PoolUpdate, SpaceLevel, Tenant,
    Volume, VolumeExtent, VolumeExtents,
};
use crate::devices::{api_error, settings_of};
use crate::owner::base::Base;
use crate::owner::base::Core;
use crate::owner::budgets::{show_tenant_budget, show_volume_budget};
use crate::owner::export::Exports;
use crate::owner::hosts::Hosts;
use crate::owner::ports::Ports;
use crate::owner::push::serial;
use crate::owner::reserve::show_reservation;
use crate::owner::session::DeviceState as EngineDevice;
use crate::owner::transfers::is_internal;
use crate::owner::volume::Volumes;
use crate::owner::warn::Reports;
use crate::owner::watch::size::state_text as cut_text;

/// How many ranges of a volume one answer holds.
const EXTENTS_AT_ONCE: usize = 4096;

/// Bytes that a volume has mapped and written, as far as is known, and bytes that it has in any way.
fn volume_bytes(core: &Core, volume: &VolumeRecord) -> (u64, u64) {
    let space = core.pool.volume_space(volume.id).unwrap_or_default();
    let bytes = |extents: u64| extents.saturating_mul(core.pool.info().extent_bytes);
    (
        bytes(space.mapped - space.ahead),
        bytes(space.mapped + space.reserved),
    )
}

fn show_tenant(core: &Core, tenant: &TenantRecord) -> Tenant {
    let mut shown = Tenant {
        name: tenant.name.clone(),
        volumes: 0,
        provisioned_bytes: 0,
        allocated_bytes: 0,
        budget: show_tenant_budget(&core.pool, tenant.id),
        credit: None,
    };
    for volume in core.pool.volumes_of(tenant.id) {
        shown.volumes += 1;
        shown.provisioned_bytes = shown.provisioned_bytes.saturating_add(volume.size_bytes);
        shown.allocated_bytes = shown
            .allocated_bytes
            .saturating_add(volume_bytes(core, volume).1);
    }
    shown
}

/// The name of a volume's tenant.
pub(crate) fn tenant_name(core: &Core, volume: &VolumeRecord) -> String {
    core.pool
        .tenant_by_id(volume.tenant)
        .map_or_else(|_| String::new(), |t| t.name.clone())
}

fn show_volume(core: &Core, volume: &VolumeRecord) -> Volume {
    let (mapped_bytes, allocated_bytes) = volume_bytes(core, volume);
    Volume {
        tenant: tenant_name(core, volume),
        name: volume.name.clone(),
        id: volume.id.0,
        uuid: volume.uuid.to_string(),
        serial: serial(volume),
        size_bytes: volume.size_bytes,
        block_bytes: volume.block_bytes,
        allocated_bytes,
        mapped_bytes,
        reserved_bytes: volume.reserved_bytes,
        exported: core.pool.export_of(volume.id).is_some(),
        reservation: show_reservation(core, volume.id),
        budget: show_volume_budget(&core.pool, volume.id),
    }
}

/// The hosts that are connected, by export. Another process writes the region: every value is bounded
/// before use.
pub(crate) fn connected_hosts(region: &Region) -> BTreeMap<u64, BTreeSet<String>> {
    let lanes = region.lanes();
    let key = region.header().key.load(Relaxed);
    let mut hosts: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
    for (controller, index) in region.controllers().iter().zip(0u32..) {
        if controller.used.load(Acquire) != 1 {
            continue;
        }
        let lane = lanes.get(controller.lane.load(Relaxed) as usize);
        let export = lane.and_then(|lane| lane.export.load(Relaxed).checked_sub(1));
        let state = controller.state(key, index, u64::MAX);
        if let (Some(export), Some(state)) = (export, state) {
            // The host's name comes first.
            let bytes: Vec<u8> = state.state[..32]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .take_while(|byte| *byte != 0)
                .collect();
            let name = String::from_utf8_lossy(&bytes).into_owned();
            hosts.entry(export).or_default().insert(name);
        }
    }
    hosts
}

impl Base {
    /// All tenants.
    pub(crate) fn tenant_list(&self) -> Vec<Tenant> {
        let core = self.core.borrow();
        let mut tenants: Vec<_> = core.pool.tenants().map(|t| show_tenant(&core, t)).collect();
        tenants.sort_by(|a, b| a.name.cmp(&b.name));
        tenants
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

    /// What a volume holds, without what was allocated ahead of writes.
    pub(crate) fn mapped_bytes(&self, id: VolumeId) -> u64 {
        let core = self.core.borrow();
        let volume = core.pool.volume(id);
        volume.map_or(0, |volume| volume_bytes(&core, volume).0)
    }

    /// One volume.
    pub(crate) fn volume_show(&self, tenant: &str, name: &str) -> Result<Volume, ApiError> {
        let core = self.core.borrow();
        let volume = core.pool.volume_by_name(tenant, name).map_err(api_error)?;
        Ok(show_volume(&core, volume))
    }

    /// Where a volume may hold data.
    pub(crate) fn volume_extents(
        &self,
        tenant: &str,
        name: &str,
        from_bytes: u64,
    ) -> Result<VolumeExtents, ApiError> {
        let core = self.core.borrow();
        let volume = core.pool.volume_by_name(tenant, name).map_err(api_error)?;
        let mapped = core
            .pool
            .mapped_bytes(volume.id, from_bytes, EXTENTS_AT_ONCE);
        let (ranges, next_bytes) = mapped.map_err(api_error)?;
        let extents = ranges.into_iter().map(|range| VolumeExtent {
            offset_bytes: range.start,
            len_bytes: range.end - range.start,
        });
        Ok(VolumeExtents {
            extents: extents.collect(),
            next_bytes,
        })
    }

    /// Tenant and volume, or the number of one that is gone.
    pub(crate) fn volume_name(&self, core: &Core, id: VolumeId) -> String {
        core.pool.volume(id).map_or_else(
            |_| id.to_string(),
            |volume| format!("{}/{}", tenant_name(core, volume), volume.name),
        )
    }

    /// The volumes with something on a device, as `tenant/volume`.
    pub(crate) fn volumes_on(&self, core: &Core, device: DeviceIndex) -> Vec<String> {
        let volumes = core.pool.volumes_on(device);
        let mut names: Vec<String> = volumes
            .iter()
            .map(|id| self.volume_name(core, *id))
            .collect();
        names.sort_unstable();
        names
    }

    /// The pool's name.
    pub(crate) fn pool_name(&self) -> String {
        self.core.borrow().pool.info().name.clone()
    }

    /// Why the catalog can't be written at present.
    pub(crate) fn catalog_trouble(&self) -> Option<String> {
        self.committer.trouble()
    }
}

impl Volumes {
    /// One tenant.
    pub(crate) fn tenant_show(&self, name: &str) -> Result<Tenant, ApiError> {
        let core = self.base.core.borrow();
        let tenant = core.pool.tenant(name).map_err(api_error)?;
        let mut shown = show_tenant(&core, tenant);
        let budget = shown.budget.as_ref();
        shown.credit = budget.and_then(|budget| self.statistics.credit(tenant.id, budget));
        Ok(shown)
    }
}

impl Exports {
    fn show_export(
        &self,
        core: &Core,
        export: &ExportRecord,
        connected: &mut BTreeMap<u64, BTreeSet<String>>,
        reactors: &BTreeMap<ExportId, u32>,
    ) -> Option<Export> {
        let volume = core.pool.volume(export.volume).ok()?;
        let (frontend, mapped_doorbells, queues) = match export.frontend {
            Frontend::NvmeTcp => (ExportFrontend::NvmeTcp, false, 0),
            Frontend::NvmePcie {
                mapped_doorbells, ..
            } => (ExportFrontend::NvmePcie, mapped_doorbells, 0),
            Frontend::VhostUser { queues, .. } => (ExportFrontend::VhostUser, false, queues),
        };
        let is_machine = export.frontend.is_machine();
        let addresses = match is_machine {
            true => Vec::new(),
            false => self.ports.addresses(),
        };
        let socket = is_machine.then(|| self.vms.socket_path(export, volume).display().to_string());
        Some(Export {
            tenant: tenant_name(core, volume),
            volume: volume.name.clone(),
            id: export.id.0,
            frontend,
            mapped_doorbells,
            queues,
            pinned_memory: export.frontend.keeps_memory(),
            socket,
            machine: is_machine
                .then(|| self.hosts.machine_of(export.id))
                .flatten(),
            shared: export.shared,
            internal: is_internal(export),
            nqn: export.nqn.clone(),
            nsid: 1,
            hosts: export.hosts.clone(),
            any_host: export.any_host,
            addresses,
            quarantined: self.quarantine.reason(export.id),
            commands_ending: 0,
            warnings: Vec::new(),
            reactor: reactors.get(&export.id).copied(),
            connected_hosts: connected
                .remove(&export.id.0)
                .map_or_else(Vec::new, |hosts| hosts.into_iter().collect()),
        })
    }

    fn all_connected(&self) -> BTreeMap<u64, BTreeSet<String>> {
        (self.link.session()).map_or_else(BTreeMap::new, |session| connected_hosts(&session.region))
    }

    /// All exports.
    pub(crate) fn export_list(&self) -> Vec<Export> {
        let core = self.base.core.borrow();
        let mut connected = self.all_connected();
        let reactors = self.placement.reactors_of_exports();
        let mut exports: Vec<Export> = core
            .pool
            .exports()
            .filter_map(|export| self.show_export(&core, export, &mut connected, &reactors))
            .collect();
        exports.sort_by(|a, b| (&a.tenant, &a.volume).cmp(&(&b.tenant, &b.volume)));
        exports
    }

    /// One export.
    pub(crate) fn export_show(&self, tenant: &str, volume: &str) -> Result<Export, ApiError> {
        let id = self.export_id(tenant, volume)?;
        let core = self.base.core.borrow();
        let export = core.pool.export(id).map_err(api_error)?;
        let reactors = self.placement.reactors_of_exports();
        self.show_export(&core, export, &mut self.all_connected(), &reactors)
            .ok_or_else(|| ApiError::internal(format!("{id} has no volume")))
    }
}

impl Hosts {
    /// The client of a machine's export, as the engine says.
    pub(crate) fn machine_of(&self, export: ExportId) -> Option<MachineClient> {
        let session = self.link.session()?;
        let mut lanes = session.region.lanes().iter();
        let lane = lanes.find(|lane| lane.export.load(Relaxed) == export.0 + 1)?;
        (lane.connections.load(Relaxed) > 0).then(|| MachineClient {
            since_unix_s: lane.machine_since_s.load(Relaxed),
            memory_bytes: lane.machine_memory_bytes.load(Relaxed),
            queues: lane.machine_queues.load(Relaxed),
        })
    }
}

impl Ports {
    /// The addresses of the listeners.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.listeners.borrow().keys().cloned().collect()
    }
}

impl Reports {
    fn show_device(&self, core: &Core, record: &DeviceRecord) -> DeviceInfo {
        let devices = self.base.devices.borrow();
        let open = devices.iter().find(|device| device.index == record.index);
        let engine = self.link.session().and_then(|s| s.device(record.index));
        let (state, why) = match (open, engine) {
            (None, _) => {
                let missing = self.base.missing.borrow();
                let missing = missing.iter().find(|device| device.index == record.index);
                let why = missing.map(|device| device.why.clone());
                (DeviceState::Missing, why)
            }
            _ if self.states.cut_short(record.index).is_some() => (
                DeviceState::Failed,
                self.states.cut_short(record.index).map(cut_text),
            ),
            (_, Some(EngineDevice::Failed(error))) => (DeviceState::Failed, Some(error)),
            (_, Some(EngineDevice::Opening)) => (
                DeviceState::Opening,
                self.base.waits.about_device(record.index),
            ),
            (_, Some(EngineDevice::Ready) | None) => match core.pool.device_health(record.index) {
                forebay_pool::Health::Failing => (DeviceState::Failing, None),
                _ => (DeviceState::Online, None),
            },
        };
        let info = open.map(|device| device.store.0.info());
        let space = core.pool.device_space(record.index).unwrap_or_default();
        let extent_bytes = core.pool.info().extent_bytes;
        DeviceInfo {
            index: record.index.0,
            uuid: record.uuid.to_string(),
            spec: open.map_or_else(|| record.spec.clone(), |device| device.spec.clone()),
            kind: info.map_or_else(String::new, |info| info.kind.to_string()),
            capacity_bytes: info.map_or(0, |info| info.capacity_bytes),
            data_bytes: record.extents.saturating_mul(extent_bytes),
            used_bytes: space.used_bytes(),
            free_bytes: (space.clean + space.dirty).saturating_mul(extent_bytes),
            quarantined_bytes: space.quarantined.saturating_mul(extent_bytes),
            data_offset_bytes: record.data_offset_bytes,
            block_bytes: record.block_bytes,
            can_punch: info.is_some_and(|info| info.can_punch),
            errors: self.states.errors_of(record.index),
            state,
            why,
            notes: info.map_or_else(Vec::new, |info| info.notes.clone()),
        }
    }

    /// The pool's devices.
    pub(crate) fn device_list(&self) -> Vec<DeviceInfo> {
        let core = self.base.core.borrow();
        let records = core.pool.devices().iter();
        records
            .map(|record| self.show_device(&core, record))
            .collect()
    }

    /// One device, and who has something there.
    pub(crate) fn device_show(&self, index: u8) -> Result<DeviceDetails, ApiError> {
        let core = self.base.core.borrow();
        let record = core.pool.devices().get(usize::from(index)).ok_or_else(|| {
            ApiError::not_found(format!("the pool has no device {index}"))
                .hint("`forebay device list` shows which it has")
        })?;
        Ok(DeviceDetails {
            device: self.show_device(&core, record),
            volumes: self.base.volumes_on(&core, record.index),
        })
    }

    /// The pool.
    pub(crate) fn pool_show(&self) -> PoolInfo {
        let devices = self.device_list();
        let mut warnings = self.notes();
        warnings.extend(self.warnings());
        let is_lost = |device: &DeviceInfo| {
            matches!(
                device.state,
                DeviceState::Failing | DeviceState::Failed | DeviceState::Missing
            )
        };
        let degraded = devices.iter().any(is_lost)
            || self.base.committer.trouble().is_some()
            || self.copies.lacks_a_copy();
        let catalog = self.copies.catalog_info();
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let info = pool.info();
        let space = pool.space();
        let settings = pool.settings();
        let bytes = |extents: u64| extents.saturating_mul(info.extent_bytes);
        PoolInfo {
            name: info.name.clone(),
            uuid: info.uuid.to_string(),
            state: if degraded {
                PoolState::Degraded
            } else {
                PoolState::Online
            },
            extent_bytes: info.extent_bytes,
            capacity_bytes: space.total_bytes(),
            used_bytes: space.used_bytes(),
            promised_bytes: space.promised_bytes(),
            free_bytes: space.free_bytes(),
            used_percent: space.used_percent(),
            level: match pool.space_level() {
                forebay_pool::SpaceLevel::Normal => SpaceLevel::Normal,
                forebay_pool::SpaceLevel::Warn => SpaceLevel::Warn,
                forebay_pool::SpaceLevel::Critical => SpaceLevel::Critical,
            },
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
            placement: match settings.placement {
                forebay_pool::Placement::Stripe => Placement::Stripe,
                forebay_pool::Placement::Fill => Placement::Fill,
            },
            warn_percent: settings.warn_percent,
            critical_percent: settings.critical_percent,
            catalog,
            devices,
            warnings,
        }
    }

    /// Changes what is set for the pool.
    pub(crate) async fn pool_update(&self, body: PoolUpdate) -> Result<PoolInfo, ApiError> {
        let settings = self.base.core.borrow().pool.settings();
        let settings = settings_of(
            settings,
            body.placement,
            body.warn_percent,
            body.critical_percent,
        );
        let set = self.base.core.borrow_mut().pool.set_settings(settings);
        set.map_err(api_error)?;
        self.base.commit_for_api().await?;
        Ok(self.pool_show())
    }

    /// Checks the pool.
    pub(crate) async fn check(&self, body: PoolCheck) -> Result<CheckResult, ApiError> {
        let (report, repaired) = self.pool_check(body.repair).await?;
        let wrong = report.problems.iter().any(|problem| !problem.repairable)
            || report.problems_left_out > 0;
        Ok(CheckResult {
            clean: report.is_clean()
                || (!wrong && repaired > 0 && repaired >= report.leaked_extents),
            extents_checked: report.extents_checked,
            mappings_checked: report.mappings_checked,
            volumes_checked: report.volumes_checked,
            leaked_extents: report.leaked_extents,
            repaired_catalog_blocks: self.copies.catalog_info().repaired_blocks,
            repaired_extents: repaired,
            problems: report
                .problems
                .into_iter()
                .map(|problem| CheckProblem {
                    what: problem.what,
                    repairable: problem.repairable,
                })
                .collect(),
            problems_left_out: report.problems_left_out,
        })
    }
}

/// All extents of the pool.
pub(crate) fn total_extents(space: &Space) -> u64 {
    space.total
}
