//! The catalog's file for redb in two copies: bounded, checksummed, crash-atomic, repaired on read.
//!
//! Data blocks go to both [`Area`]s at once, and may be torn after a crash. That is safe: two-phase
//! commit never overwrites a block that a durable header reaches, and block 0 is in our own header.
//! [`Mirror::sync`] makes them durable on every copy in use. A bad block is read from the other
//! copy, rewritten and counted.
//!
//! A copy whose write fails is left behind (`copies`); the other one first records that durably
//! ([`Lineage`]). The last copy is never given up: its errors go to the caller.

pub(crate) mod area;
mod choose;
mod copies;
mod heal;
mod labels;
pub(crate) mod lineage;
mod sync;

pub(crate) use copies::FoundArea;
use labels::Labels;

use crate::{
    mirror::area::{Area, BLOCK, ENTRIES, HEAD_BYTES, TableBlock, block_crc, damaged},
    mirror::lineage::Lineage,
    store::BLOCK_BYTES,
};
use forebay_xlate::types::DeviceIndex;
use std::{
    collections::BTreeSet,
    fmt, io,
    sync::{Mutex, MutexGuard, PoisonError},
};
use zerocopy::little_endian::U32;

/// The catalog checks for this kind.
const FULL: io::ErrorKind = io::ErrorKind::StorageFull;
const MAX_NOTES: usize = 64;

/// The state of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CopyState {
    /// It is complete.
    Good,
    /// Its device is missing.
    Missing,
    /// It was left behind; the text says why.
    Failed(String),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MirrorHealth {
    pub(crate) copies: Vec<CatalogCopy>,
    pub(crate) repaired_blocks: u64,
    pub(crate) notes: Vec<String>,
    pub(crate) is_settled: bool,
}

/// A copy of the catalog.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogCopy {
    /// The device.
    pub device: DeviceIndex,
    /// The state.
    pub state: CopyState,
}

struct CopyTable {
    block: Box<TableBlock>,
    dirty: bool,
}

struct Replica {
    area: Area,
    header_slot: u64,
    /// Slots of the newest synced tables.
    slots: Vec<u64>,
}

struct Lost {
    area: Area,
    why: String,
}

struct State {
    seq: u64,
    len: u64,
    lineage: Lineage,
    /// The devices of the last two copies.
    devices: [u8; 2],
    head: Box<[u8; HEAD_BYTES]>,
    head_dirty: bool,
    tables: Vec<CopyTable>,
    tables_dirty: bool,
    /// One or two.
    replicas: Vec<Replica>,
    lost: Vec<Lost>,
    /// Areas whose old copy could not be erased.
    stale: Vec<Area>,
    /// All areas to which a copy can move.
    places: Vec<Area>,
    labels: Labels,
    /// No other copy has this epoch, durably.
    alone: bool,
    /// A copy was lost: the next sync must first record that durably.
    new_epoch: bool,
    /// Content read at opening may not be durable, for example a new copy's header. It must be
    /// synced before superseded content is overwritten.
    base_unsynced: bool,
    /// Blocks written since the last successful sync.
    unsynced: BTreeSet<u64>,
    /// Blocks read or written well since the opening, a bit each. The opening reads all that the
    /// catalog uses. Other blocks may be left of an interrupted commit, and match no checksum.
    used: Vec<u64>,
    /// The device may have dropped writes.
    sync_failed: bool,
    repaired_blocks: u64,
    notes: Vec<String>,
}

pub(crate) struct Mirror {
    /// Includes the unused block 0.
    blocks: u64,
    area_bytes: u64,
    /// Held while copies are repaired or moved. Lock order: before `state`.
    care: Mutex<()>,
    state: Mutex<State>,
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror")
            .field("blocks", &self.blocks)
            .finish_non_exhaustive()
    }
}

impl State {
    fn entry(&self, block: u64) -> u32 {
        let at = block as usize;
        self.tables[at / ENTRIES].block.entries[at % ENTRIES].get()
    }

