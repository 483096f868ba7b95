//! The check of volumes and layers: their counters, links and maps.

use super::{Check, CheckStage};
use crate::{
    extents::ExtentState,
    extents::runs::DeviceRun,
    pool::Pool,
    records::{ImageRecord, LayerId, MapId},
    volumes::{
        PoolVolume,
        layers::{Layer, Node},
        map::{MAP_CHUNK, MapRun},
    },
};
use forebay_xlate::types::VolumeId;

impl Check {
    pub(super) fn volume(&mut self, pool: &Pool, from: VolumeId) -> CheckStage {
        let Some((id, volume)) = pool.volumes.any_from(from) else {
            return CheckStage::Layer(LayerId(0));
        };
        self.report.volumes_checked += 1;
        let mapped = volume.map.count();
        if mapped != volume.map.mapped() {
            self.report.problem(format!(
                "{id} maps {mapped} extents but counts {}",
                volume.map.mapped()
            ));
        }
        if let Some(what) = volume.pending.contradiction() {
            self.report.problem(format!("{id}: {what}"));
        }
        if volume.account(pool.info.extent_bytes) != (volume.entitlement, volume.catalog_bytes) {
            self.report.problem(format!(
                "{id} is owed {} extents and {} catalog bytes, but should be owed {:?}",
                volume.entitlement,
                volume.catalog_bytes,
                volume.account(pool.info.extent_bytes)
            ));
        }
        let image = pool.images.of(id);
        let client = image.and_then(|image| pool.images.client(image.client));
        let place = image.filter(|_| client.is_some()).map(ImageRecord::place);
        if volume.image != place {
            self.report.problem(format!(
                "{id} has the image {image:?} of the client {client:?}, but its place is {:?}",
                volume.image
            ));
        }
        let key = (volume.record.tenant, volume.record.name.clone());
        let is_deleted = pool.volumes.deleting.contains_key(&id);
        if is_deleted != key.1.is_empty() {
            self.report.problem(format!(
                "{id} is being deleted but has a name, or is not being deleted but has none"
            ));
        }
        if is_deleted {
            // Its tenant may be gone.
        } else if pool.volumes.names.get(&key) != Some(&id) || pool.tenants.get(key.0).is_err() {
            self.report
                .problem(format!("{id} is not found by its tenant and name"));
        }
        let incoming: u64 = volume.incoming.iter().map(|(_, run)| run.count).sum();
        let spare: u64 = volume.spare.iter().map(|run| run.count).sum();
        if (incoming, spare) != (volume.incoming_extents, volume.spare.extents()) {
            self.report.problem(format!(
                "{id} has {spare} spare extents and {incoming} incoming, but counts {} and {}",
                volume.spare.extents(),
                volume.incoming_extents
            ));
        }
        for run in volume.spare.iter() {
            self.claim_reserved(pool, id, run);
        }
        for (_, run) in &volume.incoming {
            self.claim_reserved(pool, id, *run);
        }
        for run in volume.copying.values() {
            self.claim_reserved(pool, id, *run);
        }
        let layering = volume.record.layering;
        self.link(
            pool,
            Node::Volume(id),
            volume.record.map_id(),
            layering.parent,
        );
        CheckStage::Volume(VolumeId(id.0 + 1))
    }

    /// A holder is found by its map and by its parent.
    fn link(&mut self, pool: &Pool, node: Node, map: MapId, parent: Option<LayerId>) {
        if pool.volumes.layers.maps.get(&map) != Some(&node) {
            self.report
                .problem(format!("map {} does not belong to {node}", map.0));
        }
        let Some(parent) = parent else {
            return;
        };
        let layer = pool.volumes.layers.get(parent);
        if !layer.is_some_and(|layer| layer.children.contains(&node)) {
            self.report.problem(format!(
                "{node} is based on {parent}, which does not know it"
            ));
        }
    }

    pub(super) fn layer(&mut self, pool: &Pool, from: LayerId) -> CheckStage {
        let Some((id, layer)) = pool.volumes.layers.by_id.range(from..).next() else {
            return CheckStage::Map(MapId(0), 0);
        };
        self.link(
            pool,
            Node::Layer(*id),
            layer.record.map,
            layer.record.parent,
        );
        let mapped = layer.map.count();
        if mapped != layer.map.mapped() {
            self.report.problem(format!(
                "{id} maps {mapped} extents but counts {}",
                layer.map.mapped()
            ));
        }
        if layer.children.is_empty() != pool.volumes.layers.unused.contains(id) {
            self.report
                .problem(format!("{id} is needed and being freed, or neither"));
        }
        self.children(pool, *id, layer);
        CheckStage::Layer(LayerId(id.0 + 1))
    }

