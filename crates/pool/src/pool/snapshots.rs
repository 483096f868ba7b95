//! [`Snapshots`]: snapshots, clones, rollback, copies of shared extents, and merges of layers.
//!
//! **What must hold before**, the caller's part:
//! - [`Snapshots::take`]: no write to the volumes is in flight, none begins before the batch is
//!   durable, and all their mappings are durable.
//! - [`Snapshots::roll_back`]: the volume's grants are revoked and drained.
//! - [`Snapshots::merge`]: the step's range is held, and requests to the step's devices from before have
//!   ended, because a read may have begun before a copy replaced its extent.
//! - [`Snapshots::end_copy`]: the whole extent was copied. The commit of its mapping follows a flush, as
//!   for any other.
//! - The caller records a copy before it begins, for [`Snapshots::adopt_copy`], until the batch that is
//!   open at its end is durable.

use super::{
    Pool,
    admin::{RECORD_BYTES, new_id},
    tenants::check_name,
};
use crate::{
    error::{PoolError, Result},
    extents::runs::DeviceRun,
    features::LAYERS,
    journal::batch::Table,
    records::{LayerId, Layering, VolumeRecord},
    volumes::{
        copies::{CopyFailure, ExtentCopy},
        faults::{FaultAnswer, Released},
        layers::{Node, Place},
        merge::MergeStep,
        needed::Unneeded,
        placer::Placer,
    },
};
use forebay_device::size::format_bytes;
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Between a volume's and a snapshot's name.
pub const SNAPSHOT_MARK: char = '@';

/// A snapshot to be taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewSnapshot {
    /// The volume.
    pub volume: VolumeId,
    /// The snapshot's own name, as in `db@monday`.
    pub name: String,
}

/// A clone to be made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewClone {
    /// The snapshot.
    pub snapshot: VolumeId,
    /// The clone's tenant, by name.
    pub tenant: String,
    /// Its name, unique within the tenant.
    pub name: String,
    /// Its space reservation in bytes.
    pub reserved_bytes: u64,
}

/// Operations on snapshots, clones and the layers below them ([`Pool::snapshots`]).
#[derive(Debug)]
pub struct Snapshots<'a> {
    pool: &'a mut Pool,
}

impl Pool {
    /// Operations on snapshots.
    pub fn snapshots(&mut self) -> Snapshots<'_> {
        Snapshots { pool: self }
    }
}

