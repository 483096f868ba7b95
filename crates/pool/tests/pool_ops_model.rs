//! Random operations, kills and power cuts against a simple model.
//!
//! **Design.** The model is maps and vectors: what each volume maps, what lies on each extent of the
//! device, what the grant table lists, and a copy of the catalog's expected content per batch. After
//! a crash the pool must be exactly one of the two: the last committed batch, or the one being
//! committed. The device keeps every byte ever written (the strictest case), so handing out anything
//! that was not laundered shows at once.
//!
//! **Not here:** device flushes and the engine; later power-cut tests have them.

mod common;

use common::{Choices, CrashStore, EXTENT, new_pool, stores, try_open};
use forebay_pool::{
    Adopted, Batch, BatchId, Catalog, DeviceRun, ErrorKind, FaultAnswer, NewVolume, Pool,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

type Place = (u8, u64);

#[derive(Clone, Debug)]
enum Op {
    Create {
        extents: u64,
    },
    Delete {
        volume: usize,
    },
    Grow {
        volume: usize,
        by: u64,
    },
    Write {
        volume: usize,
        logical: u64,
    },
    Read {
        volume: usize,
        logical: u64,
    },
    ReserveAhead {
        volume: usize,
    },
    Flush {
        volume: usize,
        part: u64,
    },
    Release {
        volume: usize,
        first: u64,
        count: u64,
    },
    Take,
    Commit,
    Launder {
        max: u64,
        fate: u64,
    },
    Quarantine {
        pick: usize,
    },
    EndQuarantine {
        pick: usize,
    },
    Crash {
        same_boot: bool,
        power: bool,
        during_commit: Option<u64>,
        seed: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let volume = 0usize..4;
    // Near each other, near a chunk's end, and far away.
    let logical = prop_oneof![0u64..24, 505u64..520, 0u64..1500];
    prop_oneof![
        2 => prop_oneof![1u64..40, 500u64..1500].prop_map(|extents| Op::Create { extents }),
        1 => volume.clone().prop_map(|volume| Op::Delete { volume }),
        1 => (volume.clone(), 0u64..600).prop_map(|(volume, by)| Op::Grow { volume, by }),
        20 => (volume.clone(), logical.clone()).prop_map(|(volume, logical)| Op::Write { volume, logical }),
        4 => (volume.clone(), logical.clone()).prop_map(|(volume, logical)| Op::Read { volume, logical }),
        2 => volume.clone().prop_map(|volume| Op::ReserveAhead { volume }),
        6 => (volume.clone(), 0u64..4).prop_map(|(volume, part)| Op::Flush { volume, part }),
        4 => (volume, logical, 1u64..30).prop_map(|(volume, first, count)| Op::Release { volume, first, count }),
        6 => Just(Op::Take),
        8 => Just(Op::Commit),
        5 => (1u64..20, 0u64..8).prop_map(|(max, fate)| Op::Launder { max, fate }),
        1 => (0usize..8).prop_map(|pick| Op::Quarantine { pick }),
        1 => (0usize..8).prop_map(|pick| Op::EndQuarantine { pick }),
        2 => (any::<bool>(), any::<bool>(), prop::option::of(0u64..40), any::<u64>())
            .prop_map(|(same_boot, power, during_commit, seed)| Op::Crash { same_boot, power, during_commit, seed }),
    ]
}

#[derive(Clone, Default, Debug, PartialEq)]
struct ModelVolume {
    extents: u64,
    map: BTreeMap<u64, Place>,
    /// logical -> sequence, of what no batch carries yet.
    uncommitted: BTreeMap<u64, u64>,
}

impl ModelVolume {
    /// What a batch taken now holds of it.
    fn durable(&self) -> (u64, BTreeMap<u64, Place>) {
        let mut map = self.map.clone();
        map.retain(|logical, _| !self.uncommitted.contains_key(logical));
        (self.extents, map)
    }
}

/// The catalog's expected content.
type Snapshot = BTreeMap<u64, (u64, BTreeMap<u64, Place>)>;

struct World {
    stores: Vec<Arc<CrashStore>>,
    pool: Pool,
    catalog: Catalog,
    volumes: BTreeMap<u64, ModelVolume>,
    /// What lies on an extent: (volume, logical); absent: zeros.
    content: BTreeMap<Place, (u64, u64)>,
    /// The grant table: (volume, logical) -> place, sequence.
    table: BTreeMap<(u64, u64), (Place, u64)>,
    /// Entries that leave the table when a batch is committed.
    leaving: Vec<(BatchId, (u64, u64), Place)>,
    /// Freed and not laundered since.
    dirty: BTreeSet<Place>,
    /// Dirty, and durably so: may be laundered.
    freed_in: BTreeMap<Place, BatchId>,
    quarantined: BTreeSet<Place>,
    taken: VecDeque<Batch>,
    snapshots: BTreeMap<BatchId, Snapshot>,
    committed: Snapshot,
    names: u64,
    total: u64,
    /// The highest sequence that was ever handed out.
    highest_seq: u64,
    boot: u64,
    /// The grant table exists since this batch is durable.
    table_since: BatchId,
}

fn flat(run: DeviceRun) -> impl Iterator<Item = Place> {
    (run.first.0..run.end()).map(move |extent| (run.device.0, extent))
}

fn one((device, extent): Place) -> DeviceRun {
    DeviceRun::new(DeviceIndex(device), extent, 1)
}

impl World {
    fn new() -> Self {
        let stores = stores(&[48, 40]);
        let (mut pool, catalog) = new_pool(&stores);
        pool.create_tenant("t", 0).unwrap();
        pool.set_boot_id("boot-0").unwrap();
        common::commit(&mut pool, &catalog);
        Self {
            stores,
            pool,
            catalog,
            volumes: BTreeMap::new(),
            content: BTreeMap::new(),
            table: BTreeMap::new(),
            leaving: Vec::new(),
            dirty: BTreeSet::new(),
            freed_in: BTreeMap::new(),
            quarantined: BTreeSet::new(),
            taken: VecDeque::new(),
            snapshots: BTreeMap::new(),
            committed: BTreeMap::new(),
            names: 0,
            total: 88,
            highest_seq: 0,
            boot: 0,
            table_since: BatchId(0),
        }
    }

    fn nth(&self, volume: usize) -> Option<u64> {
        self.volumes.keys().nth(volume).copied()
    }

    fn snapshot(&self) -> Snapshot {
        self.volumes
            .iter()
            .map(|(id, volume)| (*id, volume.durable()))
            .collect()
    }

    fn take(&mut self) {
        if let Some(batch) = self.pool.take_batch().unwrap() {
            self.snapshots.insert(batch.id(), self.snapshot());
            self.taken.push_back(batch);
        }
    }

    fn commit_one(&mut self) {
        let Some(batch) = self.taken.pop_front() else {
            return;
        };
        self.catalog.commit(&batch).unwrap();
        self.pool.committed(batch.id()).unwrap();
        self.committed = self.snapshots.remove(&batch.id()).unwrap();
        let (gone, stays): (Vec<_>, Vec<_>) = self
            .leaving
            .drain(..)
            .partition(|(id, ..)| *id <= batch.id());
        self.leaving = stays;
        for (_, entry, place) in gone {
            if self.table.get(&entry).is_some_and(|(at, _)| *at == place) {
                self.table.remove(&entry);
            }
        }
    }

    fn commit_all(&mut self) {
        self.take();
        while !self.taken.is_empty() {
            self.commit_one();
        }
    }

    fn free(&mut self, volume: u64, logical: u64, place: Place) {
        assert!(self.dirty.insert(place), "{place:?} freed twice");
        self.freed_in.insert(place, self.pool.open_batch_id());
        self.leaving
            .push((self.pool.open_batch_id(), (volume, logical), place));
    }

    /// A write as the owner loop does it. False: the pool is full.
    fn write(&mut self, volume: u64, logical: u64) -> bool {
        let known = self.volumes[&volume].clone();
        if logical >= known.extents {
            let error = self
                .pool
                .fault(VolumeId(volume), ExtentIndex(logical), true)
                .unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid);
            return true;
        }
        for _ in 0..12 {
            let answer = self
                .pool
                .fault(VolumeId(volume), ExtentIndex(logical), true)
                .unwrap();
            match answer {
                FaultAnswer::Mapped {
                    device,
                    extent,
                    count,
                    commit_seq,
                } => {
                    self.check_mapped(volume, logical, (device.0, extent.0), count, commit_seq);
                    self.store(volume, logical, (device.0, extent.0), commit_seq);
                    return true;
                }
                FaultAnswer::Allocated {
                    device,
                    extent,
                    commit_seq,
                } => {
                    let place = (device.0, extent.0);
                    assert!(!known.map.contains_key(&logical));
                    assert!(commit_seq > self.highest_seq, "a sequence came again");
                    self.highest_seq = commit_seq;
                    for (id, other) in &self.volumes {
                        assert!(
                            !other.map.values().any(|at| *at == place),
                            "{id} has {place:?}"
                        );
                    }
                    assert!(
                        !self.content.contains_key(&place),
                        "{place:?} holds old bytes"
                    );
                    assert!(!self.dirty.contains(&place), "{place:?} is dirty");
                    // Nor may a crash now bring back someone who had it.
                    for snapshot in self.snapshots.values().chain([&self.committed]) {
                        for (_, map) in snapshot.values() {
                            assert!(
                                !map.values().any(|at| *at == place),
                                "{place:?} in the catalog"
                            );
                        }
                    }
                    let known = self.volumes.get_mut(&volume).unwrap();
                    known.map.insert(logical, place);
                    known.uncommitted.insert(logical, commit_seq);
                    self.store(volume, logical, place, Some(commit_seq));
                    return true;
                }
                FaultAnswer::NeedReserve { count } => {
                    assert!(self.pool.reserve(VolumeId(volume), count).unwrap() > 0);
                    self.commit_all();
                }
                FaultAnswer::AwaitCommit { .. } => self.commit_all(),
                FaultAnswer::AwaitLaunder => {
                    assert!(!self.dirty.is_empty());
                    self.commit_all();
                    self.launder(u64::MAX, 0);
                }
                FaultAnswer::NoSpace => {
                    let used: u64 = self.volumes.values().map(|v| v.map.len() as u64).sum();
                    let waiting = self.quarantined.len() as u64;
                    let others: u64 = self
                        .volumes
                        .keys()
                        .map(|id| self.pool.volume_space(VolumeId(*id)).unwrap().reserved)
                        .sum();
                    assert_eq!((used + waiting, others), (self.total, 0), "full too early");
                    return false;
                }
                FaultAnswer::Hole { .. } => panic!("a write got a hole"),
            }
        }
        panic!("a write that goes in circles");
    }

    /// The tenant's bytes arrive; the grant is listed.
    fn store(&mut self, volume: u64, logical: u64, place: Place, seq: Option<u64>) {
        self.content.insert(place, (volume, logical));
        self.table
            .insert((volume, logical), (place, seq.unwrap_or(0)));
    }

    fn check_mapped(&self, volume: u64, logical: u64, place: Place, count: u64, seq: Option<u64>) {
        let known = &self.volumes[&volume];
        assert!(count > 0);
        for at in 0..count {
            let expected = known.map.get(&(logical + at));
            assert_eq!(
                expected,
                Some(&(place.0, place.1 + at)),
                "{volume}: {logical} + {at}"
            );
            if let Some(held) = self.content.get(&(place.0, place.1 + at)) {
                assert_eq!(*held, (volume, logical + at), "another's bytes");
            }
            if let Some(uncommitted) = known.uncommitted.get(&(logical + at)) {
                assert!(seq.is_some_and(|seq| seq >= *uncommitted));
            }
        }
    }

    fn read(&mut self, volume: u64, logical: u64) {
        let known = self.volumes[&volume].clone();
        if logical >= known.extents {
            return;
        }
        match self
            .pool
            .fault(VolumeId(volume), ExtentIndex(logical), false)
            .unwrap()
        {
            FaultAnswer::Mapped {
                device,
                extent,
                count,
                commit_seq,
            } => {
                self.check_mapped(volume, logical, (device.0, extent.0), count, commit_seq);
            }
            FaultAnswer::Hole { count } => {
                assert!(count > 0 && logical + count <= known.extents);
                assert!(known.map.range(logical..logical + count).next().is_none());
                let next = logical + count;
                assert!(
                    next == known.extents || known.map.contains_key(&next) || count == 4096,
                    "a hole that ends early"
                );
            }
            other => panic!("{other:?}"),
        }
    }

    fn flush(&mut self, volume: u64, part: u64) {
        let id = VolumeId(volume);
        let known = self.volumes.get_mut(&volume).unwrap();
        let highest = self.pool.uncommitted(id);
        let lowest = known.uncommitted.values().min().copied().unwrap_or(0);
        let up_to = match (part, highest) {
            (_, None) => u64::MAX,
            (0, Some(highest)) => lowest + (highest - lowest) / 2,
            (_, Some(highest)) => highest,
        };
        let before = known.uncommitted.len();
        known.uncommitted.retain(|_, seq| *seq > up_to);
        let expected = (before - known.uncommitted.len()) as u64;
        assert_eq!(self.pool.commit_mappings(id, up_to).unwrap(), expected);
        if part > 1 {
            self.commit_all();
            let durable = self.pool.durable_seq(id);
            assert!(highest.is_none_or(|highest| durable >= highest));
        }
    }

    fn release(&mut self, volume: u64, first: u64, count: u64) {
        let known = self.volumes.get_mut(&volume).unwrap();
        let result = self
            .pool
            .release(VolumeId(volume), ExtentIndex(first), count);
        if first + count > known.extents {
            assert_eq!(result.unwrap_err().kind, ErrorKind::Invalid);
            return;
        }
        let released: BTreeSet<Place> = result.unwrap().runs.into_iter().flat_map(flat).collect();
        let gone: Vec<(u64, Place)> = known
            .map
            .range(first..first + count)
            .map(|(l, p)| (*l, *p))
            .collect();
        assert_eq!(released, gone.iter().map(|(_, place)| *place).collect());
        for (logical, _) in &gone {
            known.map.remove(logical);
            known.uncommitted.remove(logical);
        }
        for (logical, place) in gone {
            self.free(volume, logical, place);
        }
    }

    fn launder(&mut self, max: u64, fate: u64) {
        let runs = self.pool.take_dirty(max);
        assert!(runs.iter().map(|run| run.count).sum::<u64>() <= max);
        for run in runs {
            for place in flat(run) {
                assert!(
                    self.dirty.contains(&place),
                    "{place:?} laundered while not dirty"
                );
                assert!(
                    self.freed_in
                        .get(&place)
                        .is_none_or(|batch| *batch <= self.pool.committed_id()),
                    "{place:?} laundered before it was durably free"
                );
            }
            if fate == 1 {
                self.pool.launder_failed(run).unwrap();
                continue;
            }
            for place in flat(run) {
                self.dirty.remove(&place);
                self.freed_in.remove(&place);
                self.content.remove(&place);
            }
            self.pool.laundered(run).unwrap();
        }
    }

    /// The daemon or the machine dies, perhaps in the middle of a commit.
    fn crash(&mut self, same_boot: bool, power: bool, during_commit: Option<u64>, seed: u64) {
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
    fn durable_map(&mut self, volume: u64, extents: u64) -> BTreeMap<u64, Place> {
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

    fn check(&self) {
        let space = self.pool.space();
        let mut places = BTreeSet::new();
        let (mut mapped, mut uncommitted, mut stock) = (0, 0, 0);
        for (id, volume) in &self.volumes {
            for place in volume.map.values() {
                assert!(places.insert(*place), "{place:?} has two owners");
                assert!(!self.dirty.contains(place) && !self.quarantined.contains(place));
            }
            mapped += volume.map.len() as u64;
            uncommitted += volume.uncommitted.len() as u64;
            let said = self.pool.volume_space(VolumeId(*id)).unwrap();
            assert_eq!(said.mapped, volume.map.len() as u64);
            assert!(said.uncommitted >= volume.uncommitted.len() as u64);
            stock += said.reserved;
        }
        assert_eq!(space.total, self.total);
        assert_eq!(space.owned, mapped - uncommitted);
        assert_eq!(space.reserved, stock + uncommitted);
        assert_eq!(space.dirty, self.dirty.len() as u64);
        assert_eq!(space.quarantined, self.quarantined.len() as u64);
        let sum = space.clean + space.reserved + space.owned + space.dirty + space.quarantined;
        assert_eq!(sum, space.total);
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Create { extents } => {
                if self.volumes.len() >= 4 {
                    return;
                }
                self.names += 1;
                let new = NewVolume {
                    tenant: "t".into(),
                    name: format!("v{}", self.names),
                    size_bytes: extents * EXTENT,
                    block_bytes: None,
                };
                let id = self.pool.create_volume(&new, 0).unwrap();
                let known = ModelVolume {
                    extents,
                    ..ModelVolume::default()
                };
                // An id that a crash took back may come again; its grants must not.
                self.table.retain(|(volume, _), _| *volume != id.0);
                assert!(self.volumes.insert(id.0, known).is_none());
            }
            Op::Delete { volume } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                let released = self.pool.delete_volume(VolumeId(volume)).unwrap();
                let known = self.volumes.remove(&volume).unwrap();
                assert_eq!(released.extents, known.map.len() as u64);
                for (logical, place) in known.map {
                    self.free(volume, logical, place);
                }
            }
            Op::Grow { volume, by } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                let known = self.volumes.get_mut(&volume).unwrap();
                known.extents += by;
                self.pool
                    .grow_volume(VolumeId(volume), known.extents * EXTENT)
                    .unwrap();
            }
            Op::Write { volume, logical } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                self.write(volume, logical);
            }
            Op::Read { volume, logical } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                self.read(volume, logical);
            }
            Op::ReserveAhead { volume } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                if let Some(count) = self.pool.wants_reserve(VolumeId(volume)) {
                    assert!(self.pool.reserve(VolumeId(volume), count).unwrap() > 0);
                }
            }
            Op::Flush { volume, part } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                self.flush(volume, part);
            }
            Op::Release {
                volume,
                first,
                count,
            } => {
                let Some(volume) = self.nth(volume) else {
                    return;
                };
                self.release(volume, first, count);
            }
            Op::Take => self.take(),
            Op::Commit => {
                if self.taken.is_empty() {
                    self.take();
                }
                self.commit_one();
            }
            Op::Launder { max, fate } => self.launder(max, fate),
            Op::Quarantine { pick } => {
                let Some(place) = self.dirty.iter().nth(pick).copied() else {
                    return;
                };
                self.pool.quarantine(one(place)).unwrap();
                self.dirty.remove(&place);
                self.freed_in.remove(&place);
                self.quarantined.insert(place);
            }
            Op::EndQuarantine { pick } => {
                let Some(place) = self.quarantined.iter().nth(pick).copied() else {
                    return;
                };
                self.pool.end_quarantine(one(place)).unwrap();
                self.quarantined.remove(&place);
                self.dirty.insert(place);
            }
            Op::Crash {
                same_boot,
                power,
                during_commit,
                seed,
            } => {
                self.crash(same_boot, power, during_commit, seed);
            }
        }
        self.check();
    }
}

/// 150 cases, or as many as `PROPTEST_CASES` says.
fn config() -> ProptestConfig {
    let cases = match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default().cases,
        None => 150,
    };
    ProptestConfig {
        cases,
        max_shrink_iters: 4000,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn pool_ops_model(ops in prop::collection::vec(op(), 1..160)) {
        let mut world = World::new();
        for op in ops {
            world.step(op);
        }
    }
}
