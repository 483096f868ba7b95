//! A device that can lose unsynced writes, and small pools on it.
#![allow(dead_code, unreachable_pub)]

pub mod images;
pub mod pools;
pub mod powercut;

use forebay_pool::{
    BlockStore, Catalog, NewDevice, OpenDevice, Pool, PoolSettings, PoolSpec, Result, create, open,
};
use forebay_xlate::types::DeviceIndex;
use std::{
    collections::BTreeSet,
    io,
    sync::{Arc, Mutex},
};

pub const DRAINED: BTreeSet<DeviceIndex> = BTreeSet::new();

const SECTOR: usize = 512;

/// Stored bytes of a device: label and catalog.
pub const KEPT_BYTES: usize = 12 << 20;

struct Inner {
    now: Vec<u8>,
    durable: Vec<u8>,
    /// Sectors written since the last sync, in order.
    unsynced: Vec<(usize, [u8; SECTOR])>,
    capacity: u64,
    /// Writes and syncs that still work; `None` for no limit.
    left: Option<u64>,
    operations: u64,
    /// The first refused operation was a sync.
    cut_in_sync: bool,
    cut: bool,
}

pub struct CrashStore(Mutex<Inner>);

pub use fastrand::Rng as Choices;

impl CrashStore {
    pub fn new(capacity: u64) -> Self {
        Self::keeping(KEPT_BYTES, capacity)
    }

    /// Stores more than a small pool's label and catalog.
    pub fn keeping(kept_bytes: usize, capacity: u64) -> Self {
        Self::with_content(vec![0; kept_bytes], capacity)
    }

    fn with_content(content: Vec<u8>, capacity: u64) -> Self {
        Self(Mutex::new(Inner {
            now: content.clone(),
            durable: content,
            unsynced: Vec::new(),
            capacity,
            left: None,
            operations: 0,
            cut_in_sync: false,
            cut: false,
        }))
    }

    /// After `count` more writes and syncs, nothing works.
    pub fn fail_after(&self, count: u64) {
        self.0.lock().unwrap().left = Some(count);
    }

    /// Whether the first refused operation was a sync, with everything written before it.
    pub fn cut_in_sync(&self) -> bool {
        self.0.lock().unwrap().cut_in_sync
    }

    pub fn operations(&self) -> u64 {
        self.0.lock().unwrap().operations
    }

    /// Each unsynced block is there, missing, or a mixture of sectors.
    pub fn after_power_cut(&self, choices: &mut Choices) -> Self {
        let inner = self.0.lock().unwrap();
        let mut content = inner.durable.clone();
        // Sometimes everything, sometimes nothing, mostly a mixture.
        let all = choices.u64(..6);
        let mut block = 0;
        for (at, sector) in &inner.unsynced {
            if at.is_multiple_of(4096) {
                block = choices.u64(..5);
            }
            let kept = match (all, block) {
                (0, _) | (_, 0 | 1) => false,
                (1, _) | (_, 2 | 3) => true,
                _ => choices.bool(),
            };
            if kept {
                content[*at..*at + SECTOR].copy_from_slice(sector);
            }
        }
        Self::with_content(content, inner.capacity)
    }

    /// Every write is there.
    pub fn after_kill(&self) -> Self {
        let inner = self.0.lock().unwrap();
        Self::with_content(inner.now.clone(), inner.capacity)
    }

    pub fn rot(&self, at: usize) {
        let mut inner = self.0.lock().unwrap();
        inner.now[at] ^= 0x20;
        inner.durable[at] ^= 0x20;
    }
}

impl Inner {
    fn works(&mut self, sync: bool) -> io::Result<()> {
        self.operations += 1;
        match &mut self.left {
            Some(0) => {
                self.cut_in_sync = self.cut_in_sync || (sync && !self.cut);
                self.cut = true;
                return Err(io::Error::other("the device is gone"));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(())
    }
}

impl BlockStore for CrashStore {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let inner = self.0.lock().unwrap();
        let from = offset as usize;
        let source = inner
            .now
            .get(from..from + buf.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(source);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        assert!(offset.is_multiple_of(4096) && data.len().is_multiple_of(4096));
        let mut inner = self.0.lock().unwrap();
        inner.works(false)?;
        let from = offset as usize;
        let is_kept = from < inner.now.len();
        if !is_kept && data.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let target = inner.now.get_mut(from..from + data.len());
        target
            .ok_or(io::ErrorKind::UnexpectedEof)?
            .copy_from_slice(data);
        for (at, sector) in data.chunks_exact(SECTOR).enumerate() {
            inner
                .unsynced
                .push((from + at * SECTOR, sector.try_into().unwrap()));
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut inner = self.0.lock().unwrap();
        inner.works(true)?;
        let inner = &mut *inner;
        for (at, sector) in inner.unsynced.drain(..) {
            inner.durable[at..at + SECTOR].copy_from_slice(&sector);
        }
        Ok(())
    }

    fn capacity(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().capacity)
    }
}

/// A small pool's first device has both copies of the catalog; others are too small.
pub const FIRST_DATA_BYTES: u64 = 11 << 20;
pub const OTHER_DATA_BYTES: u64 = 1 << 20;
pub const EXTENT: u64 = 64 << 10;

pub fn stores(extents: &[u64]) -> Vec<Arc<CrashStore>> {
    let capacity = |(at, count): (usize, &u64)| {
        (if at == 0 {
            FIRST_DATA_BYTES
        } else {
            OTHER_DATA_BYTES
        }) + count * EXTENT
    };
    extents
        .iter()
        .enumerate()
        .map(capacity)
        .map(|bytes| Arc::new(CrashStore::new(bytes)))
        .collect()
}

pub fn spec(stores: &[Arc<CrashStore>], known_zero: bool) -> PoolSpec {
    PoolSpec {
        name: "test".into(),
        extent_bytes: EXTENT,
        devices: stores
            .iter()
            .enumerate()
            .map(|(at, store)| NewDevice {
                spec: format!("mem:{at}"),
                store: store.clone(),
                block_bytes: 512,
                known_zero,
            })
            .collect(),
        settings: PoolSettings::default(),
        force: false,
        now_s: 1,
    }
}

pub fn new_pool(stores: &[Arc<CrashStore>]) -> (Pool, Catalog) {
    create(&spec(stores, true)).unwrap()
}

pub fn try_open(stores: &[Arc<CrashStore>]) -> Result<(Pool, Catalog)> {
    let devices: Vec<OpenDevice> = stores
        .iter()
        .enumerate()
        .map(|(at, store)| OpenDevice {
            spec: format!("mem:{at}"),
            store: store.clone(),
            forced: false,
        })
        .collect();
    open(&devices).map(|opened| (opened.pool, opened.catalog))
}

/// Opens, and ends adoption.
pub fn reopen(stores: &[Arc<CrashStore>], same_boot: bool) -> (Pool, Catalog) {
    let (mut pool, catalog) = try_open(stores).unwrap();
    pool.finish_adoption(same_boot).unwrap();
    commit(&mut pool, &catalog);
    (pool, catalog)
}

pub fn commit(pool: &mut Pool, catalog: &Catalog) {
    if let Some(batch) = pool.take_batch().unwrap() {
        catalog.commit(&batch).unwrap();
        pool.committed(batch.id()).unwrap();
    }
}
