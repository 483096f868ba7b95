//! The check finds each kind of damage, and repairs only leaks.

use super::*;
use crate::{
    NewDevice, NewImageVolume, NewVolume, PoolSpec,
    open::create::create,
    store::MemStore,
    volumes::{PoolVolume, faults::FaultAnswer},
};
use forebay_xlate::types::ExtentIndex;
use std::{collections::BTreeSet, sync::Arc};

const D0: DeviceIndex = DeviceIndex(0);

struct World {
    pool: Pool,
    catalog: Catalog,
    a: VolumeId,
    b: VolumeId,
}

impl World {
    /// Two volumes, each with durable and pending mappings and spare extents.
    fn new() -> Self {
        let device = |spec: &str| NewDevice {
            spec: spec.into(),
            store: Arc::new(MemStore::new(40 << 20)),
            block_bytes: 512,
            known_zero: true,
        };
        let spec = PoolSpec {
            name: "p".into(),
            extent_bytes: 1 << 16,
            devices: vec![device("a"), device("b")],
            settings: crate::PoolSettings::default(),
            force: false,
            now_s: 0,
        };
        let (mut pool, catalog) = create(&spec).unwrap();
        pool.create_tenant("t", 0).unwrap();
        let mut volume = |name: &str| {
            let new = NewVolume {
                tenant: "t".into(),
                name: name.into(),
                size_bytes: 2000 << 16,
                block_bytes: None,
                reserved_bytes: 50 << 16,
            };
            pool.create_volume(&new, 0).unwrap()
        };
        let (a, b) = (volume("a"), volume("b"));
        let mut world = Self {
            pool,
            catalog,
            a,
            b,
        };
        for logical in (0..1500).step_by(90) {
            world.write(a, logical);
            world.write(b, logical + 7);
        }
        world.pool.commit_mappings(a, u64::MAX, |_| true).unwrap();
        world.commit();
        for logical in 200..210 {
            world.write(a, logical);
            world.write(b, logical);
        }
        world
    }

    fn commit(&mut self) {
        if let Some(batch) = self.pool.take_batch().unwrap() {
            self.catalog.commit(&batch).unwrap();
            self.pool.committed(batch.id()).unwrap();
        }
    }

