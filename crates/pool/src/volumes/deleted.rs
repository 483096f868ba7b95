//! Deleting a volume: its name at once, its extents in slices.
//!
//! The first transaction clears the record's name and frees reserved extents, non-durable mappings
//! and extents on hanging devices. The rest of the map is freed in slices, a transaction each; the
//! record goes last. After a crash the slices continue.

use super::{Volumes, faults::Released, map::MAP_CHUNK};
use crate::{
    error::{PoolError, Result},
    extents::allocator::Allocator,
    journal::{Journal, batch::Table},
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::collections::BTreeSet;

/// Extents per slice, which takes some milliseconds.
pub(crate) const SLICE_EXTENTS: u64 = 16 << 10;

impl Volumes {
    /// The volume must be unused.
    pub(crate) fn delete(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        let record = self.record(volume)?;
        let name = (record.tenant, record.name.clone());
        self.return_reservation(allocator, journal, volume)?;
        let mut released = self.unmap_at_once(allocator, journal, volume, hanging)?;
        let Some(mut gone) = self.by_id.remove(&volume) else {
            return Err(PoolError::not_found(format!("no {volume}")));
        };
        self.promised -= gone.entitlement;
        self.catalog_promised -= gone.catalog_bytes;
        (gone.entitlement, gone.catalog_bytes) = (0, 0);
        self.names.remove(&name);
        gone.record.name.clear();
        gone.record.reserved_bytes = 0;
        // Their batch becomes durable before this one.
        gone.pending = Default::default();
        self.deleting.insert(volume, gone);
        journal.touch(Table::Volumes, volume.0, 0);
        self.free_slice(allocator, journal, volume, &mut released);
        Ok(released)
    }

    /// Frees what can't wait for its slice.
    fn unmap_at_once(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        let target = self.get(volume)?;
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
            let part = self.unmap(allocator, journal, volume, logical, count, hanging)?;
            released.runs.extend(part.runs);
            released.extents += part.extents;
            released.quarantined += part.quarantined;
        }
        Ok(released)
    }

    /// Whether deleted volumes have extents left to free.
    pub fn has_more_to_delete(&self) -> bool {
        !self.deleting.is_empty()
    }

    /// Frees a slice of the first deleted volume.
    pub(crate) fn delete_more(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
    ) -> Released {
        let mut released = Released::default();
        if let Some(volume) = self.deleting.keys().next().copied() {
            self.free_slice(allocator, journal, volume, &mut released);
        }
        released
    }

    fn free_slice(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        id: VolumeId,
        released: &mut Released,
    ) {
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
            // Nothing should be left; anything else has unknown content.
            runs.extend(volume.spare.drain());
            self.deleting.remove(&id);
            journal.touch(Table::Volumes, id.0, 0);
        }
        for chunk in chunks {
            journal.touch(Table::Maps, id.0, chunk);
        }
        for run in runs {
            allocator.free(journal, run);
            released.extents += run.count;
            released.runs.push(run);
        }
    }
}
