//! The state after a crash, and adoption.

use crate::{
    common::{Choices, EXTENT},
    disk::Place,
    world::{Contents, Durable, ModelVolume, World, one, open},
};
use forebay_pool::{Adopted, BatchId, ErrorKind, ExtentState, FaultAnswer, VolumeRecord};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::{BTreeMap, BTreeSet};

impl World {
    /// Kills the daemon or the machine, perhaps in a commit. `same_boot`: the grant table survives.
    pub(crate) fn crash(
        &mut self,
        same_boot: bool,
        power: bool,
        during_commit: Option<u64>,
        seed: u64,
    ) {
        // A power cut ends the boot; a table that was not made yet is missing.
        let mut choices = Choices::with_seed(seed);
        if power || !same_boot {
            self.boot += 1;
        }
        let has_table = self.pool.journal().committed_id() >= self.table_since;
        let possible = self.die(during_commit);
        // A hanging request ends with its process, done or not.
        for (_, place, content) in std::mem::take(&mut self.hanging) {
            if choices.bool() {
                self.disk.write(place, content);
            }
        }
        if power {
            self.disk.cut(&mut choices);
        }
        self.power = if power {
            self.power.after_cut(seed)
        } else {
            self.power.after_kill()
        };
        (self.pool, self.catalog) = open(&self.power, self.labelled);
        assert_eq!(self.pool.allocator().leaked_extents(), 0);
        let found = self.found();
        assert!(
            possible.contains(&found),
            "neither before nor after: {found:?} of {possible:?}"
        );
        let boot = format!("boot-{}", self.boot);
        let same_boot = has_table && self.pool.info().boot_id() == Some(boot.as_str());
        let volume = |durable: &Durable| ModelVolume {
            extents: durable.extents,
            reserved: durable.reserved,
            of: durable.of,
            map: durable.map.clone(),
            ..ModelVolume::default()
        };
        let now = found.1.iter().map(|(id, durable)| (*id, volume(durable)));
        let before = std::mem::replace(&mut self.volumes, now.collect());
        let mapped = found.1.values().flat_map(|volume| volume.map.values());
        self.held = mapped.chain(&found.2).copied().collect();
        self.committed = found;
        self.taken.clear();
        self.expected.clear();
        self.frozen.clear();
        self.planned = None;
        self.leaving.clear();
        self.away.clear();
        (self.check, self.settling) = (None, None);
        let table = std::mem::take(&mut self.table);
        if same_boot {
            for ((volume, logical), (place, seq)) in table {
                self.adopt(&before, volume, logical, place, seq);
            }
        }
        let open = std::mem::take(&mut self.copies).into_iter();
        let open = open.map(|((volume, _), copy)| (volume, copy.target));
        let ended = std::mem::take(&mut self.ended).into_iter();
        for (volume, target) in open.chain(ended.map(|(_, volume, target)| (volume, target))) {
            if same_boot {
                let (device, extent) = target;
                self.pool.snapshots().adopt_copy(
                    VolumeId(volume),
                    DeviceIndex(device),
                    ExtentIndex(extent),
                );
            }
        }
        let report = self.pool.finish_adoption(same_boot).unwrap();
        self.pool.set_boot_id(&boot).unwrap();
        self.table_since = if same_boot {
            BatchId(0)
        } else {
            self.pool.journal().open_batch_id()
        };
        let uncommitted: usize = self.volumes.values().map(|v| v.uncommitted.len()).sum();
        assert_eq!(report.uncommitted, uncommitted as u64);
        self.take_over_states();
        self.read_all(&before, power, same_boot);
        assert_eq!(self.pool.check().unwrap().problems, []);
    }

    /// The possible catalogs after a crash, now or in a commit.
    fn die(&mut self, during_commit: Option<u64>) -> Vec<Contents> {
        let mut possible = vec![self.committed.clone()];
        let Some(operations) = during_commit else {
            return possible;
        };
        self.take();
        if let Some(batch) = self.taken.front() {
            self.power.fail_after(operations);
            let expected = self.expected[&batch.id()].clone();
            if self.catalog.commit(batch).is_ok() {
                possible.clear();
            }
            possible.push(expected);
        }
        possible
    }

    fn found(&mut self) -> Contents {
        let records: Vec<_> = self.pool.volumes().records().cloned().collect();
        let durable = |record: VolumeRecord| {
            let durable = Durable {
                extents: record.size_bytes / EXTENT,
                reserved: record.reserved_bytes / EXTENT,
                of: record.layering.snapshot_of.map(|of| of.0),
                map: self.durable_map(record.id),
            };
            (record.id.0, durable)
        };
        let volumes: BTreeMap<u64, Durable> = records.into_iter().map(durable).collect();
        let owned = |place: &Place| {
            self.pool.allocator().extent_state(one(*place)) == Some(ExtentState::Owned)
        };
        let places = self.pool.devices().iter().flat_map(|device| {
            let extents = 0..device.extents;
            extents.map(|extent| (device.index.0, extent))
        });
        let owned: BTreeSet<Place> = places.filter(owned).collect();
        let mapped = volumes.values().flat_map(|volume| volume.map.values());
        let mapped: BTreeSet<Place> = mapped.copied().collect();
        let hidden = owned.difference(&mapped).copied().collect();
        (self.pool.devices().len(), volumes, hidden)
    }