    fn write(&mut self, volume: VolumeId, logical: u64) -> DeviceRun {
        loop {
            match self.pool.fault(volume, ExtentIndex(logical), true).unwrap() {
                FaultAnswer::NeedReserve { count } => {
                    self.pool.reserve(volume, count).unwrap();
                    self.commit();
                }
                FaultAnswer::Allocated { device, extent, .. }
                | FaultAnswer::Mapped { device, extent, .. } => {
                    return DeviceRun::new(device, extent.0, 1);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn image(&mut self) -> VolumeId {
        let new = NewImageVolume::example("r");
        self.pool.create_image_volume(&new, 0).unwrap()
    }

    fn volume(&mut self, volume: VolumeId) -> &mut PoolVolume {
        self.pool.volumes.get_mut(volume).unwrap()
    }

    fn place(&mut self, volume: VolumeId, logical: u64) -> DeviceRun {
        let (device, extent) = self.volume(volume).map.get(logical).unwrap();
        DeviceRun::new(device, extent, 1)
    }
}

#[test]
fn a_sound_pool_is_clean_and_stays_so() {
    let mut world = World::new();
    let report = world.pool.check().unwrap();
    assert_eq!(report.problems, []);
    assert_eq!((report.volumes_checked, report.mappings_checked), (2, 54));
    assert_eq!(report.extents_checked, world.pool.space().total);
    world
        .pool
        .release(world.a, ExtentIndex(0), 100, &BTreeSet::from([D0]))
        .unwrap();
    world.pool.delete_volume(world.b, &BTreeSet::new()).unwrap();
    assert_eq!(world.pool.check().unwrap().problems, []);
    world.commit();
    world.pool.return_idle_spare();
    world.pool.return_idle_spare();
    assert_eq!(world.pool.check().unwrap().problems, []);
    world.commit();
    let devices = world.pool.devices().to_vec();
    assert_eq!(check_catalog(&world.catalog, &devices).problems, []);
}

/// Between pieces mappings move, volumes go, and extents change hands.
#[test]
fn a_check_under_way_is_not_deceived_by_what_changes() {
    for seed in 0..60u64 {
        let mut world = World::new();
        let mut check = Check::begin(&mut world.pool).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        loop {
            if check.step(&world.pool, 1).unwrap() {
                break;
            }
            let at = random.u64(..1400);
            let (a, b) = (world.a, world.b);
            match random.u64(..5) {
                0 => {
                    world.write(a, at);
                    world.write(b, at + 3);
                }
                1 => drop(
                    world
                        .pool
                        .release(a, ExtentIndex(at), 300, &BTreeSet::new()),
                ),
                2 => {
                    for device in [0, 1] {
                        for run in world.pool.take_dirty(DeviceIndex(device), 100) {
                            world.pool.zero_filled(run).unwrap();
                        }
                    }
                }
                3 => drop(world.pool.commit_mappings(b, u64::MAX, |_| true)),
                _ => world.commit(),
            }
        }
        let report = check.end();
        assert_eq!(report.problems, [], "seed {seed}");
    }
}

#[test]
fn damage_is_named() {
    type Damage = (&'static str, fn(&mut World));
    let damages: Vec<Damage> = vec![
        ("two owners", |world| {
            let run = world.place(world.a, 0);
            let b = world.b;
            world.volume(b).map.insert(1999, run.device, run.first.0);
        }),
        ("two owners", |world| {
            let run = world.volume(world.a).spare.iter().next().unwrap();
            let b = world.b;
            world.volume(b).spare.insert(run);
        }),
        ("its state is Clean", |world| {
            let run = world.place(world.a, 0);
            world.pool.allocator.extents.set(run, ExtentState::Clean);
        }),
        ("its state is Owned", |world| {
            let run = world.place(world.b, 203);
            world.pool.allocator.extents.set(run, ExtentState::Owned);
        }),
        ("past the end of the device", |world| {
            let a = world.a;
            world.volume(a).map.insert(1000, D0, 1 << 40);
        }),
        ("which does not exist", |world| {
            let a = world.a;
            world.volume(a).map.insert(1000, DeviceIndex(9), 1);
        }),
        ("has 100 extents but maps", |world| {
            let a = world.a;
            world.volume(a).record.size_bytes = 100 << 16;
        }),
        ("but counts", |world| {
            let a = world.a;
            world.volume(a).map.miscount();
        }),
        ("not mapped", |world| {
            let a = world.a;
            world.volume(a).pending.add(1700, D0, 1);
        }),
        ("which are not reserved for it", |world| {
            let run = world.volume(world.a).spare.iter().next().unwrap();
            world.pool.allocator.reservations.remove(run);
            let b = world.b;
            world.pool.allocator.reservations.insert(run, b);
        }),
        ("reserved extents", |world| {
            let b = world.b;
            let last = world.pool.devices[1].extents - 1;
            let run = DeviceRun::new(DeviceIndex(1), last, 1);
            world.pool.allocator.reservations.insert(run, b);
        }),
        ("promised extents", |world| world.pool.volumes.promised += 1),
        ("promised catalog bytes", |world| {
            world.pool.volumes.catalog_promised += 1;
        }),
        ("is owed", |world| {
            let b = world.b;
            world.volume(b).entitlement += 1;
        }),
        ("listed as quarantined", |world| {
            let last = world.pool.devices[0].extents - 1;
            world
                .pool
                .allocator
                .extents
                .set(DeviceRun::new(D0, last, 1), ExtentState::Quarantined);
        }),
        ("to be freed", |world| {
            let last = world.pool.devices[0].extents - 1;
            world
                .pool
                .allocator
                .extents
                .set(DeviceRun::new(D0, last, 1), ExtentState::Freed);
        }),
        ("are counted as", |world| {
            world.pool.allocator.extents.miscount()
        }),
        ("but its place is None", |world| {
            let image = world.image();
            world.volume(image).image = None;
        }),
        ("the client None", |world| {
            world.image();
            world.pool.images.clients.clear();
        }),
        ("volumes in RBD images", |world| {
            let image = world.image();
            let record = world.pool.images.of(image).unwrap().clone();
            world.pool.images.by_volume.insert(VolumeId(99), record);
        }),
        ("by its tenant and name", |world| {
            let b = world.b;
            world.volume(b).record.name = "other".into();
        }),
    ];
    for (what, damage) in damages {
        let mut world = World::new();
        damage(&mut world);
        let report = world.pool.check().unwrap();
        assert!(
            report
                .problems
                .iter()
                .any(|problem| problem.what.contains(what)),
            "{what}: {:?}",
            report.problems
        );
        assert_eq!(report.leaked_extents, 0, "{what}");
    }
}

#[test]
fn leaks_are_found_and_become_dirty_once() {
    let mut world = World::new();
    let space = world.pool.space();
    let a = world.a;
    let lost = world.place(a, 90);
    world.volume(a).map.remove(90, 1);
    let spare = world.volume(a).spare.iter().next().unwrap();
    assert!(world.volume(a).spare.take(spare));
    world.pool.volumes.settle_account(a);
    let report = world.pool.check().unwrap();
    assert_eq!(report.leaked_extents, 1 + spare.count);
    assert_eq!(report.problems.len(), 1, "{:?}", report.problems);
    assert!(report.problems[0].repairable);
    assert_eq!(world.pool.repair(&report).unwrap(), 1 + spare.count);
    assert_eq!(world.pool.repair(&report).unwrap(), 0, "not again");
    world.commit();
    assert_eq!(
        world.pool.allocator().extent_state(lost),
        Some(ExtentState::Dirty)
    );
    assert_eq!(world.pool.space().dirty, space.dirty + 1 + spare.count);
    assert!(world.pool.check().unwrap().is_clean());
    assert!(world.pool.repair(&report).is_err(), "an old report");
}
