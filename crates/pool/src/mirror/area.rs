//! A catalog area: one copy of the catalog's blocks on part of a device, each under a checksum.
//!
//! An area has blocks of 4 KiB:
//!
//! ```text
//! block 0, 1        header, two slots in turn
//! block 2 ..        checksum tables, two slots each, in turn
//! then              data: logical block i of the file is data block i
//! ```
//!
//! The header has the file's length, its block 0 (which redb overwrites in place), the [`Lineage`]
//! and the root, a checksum over all tables' checksums. A table has the CRC32C of 1018 data blocks;
//! 0 means never written, zeros. So even a stale block is noticed.
//!
//! **Crashes.** A sync writes tables and header into their older slots, which swap after the
//! device's sync. A header whose root does not match the tables is of an unfinished sync, and the
//! other slot counts. If its sync wrote no table, nothing raced with it, and a mismatch is damage.
//! redb ends each commit with such a sync; its header goes to both slots.

use crate::{
    mirror::lineage::Lineage,
    store::{BLOCK_BYTES, BlockStore},
};
use forebay_xlate::types::DeviceIndex;
use std::{fmt, io, sync::Arc};
use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

pub(crate) const BLOCK: u64 = BLOCK_BYTES as u64;
pub(crate) const ENTRIES: usize = 1018;
/// The stored part of logical block 0; redb uses 320 bytes.
pub(crate) const HEAD_BYTES: usize = BLOCK_BYTES - 72 - size_of::<Lineage>();
/// No device. A pool's 256th device just gets no copy.
pub(crate) const NO_DEVICE: u8 = u8::MAX;
const HEADER_SLOTS: u64 = 2;
const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"FBcatHdr");
const TABLE_MAGIC: u32 = u32::from_le_bytes(*b"FBct");
const VERSION: u32 = 3;
const READ_BLOCKS: u64 = 128;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
struct HeaderBlock {
    magic: U64,
    version: U32,
    /// CRC32C of the block with this field zero.
    crc: U32,
    seq: U64,
    len: U64,
    /// The pool's id.
    owner: [u8; 16],
    /// CRC32C over the CRCs of all tables.
    root: U32,
    /// 1: the sync wrote tables too.
    wrote_tables: U32,
    blocks: U64,
    lineage: Lineage,
    devices: [u8; 2],
    /// 1: no other copy has this epoch.
    alone: u8,
    unused: [u8; 5],
    head: [u8; HEAD_BYTES],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
pub(crate) struct TableBlock {
    magic: U32,
    index: U32,
    pub(crate) seq: U64,
    unused: U32,
    /// CRC32C of the block with this field zero.
    pub(crate) crc: U32,
    pub(crate) entries: [U32; ENTRIES],
}

const _: () = assert!(size_of::<HeaderBlock>() == BLOCK_BYTES);
const _: () = assert!(size_of::<TableBlock>() == BLOCK_BYTES);

fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Never 0, which means "never written".
pub(crate) fn block_crc(block: &[u8]) -> u32 {
    crc32c(block).max(1)
}

pub(crate) fn damaged(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl TableBlock {
    pub(crate) fn empty(index: u64) -> Box<Self> {
        let mut block = Box::new(Self::new_zeroed());
        block.magic = U32::new(TABLE_MAGIC);
        // Each table covers 4 MiB.
        block.index = U32::new(index as u32);
        block
    }

    /// Makes it the version of sync `seq`.
    pub(crate) fn seal(&mut self, seq: u64) {
        self.seq = U64::new(seq);
        self.crc = U32::new(0);
        self.crc = U32::new(crc32c(self.as_bytes()));
    }

    fn is_sound(&mut self, index: u64) -> bool {
        let crc = self.crc.get();
        self.crc = U32::new(0);
        let sound = self.magic.get() == TABLE_MAGIC
            && u64::from(self.index.get()) == index
            && crc32c(self.as_bytes()) == crc;
        self.crc = U32::new(crc);
        sound
    }
}

pub(crate) fn root<'a>(tables: impl Iterator<Item = &'a TableBlock>) -> u32 {
    let crcs: Vec<u8> = tables
        .flat_map(|table| table.crc.get().to_le_bytes())
        .collect();
    crc32c(&crcs)
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct AreaHeader {
    pub(crate) seq: u64,
    pub(crate) len: u64,
    pub(crate) root: u32,
    pub(crate) wrote_tables: bool,
    pub(crate) lineage: Lineage,
    pub(crate) devices: [u8; 2],
    pub(crate) alone: bool,
    pub(crate) head: Box<[u8; HEAD_BYTES]>,
}

#[derive(Clone)]
pub(crate) struct Area {
    pub(crate) store: Arc<dyn BlockStore>,
    pub(crate) device: DeviceIndex,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    owner: [u8; 16],
    /// Data blocks, including the unused block 0.
    pub(crate) blocks: u64,
    pub(crate) tables: u64,
}

impl fmt::Debug for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Area")
            .field("device", &self.device)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

pub(crate) struct AreaContent {
    pub(crate) header: AreaHeader,
    pub(crate) header_slot: u64,
    pub(crate) tables: Vec<FoundTable>,
    /// Bad blocks that were not needed.
    pub(crate) bad: Vec<String>,
}

#[derive(Clone)]
pub(crate) struct FoundTable {
    pub(crate) block: Box<TableBlock>,
    pub(crate) slot: u64,
    /// The other slot is bad, or of an unfinished sync: it is written next.
    pub(crate) orphan: bool,
}

pub(crate) enum Unusable {
    Blank,
    /// Another pool's, or of another size.
    Other,
    Version(u32),
    Damaged(io::Error),
}

#[derive(Default)]
struct Versions {
    /// Those that verify, newest first, each with its slot.
    sound: Vec<(u64, Box<TableBlock>)>,
    bad: Vec<u64>,
}

#[derive(Default)]
struct Headers {
    sound: Vec<(u64, AreaHeader)>,
    bad: Vec<u64>,
}

impl Area {
    pub(crate) fn new(
        store: Arc<dyn BlockStore>,
        device: DeviceIndex,
        offset: u64,
        bytes: u64,
        owner: [u8; 16],
    ) -> io::Result<Self> {
        let all = bytes / BLOCK;
        let rest = all.saturating_sub(HEADER_SLOTS);
        // Each table takes two slots and covers ENTRIES data blocks.
        let tables = rest.div_ceil(ENTRIES as u64 + 2);
        let blocks = rest.saturating_sub(2 * tables).min(tables * ENTRIES as u64);
        if blocks < 4 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a catalog area of {bytes} bytes is too small"),
            ));
        }
        Ok(Self {
            store,
            device,
            offset,
            bytes,
            owner,
            blocks,
            tables,
        })
    }

    pub(crate) fn is(&self, other: &Area) -> bool {
        self.device == other.device && self.offset == other.offset
    }

    pub(crate) fn same_store(&self, other: &Area) -> bool {
        Arc::ptr_eq(&self.store, &other.store)
    }

    fn table_offset(&self, index: u64, slot: u64) -> u64 {
        self.offset + (HEADER_SLOTS + 2 * index + slot) * BLOCK
    }

    pub(crate) fn data_offset(&self, block: u64) -> u64 {
        self.offset + (HEADER_SLOTS + 2 * self.tables + block) * BLOCK
    }

    pub(crate) fn write_table(&self, index: u64, slot: u64, table: &TableBlock) -> io::Result<()> {
        self.store
            .write_at(self.table_offset(index, slot), table.as_bytes())
    }

    pub(crate) fn write_header(&self, slot: u64, header: &AreaHeader) -> io::Result<()> {
        let mut block = Box::new(HeaderBlock {
            magic: U64::new(HEADER_MAGIC),
            version: U32::new(VERSION),
            crc: U32::new(0),
            seq: U64::new(header.seq),
            len: U64::new(header.len),
            owner: self.owner,
            root: U32::new(header.root),
            wrote_tables: U32::new(u32::from(header.wrote_tables)),
            blocks: U64::new(self.blocks),
            lineage: header.lineage.clone(),
            devices: header.devices,
            alone: u8::from(header.alone),
            unused: [0; 5],
            head: *header.head,
        });
        block.crc = U32::new(crc32c(block.as_bytes()));
        self.store
            .write_at(self.offset + slot * BLOCK, block.as_bytes())
    }

    pub(crate) fn write_data(&self, block: u64, content: &[u8]) -> io::Result<()> {
        self.store.write_at(self.data_offset(block), content)
    }

    /// Reads unverified data blocks.
    pub(crate) fn read_data(&self, block: u64, into: &mut [u8]) -> io::Result<()> {
        self.store.read_at(self.data_offset(block), into)
    }

    pub(crate) fn clear(&self) -> io::Result<()> {
        self.retire()?;
        let zeros = vec![0; READ_BLOCKS as usize * BLOCK_BYTES];
        let mut at = 0;
        while at < 2 * self.tables {
            let count = (2 * self.tables - at).min(READ_BLOCKS);
            self.store.write_at(
                self.table_offset(0, at),
                &zeros[..count as usize * BLOCK_BYTES],
            )?;
            at += count;
        }
        self.store.sync()
    }

    /// Zeros the headers, durably, so that it is no copy.
    pub(crate) fn retire(&self) -> io::Result<()> {
        self.store
            .write_at(self.offset, &[0; HEADER_SLOTS as usize * BLOCK_BYTES])?;
        self.store.sync()
    }

    fn read_headers(&self) -> Result<Headers, Unusable> {
        let (mut headers, mut blank, mut other) = (Headers::default(), 0, false);
        let (mut version, mut failed) = (None, None);
        for slot in 0..HEADER_SLOTS {
            let mut block = Box::new(HeaderBlock::new_zeroed());
            if let Err(error) = self
                .store
                .read_at(self.offset + slot * BLOCK, block.as_mut_bytes())
            {
                failed = Some(error);
                headers.bad.push(slot);
                continue;
            }
            if block.as_bytes().iter().all(|byte| *byte == 0) {
                blank += 1;
                continue;
            }
            let crc = block.crc.get();
            block.crc = U32::new(0);
            if block.magic.get() != HEADER_MAGIC || crc != crc32c(block.as_bytes()) {
                headers.bad.push(slot);
                continue;
            }
            if block.version.get() != VERSION {
                version = Some(block.version.get());
            } else if block.owner != self.owner || block.blocks.get() != self.blocks {
                other = true;
            } else if block.len.get() <= self.blocks * BLOCK {
                headers.sound.push((
                    slot,
                    AreaHeader {
                        seq: block.seq.get(),
                        len: block.len.get(),
                        root: block.root.get(),
                        wrote_tables: block.wrote_tables.get() != 0,
                        lineage: block.lineage.clone(),
                        devices: block.devices,
                        alone: block.alone != 0,
                        head: Box::new(block.head),
                    },
                ));
            }
        }
        if !headers.sound.is_empty() {
            headers
                .sound
                .sort_by_key(|(_, header)| std::cmp::Reverse(header.seq));
            return Ok(headers);
        }
        Err(match (failed, version) {
            (_, Some(version)) => Unusable::Version(version),
            (Some(error), _) => Unusable::Damaged(error),
            _ if other => Unusable::Other,
            _ if blank == HEADER_SLOTS => Unusable::Blank,
            _ => Unusable::Damaged(damaged("both headers are unreadable")),
        })
    }

    /// The newest readable header, whatever its tables.
    pub(crate) fn newest_header(&self) -> Option<AreaHeader> {
        let headers = self.read_headers().ok()?.sound;
        headers.into_iter().next().map(|(_, header)| header)
    }

    /// Its state after the last finished or interrupted sync.
    pub(crate) fn read(&self) -> Result<AreaContent, Unusable> {
        let headers = self.read_headers()?;
        let versions = self.read_tables();
        let bad_headers = headers.bad.iter().map(|slot| format!("header {slot}"));
        let bad_tables = versions.iter().enumerate().flat_map(|(index, table)| {
            let bad = table.bad.iter();
            bad.map(move |slot| format!("checksum table {index}, copy {slot},"))
        });
        let bad = bad_headers.chain(bad_tables).collect();
        for (header_slot, header) in headers.sound {
            if let Some(tables) = Self::pick(&versions, &header) {
                return Ok(AreaContent {
                    header,
                    header_slot,
                    tables,
                    bad,
                });
            }
            if !header.wrote_tables {
                break;
            }
        }
        Err(Unusable::Damaged(damaged(
            "the checksum tables do not match the header",
        )))
    }

    fn read_tables(&self) -> Vec<Versions> {
        let mut all: Vec<Versions> = (0..self.tables).map(|_| Versions::default()).collect();
        let mut buffer = vec![0; READ_BLOCKS as usize * BLOCK_BYTES];
        let mut at = 0;
        while at < 2 * self.tables {
            let count = (2 * self.tables - at).min(READ_BLOCKS);
            let bytes = &mut buffer[..count as usize * BLOCK_BYTES];
            let whole = self.store.read_at(self.table_offset(0, at), bytes).is_ok();
            for (nth, content) in bytes.chunks_exact_mut(BLOCK_BYTES).enumerate() {
                let (index, slot) = ((at + nth as u64) / 2, (at + nth as u64) % 2);
                // One unreadable block must not hide its neighbours.
                if !whole
                    && self
                        .store
                        .read_at(self.table_offset(index, slot), content)
                        .is_err()
                {
                    all[index as usize].bad.push(slot);
                    continue;
                }
                let mut block = Box::new(TableBlock::new_zeroed());
                block.as_mut_bytes().copy_from_slice(content);
                if block.is_sound(index) {
                    all[index as usize].sound.push((slot, block));
                } else if content.iter().any(|byte| *byte != 0) {
                    all[index as usize].bad.push(slot);
                }
            }
            at += count;
        }
        for versions in &mut all {
            versions
                .sound
                .sort_by_key(|(_, block)| std::cmp::Reverse(block.seq.get()));
        }
        all
    }

    fn pick(versions: &[Versions], header: &AreaHeader) -> Option<Vec<FoundTable>> {
        let mut picked = Vec::with_capacity(versions.len());
        for versions in versions {
            let (slot, block) = versions
                .sound
                .iter()
                .find(|(_, block)| block.seq.get() <= header.seq)?;
            // The next sync overwrites it, before its number can pass for a finished sync.
            let newer = |(_, block): &(u64, Box<TableBlock>)| block.seq.get() > header.seq;
            let orphan = versions.sound.iter().any(newer) || !versions.bad.is_empty();
            picked.push(FoundTable {
                block: block.clone(),
                slot: *slot,
                orphan,
            });
        }
        let found = root(picked.iter().map(|table| table.block.as_ref()));
        (found == header.root).then_some(picked)
    }
}
