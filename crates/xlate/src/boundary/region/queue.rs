//! A queue's record: a TCP connection.
//!
//! **Design.** What never changes is in the first cache line, under a check. What changes with the
//! stream are positions in it. `taken` is how far PDUs are taken: a word stored after everything that a
//! PDU changes, so that a PDU which a dead engine was in the middle of is taken again, or is known from
//! its command's record. Received bytes beyond it are kept in one of two buffers in turn.
//!
//! **Not here:** when each word is stored (the engine's `tcp::record`).

use super::check::{Seed, check_all};
use crate::cells;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Values of [`QueueRecord::used`].
pub mod queue_use {
    /// Nobody's.
    pub const FREE: u64 = 0;
    /// Being made: its socket is still a newcomer's.
    pub const MADE: u64 = 1;
    /// It serves.
    pub const LIVE: u64 = 2;
    /// Its socket is closed or to be closed; commands may still be at devices.
    pub const LEAVING: u64 = 3;
}

cells! {
    /// A queue: 192 bytes.
    pub struct QueueRecord {
        /// [`queue_use`]; stored last when it is made.
        pub used: AtomicU64,
        /// Controller slot.
        pub controller: AtomicU64,
        /// Queue id (0 for admin), entries, whether the host does without SQHD: [`QueueIdentity`].
        pub identity: AtomicU64,
        /// What ICReq and ICResp agreed on: the engine's `tcp::record` knows how.
        pub params: AtomicU64,
        /// The socket's number.
        pub socket: AtomicU64,
        /// The reactor that serves it.
        pub reactor: AtomicU64,
        /// Its pair of buffers for kept bytes.
        pub keep: AtomicU64,
        /// Over the six words before.
        pub check: AtomicU64,

        /// Commands taken, the Connect too.
        pub number: AtomicU64,
        /// The received stream's position up to which PDUs are taken.
        pub taken: AtomicU64,
        /// Received bytes that are kept: [`Kept`].
        pub kept: AtomicU64,
        /// Where in the stream the bytes of each of the two buffers begin.
        pub kept_at: [AtomicU64; 2],
        /// Where the transmitted stream is when nothing is published.
        pub tx_at: AtomicU64,
        /// Items published and not all sent: [`super::item::Span`].
        pub tx_span: AtomicU64,
        reserved: AtomicU64,

        /// While `data_begin <= taken < data_end`, the stream is within the data of a PDU.
        pub data_begin: AtomicU64,
        /// The position after that data and its digest.
        pub data_end: AtomicU64,
        /// Whose data: [`InData`].
        pub data_slot: AtomicU64,
        /// The last answer to a command that got no slot: the queue's number with it,
        pub odd_number: AtomicU64,
        /// the transmitted stream's position after the answer,
        pub odd_tx: AtomicU64,
        /// and the received stream's after the command. Stored in this order.
        pub odd_taken: AtomicU64,
        reserved_too: [AtomicU64; 2],
    }
}
const _: () = assert!(size_of::<QueueRecord>() == 192);

/// What a queue is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueIdentity {
    /// Queue id, 0 for admin.
    pub qid: u16,
    /// Entries.
    pub entries: u16,
    /// The host does without SQHD.
    pub no_flow_control: bool,
}

impl QueueIdentity {
    /// As a word.
    pub const fn word(self) -> u64 {
        self.qid as u64 | (self.entries as u64) << 16 | (self.no_flow_control as u64) << 32
    }

    /// What a word says.
    pub const fn of_word(word: u64) -> Self {
        Self {
            qid: word as u16,
            entries: (word >> 16) as u16,
            no_flow_control: word >> 32 & 1 == 1,
        }
    }
}

/// The words of a queue that never change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueConstants {
    /// Controller slot.
    pub controller: u32,
    /// What it is.
    pub identity: QueueIdentity,
    /// What ICReq and ICResp agreed on.
    pub params: u64,
    /// The socket's number.
    pub socket: u64,
    /// The reactor.
    pub reactor: u32,
    /// Its pair of buffers for kept bytes.
    pub keep: u32,
}

impl QueueConstants {
    const fn words(&self) -> [u64; 6] {
        [
            self.controller as u64,
            self.identity.word(),
            self.params,
            self.socket,
            self.reactor as u64,
            self.keep as u64,
        ]
    }
}

/// The word `kept`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Kept {
    /// Which of the two buffers.
    pub which: u8,
    /// How many bytes.
    pub bytes: u32,
}

impl Kept {
    /// As a word.
    #[inline]
    pub const fn word(self) -> u64 {
        (self.which as u64 & 1) << 32 | self.bytes as u64
    }

    /// What a word says.
    pub const fn of_word(word: u64) -> Self {
        Self {
            which: (word >> 32) as u8 & 1,
            bytes: word as u32,
        }
    }
}

/// The words `data_begin`, `data_end` and `data_slot`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InData {
    /// The stream position of the first byte of data.
    pub begin: u64,
    /// The position after the data and its digest.
    pub end: u64,
    /// The command.
    pub slot: u16,
    /// Where in the command's data it belongs.
    pub offset_bytes: u32,
    /// The last four bytes are a digest.
    pub digest: bool,
}

const QUEUES: u64 = 1;

impl QueueRecord {
    /// Stores what never changes.
    pub fn put_constants(&self, key: u64, index: u32, constants: &QueueConstants) {
        let words = constants.words();
        for (to, from) in self.constant_cells().into_iter().zip(words) {
            to.store(from, Release);
        }
        let seed = Seed::whole(key, QUEUES, index);
        self.check
            .store(check_all(seed, words.into_iter()), Release);
    }

    /// What never changes, if it is what was stored for this queue.
    pub fn constants(&self, key: u64, index: u32) -> Option<QueueConstants> {
        let words = self.constant_cells().map(|cell| cell.load(Relaxed));
        let seed = Seed::whole(key, QUEUES, index);
        let [controller, identity, params, socket, reactor, keep] = words;
        let constants = QueueConstants {
            controller: controller as u32,
            identity: QueueIdentity::of_word(identity),
            params,
            socket,
            reactor: reactor as u32,
            keep: keep as u32,
        };
        let good = check_all(seed, words.into_iter()) == self.check.load(Relaxed)
            && constants.words() == words;
        good.then_some(constants)
    }

    fn constant_cells(&self) -> [&AtomicU64; 6] {
        [
            &self.controller,
            &self.identity,
            &self.params,
            &self.socket,
            &self.reactor,
            &self.keep,
        ]
    }

    /// Says that a PDU's data follows. Nothing counts before `taken` is in it.
    pub fn put_data(&self, data: &InData) {
        let slot = u64::from(data.slot)
            | u64::from(data.digest) << 16
            | u64::from(data.offset_bytes) << 32;
        self.data_begin.store(data.begin, Release);
        self.data_end.store(data.end, Release);
        self.data_slot.store(slot, Release);
    }

    /// The data that the stream is within at position `taken`, if it is.
    pub fn data(&self, taken: u64) -> Option<InData> {
        let (begin, end) = (self.data_begin.load(Acquire), self.data_end.load(Acquire));
        let slot = self.data_slot.load(Acquire);
        (begin <= taken && taken < end).then_some(InData {
            begin,
            end,
            slot: slot as u16,
            offset_bytes: (slot >> 32) as u32,
            digest: slot >> 16 & 1 == 1,
        })
    }
}
