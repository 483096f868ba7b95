//! The catalog area: a bounded, checksummed, crash-atomic "file" for redb, on part of a device.
//!
//! **Design.** A block of the area is 4 KiB:
//!
//! ```text
//! block 0, 1        header, two slots in turn
//! block 2 ..        checksum tables, two slots each, in turn
//! then              data: logical block i of the file is data block i
//! ```
//!
//! The header holds the file's length, its logical block 0 (redb's own header, the only block that
//! redb overwrites in place) and the root: a checksum over all tables' checksums. A table holds the
//! CRC32C of 1018 data blocks; 0 says "never written, zeros". Each read of a data block is compared.
//! So every block hangs from the header, and a lost or stale block below it is noticed although its
//! own content is flawless.
//!
//! **Crashes.** Tables and header change in memory and are written by [`Area::sync`] only, each into
//! its older slot, before the device's sync; in memory the slots swap after it. So while a sync
//! runs, the slots of the last finished one are untouched. A header found with a root that the tables
//! don't yield is a sync that did not finish, and the other slot's is used; unless that header says
//! that its sync wrote no table: then nothing was racing with it, and it is damage. (redb ends each
//! commit with such a sync; the header is then written into both slots.) Data blocks go
//! to the device at once, and may be torn or missing after a crash: redb (two-phase commit) never
//! overwrites a block that a durable header reaches, and block 0 is in our header, not among them.
//!
//! **Not here:** a second copy of the catalog (its header carries a sequence number that can be
//! compared), compaction, locks.

use crate::store::{BLOCK_BYTES, BlockStore};
use std::{
    fmt, io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Checksums per table block.
const ENTRIES: usize = 1018;
/// How much of logical block 0 the header can hold; redb uses its first 320 bytes.
const HEAD_BYTES: usize = BLOCK_BYTES - 64;
const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"FBcatHdr");
const TABLE_MAGIC: u32 = u32::from_le_bytes(*b"FBct");
const VERSION: u32 = 1;
/// What the error of a write beyond the area says; the catalog looks for its kind.
const FULL: io::ErrorKind = io::ErrorKind::StorageFull;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
struct HeaderBlock {
    magic: U64,
    version: U32,
    /// CRC32C of the block with this field zero.
    crc: U32,
    /// Which sync wrote it.
    seq: U64,
    /// The file's length in bytes.
    len: U64,
    /// Whose area it is.
    owner: [u8; 16],
    /// CRC32C over the CRCs of all tables.
    root: U32,
    /// 1: the same sync wrote tables too.
    wrote_tables: U32,
    blocks: U64,
    head: [u8; HEAD_BYTES],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
struct TableBlock {
    magic: U32,
    index: U32,
    seq: U64,
    unused: U32,
    /// CRC32C of the block with this field zero.
    crc: U32,
    entries: [U32; ENTRIES],
}

const _: () = assert!(size_of::<HeaderBlock>() == BLOCK_BYTES);
const _: () = assert!(size_of::<TableBlock>() == BLOCK_BYTES);

fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// A data block's checksum as tables hold it: never 0.
fn block_crc(block: &[u8]) -> u32 {
    crc32c(block).max(1)
}

/// A table's versions that verify, newest first, each with its slot.
type Versions = Vec<(u64, Box<TableBlock>)>;

struct Table {
    block: Box<TableBlock>,
    /// The slot of the newest synced version.
    slot: u64,
    dirty: bool,
}

struct State {
    seq: u64,
    /// The header slot of the newest finished sync.
    slot: u64,
    len: u64,
    head: Box<[u8; HEAD_BYTES]>,
    head_dirty: bool,
    tables: Vec<Table>,
}

/// The area; see the module.
pub struct Area {
    store: Arc<dyn BlockStore>,
    offset: u64,
    owner: [u8; 16],
    /// Data blocks, the unused block 0 included.
    blocks: u64,
    tables: u64,
    state: Mutex<State>,
}

impl fmt::Debug for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Area")
            .field("offset", &self.offset)
            .field("blocks", &self.blocks)
            .finish()
    }
}

