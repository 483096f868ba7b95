//! The grant table: shared memory that lists every grant, written only by the daemon.
//!
//! Boot id and pool id in the file tell a new daemon whether the grants are its predecessor's. An
//! entry is filled first, then made valid by a release-store of its sequence number. Growing an
//! entry is one store. Splits and replacements write the new entry before they shrink or free the
//! old one. A crash in between leaves an extent listed twice; adoption takes the later entry.

use crate::cells;
use crate::shm::SharedMemory;
use crate::types::{ExtentRange, Rights, VolumeId};
use crate::word::Word;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::*};

const MAGIC: u64 = u64::from_le_bytes(*b"FBGRANT1");
/// Layout version of the table.
pub const GRANT_TABLE_VERSION: u64 = 1;

cells! {
    struct Header {
        magic: AtomicU64,
        version: AtomicU64,
        boot_id: [AtomicU64; 2],
        pool_id: [AtomicU64; 2],
        capacity: AtomicU64,
        reserved: [AtomicU64; 505],
    }
}

cells! {
    /// One cache line.
    struct Entry {
        /// 0 is free; otherwise rising with each fill.
        sequence: AtomicU64,
        volume: AtomicU64,
        first: AtomicU64,
        count: AtomicU64,
        /// The first extent's [`Word`].
        word: AtomicU64,
        /// The engine generation that got the grant.
        epoch: AtomicU64,
        /// The commit that the mapping waits for; 0: committed.
        commit_sequence: AtomicU64,
        reserved: AtomicU64,
    }
}

const HEADER_BYTES: usize = 4096;
const _: () = assert!(size_of::<Header>() == HEADER_BYTES && size_of::<Entry>() == 64);

/// A grant of `range`, contiguous from `word` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The volume.
    pub volume: VolumeId,
    /// Its logical extents.
    pub range: ExtentRange,
    /// The first extent's location and rights.
    pub word: Word,
    /// The engine generation.
    pub epoch: u64,
    /// The commit that the mapping waits for; 0: committed.
    pub commit_sequence: u64,
}

impl Grant {
    fn part(&self, range: ExtentRange) -> Grant {
        Grant {
            range,
            word: self.word.advance(range.first - self.range.first),
            ..*self
        }
    }

    fn followed_by(&self, next: &Grant) -> bool {
        // Copies end one by one.
        copied_for(self.volume).is_none()
            && self.volume == next.volume
            && self.range.end() == next.range.first
            && self.word.advance(self.range.count) == next.word
            && self.epoch == next.epoch
    }
}

/// A bit of the volume's number in an entry that names the target of a running copy.
const COPY_TARGET: u64 = 1 << 63;

/// Under which volume the target of a copy for `volume` is listed. It is no grant: nothing may use
/// the extent before the copy has ended.
pub const fn copy_target_of(volume: VolumeId) -> VolumeId {
    VolumeId(volume.0 | COPY_TARGET)
}

/// The volume that a copy is for, if an entry's volume says that it is one.
pub const fn copied_for(volume: VolumeId) -> Option<VolumeId> {
    if volume.0 & COPY_TARGET == 0 {
        None
    } else {
        Some(VolumeId(volume.0 & !COPY_TARGET))
    }
}

/// The table is full: revoke something first.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// The grant table and its index.
#[derive(Debug)]
pub struct GrantTable {
    memory: SharedMemory,
    capacity: usize,
    /// (volume, first) -> slot; grants never overlap.
    index: BTreeMap<(VolumeId, u64), u32>,
    /// By slot; the memory is only written.
    grants: Vec<Grant>,
    free: Vec<usize>,
    next_unused: usize,
    next_sequence: u64,
    /// Where the search for a victim continues.
    hand: (VolumeId, u64),
}

fn id_words(id: &[u8; 16]) -> [u64; 2] {
    let (a, b) = id.split_at(8);
    [a, b].map(|half| u64::from_le_bytes(half.try_into().expect("8 bytes")))
}

impl GrantTable {
    /// Bytes of a table of `capacity` entries.
    pub const fn bytes(capacity: usize) -> usize {
        HEADER_BYTES + capacity * 64
    }

