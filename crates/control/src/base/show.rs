//! Converts pool records of tenants and volumes into API answers. Reads only.

use forebay_nvme::reservation::{HostId, ReservationType};
use forebay_pool::{
    ExportRecord, ImageRecord, Pool, SNAPSHOT_MARK, Space, TenantId, TenantRecord, VolumeRecord,
};
use forebay_qos::budget::Budget;
use forebay_qos::stated_budget::Stated;
use forebay_xlate::{DeviceIndex, VolumeId};

use crate::base::{Base, Core};
use crate::devices::api_error;
use crate::model::error::ApiError;
use crate::model::rbd::{ImagePath, VolumeImage};
use crate::model::scheduling as api;
use crate::model::{
    ReservationKind, ReservationRegistrant, SnapshotInfo, Tenant, Volume, VolumeExtent,
    VolumeExtents, VolumeReservation,
};

/// `None` for the maximum, which means no limit.
pub(crate) fn limit(limit: u64, most: u64) -> Option<u64> {
    (limit < most).then_some(limit)
}

pub(crate) fn show_budget(budget: &Budget, stated: &Stated) -> api::Budget {
    api::Budget {
        base: stated.has_base().then_some(api::Rate {
            iops: budget.base.iops,
            bytes_s: budget.base.bytes,
        }),
        // An explicitly stated maximum is a limit, too.
        burst: api::Limit {
            iops: (stated.burst_iops.or(stated.base_iops)).map(|_| budget.burst.iops),
            bytes_s: (stated.burst_bytes.or(stated.base_bytes)).map(|_| budget.burst.bytes),
        },
        credit_s: stated.credit_seconds,
        stated: api::BudgetParts {
            base: rate_parts(stated.base_iops, stated.base_bytes),
            burst: rate_parts(stated.burst_iops, stated.burst_bytes),
            credit_s: stated.credit_seconds.map(Some),
        },
    }
}

pub(crate) fn rate_parts(iops: Option<u64>, bytes_s: Option<u64>) -> api::Change<api::RateParts> {
    let (iops, bytes_s) = (iops.map(Some), bytes_s.map(Some));
    (iops.or(bytes_s).is_some()).then_some(Some(api::RateParts { iops, bytes_s }))
}

pub(crate) fn show_tenant_budget(pool: &Pool, tenant: TenantId) -> Option<api::Budget> {
    let budget = pool.budgets().of_tenant(tenant)?;
    Some(show_budget(
        budget,
        &pool.budgets().stated_of_tenant(tenant),
    ))
}

pub(crate) fn show_volume_budget(pool: &Pool, volume: VolumeId) -> Option<api::Budget> {
    let budget = pool.budgets().of_volume(volume)?;
    Some(show_budget(
        budget,
        &pool.budgets().stated_of_volume(volume),
    ))
}

pub(crate) fn host_text(host: &HostId) -> String {
    uuid::Uuid::from_bytes(*host).to_string()
}

pub(crate) fn show_reservation(core: &Core, volume: VolumeId) -> Option<VolumeReservation> {
    let state = &core.pool.hosts().reservations_of(volume)?.state;
    if state.registrants().is_empty() {
        return None;
    }
    let registrants = state
        .registrants()
        .iter()
        .map(|registrant| ReservationRegistrant {
            host_id: host_text(&registrant.host),
            key: format!("{:#x}", registrant.key),
            is_holder: state.holds(&registrant.host),
        });
    Some(VolumeReservation {
        kind: state.reservation_type().map(|kind| match kind {
            ReservationType::WriteExclusive => ReservationKind::WriteExclusive,
            ReservationType::ExclusiveAccess => ReservationKind::ExclusiveAccess,
            ReservationType::WriteExclusiveRegistrantsOnly => {
                ReservationKind::WriteExclusiveRegistrantsOnly
            }
            ReservationType::ExclusiveAccessRegistrantsOnly => {
                ReservationKind::ExclusiveAccessRegistrantsOnly
            }
            ReservationType::WriteExclusiveAllRegistrants => {
                ReservationKind::WriteExclusiveAllRegistrants
            }
            ReservationType::ExclusiveAccessAllRegistrants => {
                ReservationKind::ExclusiveAccessAllRegistrants
            }
        }),
        generation: state.generation(),
        persists: state.ptpl(),
        registrants: registrants.collect(),
    })
}

/// Ranges of a volume in one answer.
pub(crate) const EXTENTS_AT_ONCE: usize = 4096;

/// Bytes mapped and written, as far as known, and bytes occupied in any way.
pub(crate) fn volume_bytes(core: &Core, volume: &VolumeRecord) -> (u64, u64) {
    if core.pool.images().of(volume.id).is_some() {
        // Ceph does not say which part is written.
        return (volume.size_bytes, 0);
    }
    let space = core.pool.volumes().space_of(volume.id).unwrap_or_default();
    let bytes = |extents: u64| extents.saturating_mul(core.pool.info().extent_bytes);
    (
        bytes(space.mapped - space.preallocated),
        bytes(space.mapped + space.reserved),
    )
}

pub(crate) fn show_tenant(core: &Core, tenant: &TenantRecord) -> Tenant {
    let mut shown = Tenant {
        name: tenant.name.clone(),
        volumes: 0,
        provisioned_bytes: 0,
        allocated_bytes: 0,
        budget: show_tenant_budget(&core.pool, tenant.id),
        credit: None,
    };
    for volume in core.pool.volumes().of_tenant(tenant.id) {
        shown.volumes += 1;
        // A snapshot is never written.
        if !volume.is_snapshot() {
            shown.provisioned_bytes = shown.provisioned_bytes.saturating_add(volume.size_bytes);
        }
        shown.allocated_bytes = shown
            .allocated_bytes
            .saturating_add(volume_bytes(core, volume).1);
    }
    shown
}