    fn set_entry(&mut self, block: u64, crc: u32) {
        let at = block as usize;
        let table = &mut self.tables[at / ENTRIES];
        if table.block.entries[at % ENTRIES].get() != crc {
            table.block.entries[at % ENTRIES] = U32::new(crc);
            table.dirty = true;
            self.tables_dirty = true;
        }
    }

    fn is_used(&self, block: u64) -> bool {
        let word = self.used.get((block / 64) as usize);
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    fn set_used(&mut self, block: u64, used: bool) {
        let word = (block / 64) as usize;
        if word >= self.used.len() {
            self.used.resize(word + 1, 0);
        }
        self.used[word] &= !(1 << (block % 64));
        self.used[word] |= u64::from(used) << (block % 64);
    }

    fn note(&mut self, text: String) {
        if self.notes.len() < MAX_NOTES {
            self.notes.push(text);
        }
    }

    fn note_bad(&mut self, device: DeviceIndex, bad: &[String]) {
        for what in bad {
            self.repaired_blocks += 1;
            self.note(format!(
                "on {device}, {what} of the catalog's copy failed its checksum, or could not be read (it was damaged, \
                 or the power failed during its write): it was repaired"
            ));
        }
    }

    fn note_repaired_label(&mut self, device: DeviceIndex) {
        self.repaired_blocks += 1;
        self.note(format!(
            "one of the two copies of the label on {device} was damaged; it was repaired"
        ));
    }

    fn check_range(&self, offset: u64, count: usize) -> io::Result<()> {
        let end = offset.checked_add(count as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "{count} bytes at {offset} are past the end of a catalog of {} bytes",
                    self.len
                ),
            ));
        }
        Ok(())
    }

    /// Leaves these replicas behind, but never the last one.
    fn lose(&mut self, mut failed: Vec<(usize, io::Error)>) {
        failed.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        for (at, error) in failed {
            if self.replicas.len() == 1 {
                return;
            }
            let replica = self.replicas.remove(at);
            self.note(format!(
                "the copy of the catalog on {} failed ({error}) and is left behind",
                replica.area.device
            ));
            self.leave_behind(replica.area, error.to_string());
            self.new_epoch = true;
        }
    }

    fn leave_behind(&mut self, area: Area, why: String) {
        self.lost.retain(|lost| !lost.area.is(&area));
        self.lost.push(Lost { area, why });
    }

    fn load(&mut self, block: u64, into: &mut [u8]) -> io::Result<()> {
        if block == 0 {
            into.fill(0);
            into[..HEAD_BYTES].copy_from_slice(self.head.as_ref());
            return Ok(());
        }
        let expected = self.entry(block);
        if expected == 0 {
            into.fill(0);
            return Ok(());
        }
        self.load_from_copies(block, expected, into)?;
        self.set_used(block, true);
        Ok(())
    }

    /// Reads the block from the first good copy and repairs bad ones.
    fn load_from_copies(&mut self, block: u64, expected: u32, into: &mut [u8]) -> io::Result<()> {
        let mut bad: Vec<(usize, String)> = Vec::new();
        let mut first_error = None;
        for (at, replica) in self.replicas.iter().enumerate() {
            let error = match replica.area.read_data(block, into) {
                Ok(()) if block_crc(into) == expected => {
                    self.mend(block, into, bad);
                    return Ok(());
                }
                Ok(()) => damaged(format!("block {block} of the catalog fails its checksum")),
                Err(error) => error,
            };
            bad.push((at, error.to_string()));
            first_error = first_error.or(Some(error));
        }
        Err(first_error.unwrap_or_else(|| damaged("no copy of the catalog is present")))
    }

    fn mend(&mut self, block: u64, content: &[u8], bad: Vec<(usize, String)>) {
        let mut failed = Vec::new();
        for (at, what) in bad {
            let area = &self.replicas[at].area;
            let device = area.device;
            match area.write_data(block, content) {
                Ok(()) => {
                    self.repaired_blocks += 1;
                    self.unsynced.insert(block);
                    self.note(format!(
                        "on {device}, {what}: it was repaired from the other copy"
                    ));
                }
                Err(error) => failed.push((at, error)),
            }
        }
        self.lose(failed);
    }

    fn save(&mut self, block: u64, content: &[u8]) -> io::Result<()> {
        if block == 0 {
            if content[HEAD_BYTES..].iter().any(|byte| *byte != 0) {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the database's header is larger than the area can hold",
                ));
            }
            self.head.copy_from_slice(&content[..HEAD_BYTES]);
            self.head_dirty = true;
            return Ok(());
        }
        let mut failed = Vec::new();
        for (at, replica) in self.replicas.iter().enumerate() {
            if let Err(error) = replica.area.write_data(block, content) {
                failed.push((at, error));
            }
        }
        if failed.len() == self.replicas.len()
            && let Some((_, error)) = failed.pop()
        {
            // A database writes only to blocks it does not need.
            self.set_used(block, false);
            return Err(error);
        }
        self.lose(failed);
        self.set_entry(block, block_crc(content));
        self.set_used(block, true);
        self.unsynced.insert(block);
        Ok(())
    }

    fn modify(&mut self, block: u64, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
        let mut content = [0; BLOCK_BYTES];
        self.load(block, &mut content)?;
        change(&mut content);
        self.save(block, &content)
    }
}

