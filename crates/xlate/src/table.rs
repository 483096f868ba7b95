//! A volume's translation cache: one atomic word for each logical extent.
//!
//! **Design.** Leaves of 512 words (4 KiB), made by the one writer (the engine's control thread)
//! when a grant first needs them; readers (the reactors) see an absent leaf as a miss. A grown volume
//! gets a new table that shares its leaves with the old one; a reader still on the old one at most
//! misses. A hole is never in flight (its zeros are given at once), so a hole may be replaced by a
//! single store; any other change of place is a revoke first ([`crate::drain`]).
//!
//! **Not here:** who may write what; the owner decides, [`crate::grants`] records it.

use crate::types::{ExtentRange, Rights};
use crate::word::Word;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const LEAF_WORDS: u64 = 512;
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
        let leaf = self
            .leaves
            .get((extent / LEAF_WORDS) as usize)
            .and_then(OnceLock::get);
        match leaf {
            // Acquire: what the owner did to the extent before granting it is seen by who uses it.
            Some(leaf) => {
                Word::from_bits(leaf[(extent % LEAF_WORDS) as usize].load(Ordering::Acquire))
            }
            None => Word::MISS,
        }
    }

    /// Stores the translations of `range`, the first being `word` (single writer). What lies past
    /// the end is ignored.
    pub fn install(&self, range: ExtentRange, word: Word) {
        for i in range.first..range.end().min(self.extents) {
            let leaf = self.leaves[(i / LEAF_WORDS) as usize].get_or_init(new_leaf);
            leaf[(i % LEAF_WORDS) as usize]
                .store(word.advance(i - range.first).bits(), Ordering::Release);
        }
    }

    /// Takes rights away in `range`: all of them, or only writing (single writer). The first half
    /// of a revoke; what is in flight is [`crate::drain`]'s business.
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
                Some(Rights::Read) => Word::from_bits(cell.load(Ordering::Relaxed)).read_only(),
                _ => Word::MISS,
            };
            // SeqCst: the mailbox post that follows must not be seen before this store.
            cell.store(new.bits(), Ordering::SeqCst);
            i += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DeviceIndex, ExtentIndex};

    fn word(e: u64) -> Word {
        Word::new(DeviceIndex(1), ExtentIndex(e), Rights::ReadWrite).unwrap()
    }

    #[test]
    fn install_lookup_clear() {
        let t = Table::new(2000);
        assert_eq!(t.lookup(700), Word::MISS);
        t.install(ExtentRange::new(510, 4), word(100));
        assert_eq!(t.lookup(509), Word::MISS);
        assert_eq!(t.lookup(511), word(101));
        assert_eq!(t.lookup(513), word(103));
        assert_eq!(t.lookup(514), Word::MISS);
        t.clear(ExtentRange::new(0, u64::MAX), Some(Rights::Read));
        assert_eq!(t.lookup(511), word(101).read_only());
        t.clear(ExtentRange::new(511, 2), None);
        assert_eq!(t.lookup(510), word(100).read_only());
        assert_eq!(t.lookup(511), Word::MISS);
        assert_eq!(t.lookup(512), Word::MISS);
        t.install(ExtentRange::new(1999, 50), word(1));
        assert_eq!(t.lookup(1999), word(1));
        assert_eq!(t.lookup(2000), Word::MISS);
        assert_eq!(t.lookup(u64::MAX), Word::MISS);
    }

    #[test]
    fn growth_shares_leaves() {
        let old = Table::new(600);
        old.install(ExtentRange::new(3, 1), word(3));
        let new = old.grown(5000);
        assert_eq!(new.lookup(3), word(3));
        new.clear(ExtentRange::new(3, 1), None);
        assert_eq!(
            old.lookup(3),
            Word::MISS,
            "a reader on the old table must see the revoke"
        );
        new.install(ExtentRange::new(4000, 1), word(9));
        assert_eq!(new.lookup(4000), word(9));
    }
}
