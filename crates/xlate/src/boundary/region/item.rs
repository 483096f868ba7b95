//! A connection's transmit items; the engine's `frontend::nvme_tcp::record` writes them.
//!
//! A connection with data to send has a ring of [`MAX_ITEMS`]; `tx_span` ([`Span`]) publishes
//! items. Each has its position in the stream, so the kernel's count of accepted bytes tells a
//! successor which were sent. Header bytes lie in the engine's memory file.

use super::check::{BufferRef, Seed, check};
use super::command::Damaged;
use crate::cells;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Items of a list: a power of two, never all in use.
pub const MAX_ITEMS: usize = 1024;
/// Header bytes of a list.
pub const HEADER_BYTES: usize = 64 * 1024;
const MAX_DATA_BYTES: u32 = 1 << 20;
const PAGE_SHIFT: u32 = 12;
/// The word `data`: the lowest byte is unused, then the buffer's page.
const PLACE_SHIFT: u32 = 8;
const PLACE: u64 = 0xffff_ff00;
/// Then the bytes.
const DATA_BYTES_SHIFT: u32 = 32;
/// The slot of an item that ends no command.
pub const NO_SLOT: u16 = u16::MAX;

cells! {
    /// An item: 32 bytes.
    pub struct ItemRecord {
        /// Its position in the transmitted stream.
        pub start: AtomicU64,
        /// Header offset and length, and the ended command: [`Item`].
        pub header: AtomicU64,
        /// Offset and length of its data; 0: none.
        pub data: AtomicU64,
        /// Over the words above.
        pub check: AtomicU64,
    }
}
const _: () = assert!(size_of::<ItemRecord>() == 32);

/// A decoded item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    /// Its position in the transmitted stream.
    pub start: u64,
    /// The header's offset in the list's header ring.
    pub header_at: u16,
    /// Header bytes.
    pub header_bytes: u16,
    /// The command that ends when this is sent, or [`NO_SLOT`].
    pub ends: u16,
    /// The buffer sent after the header, up to `data_bytes`.
    pub buffer: Option<BufferRef>,
    /// Bytes sent from the buffer.
    pub data_bytes: u32,
}

impl Item {
    /// The stream position after it.
    pub const fn end(&self) -> u64 {
        self.start
            .wrapping_add(self.header_bytes as u64)
            .wrapping_add(self.data_bytes as u64)
    }

    /// The word `header`.
    #[inline]
    pub const fn header_word(at: u16, bytes: u16, ends: u16) -> u64 {
        at as u64 | (bytes as u64) << 16 | (ends as u64) << 32
    }

    /// The word `data`, for at least 1 byte of a buffer at page `place >> 8`.
    #[inline]
    pub const fn data_word(place: u32, data_bytes: u32) -> u64 {
        place as u64 | (data_bytes as u64) << DATA_BYTES_SHIFT
    }

    /// Its words.
    #[inline]
    pub const fn words(&self) -> [u64; 3] {
        let header = Self::header_word(self.header_at, self.header_bytes, self.ends);
        let data = match self.buffer {
            Some(buffer) if self.data_bytes > 0 => {
                buffer.offset_bytes >> PAGE_SHIFT << PLACE_SHIFT & PLACE
                    | (self.data_bytes as u64) << DATA_BYTES_SHIFT
            }
            _ => 0,
        };
        [self.start, header, data]
    }
}

impl ItemRecord {
    /// Stores an unpublished item at `place` in the list.
    #[inline]
    pub fn put(&self, seed: Seed, place: u16, [start, at, data]: [u64; 3]) {
        // Release keeps the program's order.
        self.start.store(start, Release);
        self.header.store(at, Release);
        self.data.store(data, Release);
        let all = check(seed, place, [start, at, data]);
        self.check.store(all, Release);
    }

    /// The recorded item, bounded but unchecked.
    pub fn get(&self) -> Item {
        let (header, data) = (self.header.load(Relaxed), self.data.load(Relaxed));
        let data_bytes = (data >> DATA_BYTES_SHIFT) as u32;
        Item {
            start: self.start.load(Relaxed),
            header_at: header as u16,
            header_bytes: (header >> 16) as u16,
            ends: (header >> 32) as u16,
            buffer: (data_bytes > 0).then_some(BufferRef {
                offset_bytes: (data & PLACE) >> PLACE_SHIFT << PAGE_SHIFT,
                len_bytes: data_bytes,
            }),
            data_bytes,
        }
    }

