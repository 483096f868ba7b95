//! The volumes: maps, reserved extents, owed space.
//!
//! [`Volumes`] owns and changes them. The extents belong to the
//! [`Allocator`](crate::extents::allocator::Allocator), which is passed in with the journal.
//!
//! **Not here:** tenants, exports, whether an operation is allowed now (`pool`).

pub(crate) mod copies;
pub(crate) mod deleted;
pub(crate) mod faults;
pub(crate) mod hidden;
pub(crate) mod images;
pub(crate) mod layers;
pub(crate) mod map;
pub(crate) mod merge;
pub(crate) mod needed;
pub(crate) mod pending;
pub(crate) mod placer;
pub(crate) mod preallocated;
pub(crate) mod spare;

use crate::{
    error::{PoolError, Result},
    extents::runs::{DeviceRun, RunSet},
    journal::batch::BatchId,
    records::{TenantId, VolumeRecord},
};
use deleted::SLICE_EXTENTS;
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use hidden::Hidden;
use images::{IMAGE_EXTENT_BYTES, ImagePlace};
use layers::{Layers, Node, Place};
use map::{MAP_CHUNK, VolumeMap};
use pending::PendingSet;
use spare::MIN_RESERVE;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Debug)]
pub(crate) struct PoolVolume {
    pub(crate) record: VolumeRecord,
    /// For an RBD image, which has no extents of the pool.
    pub(crate) image: Option<ImagePlace>,
    pub(crate) map: VolumeMap,
    /// Extents that layers below do not show.
    pub(crate) hidden: Hidden,
    /// Reserved durably, never granted.
    pub(crate) spare: RunSet,
    /// Targets of running copies, by logical extent; reserved.
    pub(crate) copying: BTreeMap<u64, DeviceRun>,
    /// Reserved by batches that are not durable, oldest first.
    pub(crate) incoming: VecDeque<(BatchId, DeviceRun)>,
    pub(crate) incoming_extents: u64,
    pub(crate) pending: PendingSet,
    /// Target of spare extents.
    pub(crate) goal: u64,
    /// Extents ever taken or missed; and at the last check.
    pub(crate) used: u64,
    pub(crate) used_before: u64,
    /// `used` when a batch with a reservation began.
    pub(crate) reserved_at: VecDeque<(BatchId, u64)>,
    /// Mapped, perhaps never written, as far as the caller knows.
    pub(crate) preallocated: u64,
    /// Extents owed to it, and its part of `Volumes::catalog_promised`.
    pub(crate) entitlement: u64,
    pub(crate) catalog_bytes: u64,
}

impl PoolVolume {
    pub(crate) fn new(record: VolumeRecord) -> Self {
        Self {
            record,
            image: None,
            map: VolumeMap::default(),
            hidden: Hidden::default(),
            spare: RunSet::default(),
            copying: BTreeMap::new(),
            incoming: VecDeque::new(),
            incoming_extents: 0,
            pending: PendingSet::default(),
            goal: MIN_RESERVE,
            used: 0,
            used_before: 0,
            reserved_at: VecDeque::new(),
            preallocated: 0,
            entitlement: 0,
            catalog_bytes: 0,
        }
    }

    /// A chunk's mappings that no batch carries yet.
    pub(crate) fn uncommitted_in(&self, chunk: u64) -> Vec<u64> {
        let pending = self
            .pending
            .within(chunk * MAP_CHUNK, (chunk + 1) * MAP_CHUNK);
        let uncommitted = pending.filter(|(_, pending)| pending.committing.is_none());
        uncommitted.map(|(logical, _)| logical).collect()
    }

    /// Refuses a volume in an RBD image.
    pub(crate) fn in_pool(&self) -> Result<&Self> {
        if self.image.is_some() {
            return Err(PoolError::invalid(format!(
                "volume {:?} is an RBD image: the pool has none of its extents",
                self.record.name
            )));
        }
        Ok(self)
    }

