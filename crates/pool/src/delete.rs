//! Ending a volume: its name at once, its extents in slices.
//!
//! **Design.** The first transaction takes the volume away from everybody: its record loses its name, which
//! is what says that it is being deleted; what was reserved for it, what was not durably mapped and what is on
//! devices that hang is given up with that. Its map stays until slices of it, each in a transaction of its own,
//! have been freed; the record goes with the last. A volume of one slice is gone with the first transaction.
//! After a crash the slices go on with what the catalog says. **Not here:** revoking its grants, and when the
//! next slice comes (the caller).

use crate::{
    batch::Table,
    error::{PoolError, Result},
    owner::Released,
    pool::{Pool, Volume},
    volume_map::MAP_CHUNK,
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::collections::BTreeSet;

/// How many extents are freed in one step: some milliseconds, wherever they are.
pub(crate) const SLICE_EXTENTS: u64 = 16 << 10;

impl Pool {
    /// Removes a volume: its record, or at least its name, its reservation and its extents, or some of
    /// them, go in one transaction; extents become dirty. [`Pool::delete_more`] frees the rest.
    ///
    /// Every grant of it must be revoked and drained before. What is on devices that are `hanging`,
    /// where a write to it may still be under way, is quarantined instead.
    pub fn delete_volume(
        &mut self,
        volume: VolumeId,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        self.ready()?;
        let record = self.volume(volume)?;
        if self.volume_exports.contains_key(&volume) {
            return Err(PoolError::in_use(format!(
                "volume {:?} is exported: delete the export first",
                record.name
            )));
        }
        let name = (record.tenant, record.name.clone());
        self.return_reservation(volume)?;
        let mut released = self.unmap_at_once(volume, hanging)?;
        let Some(mut gone) = self.volumes.remove(&volume) else {
            return Err(PoolError::not_found(format!("no {volume}")));
        };
        self.promised -= gone.owed;
        self.catalog_promised -= gone.catalog_bytes;
        (gone.owed, gone.catalog_bytes) = (0, 0);
        self.volume_names.remove(&name);
        self.forget_host_reservations(volume);
        self.forget_volume_budget(volume);
        gone.record.name.clear();
        gone.record.reserved_bytes = 0;
        // What a batch carries is durable before this is.
        gone.pending = Default::default();
        self.deleting.insert(volume, gone);
        self.touch(Table::Volumes, volume.0, 0);
        self.free_slice(volume, &mut released);
        Ok(released)
    }

    /// What can't wait for its slice.
    fn unmap_at_once(
        &mut self,
        volume: VolumeId,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        let target = self.volume_ref(volume)?;
        let pending = target.pending.within(0, u64::MAX);
        let uncarried = pending.filter(|(_, pending)| pending.committing.is_none());
        let mut ranges: Vec<(u64, u64)> = uncarried.map(|(logical, _)| (logical, 1)).collect();
        if !hanging.is_empty() {
            let mapped = target.map.within(0, u64::MAX).into_iter();
            let there = mapped.filter(|mapping| hanging.contains(&mapping.run.device));
            ranges.extend(there.map(|mapping| (mapping.logical, mapping.run.count)));
        }
        let mut released = Released::default();
        for (logical, count) in ranges {
            let part = self.unmap(volume, logical, count, hanging)?;
            released.runs.extend(part.runs);
            released.extents += part.extents;
            released.quarantined += part.quarantined;
        }
        Ok(released)
    }

    /// Whether extents of a deleted volume are still to be freed.
    pub fn has_more_to_delete(&self) -> bool {
        !self.deleting.is_empty()
    }

    /// Frees some more extents of volumes that were deleted: dirty once the open batch is durable. To be
    /// called, and committed, until there is no more.
    pub fn delete_more(&mut self) -> Result<Released> {
        self.ready()?;
        let mut released = Released::default();
        if let Some(volume) = self.deleting.keys().next().copied() {
            self.free_slice(volume, &mut released);
        }
        Ok(released)
    }

    /// How many extents [`Pool::delete_volume`] and [`Pool::delete_more`] free at once.
    pub fn set_delete_slice(&mut self, extents: u64) {
        self.delete_slice = extents;
    }

    fn free_slice(&mut self, id: VolumeId, released: &mut Released) {
        let Some(volume) = self.deleting.get_mut(&id) else {
            return;
        };
        let (mut runs, mut chunks, mut left) = (Vec::new(), Vec::new(), self.delete_slice.max(1));
        while left > 0 {
            let first = volume.map.chunks_from(0).next();
            let first = first.and_then(|(chunk, runs)| Some((chunk, runs.first()?.start)));
            let Some((chunk, at)) = first else {
                break;
            };
            let count = left.min(MAP_CHUNK - u64::from(at));
            for mapping in volume.map.remove(chunk * MAP_CHUNK + u64::from(at), count) {
                left -= mapping.run.count;
                runs.push(mapping.run);
            }
            chunks.push(chunk);
        }
        let is_over = volume.map.mapped() == 0;
        if is_over {
            // Nothing should be left of it; if it is, nobody knows what it holds.
            runs.extend(volume.stock.drain());
            self.deleting.remove(&id);
            self.touch(Table::Volumes, id.0, 0);
        }
        for chunk in chunks {
            self.touch(Table::Maps, id.0, chunk);
        }
        for run in runs {
            self.free_extents(run);
            released.extents += run.count;
            released.runs.push(run);
        }
    }

    /// A volume, or what is left of one.
    pub(crate) fn any_volume(&self, id: VolumeId) -> Option<&Volume> {
        self.volumes.get(&id).or_else(|| self.deleting.get(&id))
    }

    /// The first volume from `id` on, being deleted or not.
    pub(crate) fn volume_from(&self, id: VolumeId) -> Option<(VolumeId, &Volume)> {
        let first = |volumes: &'_ std::collections::BTreeMap<VolumeId, Volume>| {
            volumes.range(id..).next().map(|(id, _)| *id)
        };
        let found = first(&self.volumes)
            .into_iter()
            .chain(first(&self.deleting));
        let id = found.min()?;
        Some((id, self.any_volume(id)?))
    }
}
