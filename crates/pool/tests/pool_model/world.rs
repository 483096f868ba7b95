//! The model, and its comparison with the pool after every step.

use crate::{
    common::{self, Choices, EXTENT, powercut::Power},
    disk::{Disk, Place, Sectors},
    tenant::Tenants,
};
use forebay_pool::{
    Batch, BatchId, Catalog, Check, DeviceHealth, DeviceRun, MergeStep, NewDevice, OpenDevice,
    Pool, PoolSpec, QuarantineMark,
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::OnceLock,
};

pub(crate) const EXTENTS: [u64; 3] = [20, 16, 12];

#[derive(Clone, Default, Debug, PartialEq)]
pub(crate) struct ModelVolume {
    pub(crate) extents: u64,
    pub(crate) reserved: u64,
    /// Where its extents lie, in its own map or in layers.
    pub(crate) map: BTreeMap<u64, Place>,
    /// For mappings in no batch that replace a layer's: what the durable map still shows.
    pub(crate) shadow: BTreeMap<u64, Place>,
    /// Its volume, if it is a snapshot.
    pub(crate) of: Option<u64>,
    /// logical -> sequence, in no batch yet.
    pub(crate) uncommitted: BTreeMap<u64, u64>,
    /// logical -> sequence and uncommitted batch.
    pub(crate) committing: BTreeMap<u64, (u64, BatchId)>,
}

/// A volume in the catalog.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Durable {
    pub(crate) extents: u64,
    pub(crate) reserved: u64,
    pub(crate) of: Option<u64>,
    pub(crate) map: BTreeMap<u64, Place>,
}

impl ModelVolume {
    /// Its content in a batch taken now.
    fn durable(&self) -> Durable {
        let mut map = self.map.clone();
        map.retain(|logical, _| !self.uncommitted.contains_key(logical));
        map.extend(&self.shadow);
        Durable {
            extents: self.extents,
            reserved: self.reserved,
            of: self.of,
            map,
        }
    }

    pub(crate) fn is_pending(&self, logical: u64) -> bool {
        self.uncommitted.contains_key(&logical) || self.committing.contains_key(&logical)
    }

    /// Its map shows the extent, now or in a batch taken now.
    pub(crate) fn reaches(&self, place: Place) -> bool {
        let mut all = self.map.values().chain(self.shadow.values());
        all.any(|at| *at == place)
    }
}

/// A copy for a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenCopy {
    pub(crate) source: Place,
    pub(crate) target: Place,
}

/// The expected catalog: number of devices, volumes, and extents that no volume shows.
pub(crate) type Contents = (usize, BTreeMap<u64, Durable>, BTreeSet<Place>);

pub(crate) struct World {
    pub(crate) power: Power,
    pub(crate) pool: Pool,
    pub(crate) catalog: Catalog,
    pub(crate) volumes: BTreeMap<u64, ModelVolume>,
    /// Extents in any map of the pool.
    pub(crate) held: BTreeSet<Place>,
    /// (volume, logical) -> copy, until its end.
    pub(crate) copies: BTreeMap<(u64, u64), OpenCopy>,
    /// Ended copies' volumes and targets. The entries stay until the batch is durable.
    pub(crate) ended: Vec<(BatchId, u64, Place)>,
    /// Volumes that are not written before a batch is durable.
    pub(crate) frozen: BTreeMap<u64, BatchId>,
    /// A volume's first ancestor; volumes with the same one may share extents.
    pub(crate) families: BTreeMap<u64, u64>,
    /// Volumes that ever were above a layer.
    pub(crate) layered: BTreeSet<u64>,
    /// A step planned some time ago.
    pub(crate) planned: Option<MergeStep>,
    pub(crate) disk: Disk,
    pub(crate) tenants: Tenants,
    pub(crate) version: u64,
    /// The grant table: (volume, logical) -> place, sequence.
    pub(crate) table: BTreeMap<(u64, u64), (Place, u64)>,
    /// Entries that a batch's commit removes from the table.
    pub(crate) leaving: Vec<(BatchId, (u64, u64), Place)>,
    /// Freed and not zero-filled since.
    pub(crate) dirty: BTreeSet<Place>,
    /// The batch that frees it; zero-filling must wait.
    pub(crate) freed_in: BTreeMap<Place, BatchId>,
    pub(crate) quarantined: BTreeSet<Place>,
    /// Hanging writes, with their marks.
    pub(crate) hanging: Vec<(QuarantineMark, Place, Sectors)>,
    /// The device asked about its requests.
    pub(crate) settling: Option<(u8, QuarantineMark)>,
    pub(crate) away: BTreeSet<u8>,
    pub(crate) check: Option<Check>,
    pub(crate) taken: VecDeque<Batch>,
    /// By batch.
    pub(crate) expected: BTreeMap<BatchId, Contents>,
    pub(crate) committed: Contents,
    pub(crate) labelled: usize,
    pub(crate) names: u64,
    /// The highest sequence ever handed out.
    pub(crate) highest_seq: u64,
    pub(crate) boot: u64,
    /// The batch that makes the grant table valid.
    pub(crate) table_since: BatchId,
}