    fn children(&mut self, pool: &Pool, id: LayerId, layer: &Layer) {
        for child in &layer.children {
            let parent = match child {
                Node::Volume(child) => {
                    let volume = pool.volumes.by_id.get(child);
                    volume.and_then(|volume| volume.record.layering.parent)
                }
                Node::Layer(child) => {
                    let layer = pool.volumes.layers.get(*child);
                    layer.and_then(|layer| layer.record.parent)
                }
            };
            if parent != Some(id) {
                self.report.problem(format!(
                    "{id} has the child {child}, which is not based on it"
                ));
            }
        }
    }

    pub(super) fn map(
        &mut self,
        pool: &Pool,
        from_map: MapId,
        from: u64,
        budget: u64,
    ) -> CheckStage {
        let Some((id, node)) = pool.volumes.layers.maps.range(from_map..).next() else {
            return CheckStage::Leaks(0, 0);
        };
        // The first map may be gone.
        let from = if *id == from_map { from } else { 0 };
        let next = CheckStage::Map(MapId(id.0 + 1), 0);
        let Some((map, _, volume)) = pool.volumes.map_of(id.0) else {
            self.report.problem(format!(
                "map {} belongs to {node}, which does not exist",
                id.0
            ));
            return next;
        };
        let end = volume.map_or(u64::MAX, |volume| volume.extents(pool.info.extent_bytes));
        let (mut at, mut left) = (from, budget);
        for (chunk, runs) in map.chunks_from(from) {
            if left == 0 {
                return CheckStage::Map(*id, at);
            }
            if let Some(volume) = volume {
                self.pending_without_mapping(volume, at * MAP_CHUNK, chunk * MAP_CHUNK);
            }
            self.chunk(pool, *node, volume, chunk, runs, end);
            at = chunk + 1;
            left = left.saturating_sub(MAP_CHUNK);
        }
        if let Some(volume) = volume {
            self.pending_without_mapping(volume, at * MAP_CHUNK, u64::MAX);
        }
        next
    }

    fn chunk(
        &mut self,
        pool: &Pool,
        id: Node,
        volume: Option<&PoolVolume>,
        chunk: u64,
        runs: &[MapRun],
        end: u64,
    ) {
        let base = chunk * MAP_CHUNK;
        let waiting = volume.filter(|volume| {
            let mut pending = volume.pending.within(base, base + MAP_CHUNK);
            pending.next().is_some()
        });
        let mut mapped = 0;
        for run in runs {
            let logical = base + u64::from(run.start);
            let count = u64::from(run.count);
            self.report.mappings_checked += count;
            if logical + count > end {
                self.report.problem(format!(
                    "{id} has {end} extents but maps {logical}..{}",
                    logical + count
                ));
            }
            if logical < base + mapped {
                self.report
                    .problem(format!("{id} maps extent {logical} twice"));
            }
            mapped = u64::from(run.start) + count;
            let place = DeviceRun::new(run.device, run.extent, count);
            let Some(volume) = waiting else {
                self.claim(pool, id, place, ExtentState::Owned);
                continue;
            };
            for at in 0..count {
                let one = DeviceRun::new(run.device, run.extent + at, 1);
                let pending = volume.pending.get(logical + at);
                if pending.is_some_and(|pending| pending.committing.is_none()) {
                    self.claim_reserved(pool, volume.record.id, one);
                } else {
                    self.claim(pool, id, one, ExtentState::Owned);
                }
            }
        }
        let Some(volume) = waiting else {
            return;
        };
        for (logical, pending) in volume.pending.within(base, base + MAP_CHUNK) {
            let device = volume.map.get(logical).map(|(device, _)| device);
            if device != Some(pending.device) {
                self.report.problem(format!(
                    "{id} waits for extent {logical} to be durable on {}, but it is mapped to {device:?}",
                    pending.device
                ));
            }
        }
    }

    fn pending_without_mapping(&mut self, volume: &PoolVolume, from: u64, to: u64) {
        let id = volume.record.id;
        for (logical, _) in volume.pending.within(from, to) {
            self.report.problem(format!(
                "{id} waits for extent {logical} to be durable, but it is not mapped"
            ));
        }
    }
}
