//! The model, and the operations on it and on the pool side by side.

use crate::common::{self, CrashStore, DRAINED, new_pool, stores};
use forebay_pool::{Batch, BatchId, Catalog, DeviceRun, ErrorKind, FaultAnswer, Pool};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

pub(crate) type Place = (u8, u64);

#[derive(Clone, Default, Debug, PartialEq)]
pub(crate) struct ModelVolume {
    pub(crate) extents: u64,
    pub(crate) map: BTreeMap<u64, Place>,
    /// logical -> sequence, of what no batch carries yet.
    pub(crate) uncommitted: BTreeMap<u64, u64>,
    /// logical -> sequence and batch, of what a batch carries that is not committed.
    pub(crate) committing: BTreeMap<u64, (u64, BatchId)>,
}

impl ModelVolume {
    /// What a batch taken now holds of it.
    pub(crate) fn durable(&self) -> (u64, BTreeMap<u64, Place>) {
        let mut map = self.map.clone();
        map.retain(|logical, _| !self.uncommitted.contains_key(logical));
        (self.extents, map)
    }
}

/// The catalog's expected content.
pub(crate) type Snapshot = BTreeMap<u64, (u64, BTreeMap<u64, Place>)>;

pub(crate) struct World {
    pub(crate) stores: Vec<Arc<CrashStore>>,
    pub(crate) pool: Pool,
    pub(crate) catalog: Catalog,
    pub(crate) volumes: BTreeMap<u64, ModelVolume>,
    /// What lies on an extent: (volume, logical); absent: zeros.
    pub(crate) content: BTreeMap<Place, (u64, u64)>,
    /// The grant table: (volume, logical) -> place, sequence.
    pub(crate) table: BTreeMap<(u64, u64), (Place, u64)>,
    /// Entries that leave the table when a batch is committed.
    pub(crate) leaving: Vec<(BatchId, (u64, u64), Place)>,
    /// Freed and not laundered since.
    pub(crate) dirty: BTreeSet<Place>,
    /// Dirty, and durably so: may be laundered.
    pub(crate) freed_in: BTreeMap<Place, BatchId>,
    pub(crate) quarantined: BTreeSet<Place>,
    pub(crate) taken: VecDeque<Batch>,
    pub(crate) snapshots: BTreeMap<BatchId, Snapshot>,
    pub(crate) committed: Snapshot,
    pub(crate) names: u64,
    pub(crate) total: u64,
    /// The highest sequence that was ever handed out.
    pub(crate) highest_seq: u64,
    pub(crate) boot: u64,
    /// The grant table exists since this batch is durable.
    pub(crate) table_since: BatchId,
}

pub(crate) fn flat(run: DeviceRun) -> impl Iterator<Item = Place> {
    (run.first.0..run.end()).map(move |extent| (run.device.0, extent))
}

pub(crate) fn one((device, extent): Place) -> DeviceRun {
    DeviceRun::new(DeviceIndex(device), extent, 1)
}

impl World {
    pub(crate) fn new() -> Self {
        let stores = stores(&[28, 20]);
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
            total: 48,
            highest_seq: 0,
            boot: 0,
            table_since: BatchId(0),
        }
    }

    pub(crate) fn nth(&self, volume: usize) -> Option<u64> {
        self.volumes.keys().nth(volume).copied()
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.volumes
            .iter()
            .map(|(id, volume)| (*id, volume.durable()))
            .collect()
    }

    pub(crate) fn take(&mut self) {
        if let Some(batch) = self.pool.take_batch().unwrap() {
            self.snapshots.insert(batch.id(), self.snapshot());
            self.taken.push_back(batch);
        }
    }

    pub(crate) fn commit_one(&mut self) {
        let Some(batch) = self.taken.pop_front() else {
            return;
        };
        self.catalog.commit(&batch).unwrap();
        self.pool.committed(batch.id()).unwrap();
        self.committed = self.snapshots.remove(&batch.id()).unwrap();
        for volume in self.volumes.values_mut() {
            volume.committing.retain(|_, (_, by)| *by > batch.id());
        }
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

    pub(crate) fn commit_all(&mut self) {
        self.take();
        while !self.taken.is_empty() {
            self.commit_one();
        }
    }

    pub(crate) fn free(&mut self, volume: u64, logical: u64, place: Place) {
        assert!(self.dirty.insert(place), "{place:?} freed twice");
        self.freed_in.insert(place, self.pool.open_batch_id());
        self.leaving
            .push((self.pool.open_batch_id(), (volume, logical), place));
    }

    /// A write as the owner loop does it. False: the pool is full.
    pub(crate) fn write(&mut self, volume: u64, logical: u64) -> bool {
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
                FaultAnswer::DeviceGone { device } => panic!("{device} is not gone"),
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
    pub(crate) fn store(&mut self, volume: u64, logical: u64, place: Place, seq: Option<u64>) {
        self.content.insert(place, (volume, logical));
        self.table
            .insert((volume, logical), (place, seq.unwrap_or(0)));
    }

    pub(crate) fn check_mapped(
        &self,
        volume: u64,
        logical: u64,
        place: Place,
        count: u64,
        seq: Option<u64>,
    ) {
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

    pub(crate) fn read(&mut self, volume: u64, logical: u64) {
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

    pub(crate) fn flush(&mut self, volume: u64, part: u64) {
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
        let batch = self.pool.open_batch_id();
        for (logical, seq) in known.uncommitted.iter().filter(|(_, seq)| **seq <= up_to) {
            known.committing.insert(*logical, (*seq, batch));
        }
        known.uncommitted.retain(|_, seq| *seq > up_to);
        let expected = (before - known.uncommitted.len()) as u64;
        assert_eq!(
            self.pool.commit_mappings(id, up_to, |_| true).unwrap(),
            expected
        );
        if expected > 0 {
            assert!(
                self.pool.durable_seq(id) < lowest,
                "durable before its commit"
            );
        }
        if part > 1 {
            self.commit_all();
            let durable = self.pool.durable_seq(id);
            assert!(highest.is_none_or(|highest| durable >= highest));
        }
    }

    pub(crate) fn release(&mut self, volume: u64, first: u64, count: u64) {
        let known = self.volumes.get_mut(&volume).unwrap();
        let result = self
            .pool
            .release(VolumeId(volume), ExtentIndex(first), count, &DRAINED);
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
            known.committing.remove(logical);
        }
        for (logical, place) in gone {
            self.free(volume, logical, place);
        }
    }

    pub(crate) fn launder(&mut self, max: u64, fate: u64) {
        let runs: Vec<_> = [0, 1]
            .into_iter()
            .flat_map(|device| self.pool.take_dirty(DeviceIndex(device), max))
            .collect();
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

    pub(crate) fn check(&self) {
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
            let committing = volume.committing.values().map(|(seq, _)| *seq);
            let outstanding: BTreeSet<u64> = volume
                .uncommitted
                .values()
                .copied()
                .chain(committing)
                .collect();
            let waiting = (volume.uncommitted.len() + volume.committing.len()) as u64;
            assert_eq!(said.uncommitted, waiting);
            assert_eq!(
                self.pool.uncommitted(VolumeId(*id)),
                outstanding.last().copied()
            );
            let durable = self.pool.durable_seq(VolumeId(*id));
            assert!(outstanding.first().is_none_or(|seq| durable < *seq));
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
}
