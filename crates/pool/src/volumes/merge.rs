//! Merges a layer with its only child, a chunk or more at a time.
//!
//! The smaller of the two maps moves into the larger. Where both map an extent, the child's stays
//! and the layer's is freed. After each step, a volume's extents lie where they lay before. At the
//! end the child has the whole map, and the layer's parent.
//!
//! **Not here:** what must hold before a step (`Snapshots::merge`).

use super::{
    ById, Volumes,
    faults::Released,
    hidden::{Hidden, HiddenChunk},
    layers::{Layers, Node},
    map::{MAP_CHUNK, Mapping, VolumeMap},
};
use crate::{
    error::{PoolError, Result},
    extents::{allocator::Allocator, runs::DeviceRun},
    journal::{
        Journal,
        batch::{BatchId, Table},
    },
    records::{LayerId, MapId},
};
use forebay_xlate::types::{DeviceIndex, ExtentRange, VolumeId};
use std::collections::BTreeSet;

/// A step of a merge.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MergeStep {
    /// The layer.
    pub layer: LayerId,
    pub(crate) child: Node,
    /// Whether the child's map moves.
    up: bool,
    /// The logical extents whose mappings move.
    pub range: ExtentRange,
    /// The devices of extents that it frees.
    pub devices: BTreeSet<DeviceIndex>,
}

impl MergeStep {
    /// The volume that gets the layer's map, if the child is a volume that is written.
    pub fn volume(&self) -> Option<VolumeId> {
        match self.child {
            Node::Volume(volume) => Some(volume),
            Node::Layer(_) => None,
        }
    }
}

/// The first chunks with anything, of `most` successive ones.
fn first_chunks(map: &VolumeMap, hidden: &Hidden, most: u64) -> BTreeSet<u64> {
    let mapped = map.chunks_from(0).map(|(chunk, _)| chunk);
    let hidden = hidden.chunks_from(0);
    let (mut mapped, mut hidden) = (mapped.peekable(), hidden.peekable());
    let first = mapped
        .peek()
        .into_iter()
        .chain(hidden.peek())
        .min()
        .copied();
    let Some(end) = first.map(|first| first.saturating_add(most)) else {
        return BTreeSet::new();
    };
    let mapped = mapped.take_while(|chunk| *chunk < end);
    mapped
        .chain(hidden.take_while(|chunk| *chunk < end))
        .collect()
}

fn bits_of(chunk: u64, bits: &HiddenChunk) -> impl Iterator<Item = u64> + '_ {
    (0..MAP_CHUNK)
        .filter(|at| bits[(at / 64) as usize] & (1 << (at % 64)) != 0)
        .map(move |at| chunk * MAP_CHUNK + at)
}

/// One side of a merge.
struct Side {
    id: MapId,
    map: VolumeMap,
    hidden: Hidden,
}

