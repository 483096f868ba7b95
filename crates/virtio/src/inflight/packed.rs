//! The inflight region of a packed virtqueue.
//!
//! **Design.** An entry per descriptor, in a free list. A chain's descriptors are copied into entries from `free_head` on;
//! its first names the chain. Taken: the copies, `last`, `num`, `counter`, then `inflight`, then `old_free_head`
//! follows `free_head`. Returned: a batch's chains are put in front of the free list; `used_idx` moves; the ring shows them
//! used; `inflight` is cleared; the old values follow. The four fields of used positions lie in one aligned word and are
//! stored as one, so a successor sees them all or none. It asks the ring whether the batch was shown, and then builds
//! the free list again from what is in flight, which needs none of the links that a death can have left half done.

use super::VERSION;
use crate::ring::packed::{Position, Raw};
use crate::ring::{RingError, Window};

const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const FREE_HEAD_AT: usize = 12;
const OLD_FREE_HEAD_AT: usize = 14;
/// used_idx, old_used_idx, used_wrap_counter, old_used_wrap_counter, and two bytes of padding.
const USED_AT: usize = 16;
const ENTRIES_AT: usize = 32;
const ENTRY_BYTES: usize = 32;
/// Within an entry.
const INFLIGHT: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
const ID: usize = 16;
const FLAGS: usize = 18;
const LEN: usize = 20;
const ADDRESS: usize = 24;

/// A chain in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// The entry that names it.
    pub head: u16,
    /// Its buffer identifier.
    pub id: u16,
    /// How many descriptors it has in the ring.
    pub descriptors: u16,
    last: u16,
}

/// See the module's text.
#[derive(Debug)]
pub struct PackedRegion {
    at: Window,
    size: u16,
    counter: u64,
    /// The free list and used positions as they are in the region: what is read there is not believed.
    next: Vec<u16>,
    free_head: u16,
    free: u16,
    used: Position,
    old_used: Position,
    /// The chain that is being taken.
    begun: Option<Taken>,
}

impl PackedRegion {
    /// The region at `at` of a queue of `size`; one that nobody used yet is made ready for a ring whose next used
    /// descriptor is `used`.
    ///
    /// # Errors
    /// It is too short, not aligned, or of another queue.
    pub fn new(at: Window, size: u16, used: Position) -> Result<Self, RingError> {
        if at.len() < ENTRIES_AT + usize::from(size) * ENTRY_BYTES
            || !at.is_aligned(8)
            || !at.is_writable()
        {
            return Err(RingError::Inflight);
        }
        let mut region = Self {
            at: at.clone(),
            size,
            counter: 0,
            next: (1..=size).collect(),
            free_head: 0,
            free: size,
            used,
            old_used: used,
            begun: None,
        };
        match (at.load_u16(VERSION_AT), at.load_u16(SIZE_AT)) {
            (0, _) => {
                at.store_u64(0, 0);
                for entry in 0..size {
                    at.store_u8(Self::entry(entry) + INFLIGHT, 0);
                    at.store_u16(Self::entry(entry) + NEXT, entry + 1);
                }
                at.store_u16(FREE_HEAD_AT, 0);
                at.store_u16(OLD_FREE_HEAD_AT, 0);
                region.store_used();
                at.store_u16(SIZE_AT, size);
                at.store_u16(VERSION_AT, VERSION);
            }
            (VERSION, of) if of == size => region.load_used()?,
            _ => return Err(RingError::Inflight),
        }
        Ok(region)
    }

    #[inline]
    fn entry(entry: u16) -> usize {
        ENTRIES_AT + usize::from(entry) * ENTRY_BYTES
    }

    #[inline]
    fn store_used(&self) {
        let word = u64::from(self.used.index)
            | u64::from(self.old_used.index) << 16
            | u64::from(self.used.wrap) << 32
            | u64::from(self.old_used.wrap) << 40;
        self.at.store_u64(USED_AT, word);
    }

    fn load_used(&mut self) -> Result<(), RingError> {
        let word = self.at.load_u64(USED_AT);
        let position = |index: u64, wrap: u64| Position {
            index: index as u16,
            wrap: wrap as u8 != 0,
        };
        self.used = position(word, word >> 32);
        self.old_used = position(word >> 16, word >> 40);
        if self.used.index >= self.size || self.old_used.index >= self.size {
            return Err(RingError::Inflight);
        }
        Ok(())
    }

    /// How many descriptors may still be taken.
    #[inline]
    pub const fn room(&self) -> u16 {
        self.free
    }

    /// Begins to note a chain.
    #[inline]
    pub fn begin(&mut self) {
        self.begun = None;
    }

    /// Notes a descriptor of it. (More than [`PackedRegion::room`] are not noted.)
    #[inline]
    pub fn note(&mut self, raw: Raw) {
        if self.free == 0 || self.free_head >= self.size {
            return;
        }
        let entry = self.free_head;
        let at = Self::entry(entry);
        self.at.store_u64(at + ADDRESS, raw.address);
        self.at.store_u32(at + LEN, raw.len);
        self.at.store_u16(at + FLAGS, raw.flags);
        self.at.store_u16(at + ID, raw.id);
        let taken = self.begun.get_or_insert(Taken {
            head: entry,
            ..Taken::default()
        });
        taken.id = raw.id;
        taken.descriptors += 1;
        taken.last = entry;
        self.free_head = self.next[usize::from(entry)];
        self.free -= 1;
    }

