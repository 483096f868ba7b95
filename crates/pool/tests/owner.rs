//! The owner's operations, one rule at a time: faults, reservations, releases, zero-filling,
//! adoption.

mod common;

use common::{DRAINED, EXTENT, commit, new_pool, reopen, stores, try_open};
use forebay_pool::{Adopted, Catalog, DeviceRun, ErrorKind, FaultAnswer, NewVolume, Pool};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};

const D0: DeviceIndex = DeviceIndex(0);

fn take_dirty(pool: &mut Pool, max: u64) -> Vec<DeviceRun> {
    let devices: Vec<DeviceIndex> = pool.devices().iter().map(|device| device.index).collect();
    let take = |device| pool.take_dirty(device, max);
    devices.into_iter().flat_map(take).collect()
}

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

/// Repeats a write fault, as the caller does, until a final answer.
fn write(pool: &mut Pool, catalog: &Catalog, volume: VolumeId, logical: u64) -> FaultAnswer {
    for _ in 0..8 {
        match pool.fault(volume, ExtentIndex(logical), true).unwrap() {
            FaultAnswer::NeedReserve { count } => {
                pool.reserve(volume, count).unwrap();
                commit(pool, catalog);
            }
            FaultAnswer::AwaitCommit { .. } => commit(pool, catalog),
            answer => return answer,
        }
    }
    panic!("a fault that goes in circles");
}

fn place(answer: FaultAnswer) -> (DeviceIndex, u64) {
    match answer {
        FaultAnswer::Allocated { device, extent, .. }
        | FaultAnswer::Mapped { device, extent, .. } => (device, extent.0),
        other => panic!("{other:?}"),
    }
}

fn zero_fill(pool: &mut Pool, catalog: &Catalog) {
    for run in take_dirty(pool, u64::MAX) {
        pool.zero_filled(run).unwrap();
    }
    commit(pool, catalog);
}

#[test]
fn a_reservation_is_grantable_only_when_durable() {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 64);
    assert!(matches!(
        pool.fault(v, ExtentIndex(0), true).unwrap(),
        FaultAnswer::NeedReserve { count: 16 }
    ));
    assert_eq!(pool.reserve(v, 16).unwrap(), 16);
    let wait = FaultAnswer::AwaitCommit {
        batch: pool.journal().open_batch_id(),
    };
    assert_eq!(pool.fault(v, ExtentIndex(0), true).unwrap(), wait);
    let batch = pool.take_batch().unwrap().unwrap();
    catalog.commit(&batch).unwrap();
    assert!(matches!(
        pool.fault(v, ExtentIndex(0), true).unwrap(),
        FaultAnswer::AwaitCommit { .. }
    ));
    pool.committed(batch.id()).unwrap();
    assert!(pool.committed(batch.id()).is_err(), "twice");
    assert!(matches!(
        pool.fault(v, ExtentIndex(0), true).unwrap(),
        FaultAnswer::Allocated { .. }
    ));
    assert!(matches!(
        pool.fault(v, ExtentIndex(0), true).unwrap(),
        FaultAnswer::Mapped {
            count: 1,
            commit_seq: Some(_),
            ..
        }
    ));
}

#[test]
fn neighbours_get_neighbouring_extents() {
    let stores = stores(&[4000]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 3000);
    // Two streams at once, one of them backwards.
    for step in 0..100 {
        write(&mut pool, &catalog, v, 500 + step);
        write(&mut pool, &catalog, v, 1999 - step);
        if let Some(count) = pool.wants_reserve(v, false) {
            pool.reserve(v, count).unwrap();
        }
    }
    let runs = |pool: &mut Pool, from: u64, to: u64| {
        let (mut at, mut runs) = (from, 0);
        while at < to {
            let FaultAnswer::Mapped { count, .. } = pool.fault(v, ExtentIndex(at), false).unwrap()
            else {
                panic!("unmapped")
            };
            at += count;
            runs += 1;
        }
        runs
    };
    // A stream breaks only where a reservation ends.
    assert!(
        runs(&mut pool, 500, 600) <= 12,
        "{}",
        runs(&mut pool, 500, 600)
    );
    assert!(
        runs(&mut pool, 1900, 2000) <= 12,
        "{}",
        runs(&mut pool, 1900, 2000)
    );
}

