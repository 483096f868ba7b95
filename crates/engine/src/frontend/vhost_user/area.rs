//! A vhost-user client's part of the VM file, for a successor.
//!
//! A head holds the session, the inflight region's place and the blamed command. A table tells
//! which bytes each request in flight may touch at devices. A guest cannot write these, so it
//! cannot hide device I/O. A record is made before a request reaches a device, and cleared when the
//! core returns it. A successor treats all values as hostile.

use crate::frontend::vm::file::VmFile;
use forebay_virtio::ring::MAX_QUEUE_SIZE;
use forebay_virtio::vhost_user::message::InflightArea;
use forebay_virtio::vhost_user::session::SESSION_WORDS;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The last saved copy of the session, + 1.
const SAVED: usize = 0;
/// 0: no inflight region; 1: an internal one; 2: the client's.
const INFLIGHT_KIND: usize = 1;
const INFLIGHT_QUEUES: usize = 2;
const INFLIGHT_SIZE: usize = 3;
const INFLIGHT_OFFSET: usize = 4;
/// (slot + 1) << 8 | deaths.
const BLAMED: usize = 5;
/// Two copies of the session: one is valid while the other is stored.
const SESSION: usize = 16;
const HEAD_WORDS: usize = 1024;
const _: () = assert!(SESSION + 2 * SESSION_WORDS <= HEAD_WORDS && HEAD_WORDS * 8 <= RECORDS_AT);

const RECORDS_AT: usize = 64 << 10;
const RECORD_WORDS: usize = 2;
pub(super) const BYTES: usize = RECORDS_AT + (1 << 16) * RECORD_WORDS * 8;

/// The device bytes that a request may touch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub offset_bytes: u64,
    pub len_bytes: u64,
    pub write: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct InflightPlace {
    pub area: InflightArea,
    /// An internal one, not requested by the client.
    pub ours: bool,
}

pub(super) struct InflightRegion<'a> {
    head: &'a [AtomicU64],
    records: &'a [AtomicU64],
}

impl<'a> InflightRegion<'a> {
    pub(super) fn of(file: &'a VmFile) -> Self {
        let table = |at, count| file.area::<AtomicU64>(at, count).unwrap_or_default();
        Self {
            head: table(0, HEAD_WORDS),
            records: table(RECORDS_AT, (1 << 16) * RECORD_WORDS),
        }
    }

    fn get(&self, word: usize) -> u64 {
        self.head.get(word).map_or(0, |word| word.load(Acquire))
    }

    fn set(&self, word: usize, value: u64) {
        if let Some(word) = self.head.get(word) {
            word.store(value, Release);
        }
    }

    pub(super) fn save(&self, session: &[u64; SESSION_WORDS]) {
        let copy = usize::from(self.get(SAVED) == 1);
        for (at, word) in session.iter().enumerate() {
            self.set(SESSION + copy * SESSION_WORDS + at, *word);
        }
        self.set(SAVED, copy as u64 + 1);
    }

    pub(super) fn saved(&self) -> Option<[u64; SESSION_WORDS]> {
        let from = match self.get(SAVED) {
            1 => SESSION,
            2 => SESSION + SESSION_WORDS,
            _ => return None,
        };
        Some(std::array::from_fn(|at| self.get(from + at)))
    }

    pub(super) fn set_inflight(&self, place: Option<&InflightPlace>) {
        // No region while it changes: no ring is running.
        self.set(INFLIGHT_KIND, 0);
        let Some(InflightPlace { area, ours }) = place else {
            return;
        };
        let both = u64::from(area.num_queues) | u64::from(area.queue_size) << 16;
        self.set(INFLIGHT_QUEUES, both);
        self.set(INFLIGHT_SIZE, area.mmap_size);
        self.set(INFLIGHT_OFFSET, area.mmap_offset);
        self.set(INFLIGHT_KIND, if *ours { 1 } else { 2 });
    }

    pub(super) fn inflight(&self) -> Option<InflightPlace> {
        let both = self.get(INFLIGHT_QUEUES);
        let ours = match self.get(INFLIGHT_KIND) {
            1 => true,
            2 => false,
            _ => return None,
        };
        Some(InflightPlace {
            area: InflightArea {
                mmap_size: self.get(INFLIGHT_SIZE),
                mmap_offset: self.get(INFLIGHT_OFFSET),
                num_queues: both as u16,
                queue_size: (both >> 16) as u16,
            },
            ours,
        })
    }

    pub(super) fn blamed(&self) -> Option<(u16, u8)> {
        let word = self.get(BLAMED);
        let slot = u16::try_from((word >> 8).checked_sub(1)?).ok()?;
        Some((slot, word as u8))
    }

    pub(super) fn set_blamed(&self, blamed: Option<(u16, u8)>) {
        let word = blamed.map_or(0, |(slot, deaths)| {
            (u64::from(slot) + 1) << 8 | u64::from(deaths)
        });
        self.set(BLAMED, word);
    }

    #[inline]
    fn record_words(&self, slot: u16) -> Option<&[AtomicU64]> {
        let at = usize::from(slot) * RECORD_WORDS;
        self.records.get(at..at + RECORD_WORDS)
    }

    #[inline]
    pub(super) fn begin(&self, slot: u16, record: &Record) {
        if let Some([offset, what]) = self.record_words(slot) {
            offset.store(record.offset_bytes, Release);
            let word = record.len_bytes << 2 | u64::from(record.write) << 1 | 1;
            what.store(word, Release);
        }
    }

    #[inline]
    pub(super) fn end(&self, slot: u16) {
        if let Some([_, what]) = self.record_words(slot) {
            what.store(0, Release);
        }
    }

    /// A queue's requests that a dead engine had begun, by number.
    pub(super) fn records(&self, queue: u16) -> impl Iterator<Item = (u16, Record)> {
        let of_queue = (0..MAX_QUEUE_SIZE).map(move |tag| super::slot_of(queue, tag));
        of_queue.filter_map(|slot| {
            let [offset, what] = self.record_words(slot)? else {
                return None;
            };
            let word = what.load(Relaxed);
            (word & 1 == 1).then(|| {
                let record = Record {
                    offset_bytes: offset.load(Relaxed),
                    len_bytes: word >> 2,
                    write: word & 2 != 0,
                };
                (slot, record)
            })
        })
    }
}
