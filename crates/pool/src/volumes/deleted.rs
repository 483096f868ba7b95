//! Deleting a volume: its name at once, its extents in slices.
//!
//! The first transaction clears the record's name and frees reserved extents, non-durable mappings
//! and extents on hanging devices. The rest of the map is freed in slices, a transaction each; the
//! record goes last. After a crash the slices continue. Unused layers are freed in the same way.

use super::{Volumes, faults::Released, layers::Node, map::MAP_CHUNK};
use crate::{
    error::{PoolError, Result},
    extents::allocator::Allocator,
    journal::{Journal, batch::Table},
    records::Layering,
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
        // Only a copy on a device that hangs is still open.
        for run in std::mem::take(&mut gone.copying).into_values() {
            allocator.quarantine(journal, run);
        }
        let layering = gone.record.layering;
        gone.record.layering = Layering {
            map: layering.map,
            ..Layering::default()
        };
        self.deleting.insert(volume, gone);
        journal.touch(Table::Volumes, volume.0, 0);
        self.free_slice(allocator, journal, Node::Volume(volume), &mut released);
        self.layers
            .detach(journal, Node::Volume(volume), layering.parent);
        Ok(released)
    }

    /// Frees what can't wait for its slice.
    pub(crate) fn unmap_at_once(
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

    /// Whether deleted volumes or layers have extents left to free.
    pub fn has_more_to_delete(&self) -> bool {
        !self.deleting.is_empty() || !self.layers.unused.is_empty()
    }

    /// Frees a slice of the first deleted volume or layer.
    pub(crate) fn delete_more(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
    ) -> Released {
        let mut released = Released::default();
        let volume = self.deleting.keys().next().copied().map(Node::Volume);
        let layer = self.layers.unused.first().copied().map(Node::Layer);
        if let Some(node) = volume.or(layer) {
            self.free_slice(allocator, journal, node, &mut released);
        }
        released
    }

    fn free_slice(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        node: Node,
        released: &mut Released,
    ) {
        let most = self.delete_slice.max(1);
        let (id, map, hidden) = match node {
            Node::Volume(id) => {
                let Some(volume) = self.deleting.get_mut(&id) else {
                    return;
                };
                let id = volume.record.map_id();
                (id, &mut volume.map, &mut volume.hidden)
            }
            Node::Layer(id) => {
                let Some(layer) = self.layers.by_id.get_mut(&id) else {
                    return;
                };
                (layer.record.map, &mut layer.map, &mut layer.hidden)
            }
        };
        let (mut runs, mut left) = (Vec::new(), most);
        while left > 0 {
            let first = map.chunks_from(0).next();
            let first = first.and_then(|(chunk, runs)| Some((chunk, runs.first()?.start)));
            let Some((chunk, at)) = first else {
                break;
            };
            let count = left.min(MAP_CHUNK - u64::from(at));
            for mapping in map.remove(chunk * MAP_CHUNK + u64::from(at), count) {
                left -= mapping.run.count;
                runs.push(mapping.run);
            }
            journal.touch(Table::Maps, id.0, chunk);
        }
        let chunks: Vec<u64> = hidden.chunks_from(0).take(left as usize).collect();
        for chunk in chunks {
            hidden.remove_chunk(chunk);
            journal.touch(Table::Hidden, id.0, chunk);
        }
        let is_over = map.mapped() == 0 && hidden.is_empty();
        if is_over {
            self.layers.maps.remove(&id);
            match node {
                Node::Volume(id) => {
                    journal.touch(Table::Volumes, id.0, 0);
                    let gone = self.deleting.remove(&id);
                    // Nothing should be left; anything else has unknown content.
                    runs.extend(gone.map_or_else(Vec::new, |mut volume| volume.spare.drain()));
                }
                Node::Layer(id) => self.layers.forget(journal, id),
            }
        }
        for run in runs {
            allocator.free(journal, run);
            released.extents += run.count;
            released.runs.push(run);
        }
    }
}
