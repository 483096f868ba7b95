//! A full pool: reservations, warnings, reclaimed extents, and no early refusals.

mod common;

use common::{DRAINED, EXTENT, commit, new_pool, reopen, stores, try_open};
use forebay_pool::{
    Catalog, ErrorKind, FaultAnswer, NewVolume, Pool, PoolSettings, SpaceLevel, VolumeSpace,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};

fn volume(pool: &mut Pool, name: &str, extents: u64, reserved: u64) -> VolumeId {
    if pool.tenants().named("t").is_err() {
        pool.create_tenant("t", 0).unwrap();
    }
    pool.create_volume(&new(name, extents, reserved), 0)
        .unwrap()
}

fn new(name: &str, extents: u64, reserved: u64) -> NewVolume {
    NewVolume {
        tenant: "t".into(),
        name: name.into(),
        size_bytes: extents * EXTENT,
        block_bytes: None,
        reserved_bytes: reserved * EXTENT,
    }
}

fn zero_fill(pool: &mut Pool) {
    for device in 0..pool.devices().len() as u8 {
        for run in pool.take_dirty(DeviceIndex(device), u64::MAX) {
            pool.zero_filled(run).unwrap();
        }
    }
}

/// Writes as the owner does, reserving ahead; `false` if the pool is full.
fn write(pool: &mut Pool, catalog: &Catalog, volume: VolumeId, logical: u64) -> bool {
    for _ in 0..20 {
        match pool.fault(volume, ExtentIndex(logical), true).unwrap() {
            FaultAnswer::Allocated { .. } | FaultAnswer::Mapped { .. } => {
                if let Some(count) = pool.wants_reserve(volume, false) {
                    pool.reserve(volume, count).unwrap();
                }
                return true;
            }
            FaultAnswer::NeedReserve { count } => {
                pool.reserve(volume, count).unwrap();
                commit(pool, catalog);
            }
            FaultAnswer::AwaitCommit { .. } => commit(pool, catalog),
            FaultAnswer::AwaitZeroFill => {
                commit(pool, catalog);
                zero_fill(pool);
                commit(pool, catalog);
            }
            FaultAnswer::NoSpace => return false,
            other => panic!("{other:?}"),
        }
    }
    panic!("a write that goes in circles");
}

fn scattered(count: u64, seed: u64) -> Vec<u64> {
    let mut all: Vec<u64> = (0..count).collect();
    let mut choices = common::Choices::with_seed(seed);
    for at in (1..all.len()).rev() {
        all.swap(at, choices.usize(..=at));
    }
    all
}

#[test]
fn thin_full_size_no_spurious_error() {
    const FIRST: u64 = 3000;
    const SECOND: u64 = 1777;
    let total = FIRST + SECOND;
    let forth: Vec<u64> = (0..total).collect();
    let back: Vec<u64> = (0..total).rev().collect();
    let far: Vec<u64> = (0..total).map(|at| at * 1009 % total).collect();
    let streams = (0..total).map(|at| at % 4 * total.div_ceil(4) + at / 4);
    let streams = streams.filter(|at| *at < total).chain(0..total).collect();
    for (what, order) in [
        ("forth", forth),
        ("back", back),
        ("far", far),
        ("streams", streams),
        ("scattered", scattered(total, 7)),
    ] {
        for flush_every in [u64::MAX, 100] {
            let stores = stores(&[FIRST, SECOND]);
            let (mut pool, catalog) = new_pool(&stores);
            let capacity = pool.space().total;
            // Other volumes, empty or with spare extents.
            volume(&mut pool, "empty", total, 0);
            let idle = volume(&mut pool, "idle", total, 0);
            pool.reserve(idle, 64).unwrap();
            commit(&mut pool, &catalog);
            let v = volume(&mut pool, "v", capacity, 0);
            for (done, logical) in order.iter().enumerate() {
                if *logical < capacity {
                    let there = write(&mut pool, &catalog, v, *logical);
                    assert!(there, "{what}: full after {done} of {capacity}");
                }
                if (done as u64).is_multiple_of(flush_every) {
                    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
                    commit(&mut pool, &catalog);
                }
            }
            for logical in 0..capacity {
                assert!(write(&mut pool, &catalog, v, logical), "{what}");
            }
            pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
            commit(&mut pool, &catalog);
            let space = pool.space();
            assert_eq!((space.owned, space.used_percent()), (capacity, 100));
            assert!(!write(&mut pool, &catalog, idle, 0), "now it is full");
            assert!(pool.check().unwrap().is_clean());
        }
    }
}

