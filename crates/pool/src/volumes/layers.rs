//! Layers: frozen maps below those of volumes, for snapshots and clones.
//!
//! A snapshot freezes its volume's map as a layer, and the volume goes on with an empty map above
//! it. The snapshot is a volume without an own map above the same layer; a clone is another. So
//! every extent keeps exactly one map. A layer without children is freed (`deleted`); with one
//! child it is merged into it (`merge`).
//!
//! **Not here:** the copy that a write to a shared extent needs (`copies`), names (`pool`).

use super::{PoolVolume, Volumes, hidden::Hidden, map::VolumeMap};
use crate::{
    error::{PoolError, Result},
    extents::runs::DeviceRun,
    journal::{Journal, batch::Table},
    records::{LayerId, LayerRecord, MapId},
};
use forebay_xlate::types::VolumeId;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

/// Layers below a volume. Each costs a search at a fault.
pub(crate) const MAX_LAYERS: usize = 1024;

/// Bounds of one search for mapped ranges.
const STEPS_AT_ONCE: usize = 16_384;
const STEP_EXTENTS: u64 = 1 << 20;

/// The holder of a map.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Node {
    Volume(VolumeId),
    Layer(LayerId),
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Volume(id) => id.fmt(f),
            Node::Layer(id) => id.fmt(f),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) record: LayerRecord,
    pub(crate) map: VolumeMap,
    pub(crate) hidden: Hidden,
    /// Those that it is the parent of.
    pub(crate) children: BTreeSet<Node>,
}

impl Layer {
    pub(crate) fn new(record: LayerRecord) -> Self {
        Self {
            record,
            map: VolumeMap::default(),
            hidden: Hidden::default(),
            children: BTreeSet::new(),
        }
    }

    pub(crate) fn only_child(&self) -> Option<Node> {
        match self.children.len() {
            1 => self.children.first().copied(),
            _ => None,
        }
    }
}

/// Where an extent of a volume lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// In the volume's own map.
    Own(DeviceRun),
    /// In a layer; a write needs a copy.
    Shared(DeviceRun),
    /// Nowhere, for so many extents.
    Zeros(u64),
}

impl PoolVolume {
    fn has_own_map(&self) -> bool {
        self.map.mapped() > 0 || !self.hidden.is_empty()
    }
}

impl Volumes {
    pub(crate) fn layer(&self, id: LayerId) -> Option<&Layer> {
        self.layers.get(&id)
    }

    /// The layers below a volume, from the top.
    pub(crate) fn layers_below(&self, volume: &PoolVolume) -> impl Iterator<Item = &Layer> {
        let layer = |id: Option<LayerId>| self.layers.get(&id?);
        std::iter::successors(layer(volume.record.layering.parent), move |above| {
            layer(above.record.parent)
        })
    }

    /// Where `logical` and up to `limit` extents from there on lie.
    pub(crate) fn place(&self, volume: &PoolVolume, logical: u64, limit: u64) -> Place {
        if let Some(run) = volume.map.run_at(logical, limit) {
            return Place::Own(run);
        }
        let mut limit = volume.map.hole_at(logical, limit);
        let mut hidden = &volume.hidden;
        for layer in self.layers_below(volume) {
            let (is_hidden, count) = hidden.run_at(logical, limit);
            limit = count;
            if is_hidden {
                break;
            }
            if let Some(run) = layer.map.run_at(logical, limit) {
                return Place::Shared(run);
            }
            limit = layer.map.hole_at(logical, limit);
            hidden = &layer.hidden;
        }
        Place::Zeros(limit)
    }

    /// How many extents from `first` on, up to `count`, have at most `most` mapped ones in each map.
    pub(crate) fn reach(&self, volume: &PoolVolume, first: u64, count: u64, most: u64) -> u64 {
        let own = volume.map.reach(first, count, most);
        self.layers_below(volume)
            .fold(own, |count, layer| layer.map.reach(first, count, most))
    }

    /// Mapped ranges of a volume from `from` on, in order: at most `most`, found in a bounded number
    /// of steps. Also returns where to continue.
    pub(crate) fn mapped_from(
        &self,
        volume: &PoolVolume,
        from: u64,
        most: usize,
    ) -> (Vec<Range<u64>>, Option<u64>) {
        if volume.record.layering.parent.is_none() {
            return volume.map.mapped_from(from, most);
        }
        let end = volume.extents(self.extent_bytes);
        let (mut at, mut ranges): (u64, Vec<Range<u64>>) = (from, Vec::new());
        for _ in 0..STEPS_AT_ONCE {
            if at >= end {
                return (ranges, None);
            }
            match self.place(volume, at, STEP_EXTENTS.min(end - at)) {
                Place::Zeros(zeros) => at += zeros,
                Place::Own(run) | Place::Shared(run) => {
                    let is_full = ranges.len() == most;
                    match ranges.last_mut() {
                        Some(last) if last.end == at => last.end += run.count,
                        _ if is_full => return (ranges, Some(at)),
                        _ => ranges.push(at..at + run.count),
                    }
                    at += run.count;
                }
            }
        }
        (ranges, (at < end).then_some(at))
    }

