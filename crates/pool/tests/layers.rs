//! Layers: merges that are killed, deletions in any order, sizes, full pools and catalogs.
//!
//! A test's data is a map of logical to device extents. Copies of shared extents are not made: the
//! first ancestor of each extent stands for its content.

mod common;

use common::{Choices, DRAINED, EXTENT, commit, powercut::Power};
use forebay_pool::{
    Catalog, CopyFailure, ErrorKind, FaultAnswer, NewClone, NewDevice, NewSnapshot, NewVolume,
    OpenDevice, Pool, PoolSettings, PoolSpec, create, open,
};
use forebay_xlate::types::{ExtentIndex, VolumeId};
use std::collections::BTreeMap;

/// An extent's device and number.
type Place = (u8, u64);
type Map = BTreeMap<u64, Place>;

const FIRST_BYTES: u64 = common::FIRST_DATA_BYTES;

fn pool_on(power: &Power, extent_bytes: u64) -> (Pool, Catalog) {
    let device = NewDevice {
        spec: "mem:0".into(),
        store: power.stores()[0].clone(),
        block_bytes: 512,
        known_zero: true,
    };
    let spec = PoolSpec {
        name: "test".into(),
        extent_bytes,
        devices: vec![device],
        settings: PoolSettings::default(),
        force: false,
        now_s: 1,
    };
    let (mut pool, catalog) = create(&spec).unwrap();
    pool.create_tenant("t", 0).unwrap();
    pool.create_tenant("u", 0).unwrap();
    commit(&mut pool, &catalog);
    (pool, catalog)
}

/// A pool of one device with `extents` extents.
fn new_pool(extents: u64) -> (Power, Pool, Catalog) {
    let power = Power::new(&[FIRST_BYTES + extents * EXTENT]);
    let (pool, catalog) = pool_on(&power, EXTENT);
    (power, pool, catalog)
}

fn try_open(power: &Power) -> (Pool, Catalog) {
    let device = OpenDevice {
        spec: "mem:0".into(),
        store: power.stores()[0].clone(),
        forced: false,
    };
    let opened = open(&[device]).unwrap();
    (opened.pool, opened.catalog)
}

fn volume_of(pool: &mut Pool, name: &str, size_bytes: u64, reserved_bytes: u64) -> VolumeId {
    let new = NewVolume {
        tenant: "t".into(),
        name: name.into(),
        size_bytes,
        block_bytes: None,
        reserved_bytes,
    };
    pool.create_volume(&new, 0).unwrap()
}

fn volume(pool: &mut Pool, name: &str, extents: u64) -> VolumeId {
    volume_of(pool, name, extents * EXTENT, 0)
}

fn snapshot(pool: &mut Pool, volume: VolumeId, name: &str) -> VolumeId {
    let name = name.into();
    pool.snapshots()
        .take(&[NewSnapshot { volume, name }], 0)
        .unwrap()[0]
}

fn clone(pool: &mut Pool, snapshot: VolumeId, name: &str) -> VolumeId {
    let new = NewClone {
        snapshot,
        tenant: "u".into(),
        name: name.into(),
        reserved_bytes: 0,
    };
    pool.snapshots().clone_snapshot(&new, 0).unwrap()
}

/// Gives the volume extents of its own, durably.
fn write(pool: &mut Pool, catalog: &Catalog, volume: VolumeId, logicals: &[u64]) {
    for logical in logicals.iter().map(|logical| ExtentIndex(*logical)) {
        loop {
            let answer = match pool.fault(volume, logical, true).unwrap() {
                FaultAnswer::Allocated { .. } | FaultAnswer::Mapped { .. } => break,
                FaultAnswer::Shared { .. } => {
                    match pool.snapshots().begin_copy(volume, logical).unwrap() {
                        Ok(_) => {
                            pool.snapshots().end_copy(volume, logical).unwrap();
                            break;
                        }
                        Err(answer) => answer,
                    }
                }
                answer => answer,
            };
            wait_for_space(pool, catalog, volume, answer);
        }
    }
    pool.commit_mappings(volume, u64::MAX, |_| true).unwrap();
    commit(pool, catalog);
}

