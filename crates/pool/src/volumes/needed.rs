//! Which extents of layers volumes still see.
//!
//! A layer with several children stays, even if it has no name any more. An extent of it that all
//! of them have replaced or hidden is freed early. What a snapshot alone holds is found likewise.
//! Both go through maps by chunks, with a bit for each extent.

use super::{
    ById, PoolVolume, Volumes,
    faults::Released,
    hidden::HiddenChunk,
    layers::{Layer, Layers, Node},
    map::{MAP_CHUNK, MapRun},
};
use crate::{
    error::Result,
    extents::allocator::Allocator,
    journal::{Journal, batch::Table},
    records::LayerId,
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::collections::BTreeSet;

/// Chunks searched in one call.
const CHUNKS_AT_ONCE: usize = 256;
type Bits = HiddenChunk;
const NONE: Bits = [0; (MAP_CHUNK / 64) as usize];
const ALL: Bits = [!0; (MAP_CHUNK / 64) as usize];

/// Extents of a layer that no volume sees, in one chunk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unneeded {
    /// The layer.
    pub layer: LayerId,
    chunk: u64,
    bits: Bits,
    /// The devices that they are on.
    pub devices: BTreeSet<DeviceIndex>,
}

/// Where a search for [`Unneeded`] extents continues.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct UnneededCursor {
    layer: u64,
    chunk: u64,
}

fn set(bits: &mut Bits, first: u16, count: u16) {
    for at in first..first + count {
        bits[usize::from(at / 64)] |= 1 << (at % 64);
    }
}

fn has(bits: &Bits, at: u16) -> bool {
    bits[usize::from(at / 64)] & (1 << (at % 64)) != 0
}

fn mapped(runs: &[MapRun]) -> Bits {
    let mut bits = NONE;
    for run in runs {
        set(&mut bits, run.start, run.count);
    }
    bits
}

fn each(a: &Bits, b: &Bits, of: impl Fn(u64, u64) -> u64) -> Bits {
    std::array::from_fn(|word| of(a[word], b[word]))
}

fn without(a: &Bits, b: &Bits) -> Bits {
    each(a, b, |a, b| a & !b)
}

fn count(bits: &Bits) -> u64 {
    bits.iter().map(|word| u64::from(word.count_ones())).sum()
}

impl PoolVolume {
    /// The extents of a chunk for which it does not see the layers below, durably.
    fn covers(&self, chunk: u64) -> Bits {
        let mut bits = mapped(self.map.chunk(chunk));
        let (first, end) = (chunk * MAP_CHUNK, (chunk + 1) * MAP_CHUNK);
        for (logical, _) in self.pending.within(first, end) {
            let at = logical % MAP_CHUNK;
            bits[(at / 64) as usize] &= !(1 << (at % 64));
        }
        let hidden = self.hidden.chunk(chunk).unwrap_or(&NONE);
        each(&bits, hidden, |a, b| a | b)
    }

    fn covers_nothing(&self) -> bool {
        self.map.mapped() == 0 && self.hidden.is_empty()
    }
}

impl Layer {
    fn covers(&self, chunk: u64) -> Bits {
        let hidden = self.hidden.chunk(chunk).unwrap_or(&NONE);
        each(&mapped(self.map.chunk(chunk)), hidden, |a, b| a | b)
    }
}

impl Layers {
    /// The extents of a chunk that a volume other than `except` sees in a layer, if mapped there.
    fn seen(&self, volumes: &ById, layer: &Layer, chunk: u64, except: Option<VolumeId>) -> Bits {
        let mut seen = NONE;
        // Volumes come before layers.
        for child in &layer.children {
            let by_child = match child {
                Node::Volume(id) if Some(*id) == except => NONE,
                Node::Volume(id) => match volumes.get(id) {
                    Some(volume) => without(&ALL, &volume.covers(chunk)),
                    None => ALL,
                },
                Node::Layer(id) => match self.by_id.get(id) {
                    Some(child) => {
                        let below = self.seen(volumes, child, chunk, except);
                        without(&below, &child.covers(chunk))
                    }
                    None => ALL,
                },
            };
            seen = each(&seen, &by_child, |a, b| a | b);
            if seen == ALL {
                break;
            }
        }
        seen
    }

