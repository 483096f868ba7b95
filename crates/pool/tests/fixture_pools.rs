//! Pools of earlier commits, kept in `tests/fixtures`, open with their content.
//!
//! `UPDATE_FIXTURES=1` writes the newest one again, which is right only before a format is used.

mod common;

use common::{DRAINED, EXTENT, FIRST_DATA_BYTES, commit};
use forebay_pool::{
    BlockStore, Catalog, FaultAnswer, MemStore, NewClone, NewDevice, NewSnapshot, NewVolume,
    OpenDevice, Pool, PoolSettings, PoolSpec, create, open,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::{
    collections::BTreeMap,
    fs::File,
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
};

fn path(name: &str) -> PathBuf {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");
    PathBuf::from(folder).join(name)
}

fn unpack(name: &str) -> Arc<MemStore> {
    let unpacked = Command::new("gzip").arg("-dc").arg(path(name)).output();
    let image = unpacked.unwrap().stdout;
    let store = MemStore::new(image.len());
    store.write_at(0, &image).unwrap();
    Arc::new(store)
}

fn open_on(store: &Arc<MemStore>) -> (Pool, Catalog) {
    let device = OpenDevice {
        spec: "mem".into(),
        store: store.clone(),
        forced: false,
    };
    let opened = open(&[device]).unwrap();
    let mut pool = opened.pool;
    pool.finish_adoption(false).unwrap();
    commit(&mut pool, &opened.catalog);
    (pool, opened.catalog)
}

fn offset(pool: &Pool, device: DeviceIndex, extent: ExtentIndex) -> u64 {
    let device = &pool.devices()[usize::from(device.0)];
    device.data_offset_bytes + extent.0 * pool.info().extent_bytes
}

/// A volume's extents that are not holes.
fn read(pool: &mut Pool, store: &MemStore, volume: VolumeId) -> BTreeMap<u64, Vec<u8>> {
    let extent_bytes = pool.info().extent_bytes;
    let (ranges, _) = pool.volumes().mapped_bytes(volume, 0, usize::MAX).unwrap();
    let mut found = BTreeMap::new();
    for logical in ranges
        .into_iter()
        .flat_map(|range| range.start / extent_bytes..range.end.div_ceil(extent_bytes))
    {
        let (FaultAnswer::Mapped { device, extent, .. }
        | FaultAnswer::Shared { device, extent, .. }) =
            pool.fault(volume, ExtentIndex(logical), false).unwrap()
        else {
            panic!("{logical} is not mapped")
        };
        let mut content = vec![0; extent_bytes as usize];
        store
            .read_at(offset(pool, device, extent), &mut content)
            .unwrap();
        found.insert(logical, content);
    }
    found
}

/// Each extent is filled with a number.
type Filled = BTreeMap<u64, u8>;

const LAYERS: &str = "pool-layers.img.gz";

fn content_with_layers() -> [(&'static str, &'static str, Filled); 5] {
    [
        (
            "t",
            "v",
            [(0, 1), (1, 5), (600, 9), (601, 6), (1100, 4), (1600, 10)].into(),
        ),
        (
            "t",
            "v@monday",
            [(0, 1), (1, 2), (600, 3), (1100, 4)].into(),
        ),
        (
            "t",
            "v@tuesday",
            [(0, 1), (1, 5), (601, 6), (1100, 4)].into(),
        ),
        (
            "u",
            "c",
            [(0, 7), (1, 2), (600, 3), (1100, 4), (1101, 8)].into(),
        ),
        (
            "t",
            "w",
            [
                (0, 20),
                (1, 24),
                (600, 21),
                (601, 25),
                (1100, 22),
                (1600, 23),
            ]
            .into(),
        ),
    ]
}

/// Fills extents of a volume and commits them.
fn fill(pool: &mut Pool, catalog: &Catalog, store: &MemStore, volume: VolumeId, new: &[(u64, u8)]) {
    for (logical, byte) in new {
        let logical = ExtentIndex(*logical);
        let (device, extent) = loop {
            match pool.fault(volume, logical, true).unwrap() {
                FaultAnswer::Allocated { device, extent, .. } => break (device, extent),
                FaultAnswer::Shared { .. } => {
                    if let Ok(copy) = pool.snapshots().begin_copy(volume, logical).unwrap() {
                        pool.snapshots().end_copy(volume, logical).unwrap();
                        break (copy.target.device, copy.target.first);
                    }
                }
                _ => {}
            }
            pool.reserve(volume, 16).unwrap();
            commit(pool, catalog);
        };
        let content = vec![*byte; EXTENT as usize];
        store
            .write_at(offset(pool, device, extent), &content)
            .unwrap();
    }
    pool.commit_mappings(volume, u64::MAX, |_| true).unwrap();
    commit(pool, catalog);
}

/// Snapshots, a clone, copied and hidden extents, and a merge with a step left.
fn make_layers() {
    let store = Arc::new(MemStore::new((FIRST_DATA_BYTES + 64 * EXTENT) as usize));
    let device = NewDevice {
        spec: "mem".into(),
        store: store.clone(),
        block_bytes: 512,
        known_zero: true,
    };
    let spec = PoolSpec {
        name: "layers".into(),
        extent_bytes: EXTENT,
        devices: vec![device],
        settings: PoolSettings::default(),
        force: false,
        now_s: 1,
    };
    let (mut pool, catalog) = create(&spec).unwrap();
    let (pool, catalog, store) = (&mut pool, &catalog, &*store);
    pool.create_tenant("t", 1).unwrap();
    pool.create_tenant("u", 1).unwrap();
    let volume = |pool: &mut Pool, name: &str| {
        let new = NewVolume {
            tenant: "t".into(),
            name: name.into(),
            size_bytes: 2000 * EXTENT,
            block_bytes: None,
            reserved_bytes: 0,
        };
        pool.create_volume(&new, 1).unwrap()
    };
    let snapshot = |pool: &mut Pool, volume: VolumeId, name: &str| {
        let name = name.into();
        let taken = pool.snapshots().take(&[NewSnapshot { volume, name }], 1);
        commit(pool, catalog);
        taken.unwrap()[0]
    };
    let v = volume(pool, "v");
    fill(
        pool,
        catalog,
        store,
        v,
        &[(0, 1), (1, 2), (600, 3), (1100, 4)],
    );
    let monday = snapshot(pool, v, "monday");
    fill(pool, catalog, store, v, &[(1, 5), (601, 6)]);
    pool.release(v, ExtentIndex(600), 1, &DRAINED).unwrap();
    let clone = NewClone {
        snapshot: monday,
        tenant: "u".into(),
        name: "c".into(),
        reserved_bytes: 0,
    };
    let c = pool.snapshots().clone_snapshot(&clone, 1).unwrap();
    fill(pool, catalog, store, c, &[(0, 7), (1101, 8)]);
    snapshot(pool, v, "tuesday");
    fill(pool, catalog, store, v, &[(600, 9), (1600, 10)]);
    let w = volume(pool, "w");
    fill(
        pool,
        catalog,
        store,
        w,
        &[(0, 20), (600, 21), (1100, 22), (1600, 23)],
    );
    let gone = snapshot(pool, w, "gone");
    fill(pool, catalog, store, w, &[(1, 24), (601, 25)]);
    pool.delete_volume(gone, &DRAINED).unwrap();
    commit(pool, catalog);
    let step = pool.snapshots().next_merge(None).unwrap();
    pool.snapshots().merge(&step).unwrap();
    commit(pool, catalog);
    let image = tempfile::NamedTempFile::new().unwrap();
    let mut content = vec![0; store.capacity().unwrap() as usize];
    store.read_at(0, &mut content).unwrap();
    std::fs::write(image.path(), content).unwrap();
    let packed = Command::new("gzip")
        .arg("-9nc")
        .stdin(File::open(image.path()).unwrap())
        .stdout(Stdio::from(File::create(path(LAYERS)).unwrap()))
        .status();
    assert!(packed.unwrap().success());
}

#[test]
fn fixture_pools_open() {
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        make_layers();
    }
    // Before layers: byte `i` of its volume is `i / 512 mod 251`.
    let store = unpack("pool-label-3.img.gz");
    let (mut pool, _catalog) = open_on(&store);
    let v = pool.volume_by_name("t", "v").unwrap().id;
    let bytes: Vec<u8> = read(&mut pool, &store, v).into_values().flatten().collect();
    let expected: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 512 % 251) as u8).collect();
    assert!(bytes == expected);
    assert_eq!(pool.check().unwrap().problems, []);
    drop(pool);

    let store = unpack(LAYERS);
    let (mut pool, catalog) = open_on(&store);
    let same = |pool: &mut Pool| {
        for (tenant, name, expected) in content_with_layers() {
            let volume = pool.volume_by_name(tenant, name).unwrap().id;
            let found = read(pool, &store, volume);
            let found: Filled = found
                .into_iter()
                .map(|(logical, content)| {
                    assert!(content.iter().all(|byte| *byte == content[0]));
                    (logical, content[0])
                })
                .collect();
            assert_eq!(found, expected, "{tenant}/{name}");
        }
        assert_eq!(pool.check().unwrap().problems, []);
    };
    same(&mut pool);
    let mut steps = 0;
    while let Some(step) = pool.snapshots().next_merge(None) {
        pool.snapshots().merge(&step).unwrap();
        commit(&mut pool, &catalog);
        same(&mut pool);
        steps += 1;
    }
    assert!(steps > 0, "a merge was in progress");
}