    fn adopt(
        &mut self,
        before: &BTreeMap<u64, ModelVolume>,
        volume: u64,
        logical: u64,
        place: Place,
        seq: u64,
    ) {
        let reported = self.pool.adopt_grant(
            VolumeId(volume),
            ExtentIndex(logical),
            DeviceIndex(place.0),
            ExtentIndex(place.1),
            1,
            seq,
        );
        match reported.map_err(|error| error.kind) {
            Ok(Adopted::Durable) => {
                assert_eq!(self.volumes[&volume].map[&logical], place);
                self.table.insert((volume, logical), (place, seq));
            }
            Ok(Adopted::Uncommitted) => {
                let known = self.volumes.get_mut(&volume).unwrap();
                if let Some(below) = known.map.insert(logical, place) {
                    assert!(self.layered.contains(&volume) && below != place);
                    known.shadow.insert(logical, below);
                }
                assert!(self.held.insert(place));
                known.uncommitted.insert(logical, seq);
                self.table.insert((volume, logical), (place, seq));
            }
            // Revoked and drained: the entry goes.
            Ok(Adopted::Stale) => {
                let known = &self.volumes[&volume];
                assert_ne!(known.map.get(&logical), Some(&place));
                // Only released extents, or those beyond the durable size, may be lost in the same
                // boot.
                let had = before.get(&volume).and_then(|old| old.map.get(&logical));
                assert!(
                    had != Some(&place) || logical >= known.extents,
                    "{volume}: {logical} is lost"
                );
            }
            Err(ErrorKind::NotFound) => assert!(!self.volumes.contains_key(&volume)),
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Dirty extents must include all with data and no volume.
    fn take_over_states(&mut self) {
        self.dirty.clear();
        self.freed_in.clear();
        self.quarantined.clear();
        for device in self.pool.devices() {
            for extent in 0..device.extents {
                let place = (device.index.0, extent);
                match self.pool.allocator().extent_state(one(place)) {
                    Some(ExtentState::Quarantined) => {
                        self.quarantined.insert(place);
                    }
                    Some(ExtentState::Dirty) => {
                        self.dirty.insert(place);
                    }
                    Some(ExtentState::Freed) => {
                        self.dirty.insert(place);
                        self.freed_in
                            .insert(place, self.pool.journal().open_batch_id());
                    }
                    _ => {}
                }
            }
        }
        for place in self.disk.used() {
            let known = self.held.contains(&place)
                || self.dirty.contains(&place)
                || self.quarantined.contains(&place);
            assert!(known, "{place:?} holds bytes and may be handed out");
        }
    }

    /// Every block has an allowed value.
    fn read_all(&mut self, before: &BTreeMap<u64, ModelVolume>, power: bool, same_boot: bool) {
        for (id, volume) in &self.volumes {
            self.tenants.cut_off(*id, volume.extents);
            let old = before.get(id);
            let logicals: BTreeSet<u64> = self
                .tenants
                .of(*id)
                .chain(volume.map.keys().copied())
                .collect();
            for logical in logicals {
                let place = volume.map.get(&logical);
                let read = place
                    .map(|place| self.disk.read(*place))
                    .unwrap_or_default();
                // A kill changes only extents that were being released.
                let had = old.and_then(|old| old.map.get(&logical));
                if same_boot && !power && old.is_some() && had == place {
                    self.tenants.reads(*id, logical, read);
                }
                self.tenants.found(*id, logical, read, power);
            }
        }
    }

    /// A volume's durable map, before adoption.
    fn durable_map(&mut self, volume: VolumeId) -> BTreeMap<u64, Place> {
        let mut map = BTreeMap::new();
        let volumes = self.pool.volumes();
        let (ranges, next) = volumes.mapped_bytes(volume, 0, usize::MAX).unwrap();
        assert_eq!(next, None);
        for range in ranges {
            let (mut logical, end) = (range.start / EXTENT, range.end / EXTENT);
            while logical < end {
                let answer = self.pool.fault(volume, ExtentIndex(logical), false);
                let (device, extent, count) = match answer {
                    Ok(FaultAnswer::Mapped {
                        device,
                        extent,
                        count,
                        commit_seq: None,
                    })
                    | Ok(FaultAnswer::Shared {
                        device,
                        extent,
                        count,
                    }) => (device, extent, count),
                    other => panic!("{other:?}"),
                };
                for at in 0..count {
                    map.insert(logical + at, (device.0, extent.0 + at));
                }
                logical += count;
            }
            assert_eq!(logical, end);
            if let Ok(answer) = self.pool.fault(volume, ExtentIndex(end), false) {
                panic!("{answer:?} before the grants are adopted");
            }
        }
        map
    }
}
