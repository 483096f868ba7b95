//! Merges a layer with its only child, a chunk or more at a time.
//!
//! The smaller of the two maps moves into the larger. Where both map an extent, the child's stays
//! and the layer's is freed. After each step, a volume's extents lie where they lay before. At the
//! end the child has the whole map, and the layer's parent.
//!
//! **Not here:** what must hold before a step (`Pool::merge`).

use super::{
    Volumes,
    faults::Released,
    hidden::{Hidden, HiddenChunk},
    layers::Node,
    map::{MAP_CHUNK, VolumeMap},
};
use crate::{
    error::{PoolError, Result},
    extents::allocator::Allocator,
    journal::{Journal, batch::Table},
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

fn first_chunk(map: &VolumeMap, hidden: &Hidden) -> Option<u64> {
    let mapped = map.chunks_from(0).next().map(|(chunk, _)| chunk);
    let hidden = hidden.chunks_from(0).next();
    mapped.into_iter().chain(hidden).min()
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

impl Volumes {
    fn side(&self, node: Node) -> Option<(&VolumeMap, &Hidden)> {
        match node {
            Node::Volume(id) => self.by_id.get(&id).map(|v| (&v.map, &v.hidden)),
            Node::Layer(id) => self.layers.get(&id).map(|l| (&l.map, &l.hidden)),
        }
    }

    fn take_side(&mut self, node: Node) -> Option<Side> {
        let (id, map, hidden) = match node {
            Node::Volume(id) => {
                let volume = self.by_id.get_mut(&id)?;
                let id = volume.record.map_id();
                (id, &mut volume.map, &mut volume.hidden)
            }
            Node::Layer(id) => {
                let layer = self.layers.get_mut(&id)?;
                (layer.record.map, &mut layer.map, &mut layer.hidden)
            }
        };
        Some(Side {
            id,
            map: std::mem::take(map),
            hidden: std::mem::take(hidden),
        })
    }

    fn put_side(&mut self, node: Node, side: Side) {
        match node {
            Node::Volume(id) => {
                if let Some(volume) = self.by_id.get_mut(&id) {
                    (volume.map, volume.hidden) = (side.map, side.hidden);
                }
                self.settle_account(id);
            }
            Node::Layer(id) => {
                if let Some(layer) = self.layers.get_mut(&id) {
                    (layer.map, layer.hidden) = (side.map, side.hidden);
                }
            }
        }
    }

    /// The next step of the first possible merge after `after`.
    pub(crate) fn next_merge(&self, after: Option<LayerId>) -> Option<MergeStep> {
        let from = after.map_or(LayerId(0), |id| LayerId(id.0 + 1));
        let mut layers = self.layers.range(from..);
        layers.find_map(|(id, layer)| {
            let child = layer.only_child()?;
            // A layer that is being freed goes first.
            if matches!(child, Node::Layer(child) if self.unused_layers.contains(&child)) {
                return None;
            }
            let (map, hidden) = self.side(child)?;
            let up = map.chunks() + hidden.len() < layer.map.chunks() + layer.hidden.len();
            let moving = if up {
                (map, hidden)
            } else {
                (&layer.map, &layer.hidden)
            };
            let chunk = first_chunk(moving.0, moving.1).unwrap_or(0);
            let range = ExtentRange::new(chunk * MAP_CHUNK, MAP_CHUNK);
            let below = layer.map.within(range.first, range.count);
            let devices = below
                .into_iter()
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
        allocator: &mut Allocator,
        journal: &mut Journal,
        step: &MergeStep,
    ) -> Result<Released> {
        let before = LayerId(step.layer.0.wrapping_sub(1));
        let after = (step.layer.0 > 0).then_some(before);
        if self.next_merge(after).as_ref() != Some(step) {
            return Err(PoolError::in_use(format!(
                "{} has changed since this step of its merge was planned",
                step.layer
            )));
        }
        if let Some(volume) = step.volume().and_then(|id| self.by_id.get(&id)) {
            let (first, end) = (step.range.first, step.range.end());
            if volume.pending.within(first, end).next().is_some()
                || volume.copying.range(first..end).next().is_some()
            {
                return Err(PoolError::in_use(format!(
                    "{} has mappings that are not durable",
                    volume.record.id
                )));
            }
        }
        let is_base = self.layers.get(&step.layer).map(|l| l.record.parent) == Some(None);
        let (Some(mut layer), Some(mut child)) = (
            self.take_side(Node::Layer(step.layer)),
            self.take_side(step.child),
        ) else {
            return Err(PoolError::not_found(format!("no {}", step.layer)));
        };
        let chunk = step.range.first / MAP_CHUNK;
        let released = move_chunk(
            allocator, journal, chunk, &mut layer, &mut child, step, is_base,
        );
        let moving = if step.up { &child } else { &layer };
        let is_over = first_chunk(&moving.map, &moving.hidden).is_none();
        if is_over {
            self.end_merge(journal, step, layer, child);
        } else {
            self.put_side(Node::Layer(step.layer), layer);
            self.put_side(step.child, child);
        }
        Ok(released)
    }

    /// The child gets the remaining map, and the layer's parent.
    fn end_merge(&mut self, journal: &mut Journal, step: &MergeStep, layer: Side, child: Side) {
        let Some(gone) = self.layers.remove(&step.layer) else {
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
                if let Some(volume) = self.by_id.get_mut(&id) {
                    volume.record.layering.map = Some(map);
                    volume.record.layering.parent = parent;
                }
                journal.touch(Table::Volumes, id.0, 0);
            }
            Node::Layer(id) => {
                if let Some(layer) = self.layers.get_mut(&id) {
                    layer.record.map = map;
                    layer.record.parent = parent;
                }
                journal.touch(Table::Layers, id.0, 0);
            }
        }
        self.put_side(step.child, kept);
        self.adopt_child(parent, step.layer, step.child);
        journal.touch(Table::Layers, step.layer.0, 0);
    }
}

/// Moves one chunk from the smaller map into the larger; the child's mappings win.
fn move_chunk(
    allocator: &mut Allocator,
    journal: &mut Journal,
    chunk: u64,
    layer: &mut Side,
    child: &mut Side,
    step: &MergeStep,
    is_base: bool,
) -> Released {
    let (first, count) = (step.range.first, step.range.count);
    let mut released = Released::default();
    let hidden = child.hidden.chunk(chunk).copied().unwrap_or_default();
    let mut freed = Vec::new();
    for mapping in child.map.within(first, count) {
        freed.extend(layer.map.remove(mapping.logical, mapping.run.count));
    }
    for logical in bits_of(chunk, &hidden) {
        freed.extend(layer.map.remove(logical, 1));
    }
    for mapping in freed {
        allocator.free(journal, mapping.run);
        released.extents += mapping.run.count;
        released.runs.push(mapping.run);
    }
    let mut all = layer.hidden.remove_chunk(chunk).unwrap_or_default();
    for (word, more) in all.iter_mut().zip(&hidden) {
        *word |= more;
    }
    child.hidden.remove_chunk(chunk);
    let (from, to) = if step.up {
        (child, layer)
    } else {
        (layer, child)
    };
    for mapping in from.map.remove(first, count) {
        allocator.extents.mark_allocated(mapping.run);
        to.map.insert_run(mapping.logical, mapping.run);
    }
    // Nothing lies below a base.
    if !is_base {
        to.hidden.load_chunk(chunk, all);
    }
    for side in [from.id, to.id] {
        journal.touch(Table::Maps, side.0, chunk);
        journal.touch(Table::Hidden, side.0, chunk);
    }
    released
}
