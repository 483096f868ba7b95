//! Ending a volume: its name at once, its extents in slices.
//!
//! **Design.** The first transaction takes the volume away from everybody: its record loses its name, which
//! is what says that it is being deleted; what was reserved for it, what was not durably mapped and what is on
//! devices that hang is given up with that. Its map stays until slices of it, each in a transaction of its own,
//! have been freed; the record goes with the last. A volume of one slice is gone with the first transaction.
//! After a crash the slices go on with what the catalog says. **Not here:** revoking its grants, and when the
//! next slice comes (the caller).

use super::{Volumes, faults::Released, map::MAP_CHUNK};
use crate::{
    error::{PoolError, Result},
    extents::allocator::Allocator,
    journal::{Journal, batch::Table},
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::collections::BTreeSet;

/// How many extents are freed in one step: some milliseconds, wherever they are.
pub(crate) const SLICE_EXTENTS: u64 = 16 << 10;

impl Volumes {
    /// Takes a volume, which nobody uses any more, away from everybody, and frees a slice of it.
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
        self.promised -= gone.owed;
        self.catalog_promised -= gone.catalog_bytes;
        (gone.owed, gone.catalog_bytes) = (0, 0);
        self.names.remove(&name);
        gone.record.name.clear();
        gone.record.reserved_bytes = 0;
        // What a batch carries is durable before this is.
        gone.pending = Default::default();
        self.deleting.insert(volume, gone);
        journal.touch(Table::Volumes, volume.0, 0);
        self.free_slice(allocator, journal, volume, &mut released);
        Ok(released)
    }

    /// What can't wait for its slice.
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

    /// Whether extents of a deleted volume are still to be freed.
    pub fn has_more_to_delete(&self) -> bool {
        !self.deleting.is_empty()
    }

    /// Frees a slice of the first deleted volume that has one left.
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

    /// Frees a slice of a deleted volume.
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
            // Nothing should be left of it; if it is, nobody knows what it holds.
            runs.extend(volume.stock.drain());
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
