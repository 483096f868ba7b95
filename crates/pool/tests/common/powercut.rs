//! Test devices with power cuts: unsynced writes are kept, dropped, reordered or torn.
//!
//! All devices of a test share one [`Power`], which counts their writes and syncs; after the n-th
//! one nothing works. [`Power::after_cut`] yields the content after a cut, another one for each
//! seed. An unsynced block has its old content, any later version, or a mixture of 512-byte
//! sectors.

use super::Choices;
use forebay_pool::BlockStore;
use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard},
};

const SECTOR: usize = 512;
const BLOCK: usize = 4096;

type Block = Arc<[u8; BLOCK]>;

#[derive(Clone)]
pub struct Power {
    shared: Arc<Mutex<Shared>>,
    stores: Vec<Arc<PowerCutStore>>,
}

#[derive(Default)]
struct Shared {
    operations: u64,
    /// Writes and syncs that still work; `None` for no limit.
    left: Option<u64>,
    cut: bool,
    cut_in_sync: bool,
}

#[derive(Clone, Default)]
struct Inner {
    /// Content that survives any cut.
    durable: BTreeMap<u64, Block>,
    /// Writes since the last sync, in order.
    unsynced: Vec<(u64, Block)>,
    newest: BTreeMap<u64, Block>,
    fail_reads: bool,
    fail_writes: bool,
    /// Writes succeed without effect.
    lose_writes: bool,
}

pub struct PowerCutStore {
    shared: Arc<Mutex<Shared>>,
    inner: Mutex<Inner>,
    capacity_bytes: Mutex<u64>,
}

impl Power {
    pub fn new(capacities_bytes: &[u64]) -> Self {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let stores = capacities_bytes
            .iter()
            .map(|bytes| Arc::new(PowerCutStore::new(&shared, *bytes, Inner::default())))
            .collect();
        Self { shared, stores }
    }

    pub fn stores(&self) -> &[Arc<PowerCutStore>] {
        &self.stores
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }

    pub fn operations(&self) -> u64 {
        self.lock().operations
    }

    /// After `count` more writes and syncs, nothing works.
    pub fn fail_after(&self, count: u64) {
        self.lock().left = Some(count);
    }

    /// Whether an operation was refused.
    pub fn is_cut(&self) -> bool {
        self.lock().cut
    }

    /// Whether the first refused operation was a sync, with everything written before it.
    pub fn cut_in_sync(&self) -> bool {
        self.lock().cut_in_sync
    }

    fn with(&self, mut change: impl FnMut(&Inner) -> Inner) -> Self {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let stores = self.stores.iter().map(|store| {
            let inner = change(&store.inner.lock().unwrap());
            let bytes = *store.capacity_bytes.lock().unwrap();
            Arc::new(PowerCutStore::new(&shared, bytes, inner))
        });
        Self {
            stores: stores.collect(),
            shared: shared.clone(),
        }
    }

    /// The content after a power cut now; each seed gives another outcome.
    pub fn after_cut(&self, seed: u64) -> Self {
        let mut choices =
            Choices::with_seed(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66);
        self.with(|inner| Inner {
            durable: inner.after_cut(&mut choices),
            ..Inner::default()
        })
    }

    /// The content after the process is killed: every write that was done.
    pub fn after_kill(&self) -> Self {
        self.with(|inner| Inner {
            fail_reads: false,
            fail_writes: false,
            lose_writes: false,
            ..inner.clone()
        })
    }
}

impl Inner {
    fn block(&self, at: u64) -> Option<&Block> {
        self.newest.get(&at).or_else(|| self.durable.get(&at))
    }

    fn after_cut(&self, choices: &mut Choices) -> BTreeMap<u64, Block> {
        let mut content = self.durable.clone();
        let mut versions: BTreeMap<u64, Vec<&Block>> = BTreeMap::new();
        for (at, block) in &self.unsynced {
            versions.entry(*at).or_default().push(block);
        }
        // Sometimes everything, sometimes nothing, mostly a mixture.
        let all = choices.u64(..6);
        for (at, versions) in versions {
            let newest = versions[versions.len() - 1];
            match (all, choices.u64(..5)) {
                (0, _) | (2.., 0) => {}
                (1, _) | (2.., 1) => {
                    content.insert(at, newest.clone());
                }
                // The device reordered writes: an older version is there.
                (2.., 2) => {
                    let which = choices.usize(..versions.len());
                    content.insert(at, versions[which].clone());
                }
                // Torn: each sector is the old one, or of any version.
                _ => {
                    let mut block = content.get(&at).map_or([0; BLOCK], |block| **block);
                    for sector in 0..BLOCK / SECTOR {
                        let which = choices.usize(..=versions.len());
                        if let Some(version) = versions.get(which) {
                            let range = sector * SECTOR..(sector + 1) * SECTOR;
                            block[range.clone()].copy_from_slice(&version[range]);
                        }
                    }
                    content.insert(at, Arc::new(block));
                }
            }
        }
        content
    }
}

