//! The grant table: what the owner has granted, in shared memory, the only truth about it.
//!
//! **Design.** Written by the daemon alone; a file stamped with boot id and pool id, so that a new
//! daemon finds what its predecessor granted, even when both processes died. An entry is filled
//! first and then made valid by a release-store of its sequence number; it is never half there.
//! Growing an entry is one store of its count. A range taken out of the middle of an entry first
//! adds the part behind, then shortens the entry; what replaces an entry is written before that goes.
//! After a crash between the two an extent is there twice, and adoption takes the later entry. Contiguous grants merge. Bounded: when it is full, the
//! owner revokes something ([`GrantTable::victim`]).
//!
//! **Not here:** who may be granted what (the pool), and the messages.

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
    /// The file's first 4 KiB.
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
    /// One entry, one cache line.
    struct Entry {
        /// 0 is free; otherwise a number that rises with each fill.
        sequence: AtomicU64,
        volume: AtomicU64,
        first: AtomicU64,
        count: AtomicU64,
        /// The first extent's translation ([`Word`]).
        word: AtomicU64,
        /// The engine generation that it was given to.
        epoch: AtomicU64,
        /// 0 once its mapping is committed when granted; otherwise the commit that it waits for.
        commit_sequence: AtomicU64,
        reserved: AtomicU64,
    }
}

const HEADER_BYTES: usize = 4096;
const _: () = assert!(size_of::<Header>() == HEADER_BYTES && size_of::<Entry>() == 64);

/// One grant: `range` of `volume` lies at `word` and on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Whose.
    pub volume: VolumeId,
    /// Its logical extents.
    pub range: ExtentRange,
    /// The first one's place and rights.
    pub word: Word,
    /// The engine generation.
    pub epoch: u64,
    /// See the layout: 0 when committed.
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
        self.volume == next.volume
            && self.range.end() == next.range.first
            && self.word.advance(self.range.count) == next.word
            && self.epoch == next.epoch
    }
}

/// The table is full: revoke something first.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// See the module's text.
#[derive(Debug)]
pub struct GrantTable {
    memory: SharedMemory,
    capacity: usize,
    /// (volume, first) -> slot; grants never overlap.
    index: BTreeMap<(VolumeId, u64), u32>,
    /// What stands in each slot that was ever used. The memory is only written, never read back.
    grants: Vec<Grant>,
    free: Vec<usize>,
    next_unused: usize,
    next_sequence: u64,
    /// Where the search for a victim goes on.
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
        // A file of an earlier owner may still be mapped by an engine: never truncate it in place.
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let memory = SharedMemory::create(path, Self::bytes(capacity))?;
        Self::format(memory, capacity, boot_id, pool_id)
    }

    /// The same in memory that is all zeros and large enough ([`GrantTable::bytes`]).
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

    /// Reads a table that an earlier daemon left. `Ok(None)`: it is of another boot, pool or layout,
    /// so nothing that it says is outstanding. Overlapping entries are kept once.
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
        // Later entries first: where two overlap, the later one says what stands. An entry that
        // overlaps nothing stays where it is; of another, the parts that stand are written first.
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
                        "the grant table is too full to be put in order",
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

    /// The parts of `range` that no grant covers.
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

    /// The last grant of the volume that begins before `end`. It overlaps a range that ends there, or
    /// none does, because grants don't overlap each other.
    fn last_before(&self, volume: VolumeId, end: u64) -> Option<(usize, &Grant)> {
        let (key, slot) = self.index.range(..(volume, end)).next_back()?;
        let slot = *slot as usize;
        (key.0 == volume).then(|| (slot, &self.grants[slot]))
    }

    /// Whether anything of `range` is granted.
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

    /// Notes what stands in a slot.
    fn enter(&mut self, slot: usize, grant: Grant) {
        if self.grants.len() <= slot {
            // What fills slots between is never looked at.
            self.grants.resize(slot + 1, grant);
        }
        self.grants[slot] = grant;
        self.index
            .insert((grant.volume, grant.range.first), slot as u32);
    }

    /// What is granted of `range`, in order.
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

    /// Entries that can still be filled.
    fn room(&self) -> usize {
        self.free.len() + (self.capacity - self.next_unused)
    }

    /// Records a grant, in place of whatever was there. Done before the engine is told. The new
    /// entry is there before what it replaces goes.
    ///
    /// # Errors
    /// [`Full`]: up to three entries may be needed and aren't there.
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

    /// The same where nothing of it is granted yet; false where something is, and nothing is recorded.
    ///
    /// # Errors
    /// See [`GrantTable::insert`].
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
        // It begins where it did.
        self.grants[slot] = joined;
        Ok(true)
    }

    /// Writes an entry without entering it in the index; there must be room.
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

    /// Takes `range` out of one entry: what is behind it is written first, then it is shortened or
    /// freed. At most one entry is needed.
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

    /// Takes `range` out: after the engine has acknowledged its revoke.
    ///
    /// # Errors
    /// [`Full`]: an entry reaches past the range, and there is no room for the part behind.
    pub fn remove(&mut self, volume: VolumeId, range: ExtentRange) -> Result<(), Full> {
        let taken = self.overlapping(volume, range);
        // Whatever reaches past the range's end leaves a part behind, which takes an entry.
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

    /// Those that come after a place in that order, which need not be listed.
    pub fn iter_after(&self, place: (VolumeId, u64)) -> impl Iterator<Item = &Grant> + '_ {
        use std::ops::Bound::{Excluded, Unbounded};
        let later = self.index.range((Excluded(place), Unbounded));
        later.map(|(_, slot)| &self.grants[*slot as usize])
    }

    /// The highest commit sequence that any entry carries.
    pub fn max_commit_sequence(&self) -> u64 {
        self.iter().map(|g| g.commit_sequence).max().unwrap_or(0)
    }

    /// A grant to revoke when the table is full: each in turn, as a clock's hand goes.
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

    /// Entries in use and room for.
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