    /// A new, empty table at `path`.
    pub fn create(
        path: &Path,
        capacity: usize,
        boot_id: &[u8; 16],
        pool_id: &[u8; 16],
    ) -> io::Result<Self> {
        // An engine may still map the earlier file: do not truncate it.
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let memory = SharedMemory::create(path, Self::bytes(capacity))?;
        Self::format(memory, capacity, boot_id, pool_id)
    }

    /// As [`GrantTable::create`], in zeroed memory of [`GrantTable::bytes`].
    pub fn format(
        memory: SharedMemory,
        capacity: usize,
        boot_id: &[u8; 16],
        pool_id: &[u8; 16],
    ) -> io::Result<Self> {
        memory.allocate()?;
        if memory.cells::<Entry>(HEADER_BYTES, capacity).is_none() {
            return Err(io::Error::other("the grant table does not fit its memory"));
        }
        let header = &memory.cells::<Header>(0, 1).expect("fits")[0];
        header.version.store(GRANT_TABLE_VERSION, Relaxed);
        header.capacity.store(capacity as u64, Relaxed);
        for i in 0..2 {
            header.boot_id[i].store(id_words(boot_id)[i], Relaxed);
            header.pool_id[i].store(id_words(pool_id)[i], Relaxed);
        }
        header.magic.store(MAGIC, Release);
        Ok(Self {
            memory,
            capacity,
            index: BTreeMap::new(),
            grants: Vec::new(),
            free: Vec::new(),
            next_unused: 0,
            next_sequence: 1,
            hand: (VolumeId(0), 0),
        })
    }

    /// Reads an earlier daemon's table. `Ok(None)`: another boot, pool or layout, so its grants are
    /// void.
    pub fn adopt(
        memory: SharedMemory,
        boot_id: &[u8; 16],
        pool_id: &[u8; 16],
    ) -> io::Result<Option<Self>> {
        let Some([header]) = memory.cells::<Header>(0, 1) else {
            return Ok(None);
        };
        memory.allocate()?;
        let same = |words: &[AtomicU64; 2], id: &[u8; 16]| {
            [words[0].load(Relaxed), words[1].load(Relaxed)] == id_words(id)
        };
        let capacity = header.capacity.load(Relaxed) as usize;
        if header.magic.load(Acquire) != MAGIC
            || header.version.load(Relaxed) != GRANT_TABLE_VERSION
            || !same(&header.boot_id, boot_id)
            || !same(&header.pool_id, pool_id)
            || memory.cells::<Entry>(HEADER_BYTES, capacity).is_none()
        {
            return Ok(None);
        }
        let mut table = Self {
            memory,
            capacity,
            index: BTreeMap::new(),
            grants: Vec::new(),
            free: Vec::new(),
            next_unused: capacity,
            next_sequence: 1,
            hand: (VolumeId(0), 0),
        };
        let mut found = Vec::new();
        for slot in 0..capacity {
            match table.read(slot) {
                (0, _) => table.free.push(slot),
                (sequence, grant) => found.push((sequence, slot, grant)),
            }
        }
        // Later entries win. Entries without overlap stay; of others, the remaining parts are
        // written first.
        found.sort_by_key(|(sequence, ..)| std::cmp::Reverse(*sequence));
        for (sequence, slot, grant) in found {
            table.next_sequence = table.next_sequence.max(sequence.saturating_add(1));
            let gaps = table.gaps(grant.volume, grant.range);
            if gaps == [grant.range] {
                table.enter(slot, grant);
                continue;
            }
            for gap in gaps {
                if table.room() == 0 {
                    return Err(io::Error::other(
                        "the grant table is too full to be compacted",
                    ));
                }
                table.fill(grant.part(gap));
            }
            table.entry(slot).sequence.store(0, Release);
            table.free.push(slot);
        }
        Ok(Some(table))
    }

    fn entry(&self, slot: usize) -> &Entry {
        &self
            .memory
            .cells::<Entry>(HEADER_BYTES, self.capacity)
            .expect("checked when made")[slot]
    }

