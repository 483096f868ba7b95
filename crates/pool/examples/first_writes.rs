//! Measures what random first writes to a thin volume cost the pool's owner.
//!
//! `cargo run --release -p forebay-pool --example first_writes [EXTENTS]` writes every extent of a
//! volume once and prints the time of each part. Commits go to memory.

use forebay_pool::{
    BlockStore, Check, CheckReport, FaultAnswer, MemStore, NewDevice, NewVolume, PoolSpec, create,
};
use forebay_xlate::types::ExtentIndex;
use std::{
    collections::BTreeSet,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

const EXTENT_BYTES: u64 = 64 << 10;
/// Faults between two commits, and between two flushes.
const A_COMMIT: u64 = 1000;
const A_FLUSH: u64 = 20_000;

/// A large device of which only the beginning is used.
struct Store {
    kept: MemStore,
    capacity_bytes: u64,
}

impl BlockStore for Store {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.kept.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.kept.write_at(offset, data)
    }

    fn sync(&self) -> io::Result<()> {
        self.kept.sync()
    }

    fn capacity(&self) -> io::Result<u64> {
        Ok(self.capacity_bytes)
    }
}

struct Part {
    name: &'static str,
    total: Duration,
    longest: Duration,
}

impl Part {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            total: Duration::ZERO,
            longest: Duration::ZERO,
        }
    }

    fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = work();
        let took = begun.elapsed();
        self.total += took;
        self.longest = self.longest.max(took);
        result
    }

    fn print(&self, extents: u64) {
        println!(
            "{:16} {:6} ns per extent, longest call {:8.3} ms",
            self.name,
            self.total.as_nanos() / u128::from(extents),
            self.longest.as_secs_f64() * 1e3
        );
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let extents: u64 = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 512 << 10,
    };
    // Only label and catalog are used.
    let kept_bytes = (64 << 20) + extents as usize * 120;
    let device = |spec: &str| NewDevice {
        spec: spec.into(),
        store: Arc::new(Store {
            kept: MemStore::new(kept_bytes),
            capacity_bytes: kept_bytes as u64 + extents * EXTENT_BYTES,
        }),
        block_bytes: 512,
        known_zero: true,
    };
    let (mut pool, catalog) = create(&PoolSpec {
        name: "p".into(),
        extent_bytes: EXTENT_BYTES,
        devices: vec![device("a"), device("b")],
        settings: forebay_pool::PoolSettings::default(),
        force: false,
        now_s: 0,
    })?;
    pool.create_tenant("t", 0)?;
    let new = NewVolume {
        tenant: "t".into(),
        name: "v".into(),
        size_bytes: extents * EXTENT_BYTES,
        block_bytes: None,
        reserved_bytes: 0,
    };
    let volume = pool.create_volume(&new, 0)?;
    let mut parts = [
        "fault",
        "commit_mappings",
        "take_batch",
        "catalog",
        "committed",
    ]
    .map(Part::new);
    let [fault, mappings, take, commit, committed] = &mut parts;
    let (mut waits, mut records) = (0u64, 0u64);
    let mut logical = 0;
    for done in 0..extents {
        // Odd, so a permutation of a power of two; close to one otherwise.
        logical = (logical + 0x9E37_79B1) % extents;
        loop {
            let answer = fault.time(|| pool.fault(volume, ExtentIndex(logical), true))?;
            match answer {
                FaultAnswer::Allocated { .. } | FaultAnswer::Mapped { .. } => break,
                FaultAnswer::NeedReserve { count } => drop(pool.reserve(volume, count)?),
                FaultAnswer::AwaitCommit { .. } => {}
                other => return Err(format!("{other:?}").into()),
            }
            waits += 1;
            if let Some(batch) = take.time(|| pool.take_batch())? {
                commit.time(|| catalog.commit(&batch))?;
                committed.time(|| pool.committed(batch.id()))?;
            }
        }
        fault.time(|| match pool.wants_reserve(volume, false) {
            Some(count) => pool.reserve(volume, count).map(drop),
            None => Ok(()),
        })?;
        if done % A_FLUSH == A_FLUSH - 1 {
            mappings.time(|| pool.commit_mappings(volume, u64::MAX, |_| true))?;
        }
        if done % A_COMMIT == A_COMMIT - 1
            && let Some(batch) = take.time(|| pool.take_batch())?
        {
            records += batch.records() as u64;
            commit.time(|| catalog.commit(&batch))?;
            committed.time(|| pool.committed(batch.id()))?;
        }
    }
    parts.iter().for_each(|part| part.print(extents));
    println!("{waits} faults waited for a commit; {records} records written");
    let mut check = Part::new("check");
    let mut under_way = Check::begin(&mut pool)?;
    while !check.time(|| under_way.step(&pool, 65_536))? {}
    let report: CheckReport = under_way.end();
    check.print(extents);
    println!("{} problems", report.problems.len());
    let mut delete = Part::new("delete_volume");
    let released = delete.time(|| pool.delete_volume(volume, &BTreeSet::new()))?;
    delete.print(extents);
    println!("{} runs", released.runs.len());
    let [_, _, mut take, mut commit, mut committed] =
        ["", "", "  take_batch", "  catalog", "  committed"].map(Part::new);
    if let Some(batch) = take.time(|| pool.take_batch())? {
        commit.time(|| catalog.commit(&batch))?;
        committed.time(|| pool.committed(batch.id()))?;
    }
    [take, commit, committed]
        .iter()
        .for_each(|part| part.print(extents));
    Ok(())
}