fn wait_for_space(pool: &mut Pool, catalog: &Catalog, volume: VolumeId, answer: FaultAnswer) {
    match answer {
        FaultAnswer::NeedReserve { count } => _ = pool.reserve(volume, count).unwrap(),
        FaultAnswer::AwaitCommit { .. } => {}
        FaultAnswer::AwaitZeroFill => launder(pool, catalog),
        other => panic!("{other:?}"),
    }
    commit(pool, catalog);
}

fn launder(pool: &mut Pool, catalog: &Catalog) {
    while pool.volumes().has_more_to_delete() {
        pool.delete_more().unwrap();
    }
    commit(pool, catalog);
    for run in pool.take_dirty(pool.devices()[0].index, u64::MAX) {
        pool.zero_filled(run).unwrap();
    }
    commit(pool, catalog);
}

/// Where a volume's extents lie.
fn map_of(pool: &mut Pool, volume: VolumeId) -> Map {
    let mut map = Map::new();
    let (ranges, next) = pool.volumes().mapped_bytes(volume, 0, usize::MAX).unwrap();
    assert_eq!(next, None);
    for range in ranges {
        let (mut logical, end) = (range.start / EXTENT, range.end.div_ceil(EXTENT));
        while logical < end {
            match pool.fault(volume, ExtentIndex(logical), false).unwrap() {
                FaultAnswer::Mapped {
                    device,
                    extent,
                    count,
                    ..
                }
                | FaultAnswer::Shared {
                    device,
                    extent,
                    count,
                } => {
                    map.extend((0..count).map(|at| (logical + at, (device.0, extent.0 + at))));
                    logical += count;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    map
}

fn maps(pool: &mut Pool) -> BTreeMap<VolumeId, Map> {
    let ids: Vec<VolumeId> = pool.volumes().records().map(|volume| volume.id).collect();
    ids.into_iter().map(|id| (id, map_of(pool, id))).collect()
}

/// Frees and merges until nothing is left to do; checks that volumes show the same extents.
fn settle(pool: &mut Pool, catalog: &Catalog) {
    let before = maps(pool);
    loop {
        commit(pool, catalog);
        if pool.volumes().has_more_to_delete() {
            pool.delete_more().unwrap();
        } else if let Some(step) = pool.snapshots().next_merge(None) {
            pool.snapshots().merge(&step).unwrap();
        } else {
            break;
        }
        assert_eq!(maps(pool), before);
    }
    assert_eq!(pool.check().unwrap().problems, []);
}

/// A volume above its former snapshot: four chunks in one map, two in the other. `many`: more in
/// the volume's own.
fn two_layers(many: bool) -> (Power, Pool, Catalog, VolumeId) {
    let (power, mut pool, catalog) = new_pool(64);
    let v = volume(&mut pool, "v", 2000);
    let (few, all) = ([1, 5, 600], [0, 1, 2, 5, 513, 600, 601, 1100, 1200, 1600]);
    let (below, above): (&[u64], &[u64]) = if many { (&few, &all) } else { (&all, &few) };
    write(&mut pool, &catalog, v, below);
    let s = snapshot(&mut pool, v, "s");
    commit(&mut pool, &catalog);
    write(&mut pool, &catalog, v, above);
    // A deallocated extent.
    pool.release(v, ExtentIndex(5), 1, &DRAINED).unwrap();
    commit(&mut pool, &catalog);
    pool.delete_volume(s, &DRAINED).unwrap();
    commit(&mut pool, &catalog);
    (power, pool, catalog, v)
}

/// A merge step is in the catalog or not; the next daemon goes on.
#[test]
fn layer_merge_killed_at_each_step() {
    let mut choices = Choices::with_seed(3);
    for many in [false, true] {
        for cut in 0.. {
            let (power, mut pool, catalog, v) = two_layers(many);
            let before = map_of(&mut pool, v);
            power.fail_after(cut);
            let mut is_cut = false;
            while let Some(step) = pool.snapshots().next_merge(None) {
                pool.snapshots().merge(&step).unwrap();
                assert_eq!(map_of(&mut pool, v), before);
                let batch = pool.take_batch().unwrap().unwrap();
                is_cut = catalog.commit(&batch).is_err();
                if is_cut {
                    break;
                }
                pool.committed(batch.id()).unwrap();
            }
            let states = [power.after_kill(), power.after_cut(choices.u64(..))];
            for (nth, after) in states.into_iter().enumerate() {
                let (mut pool, catalog) = try_open(&after);
                pool.finish_adoption(nth == 0).unwrap();
                commit(&mut pool, &catalog);
                assert_eq!(map_of(&mut pool, v), before, "cut at {cut}");
                assert_eq!(pool.check().unwrap().problems, []);
                settle(&mut pool, &catalog);
                assert_eq!(pool.space().owned, before.len() as u64);
                assert_eq!(pool.volumes().record(v).unwrap().layering.parent, None);
            }
            if !is_cut {
                assert!(cut > 3, "no commit was cut");
                break;
            }
        }
    }
}

/// Five snapshots, clones of two of them, one with writes.
fn chain() -> (Power, Pool, Catalog) {
    let (power, mut pool, catalog) = new_pool(96);
    let v = volume(&mut pool, "v", 1200);
    for n in 0..5u64 {
        let logicals = [n, n + 1, 510 + n, 1030 + 2 * n, 7];
        write(&mut pool, &catalog, v, &logicals);
        if n == 3 {
            pool.release(v, ExtentIndex(1), 2, &DRAINED).unwrap();
        }
        let s = snapshot(&mut pool, v, &format!("s{n}"));
        commit(&mut pool, &catalog);
        if n % 2 == 1 {
            let c = clone(&mut pool, s, &format!("c{n}"));
            commit(&mut pool, &catalog);
            write(&mut pool, &catalog, c, &[n, 20 + n, 511]);
        }
    }
    write(&mut pool, &catalog, v, &[4, 30]);
    (power, pool, catalog)
}

/// Deletions in any order leave the other volumes as they are and free everything at the end.
#[test]
fn delete_any_order() {
    let (power, pool, catalog) = chain();
    drop((pool, catalog));
    let mut choices = Choices::with_seed(29);
    for _ in 0..60 {
        let (mut pool, catalog) = try_open(&power.after_kill());
        pool.finish_adoption(false).unwrap();
        pool.set_delete_slice(choices.u64(1..6));
        commit(&mut pool, &catalog);
        let mut left = maps(&mut pool);
        assert_eq!(left.len(), 8);
        while !left.is_empty() {
            let nth = choices.usize(..left.len());
            let id = left.keys().nth(nth).copied().unwrap();
            left.remove(&id);
            pool.delete_volume(id, &DRAINED).unwrap();
            if choices.bool() {
                settle(&mut pool, &catalog);
                // Without clones and snapshots, only what volumes show is used.
                let shown: std::collections::BTreeSet<&Place> =
                    left.values().flat_map(Map::values).collect();
                if left.len() < 2 {
                    assert_eq!(pool.space().owned, shown.len() as u64);
                }
            }
            assert_eq!(maps(&mut pool), left);
        }
        settle(&mut pool, &catalog);
        assert_eq!(pool.space().owned, 0);
        launder(&mut pool, &catalog);
        let space = pool.space();
        assert_eq!(space.clean, space.total);
    }
}

/// A clone's tail and what a rollback leaves beyond the snapshot read as zeros.
#[test]
fn clone_resize_tail_reads() {
    let (_power, mut pool, catalog) = new_pool(64);
    // The last extent is partial.
    let v = volume_of(&mut pool, "v", 10 * EXTENT - 4096, 0);
    write(&mut pool, &catalog, v, &[0, 8, 9]);
    let s = snapshot(&mut pool, v, "s");
    commit(&mut pool, &catalog);
    let small = map_of(&mut pool, s);
    pool.grow_volume(v, 600 * EXTENT).unwrap();
    write(&mut pool, &catalog, v, &[9, 10, 11, 599]);
    let late = snapshot(&mut pool, v, "late");
    commit(&mut pool, &catalog);
    write(&mut pool, &catalog, v, &[12, 520]);
    let c = clone(&mut pool, s, "c");
    commit(&mut pool, &catalog);
    let past = pool.fault(c, ExtentIndex(10), false).unwrap_err();
    assert_eq!(past.kind, ErrorKind::Invalid);
    pool.grow_volume(c, 600 * EXTENT).unwrap();
    commit(&mut pool, &catalog);
    let reads_zeros_from_10 = |pool: &mut Pool, id: VolumeId| {
        assert_eq!(map_of(pool, id), small);
        let answer = pool.fault(id, ExtentIndex(10), false).unwrap();
        assert_eq!(answer, FaultAnswer::Hole { count: 590 });
        let (ranges, _) = pool.volumes().mapped_bytes(id, 8 * EXTENT, 9).unwrap();
        let whole = 8 * EXTENT..10 * EXTENT;
        assert_eq!(ranges, [whole]);
    };
    // The parent had not written the rest of its last extent.
    reads_zeros_from_10(&mut pool, c);
    pool.snapshots().roll_back(v, Some(s), &DRAINED).unwrap();
    commit(&mut pool, &catalog);
    assert_eq!(pool.volume(v).unwrap().size_bytes, 600 * EXTENT);
    reads_zeros_from_10(&mut pool, v);
    let (ranges, _) = pool.volumes().mapped_bytes(s, 8 * EXTENT, 9).unwrap();
    let clipped = 8 * EXTENT..10 * EXTENT - 4096;
    assert_eq!(ranges, [clipped]);
    // The later snapshot stays.
    assert!(map_of(&mut pool, late).contains_key(&599));
    settle(&mut pool, &catalog);
    pool.delete_volume(late, &DRAINED).unwrap();
    settle(&mut pool, &catalog);
    reads_zeros_from_10(&mut pool, v);
    write(&mut pool, &catalog, v, &[9, 10]);
    assert_eq!(map_of(&mut pool, s), small);
    assert_eq!(map_of(&mut pool, c), small);
}

/// A full catalog refuses snapshots and clones; deleting some makes room.
#[test]
fn catalog_fills_with_layers() {
    let (power, mut pool, catalog) = new_pool(3000);
    let v = volume(&mut pool, "v", 1 << 30);
    let (mut all, mut newest) = (Vec::new(), None);
    let error = loop {
        // Every layer has its own chunk of the map.
        let n = all.len() as u64;
        write(&mut pool, &catalog, v, &[n * 512 % (1 << 30)]);
        let name = format!("s{n}-{}", "x".repeat(40));
        let new = [NewSnapshot { volume: v, name }];
        match pool.snapshots().take(&new, 0) {
            Ok(ids) => newest = ids.first().copied(),
            Err(error) => break error,
        }
        all.extend(newest);
        // Clones fill it faster.
        let clones = (0..50).map_while(|at| {
            let name = format!("c{n}-{at}-{}", "x".repeat(40));
            let new = NewClone {
                snapshot: newest?,
                tenant: "t".into(),
                name,
                reserved_bytes: 0,
            };
            pool.snapshots().clone_snapshot(&new, 0).ok()
        });
        all.extend(clones.collect::<Vec<_>>());
        commit(&mut pool, &catalog);
        assert!(all.len() < 100_000, "never full");
    };
    assert_eq!(error.kind, ErrorKind::NoSpace);
    assert!(error.message.contains("catalog is full"), "{error}");
    commit(&mut pool, &catalog);
    let before = map_of(&mut pool, v);
    let clone = NewClone {
        snapshot: newest.unwrap(),
        tenant: "t".into(),
        name: "one-more".into(),
        reserved_bytes: 0,
    };
    let refused = pool.snapshots().clone_snapshot(&clone, 0).unwrap_err();
    assert_eq!(
        (refused.kind, &refused.message),
        (error.kind, &error.message)
    );
    for id in all.iter().step_by(2).take(2000) {
        pool.delete_volume(*id, &DRAINED).unwrap();
    }
    while pool.volumes().has_more_to_delete() {
        pool.delete_more().unwrap();
    }
    commit(&mut pool, &catalog);
    let snapshot = snapshot(&mut pool, v, "again");
    let clone = NewClone { snapshot, ..clone };
    pool.snapshots().clone_snapshot(&clone, 0).unwrap();
    commit(&mut pool, &catalog);
    assert_eq!(map_of(&mut pool, v), before);
    assert_eq!(pool.check().unwrap().problems, []);
    catalog.check().unwrap();
    drop((pool, catalog));
    let (mut pool, _) = try_open(&power);
    pool.finish_adoption(true).unwrap();
    assert_eq!(map_of(&mut pool, v), before);
    assert_eq!(pool.check().unwrap().problems, []);
}

#[test]
fn pool_fills_during_a_copy() {
    let (_power, mut pool, catalog) = new_pool(20);
    let v = volume(&mut pool, "v", 100);
    let all: Vec<u64> = (0..18).collect();
    write(&mut pool, &catalog, v, &all);
    let s = snapshot(&mut pool, v, "s");
    commit(&mut pool, &catalog);
    write(&mut pool, &catalog, v, &[0]);
    let other = volume(&mut pool, "other", 100);
    write(&mut pool, &catalog, other, &[0]);
    let (space, before) = (pool.space(), maps(&mut pool));
    // All extents are mapped, so nothing can be copied.
    assert_eq!((space.owned, space.clean), (20, 0));
    for _ in 0..3 {
        let full = pool.snapshots().begin_copy(v, ExtentIndex(1)).unwrap();
        assert_eq!(full, Err(FaultAnswer::NoSpace));
    }
    assert_eq!((pool.space(), maps(&mut pool)), (space, before.clone()));
    assert!(pool.take_batch().unwrap().is_none(), "nothing changed");
    // A deletion makes room, once it is zero-filled.
    pool.delete_volume(other, &DRAINED).unwrap();
    let waits = pool.snapshots().begin_copy(v, ExtentIndex(1)).unwrap();
    assert_eq!(waits, Err(FaultAnswer::AwaitZeroFill));
    launder(&mut pool, &catalog);
    let reserve = pool
        .snapshots()
        .begin_copy(v, ExtentIndex(1))
        .unwrap()
        .unwrap_err();
    assert!(matches!(reserve, FaultAnswer::NeedReserve { .. }));
    wait_for_space(&mut pool, &catalog, v, reserve);
    let copy = pool
        .snapshots()
        .begin_copy(v, ExtentIndex(1))
        .unwrap()
        .unwrap();
    // The second one finds the pool full again, and fails alone.
    let full = pool.snapshots().begin_copy(v, ExtentIndex(2)).unwrap();
    assert_eq!(full, Err(FaultAnswer::NoSpace));
    pool.snapshots()
        .fail_copy(v, ExtentIndex(1), CopyFailure::Ended)
        .unwrap();
    commit(&mut pool, &catalog);
    assert_eq!(map_of(&mut pool, v), before[&v]);
    assert_eq!(map_of(&mut pool, s), before[&s]);
    assert_eq!(pool.space().dirty, copy.target.count);
    assert_eq!(pool.check().unwrap().problems, []);
}

#[test]
fn snapshot_of_a_reserved_volume_reserves_or_is_refused() {
    let (_power, mut pool, catalog) = new_pool(40);
    let v = volume_of(&mut pool, "v", 30 * EXTENT, 16 * EXTENT);
    let all: Vec<u64> = (0..16).collect();
    write(&mut pool, &catalog, v, &all);
    assert_eq!(pool.space().promised, 0);
    snapshot(&mut pool, v, "first");
    commit(&mut pool, &catalog);
    let said = pool.volumes().space_of(v).unwrap();
    assert_eq!(said.reserved + said.entitlement, 16);
    // Other volumes can't use it.
    let other = volume(&mut pool, "other", 40);
    assert_eq!(pool.reservable_bytes(Some(other)), 8 * EXTENT);
    write(&mut pool, &catalog, v, &all);
    let new = [NewSnapshot {
        volume: v,
        name: "second".into(),
    }];
    let before = (pool.space(), maps(&mut pool));
    let refused = pool.snapshots().take(&new, 0).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::NoSpace);
    assert_eq!(pool.space().clean + pool.space().dirty, 8);
    assert!(refused.message.contains("need 1 MiB"), "{refused}");
    assert!(refused.message.contains("promise 512 KiB"), "{refused}");
    assert_eq!((pool.space(), maps(&mut pool)), before);
    assert!(pool.take_batch().unwrap().is_none(), "nothing changed");
    pool.set_volume_reservation(v, 8 * EXTENT).unwrap();
    pool.snapshots().take(&new, 0).unwrap();
    commit(&mut pool, &catalog);
    assert_eq!(pool.check().unwrap().problems, []);
}

/// A snapshot writes as many records whatever the volume maps.
#[test]
fn snapshot_is_flat_in_size() {
    const TIB: u64 = 1 << 40;
    const LARGE: u64 = 4 << 20;
    let mut counts = Vec::new();
    for (mapped_bytes, step) in [(1 << 30, 1), (TIB, 2), (10 * TIB, 1)] {
        let power = Power::new(&[11 * TIB]);
        let (mut pool, catalog) = pool_on(&power, LARGE);
        let extents = mapped_bytes / LARGE;
        let v = volume_of(&mut pool, "v", extents * step * LARGE, 0);
        commit(&mut pool, &catalog);
        let mut logical = 0;
        while logical < extents * step {
            let at = ExtentIndex(logical);
            let around = match step {
                1 => pool.map_around(v, at, logical..logical + 32_768).unwrap(),
                _ => None,
            };
            if let Some(around) = around {
                assert_eq!(around.first, at);
                logical += around.run.count;
                continue;
            }
            match pool.fault(v, at, true).unwrap() {
                FaultAnswer::Allocated { .. } => logical += step,
                _ => {
                    pool.reserve(v, 32_768).unwrap();
                    commit(&mut pool, &catalog);
                }
            }
        }
        pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
        commit(&mut pool, &catalog);
        assert_eq!(pool.volumes().space_of(v).unwrap().mapped, extents);
        for name in ["s", "t"] {
            snapshot(&mut pool, v, name);
            let batch = pool.take_batch().unwrap().unwrap();
            counts.push(batch.records());
            catalog.commit(&batch).unwrap();
            pool.committed(batch.id()).unwrap();
        }
        let answer = pool.fault(v, ExtentIndex(0), false).unwrap();
        assert!(matches!(answer, FaultAnswer::Shared { .. }));
    }
    // Feature, pool, volume, snapshot, layer; and no layer where nothing is new.
    assert_eq!(counts, [5, 4, 5, 4, 5, 4]);
}

/// A copy that goes on keeps its source below, and the layer apart.
#[test]
fn a_merge_waits_for_copies() {
    let (_power, mut pool, catalog) = new_pool(64);
    let v = volume(&mut pool, "v", 2000);
    write(&mut pool, &catalog, v, &[0, 600, 1100]);
    let s = snapshot(&mut pool, v, "s");
    commit(&mut pool, &catalog);
    write(&mut pool, &catalog, v, &[0]);
    pool.delete_volume(s, &DRAINED).unwrap();
    commit(&mut pool, &catalog);
    let before = map_of(&mut pool, v);
    let copy = pool
        .snapshots()
        .begin_copy(v, ExtentIndex(1100))
        .unwrap()
        .unwrap();
    // The volume's map is the smaller one, and all of it is in this step.
    let step = pool.snapshots().next_merge(None).unwrap();
    let busy = pool.snapshots().merge(&step).unwrap_err();
    assert_eq!(busy.kind, ErrorKind::InUse);
    pool.snapshots().end_copy(v, ExtentIndex(1100)).unwrap();
    pool.commit_mappings(v, u64::MAX, |_| true).unwrap();
    settle(&mut pool, &catalog);
    let mut now = before;
    now.insert(1100, (copy.target.device.0, copy.target.first.0));
    assert_eq!(map_of(&mut pool, v), now);
    assert_eq!(pool.space().owned, 3);
}

/// As for any grant, no sequence is given before the opening is durable.
#[test]
fn a_copy_waits_for_the_opening() {
    let (power, mut pool, catalog) = new_pool(64);
    let v = volume(&mut pool, "v", 20);
    write(&mut pool, &catalog, v, &[0]);
    snapshot(&mut pool, v, "s");
    commit(&mut pool, &catalog);
    drop((pool, catalog));
    let (mut pool, catalog) = try_open(&power);
    pool.finish_adoption(true).unwrap();
    let early = pool.snapshots().begin_copy(v, ExtentIndex(0)).unwrap();
    assert!(
        matches!(early, Err(FaultAnswer::AwaitCommit { .. })),
        "{early:?}"
    );
    commit(&mut pool, &catalog);
    pool.snapshots()
        .begin_copy(v, ExtentIndex(0))
        .unwrap()
        .unwrap();
}

/// The end of a sibling must be durable before a volume writes where that sibling read.
#[test]
fn a_deletion_is_durable_before_its_extents_are_written() {
    let (_power, mut pool, catalog) = new_pool(64);
    let v = volume(&mut pool, "v", 20);
    write(&mut pool, &catalog, v, &[0]);
    let s = snapshot(&mut pool, v, "s");
    commit(&mut pool, &catalog);
    pool.delete_volume(s, &DRAINED).unwrap();
    let shared = |pool: &mut Pool| {
        let answer = pool.fault(v, ExtentIndex(0), true).unwrap();
        matches!(answer, FaultAnswer::Shared { .. })
    };
    assert!(shared(&mut pool));
    assert_eq!(pool.snapshots().next_merge(None), None);
    commit(&mut pool, &catalog);
    settle(&mut pool, &catalog);
    assert!(!shared(&mut pool));
}

#[test]
fn a_deallocation_hides_only_what_is_seen() {
    let (_power, mut pool, catalog) = new_pool(64);
    let v = volume(&mut pool, "v", 20);
    write(&mut pool, &catalog, v, &[0, 1, 2]);
    let mut release = |name: &str, count| {
        snapshot(&mut pool, v, name);
        commit(&mut pool, &catalog);
        let released = pool.release(v, ExtentIndex(0), count, &DRAINED).unwrap();
        let hidden = released.hidden;
        commit(&mut pool, &catalog);
        hidden
    };
    assert_eq!(release("a", 2), 2);
    assert_eq!(release("b", 2), 0, "a layer hides them");
    assert_eq!(release("c", 20), 1);
    assert_eq!(map_of(&mut pool, v), Map::new());
    settle(&mut pool, &catalog);
    assert_eq!(map_of(&mut pool, v), Map::new());
}
