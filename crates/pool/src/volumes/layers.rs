//! Layers: frozen maps below those of volumes, for snapshots and clones.
//!
//! A snapshot freezes its volume's map as a layer, and the volume goes on with an empty map above
//! it. The snapshot is a volume without an own map above the same layer; a clone is another. So
//! every extent keeps exactly one map. A layer without children is freed (`deleted`); with one
//! child it is merged into it (`merge`).
//!
//! **Not here:** the copy that a write to a shared extent needs (`copies`), names (`pool`).

use super::{
    PoolVolume, Volumes,
    hidden::Hidden,
    images::IMAGE_EXTENT_BYTES,
    map::{MAP_CHUNK, VolumeMap},
};
use crate::{
    error::{PoolError, Result},
    extents::runs::DeviceRun,
    journal::{
        Journal,
        batch::{BatchId, Table},
    },
    records::{LayerId, LayerRecord, MapId},
};
use forebay_xlate::types::VolumeId;
use std::collections::{BTreeMap, BTreeSet};
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
    /// The batch that took the latest child away; a crash before it is durable brings it back.
    pub(crate) detached_in: BatchId,
}

impl Layer {
    pub(crate) fn new(record: LayerRecord) -> Self {
        Self {
            record,
            map: VolumeMap::default(),
            hidden: Hidden::default(),
            children: BTreeSet::new(),
            detached_in: BatchId(0),
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
    /// In the volume's own map, or in its RBD image.
    Own(DeviceRun),
    /// In a layer; a write needs a copy.
    Shared(DeviceRun),
    /// In no map, for this number of extents.
    Zeros(u64),
}

impl PoolVolume {
    fn has_own_map(&self) -> bool {
        self.map.mapped() > 0 || !self.hidden.is_empty()
    }
}

/// All layers of a pool, and who holds which map.
#[derive(Default, Debug)]
pub(crate) struct Layers {
    pub(crate) by_id: BTreeMap<LayerId, Layer>,
    /// Layers that nothing needs, to be freed.
    pub(crate) unused: BTreeSet<LayerId>,
    /// The holder of each map.
    pub(crate) maps: BTreeMap<MapId, Node>,
}

impl Layers {
    pub(crate) fn loaded(by_id: BTreeMap<LayerId, Layer>, maps: BTreeMap<MapId, Node>) -> Self {
        let unused = by_id.iter().filter(|(_, layer)| layer.children.is_empty());
        Self {
            unused: unused.map(|(id, _)| *id).collect(),
            by_id,
            maps,
        }
    }

    pub(crate) fn get(&self, id: LayerId) -> Option<&Layer> {
        self.by_id.get(&id)
    }

    fn parent_mut(&mut self, parent: Option<LayerId>) -> Option<&mut Layer> {
        self.by_id.get_mut(&parent?)
    }

    /// The layers below a volume, from the top.
    pub(crate) fn below(&self, volume: &PoolVolume) -> impl Iterator<Item = &Layer> {
        let layer = |id: Option<LayerId>| self.by_id.get(&id?);
        std::iter::successors(layer(volume.record.layering.parent), move |above| {
            layer(above.record.parent)
        })
    }

    /// Where `logical` and up to `limit` extents from there on lie.
    pub(crate) fn place(&self, volume: &PoolVolume, logical: u64, limit: u64) -> Place {
        if let Some(image) = volume.image {
            let end = volume.extents(IMAGE_EXTENT_BYTES);
            return match image.run(logical, limit, end) {
                Some(run) => Place::Own(run),
                None => Place::Zeros(limit),
            };
        }
        match volume.map.run_or_hole(logical, limit) {
            Ok(run) => Place::Own(run),
            Err(count) => self.place_below(volume, logical, count),
        }
    }

    /// As above, without the volume's own map.
    fn place_below(&self, volume: &PoolVolume, logical: u64, mut limit: u64) -> Place {
        let mut hidden = &volume.hidden;
        for layer in self.below(volume) {
            let (is_hidden, count) = hidden.run_at(logical, limit);
            limit = count;
            if is_hidden {
                break;
            }
            limit = match layer.map.run_or_hole(logical, limit) {
                Ok(run) => return Place::Shared(run),
                Err(count) => count,
            };
            hidden = &layer.hidden;
        }
        Place::Zeros(limit)
    }

    /// How many extents from `first` on, up to `count`, have at most `most` mapped ones in each map.
    pub(crate) fn reach(&self, volume: &PoolVolume, first: u64, count: u64, most: u64) -> u64 {
        let own = volume.map.reach(first, count, most);
        self.below(volume)
            .fold(own, |count, layer| layer.map.reach(first, count, most))
    }

    /// Mapped ranges of a volume from `from` on, in order: at most `most`, found in a bounded number
    /// of steps. Also returns where to continue.
    pub(crate) fn mapped_from(
        &self,
        volume: &PoolVolume,
        end: u64,
        from: u64,
        most: usize,
    ) -> (Vec<Range<u64>>, Option<u64>) {
        if volume.image.is_some() {
            let all = from..end;
            let ranges = if all.is_empty() { vec![] } else { vec![all] };
            return (ranges, None);
        }
        if volume.record.layering.parent.is_none() {
            return volume.map.mapped_from(from, most);
        }
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

    /// The extents of a range that the volume sees in layers.
    fn to_hide(&self, volume: &PoolVolume, first: u64, count: u64) -> BTreeSet<u64> {
        let (mut at, end) = (first, first + count);
        let mut shown = BTreeSet::new();
        while at < end {
            match self.place_below(volume, at, end - at) {
                Place::Zeros(zeros) => at += zeros,
                Place::Own(run) | Place::Shared(run) => {
                    shown.extend(at..at + run.count);
                    at += run.count;
                }
            }
        }
        shown
    }

    /// Refuses one more layer below a volume that has very many.
    pub(crate) fn check_depth(&self, volume: &PoolVolume) -> Result<()> {
        let depth = self.below(volume).count();
        if depth < MAX_LAYERS {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "volume {:?} is based on {depth} snapshots, the maximum: delete some",
            volume.record.name
        )))
    }

    /// A volume's frozen map, in its place below the volume.
    fn add(&mut self, id: LayerId, layer: Layer, volume: VolumeId) {
        self.maps.insert(layer.record.map, Node::Layer(id));
        self.maps.insert(MapId(id.0), Node::Volume(volume));
        if let Some(below) = self.parent_mut(layer.record.parent) {
            below.children.remove(&Node::Volume(volume));
            below.children.insert(Node::Layer(id));
        }
        self.by_id.insert(id, layer);
    }

    /// A node gets this parent, and had none.
    pub(crate) fn attach(&mut self, node: Node, parent: Option<LayerId>) {
        if let Some(layer) = self.parent_mut(parent) {
            layer.children.insert(node);
        }
    }

    /// A node no longer needs its parent, which may now go, or have one child left.
    pub(crate) fn detach(&mut self, journal: &Journal, node: Node, parent: Option<LayerId>) {
        let Some((id, layer)) = parent.and_then(|id| Some((id, self.by_id.get_mut(&id)?))) else {
            return;
        };
        layer.children.remove(&node);
        layer.detached_in = journal.open_batch_id();
        if layer.children.is_empty() {
            self.unused.insert(id);
        }
    }

    /// In the place of a layer that is gone, its parent gets its child.
    pub(crate) fn adopt_child(&mut self, parent: Option<LayerId>, gone: LayerId, child: Node) {
        if let Some(parent) = self.parent_mut(parent) {
            parent.children.remove(&Node::Layer(gone));
            parent.children.insert(child);
        }
    }

    /// Removes an unused layer whose map is empty.
    pub(crate) fn forget(&mut self, journal: &mut Journal, id: LayerId) {
        self.unused.remove(&id);
        if let Some(layer) = self.by_id.remove(&id) {
            journal.touch(Table::Layers, id.0, 0);
            self.detach(journal, Node::Layer(id), layer.record.parent);
        }
    }
}

impl Volumes {
    /// Hides the extents of a range that the volume sees in layers; returns how many.
    pub(crate) fn hide_shared(
        &mut self,
        journal: &mut Journal,
        id: VolumeId,
        first: u64,
        count: u64,
    ) -> Result<u64> {
        let shown = self.layers.to_hide(self.get(id)?, first, count);
        let volume = self.get_mut(id)?;
        let map = volume.record.map_id();
        let count = shown.len() as u64;
        for logical in shown {
            volume.hidden.hide(logical);
            journal.touch(Table::Hidden, map.0, logical / MAP_CHUNK);
        }
        Ok(count)
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
        let layer_id = LayerId(number);
        let mut layer = Layer::new(LayerRecord {
            map: volume.record.map_id(),
            parent: volume.record.layering.parent,
        });
        layer.map = std::mem::take(&mut volume.map);
        layer.hidden = std::mem::take(&mut volume.hidden);
        layer.children.insert(Node::Volume(id));
        volume.record.layering.map = Some(MapId(number));
        volume.record.layering.parent = Some(layer_id);
        self.layers.add(layer_id, layer, id);
        self.settle_account(id);
        journal.touch(Table::Layers, layer_id.0, 0);
        journal.touch(Table::Volumes, id.0, 0);
        Ok(Some(layer_id))
    }

    /// The map with these records, unless it is gone.
    pub(crate) fn map_of(&self, map: u64) -> Option<(&VolumeMap, &Hidden, Option<&PoolVolume>)> {
        match self.layers.maps.get(&MapId(map))? {
            Node::Volume(id) => {
                let volume = self.any(*id)?;
                Some((&volume.map, &volume.hidden, Some(volume)))
            }
            Node::Layer(id) => {
                let layer = self.layers.get(*id)?;
                Some((&layer.map, &layer.hidden, None))
            }
        }
    }
}