    /// How many extents only this volume sees in its own map and in layers, in up to `most` chunks
    /// from `from` on; and the chunk to continue with.
    pub(crate) fn alone(
        &self,
        volumes: &ById,
        volume: &PoolVolume,
        from: u64,
        most: usize,
    ) -> (u64, Option<u64>) {
        let (mut extents, mut chunk) = (0, from);
        for _ in 0..most {
            let maps = self.below(volume).map(|layer| &layer.map);
            let maps = maps.chain([&volume.map]);
            let next = maps.filter_map(|map| Some(map.chunks_from(chunk).next()?.0));
            let Some(next) = next.min() else {
                return (extents, None);
            };
            let own = mapped(volume.map.chunk(next));
            extents += count(&own);
            let mut visible = without(&ALL, &volume.covers(next));
            for layer in self.below(volume) {
                if visible == NONE {
                    break;
                }
                let there = mapped(layer.map.chunk(next));
                let there = each(&there, &visible, |a, b| a & b);
                if there != NONE {
                    let others = self.seen(volumes, layer, next, Some(volume.record.id));
                    extents += count(&without(&there, &others));
                }
                visible = without(&visible, &layer.covers(next));
            }
            chunk = next + 1;
        }
        (extents, Some(chunk))
    }

    /// Looks through up to `most` chunks for extents of layers that no volume sees. Layers with one
    /// child are merged instead.
    pub(crate) fn next_unneeded(
        &self,
        volumes: &ById,
        cursor: &mut UnneededCursor,
        most: usize,
    ) -> Option<Unneeded> {
        for _ in 0..most {
            let (id, layer) = self.by_id.range(LayerId(cursor.layer)..).next()?;
            if cursor.layer != id.0 {
                *cursor = UnneededCursor {
                    layer: id.0,
                    chunk: 0,
                };
            }
            let sees_all = |child: &Node| match child {
                Node::Volume(id) => volumes.get(id).is_some_and(PoolVolume::covers_nothing),
                Node::Layer(_) => false,
            };
            let next = layer.map.chunks_from(cursor.chunk).next();
            let next = next.filter(|_| layer.children.len() > 1);
            let next = next.filter(|_| !layer.children.iter().any(sees_all));
            let Some((chunk, runs)) = next else {
                *cursor = UnneededCursor {
                    layer: id.0 + 1,
                    chunk: 0,
                };
                continue;
            };
            cursor.chunk = chunk + 1;
            let bits = without(&mapped(runs), &self.seen(volumes, layer, chunk, None));
            if bits != NONE {
                let there =
                    |run: &&MapRun| (run.start..run.start + run.count).any(|at| has(&bits, at));
                let devices = runs.iter().filter(there).map(|run| run.device);
                return Some(Unneeded {
                    layer: *id,
                    chunk,
                    bits,
                    devices: devices.collect(),
                });
            }
        }
        None
    }

    /// Frees extents that are still not seen.
    pub(crate) fn free_unneeded(
        &mut self,
        volumes: &ById,
        allocator: &mut Allocator,
        journal: &mut Journal,
        unneeded: &Unneeded,
    ) -> Result<Released> {
        let mut released = Released::default();
        let Some(layer) = self.by_id.get(&unneeded.layer) else {
            return Ok(released);
        };
        let seen = self.seen(volumes, layer, unneeded.chunk, None);
        let free = without(&unneeded.bits, &seen);
        let Some(layer) = self.by_id.get_mut(&unneeded.layer) else {
            return Ok(released);
        };
        let base = unneeded.chunk * MAP_CHUNK;
        for at in (0..MAP_CHUNK as u16).filter(|at| has(&free, *at)) {
            for mapping in layer.map.remove(base + u64::from(at), 1) {
                allocator.free(journal, mapping.run);
                released.extents += mapping.run.count;
                released.runs.push(mapping.run);
            }
        }
        journal.touch(Table::Maps, layer.record.map.0, unneeded.chunk);
        Ok(released)
    }
}

impl Volumes {
    /// How many extents no other volume or snapshot sees, in a bounded part of the maps from chunk
    /// `from` on (0 at first). Also returns where to continue.
    pub fn alone(&self, volume: VolumeId, from: u64) -> Result<(u64, Option<u64>)> {
        let volume = self.get(volume)?;
        Ok(self.layers.alone(&self.by_id, volume, from, CHUNKS_AT_ONCE))
    }

    /// Extents of a layer with several children that nobody sees, found in a bounded part of the
    /// maps. `None`: none there; the search is over if the cursor did not move.
    pub fn next_unneeded(&self, cursor: &mut UnneededCursor) -> Option<Unneeded> {
        self.layers
            .next_unneeded(&self.by_id, cursor, CHUNKS_AT_ONCE)
    }
}
