//! The inflight region of a split virtqueue, with an entry for each head.
//!
//! To take a chain, `counter` and `inflight` are stored. To return a batch, its entries are linked
//! from `last_batch_head`. Then the used index moves, `inflight` is cleared, and `used_idx`
//! follows. If the indexes differ, a successor clears the batch's entries.

use super::VERSION;
use crate::ring::{RingError, Window};

const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_INDEX_AT: usize = 14;
const ENTRIES_AT: usize = 16;
const ENTRY_BYTES: usize = 16;
const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// See the module.
#[derive(Debug)]
pub struct SplitRegion {
    at: Window,
    size: u16,
    counter: u64,
    last_batch_head: u16,
}

impl SplitRegion {
    /// The region of a queue of `size`, initialised if new.
    pub fn new(at: Window, size: u16) -> Result<Self, RingError> {
        if at.len() < ENTRIES_AT + usize::from(size) * ENTRY_BYTES
            || !at.is_aligned(8)
            || !at.is_writable()
        {
            return Err(RingError::Inflight);
        }
        match (at.load_u16(VERSION_AT), at.load_u16(SIZE_AT)) {
            (0, _) => {
                at.store_u64(0, 0);
                at.store_u16(SIZE_AT, size);
                at.store_u16(VERSION_AT, VERSION);
            }
            (VERSION, of) if of == size => {}
            _ => return Err(RingError::Inflight),
        }
        Ok(Self {
            at: at.clone(),
            size,
            counter: 0,
            last_batch_head: at.load_u16(LAST_BATCH_HEAD_AT),
        })
    }

    #[inline]
    fn entry(head: u16) -> usize {
        ENTRIES_AT + usize::from(head) * ENTRY_BYTES
    }

    /// Takes a chain.
    #[inline]
    pub fn taken(&mut self, head: u16) {
        self.counter += 1;
        self.at.store_u64(Self::entry(head) + COUNTER, self.counter);
        self.at.store_u8(Self::entry(head) + INFLIGHT, 1);
    }

    /// Returns a chain, before the used index moves.
    #[inline]
    pub fn put(&mut self, head: u16) {
        (self.at).store_u16(Self::entry(head) + NEXT, self.last_batch_head);
        self.at.store_u16(LAST_BATCH_HEAD_AT, head);
        self.last_batch_head = head;
    }

    /// Ends a batch after the used index has moved.
    #[inline]
    pub fn published(&mut self, batch: &[u16], used_index: u16) {
        for head in batch {
            self.at.store_u8(Self::entry(*head) + INFLIGHT, 0);
        }
        self.at.store_u16(USED_INDEX_AT, used_index);
    }

    /// Completes a dead device's last step; returns the chains in flight, oldest first.
    pub fn recover(&mut self, used_index: u16) -> Vec<u16> {
        let batch = used_index.wrapping_sub(self.at.load_u16(USED_INDEX_AT));
        // A larger difference means that the ring was restarted, and nothing was in flight.
        if batch <= self.size {
            let mut head = self.last_batch_head;
            for _ in 0..batch {
                if head >= self.size {
                    break;
                }
                self.at.store_u8(Self::entry(head) + INFLIGHT, 0);
                head = self.at.load_u16(Self::entry(head) + NEXT);
            }
        }
        self.at.store_u16(USED_INDEX_AT, used_index);
        let mut heads: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.at.load_u8(Self::entry(*head) + INFLIGHT) != 0)
            .map(|head| (self.at.load_u64(Self::entry(head) + COUNTER), head))
            .collect();
        heads.sort_unstable();
        // A hostile region may hold any number; then only the order is lost.
        self.counter = heads.last().map_or(0, |last| last.0.min(u64::MAX / 2));
        heads.into_iter().map(|(_, head)| head).collect()
    }
}
