//! Snapshots, clones, rollback, copies of shared extents, and merges of layers.
//!
//! **What must hold before**, the caller's part:
//! - [`Pool::snapshot`]: no write to the volumes is in flight, none begins before the batch is
//!   durable, and all their mappings are durable.
//! - [`Pool::roll_back`]: the volume's grants are revoked and drained.
//! - [`Pool::merge`]: the step's range is held, and requests to the step's devices from before have
//!   ended, because a read may have begun before a copy replaced its extent.
//! - [`Pool::end_copy`]: the whole extent was copied. The commit of its mapping follows a flush, as
//!   for any other.

use super::{
    Pool,
    admin::{RECORD_BYTES, new_id},
    tenants::check_name,
};
use crate::{
    error::{PoolError, Result},
    features::LAYERS,
    journal::batch::Table,
    records::{LayerId, Layering, VolumeRecord},
    volumes::{
        copies::{CopyFailure, ExtentCopy},
        faults::{FaultAnswer, Released},
        layers::Node,
        merge::MergeStep,
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

impl Pool {
    /// Whether these snapshots can be taken now, as one group.
    pub fn check_snapshots(&self, new: &[NewSnapshot]) -> Result<()> {
        self.ready()?;
        let (mut volumes, mut needed) = (BTreeSet::new(), 0u64);
        for NewSnapshot { volume, name } in new {
            let target = self.volumes.get(*volume)?;
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
            self.volumes.check_depth(target)?;
            needed += self.volumes.entitlement_after_freeze(target);
        }
        self.admit(new.len() as u64 * 3 * RECORD_BYTES)?;
        let extent_bytes = self.info.extent_bytes;
        let most = self.volumes.promisable(&self.allocator.extents, &volumes);
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
        if self.volumes.names.contains_key(&key) {
            let tenant = self.tenants.get(record.tenant)?;
            return Err(PoolError::exists(format!(
                "tenant {:?} already has {name:?}",
                tenant.name
            )));
        }
        Ok(())
    }

    /// Takes snapshots of several volumes at one moment. Their ids, in the same order.
    pub fn snapshot(&mut self, new: &[NewSnapshot], now_s: u64) -> Result<Vec<VolumeId>> {
        self.check_snapshots(new)?;
        for NewSnapshot { volume, .. } in new {
            let volume = self.volumes.get(*volume)?;
            if volume.pending.len() > 0 || !volume.copying.is_empty() {
                return Err(PoolError::in_use(format!(
                    "volume {:?} has mappings that are not durable",
                    volume.record.name
                )));
            }
        }
        self.use_layers();
        let (volumes, allocator) = (&mut self.volumes, &mut self.allocator);
        let owed = new.iter().filter_map(|new| volumes.get(new.volume).ok());
        let owed = owed.map(|volume| volumes.entitlement_after_freeze(volume));
        let needed = volumes.promised + owed.sum::<u64>();
        let these = new.iter().map(|new| new.volume).collect();
        volumes.make_room(allocator, &mut self.journal, needed, &these)?;
        let taken = new.iter().map(|new| self.freeze_as(new, now_s));
        taken.collect()
    }

    fn freeze_as(&mut self, new: &NewSnapshot, now_s: u64) -> Result<VolumeId> {
        let layer = self.freeze(new.volume)?;
        let record = &mut self.volumes.get_mut(new.volume)?.record;
        record.layering.freezes += 1;
        let snapshot = VolumeRecord {
            id: VolumeId(new_id(&mut self.info, &mut self.journal)),
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
        self.journal.touch(Table::Volumes, new.volume.0, 0);
        self.add_above(snapshot, layer)
    }

    fn freeze(&mut self, volume: VolumeId) -> Result<Option<LayerId>> {
        let info = &mut self.info;
        let new_id = |journal: &mut _| new_id(info, journal);
        self.volumes.freeze(&mut self.journal, volume, new_id)
    }

    fn add_above(&mut self, record: VolumeRecord, layer: Option<LayerId>) -> Result<VolumeId> {
        let id = record.id;
        self.volumes.insert(record);
        self.volumes.attach(id, layer)?;
        self.journal.touch(Table::Volumes, id.0, 0);
        Ok(id)
    }

    /// Earlier versions refuse the pool from now on.
    fn use_layers(&mut self) {
        let (class, bit) = (LAYERS.class as u64, u64::from(LAYERS.bit));
        self.journal.touch(Table::Features, class, bit);
    }

    fn snapshot_record(&self, snapshot: VolumeId) -> Result<&VolumeRecord> {
        let record = self.volumes.record(snapshot)?;
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
        self.ready()?;
        check_name("volume", &new.name)?;
        let tenant = self.tenants.named(&new.tenant)?.id;
        let of = self.snapshot_record(new.snapshot)?;
        let record = VolumeRecord {
            id: VolumeId(self.info.next_id),
            uuid: Uuid::new_v4(),
            tenant,
            name: new.name.clone(),
            reserved_bytes: new.reserved_bytes,
            created_s: now_s,
            layering: Layering::default(),
            ..of.clone()
        };
        self.check_new_name(&record, &new.name)?;
        self.volumes.check_depth(self.volumes.get(new.snapshot)?)?;
        self.admit(3 * RECORD_BYTES)?;
        self.volumes.make_room_for_reservation(
            &mut self.allocator,
            &mut self.journal,
            None,
            new.reserved_bytes,
            record.size_bytes,
        )?;
        self.use_layers();
        let layer = self.freeze(new.snapshot)?;
        let id = VolumeId(new_id(&mut self.info, &mut self.journal));
        self.add_above(VolumeRecord { id, ..record }, layer)
    }

    /// Whether [`Pool::roll_back`] would be refused.
    pub fn check_roll_back(&self, volume: VolumeId, snapshot: VolumeId) -> Result<()> {
        self.ready()?;
        let record = self.volumes.record(volume)?;
        let of = self.snapshot_record(snapshot)?;
        if of.layering.snapshot_of != Some(volume) {
            return Err(PoolError::invalid(format!(
                "{:?} is not a snapshot of this volume {:?}: clone the snapshot",
                of.name, record.name
            )));
        }
        self.volumes.check_depth(self.volumes.get(snapshot)?)?;
        self.admit(3 * RECORD_BYTES)
    }

    /// Gives a volume a snapshot's content, and zeros beyond the snapshot's size. Later snapshots
    /// stay. Extents on `hanging` devices are quarantined if no snapshot has them.
    pub fn roll_back(
        &mut self,
        volume: VolumeId,
        snapshot: VolumeId,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        self.check_roll_back(volume, snapshot)?;
        let (volumes, allocator) = (&mut self.volumes, &mut self.allocator);
        if !volumes.get(volume)?.copying.is_empty() {
            return Err(PoolError::in_use(format!("{volume} has copies that go on")));
        }
        let released = volumes.unmap_at_once(allocator, &mut self.journal, volume, hanging)?;
        // Its own map becomes a layer that nothing needs.
        let above = self.freeze(volume)?;
        let target = self.volumes.get_mut(volume)?;
        // Mappings in a batch become durable with the layer.
        target.pending = Default::default();
        target.record.layering.parent = None;
        self.volumes
            .detach(&mut self.journal, Node::Volume(volume), above);
        // The snapshot may have its own map by now.
        let layer = self.freeze(snapshot)?;
        self.volumes.attach(volume, layer)?;
        self.volumes.settle_account(volume);
        self.journal.touch(Table::Volumes, volume.0, 0);
        Ok(released)
    }

    /// Prepares a write to a shared extent: takes a spare extent as the copy's target. An error
    /// leaves nothing. Otherwise call [`Pool::end_copy`] or [`Pool::fail_copy`].
    pub fn begin_copy(
        &mut self,
        volume: VolumeId,
        logical: ExtentIndex,
    ) -> Result<std::result::Result<ExtentCopy, FaultAnswer>> {
        self.ready()?;
        self.volumes.writable(volume)?;
        let placement = self.info.settings.placement;
        let (volumes, allocator) = (&mut self.volumes, &mut self.allocator);
        if let Some(copy) = volumes.begin_copy(allocator, placement, volume, logical.0)? {
            return Ok(Ok(copy));
        }
        let why = volumes.why_no_spare(&allocator.extents, volume)?;
        Ok(Err(why))
    }

    /// A copy is complete: its target is the volume's own, as after
    /// [`FaultAnswer::Allocated`](crate::FaultAnswer::Allocated), which is returned.
    pub fn end_copy(&mut self, volume: VolumeId, logical: ExtentIndex) -> Result<FaultAnswer> {
        let (target, commit_seq) = self
            .volumes
            .end_copy(&mut self.allocator, volume, logical)?;
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
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes
            .fail_copy(allocator, journal, volume, logical, failure)
    }

    /// The next step of a merge, in a layer after `after`; `None` if no layer there can be merged.
    pub fn next_merge(&self, after: Option<LayerId>) -> Option<MergeStep> {
        self.volumes.next_merge(after)
    }

    /// Does a step of a merge: freed extents are dirty once the open batch is durable. `InUse` if
    /// mappings in its range are not durable, or if it is no longer the next step.
    pub fn merge(&mut self, step: &MergeStep) -> Result<Released> {
        self.ready()?;
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes.merge(allocator, journal, step)
    }
}

fn snapshot_name(volume: &VolumeRecord, name: &str) -> String {
    format!("{}{SNAPSHOT_MARK}{name}", volume.name)
}
