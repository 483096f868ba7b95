//! A volume's translation cache: one atomic word for each logical extent.
//!
//! **Design.** Leaves of 512 words (4 KiB), made by the engine's control thread when a grant first needs
//! them; the reactors see an absent leaf as a miss. A grown volume gets a new table that shares its
//! leaves with the old one; a reader still on the old one at most misses. A hole is never in flight (its
//! zeros are given at once), so a hole may be replaced by a single store; any other change of place is a
//! revoke first ([`crate::drain`]).
//!
//! **Two writers.** The control thread writes everything; a reactor makes one change only, from a place
//! ahead to the claimed word of the same place ([`Table::claim`]), by compare-exchange. So what the
//! control thread loads and is not ahead stays what it is until it stores itself, and plain stores do,
//! wherever it may overwrite a claimed word too: when it grants the same place, and when it revokes
//! (the write that has claimed is drained like any other). Only [`Table::take_back`], after which nobody
//! drains, must know who won: it compares and exchanges.
//!
//! **Not here:** who may write what; the owner decides, [`crate::grants`] records it.

use crate::types::{ExtentRange, Rights};
use crate::word::Word;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const LEAF_WORDS: u64 = 512;
/// Leaves that are looked at in one go: some 100 microseconds.
const MAX_LEAVES: u64 = 1 << 16;
type Leaf = [AtomicU64; LEAF_WORDS as usize];

/// See the module's text.
#[derive(Debug)]
pub struct Table {
    leaves: Box<[OnceLock<Arc<Leaf>>]>,
    extents: u64,
}

fn new_leaf() -> Arc<Leaf> {
    Arc::new(std::array::from_fn(|_| AtomicU64::new(0)))
}

impl Table {
    /// An empty table for a volume of `extents` logical extents: 16 bytes for each 512 extents, and
    /// 4 KiB more for each 512 that get a grant.
    pub fn new(extents: u64) -> Self {
        let leaves = (0..extents.div_ceil(LEAF_WORDS)).map(|_| OnceLock::new());
        Self {
            leaves: leaves.collect(),
            extents,
        }
    }

    /// A table for the grown volume, sharing this one's leaves. Never shrinks.
    pub fn grown(&self, extents: u64) -> Self {
        let extents = extents.max(self.extents);
        let new = Self::new(extents);
        for (old, new) in self.leaves.iter().zip(new.leaves.iter()) {
            if let Some(leaf) = old.get() {
                let _ = new.set(leaf.clone());
            }
        }
        new
    }

    /// Logical extents that it covers.
    pub fn extents(&self) -> u64 {
        self.extents
    }

    /// The translation of logical `extent`. Past the end it is a miss.
    #[inline]
    pub fn lookup(&self, extent: u64) -> Word {
        match self.cell(extent) {
            // Acquire: what the owner did to the extent before granting it is seen by who uses it.
            Some(cell) => Word::from_bits(cell.load(Ordering::Acquire)),
            None => Word::MISS,
        }
    }

    /// How many extents from `first` on, up to `count`, are no known holes. At most `most` words are looked at, and
    /// [`MAX_LEAVES`] leaves: nothing is known of a leaf that is not there, without a look at its words.
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

    /// Stores the translations of `range`, the first being `word` (control thread). What lies past the
    /// end is ignored. Places ahead go only where nothing is granted, or a hole without a place.
    pub fn install(&self, range: ExtentRange, word: Word) {
        for i in range.first..range.end().min(self.extents) {
            let leaf = self.leaves[(i / LEAF_WORDS) as usize].get_or_init(new_leaf);
            let cell = &leaf[(i % LEAF_WORDS) as usize];
            // What has been written must not read as zeros again, whatever the owner says.
            if word.is_ahead() {
                let there = Word::from_bits(cell.load(Ordering::Relaxed));
                if there != Word::MISS && there != Word::HOLE {
                    continue;
                }
            }
            cell.store(word.advance(i - range.first).bits(), Ordering::Release);
        }
    }

    /// Claims a place ahead for a first write (any reactor); `seen` is the word that was looked up. Gives
    /// back what is there now: the claimed word, or what came between.
    #[cold]
    pub fn claim(&self, extent: u64, seen: Word) -> Word {
        let Some(cell) = self.cell(extent).filter(|_| seen.is_ahead()) else {
            return self.lookup(extent);
        };
        let claimed = seen.claimed();
        // It is the place that counts, not when it was seen: were the word taken back and granted again
        // in between, the same bits would be the new grant.
        match cell.compare_exchange(
            seen.bits(),
            claimed.bits(),
            Ordering::SeqCst,
            Ordering::SeqCst,
        ) {
            Ok(_) => claimed,
            Err(there) => Word::from_bits(there),
        }
    }

    /// Takes back what is still ahead in `range` (control thread): the runs that were. Nothing needs draining: a write claims before it is submitted, and then its word is not
    /// ahead any more; a read of a place ahead goes to no device.
    pub fn take_back(&self, range: ExtentRange) -> Vec<ExtentRange> {
        let mut taken: Vec<ExtentRange> = Vec::new();
        for i in range.first..range.end().min(self.extents) {
            let Some(cell) = self.cell(i) else { continue };
            let there = cell.load(Ordering::Relaxed);
            let is_ours = Word::from_bits(there).is_ahead()
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

    /// How many places of `range` are ahead at this moment.
    pub fn count_ahead(&self, range: ExtentRange) -> u64 {
        let all = range.first..range.end().min(self.extents);
        all.filter(|i| self.lookup(*i).is_ahead()).count() as u64
    }

    /// Takes rights away in `range`: all of them, or only writing (control thread); a place ahead goes
    /// either way. The first half of a revoke; what is in flight is [`crate::drain`]'s business.
    pub fn clear(&self, range: ExtentRange, keep: Option<Rights>) {
        let mut i = range.first;
        let end = range.end().min(self.extents);
        while i < end {
            let Some(leaf) = self.leaves[(i / LEAF_WORDS) as usize].get() else {
                i = (i / LEAF_WORDS + 1) * LEAF_WORDS;
                continue;
            };
            let cell = &leaf[(i % LEAF_WORDS) as usize];
            let new = match keep {
                Some(Rights::Read) => {
                    let there = Word::from_bits(cell.load(Ordering::Relaxed));
                    // Claimed meanwhile, it may lose more than it must: then the next read asks.
                    if there.is_ahead() {
                        Word::MISS
                    } else {
                        there.read_only()
                    }
                }
                _ => Word::MISS,
            };
            // SeqCst: the mailbox post that follows must not be seen before this store.
            cell.store(new.bits(), Ordering::SeqCst);
            i += 1;
        }
    }
}

#[cfg(test)]
mod tests;