impl Snapshots<'_> {
    /// Whether these snapshots can be taken now, as one group.
    pub fn check(&self, new: &[NewSnapshot]) -> Result<()> {
        self.pool.ready()?;
        let (mut volumes, mut needed) = (BTreeSet::new(), 0u64);
        for NewSnapshot { volume, name } in new {
            let target = self.pool.volumes.get(*volume)?.in_pool()?;
            let record = &target.record;
            if record.is_snapshot() {
                return Err(PoolError::invalid(format!(
                    "{:?} is a snapshot: clone it, and take snapshots of the clone",
                    record.name
                )));
            }
            if !volumes.insert(*volume) {
                return Err(PoolError::invalid(format!(
                    "volume {:?} is named twice",
                    record.name
                )));
            }
            check_name("snapshot", name)?;
            self.check_new_name(record, &snapshot_name(record, name))?;
            self.pool.volumes.layers.check_depth(target)?;
            needed += target.entitlement_after_freeze(self.pool.info.extent_bytes);
        }
        self.pool.admit(new.len() as u64 * 3 * RECORD_BYTES)?;
        let extent_bytes = self.pool.info.extent_bytes;
        let most = self
            .pool
            .volumes
            .promisable(&self.pool.allocator.extents, &volumes);
        if needed > most {
            return Err(PoolError::no_space(format!(
                "the volumes' space reservations need {} for writes after the snapshot, but the pool can promise {}: \
                 reserve less, or free space",
                format_bytes(needed.saturating_mul(extent_bytes)),
                format_bytes(most.saturating_mul(extent_bytes))
            )));
        }
        Ok(())
    }

    fn check_new_name(&self, record: &VolumeRecord, name: &str) -> Result<()> {
        let key = (record.tenant, name.to_owned());
        if self.pool.volumes.names.contains_key(&key) {
            let tenant = self.pool.tenants.get(record.tenant)?;
            return Err(PoolError::exists(format!(
                "tenant {:?} already has {name:?}",
                tenant.name
            )));
        }
        Ok(())
    }

    /// Takes snapshots of several volumes at one moment. Their ids, in the same order.
    pub fn take(&mut self, new: &[NewSnapshot], now_s: u64) -> Result<Vec<VolumeId>> {
        self.check(new)?;
        for NewSnapshot { volume, .. } in new {
            let volume = self.pool.volumes.get(*volume)?;
            if volume.pending.len() > 0 || !volume.copying.is_empty() {
                return Err(PoolError::in_use(format!(
                    "volume {:?} has mappings that are not durable",
                    volume.record.name
                )));
            }
        }
        self.use_layers();
        let (volumes, allocator) = (&mut self.pool.volumes, &mut self.pool.allocator);
        let extent_bytes = self.pool.info.extent_bytes;
        let owed = new.iter().filter_map(|new| volumes.get(new.volume).ok());
        let owed = owed.map(|volume| volume.entitlement_after_freeze(extent_bytes));
        let needed = volumes.promised + owed.sum::<u64>();
        let these = new.iter().map(|new| new.volume).collect();
        volumes.make_room(allocator, &mut self.pool.journal, needed, &these)?;
        let taken = new.iter().map(|new| self.freeze_as(new, now_s));
        taken.collect()
    }

    fn freeze_as(&mut self, new: &NewSnapshot, now_s: u64) -> Result<VolumeId> {
        let layer = self.freeze(new.volume)?;
        let record = &mut self.pool.volumes.get_mut(new.volume)?.record;
        record.layering.freezes = record.layering.freezes.wrapping_add(1);
        let snapshot = VolumeRecord {
            id: VolumeId(new_id(&mut self.pool.info, &mut self.pool.journal)),
            uuid: Uuid::new_v4(),
            tenant: record.tenant,
            name: snapshot_name(record, &new.name),
            size_bytes: record.size_bytes,
            block_bytes: record.block_bytes,
            reserved_bytes: 0,
            created_s: now_s,
            layering: Layering {
                snapshot_of: Some(record.id),
                ..Layering::default()
            },
        };
        self.pool.journal.touch(Table::Volumes, new.volume.0, 0);
        self.add_above(snapshot, layer)
    }

    fn freeze(&mut self, volume: VolumeId) -> Result<Option<LayerId>> {
        let info = &mut self.pool.info;
        let new_id = |journal: &mut _| new_id(info, journal);
        self.pool
            .volumes
            .freeze(&mut self.pool.journal, volume, new_id)
    }

    fn add_above(&mut self, record: VolumeRecord, layer: Option<LayerId>) -> Result<VolumeId> {
        let id = record.id;
        self.pool.volumes.insert(record);
        self.attach(id, layer)?;
        self.pool.journal.touch(Table::Volumes, id.0, 0);
        Ok(id)
    }

    fn attach(&mut self, volume: VolumeId, layer: Option<LayerId>) -> Result<()> {
        self.pool.volumes.get_mut(volume)?.record.layering.parent = layer;
        let layers = &mut self.pool.volumes.layers;
        layers.attach(Node::Volume(volume), layer);
        Ok(())
    }

    /// Earlier versions refuse the pool from now on.
    fn use_layers(&mut self) {
        let (class, bit) = (LAYERS.class as u64, u64::from(LAYERS.bit));
        self.pool.journal.touch(Table::Features, class, bit);
    }

    fn snapshot_record(&self, snapshot: VolumeId) -> Result<&VolumeRecord> {
        let record = self.pool.volumes.record(snapshot)?;
        if record.is_snapshot() {
            return Ok(record);
        }
        Err(PoolError::invalid(format!(
            "volume {:?} is not a snapshot",
            record.name
        )))
    }

    /// Makes a volume with a snapshot's content.
    pub fn clone_snapshot(&mut self, new: &NewClone, now_s: u64) -> Result<VolumeId> {
        self.pool.ready()?;
        check_name("volume", &new.name)?;
        let tenant = self.pool.tenants.named(&new.tenant)?.id;
        let of = self.snapshot_record(new.snapshot)?;
        self.pool.volumes.get(new.snapshot)?.in_pool()?;
        let record = VolumeRecord {
            id: VolumeId(self.pool.info.next_id),
            uuid: Uuid::new_v4(),
            tenant,
            name: new.name.clone(),
            reserved_bytes: new.reserved_bytes,
            created_s: now_s,
            layering: Layering::default(),
            ..of.clone()
        };
        self.check_new_name(&record, &new.name)?;
        self.pool
            .volumes
            .layers
            .check_depth(self.pool.volumes.get(new.snapshot)?)?;
        self.pool.admit(3 * RECORD_BYTES)?;
        self.pool.volumes.make_room_for_reservation(
            &mut self.pool.allocator,
            &mut self.pool.journal,
            None,
            new.reserved_bytes,
            record.size_bytes,
        )?;
        self.use_layers();
        let layer = self.freeze(new.snapshot)?;
        let id = VolumeId(new_id(&mut self.pool.info, &mut self.pool.journal));
        self.add_above(VolumeRecord { id, ..record }, layer)
    }

    /// Whether [`Snapshots::roll_back`] would be refused.
    pub fn check_roll_back(&self, volume: VolumeId, to: Option<VolumeId>) -> Result<()> {
        self.pool.ready()?;
        let record = &self.pool.volumes.get(volume)?.in_pool()?.record;
        let Some(snapshot) = to else {
            return self.check_erase(record);
        };
        let of = self.snapshot_record(snapshot)?;
        if of.layering.snapshot_of != Some(volume) {
            return Err(PoolError::invalid(format!(
                "{:?} is not a snapshot of this volume {:?}: clone the snapshot",
                of.name, record.name
            )));
        }
        self.pool
            .volumes
            .layers
            .check_depth(self.pool.volumes.get(snapshot)?)?;
        self.pool.admit(3 * RECORD_BYTES)
    }

    fn check_erase(&self, record: &VolumeRecord) -> Result<()> {
        if record.is_snapshot() {
            return Err(PoolError::invalid(format!(
                "{:?} is a snapshot, which can't be changed",
                record.name
            )));
        }
        let is_of_it = |other: &&VolumeRecord| other.layering.snapshot_of == Some(record.id);
        if let Some(snapshot) = self.pool.volumes.records().find(is_of_it) {
            return Err(PoolError::in_use(format!(
                "volume {:?} has a snapshot {:?}, which keeps its data: delete the snapshots first",
                record.name, snapshot.name
            )));
        }
        self.pool.admit(3 * RECORD_BYTES)
    }

    /// Gives a volume a snapshot's content, and zeros beyond the snapshot's size; `None` erases it
    /// to zeros. Later snapshots stay. Extents on `hanging` devices are quarantined if no snapshot
    /// has them.
    pub fn roll_back(
        &mut self,
        volume: VolumeId,
        to: Option<VolumeId>,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        self.check_roll_back(volume, to)?;
        self.use_layers();
        let (volumes, allocator) = (&mut self.pool.volumes, &mut self.pool.allocator);
        if !volumes.get(volume)?.copying.is_empty() {
            return Err(PoolError::in_use(format!("{volume} has copies that go on")));
        }
        let released = volumes.unmap_at_once(allocator, &mut self.pool.journal, volume, hanging)?;
        // Its own map becomes a layer that nothing needs.
        let above = self.freeze(volume)?;
        let target = self.pool.volumes.get_mut(volume)?;
        // Mappings in a batch become durable with the layer.
        target.pending = Default::default();
        target.record.layering.parent = None;
        self.pool
            .volumes
            .layers
            .detach(&self.pool.journal, Node::Volume(volume), above);
        if let Some(snapshot) = to {
            // The snapshot may have its own map by now.
            let layer = self.freeze(snapshot)?;
            self.attach(volume, layer)?;
        }
        self.pool.volumes.settle_account(volume);
        self.pool.journal.touch(Table::Volumes, volume.0, 0);
        Ok(released)
    }

    /// Adopts a copy that a predecessor began: its target's content is unknown. Call it after all
    /// grants, as a later grant of the target proves that the copy ended.
    pub fn adopt_copy(&mut self, volume: VolumeId, device: DeviceIndex, extent: ExtentIndex) {
        let run = DeviceRun::new(device, extent.0, 1);
        let target = self.pool.volumes.by_id.get_mut(&volume);
        if target.is_some_and(|target| target.spare.take(run)) {
            self.pool.allocator.free(&mut self.pool.journal, run);
        }
    }

    /// Prepares a write to a shared extent: takes a spare extent as the copy's target. An error
    /// leaves nothing. Otherwise call [`Snapshots::end_copy`] or [`Snapshots::fail_copy`].
    pub fn begin_copy(
        &mut self,
        volume: VolumeId,
        logical: ExtentIndex,
    ) -> Result<std::result::Result<ExtentCopy, FaultAnswer>> {
        self.pool.ready()?;
        self.pool.volumes.writable(volume)?;
        if self.pool.journal.committed_id() < self.pool.opening_batch {
            return Ok(Err(FaultAnswer::AwaitCommit {
                batch: self.pool.opening_batch,
            }));
        }
        let placement = self.pool.info.settings.placement;
        let (volumes, allocator) = (&mut self.pool.volumes, &mut self.pool.allocator);
        let target = volumes.get(volume)?;
        let Place::Shared(source) = volumes.layers.place(target, logical.0, 1) else {
            return Err(PoolError::invalid(format!(
                "extent {} of {volume} is not shared",
                logical.0
            )));
        };
        let placer = Placer::new(allocator, placement);
        let copy = volumes
            .get_mut(volume)?
            .begin_copy(&placer, logical.0, source)?;
        if let Some(copy) = copy {
            allocator.extents.mark_allocated(copy.target);
            return Ok(Ok(copy));
        }
        let why = volumes.why_no_spare(&allocator.extents, volume)?;
        Ok(Err(why))
    }

    /// A copy is complete: its target is the volume's own, as after
    /// [`FaultAnswer::Allocated`], which is returned.
    pub fn end_copy(&mut self, volume: VolumeId, logical: ExtentIndex) -> Result<FaultAnswer> {
        let commit_seq = self.pool.volumes.next_seq;
        let target = self.pool.volumes.get_mut(volume)?;
        let target = target.end_copy(logical.0, commit_seq)?;
        self.pool.allocator.extents.mark_allocated(target);
        self.pool.volumes.next_seq += 1;
        Ok(FaultAnswer::Allocated {
            device: target.device,
            extent: target.first,
            commit_seq,
        })
    }

    /// A copy failed, and the volume keeps the shared extent.
    pub fn fail_copy(
        &mut self,
        volume: VolumeId,
        logical: ExtentIndex,
        failure: CopyFailure,
    ) -> Result<()> {
        let target = self.pool.volumes.get_mut(volume)?.take_copy(logical.0)?;
        let (allocator, journal) = (&mut self.pool.allocator, &mut self.pool.journal);
        match failure {
            CopyFailure::Ended => allocator.free(journal, target),
            CopyFailure::Hangs => allocator.quarantine(journal, target),
        }
        self.pool.volumes.settle_account(volume);
        Ok(())
    }

    /// The devices of copies for the volume that have not ended.
    pub fn copying_on(&self, volume: VolumeId) -> BTreeSet<DeviceIndex> {
        let volumes = &self.pool.volumes;
        let Ok(target) = volumes.get(volume) else {
            return BTreeSet::new();
        };
        let mut devices = BTreeSet::new();
        for (logical, copy) in &target.copying {
            devices.insert(copy.device);
            if let Place::Shared(source) = volumes.layers.place(target, *logical, 1) {
                devices.insert(source.device);
            }
        }
        devices
    }

    /// Frees extents that are still unneeded: dirty once the open batch is durable. Requests to
    /// their devices from before must have ended, as for a merge.
    pub fn free_unneeded(&mut self, unneeded: &Unneeded) -> Result<Released> {
        self.pool.ready()?;
        let (allocator, journal) = (&mut self.pool.allocator, &mut self.pool.journal);
        let volumes = &mut self.pool.volumes;
        (volumes.layers).free_unneeded(&volumes.by_id, allocator, journal, unneeded)
    }

    /// The next step of a merge, in a layer after `after`; `None` if no layer there can be merged.
    pub fn next_merge(&self, after: Option<LayerId>) -> Option<MergeStep> {
        let committed = self.pool.journal.committed_id();
        self.pool.volumes.next_merge(committed, after)
    }

    /// Does a step of a merge: freed extents are dirty once the open batch is durable. `InUse` if
    /// mappings in its range are not durable, if it is no longer the next step, or if it is the last
    /// one and copies of the volume go on.
    pub fn merge(&mut self, step: &MergeStep) -> Result<Released> {
        self.pool.ready()?;
        let before = LayerId(step.layer.0.wrapping_sub(1));
        let after = (step.layer.0 > 0).then_some(before);
        if self.next_merge(after).as_ref() != Some(step) {
            return Err(PoolError::in_use(format!(
                "{} has changed since this step of its merge was planned",
                step.layer
            )));
        }
        let (allocator, journal) = (&mut self.pool.allocator, &mut self.pool.journal);
        let volumes = &mut self.pool.volumes;
        let released = (volumes.layers).merge(&mut volumes.by_id, allocator, journal, step)?;
        if let Some(volume) = step.volume() {
            volumes.settle_account(volume);
        }
        Ok(released)
    }
}

#[cfg(feature = "test")]
impl Snapshots<'_> {
    /// Advances the epoch as `count` snapshots would.
    pub fn skip_epochs(&mut self, volume: VolumeId, count: u64) {
        if let Ok(volume) = self.pool.volumes.get_mut(volume) {
            volume.record.layering.freezes += count;
        }
    }
}

pub(super) fn snapshot_name(volume: &VolumeRecord, name: &str) -> String {
    format!("{}{SNAPSHOT_MARK}{name}", volume.name)
}