#[test]
fn random_first_writes_of_a_region_end_up_contiguous() {
    let stores = stores(&[4000]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 1000);
    for _ in 0..6 {
        pool.reserve(v, 256).unwrap();
    }
    commit(&mut pool, &catalog);
    for step in 0..256 {
        write(&mut pool, &catalog, v, 300 + step * 37 % 256);
    }
    match pool.fault(v, ExtentIndex(300), false).unwrap() {
        FaultAnswer::Mapped { count, .. } => assert_eq!(count, 256),
        other => panic!("{other:?}"),
    }
}

#[test]
fn holes_have_their_length() {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 5000);
    write(&mut pool, &catalog, v, 700);
    let hole = |pool: &mut Pool, at| pool.fault(v, ExtentIndex(at), false).unwrap();
    assert_eq!(hole(&mut pool, 0), FaultAnswer::Hole { count: 700 });
    assert_eq!(hole(&mut pool, 4990), FaultAnswer::Hole { count: 10 });
    assert_eq!(hole(&mut pool, 701), FaultAnswer::Hole { count: 4096 });
    assert_eq!(
        pool.fault(v, ExtentIndex(5000), false).unwrap_err().kind,
        ErrorKind::Invalid
    );
    assert_eq!(
        pool.fault(VolumeId(99), ExtentIndex(0), false)
            .unwrap_err()
            .kind,
        ErrorKind::NotFound
    );
}

#[test]
fn a_flush_commits_written_mappings() {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 64);
    assert_eq!(pool.volumes().uncommitted(v), None);
    let first = place(write(&mut pool, &catalog, v, 3));
    let seq = pool.volumes().uncommitted(v).unwrap();
    let second = place(write(&mut pool, &catalog, v, 9));
    assert!(pool.volumes().durable_seq(v) < seq);
    assert_eq!(pool.commit_mappings(v, seq, |_| true).unwrap(), 1);
    assert_eq!(
        pool.commit_mappings(v, seq, |_| true).unwrap(),
        0,
        "already on its way"
    );
    assert!(
        pool.volumes().durable_seq(v) < seq,
        "not before the commit is reported"
    );
    commit(&mut pool, &catalog);
    assert_eq!(pool.volumes().durable_seq(v), seq);
    assert_eq!(pool.volumes().uncommitted(v), Some(seq + 1));
    drop((pool, catalog));
    // After a power cut the first is there, the second a hole with a dirty extent.
    let (mut pool, _) = reopen(&stores, false);
    let answer = pool.fault(v, ExtentIndex(3), true).unwrap();
    assert_eq!(place(answer), first);
    assert!(matches!(
        answer,
        FaultAnswer::Mapped {
            commit_seq: None,
            ..
        }
    ));
    assert!(matches!(
        pool.fault(v, ExtentIndex(9), false).unwrap(),
        FaultAnswer::Hole { .. }
    ));
    let dirty = take_dirty(&mut pool, 1000);
    assert!(
        dirty
            .iter()
            .any(|run| { run.device == second.0 && (run.first.0..run.end()).contains(&second.1) })
    );
    assert_eq!(dirty.iter().map(|run| run.count).sum::<u64>(), 15);
}

