//! The catalog's own problems: damage, a full area, interrupted commits, size and time.

mod common;

use common::{Choices, CrashStore, DRAINED, EXTENT, commit, new_pool, reopen, spec, stores};
use forebay_device::{
    DeviceSpec, OpenOptions,
    sync_io::{SyncDevice, create_sparse_file},
};
use forebay_pool::{
    Catalog, ErrorKind, FaultAnswer, NewDevice, NewVolume, OpenDevice, Pool, PoolSettings,
    PoolSpec, create, open,
};
use forebay_xlate::types::{ExtentIndex, VolumeId};
use std::sync::Arc;

fn volume(pool: &mut Pool, name: &str, extents: u64) -> VolumeId {
    let new = NewVolume {
        tenant: "t".into(),
        name: name.into(),
        size_bytes: extents * EXTENT,
        block_bytes: None,
        reserved_bytes: 0,
    };
    pool.create_volume(&new, 0).unwrap()
}

fn write(pool: &mut Pool, catalog: &Catalog, volume: VolumeId, logical: u64) {
    loop {
        match pool.fault(volume, ExtentIndex(logical), true).unwrap() {
            FaultAnswer::NeedReserve { count } => {
                pool.reserve(volume, count).unwrap();
                commit(pool, catalog);
            }
            FaultAnswer::AwaitCommit { .. } => commit(pool, catalog),
            FaultAnswer::Allocated { .. } | FaultAnswer::Mapped { .. } => return,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_cut_commit_is_whole_or_absent() {
    let mut choices = Choices::with_seed(7);
    let mut cut = 0;
    loop {
        let stores = stores(&[64]);
        let (mut pool, catalog) = new_pool(&stores);
        pool.create_tenant("t", 0).unwrap();
        for n in 0..3 {
            volume(&mut pool, &format!("before{n}"), 8);
            commit(&mut pool, &catalog);
        }
        for n in 0..40 {
            volume(&mut pool, &format!("new{n}"), 8);
        }
        stores[0].fail_after(cut);
        let batch = pool.take_batch().unwrap().unwrap();
        let done = catalog.commit(&batch).is_ok();
        // An interrupted sync has the most outcomes.
        let cuts = if stores[0].cut_in_sync() { 60 } else { 3 };
        for nth in 0..=cuts {
            let after = if nth < cuts {
                stores[0].after_power_cut(&mut choices)
            } else {
                stores[0].after_kill()
            };
            let (pool, catalog) = &mut reopen(&[Arc::new(after)], false);
            let count = pool.volumes().records().count();
            assert!(
                count == 43 || (count == 3 && !done),
                "{count} volumes, cut at {cut}"
            );
            volume(pool, "after", 8);
            commit(pool, catalog);
            if nth >= cuts - 1 {
                catalog.check().unwrap();
            }
        }
        if done {
            break;
        }
        cut += 1;
    }
    assert!(cut > 3, "the commit was never cut");
}

#[test]
fn a_failed_commit_can_be_repeated() {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    pool.create_tenant("t", 0).unwrap();
    for cut in 0..12 {
        volume(&mut pool, &format!("v{cut}"), 8);
        let batch = pool.take_batch().unwrap().unwrap();
        stores[0].fail_after(cut);
        let first = catalog.commit(&batch);
        stores[0].fail_after(u64::MAX);
        if let Err(error) = first {
            assert_eq!(error.kind, ErrorKind::Io, "{error}");
            catalog.commit(&batch).unwrap();
        }
        pool.committed(batch.id()).unwrap();
    }
    drop((pool, catalog));
    let (pool, _) = reopen(&stores, true);
    assert_eq!(pool.volumes().records().count(), 12);
}

fn fill_and_free(stores: &[Arc<CrashStore>]) {
    let (mut pool, catalog) = new_pool(stores);
    pool.create_tenant("t", 0).unwrap();
    let mut ids = Vec::new();
    let error = loop {
        let new = NewVolume {
            tenant: "t".into(),
            name: format!("v{}", ids.len()),
            size_bytes: EXTENT,
            block_bytes: None,
            reserved_bytes: 0,
        };
        match pool.create_volume(&new, 0) {
            Ok(id) => ids.push(id),
            Err(error) => break error,
        }
        if ids.len().is_multiple_of(100) {
            commit(&mut pool, &catalog);
        }
        assert!(ids.len() < 100_000, "never full");
    };
    commit(&mut pool, &catalog);
    assert_eq!(error.kind, ErrorKind::NoSpace);
    assert!(error.message.contains("delete"), "{error}");
    assert!(ids.len() > 10_000, "full at {}", ids.len());
    for id in ids.drain(..500) {
        pool.delete_volume(id, &DRAINED).unwrap();
        if id.0.is_multiple_of(10) {
            commit(&mut pool, &catalog);
        }
    }
    let v = volume(&mut pool, "another", 4);
    write(&mut pool, &catalog, v, 0);
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    commit(&mut pool, &catalog);
    catalog.check().unwrap();
    drop((pool, catalog));
    let (pool, _) = reopen(stores, false);
    assert_eq!(pool.volumes().records().count(), ids.len() + 1);
}

#[test]
fn a_full_catalog_refuses_additions_and_allows_deletions() {
    fill_and_free(&stores(&[64]));
}

/// The database cannot double below its limit, and gets the rest.
#[test]
fn a_catalog_that_cannot_double_uses_what_there_is() {
    // Twice 4 MiB and 48 bytes for each of 60,000 extents: 7 MiB.
    fill_and_free(&[Arc::new(CrashStore::keeping(
        16 << 20,
        (15 << 20) + 60_000 * EXTENT,
    ))]);
}

#[test]
fn tens_of_thousands_of_mappings_on_a_file() {
    const EXTENTS: u64 = 60_000;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    create_sparse_file(&path, EXTENTS * EXTENT + (16 << 20)).unwrap();
    let device: DeviceSpec = path.to_str().unwrap().parse().unwrap();
    let store = || Arc::new(SyncDevice::open(&device, &OpenOptions::default()).unwrap());
    let spec = PoolSpec {
        name: "big".into(),
        extent_bytes: EXTENT,
        devices: vec![NewDevice {
            spec: device.to_string(),
            store: store(),
            block_bytes: 512,
            known_zero: true,
        }],
        settings: PoolSettings::default(),
        force: false,
        now_s: 0,
    };
    let (mut pool, catalog) = create(&spec).unwrap();
    pool.create_tenant("t", 0).unwrap();
    let v = volume(&mut pool, "v", 1 << 30);
    let place = |n: u64| n * 7919 % (1 << 29);
    for n in 0..50_000 {
        write(&mut pool, &catalog, v, place(n));
        if n % 1000 == 0 {
            pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
        }
    }
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    commit(&mut pool, &catalog);
    let (space, usage) = (pool.space(), pool.catalog_usage());
    drop((pool, catalog));
    let open_device = OpenDevice {
        spec: device.to_string(),
        store: store(),
        forced: false,
    };
    let opened = open(&[open_device]).unwrap();
    let (mut pool, catalog) = (opened.pool, opened.catalog);
    pool.finish_adoption(true).unwrap();
    assert_eq!(pool.space(), space);
    assert_eq!(pool.catalog_usage(), usage);
    assert_eq!(pool.volumes().space_of(v).unwrap().mapped, 50_000);
    for n in (0..50_000).step_by(997) {
        let answer = pool.fault(v, ExtentIndex(place(n)), false).unwrap();
        assert!(matches!(
            answer,
            FaultAnswer::Mapped {
                commit_seq: None,
                ..
            }
        ));
    }
    let released = pool.delete_volume(v, &DRAINED).unwrap();
    commit(&mut pool, &catalog);
    assert!(pool.volume_by_name("t", "v").is_err());
    let mut slices = vec![released.extents];
    while pool.volumes().has_more_to_delete() {
        assert_eq!(pool.check().unwrap().problems, []);
        slices.push(pool.delete_more().unwrap().extents);
        commit(&mut pool, &catalog);
    }
    assert!(slices.iter().all(|slice| *slice < 20_000), "{slices:?}");
    assert_eq!(slices.iter().sum::<u64>(), 50_000);
    catalog.check().unwrap();
    assert_eq!(pool.space().dirty, 50_000);
    assert!(usage.used_bytes < usage.limit_bytes, "{usage:?}");
}

/// The worst size of a mapping is what the pool keeps free for it.
#[test]
fn a_full_pool_of_scattered_mappings_fits_its_catalog() {
    let stores = stores(&[200]);
    let (mut pool, catalog) = create(&spec(&stores, true)).unwrap();
    pool.create_tenant("t", 0).unwrap();
    let before = pool.catalog_usage().used_bytes;
    let v = volume(&mut pool, "v", 1 << 30);
    for n in 0..200 {
        write(&mut pool, &catalog, v, n * 5_000_000);
    }
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    commit(&mut pool, &catalog);
    let used = pool.catalog_usage().used_bytes - before;
    assert!(used < 200 * 40 + 500, "{used} bytes for 200 mappings");
    assert!(matches!(
        pool.fault(v, ExtentIndex(1), true).unwrap(),
        FaultAnswer::NoSpace
    ));
}

#[test]
fn mapped_bytes_end_with_the_volume() {
    let (mut pool, catalog) = new_pool(&stores(&[64]));
    pool.create_tenant("t", 0).unwrap();
    let new = NewVolume {
        tenant: "t".into(),
        name: "v".into(),
        size_bytes: EXTENT + 4096,
        block_bytes: None,
        reserved_bytes: 0,
    };
    let v = pool.create_volume(&new, 0).unwrap();
    write(&mut pool, &catalog, v, 1);
    let mapped = |from| pool.volumes().mapped_bytes(v, from, 8).unwrap();
    let all = EXTENT..EXTENT + 4096;
    assert_eq!(mapped(0), (vec![all.clone()], None));
    for beyond in [all.end, all.end + 1, 2 * EXTENT - 1, 2 * EXTENT, u64::MAX] {
        assert_eq!(mapped(beyond), (Vec::new(), None), "{beyond}");
    }
}
