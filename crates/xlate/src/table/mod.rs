//! A volume's translation cache: one atomic word for each logical extent.
//!
//! Leaves of 512 words are made on the first grant; an absent leaf is a miss. A grown volume gets a
//! new table that shares the leaves; readers of the old one at most miss. A hole is never in
//! flight, so one store may replace it; other moves need a revoke ([`crate::drain`]).
//!
//! **Writers.** The control thread writes everything. A reactor only claims a preallocated extent
//! in place, by compare-exchange ([`Table::claim`]). Any other word changes only by the control
//! thread, so plain stores suffice. They may overwrite a claimed word: a grant keeps the location,
//! and a revoke drains the write. [`Table::take_back`] is not drained and must know who won: it
//! uses compare-exchange.
//!
//! **Epoch.** A word may be written under only in the volume's present epoch ([`Word::as_of`]).
//! Grown tables share the epoch: a reactor that still reads the old one must see it too.

use crate::types::{ExtentRange, Rights};
use crate::word::{EPOCHS, Word};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const LEAF_WORDS: u64 = 512;
/// Leaves scanned at once: about 100 microseconds.
const MAX_LEAVES: u64 = 1 << 16;
type Leaf = [AtomicU64; LEAF_WORDS as usize];

/// A volume's translations.
#[derive(Debug)]
pub struct Table {
    leaves: Box<[OnceLock<Arc<Leaf>>]>,
    extents: u64,
    epoch: Arc<AtomicU16>,
}

fn new_leaf() -> Arc<Leaf> {
    Arc::new(std::array::from_fn(|_| AtomicU64::new(0)))
}

impl Table {
    /// An empty table: 16 bytes per 512 extents, and 4 KiB per 512 with a grant.
    pub fn new(extents: u64) -> Self {
        let leaves = (0..extents.div_ceil(LEAF_WORDS)).map(|_| OnceLock::new());
        Self {
            leaves: leaves.collect(),
            extents,
            epoch: Arc::default(),
        }
    }

    /// A table for the grown volume, with shared leaves and epoch. Never shrinks.
    pub fn grown(&self, extents: u64) -> Self {
        let extents = extents.max(self.extents);
        let new = Self {
            epoch: self.epoch.clone(),
            ..Self::new(extents)
        };
        for (old, new) in self.leaves.iter().zip(new.leaves.iter()) {
            if let Some(leaf) = old.get() {
                let _ = new.set(leaf.clone());
            }
        }
        new
    }

    /// Logical extents covered.
    pub fn extents(&self) -> u64 {
        self.extents
    }

    /// The volume's present epoch.
    #[inline]
    pub fn epoch(&self) -> u16 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Changes the epoch (control thread), of which 13 bits count: words of others lose the write
    /// right. A drain must follow an advance.
    pub fn set_epoch(&self, epoch: u16) {
        // SeqCst, as in `clear`: the mailbox post that follows must not be seen before this store.
        // A reactor begins slices between two posts. One begun before the post is in flight, so the
        // drain counts it; one begun after it sees the new epoch.
        self.epoch.store(epoch % EPOCHS, Ordering::SeqCst);
    }

    /// The effective translation of logical `extent` ([`Word::as_of`]); a miss past the end.
    #[inline]
    pub fn lookup(&self, extent: u64) -> Word {
        match self.cell(extent) {
            // Acquire: the owner's changes to the extent before the grant are visible, and so is
            // the epoch of the grant.
            Some(cell) => Word::from_bits(cell.load(Ordering::Acquire)).as_of(self.epoch()),
            None => Word::MISS,
        }
    }

    /// The number of extents from `first`, up to `count`, before the first known hole. Reads at
    /// most `most` words and [`MAX_LEAVES`] leaves.
    pub fn no_holes(&self, first: u64, count: u64, most: u64) -> u64 {
        let end = first.saturating_add(count).min(self.extents);
        let (mut at, mut words, mut leaves) = (first, 0, 0);
        while at < end && words < most && leaves < MAX_LEAVES {
            let leaf_ends = (at / LEAF_WORDS + 1) * LEAF_WORDS;
            leaves += 1;
            if self.leaves[(at / LEAF_WORDS) as usize].get().is_none() {
                at = leaf_ends.min(end);
                continue;
            }
            while at < end.min(leaf_ends) && words < most {
                if self.lookup(at).rights() == Some(Rights::Hole) {
                    return at - first;
                }
                at += 1;
                words += 1;
            }
        }
        at - first
    }