fn damaged(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl Area {
    /// How many data blocks an area of `bytes` has room for, and under how many tables.
    fn split(bytes: u64) -> io::Result<(u64, u64)> {
        let all = bytes / BLOCK;
        let rest = all.saturating_sub(2);
        // Each table costs its two slots and covers ENTRIES data blocks.
        let tables = rest.div_ceil(ENTRIES as u64 + 2);
        let blocks = rest.saturating_sub(2 * tables).min(tables * ENTRIES as u64);
        if blocks < 4 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a catalog area of {bytes} bytes is too small"),
            ));
        }
        Ok((blocks, tables))
    }

    /// Makes an empty area of `bytes` at `offset`, whatever was there, and syncs it.
    pub fn format(
        store: Arc<dyn BlockStore>,
        offset: u64,
        bytes: u64,
        owner: [u8; 16],
    ) -> io::Result<Self> {
        let (blocks, tables) = Self::split(bytes)?;
        let zeros = [0; BLOCK_BYTES];
        for block in 0..2 + 2 * tables {
            store.write_at(offset + block * BLOCK, &zeros)?;
        }
        store.sync()?;
        let tables_in_memory = (0..tables)
            .map(|index| Table {
                block: Box::new(TableBlock {
                    magic: U32::new(TABLE_MAGIC),
                    // `tables` is far below u32: an area is no larger than a device's start.
                    index: U32::new(index as u32),
                    seq: U64::new(0),
                    unused: U32::new(0),
                    crc: U32::new(0),
                    entries: [U32::new(0); ENTRIES],
                }),
                slot: 1,
                dirty: true,
            })
            .collect();
        let area = Self {
            store,
            offset,
            owner,
            blocks,
            tables,
            state: Mutex::new(State {
                seq: 0,
                slot: 1,
                len: 0,
                head: Box::new([0; HEAD_BYTES]),
                head_dirty: true,
                tables: tables_in_memory,
            }),
        };
        area.sync()?;
        Ok(area)
    }

    /// Opens the area of `bytes` at `offset`, as its last finished sync (or the one that a crash
    /// interrupted) left it.
    pub fn open(
        store: Arc<dyn BlockStore>,
        offset: u64,
        bytes: u64,
        owner: [u8; 16],
    ) -> io::Result<Self> {
        let (blocks, tables) = Self::split(bytes)?;
        let mut headers: Vec<(u64, Box<HeaderBlock>)> = Vec::new();
        let mut found_other = false;
        for slot in 0..2 {
            let mut header = Box::new(HeaderBlock::new_zeroed());
            store.read_at(offset + slot * BLOCK, header.as_mut_bytes())?;
            let crc = header.crc.get();
            header.crc = U32::new(0);
            if header.magic.get() != HEADER_MAGIC || crc != crc32c(header.as_bytes()) {
                continue;
            }
            if header.version.get() != VERSION {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!(
                        "the catalog has format {}, this Forebay reads {VERSION}",
                        header.version.get()
                    ),
                ));
            }
            if header.owner != owner || header.blocks.get() != blocks {
                found_other = true;
                continue;
            }
            headers.push((slot, header));
        }
        headers.sort_by_key(|(_, header)| std::cmp::Reverse(header.seq.get()));
        if headers.is_empty() {
            return Err(damaged(if found_other {
                "the catalog belongs to another pool"
            } else {
                "both headers of the catalog are unreadable"
            }));
        }
        let versions = Self::read_tables(store.as_ref(), offset, tables)?;
        for (slot, header) in headers {
            if header.len.get() > blocks * BLOCK {
                return Err(damaged("the catalog says that it is longer than its area"));
            }
            if let Some(tables_in_memory) = Self::pick(&versions, &header) {
                return Ok(Self {
                    store,
                    offset,
                    owner,
                    blocks,
                    tables,
                    state: Mutex::new(State {
                        seq: header.seq.get(),
                        slot,
                        len: header.len.get(),
                        head: Box::new(header.head),
                        head_dirty: false,
                        tables: tables_in_memory,
                    }),
                });
            }
            if header.wrote_tables.get() == 0 {
                break;
            }
        }
        Err(damaged(
            "the catalog's checksum tables do not match its header",
        ))
    }

    /// Both versions of every table, newest first; one that does not verify is absent.
    fn read_tables(store: &dyn BlockStore, offset: u64, tables: u64) -> io::Result<Vec<Versions>> {
        let mut all = Vec::new();
        for index in 0..tables {
            let mut versions = Vec::with_capacity(2);
            for slot in 0..2 {
                let mut block = Box::new(TableBlock::new_zeroed());
                let at = offset + (2 + 2 * index + slot) * BLOCK;
                store.read_at(at, block.as_mut_bytes())?;
                let crc = block.crc.get();
                block.crc = U32::new(0);
                if block.magic.get() == TABLE_MAGIC
                    && u64::from(block.index.get()) == index
                    && crc32c(block.as_bytes()) == crc
                {
                    block.crc = U32::new(crc);
                    versions.push((slot, block));
                }
            }
            versions.sort_by_key(|(_, block)| std::cmp::Reverse(block.seq.get()));
            all.push(versions);
        }
        Ok(all)
    }

    /// The tables that `header` means, if they yield its root.
    fn pick(versions: &[Versions], header: &HeaderBlock) -> Option<Vec<Table>> {
        let mut picked = Vec::with_capacity(versions.len());
        for versions in versions {
            let (slot, block) = versions
                .iter()
                .find(|(_, block)| block.seq.get() <= header.seq.get())?;
            // A newer version is of a sync that did not finish. The next sync overwrites it, before
            // its number can be taken for one that did.
            let orphan = versions
                .iter()
                .any(|(_, block)| block.seq.get() > header.seq.get());
            picked.push(Table {
                block: block.clone(),
                slot: *slot,
                dirty: orphan,
            });
        }
        (Self::root(&picked) == header.root.get()).then_some(picked)
    }

    fn root(tables: &[Table]) -> u32 {
        let crcs: Vec<u8> = tables
            .iter()
            .flat_map(|table| table.block.crc.get().to_le_bytes())
            .collect();
        crc32c(&crcs)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn data_offset(&self, block: u64) -> u64 {
        self.offset + (2 + 2 * self.tables + block) * BLOCK
    }

    /// The file's length in bytes.
    pub fn len(&self) -> u64 {
        self.lock().len
    }

    /// Whether the file has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The longest that the file can be, in bytes.
    pub fn capacity(&self) -> u64 {
        self.blocks * BLOCK
    }

    /// The number of the last finished sync.
    pub fn sequence(&self) -> u64 {
        self.lock().seq
    }

    /// Changes the length; new bytes are zeros. `StorageFull` beyond the area.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
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
            self.modify(&mut state, old / BLOCK, |block| {
                block[(old % BLOCK) as usize..].fill(0);
            })?;
        }
        for block in old.div_ceil(BLOCK)..len.div_ceil(BLOCK) {
            if block == 0 {
                state.head.fill(0);
            } else {
                self.set_entry(&mut state, block, 0);
            }
        }
        state.len = len;
        state.head_dirty = true;
        Ok(())
    }

    fn entry(state: &State, block: u64) -> u32 {
        let at = block as usize;
        state.tables[at / ENTRIES].block.entries[at % ENTRIES].get()
    }

    fn set_entry(&self, state: &mut State, block: u64, crc: u32) {
        let at = block as usize;
        let table = &mut state.tables[at / ENTRIES];
        if table.block.entries[at % ENTRIES].get() != crc {
            table.block.entries[at % ENTRIES] = U32::new(crc);
            table.dirty = true;
        }
    }

    fn check_range(state: &State, offset: u64, count: usize) -> io::Result<()> {
        let end = offset.checked_add(count as u64);
        if end.is_none_or(|end| end > state.len) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "{count} bytes at {offset} of a catalog of {} bytes",
                    state.len
                ),
            ));
        }
        Ok(())
    }

    /// One whole, verified block.
    fn load(&self, state: &State, block: u64, into: &mut [u8]) -> io::Result<()> {
        if block == 0 {
            into.fill(0);
            into[..HEAD_BYTES].copy_from_slice(state.head.as_ref());
            return Ok(());
        }
        let expected = Self::entry(state, block);
        if expected == 0 {
            into.fill(0);
            return Ok(());
        }
        self.store.read_at(self.data_offset(block), into)?;
        if block_crc(into) != expected {
            return Err(damaged(format!(
                "block {block} of the catalog fails its checksum"
            )));
        }
        Ok(())
    }

    /// Writes one whole block.
    fn save(&self, state: &mut State, block: u64, content: &[u8]) -> io::Result<()> {
        if block == 0 {
            if content[HEAD_BYTES..].iter().any(|byte| *byte != 0) {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the database's header is larger than the area can keep",
                ));
            }
            state.head.copy_from_slice(&content[..HEAD_BYTES]);
            state.head_dirty = true;
            return Ok(());
        }
        self.store.write_at(self.data_offset(block), content)?;
        self.set_entry(state, block, block_crc(content));
        Ok(())
    }

    fn modify(
        &self,
        state: &mut State,
        block: u64,
        change: impl FnOnce(&mut [u8]),
    ) -> io::Result<()> {
        let mut content = [0; BLOCK_BYTES];
        self.load(state, block, &mut content)?;
        change(&mut content);
        self.save(state, block, &content)
    }

    /// Fills `out` from `offset`; every block is verified.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.lock();
        Self::check_range(&state, offset, out.len())?;
        let mut content = [0; BLOCK_BYTES];
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let from = (at % BLOCK) as usize;
            let count = (BLOCK_BYTES - from).min(out.len() - done);
            let target = &mut out[done..done + count];
            if count == BLOCK_BYTES {
                self.load(&state, at / BLOCK, target)?;
            } else {
                self.load(&state, at / BLOCK, &mut content)?;
                target.copy_from_slice(&content[from..from + count]);
            }
            done += count;
        }
        Ok(())
    }

    /// Writes `data` at `offset`; durable after [`Area::sync`].
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        Self::check_range(&state, offset, data.len())?;
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let from = (at % BLOCK) as usize;
            let count = (BLOCK_BYTES - from).min(data.len() - done);
            let source = &data[done..done + count];
            if count == BLOCK_BYTES {
                self.save(&mut state, at / BLOCK, source)?;
            } else {
                self.modify(&mut state, at / BLOCK, |block| {
                    block[from..from + count].copy_from_slice(source);
                })?;
            }
            done += count;
        }
        Ok(())
    }

    /// Returns once everything written is durable.
    pub fn sync(&self) -> io::Result<()> {
        let mut state = self.lock();
        let wrote_tables = state.tables.iter().any(|table| table.dirty);
        if !wrote_tables && !state.head_dirty {
            return self.store.sync();
        }
        let seq = state.seq + 1;
        for (index, table) in state
            .tables
            .iter_mut()
            .enumerate()
            .filter(|(_, table)| table.dirty)
        {
            table.block.seq = U64::new(seq);
            table.block.crc = U32::new(0);
            table.block.crc = U32::new(crc32c(table.block.as_bytes()));
            let at = 2 + 2 * index as u64 + (1 - table.slot);
            self.store
                .write_at(self.offset + at * BLOCK, table.block.as_bytes())?;
        }
        let mut header = Box::new(HeaderBlock {
            magic: U64::new(HEADER_MAGIC),
            version: U32::new(VERSION),
            crc: U32::new(0),
            seq: U64::new(seq),
            len: U64::new(state.len),
            owner: self.owner,
            root: U32::new(Self::root(&state.tables)),
            wrote_tables: U32::new(u32::from(wrote_tables)),
            blocks: U64::new(self.blocks),
            head: *state.head,
        });
        header.crc = U32::new(crc32c(header.as_bytes()));
        let slot = 1 - state.slot;
        self.store
            .write_at(self.offset + slot * BLOCK, header.as_bytes())?;
        self.store.sync()?;
        // Only now: a sync that failed is tried again into the same slots.
        state.seq = seq;
        state.slot = slot;
        state.head_dirty = false;
        if !wrote_tables {
            // Nothing but the header changed, so the slot before it has no more use: it becomes a
            // copy, durable with the next sync. A header that rots then costs nothing. Best effort.
            let _ = self
                .store
                .write_at(self.offset + (1 - slot) * BLOCK, header.as_bytes());
        }
        for table in state.tables.iter_mut().filter(|table| table.dirty) {
            table.slot = 1 - table.slot;
            table.dirty = false;
        }
        Ok(())
    }
}

/// [`Area`] as redb wants it.
#[derive(Debug, Clone)]
pub(crate) struct AreaBackend(pub(crate) Arc<Area>);

impl redb::StorageBackend for AreaBackend {
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
#[path = "area_tests.rs"]
mod tests;
