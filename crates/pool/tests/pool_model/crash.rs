//! What a crash must leave, and what adoption makes of it.

use super::world::{ModelVolume, Place, Snapshot, World, one};
use crate::common::{Choices, EXTENT, try_open};
use forebay_pool::{Adopted, BatchId, ErrorKind, FaultAnswer};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

impl World {
    /// The daemon or the machine dies, perhaps in the middle of a commit.
    pub(crate) fn crash(
        &mut self,
        same_boot: bool,
        power: bool,
        during_commit: Option<u64>,
        seed: u64,
    ) {
        let mut choices = Choices(seed);
        // A power cut ends the boot. A table that was not made yet can't be found.
        if power || !same_boot {
            self.boot += 1;
        }
        let has_table = self.pool.committed_id() >= self.table_since;
        let mut possible = vec![self.committed.clone()];
        if let Some(operations) = during_commit {
            self.take();
            if let Some(batch) = self.taken.front() {
                self.stores[0].fail_after(operations);
                let snapshot = self.snapshots[&batch.id()].clone();
                if self.catalog.commit(batch).is_ok() {
                    possible.clear();
                }
                possible.push(snapshot);
            }
        }
        self.stores = self
            .stores
            .iter()
            .map(|store| {
                Arc::new(if power {
                    store.after_power_cut(&mut choices)
                } else {
                    store.after_kill()
                })
            })
            .collect();
        let (pool, catalog) = try_open(&self.stores).unwrap();
        (self.pool, self.catalog) = (pool, catalog);
        assert_eq!(self.pool.leaked_extents(), 0);
        let found: Snapshot = self
            .pool
            .volumes()
            .map(|record| (record.id.0, record.size_bytes / EXTENT))
            .collect::<Vec<_>>()
            .into_iter()
            .map(|(id, extents)| (id, (extents, self.durable_map(id, extents))))
            .collect();
        assert!(
            possible.contains(&found),
            "neither before nor after: {found:?} of {possible:?}"
        );
        let boot = format!("boot-{}", self.boot);
        let same_boot = has_table && self.pool.boot_id() == Some(boot.as_str());
        let before = std::mem::take(&mut self.volumes);
        self.volumes = found
            .iter()
            .map(|(id, (extents, map))| {
                let (extents, map) = (*extents, map.clone());
                (
                    *id,
                    ModelVolume {
                        extents,
                        map,
                        uncommitted: BTreeMap::new(),
                        committing: BTreeMap::new(),
                    },
                )
            })
            .collect();
        self.committed = found;
        self.taken.clear();
        self.snapshots.clear();
        let table = std::mem::take(&mut self.table);
        self.leaving.clear();
        if same_boot {
            for ((volume, logical), (place, seq)) in table {
                let told = self.pool.adopt_grant(
                    VolumeId(volume),
                    ExtentIndex(logical),
                    DeviceIndex(place.0),
                    ExtentIndex(place.1),
                    1,
                    seq,
                );
                match told.map_err(|error| error.kind) {
                    Ok(Adopted::Durable) => {
                        assert_eq!(self.volumes[&volume].map[&logical], place);
                        self.table.insert((volume, logical), (place, seq));
                    }
                    Ok(Adopted::Uncommitted) => {
                        let known = self.volumes.get_mut(&volume).unwrap();
                        assert!(known.map.insert(logical, place).is_none());
                        known.uncommitted.insert(logical, seq);
                        self.table.insert((volume, logical), (place, seq));
                    }
                    // Revoked and drained: the entry goes.
                    Ok(Adopted::Stale) => {
                        let known = &self.volumes[&volume];
                        assert_ne!(known.map.get(&logical), Some(&place));
                        // Only what was released, or lies where the volume had not yet durably
                        // grown: nothing else that was written may be lost in the same boot.
                        let released = before[&volume].map.get(&logical) != Some(&place);
                        assert!(
                            released || logical >= known.extents,
                            "{volume}: {logical} is lost"
                        );
                    }
                    Err(ErrorKind::NotFound) => assert!(!self.volumes.contains_key(&volume)),
                    Err(other) => panic!("{other:?}"),
                }
            }
        }
        let report = self.pool.finish_adoption(same_boot).unwrap();
        self.pool.set_boot_id(&boot).unwrap();
        self.table_since = if same_boot {
            BatchId(0)
        } else {
            self.pool.open_batch_id()
        };
        let uncommitted: usize = self.volumes.values().map(|v| v.uncommitted.len()).sum();
        assert_eq!(report.uncommitted, uncommitted as u64);
        // The rest is as the pool says; what holds bytes and is nobody's must be among the dirty.
        self.dirty.clear();
        self.freed_in.clear();
        self.quarantined.clear();
        for device in self.pool.devices() {
            for extent in 0..device.extents {
                let place = (device.index.0, extent);
                use forebay_pool::ExtentState::{Dirty, Freed, Quarantined};
                match self.pool.extent_state(one(place)) {
                    Some(Quarantined) => {
                        self.quarantined.insert(place);
                    }
                    Some(Dirty) => {
                        self.dirty.insert(place);
                    }
                    Some(Freed) => {
                        self.dirty.insert(place);
                        self.freed_in.insert(place, self.pool.open_batch_id());
                    }
                    _ => {}
                }
            }
        }
        let mapped: BTreeSet<Place> = self
            .volumes
            .values()
            .flat_map(|volume| volume.map.values().copied())
            .collect();
        for (place, held) in &self.content {
            assert!(
                mapped.contains(place)
                    || self.dirty.contains(place)
                    || self.quarantined.contains(place),
                "{place:?} holds {held:?} and may be handed out"
            );
        }
    }

    /// What the pool has of a volume right after opening, before adoption: its durable map.
    pub(crate) fn durable_map(&mut self, volume: u64, extents: u64) -> BTreeMap<u64, Place> {
        let mut map = BTreeMap::new();
        let mut logical = 0;
        while logical < extents {
            match self
                .pool
                .fault(VolumeId(volume), ExtentIndex(logical), false)
            {
                Ok(FaultAnswer::Mapped {
                    device,
                    extent,
                    count,
                    commit_seq,
                }) => {
                    assert_eq!(commit_seq, None);
                    for at in 0..count {
                        map.insert(logical + at, (device.0, extent.0 + at));
                    }
                    logical += count;
                }
                // Not told yet: a hole, or a grant to be adopted.
                Err(error) if error.kind == ErrorKind::InUse => logical += 1,
                other => panic!("{other:?}"),
            }
        }
        map
    }
}