    #[inline]
    fn cell(&self, extent: u64) -> Option<&AtomicU64> {
        let leaf = self.leaves.get((extent / LEAF_WORDS) as usize)?.get()?;
        Some(&leaf[(extent % LEAF_WORDS) as usize])
    }

    /// Stores the translations of `range` from `word` on (control thread). Preallocated extents
    /// replace only misses and plain holes.
    pub fn install(&self, range: ExtentRange, word: Word) {
        for i in range.first..range.end().min(self.extents) {
            let leaf = self.leaves[(i / LEAF_WORDS) as usize].get_or_init(new_leaf);
            let cell = &leaf[(i % LEAF_WORDS) as usize];
            // Written data must never become zeros, whatever the owner says.
            if word.is_preallocated() {
                let there = Word::from_bits(cell.load(Ordering::Relaxed));
                if there != Word::MISS && there != Word::HOLE {
                    continue;
                }
            }
            cell.store(word.advance(i - range.first).bits(), Ordering::Release);
        }
    }

    /// Claims a preallocated extent of the present epoch for a first write (any reactor), as `seen`
    /// at the lookup. Returns the effective word. If a freeze comes in between, the claimed word
    /// has the old epoch and allows no write.
    #[cold]
    pub fn claim(&self, extent: u64, seen: Word) -> Word {
        let Some(cell) = self.cell(extent).filter(|_| seen.is_preallocated()) else {
            return self.lookup(extent);
        };
        let seen = seen.with_epoch(self.epoch());
        // No ABA problem: after a take-back, equal bits are a new grant.
        let there = match cell.compare_exchange(
            seen.bits(),
            seen.claimed().bits(),
            Ordering::SeqCst,
            Ordering::SeqCst,
        ) {
            Ok(_) => seen.claimed(),
            Err(there) => Word::from_bits(there),
        };
        there.as_of(self.epoch())
    }

    /// Takes back the unclaimed preallocated extents of the present epoch (control thread); returns
    /// the runs. No drain is needed: writes claim before submission, and reads of unclaimed extents
    /// reach no device.
    pub fn take_back(&self, range: ExtentRange) -> Vec<ExtentRange> {
        let mut taken: Vec<ExtentRange> = Vec::new();
        for i in range.first..range.end().min(self.extents) {
            let Some(cell) = self.cell(i) else { continue };
            let there = cell.load(Ordering::Relaxed);
            let is_ours = Word::from_bits(there).as_of(self.epoch()).is_preallocated()
                && cell
                    .compare_exchange(
                        there,
                        Word::MISS.bits(),
                        Ordering::SeqCst,
                        Ordering::Relaxed,
                    )
                    .is_ok();
            match taken.last_mut() {
                _ if !is_ours => {}
                Some(run) if run.end() == i => run.count += 1,
                _ => taken.push(ExtentRange::new(i, 1)),
            }
        }
        taken
    }

    /// The number of preallocated extents of the present epoch in `range` now.
    pub fn count_preallocated(&self, range: ExtentRange) -> u64 {
        let all = range.first..range.end().min(self.extents);
        all.filter(|i| self.lookup(*i).is_preallocated()).count() as u64
    }

    /// Removes the translations of `range` (control thread), the first half of a revoke.
    pub fn clear(&self, range: ExtentRange) {
        let mut i = range.first;
        let end = range.end().min(self.extents);
        while i < end {
            let Some(leaf) = self.leaves[(i / LEAF_WORDS) as usize].get() else {
                i = (i / LEAF_WORDS + 1) * LEAF_WORDS;
                continue;
            };
            // SeqCst: the mailbox post that follows must not be seen before this store.
            leaf[(i % LEAF_WORDS) as usize].store(Word::MISS.bits(), Ordering::SeqCst);
            i += 1;
        }
    }
}

#[cfg(test)]
mod tests;