impl Mirror {
    pub(crate) fn note_repaired_label(&self, device: DeviceIndex) {
        self.lock().note_repaired_label(device);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> u64 {
        self.lock().len
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.blocks * BLOCK
    }

    pub(crate) fn area_bytes(&self) -> u64 {
        self.area_bytes
    }

    pub(crate) fn read_ahead(&self) {
        let state = self.lock();
        if let Some(replica) = state.replicas.first() {
            let area = &replica.area;
            area.store.will_read(area.data_offset(0), state.len);
        }
    }

    /// Changes the length; new bytes are zeros. `StorageFull` beyond the area.
    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        if len > self.capacity() {
            return Err(io::Error::new(
                FULL,
                format!("the catalog is full: {len} bytes, of {}", self.capacity()),
            ));
        }
        let mut state = self.lock();
        let old = state.len;
        if len > old && !old.is_multiple_of(BLOCK) {
            // The rest of the last block may hold bytes from before a shrink.
            state.modify(old / BLOCK, |block| {
                block[(old % BLOCK) as usize..].fill(0);
            })?;
        }
        for block in old.div_ceil(BLOCK)..len.div_ceil(BLOCK) {
            if block == 0 {
                state.head.fill(0);
            } else {
                state.set_entry(block, 0);
            }
        }
        state.len = len;
        state.head_dirty = true;
        Ok(())
    }

    /// Every block is verified.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut state = self.lock();
        state.check_range(offset, out.len())?;
        let mut content = [0; BLOCK_BYTES];
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let from = (at % BLOCK) as usize;
            let count = (BLOCK_BYTES - from).min(out.len() - done);
            let target = &mut out[done..done + count];
            if count == BLOCK_BYTES {
                state.load(at / BLOCK, target)?;
            } else {
                state.load(at / BLOCK, &mut content)?;
                target.copy_from_slice(&content[from..from + count]);
            }
            done += count;
        }
        Ok(())
    }

    /// Durable after [`Mirror::sync`].
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        state.check_range(offset, data.len())?;
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let from = (at % BLOCK) as usize;
            let count = (BLOCK_BYTES - from).min(data.len() - done);
            let source = &data[done..done + count];
            if count == BLOCK_BYTES {
                state.save(at / BLOCK, source)?;
            } else {
                state.modify(at / BLOCK, |block| {
                    block[from..from + count].copy_from_slice(source);
                })?;
            }
            done += count;
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.lock().sync()
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Backend(pub(crate) std::sync::Arc<Mirror>);

impl redb::StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }
}

#[cfg(test)]
mod tests;
