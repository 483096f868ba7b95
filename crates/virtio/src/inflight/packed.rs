//! The inflight region of a packed virtqueue.
//!
//! To take a chain, its descriptors are copied into free entries from `free_head` on; then `last`,
//! `num`, `counter`, `inflight` and `old_free_head` are stored. To return a batch, its chains go to
//! the front of the free list, and `used_idx` moves. Then the ring shows them, `inflight` is
//! cleared, and the old values follow. The used fields share a word, so a successor sees all or
//! none. It asks the ring whether the batch was shown, then rebuilds the free list from chains in
//! flight: links may be incomplete.

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
    /// Its first entry.
    pub head: u16,
    /// Buffer identifier.
    pub id: u16,
    /// Number of descriptors in the ring.
    pub descriptors: u16,
    last: u16,
}

/// See the module.
#[derive(Debug)]
pub struct PackedRegion {
    at: Window,
    size: u16,
    counter: u64,
    /// Free list and used positions, because shared memory isn't trusted.
    next: Vec<u16>,
    free_head: u16,
    free: u16,
    used: Position,
    old_used: Position,
    begun: Option<Taken>,
}

impl PackedRegion {
    /// The region of a queue of `size`. A new one is initialised for a ring whose next used
    /// descriptor is `used`.
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

    /// Free descriptors.
    #[inline]
    pub const fn room(&self) -> u16 {
        self.free
    }

    /// Begins a chain.
    #[inline]
    pub fn begin(&mut self) {
        self.begun = None;
    }

    /// Adds a descriptor, if there is [`PackedRegion::room`].
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

    /// Ends the chain: it is in flight.
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

    /// Returns a chain before the ring shows it.
    #[inline]
    pub fn put(&mut self, taken: &Taken) {
        (self.at).store_u16(Self::entry(taken.last) + NEXT, self.free_head);
        self.next[usize::from(taken.last)] = self.free_head;
        self.at.store_u16(FREE_HEAD_AT, taken.head);
        self.free_head = taken.head;
        self.free += taken.descriptors;
        self.used = self.used.plus(taken.descriptors, self.size);
    }

    /// Ends a batch, before the ring shows it.
    #[inline]
    pub fn close_batch(&mut self) {
        self.store_used();
    }

    /// Ends a batch that the ring shows.
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

    /// Completes a dead device's last step; returns the chains in flight, oldest first. `is_used`
    /// asks the ring whether it shows a descriptor as used.
    pub fn recover(
        &mut self,
        is_used: impl FnOnce(Position) -> bool,
    ) -> Result<Vec<Taken>, RingError> {
        if self.used != self.old_used {
            if is_used(self.old_used) {
                // Shown: the batch's entries precede the old head of the free list.
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

    /// Puts all other entries into a free list. The heads are stored last.
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

    /// The descriptors of a chain in flight.
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
