//! Measures how long a full pool takes to open, its metadata's size, and a commit's time.
//!
//! The pool has 1 TiB in a sparse file, each 64 KiB extent mapped: sequentially, and in a random
//! permutation. Each is opened as after a kill and as after a clean stop; the medians count.
//! Commits have one small record, in the full pool and in an empty one. Arguments: a folder for
//! temporary files; `--quick` for 64 GiB. Caches are warm.

use forebay_device::{
    DeviceSpec, OpenOptions,
    sync_io::{SyncDevice, create_sparse_file},
};
use forebay_pool::{
    Catalog, FaultAnswer, NewDevice, NewVolume, OpenDevice, Pool, PoolSettings, PoolSpec, create,
    open,
};
use forebay_xlate::types::{ExtentIndex, VolumeId};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

const EXTENT_BYTES: u64 = 64 << 10;
const EXTENTS: u64 = 1 << 24;
const QUICK_EXTENTS: u64 = 1 << 20;
const OPENINGS: usize = 5;
const COMMITS: usize = 200;

/// A pseudorandom permutation of the extents.
fn scatter(number: u64, extents: u64) -> u64 {
    let mask = extents - 1;
    let mut x = number;
    for factor in [0x9E_37B5, 0x85_EBCB, 0xC2_B2AF] {
        x = (x * factor) & mask;
        x ^= x >> 11;
    }
    x
}

fn store(path: &Path) -> (String, Arc<SyncDevice>) {
    let spec: DeviceSpec = path
        .to_str()
        .expect("a UTF-8 path")
        .parse()
        .expect("a path");
    let device = SyncDevice::open(&spec, &OpenOptions::default()).expect("the file opens");
    (spec.to_string(), Arc::new(device))
}

fn make(path: &Path, bytes: u64) -> (Pool, Catalog) {
    create_sparse_file(path, bytes).expect("a sparse file");
    let (spec, store) = store(path);
    let (mut pool, catalog) = create(&PoolSpec {
        name: "bench".into(),
        extent_bytes: EXTENT_BYTES,
        devices: vec![NewDevice {
            spec,
            store,
            block_bytes: 512,
            known_zero: true,
        }],
        settings: PoolSettings::default(),
        force: true,
        now_s: 0,
    })
    .expect("a pool");
    pool.create_tenant("t", 0).expect("a tenant");
    commit(&mut pool, &catalog);
    (pool, catalog)
}

fn commit(pool: &mut Pool, catalog: &Catalog) {
    if let Some(batch) = pool.take_batch().expect("a batch") {
        catalog.commit(&batch).expect("a commit");
        pool.committed(batch.id()).expect("a batch");
    }
}

fn volume(pool: &mut Pool, extents: u64) -> VolumeId {
    let new = NewVolume {
        tenant: "t".into(),
        name: "v".into(),
        size_bytes: extents * EXTENT_BYTES,
        block_bytes: None,
        reserved_bytes: 0,
    };
    pool.create_volume(&new, 0).expect("a volume")
}

fn map(pool: &mut Pool, catalog: &Catalog, volume: VolumeId, logical: u64) {
    loop {
        match pool
            .fault(volume, ExtentIndex(logical), true)
            .expect("an answer")
        {
            FaultAnswer::NeedReserve { count } => {
                pool.reserve(volume, count).expect("space");
                commit(pool, catalog);
            }
            FaultAnswer::AwaitCommit { .. } => commit(pool, catalog),
            FaultAnswer::Allocated { .. } | FaultAnswer::Mapped { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    if let Some(count) = pool.wants_reserve(volume, false) {
        pool.reserve(volume, count).expect("space");
        commit(pool, catalog);
    }
}

fn fill(path: &Path, extents: u64, place: impl Fn(u64) -> u64) {
    let (mut pool, catalog) = make(path, extents * EXTENT_BYTES + (2 << 30));
    let volume = volume(&mut pool, extents);
    commit(&mut pool, &catalog);
    for number in 0..extents {
        map(&mut pool, &catalog, volume, place(number));
        if number % (extents / 16) == 0 {
            pool.commit_mappings(volume, u64::MAX, |_| true)
                .expect("mappings");
        }
    }
    pool.commit_mappings(volume, u64::MAX, |_| true)
        .expect("mappings");
    commit(&mut pool, &catalog);
    // As a kill leaves it.
    std::mem::forget(catalog);
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn reopen(path: &Path) -> (Pool, Catalog, Duration) {
    let start = Instant::now();
    let (spec, store) = store(path);
    let opened = open(&[OpenDevice {
        spec,
        store,
        forced: false,
    }])
    .expect("the pool opens");
    let mut pool = opened.pool;
    pool.finish_adoption(true).expect("nothing to adopt");
    let time = start.elapsed();
    (pool, opened.catalog, time)
}

fn commit_time(pool: &mut Pool, catalog: &Catalog) -> Duration {
    let times = (0..COMMITS).map(|number| {
        pool.set_boot_id(&format!("boot-{number}")).expect("a name");
        let start = Instant::now();
        commit(pool, catalog);
        start.elapsed()
    });
    median(times.collect())
}

struct Figures {
    killed_ms: f64,
    open_ms: f64,
    record_bytes: u64,
    file_bytes: u64,
    area_bytes: u64,
    commit_us: f64,
}

fn figures(path: &Path, extents: u64) -> Figures {
    let (pool, catalog, killed) = reopen(path);
    assert_eq!(pool.space().owned, extents, "not all of it is mapped");
    drop((pool, catalog));
    let times = (0..OPENINGS).map(|_| {
        let (mut pool, catalog, time) = reopen(path);
        commit(&mut pool, &catalog);
        time
    });
    let open = median(times.collect());
    let (mut pool, catalog, _) = reopen(path);
    commit(&mut pool, &catalog);
    let commit = commit_time(&mut pool, &catalog);
    let health = catalog.health();
    Figures {
        killed_ms: killed.as_secs_f64() * 1e3,
        open_ms: open.as_secs_f64() * 1e3,
        record_bytes: pool.catalog_usage().used_bytes,
        file_bytes: health.metadata_bytes,
        area_bytes: health.area_bytes,
        commit_us: commit.as_secs_f64() * 1e6,
    }
}

fn main() {
    let (mut folder, mut extents) = (std::env::temp_dir(), EXTENTS);
    for argument in std::env::args_os().skip(1) {
        if argument == "--quick" {
            extents = QUICK_EXTENTS;
        } else {
            folder = PathBuf::from(argument);
        }
    }
    let path = folder.join(format!("forebay-open-time-{}", std::process::id()));
    let (mut pool, catalog) = make(&path, 1 << 30);
    let empty = commit_time(&mut pool, &catalog).as_secs_f64() * 1e6;
    drop((pool, catalog));
    println!("empty_commit_p50_us {empty:.0}");
    for (name, scattered) in [("contiguous", false), ("scattered", true)] {
        std::fs::remove_file(&path).expect("the file goes");
        let place = |number| {
            if scattered {
                scatter(number, extents)
            } else {
                number
            }
        };
        fill(&path, extents, place);
        let figures = figures(&path, extents);
        println!("{name}_open_ms {:.0}", figures.open_ms);
        println!("{name}_open_after_kill_ms {:.0}", figures.killed_ms);
        println!("{name}_metadata_bytes {}", figures.record_bytes);
        println!("{name}_database_bytes {}", figures.file_bytes);
        println!("{name}_area_bytes {}", figures.area_bytes);
        println!("{name}_commit_p50_us {:.0}", figures.commit_us);
    }
    let _ = std::fs::remove_file(&path);
}
