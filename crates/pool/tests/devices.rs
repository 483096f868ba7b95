//! Several devices: placement; devices that go away, come back, hang or are new.

mod common;

use common::{DRAINED, EXTENT, commit, new_pool, reopen, stores};
use forebay_pool::{
    Catalog, Check, DeviceHealth, DeviceRecord, DeviceRun, ErrorKind, FaultAnswer, NewVolume,
    Placement, Pool, PoolSettings, QuarantineMark, Released,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeSet;
use uuid::Uuid;

const D0: DeviceIndex = DeviceIndex(0);
const D1: DeviceIndex = DeviceIndex(1);

fn volume(pool: &mut Pool, name: &str, extents: u64) -> VolumeId {
    if pool.tenants().named("t").is_err() {
        pool.create_tenant("t", 0).unwrap();
    }
    let new = NewVolume {
        tenant: "t".into(),
        name: name.into(),
        size_bytes: extents * EXTENT,
        block_bytes: None,
        reserved_bytes: 0,
    };
    pool.create_volume(&new, 0).unwrap()
}

fn write(pool: &mut Pool, catalog: &Catalog, volume: VolumeId, logical: u64) -> FaultAnswer {
    for _ in 0..8 {
        match pool.fault(volume, ExtentIndex(logical), true).unwrap() {
            FaultAnswer::NeedReserve { count } => {
                pool.reserve(volume, count).unwrap();
                commit(pool, catalog);
            }
            FaultAnswer::AwaitCommit { .. } => commit(pool, catalog),
            answer => {
                if let Some(count) = pool.wants_reserve(volume, false) {
                    pool.reserve(volume, count).unwrap();
                }
                return answer;
            }
        }
    }
    panic!("a fault that goes in circles");
}

fn device_of(answer: FaultAnswer) -> DeviceIndex {
    match answer {
        FaultAnswer::Allocated { device, .. } | FaultAnswer::Mapped { device, .. } => device,
        other => panic!("{other:?}"),
    }
}

fn place(answer: FaultAnswer) -> (DeviceIndex, u64) {
    match answer {
        FaultAnswer::Allocated { device, extent, .. }
        | FaultAnswer::Mapped { device, extent, .. } => (device, extent.0),
        other => panic!("{other:?}"),
    }
}

fn take_dirty(pool: &mut Pool, max: u64) -> Vec<DeviceRun> {
    let devices: Vec<DeviceIndex> = pool.devices().iter().map(|device| device.index).collect();
    let take = |device| pool.take_dirty(device, max);
    devices.into_iter().flat_map(take).collect()
}

fn zero_fill(pool: &mut Pool, catalog: &Catalog) {
    for run in take_dirty(pool, u64::MAX) {
        pool.zero_filled(run).unwrap();
    }
    commit(pool, catalog);
}

/// (device, length) of the runs of a volume's map.
fn runs(pool: &mut Pool, volume: VolumeId, extents: u64) -> Vec<(u8, u64)> {
    let (mut at, mut runs) = (0, Vec::new());
    while at < extents {
        match pool.fault(volume, ExtentIndex(at), false).unwrap() {
            FaultAnswer::Mapped { device, count, .. } => {
                runs.push((device.0, count));
                at += count;
            }
            other => panic!("{at}: {other:?}"),
        }
    }
    runs
}

fn set_placement(pool: &mut Pool, placement: Placement) {
    let settings = PoolSettings {
        placement,
        ..pool.info().settings
    };
    pool.set_settings(settings).unwrap();
}

#[test]
fn stripe_goes_round_the_devices() {
    let stores = stores(&[2000, 2000, 2000]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 3000);
    for logical in 0..960 {
        device_of(write(&mut pool, &catalog, v, logical));
    }
    let runs = runs(&mut pool, v, 960);
    let mut on = [0; 3];
    for (device, count) in &runs {
        on[usize::from(*device)] += count;
    }
    assert!(on.iter().all(|count| (270..=370).contains(count)), "{on:?}");
    let whole = runs.iter().filter(|(_, count)| *count >= 16).count();
    assert!(whole >= 45, "{whole} whole units of 60: {runs:?}");
    // Neighbouring units lie on different devices, except where a device had no spare extents.
    assert!(runs.len() >= 45, "{runs:?}");
    assert!(pool.check().unwrap().is_clean());
}

#[test]
fn a_unit_written_in_any_order_ends_up_contiguous() {
    let stores = stores(&[2000, 2000]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 3000);
    for _ in 0..5 {
        pool.reserve(v, 256).unwrap();
    }
    commit(&mut pool, &catalog);
    for step in 0..256 {
        device_of(write(&mut pool, &catalog, v, step * 37 % 256));
    }
    let runs = runs(&mut pool, v, 256);
    assert!(runs.iter().all(|(_, count)| count % 16 == 0), "{runs:?}");
}

#[test]
fn unequal_devices_fill_together_and_completely() {
    let stores = stores(&[3000, 1000]);
    let (mut pool, catalog) = new_pool(&stores);
    let sizes = [D0, D1].map(|device| pool.allocator().device_space(device).unwrap().total);
    let total = sizes[0] + sizes[1];
    let v = volume(&mut pool, "v", total);
    for logical in 0..total {
        device_of(write(&mut pool, &catalog, v, logical));
        if logical == total / 2 {
            let full = [D0, D1].map(|device| {
                let space = pool.allocator().device_space(device).unwrap();
                (space.total - space.clean) * 100 / space.total
            });
            assert!(full[0].abs_diff(full[1]) <= 12, "{full:?}");
        }
    }
    assert_eq!(pool.space().clean, 0);
}

#[test]
fn fill_takes_the_lowest_device_first() {
    let stores = stores(&[400, 400]);
    let (mut pool, catalog) = new_pool(&stores);
    set_placement(&mut pool, Placement::Fill);
    let first = pool.allocator().device_space(D0).unwrap().total;
    let v = volume(&mut pool, "v", 800);
    for logical in 0..first {
        assert_eq!(
            device_of(write(&mut pool, &catalog, v, logical)),
            D0,
            "{logical}"
        );
    }
    assert_eq!(device_of(write(&mut pool, &catalog, v, first)), D1);
    assert!(runs(&mut pool, v, first).len() <= 8);
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (mut pool, catalog) = reopen(&stores, false);
    assert_eq!(pool.info().settings.placement, Placement::Fill);
    set_placement(&mut pool, Placement::Stripe);
    let w = volume(&mut pool, "w", 800);
    assert_eq!(device_of(write(&mut pool, &catalog, w, 0)), D1);
}

#[test]
fn a_missing_device_affects_only_its_own_extents() {
    let stores = stores(&[400, 400]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 600);
    let places: Vec<_> = (0..64)
        .map(|logical| device_of(write(&mut pool, &catalog, v, logical)))
        .collect();
    commit(&mut pool, &catalog);
    assert_eq!(pool.volumes().on_device(D1), [v]);
    pool.set_device_health(D1, DeviceHealth::Failed).unwrap();
    let away = pool.allocator().device_space(D1).unwrap();
    for (logical, device) in places.iter().enumerate() {
        for want_write in [false, true] {
            let answer = pool
                .fault(v, ExtentIndex(logical as u64), want_write)
                .unwrap();
            match answer {
                FaultAnswer::DeviceGone { device: gone } => assert_eq!([gone, *device], [D1, D1]),
                other => assert_eq!([device_of(other), *device], [D0, D0]),
            }
        }
    }
    // All new extents come from the other device.
    let mut logical = 64;
    while let FaultAnswer::Allocated { device, .. } = write(&mut pool, &catalog, v, logical) {
        assert_eq!(device, D0);
        logical += 1;
    }
    let left = pool.allocator().device_space(D0).unwrap();
    assert_eq!((left.clean, left.owned + left.reserved), (0, left.total));
    assert!(pool.space().unavailable > 0);
    assert_eq!(
        pool.allocator().device_space(D1).unwrap(),
        away,
        "stock stays where it is"
    );
    let sequence = pool.volumes().uncommitted(v).unwrap();
    assert_eq!(
        pool.volumes()
            .pending_on(v, sequence)
            .into_iter()
            .collect::<Vec<_>>(),
        [D0, D1]
    );
    let committed = pool
        .commit_mappings(v, sequence, |device| device == D0)
        .unwrap();
    commit(&mut pool, &catalog);
    let waits = places.iter().filter(|device| **device == D1).count() as u64;
    assert_eq!(committed, left.total);
    assert_eq!(pool.volumes().space_of(v).unwrap().uncommitted, waits);
    assert_eq!(
        pool.volumes()
            .pending_devices()
            .into_iter()
            .collect::<Vec<_>>(),
        [D1]
    );
    assert!(pool.volumes().durable_seq(v) < sequence);
    let on_d1 = places.iter().position(|device| *device == D1).unwrap() as u64;
    pool.release(v, ExtentIndex(on_d1), 1, &DRAINED).unwrap();
    commit(&mut pool, &catalog);
    assert!(pool.take_dirty(D1, 9).is_empty());
    pool.set_device_health(D1, DeviceHealth::Online).unwrap();
    assert_eq!(device_of(write(&mut pool, &catalog, v, logical)), D1);
    assert_eq!(pool.take_dirty(D1, 9).len(), 1);
    assert!(pool.check().unwrap().is_clean());
    let gone = pool.set_device_health(DeviceIndex(2), DeviceHealth::Online);
    assert_eq!(gone.unwrap_err().kind, ErrorKind::NotFound);
}

#[test]
fn a_failing_device_serves_what_it_has_and_gets_nothing_new() {
    let stores = stores(&[400, 400]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 600);
    let places: Vec<_> = (0..64)
        .map(|logical| device_of(write(&mut pool, &catalog, v, logical)))
        .collect();
    commit(&mut pool, &catalog);
    pool.set_device_health(D1, DeviceHealth::Failing).unwrap();
    for (logical, device) in places.iter().enumerate() {
        let answer = pool.fault(v, ExtentIndex(logical as u64), true).unwrap();
        assert_eq!(device_of(answer), *device);
    }
    for logical in 64..128 {
        assert_eq!(device_of(write(&mut pool, &catalog, v, logical)), D0);
    }
    let on_d1 = places.iter().position(|device| *device == D1).unwrap() as u64;
    pool.release(v, ExtentIndex(on_d1), 1, &DRAINED).unwrap();
    commit(&mut pool, &catalog);
    assert!(pool.take_dirty(D1, 9).is_empty());
    assert!(pool.space().unavailable > 0);
}

#[test]
fn a_new_device_is_used_when_it_is_ready() {
    let stores = stores(&[40]);
    let (mut pool, catalog) = new_pool(&stores);
    let total = pool.space().total;
    let v = volume(&mut pool, "v", total + 100);
    for logical in 0..total {
        device_of(write(&mut pool, &catalog, v, logical));
    }
    assert_eq!(write(&mut pool, &catalog, v, total), FaultAnswer::NoSpace);
    let record = |index, block_bytes| DeviceRecord {
        index: DeviceIndex(index),
        uuid: Uuid::new_v4(),
        spec: "mem:new".into(),
        extents: 100,
        ..DeviceRecord {
            block_bytes,
            ..pool.devices()[0].clone()
        }
    };
    let (wrong, large, right) = (record(3, 512), record(1, 4096), record(1, 512));
    assert_eq!(pool.add_device(wrong).unwrap_err().kind, ErrorKind::Invalid);
    let error = pool.add_device(large).unwrap_err();
    assert!(error.message.contains("smaller blocks"), "{error}");
    let mut check = Check::begin(&mut pool).unwrap();
    pool.add_device(right.clone()).unwrap();
    assert_eq!(pool.allocator().device_health(D1), DeviceHealth::Missing);
    commit(&mut pool, &catalog);
    assert_eq!(write(&mut pool, &catalog, v, total), FaultAnswer::NoSpace);
    pool.set_device_health(D1, DeviceHealth::Online).unwrap();
    for logical in total..total + 100 {
        assert_eq!(device_of(write(&mut pool, &catalog, v, logical)), D1);
    }
    while !check.step(&pool, 10).unwrap() {}
    assert!(check.end().is_clean());
    assert_eq!(pool.space().total, total + 100);
    assert_eq!(pool.devices()[1], right);
}

#[test]
fn extents_on_a_hung_device_are_quarantined_on_release() {
    let stores = stores(&[32, 32]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 64);
    for logical in 0..40 {
        write(&mut pool, &catalog, v, logical);
    }
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    commit(&mut pool, &catalog);
    let on = |pool: &Pool| [D0, D1].map(|device| pool.allocator().quarantined_on(device));
    let hanging = BTreeSet::from([D1]);
    let released = pool.release(v, ExtentIndex(0), 32, &hanging).unwrap();
    assert_eq!(released.extents, 32);
    assert_eq!(on(&pool), [0, released.quarantined]);
    assert!(released.quarantined > 0 && released.quarantined < 32);
    let before_settle = pool.allocator().quarantine_mark();
    let later = pool.delete_volume(v, &BTreeSet::from([D0, D1])).unwrap();
    assert_eq!(later.quarantined, 8);
    commit(&mut pool, &catalog);
    let quarantined = pool.space().quarantined;
    assert_eq!(quarantined, released.quarantined + 8);
    let dirty = take_dirty(&mut pool, u64::MAX);
    assert!(dirty.iter().all(|run| run.device == D0));
    drop((pool, catalog));
    // In the same boot a request may still hang.
    let (mut pool, catalog) = reopen(&stores, true);
    assert_eq!(pool.space().quarantined, quarantined);
    assert_eq!(pool.volumes().records().count(), 0);
    let w = volume(&mut pool, "w", 64);
    let free = 64 - quarantined;
    for logical in 0..free {
        if write(&mut pool, &catalog, w, logical) == FaultAnswer::AwaitZeroFill {
            zero_fill(&mut pool, &catalog);
            place(write(&mut pool, &catalog, w, logical));
        }
    }
    let answer = write(&mut pool, &catalog, w, free);
    assert_eq!(answer, FaultAnswer::NoSpace, "nobody gets them");
    assert_eq!(before_settle, QuarantineMark(1), "marks are of one opening");
    let mark = pool.allocator().quarantine_mark();
    assert_eq!(
        pool.end_quarantine_on(D0, mark),
        later_on(&released, &later, D0)
    );
    assert!(
        take_dirty(&mut pool, 9).is_empty(),
        "not before it is durable"
    );
    commit(&mut pool, &catalog);
    assert_eq!(pool.allocator().quarantined_on(D0), 0);
    assert!(pool.allocator().quarantined_on(D1) > 0);
    zero_fill(&mut pool, &catalog);
    place(write(&mut pool, &catalog, w, free));
    drop((pool, catalog));
    // Another boot ends it.
    let (mut pool, _) = reopen(&stores, false);
    assert_eq!(pool.space().quarantined, 0);
    assert!(
        take_dirty(&mut pool, u64::MAX)
            .iter()
            .any(|run| run.device == D1)
    );
}

/// Extents that two releases quarantined on a device that hung only at the second.
fn later_on(first: &Released, second: &Released, device: DeviceIndex) -> u64 {
    assert!(first.runs.iter().any(|run| run.device == device));
    let runs = second.runs.iter().filter(|run| run.device == device);
    runs.map(|run| run.count).sum()
}

#[test]
fn a_quarantine_ends_up_to_its_mark() {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 64);
    for logical in 0..8 {
        write(&mut pool, &catalog, v, logical);
    }
    let hanging = BTreeSet::from([D0]);
    pool.release(v, ExtentIndex(0), 3, &hanging).unwrap();
    let mark = pool.allocator().quarantine_mark();
    pool.release(v, ExtentIndex(3), 2, &hanging).unwrap();
    assert_eq!(pool.end_quarantine_on(D0, mark), 3);
    assert_eq!(pool.end_quarantine_on(D0, mark), 0, "once");
    assert_eq!(pool.allocator().quarantined_on(D0), 2);
    commit(&mut pool, &catalog);
    let run = take_dirty(&mut pool, 100)[0];
    assert_eq!(run.count, 3);
    pool.quarantine(run).unwrap();
    assert!(pool.quarantine(run).is_err(), "not being laundered now");
    assert!(pool.zero_filled(run).is_err());
    commit(&mut pool, &catalog);
    assert_eq!(pool.allocator().quarantined_on(D0), 5);
    assert!(take_dirty(&mut pool, 100).is_empty());
}