    /// The chain is noted whole: it is in flight.
    #[inline]
    pub fn taken(&mut self) -> Option<Taken> {
        let taken = self.begun.take()?;
        let at = Self::entry(taken.head);
        self.at.store_u16(at + LAST, taken.last);
        self.at.store_u16(at + NUM, taken.descriptors);
        self.counter += 1;
        self.at.store_u64(at + COUNTER, self.counter);
        self.at.store_u16(FREE_HEAD_AT, self.free_head);
        self.at.store_u8(at + INFLIGHT, 1);
        self.at.store_u16(OLD_FREE_HEAD_AT, self.free_head);
        Some(taken)
    }

    /// A chain is used; the ring is about to show it.
    #[inline]
    pub fn put(&mut self, taken: &Taken) {
        (self.at).store_u16(Self::entry(taken.last) + NEXT, self.free_head);
        self.next[usize::from(taken.last)] = self.free_head;
        self.at.store_u16(FREE_HEAD_AT, taken.head);
        self.free_head = taken.head;
        self.free += taken.descriptors;
        self.used = self.used.plus(taken.descriptors, self.size);
    }

    /// All of a batch is put: before the ring shows it.
    #[inline]
    pub fn close_batch(&mut self) {
        self.store_used();
    }

    /// The ring shows these chains as used.
    #[inline]
    pub fn published(&mut self, batch: &[Taken]) {
        for taken in batch {
            self.at.store_u8(Self::entry(taken.head) + INFLIGHT, 0);
        }
        self.at.store_u16(OLD_FREE_HEAD_AT, self.free_head);
        self.old_used = self.used;
        self.store_used();
    }

    /// The next used descriptor.
    pub const fn used(&self) -> Position {
        self.used
    }

    /// Ends what the dead one had begun. `is_used` says whether the ring shows a descriptor as used in a pass. Gives the
    /// chains in flight, oldest first.
    ///
    /// # Errors
    /// The region makes no sense.
    pub fn recover(
        &mut self,
        is_used: impl FnOnce(Position) -> bool,
    ) -> Result<Vec<Taken>, RingError> {
        if self.used != self.old_used {
            if is_used(self.old_used) {
                // Shown: its entries are those that are before the old head of the free list.
                let until = self.at.load_u16(OLD_FREE_HEAD_AT);
                let mut entry = self.at.load_u16(FREE_HEAD_AT);
                for _ in 0..self.size {
                    if entry == until || entry >= self.size {
                        break;
                    }
                    self.at.store_u8(Self::entry(entry) + INFLIGHT, 0);
                    entry = self.at.load_u16(Self::entry(entry) + NEXT);
                }
                (self.at).store_u16(OLD_FREE_HEAD_AT, self.at.load_u16(FREE_HEAD_AT));
                self.old_used = self.used;
            } else {
                self.used = self.old_used;
            }
            self.store_used();
        }
        let mut in_use = vec![false; usize::from(self.size)];
        let mut chains = Vec::new();
        for head in 0..self.size {
            let at = Self::entry(head);
            if self.at.load_u8(at + INFLIGHT) != 0 {
                let taken = self.in_flight(head, &mut in_use)?;
                chains.push((self.at.load_u64(at + COUNTER), taken));
            }
        }
        self.free_rest(&in_use);
        chains.sort_unstable_by_key(|(counter, taken)| (*counter, taken.head));
        self.counter = chains.last().map_or(0, |last| last.0.min(u64::MAX / 2));
        Ok(chains.into_iter().map(|(_, taken)| taken).collect())
    }

    fn in_flight(&mut self, head: u16, in_use: &mut [bool]) -> Result<Taken, RingError> {
        let descriptors = self.at.load_u16(Self::entry(head) + NUM);
        if descriptors == 0 || descriptors > self.size {
            return Err(RingError::Inflight);
        }
        let mut last = head;
        for i in 0..descriptors {
            if i > 0 {
                let next = self.at.load_u16(Self::entry(last) + NEXT);
                if next >= self.size {
                    return Err(RingError::Inflight);
                }
                self.next[usize::from(last)] = next;
                last = next;
            }
            if std::mem::replace(&mut in_use[usize::from(last)], true) {
                return Err(RingError::Inflight);
            }
        }
        Ok(Taken {
            head,
            id: self.at.load_u16(Self::entry(last) + ID),
            descriptors,
            last,
        })
    }

    /// Makes a free list of whatever is in no chain. What it overwrites, nobody needs; the heads come last.
    fn free_rest(&mut self, in_use: &[bool]) {
        let mut head = self.size;
        self.free = 0;
        for entry in (0..self.size).rev().filter(|e| !in_use[usize::from(*e)]) {
            self.at.store_u16(Self::entry(entry) + NEXT, head);
            self.next[usize::from(entry)] = head;
            head = entry;
            self.free += 1;
        }
        self.free_head = head;
        self.at.store_u16(OLD_FREE_HEAD_AT, head);
        self.at.store_u16(FREE_HEAD_AT, head);
    }

    /// The descriptors of a chain in flight, as they were in the ring.
    pub fn raws(&self, taken: &Taken) -> impl Iterator<Item = Raw> + '_ {
        let mut entry = taken.head;
        (0..taken.descriptors).map(move |_| {
            let at = Self::entry(entry);
            entry = self.next.get(usize::from(entry)).copied().unwrap_or(0);
            Raw {
                address: self.at.load_u64(at + ADDRESS),
                len: self.at.load_u32(at + LEN),
                id: self.at.load_u16(at + ID),
                flags: self.at.load_u16(at + FLAGS),
            }
        })
    }
}