#[test]
fn a_commit_does_not_vouch_for_a_later_mapping_of_the_same_place() {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 64);
    let first = place(write(&mut pool, &catalog, v, 3));
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    let earlier = pool.take_batch().unwrap().unwrap();
    pool.release(v, ExtentIndex(3), 1, &DRAINED).unwrap();
    let second = place(write(&mut pool, &catalog, v, 3));
    assert_ne!(first, second);
    let seq = pool.volumes().uncommitted(v).unwrap();
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    let later = pool.take_batch().unwrap().unwrap();
    catalog.commit(&earlier).unwrap();
    pool.committed(earlier.id()).unwrap();
    assert_eq!(pool.volumes().uncommitted(v), Some(seq));
    assert!(pool.volumes().durable_seq(v) < seq);
    catalog.commit(&later).unwrap();
    pool.committed(later.id()).unwrap();
    assert_eq!(pool.volumes().uncommitted(v), None);
    assert_eq!(place(pool.fault(v, ExtentIndex(3), false).unwrap()), second);
}

#[test]
fn freed_extents_are_zero_filled_before_reuse() {
    let stores = stores(&[32]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 32);
    for logical in 0..32 {
        write(&mut pool, &catalog, v, logical);
    }
    let w = volume(&mut pool, "w", 32);
    assert_eq!(
        pool.fault(w, ExtentIndex(0), true).unwrap(),
        FaultAnswer::NoSpace
    );
    let released = pool.release(v, ExtentIndex(4), 8, &DRAINED).unwrap();
    assert_eq!(released.extents, 8);
    // The release is not durable, so no zero-filling yet.
    assert!(take_dirty(&mut pool, 100).is_empty());
    assert_eq!(
        pool.fault(w, ExtentIndex(0), true).unwrap(),
        FaultAnswer::AwaitZeroFill
    );
    commit(&mut pool, &catalog);
    let runs = take_dirty(&mut pool, 100);
    assert_eq!(runs.iter().map(|run| run.count).sum::<u64>(), 8);
    assert_eq!(
        pool.fault(w, ExtentIndex(0), true).unwrap(),
        FaultAnswer::AwaitZeroFill
    );
    pool.zero_fill_failed(runs[0]).unwrap();
    assert!(pool.zero_filled(runs[0]).is_err(), "it was given back");
    zero_fill(&mut pool, &catalog);
    let (device, extent) = place(write(&mut pool, &catalog, w, 0));
    assert!(
        released
            .runs
            .iter()
            .any(|run| { run.device == device && (run.first.0..run.end()).contains(&extent) })
    );
}

#[test]
fn unused_reservations_of_others_are_reclaimed_before_no_space() {
    let stores = stores(&[40]);
    let (mut pool, catalog) = new_pool(&stores);
    let hoarder = volume(&mut pool, "hoarder", 64);
    let v = volume(&mut pool, "v", 64);
    for _ in 0..3 {
        pool.reserve(hoarder, 16).unwrap();
    }
    commit(&mut pool, &catalog);
    assert_eq!(pool.space().clean, 0);
    let mine = place(write(&mut pool, &catalog, hoarder, 0));
    for logical in 0..39 {
        assert_ne!(place(write(&mut pool, &catalog, v, logical)), mine);
    }
    assert_eq!(
        pool.fault(v, ExtentIndex(39), true).unwrap(),
        FaultAnswer::NoSpace
    );
    assert_eq!(pool.reserve(v, 1).unwrap_err().kind, ErrorKind::NoSpace);
    assert_eq!(pool.volumes().space_of(hoarder).unwrap().reserved, 0);
    assert!(matches!(
        pool.fault(v, ExtentIndex(3), true).unwrap(),
        FaultAnswer::Mapped { .. }
    ));
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (pool, _) = reopen(&stores, false);
    assert_eq!(pool.volumes().space_of(v).unwrap().mapped, 39);
}

