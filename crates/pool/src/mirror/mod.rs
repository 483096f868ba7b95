//! The catalog's file for redb, kept twice: bounded, checksummed, crash-atomic, repaired as it is read.
//!
//! **Design.** Up to two [`Area`]s hold the same blocks under the same checksums; what they hold is in
//! memory once. Data blocks go to both at once and may be torn or missing after a crash: redb
//! (two-phase commit) never overwrites a block that a durable header reaches, and block 0 is in our
//! header, not among them. [`Mirror::sync`] writes tables and headers (`sync`); what it says is durable
//! is so on every copy that is in use. A block that fails its checksum or can't be read is taken from the
//! other copy, written back, counted and noted.
//!
//! A copy whose write fails is left behind (`copies`): the catalog goes on with the other one, which
//! first notes durably that it does ([`Lineage`]). The last copy is never given up: its errors are the
//! caller's.
//!
//! **Not here:** the format on the device (`area`), records, compaction.

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

/// What the error of a write beyond the area says; the catalog looks for its kind.
const FULL: io::ErrorKind = io::ErrorKind::StorageFull;
/// How many notes are kept.
const MAX_NOTES: usize = 64;

/// What a copy of the catalog is good for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CopyState {
    /// It has everything.
    Good,
    /// Its device is not here.
    Missing,
    /// It was left behind; the text says why.
    Failed(String),
}

/// How the catalog's copies are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MirrorHealth {
    pub(crate) copies: Vec<CatalogCopy>,
    pub(crate) repaired_blocks: u64,
    pub(crate) notes: Vec<String>,
    pub(crate) is_settled: bool,
}

/// One copy of the catalog.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogCopy {
    /// The device that it is on.
    pub device: DeviceIndex,
    /// What it is good for.
    pub state: CopyState,
}

struct CopyTable {
    block: Box<TableBlock>,
    dirty: bool,
}

/// One area that is kept up to date.
struct Replica {
    area: Area,
    header_slot: u64,
    /// Of each table, the slot of the newest synced version.
    slots: Vec<u64>,
}

/// An area that was left behind.
struct Lost {
    area: Area,
    why: String,
}

struct State {
    seq: u64,
    len: u64,
    lineage: Lineage,
    /// Where the copies are, or were when there were two.
    devices: [u8; 2],
    head: Box<[u8; HEAD_BYTES]>,
    head_dirty: bool,
    tables: Vec<CopyTable>,
    /// Some table is dirty.
    tables_dirty: bool,
    /// One or two.
    replicas: Vec<Replica>,
    lost: Vec<Lost>,
    /// Areas whose old copy could not be removed.
    stale: Vec<Area>,
    /// Areas of devices of the pool, in use or not: where a copy can be put.
    places: Vec<Area>,
    labels: Labels,
    /// No other copy has this epoch, durably: going on alone needs no other.
    alone: bool,
    /// A copy was lost: the next sync says so, durably, before anything else counts.
    new_epoch: bool,
    /// What was read at opening may not be durable: a header that was written as a copy, say. Nothing may be
    /// written in place of what it stands in for before it is.
    base_unsynced: bool,
    /// Blocks written since the last sync that succeeded.
    unsynced: BTreeSet<u64>,
    /// Blocks that were read or written well since the opening, a bit each. All that the catalog uses is read when it is
    /// opened; anything else may be left of a commit that a death cut short, and agree with no checksum.
    used: Vec<u64>,
    /// A sync failed on every copy: the device may have dropped what was written.
    sync_failed: bool,
    repaired_blocks: u64,
    notes: Vec<String>,
}

/// The mirrored file; see the module.
pub(crate) struct Mirror {
    /// Data blocks of an area, the unused block 0 included.
    blocks: u64,
    area_bytes: u64,
    /// Who brings copies back, or puts one elsewhere: one at a time. Taken before the state.
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

    /// Blocks of a copy's own were bad, and are written anew.
    fn note_bad(&mut self, device: DeviceIndex, bad: &[String]) {
        for what in bad {
            self.repaired_blocks += 1;
            self.note(format!(
                "on {device}, {what} of the catalog's copy failed its checksum, or could not be read (it is \
                 damaged, or the power failed while it was written): it was repaired"
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
                    "{count} bytes at {offset} of a catalog of {} bytes",
                    self.len
                ),
            ));
        }
        Ok(())
    }

    /// Leaves these replicas behind; the last one stays whatever it did.
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

    /// One whole, verified block.
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

    /// The block from the first copy that has it; the others before it get it from there.
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
        Err(first_error.unwrap_or_else(|| damaged("no copy of the catalog is here")))
    }

    /// Writes a good block over bad ones.
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

    /// Writes one whole block.
    fn save(&mut self, block: u64, content: &[u8]) -> io::Result<()> {
        if block == 0 {
            if content[HEAD_BYTES..].iter().any(|byte| *byte != 0) {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the database's header is larger than the area can keep",
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
            // Whatever is there now: a database writes where nothing is that it needs.
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
    /// One copy of a device's label was bad and is written anew.
    pub(crate) fn note_repaired_label(&self, device: DeviceIndex) {
        self.lock().note_repaired_label(device);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file's length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.lock().len
    }

    /// The longest that the file can be, in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.blocks * BLOCK
    }

    /// The size of the area that each copy is in, in bytes.
    pub(crate) fn area_bytes(&self) -> u64 {
        self.area_bytes
    }

    /// All of the file will be read soon.
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

    /// Fills `out` from `offset`; every block is verified.
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

    /// Writes `data` at `offset`; durable after [`Mirror::sync`].
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

    /// Returns once everything written is durable on every copy that is in use.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.lock().sync()
    }
}

/// [`Mirror`] as redb wants it.
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