impl Layers {
    fn side<'a>(&'a self, volumes: &'a ById, node: Node) -> Option<(&'a VolumeMap, &'a Hidden)> {
        match node {
            Node::Volume(id) => volumes.get(&id).map(|v| (&v.map, &v.hidden)),
            Node::Layer(id) => self.by_id.get(&id).map(|l| (&l.map, &l.hidden)),
        }
    }

    fn take_side(&mut self, volumes: &mut ById, node: Node) -> Option<Side> {
        let (id, map, hidden) = match node {
            Node::Volume(id) => {
                let volume = volumes.get_mut(&id)?;
                let id = volume.record.map_id();
                (id, &mut volume.map, &mut volume.hidden)
            }
            Node::Layer(id) => {
                let layer = self.by_id.get_mut(&id)?;
                (layer.record.map, &mut layer.map, &mut layer.hidden)
            }
        };
        Some(Side {
            id,
            map: std::mem::take(map),
            hidden: std::mem::take(hidden),
        })
    }

    fn put_side(&mut self, volumes: &mut ById, node: Node, side: Side) {
        match node {
            Node::Volume(id) => {
                if let Some(volume) = volumes.get_mut(&id) {
                    (volume.map, volume.hidden) = (side.map, side.hidden);
                }
            }
            Node::Layer(id) => {
                if let Some(layer) = self.by_id.get_mut(&id) {
                    (layer.map, layer.hidden) = (side.map, side.hidden);
                }
            }
        }
    }

    /// The next step of the first possible merge after `after`. The volume may then write where a
    /// former sibling read, so that sibling's end must be durable.
    pub(crate) fn next_merge(
        &self,
        volumes: &ById,
        delete_slice: u64,
        committed: BatchId,
        after: Option<LayerId>,
    ) -> Option<MergeStep> {
        let from = after.map_or(LayerId(0), |id| LayerId(id.0 + 1));
        let mut layers = self.by_id.range(from..);
        layers.find_map(|(id, layer)| {
            let child = layer.only_child()?;
            if layer.detached_in > committed {
                return None;
            }
            // A layer that is being freed goes first.
            if matches!(child, Node::Layer(child) if self.unused.contains(&child)) {
                return None;
            }
            let (map, hidden) = self.side(volumes, child)?;
            let up = map.chunks() + hidden.len() < layer.map.chunks() + layer.hidden.len();
            let moving = if up {
                (map, hidden)
            } else {
                (&layer.map, &layer.hidden)
            };
            let most = (delete_slice / MAP_CHUNK).max(1);
            let chunks = first_chunks(moving.0, moving.1, most);
            let (first, last) = (chunks.first().unwrap_or(&0), chunks.last().unwrap_or(&0));
            let range = ExtentRange::new(first * MAP_CHUNK, (last - first + 1) * MAP_CHUNK);
            let below = chunks
                .iter()
                .flat_map(|chunk| layer.map.within(chunk * MAP_CHUNK, MAP_CHUNK));
            let devices = below
                .filter(|mapping| {
                    (mapping.logical..mapping.logical + mapping.run.count)
                        .any(|logical| map.get(logical).is_some() || hidden.contains(logical))
                })
                .map(|mapping| mapping.run.device);
            Some(MergeStep {
                layer: *id,
                child,
                up,
                range,
                devices: devices.collect(),
            })
        })
    }

    /// Fails if it is no longer the next step of that merge.
    pub(crate) fn merge(
        &mut self,
        volumes: &mut ById,
        allocator: &mut Allocator,
        journal: &mut Journal,
        step: &MergeStep,
    ) -> Result<Released> {
        if let Some(volume) = step.volume().and_then(|id| volumes.get(&id)) {
            let (first, end) = (step.range.first, step.range.end());
            // At the end, the layer's extents become the volume's own, and none is copied.
            let after = end / MAP_CHUNK;
            let is_last = step.up
                && volume.map.chunks_from(after).next().is_none()
                && volume.hidden.chunks_from(after).next().is_none();
            let copying = match is_last {
                true => volume.copying.len(),
                false => volume.copying.range(first..end).count(),
            };
            if copying > 0 || volume.pending.within(first, end).next().is_some() {
                return Err(PoolError::in_use(format!(
                    "{} has mappings that are not durable",
                    volume.record.id
                )));
            }
        }
        let is_base = self.by_id.get(&step.layer).map(|l| l.record.parent) == Some(None);
        let (Some(mut layer), Some(mut child)) = (
            self.take_side(volumes, Node::Layer(step.layer)),
            self.take_side(volumes, step.child),
        ) else {
            return Err(PoolError::not_found(format!("no {}", step.layer)));
        };
        let moving = if step.up { &child } else { &layer };
        let most = step.range.count / MAP_CHUNK;
        let mut released = Released::default();
        for chunk in first_chunks(&moving.map, &moving.hidden, most) {
            let freed = move_chunk(chunk, &mut layer, &mut child, step.up, is_base);
            for side in [layer.id, child.id] {
                journal.touch(Table::Maps, side.0, chunk);
                journal.touch(Table::Hidden, side.0, chunk);
            }
            for run in freed.moved {
                allocator.extents.mark_allocated(run);
            }
            for run in freed.unneeded {
                allocator.free(journal, run);
                released.extents += run.count;
                released.runs.push(run);
            }
        }
        let moving = if step.up { &child } else { &layer };
        let is_over = first_chunks(&moving.map, &moving.hidden, 1).is_empty();
        if is_over {
            self.end_merge(volumes, journal, step, layer, child);
        } else {
            self.put_side(volumes, Node::Layer(step.layer), layer);
            self.put_side(volumes, step.child, child);
        }
        Ok(released)
    }

    /// The child gets the remaining map, and the layer's parent.
    fn end_merge(
        &mut self,
        volumes: &mut ById,
        journal: &mut Journal,
        step: &MergeStep,
        layer: Side,
        child: Side,
    ) {
        let Some(gone) = self.by_id.remove(&step.layer) else {
            return;
        };
        let kept = if step.up {
            self.maps.remove(&child.id);
            self.maps.insert(layer.id, step.child);
            layer
        } else {
            self.maps.remove(&layer.id);
            child
        };
        let (map, parent) = (kept.id, gone.record.parent);
        match step.child {
            Node::Volume(id) => {
                if let Some(volume) = volumes.get_mut(&id) {
                    volume.record.layering.map = Some(map);
                    volume.record.layering.parent = parent;
                }
                journal.touch(Table::Volumes, id.0, 0);
            }
            Node::Layer(id) => {
                if let Some(layer) = self.by_id.get_mut(&id) {
                    layer.record.map = map;
                    layer.record.parent = parent;
                }
                journal.touch(Table::Layers, id.0, 0);
            }
        }
        self.put_side(volumes, step.child, kept);
        self.adopt_child(parent, step.layer, step.child);
        journal.touch(Table::Layers, step.layer.0, 0);
    }
}