#[test]
fn adoption_brings_uncommitted_mappings_back() {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 64);
    let committed = place(write(&mut pool, &catalog, v, 0));
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    commit(&mut pool, &catalog);
    let granted = place(write(&mut pool, &catalog, v, 1));
    let seq = pool.volumes().uncommitted(v).unwrap();
    drop((pool, catalog));

    let (mut pool, catalog) = try_open(&stores).unwrap();
    // Nothing new before adoption ends; durable mappings work.
    assert!(matches!(
        pool.fault(v, ExtentIndex(0), true).unwrap(),
        FaultAnswer::Mapped { .. }
    ));
    assert_eq!(
        pool.fault(v, ExtentIndex(1), true).unwrap_err().kind,
        ErrorKind::InUse
    );
    assert_eq!(pool.reserve(v, 1).unwrap_err().kind, ErrorKind::InUse);
    assert_eq!(
        pool.delete_volume(v, &DRAINED).unwrap_err().kind,
        ErrorKind::InUse
    );
    let mut adopt = |volume, logical, (device, extent): (DeviceIndex, u64), seq| {
        pool.adopt_grant(
            volume,
            ExtentIndex(logical),
            device,
            ExtentIndex(extent),
            1,
            seq,
        )
    };
    assert_eq!(adopt(v, 0, committed, 1).unwrap(), Adopted::Durable);
    assert_eq!(adopt(v, 1, granted, seq).unwrap(), Adopted::Uncommitted);
    assert_eq!(
        adopt(v, 1, granted, seq).unwrap(),
        Adopted::Uncommitted,
        "told twice"
    );
    assert_eq!(adopt(v, 2, granted, seq).unwrap(), Adopted::Stale);
    assert_eq!(
        adopt(v, 2, (D0, 60), seq).unwrap(),
        Adopted::Stale,
        "clean, not reserved"
    );
    assert_eq!(
        adopt(v, 64, (D0, 60), seq).unwrap(),
        Adopted::Stale,
        "beyond the volume"
    );
    assert_eq!(
        adopt(VolumeId(77), 0, granted, seq).unwrap_err().kind,
        ErrorKind::NotFound
    );
    let report = pool.finish_adoption(true).unwrap();
    assert_eq!((report.uncommitted, report.spare, report.dirty), (1, 14, 0));
    // Grantable only once this opening's sequences are unique.
    assert!(matches!(
        pool.fault(v, ExtentIndex(2), true).unwrap(),
        FaultAnswer::AwaitCommit { .. }
    ));
    commit(&mut pool, &catalog);
    let FaultAnswer::Allocated { commit_seq, .. } = pool.fault(v, ExtentIndex(2), true).unwrap()
    else {
        panic!("not allocated from stock")
    };
    assert!(commit_seq > seq);
    assert_eq!(pool.commit_mappings(v, u64::MAX, |_| true).unwrap(), 2);
    commit(&mut pool, &catalog);
    assert_eq!(pool.volumes().space_of(v).unwrap().uncommitted, 0);
}

#[test]
fn a_reclaimed_extent_is_its_new_owners_after_a_crash() {
    let stores = stores(&[16]);
    let (mut pool, catalog) = new_pool(&stores);
    let hoarder = volume(&mut pool, "hoarder", 64);
    let v = volume(&mut pool, "v", 64);
    pool.reserve(hoarder, 16).unwrap();
    commit(&mut pool, &catalog);
    let mine = place(write(&mut pool, &catalog, v, 5));
    let seq = pool.volumes().uncommitted(v).unwrap();
    drop((pool, catalog));
    let (mut pool, _) = try_open(&stores).unwrap();
    let reported = pool.adopt_grant(v, ExtentIndex(5), mine.0, ExtentIndex(mine.1), 1, seq);
    assert_eq!(reported.unwrap(), Adopted::Uncommitted);
    assert_eq!(pool.finish_adoption(true).unwrap().spare, 15);
}