    /// The size of its extents, where the pool's have `pool_bytes`.
    pub(crate) fn extent_bytes(&self, pool_bytes: u64) -> u64 {
        match self.image {
            Some(_) => IMAGE_EXTENT_BYTES,
            None => pool_bytes,
        }
    }

    /// Its extents, where the pool's have `pool_bytes`.
    pub(crate) fn extents(&self, pool_bytes: u64) -> u64 {
        let extent_bytes = self.extent_bytes(pool_bytes);
        self.record.size_bytes.div_ceil(extent_bytes)
    }
}

/// A volume's extents by state.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct VolumeSpace {
    /// Mapped, durably or not.
    pub mapped: u64,
    /// Mapped, but not durably.
    pub uncommitted: u64,
    /// Mapped and preallocated ([`Pool::map_around`](crate::Pool::map_around)).
    pub preallocated: u64,
    /// Reserved and not used yet.
    pub reserved: u64,
    /// Promised by its space reservation and not taken yet.
    pub entitlement: u64,
}

/// Volumes and snapshots that are not being deleted.
pub(crate) type ById = BTreeMap<VolumeId, PoolVolume>;

/// All volumes of a pool.
#[derive(Debug)]
pub struct Volumes {
    pub(crate) by_id: ById,
    /// Deleted volumes with extents left to free. Other lookups ignore them.
    pub(crate) deleting: BTreeMap<VolumeId, PoolVolume>,
    pub(crate) layers: Layers,
    /// Extents of a deleted volume freed at once.
    pub(crate) delete_slice: u64,
    pub(crate) names: BTreeMap<(TenantId, String), VolumeId>,
    extent_bytes: u64,
    pub(crate) next_seq: u64,
    /// Extents owed to all volumes.
    pub(crate) promised: u64,
    /// Catalog bytes that future mappings may take.
    pub(crate) catalog_promised: u64,
}

impl Volumes {
    pub(crate) fn new(extent_bytes: u64, next_seq: u64) -> Self {
        Self {
            by_id: BTreeMap::new(),
            deleting: BTreeMap::new(),
            layers: Layers::default(),
            delete_slice: SLICE_EXTENTS,
            names: BTreeMap::new(),
            extent_bytes,
            next_seq,
            promised: 0,
            catalog_promised: 0,
        }
    }

    pub(crate) fn load(
        &mut self,
        volumes: BTreeMap<VolumeId, PoolVolume>,
        deleting: BTreeMap<VolumeId, PoolVolume>,
        layers: Layers,
    ) {
        self.layers = layers;
        let records = volumes.values().map(|volume| &volume.record);
        let names = records.map(|record| ((record.tenant, record.name.clone()), record.id));
        self.names = names.collect();
        (self.by_id, self.deleting) = (volumes, deleting);
    }

    /// All volumes and snapshots, oldest first.
    pub fn records(&self) -> impl Iterator<Item = &VolumeRecord> {
        self.by_id.values().map(|volume| &volume.record)
    }

    /// A tenant's volumes, by name.
    pub fn of_tenant(&self, tenant: TenantId) -> impl Iterator<Item = &VolumeRecord> {
        self.names
            .range((tenant, String::new())..)
            .take_while(move |((of, _), _)| *of == tenant)
            .filter_map(|(_, id)| self.by_id.get(id).map(|volume| &volume.record))
    }

    /// A volume by id.
    pub fn record(&self, volume: VolumeId) -> Result<&VolumeRecord> {
        self.get(volume).map(|volume| &volume.record)
    }

    pub(crate) fn get(&self, volume: VolumeId) -> Result<&PoolVolume> {
        self.by_id
            .get(&volume)
            .ok_or_else(|| PoolError::not_found(format!("no {volume}")))
    }

    pub(crate) fn get_mut(&mut self, volume: VolumeId) -> Result<&mut PoolVolume> {
        self.by_id
            .get_mut(&volume)
            .ok_or_else(|| PoolError::not_found(format!("no {volume}")))
    }