    fn read(&self, slot: usize) -> (u64, Grant) {
        let e = self.entry(slot);
        let sequence = e.sequence.load(Acquire);
        let grant = Grant {
            volume: VolumeId(e.volume.load(Relaxed)),
            range: ExtentRange::new(e.first.load(Relaxed), e.count.load(Relaxed)),
            word: Word::from_bits(e.word.load(Relaxed)),
            epoch: e.epoch.load(Relaxed),
            commit_sequence: e.commit_sequence.load(Relaxed),
        };
        (sequence, grant)
    }

    fn gaps(&self, volume: VolumeId, range: ExtentRange) -> Vec<ExtentRange> {
        let mut gaps = Vec::new();
        let mut at = range.first;
        for (_, grant) in self.overlapping(volume, range) {
            if at < grant.range.first {
                gaps.push(ExtentRange::new(at, grant.range.first - at));
            }
            at = at.max(grant.range.end());
        }
        if at < range.end() {
            gaps.push(ExtentRange::new(at, range.end() - at));
        }
        gaps
    }

    /// The last grant before `end`: only it can overlap a range that ends there.
    fn last_before(&self, volume: VolumeId, end: u64) -> Option<(usize, &Grant)> {
        let (key, slot) = self.index.range(..(volume, end)).next_back()?;
        let slot = *slot as usize;
        (key.0 == volume).then(|| (slot, &self.grants[slot]))
    }

    /// Whether any part of `range` is granted.
    pub fn has_any(&self, volume: VolumeId, range: ExtentRange) -> bool {
        let last = self.last_before(volume, range.end());
        last.is_some_and(|(_, grant)| grant.range.overlaps(&range))
    }

    fn overlapping(&self, volume: VolumeId, range: ExtentRange) -> Vec<(usize, Grant)> {
        if !self.has_any(volume, range) {
            return Vec::new();
        }
        let before = self.last_before(volume, range.first);
        let from = self
            .index
            .range((volume, range.first)..(volume, range.end()));
        let from = from.map(|(_, slot)| (*slot as usize, &self.grants[*slot as usize]));
        before
            .into_iter()
            .chain(from)
            .filter(|(_, grant)| grant.range.overlaps(&range))
            .map(|(slot, grant)| (slot, *grant))
            .collect()
    }

    fn enter(&mut self, slot: usize, grant: Grant) {
        if self.grants.len() <= slot {
            // Skipped slots are never read.
            self.grants.resize(slot + 1, grant);
        }
        self.grants[slot] = grant;
        self.index
            .insert((grant.volume, grant.range.first), slot as u32);
    }

    /// The grants in `range`, in order, clipped to it.
    pub fn granted(&self, volume: VolumeId, range: ExtentRange) -> Vec<Grant> {
        let clip = |g: Grant| {
            let first = g.range.first.max(range.first);
            g.part(ExtentRange::new(
                first,
                g.range.end().min(range.end()) - first,
            ))
        };
        self.overlapping(volume, range)
            .into_iter()
            .map(|(_, g)| clip(g))
            .collect()
    }

    fn room(&self) -> usize {
        self.free.len() + (self.capacity - self.next_unused)
    }

    /// Records a grant and replaces overlapped ones, before the engine is told. May need three
    /// entries.
    pub fn insert(&mut self, grant: Grant) -> Result<(), Full> {
        if self.insert_new(grant)? {
            return Ok(());
        }
        let replaced = self.overlapping(grant.volume, grant.range);
        let slot = self.write(grant);
        for (old, prior) in replaced {
            self.cut(old, prior, grant.range);
        }
        self.enter(slot, grant);
        Ok(())
    }

    /// As `insert`; false, without effect, if the range has grants.
    pub fn insert_new(&mut self, grant: Grant) -> Result<bool, Full> {
        if grant.range.count == 0 {
            return Ok(true);
        }
        if self.room() < 3 {
            return Err(Full);
        }
        let Some((slot, &prior)) = self.last_before(grant.volume, grant.range.end()) else {
            self.fill(grant);
            return Ok(true);
        };
        if prior.range.overlaps(&grant.range) {
            return Ok(false);
        }
        if !prior.followed_by(&grant) {
            self.fill(grant);
            return Ok(true);
        }
        let joined = Grant {
            range: ExtentRange::new(prior.range.first, prior.range.count + grant.range.count),
            commit_sequence: prior.commit_sequence.max(grant.commit_sequence),
            ..prior
        };
        self.entry(slot)
            .commit_sequence
            .store(joined.commit_sequence, Relaxed);
        self.entry(slot).count.store(joined.range.count, Release);
        self.grants[slot] = joined;
        Ok(true)
    }