#[test]
fn others_never_eat_into_a_reservation() {
    let stores = stores(&[200]);
    let (mut pool, catalog) = new_pool(&stores);
    let total = pool.space().total;
    let mine = volume(&mut pool, "mine", 100, 60);
    let other = volume(&mut pool, "other", total, 0);
    let mut written = 0;
    while write(&mut pool, &catalog, other, written) {
        written += 1;
    }
    assert_eq!(written, total - 60);
    assert_eq!(pool.volumes().promised_extents(), 60);
    let refused = pool.reserve(other, 1).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::NoSpace);
    // The reservation's owner gets exactly that.
    for logical in 0..60 {
        assert!(write(&mut pool, &catalog, mine, logical), "{logical}");
        assert!(!write(&mut pool, &catalog, other, written));
    }
    assert!(!write(&mut pool, &catalog, mine, 60));
    let got = pool.volumes().space_of(mine).unwrap();
    assert_eq!((got.mapped, got.entitlement), (60, 0));
    // Extents it releases stay reserved for it.
    pool.release(mine, ExtentIndex(3), 10, &DRAINED).unwrap();
    assert!(!write(&mut pool, &catalog, other, written));
    commit(&mut pool, &catalog);
    zero_fill(&mut pool);
    assert!(!write(&mut pool, &catalog, other, written));
    assert!(write(&mut pool, &catalog, mine, 3));
    pool.set_volume_reservation(mine, 40 * EXTENT).unwrap();
    assert!(write(&mut pool, &catalog, other, written));
    assert!(pool.check().unwrap().is_clean());
}

#[test]
fn a_reservation_holds_through_crashes_and_adoption() {
    for same_boot in [false, true] {
        let stores = stores(&[200]);
        let (mut pool, catalog) = new_pool(&stores);
        let total = pool.space().total;
        let mine = volume(&mut pool, "mine", 100, 60);
        let other = volume(&mut pool, "other", total, 0);
        commit(&mut pool, &catalog);
        for logical in 0..20 {
            assert!(write(&mut pool, &catalog, mine, logical));
        }
        pool.commit_mappings(mine, u64::MAX, |_| true).unwrap();
        for logical in 0..30 {
            assert!(write(&mut pool, &catalog, other, logical));
        }
        commit(&mut pool, &catalog);
        drop((pool, catalog));
        let (mut pool, catalog) = try_open(&stores).unwrap();
        assert_eq!(
            pool.create_volume(&new("early", 9, 1), 0).unwrap_err().kind,
            ErrorKind::InUse
        );
        pool.finish_adoption(same_boot).unwrap();
        commit(&mut pool, &catalog);
        let had: VolumeSpace = pool.volumes().space_of(mine).unwrap();
        assert_eq!(had.mapped, 20);
        let mut written = 0;
        while write(&mut pool, &catalog, other, written) {
            written += 1;
        }
        assert_eq!(written, total - 60, "same boot: {same_boot}");
        for logical in 0..60 {
            assert!(write(&mut pool, &catalog, mine, logical), "{logical}");
        }
        assert!(pool.check().unwrap().is_clean());
    }
}