#[test]
fn extents_beyond_the_durable_end_are_not_reallocated_dirty() {
    let stores = stores(&[32]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 8);
    write(&mut pool, &catalog, v, 0);
    pool.grow_volume(v, 16 * EXTENT).unwrap();
    let beyond = place(write(&mut pool, &catalog, v, 9));
    let seq = pool.volumes().uncommitted(v).unwrap();
    // Neither the growth nor a reservation was committed.
    drop((pool, catalog));
    let (mut pool, catalog) = try_open(&stores).unwrap();
    let reported = |pool: &mut Pool, count, seq| {
        pool.adopt_grant(
            v,
            ExtentIndex(9),
            beyond.0,
            ExtentIndex(beyond.1),
            count,
            seq,
        )
        .unwrap()
    };
    assert_eq!(reported(&mut pool, 1, seq), Adopted::Stale);
    assert_eq!(
        reported(&mut pool, u64::MAX, u64::MAX),
        Adopted::Stale,
        "noise"
    );
    pool.finish_adoption(true).unwrap();
    commit(&mut pool, &catalog);
    let dirty = take_dirty(&mut pool, 100);
    assert!(
        dirty
            .iter()
            .any(|run| (run.first.0..run.end()).contains(&beyond.1))
    );
}

#[test]
fn a_grant_that_the_catalog_contradicts_is_stale_and_its_extent_dirty() {
    let stores = stores(&[64]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 64);
    let committed = place(write(&mut pool, &catalog, v, 0));
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (mut pool, catalog) = try_open(&stores).unwrap();
    // A spare extent, granted for a logical extent that is mapped elsewhere.
    let other = (0..16).find(|extent| *extent != committed.1).unwrap();
    let reported = pool
        .adopt_grant(v, ExtentIndex(0), D0, ExtentIndex(other), 1, 1)
        .unwrap();
    assert_eq!(reported, Adopted::Stale);
    pool.finish_adoption(true).unwrap();
    commit(&mut pool, &catalog);
    assert_eq!(take_dirty(&mut pool, 10), [DeviceRun::new(D0, other, 1)]);
    assert_eq!(
        place(pool.fault(v, ExtentIndex(0), true).unwrap()),
        committed
    );
}

#[test]
fn a_previously_used_device_is_zero_filled_first() {
    let stores = stores(&[32]);
    let (mut pool, catalog) = forebay_pool::create(&common::spec(&stores, false)).unwrap();
    let v = volume(&mut pool, "v", 32);
    commit(&mut pool, &catalog);
    assert_eq!(
        pool.fault(v, ExtentIndex(0), true).unwrap(),
        FaultAnswer::AwaitZeroFill
    );
    let runs = take_dirty(&mut pool, 8);
    assert_eq!(runs, [DeviceRun::new(D0, 0, 8)]);
    pool.zero_filled(runs[0]).unwrap();
    commit(&mut pool, &catalog);
    assert_eq!(place(write(&mut pool, &catalog, v, 0)).1, 0);
    drop((pool, catalog));
    let (pool, _) = reopen(&stores, true);
    let space = pool.space();
    assert_eq!((space.dirty, space.clean, space.reserved), (24, 0, 8));
}

#[test]
fn deleting_a_volume_frees_all_of_it_at_once() {
    let stores = stores(&[64, 64]);
    let (mut pool, catalog) = new_pool(&stores);
    let v = volume(&mut pool, "v", 4000);
    for step in 0..30 {
        write(&mut pool, &catalog, v, step * 131);
    }
    pool.commit_mappings(v, u64::MAX / 2, |_| true).unwrap();
    for step in 0..5 {
        write(&mut pool, &catalog, v, 7 + step);
    }
    let released = pool.delete_volume(v, &DRAINED).unwrap();
    assert_eq!(released.extents, 35);
    let space = pool.space();
    assert_eq!(
        (space.dirty, space.reserved, space.owned, space.clean),
        (35, 0, 0, 93)
    );
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (pool, _) = reopen(&stores, true);
    assert_eq!(pool.space(), space);
    assert_eq!(pool.volumes().records().count(), 0);
    assert_eq!(pool.allocator().leaked_extents(), 0);
}