    /// Writes an entry without indexing it, if there is room.
    fn write(&mut self, grant: Grant) -> usize {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.next_unused += 1;
            self.next_unused - 1
        });
        let e = self.entry(slot);
        e.volume.store(grant.volume.0, Relaxed);
        e.first.store(grant.range.first, Relaxed);
        e.count.store(grant.range.count, Relaxed);
        e.word.store(grant.word.bits(), Relaxed);
        e.epoch.store(grant.epoch, Relaxed);
        e.commit_sequence.store(grant.commit_sequence, Relaxed);
        e.sequence.store(self.next_sequence, Release);
        self.next_sequence += 1;
        slot
    }

    fn fill(&mut self, grant: Grant) {
        let slot = self.write(grant);
        self.enter(slot, grant);
    }

    /// Takes `range` out of one entry; the rear part, written first, may need an entry.
    fn cut(&mut self, slot: usize, grant: Grant, range: ExtentRange) {
        if grant.range.end() > range.end() {
            let rest = ExtentRange::new(range.end(), grant.range.end() - range.end());
            self.fill(grant.part(rest));
        }
        let key = (grant.volume, grant.range.first);
        if grant.range.first < range.first {
            let head = grant.part(ExtentRange::new(
                grant.range.first,
                range.first - grant.range.first,
            ));
            self.entry(slot).count.store(head.range.count, Release);
            self.grants[slot] = head;
        } else {
            self.entry(slot).sequence.store(0, Release);
            self.free.push(slot);
            self.index.remove(&key);
        }
    }

    /// Removes `range`, after its revoke. [`Full`]: no room for an entry's rear part.
    pub fn remove(&mut self, volume: VolumeId, range: ExtentRange) -> Result<(), Full> {
        let taken = self.overlapping(volume, range);
        // The rear part of an entry needs an entry.
        let leaves_a_rest = |(_, g): &(usize, Grant)| g.range.end() > range.end();
        if self.room() == 0 && taken.iter().any(leaves_a_rest) {
            return Err(Full);
        }
        for (slot, grant) in taken {
            self.cut(slot, grant, range);
        }
        Ok(())
    }

    /// Every grant, in order of volume and extent.
    pub fn iter(&self) -> impl Iterator<Item = &Grant> + '_ {
        self.index.values().map(|slot| &self.grants[*slot as usize])
    }

    /// The grants after `place` in that order.
    pub fn iter_after(&self, place: (VolumeId, u64)) -> impl Iterator<Item = &Grant> + '_ {
        use std::ops::Bound::{Excluded, Unbounded};
        let later = self.index.range((Excluded(place), Unbounded));
        later.map(|(_, slot)| &self.grants[*slot as usize])
    }

    /// The highest commit sequence in the table.
    pub fn max_commit_sequence(&self) -> u64 {
        self.iter().map(|g| g.commit_sequence).max().unwrap_or(0)
    }

    /// A grant to revoke when the table is full, round-robin.
    pub fn victim(&mut self) -> Option<Grant> {
        use std::ops::Bound::{Excluded, Unbounded};
        let next = self
            .index
            .range((Excluded(self.hand), Unbounded))
            .next()
            .or_else(|| self.index.iter().next());
        let (&key, &slot) = next?;
        self.hand = key;
        Some(self.grants[slot as usize])
    }

    /// Entries in use, and capacity.
    pub fn usage(&self) -> (usize, usize) {
        (self.index.len(), self.capacity)
    }

    /// The mapping, for passing its descriptor on.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Whether `rights` are granted on all of `range`.
    pub fn covers(&self, volume: VolumeId, range: ExtentRange, rights: Rights) -> bool {
        let granted = self.granted(volume, range);
        granted.iter().map(|g| g.range.count).sum::<u64>() == range.count
            && granted.iter().all(|g| g.word.rights() >= Some(rights))
    }
}

#[cfg(test)]
mod tests;