#[test]
fn no_more_is_promised_than_there_is() {
    let stores = stores(&[200]);
    let (mut pool, catalog) = new_pool(&stores);
    let total = pool.space().total;
    let other = volume(&mut pool, "other", total, 0);
    for logical in 0..50 {
        assert!(write(&mut pool, &catalog, other, logical));
    }
    commit(&mut pool, &catalog);
    // Other volumes' spare extents can be promised, but not written ones.
    assert_eq!(pool.reservable_bytes(None), (total - 50) * EXTENT);
    let too_much = pool.create_volume(&new("a", total, total - 49), 0);
    let error = too_much.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoSpace);
    assert!(error.message.contains("9.3 MiB"), "{error}");
    let a = volume(&mut pool, "a", total, total - 60);
    assert_eq!(pool.reservable_bytes(None), 10 * EXTENT);
    assert_eq!(pool.reservable_bytes(Some(a)), (total - 50) * EXTENT);
    let kind = |result: Result<(), forebay_pool::PoolError>| result.unwrap_err().kind;
    let set = |pool: &mut Pool, extents: u64| pool.set_volume_reservation(a, extents * EXTENT);
    assert_eq!(kind(set(&mut pool, total - 49)), ErrorKind::NoSpace);
    assert_eq!(kind(set(&mut pool, total + 1)), ErrorKind::Invalid);
    set(&mut pool, total - 50).unwrap();
    assert!(!write(&mut pool, &catalog, other, 50), "all is promised");
    pool.set_volume_reservation(a, EXTENT / 2).unwrap();
    assert_eq!(pool.volumes().promised_extents(), 1);
    set(&mut pool, total - 50).unwrap();
    pool.delete_volume(a, &DRAINED).unwrap();
    assert_eq!(pool.volumes().promised_extents(), 0);
    assert!(write(&mut pool, &catalog, other, 50));
    assert!(pool.check().unwrap().is_clean());
}

#[test]
fn idle_volumes_give_their_stock_back() {
    let stores = stores(&[2000]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 2000, 0);
    for logical in 0..200 {
        assert!(write(&mut pool, &catalog, v, logical));
    }
    commit(&mut pool, &catalog);
    let spare = pool.volumes().space_of(v).unwrap().reserved;
    assert!(spare > 0);
    assert_eq!(pool.return_idle_spare(), 0, "it was busy a moment ago");
    assert_eq!(pool.return_idle_spare(), spare);
    assert_eq!(pool.volumes().space_of(v).unwrap().reserved, 0);
    assert!(write(&mut pool, &catalog, v, 200));
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (mut pool, _) = reopen(&stores, true);
    assert!(pool.check().unwrap().is_clean());
}

#[test]
fn a_faster_writing_volume_reserves_more_extents() {
    let stores = stores(&[60_000]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 60_000, 0);
    let (mut at, mut waited) = (0, 0);
    // A commit takes as long as 800 faults.
    for round in 0..12 {
        let batch = pool.take_batch().unwrap();
        let mut missed = false;
        for _ in 0..800 {
            match pool.fault(v, ExtentIndex(at), true).unwrap() {
                FaultAnswer::Allocated { .. } => {
                    at += 1;
                    if let Some(count) = pool.wants_reserve(v, false) {
                        pool.reserve(v, count).unwrap();
                    }
                }
                FaultAnswer::NeedReserve { count } => {
                    missed = true;
                    pool.reserve(v, count).unwrap();
                }
                FaultAnswer::AwaitCommit { .. } => missed = true,
                other => panic!("{other:?}"),
            }
        }
        if let Some(batch) = batch {
            catalog.commit(&batch).unwrap();
            pool.committed(batch.id()).unwrap();
        }
        waited += u64::from(missed && round >= 5);
    }
    assert_eq!(waited, 0, "faults wait for commits");
}

#[test]
fn warnings_follow_the_settings() {
    let stores = stores(&[200]);
    let (mut pool, catalog) = new_pool(&stores);
    let total = pool.space().total;
    let v = volume(&mut pool, "v", total, 0);
    let fill = |pool: &mut Pool, to: u64| {
        for logical in 0..to {
            assert!(write(pool, &catalog, v, logical));
        }
    };
    fill(&mut pool, total * 79 / 100);
    assert_eq!(pool.space_level(), SpaceLevel::Normal);
    fill(&mut pool, total * 81 / 100);
    assert_eq!(pool.space_level(), SpaceLevel::Warn);
    fill(&mut pool, total * 96 / 100);
    assert_eq!(pool.space_level(), SpaceLevel::Critical);
    let settings = PoolSettings {
        warn_percent: 98,
        critical_percent: 99,
        ..pool.info().settings
    };
    pool.set_settings(settings).unwrap();
    assert_eq!(pool.space_level(), SpaceLevel::Normal);
    let wrong = PoolSettings {
        critical_percent: 97,
        ..settings
    };
    assert_eq!(
        pool.set_settings(wrong).unwrap_err().kind,
        ErrorKind::Invalid
    );
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (pool, _) = reopen(&stores, true);
    assert_eq!(pool.info().settings, settings);
}