pub(crate) fn tenant_name(core: &Core, volume: &VolumeRecord) -> String {
    core.pool
        .tenants()
        .get(volume.tenant)
        .map_or_else(|_| String::new(), |t| t.name.clone())
}

fn show_snapshot(core: &Core, volume: &VolumeRecord) -> Option<SnapshotInfo> {
    let of = core.pool.volume(volume.layering.snapshot_of?);
    Some(SnapshotInfo {
        of: of.ok().map(|of| of.name.clone()),
        created_unix_s: volume.created_s,
    })
}

pub(crate) fn image_path(record: &ImageRecord) -> ImagePath {
    ImagePath {
        cluster: record.cluster.clone(),
        pool: record.pool.clone(),
        namespace: record.namespace.clone(),
        image: record.image.clone(),
    }
}

fn show_image(core: &Core, volume: VolumeId) -> Option<VolumeImage> {
    let image = core.pool.images().of(volume)?;
    let client = core.pool.images().client(image.client);
    let path = image_path(image);
    Some(VolumeImage {
        path: match &image.snapshot {
            None => path.to_string(),
            Some(name) => format!("{path}{SNAPSHOT_MARK}{name}"),
        },
        client: image.client.0,
        client_addresses: client.map_or_else(Vec::new, |client| client.addresses.clone()),
    })
}

/// An export's name in its tenant, unlike those of all others: with its number, if the volume may
/// have several, and after a snapshot's name, which may be a number.
pub(crate) fn export_label(export: &ExportRecord, volume: &VolumeRecord) -> String {
    match export.shared || volume.is_snapshot() {
        false => volume.name.clone(),
        true => format!("{}@{}", volume.name, export.id.0),
    }
}

pub(crate) fn show_volume(core: &Core, volume: &VolumeRecord) -> Volume {
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
        exported: core.pool.exports().first_of(volume.id).is_some(),
        reservation: show_reservation(core, volume.id),
        budget: show_volume_budget(&core.pool, volume.id),
        snapshot: show_snapshot(core, volume),
        rbd: show_image(core, volume.id),
    }
}

impl Base {
    pub(crate) fn tenant_list(&self) -> Vec<Tenant> {
        let core = self.core.borrow();
        let mut tenants: Vec<_> = core
            .pool
            .tenants()
            .iter()
            .map(|t| show_tenant(&core, t))
            .collect();
        tenants.sort_by(|a, b| a.name.cmp(&b.name));
        tenants
    }

    pub(crate) fn volume_list(&self, tenant: Option<&str>) -> Result<Vec<Volume>, ApiError> {
        let core = self.core.borrow();
        let mut volumes: Vec<Volume> = match tenant {
            Some(name) => {
                let id = core.pool.tenants().named(name).map_err(api_error)?.id;
                core.pool
                    .volumes()
                    .of_tenant(id)
                    .map(|volume| show_volume(&core, volume))
                    .collect()
            }
            None => core
                .pool
                .volumes()
                .records()
                .map(|volume| show_volume(&core, volume))
                .collect(),
        };
        volumes.sort_by(|a, b| (&a.tenant, &a.name).cmp(&(&b.tenant, &b.name)));
        Ok(volumes)
    }

    /// Mapped bytes, without unwritten preallocated extents.
    pub(crate) fn mapped_bytes(&self, id: VolumeId) -> u64 {
        let core = self.core.borrow();
        let volume = core.pool.volume(id);
        volume.map_or(0, |volume| volume_bytes(&core, volume).0)
    }

    /// Whether it may have data that a snapshot froze.
    pub(crate) fn has_shared_data(&self, id: VolumeId) -> bool {
        let core = self.core.borrow();
        let volume = core.pool.volume(id);
        if volume.is_ok_and(|volume| volume.layering.parent.is_none()) {
            return false;
        }
        let mapped = core.pool.volumes().mapped_bytes(id, 0, 1);
        mapped.is_ok_and(|(ranges, next)| !ranges.is_empty() || next.is_some())
    }

    pub(crate) fn volume_show(&self, tenant: &str, name: &str) -> Result<Volume, ApiError> {
        let core = self.core.borrow();
        let volume = core.pool.volume_by_name(tenant, name).map_err(api_error)?;
        Ok(show_volume(&core, volume))
    }

    /// The ranges where a volume may hold data.
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
            .volumes()
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

    /// Tenant and volume, or the number of a deleted volume.
    pub(crate) fn volume_name(&self, core: &Core, id: VolumeId) -> String {
        core.pool.volume(id).map_or_else(
            |_| id.to_string(),
            |volume| format!("{}/{}", tenant_name(core, volume), volume.name),
        )
    }

    /// The volumes with data on a device, as `tenant/volume`.
    pub(crate) fn volumes_on(&self, core: &Core, device: DeviceIndex) -> Vec<String> {
        let volumes = core.pool.volumes().on_device(device);
        let mut names: Vec<String> = volumes
            .iter()
            .map(|id| self.volume_name(core, *id))
            .collect();
        names.sort_unstable();
        names
    }

    pub(crate) fn pool_name(&self) -> String {
        self.core.borrow().pool.info().name.clone()
    }

    pub(crate) fn catalog_trouble(&self) -> Option<String> {
        self.committer.trouble()
    }
}

pub(crate) fn total_extents(space: &Space) -> u64 {
    space.total
}

/// The serial number for hosts: the first 20 digits of the volume's uuid.
pub(crate) fn serial(volume: &VolumeRecord) -> String {
    volume
        .uuid
        .into_bytes()
        .iter()
        .take(10)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