impl PowerCutStore {
    fn new(shared: &Arc<Mutex<Shared>>, capacity_bytes: u64, inner: Inner) -> Self {
        Self {
            shared: shared.clone(),
            inner: Mutex::new(inner),
            capacity_bytes: Mutex::new(capacity_bytes),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    pub fn set_fail_reads(&self, fail: bool) {
        self.lock().fail_reads = fail;
    }

    pub fn set_fail_writes(&self, fail: bool) {
        self.lock().fail_writes = fail;
    }

    pub fn set_lose_writes(&self, lose: bool) {
        self.lock().lose_writes = lose;
    }

    pub fn set_capacity(&self, bytes: u64) {
        *self.capacity_bytes.lock().unwrap() = bytes;
    }

    pub fn peek(&self, offset: u64) -> [u8; BLOCK] {
        let at = offset / BLOCK as u64;
        self.lock().block(at).map_or([0; BLOCK], |block| **block)
    }

    /// Changes a block directly and durably.
    pub fn poke(&self, offset: u64, content: &[u8; BLOCK]) {
        let at = offset / BLOCK as u64;
        let mut inner = self.lock();
        inner.unsynced.retain(|(other, _)| *other != at);
        inner.newest.remove(&at);
        inner.durable.insert(at, Arc::new(*content));
    }

    pub fn flip(&self, offset: u64, bit: u8) {
        let mut content = self.peek(offset);
        content[offset as usize % BLOCK] ^= 1 << (bit % 8);
        self.poke(offset, &content);
    }

    /// Offsets of the blocks that are not zeros, in order.
    pub fn used_blocks(&self) -> Vec<u64> {
        let inner = self.lock();
        let mut all = inner.durable.clone();
        all.extend(inner.newest.iter().map(|(at, block)| (*at, block.clone())));
        all.iter()
            .filter(|(_, block)| block.iter().any(|byte| *byte != 0))
            .map(|(at, _)| at * BLOCK as u64)
            .collect()
    }

    fn works(&self, sync: bool) -> io::Result<()> {
        let mut shared = self.shared.lock().unwrap();
        shared.operations += 1;
        match &mut shared.left {
            Some(0) => {
                shared.cut_in_sync |= sync && !shared.cut;
                shared.cut = true;
                return Err(io::Error::other("the power is cut"));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(())
    }

    fn check(&self, offset: u64, bytes: usize) -> io::Result<()> {
        assert!(offset.is_multiple_of(BLOCK as u64) && bytes.is_multiple_of(BLOCK));
        if offset + bytes as u64 > *self.capacity_bytes.lock().unwrap() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

impl BlockStore for PowerCutStore {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check(offset, buf.len())?;
        let inner = self.lock();
        if inner.fail_reads {
            return Err(io::Error::other("an unreadable sector"));
        }
        for (index, target) in buf.chunks_exact_mut(BLOCK).enumerate() {
            match inner.block(offset / BLOCK as u64 + index as u64) {
                Some(block) => target.copy_from_slice(&block[..]),
                None => target.fill(0),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len())?;
        self.works(false)?;
        let mut inner = self.lock();
        if inner.fail_writes {
            return Err(io::Error::other("the device refuses"));
        }
        if inner.lose_writes {
            return Ok(());
        }
        for (index, content) in data.chunks_exact(BLOCK).enumerate() {
            let at = offset / BLOCK as u64 + index as u64;
            let block: Block = Arc::new(content.try_into().unwrap());
            inner.newest.insert(at, block.clone());
            inner.unsynced.push((at, block));
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.works(true)?;
        let mut inner = self.lock();
        if inner.fail_writes {
            return Err(io::Error::other("the device refuses"));
        }
        let newest = std::mem::take(&mut inner.newest);
        inner.durable.extend(newest);
        inner.unsynced.clear();
        Ok(())
    }

    fn capacity(&self) -> io::Result<u64> {
        Ok(*self.capacity_bytes.lock().unwrap())
    }
}