    /// Hides the extents of a range that layers map.
    pub(crate) fn hide_shared(
        &mut self,
        journal: &mut Journal,
        id: VolumeId,
        first: u64,
        count: u64,
    ) -> Result<()> {
        let volume = self.get(id)?;
        let mapped = self.layers_below(volume).flat_map(|layer| {
            let mappings = layer.map.within(first, count).into_iter();
            mappings.flat_map(|mapping| mapping.logical..mapping.logical + mapping.run.count)
        });
        let shared = mapped.filter(|logical| !volume.hidden.contains(*logical));
        let shared: BTreeSet<u64> = shared.collect();
        let volume = self.get_mut(id)?;
        let map = volume.record.map_id();
        for logical in shared {
            volume.hidden.hide(logical);
            journal.touch(Table::Hidden, map.0, logical / super::map::MAP_CHUNK);
        }
        Ok(())
    }

    /// Refuses one more layer below a volume that has very many.
    pub(crate) fn check_depth(&self, volume: &PoolVolume) -> Result<()> {
        let depth = self.layers_below(volume).count();
        if depth < MAX_LAYERS {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "volume {:?} is based on {depth} snapshots, the maximum: delete some",
            volume.record.name
        )))
    }

    /// Freezes a volume's own map. Returns the layer that has its whole content; `None` if it has
    /// none. `new_id` gives the number of a new layer and map.
    pub(crate) fn freeze(
        &mut self,
        journal: &mut Journal,
        id: VolumeId,
        new_id: impl FnOnce(&mut Journal) -> u64,
    ) -> Result<Option<LayerId>> {
        let volume = self.get_mut(id)?;
        if !volume.has_own_map() {
            return Ok(volume.record.layering.parent);
        }
        let number = new_id(journal);
        let (layer_id, below) = (LayerId(number), volume.record.layering.parent);
        let mut layer = Layer::new(LayerRecord {
            map: volume.record.map_id(),
            parent: below,
        });
        layer.map = std::mem::take(&mut volume.map);
        layer.hidden = std::mem::take(&mut volume.hidden);
        layer.children.insert(Node::Volume(id));
        volume.record.layering.map = Some(MapId(number));
        volume.record.layering.parent = Some(layer_id);
        self.maps.insert(layer.record.map, Node::Layer(layer_id));
        self.maps.insert(MapId(number), Node::Volume(id));
        if let Some(below) = below.and_then(|below| self.layers.get_mut(&below)) {
            below.children.remove(&Node::Volume(id));
            below.children.insert(Node::Layer(layer_id));
        }
        self.layers.insert(layer_id, layer);
        self.settle_account(id);
        journal.touch(Table::Layers, layer_id.0, 0);
        journal.touch(Table::Volumes, id.0, 0);
        Ok(Some(layer_id))
    }

    /// Makes `parent` the parent of a volume that has none.
    pub(crate) fn attach(&mut self, volume: VolumeId, parent: Option<LayerId>) -> Result<()> {
        self.get_mut(volume)?.record.layering.parent = parent;
        if let Some(layer) = parent.and_then(|parent| self.layers.get_mut(&parent)) {
            layer.children.insert(Node::Volume(volume));
        }
        Ok(())
    }

    /// A node no longer needs its parent, which may now go, or have one child left.
    pub(crate) fn detach(&mut self, journal: &mut Journal, node: Node, parent: Option<LayerId>) {
        let Some((id, layer)) = parent.and_then(|id| Some((id, self.layers.get_mut(&id)?))) else {
            return;
        };
        layer.children.remove(&node);
        match layer.only_child() {
            Some(Node::Volume(child)) => self.replace_empty_map(journal, id, child),
            Some(Node::Layer(_)) => {}
            None if layer.children.is_empty() => _ = self.unused_layers.insert(id),
            None => {}
        }
    }

    /// A volume without an own map gets that of the layer whose only child it is.
    pub(crate) fn replace_empty_map(
        &mut self,
        journal: &mut Journal,
        layer_id: LayerId,
        child: VolumeId,
    ) {
        let Some(volume) = self.by_id.get_mut(&child) else {
            return;
        };
        if volume.has_own_map() || !volume.copying.is_empty() {
            return;
        }
        let Some(layer) = self.layers.remove(&layer_id) else {
            return;
        };
        self.maps.remove(&volume.record.map_id());
        self.maps.insert(layer.record.map, Node::Volume(child));
        (volume.map, volume.hidden) = (layer.map, layer.hidden);
        volume.record.layering.map = Some(layer.record.map);
        volume.record.layering.parent = layer.record.parent;
        self.adopt_child(layer.record.parent, layer_id, Node::Volume(child));
        journal.touch(Table::Layers, layer_id.0, 0);
        journal.touch(Table::Volumes, child.0, 0);
        self.settle_account(child);
    }

    /// In the place of a layer that is gone, its parent gets its child.
    pub(crate) fn adopt_child(&mut self, parent: Option<LayerId>, gone: LayerId, child: Node) {
        if let Some(parent) = parent.and_then(|parent| self.layers.get_mut(&parent)) {
            parent.children.remove(&Node::Layer(gone));
            parent.children.insert(child);
        }
    }

    /// The map with these records, unless it is gone.
    pub(crate) fn map_of(&self, map: u64) -> Option<(&VolumeMap, &Hidden, Option<&PoolVolume>)> {
        match self.maps.get(&MapId(map))? {
            Node::Volume(id) => {
                let volume = self.any(*id)?;
                Some((&volume.map, &volume.hidden, Some(volume)))
            }
            Node::Layer(id) => {
                let layer = self.layers.get(id)?;
                Some((&layer.map, &layer.hidden, None))
            }
        }
    }
}