impl Volumes {
    /// The next step of the first possible merge after `after`.
    pub(crate) fn next_merge(
        &self,
        committed: BatchId,
        after: Option<LayerId>,
    ) -> Option<MergeStep> {
        self.layers
            .next_merge(&self.by_id, self.delete_slice, committed, after)
    }
}

/// Device runs of a moved chunk.
struct Moved {
    moved: Vec<DeviceRun>,
    unneeded: Vec<DeviceRun>,
}

/// Moves one chunk from the smaller map into the larger; the child's mappings win.
fn move_chunk(chunk: u64, layer: &mut Side, child: &mut Side, up: bool, is_base: bool) -> Moved {
    let (first, count) = (chunk * MAP_CHUNK, MAP_CHUNK);
    let hidden = child.hidden.remove_chunk(chunk).unwrap_or_default();
    let mut unneeded = Vec::new();
    for mapping in child.map.within(first, count) {
        unneeded.extend(layer.map.remove(mapping.logical, mapping.run.count));
    }
    for logical in bits_of(chunk, &hidden) {
        unneeded.extend(layer.map.remove(logical, 1));
    }
    let mut all = layer.hidden.remove_chunk(chunk).unwrap_or_default();
    for (word, more) in all.iter_mut().zip(&hidden) {
        *word |= more;
    }
    let (from, to) = if up { (child, layer) } else { (layer, child) };
    let moved = from.map.remove(first, count);
    for mapping in &moved {
        to.map.insert_run(mapping.logical, mapping.run);
    }
    // Nothing lies below a base.
    if !is_base {
        to.hidden.load_chunk(chunk, all);
    }
    let runs = |mappings: Vec<Mapping>| mappings.into_iter().map(|mapping| mapping.run).collect();
    Moved {
        moved: runs(moved),
        unneeded: runs(unneeded),
    }
}