    /// The recorded item, if its check is good.
    pub fn sound(&self, seed: Seed, place: u16) -> Result<Item, Damaged> {
        let item = self.get();
        let words = [
            self.start.load(Relaxed),
            self.header.load(Relaxed),
            self.data.load(Relaxed),
        ];
        let [start, at, data] = words;
        let good = check(seed, place, [start, at, data]) == self.check.load(Relaxed)
            && item.data_bytes <= MAX_DATA_BYTES;
        if good { Ok(item) } else { Err(Damaged) }
    }
}

/// The word `tx_span` of a queue: published, unsent items.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// The list.
    pub list: u16,
    /// The first one: a counter, modulo [`MAX_ITEMS`] the index.
    pub first: u16,
    /// The end, also a counter; never equal to `first`.
    pub tail: u16,
}

impl Span {
    /// As a word; 0 is none.
    #[inline]
    pub const fn word(self) -> u64 {
        (self.list as u64 + 1) << 32 | (self.first as u64) << 16 | self.tail as u64
    }

    /// Decodes a word; `Ok(None)`: nothing is published.
    pub fn of_word(word: u64, lists: usize) -> Result<Option<Self>, Damaged> {
        if word == 0 {
            return Ok(None);
        }
        let list = (word >> 32).checked_sub(1).filter(|l| *l < lists as u64);
        let span = Self {
            list: list.ok_or(Damaged)? as u16,
            first: (word >> 16) as u16,
            tail: word as u16,
        };
        match span.count() {
            1..=MAX_ITEMS => Ok(Some(span)),
            _ => Err(Damaged),
        }
    }

    /// Number of items.
    pub const fn count(self) -> usize {
        self.tail.wrapping_sub(self.first) as usize
    }

    /// Their indexes in the list, in order.
    pub fn places(self) -> impl Iterator<Item = u16> {
        (0..self.count()).map(move |i| self.first.wrapping_add(i as u16) % MAX_ITEMS as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_come_back_or_are_noticed() {
        let cell = || AtomicU64::new(0);
        let record = ItemRecord {
            start: cell(),
            header: cell(),
            data: cell(),
            check: cell(),
        };
        let seed = Seed::items(5, 77);
        let item = Item {
            start: u64::MAX - 3,
            header_at: 65000,
            header_bytes: 28,
            ends: 255,
            buffer: Some(BufferRef {
                offset_bytes: 123 << 12,
                len_bytes: 512 << 10,
            }),
            data_bytes: 512 << 10,
        };
        record.put(seed, 1023, item.words());
        let read = |seed, place| record.sound(seed, place);
        assert_eq!(read(seed, 1023), Ok(item));
        assert!(read(seed, 1022).is_err() && read(Seed::items(5, 78), 1023).is_err());
        for cell in [&record.start, &record.header, &record.data, &record.check] {
            for bit in 0..64 {
                cell.fetch_xor(1 << bit, Relaxed);
                assert!(read(seed, 1023).is_err());
                cell.fetch_xor(1 << bit, Relaxed);
            }
        }
    }

    #[test]
    fn a_span_is_bounded() {
        let span = Span {
            list: 4095,
            first: 65_535,
            tail: 2,
        };
        assert_eq!(Span::of_word(span.word(), 4096), Ok(Some(span)));
        assert_eq!(span.places().collect::<Vec<_>>(), [1023, 0, 1]);
        assert!(Span::of_word(span.word(), 4095).is_err());
        assert_eq!(Span::of_word(0, 4096), Ok(None));
        let empty = Span {
            tail: 65_535,
            ..span
        };
        assert!(Span::of_word(empty.word(), 4096).is_err());
        let long = Span {
            first: 0,
            tail: 1025,
            ..span
        };
        assert!(Span::of_word(long.word(), 4096).is_err());
    }
}