    /// The size of a volume's extents in bytes.
    pub fn extent_bytes_of(&self, volume: VolumeId) -> Result<u64> {
        let volume = self.get(volume)?;
        Ok(volume.extent_bytes(self.extent_bytes))
    }

    /// Refuses snapshots, and volumes in RBD images.
    pub(crate) fn writable(&self, volume: VolumeId) -> Result<&PoolVolume> {
        let volume = self.get(volume)?.in_pool()?;
        if volume.record.is_snapshot() {
            return Err(PoolError::invalid(format!(
                "{:?} is a snapshot and can't be changed: clone it, and change the clone",
                volume.record.name
            )));
        }
        Ok(volume)
    }

    pub(crate) fn insert(&mut self, record: VolumeRecord) {
        let id = record.id;
        self.names.insert((record.tenant, record.name.clone()), id);
        self.layers.maps.insert(record.map_id(), Node::Volume(id));
        self.by_id.insert(id, PoolVolume::new(record));
        self.settle_account(id);
    }

    /// Includes volumes being deleted.
    pub(crate) fn any(&self, id: VolumeId) -> Option<&PoolVolume> {
        self.by_id.get(&id).or_else(|| self.deleting.get(&id))
    }

    /// The first volume from `id` on, deleted ones included.
    pub(crate) fn any_from(&self, id: VolumeId) -> Option<(VolumeId, &PoolVolume)> {
        let first = |volumes: &'_ BTreeMap<VolumeId, PoolVolume>| {
            volumes.range(id..).next().map(|(id, _)| *id)
        };
        let found = first(&self.by_id).into_iter().chain(first(&self.deleting));
        let id = found.min()?;
        Some((id, self.any(id)?))
    }

    /// Mappings of all volumes that are not durable. Each takes memory.
    pub fn uncommitted_extents(&self) -> u64 {
        let volumes = self.by_id.values();
        volumes.map(|volume| volume.pending.len()).sum()
    }

    pub(crate) fn unused(&self) -> u64 {
        self.by_id.values().map(PoolVolume::unused).sum()
    }

    /// Extents owed to volumes with a space reservation.
    pub fn promised_extents(&self) -> u64 {
        self.promised
    }

    /// Byte ranges of a volume from `from_bytes` on that may hold other data than zeros: at most
    /// `most`, in order, and where to continue.
    pub fn mapped_bytes(
        &self,
        volume: VolumeId,
        from_bytes: u64,
        most: usize,
    ) -> Result<(Vec<std::ops::Range<u64>>, Option<u64>)> {
        let target = self.get(volume)?;
        let size_bytes = target.record.size_bytes;
        let extent_bytes = target.extent_bytes(self.extent_bytes);
        let bytes = |extent: u64| (extent * extent_bytes).min(size_bytes);
        let first = from_bytes / extent_bytes;
        let end = target.extents(self.extent_bytes);
        let (ranges, next) = self.layers.mapped_from(target, end, first, most);
        let ranges = ranges
            .into_iter()
            .map(|r| bytes(r.start).max(from_bytes)..bytes(r.end));
        // `from_bytes` may be in the last extent, beyond the volume's end.
        let ranges = ranges.filter(|range| !range.is_empty());
        Ok((ranges.collect(), next.map(bytes)))
    }

    /// A volume's extents by state.
    pub fn space_of(&self, volume: VolumeId) -> Result<VolumeSpace> {
        let volume = self.get(volume)?;
        Ok(VolumeSpace {
            mapped: volume.map.mapped(),
            uncommitted: volume.pending.len(),
            preallocated: volume.preallocated.min(volume.map.mapped()),
            reserved: volume.unused(),
            entitlement: volume.entitlement,
        })
    }

    /// The highest sequence of a mapping that is not durable.
    pub fn uncommitted(&self, volume: VolumeId) -> Option<u64> {
        self.by_id.get(&volume)?.pending.newest()
    }

    /// All mappings of the volume up to this sequence are durable. For a deleted volume, every
    /// sequence is.
    pub fn durable_seq(&self, volume: VolumeId) -> u64 {
        let volume = self.by_id.get(&volume);
        let oldest = volume.and_then(|volume| volume.pending.oldest());
        oldest.unwrap_or(self.next_seq).saturating_sub(1)
    }

    /// The devices of a volume's mappings up to a sequence that no batch carries yet.
    pub fn pending_on(&self, volume: VolumeId, up_to_seq: u64) -> BTreeSet<DeviceIndex> {
        let volume = self.by_id.get(&volume).into_iter();
        volume
            .flat_map(|volume| volume.pending.waiting_devices(up_to_seq))
            .collect()
    }

    /// [`Volumes::pending_on`] for all volumes and sequences.
    pub fn pending_devices(&self) -> BTreeSet<DeviceIndex> {
        self.by_id
            .values()
            .flat_map(|volume| volume.pending.waiting_devices(u64::MAX))
            .collect()
    }

    /// How many extents from `first` on, up to `count`, one [`Pool::release`](crate::Pool::release)
    /// may take: at most 4096 mapped ones.
    pub fn releases_at_once(&self, volume: VolumeId, first: ExtentIndex, count: u64) -> u64 {
        self.get(volume).map_or(count, |target| {
            self.layers
                .reach(target, first.0, count, faults::RELEASE_EXTENTS)
        })
    }

    /// Whether a volume maps `logical` here, durably or not, and how many extents, up to `count`,
    /// the answer covers. Ignores the device's health; a deleted volume maps nothing.
    pub fn maps_at(
        &self,
        volume: VolumeId,
        logical: ExtentIndex,
        device: DeviceIndex,
        extent: ExtentIndex,
        count: u64,
    ) -> (bool, u64) {
        let Some(volume) = self.by_id.get(&volume) else {
            return (false, count);
        };
        match self.layers.place(volume, logical.0, count) {
            Place::Own(run) | Place::Shared(run) => {
                ((run.device, run.first) == (device, extent), run.count)
            }
            Place::Zeros(zeros) => (false, zeros),
        }
    }

    /// The devices that a volume's writes may go to without a fault.
    pub fn devices_of(&self, volume: VolumeId) -> BTreeSet<DeviceIndex> {
        let volume = self.by_id.get(&volume).into_iter();
        volume
            .flat_map(|volume| volume.map.devices().chain(volume.client()))
            .collect()
    }

    /// The volumes with mapped or spare extents on a device, or with this RADOS client.
    pub fn on_device(&self, device: DeviceIndex) -> Vec<VolumeId> {
        self.by_id
            .iter()
            .filter(|(_, volume)| {
                volume.client() == Some(device)
                    || volume.spare.extents_on(device) > 0
                    || volume.map.is_on(device)
                    || self
                        .layers
                        .below(volume)
                        .any(|layer| layer.map.is_on(device))
            })
            .map(|(id, _)| *id)
            .collect()
    }

    pub(crate) fn mark_durable(&mut self, mapped: &[(VolumeId, u64)], batch: BatchId) {
        for of_one in mapped.chunk_by(|a, b| a.0 == b.0) {
            let id = of_one[0].0;
            let Some(volume) = self.by_id.get_mut(&id) else {
                continue;
            };
            let pending = &mut volume.pending;
            let is_durable = |logical: &u64| {
                let pending = pending.get(*logical);
                pending.is_some_and(|pending| pending.committing.is_some_and(|by| by <= batch))
            };
            let logicals = of_one.iter().map(|(_, logical)| *logical);
            let durable: Vec<u64> = logicals.filter(is_durable).collect();
            pending.remove(durable);
            self.settle_account(id);
        }
    }

    pub(crate) fn take_spare_on(&mut self, device: DeviceIndex) -> Vec<DeviceRun> {
        let mut taken = Vec::new();
        for volume in self.by_id.values_mut() {
            for run in volume.spare.drain() {
                if run.device == device {
                    taken.push(run);
                } else {
                    volume.spare.insert(run);
                }
            }
        }
        taken
    }
}