pub(crate) fn flat(run: DeviceRun) -> impl Iterator<Item = Place> {
    (run.first.0..run.end()).map(move |extent| (run.device.0, extent))
}

pub(crate) fn one((device, extent): Place) -> DeviceRun {
    DeviceRun::new(DeviceIndex(device), extent, 1)
}

pub(crate) fn devices(bits: u8) -> BTreeSet<DeviceIndex> {
    let set = (0..8).filter(|device| bits & (1 << device) != 0);
    set.map(DeviceIndex).collect()
}

fn new_device(power: &Power, at: usize) -> NewDevice {
    NewDevice {
        spec: format!("mem:{at}"),
        store: power.stores()[at].clone(),
        block_bytes: 512,
        known_zero: true,
    }
}

fn formatted() -> Power {
    static MADE: OnceLock<Power> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let bytes = |at: usize, extents: &u64| if at == 0 { common::FIRST_DATA_BYTES } else { common::OTHER_DATA_BYTES } + extents * EXTENT;
        let capacities: Vec<u64> = EXTENTS.iter().enumerate().map(|(at, e)| bytes(at, e)).collect();
        let power = Power::new(&capacities);
        let spec = PoolSpec {
            devices: (0..2).map(|at| new_device(&power, at)).collect(),
            ..common::spec(&[], true)
        };
        let (mut pool, catalog) = forebay_pool::create(&spec).unwrap();
        pool.create_tenant("t", 0).unwrap();
        pool.create_tenant("u", 0).unwrap();
        pool.set_boot_id("boot-0").unwrap();
        common::commit(&mut pool, &catalog);
        power
    });
    made.after_kill()
}

pub(crate) fn open(power: &Power, devices: usize) -> (Pool, Catalog) {
    let device = |at: usize| OpenDevice {
        spec: format!("mem:{at}"),
        store: power.stores()[at].clone(),
        forced: false,
    };
    let devices: Vec<OpenDevice> = (0..devices).map(device).collect();
    let mut opened = forebay_pool::open(&devices).unwrap();
    // Volumes here have few extents.
    opened.pool.set_delete_slice(3);
    (opened.pool, opened.catalog)
}

impl World {
    pub(crate) fn new() -> Self {
        let power = formatted();
        let (mut pool, catalog) = open(&power, 2);
        pool.finish_adoption(true).unwrap();
        common::commit(&mut pool, &catalog);
        Self {
            power,
            pool,
            catalog,
            volumes: BTreeMap::new(),
            held: BTreeSet::new(),
            copies: BTreeMap::new(),
            ended: Vec::new(),
            frozen: BTreeMap::new(),
            families: BTreeMap::new(),
            layered: BTreeSet::new(),
            planned: None,
            disk: Disk::default(),
            tenants: Tenants::default(),
            version: 0,
            table: BTreeMap::new(),
            leaving: Vec::new(),
            dirty: BTreeSet::new(),
            freed_in: BTreeMap::new(),
            quarantined: BTreeSet::new(),
            hanging: Vec::new(),
            settling: None,
            away: BTreeSet::new(),
            check: None,
            taken: VecDeque::new(),
            expected: BTreeMap::new(),
            committed: (2, BTreeMap::new(), BTreeSet::new()),
            labelled: 2,
            names: 0,
            highest_seq: 0,
            boot: 0,
            table_since: BatchId(0),
        }
    }

    /// The record is durable with the next commit.
    pub(crate) fn add_device(&mut self) {
        let index = self.pool.devices().len();
        if index < EXTENTS.len() {
            let device = new_device(&self.power, index);
            forebay_pool::add_device(&mut self.pool, &self.catalog, &device, false).unwrap();
            self.labelled = index + 1;
            self.away.insert(index as u8);
        }
    }

    /// A volume that can be written.
    pub(crate) fn nth(&self, volume: usize) -> Option<u64> {
        let mut all = self.volumes.iter().filter(|(_, known)| known.of.is_none());
        all.nth(volume).map(|(id, _)| *id)
    }

    pub(crate) fn nth_of_all(&self, volume: usize) -> Option<u64> {
        self.volumes.keys().nth(volume).copied()
    }

    pub(crate) fn nth_snapshot(&self, pick: usize) -> Option<u64> {
        let all = self.volumes.iter().filter(|(_, known)| known.of.is_some());
        let all: Vec<u64> = all.map(|(id, _)| *id).collect();
        all.get(pick % all.len().max(1)).copied()
    }

    pub(crate) fn is_away(&self, place: Place) -> bool {
        self.away.contains(&place.0)
    }

    pub(crate) fn set_health(&mut self, device: u8, health: DeviceHealth) {
        self.pool
            .set_device_health(DeviceIndex(device), health)
            .unwrap();
        if health == DeviceHealth::Online {
            self.away.remove(&device);
        } else {
            self.away.insert(device);
        }
    }

    /// All devices are online.
    pub(crate) fn bring_back(&mut self) {
        if !self.away.is_empty() {
            self.commit_all();
            for device in std::mem::take(&mut self.away) {
                self.set_health(device, DeviceHealth::Online);
            }
        }
    }

    fn contents(&self) -> Contents {
        let volumes = self.volumes.iter();
        let volumes: BTreeMap<u64, Durable> = volumes
            .map(|(id, volume)| (*id, volume.durable()))
            .collect();
        let mut hidden = self.held.clone();
        for volume in self.volumes.values() {
            for logical in volume.uncommitted.keys() {
                hidden.remove(&volume.map[logical]);
            }
        }
        for place in volumes.values().flat_map(|volume| volume.map.values()) {
            hidden.remove(place);
        }
        (self.pool.devices().len(), volumes, hidden)
    }

    pub(crate) fn take(&mut self) {
        if let Some(batch) = self.pool.take_batch().unwrap() {
            self.expected.insert(batch.id(), self.contents());
            self.taken.push_back(batch);
        }
    }

    pub(crate) fn commit_one(&mut self) {
        let Some(batch) = self.taken.pop_front() else {
            return;
        };
        self.catalog.commit(&batch).unwrap();
        self.pool.committed(batch.id()).unwrap();
        self.committed = self.expected.remove(&batch.id()).unwrap();
        self.ended.retain(|(by, ..)| *by > batch.id());
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

    pub(crate) fn end(&mut self) {
        self.commit_all();
        assert_eq!(self.pool.check().unwrap().problems, []);
        self.bring_back();
        while let Some(key) = self.copies.keys().next().copied() {
            self.end_copy(key, 2, 1);
        }
        self.read_everything();
        let mut choices = Choices::with_seed(self.version);
        while !self.volumes.is_empty() {
            self.check_alone();
            if let Some(volume) = self.nth_of_all(choices.usize(..self.volumes.len())) {
                self.delete(volume, 0);
            }
            for _ in 0..choices.u64(..4) {
                match choices.u64(..3) {
                    0 => self.delete_more(),
                    1 => self.commit_all(),
                    _ => self.merge(true),
                }
            }
            self.compare();
            self.read_everything();
        }
        while self.pool.volumes().has_more_to_delete() {
            self.delete_more();
        }
        self.commit_all();
        assert!(self.held.is_empty() && self.pool.space().owned == 0);
        assert_eq!(self.pool.snapshots().next_merge(None), None);
        assert_eq!(self.pool.check().unwrap().problems, []);
        let devices = self.pool.devices().to_vec();
        let on_disk = forebay_pool::check_catalog(&self.catalog, &devices);
        assert_eq!(on_disk.problems, []);
    }

    fn read_everything(&mut self) {
        for volume in self.volumes.keys().copied().collect::<Vec<_>>() {
            for logical in self.tenants.of(volume).collect::<Vec<_>>() {
                self.read(volume, logical);
            }
        }
    }

    /// Volumes share extents only with relatives, at the same place, and durably.
    fn shown(&self) -> BTreeSet<Place> {
        let mut shown: BTreeMap<Place, (u64, u64, bool)> = BTreeMap::new();
        for (id, volume) in &self.volumes {
            let family = self.families[id];
            let own = volume.map.iter();
            let own = own.map(|(logical, place)| (logical, place, volume.is_pending(*logical)));
            let below = volume.shadow.iter();
            let below = below.map(|(logical, place)| (logical, place, false));
            for (logical, place, is_pending) in own.chain(below) {
                assert!(self.held.contains(place), "{place:?} is in no map");
                let other = shown.insert(*place, (family, *logical, is_pending));
                if let Some((of, at, was_pending)) = other {
                    assert_eq!((of, at), (family, *logical), "{place:?} has two owners");
                    assert!(!is_pending && !was_pending, "{place:?} is shared too early");
                }
            }
        }
        shown.into_keys().collect()
    }

    pub(crate) fn compare(&mut self) {
        let space = self.pool.space();
        let shown = self.shown();
        let unreached = self.held.difference(&shown).count() as u64;
        if self.layered.is_empty() {
            assert_eq!(self.pool.volumes().has_more_to_delete(), unreached > 0);
        }
        assert!(self.dirty.is_disjoint(&self.held) && self.quarantined.is_disjoint(&self.held));
        let (mut uncommitted, mut spare, mut entitlement) = (0, 0, 0);
        for (id, volume) in &self.volumes {
            uncommitted += volume.uncommitted.len() as u64;
            let said = self.pool.volumes().space_of(VolumeId(*id)).unwrap();
            let mapped = volume.map.len() as u64;
            assert!(said.mapped <= mapped);
            assert!(said.mapped == mapped || self.layered.contains(id));
            let committing = volume.committing.values().map(|(seq, _)| *seq);
            let waiting = volume.uncommitted.values().copied();
            let outstanding: BTreeSet<u64> = waiting.chain(committing).collect();
            let count = volume.uncommitted.len() + volume.committing.len();
            assert_eq!(said.uncommitted, count as u64);
            let newest = self.pool.volumes().uncommitted(VolumeId(*id));
            assert_eq!(newest, outstanding.last().copied());
            let durable = self.pool.volumes().durable_seq(VolumeId(*id));
            assert!(outstanding.first().is_none_or(|seq| durable < *seq));
            spare += said.reserved;
            let promised = volume.reserved.min(volume.extents);
            let still = promised.saturating_sub(said.mapped + said.reserved);
            assert_eq!(said.entitlement, still, "{id} is owed");
            entitlement += said.entitlement;
        }
        let total: u64 = EXTENTS[..self.pool.devices().len()].iter().sum();
        assert_eq!(space.total, total);
        assert_eq!(space.owned, self.held.len() as u64 - uncommitted);
        assert_eq!(space.reserved, spare + uncommitted);
        assert_eq!((space.spare, space.promised), (spare, entitlement));
        assert_eq!(space.dirty, self.dirty.len() as u64);
        assert_eq!(space.quarantined, self.quarantined.len() as u64);
        let sum = space.clean + space.reserved + space.owned + space.dirty + space.quarantined;
        assert_eq!(sum, space.total);
        // Promised extents are there, unless unreachable.
        if self.away.is_empty() && self.quarantined.is_empty() {
            assert!(
                entitlement <= space.clean + space.dirty + unreached,
                "{entitlement} extents are promised"
            );
        }
        for (_, place, _) in &self.hanging {
            assert!(
                self.quarantined.contains(place),
                "a late write would hit {place:?}"
            );
        }
    }
}
