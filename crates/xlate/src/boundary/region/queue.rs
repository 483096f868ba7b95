//! A queue's record: a TCP connection. The engine's `frontend::nvme_tcp::record` writes it.
//!
//! Constants lie in the first cache line; other words are stream positions. `taken` is stored after
//! everything that a PDU changes. A PDU that a dead engine was processing is taken again, or known
//! from its command's record. Received bytes beyond `taken` are kept in two alternating buffers.

use super::check::{Seed, check_all};
use crate::cells;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Values of [`QueueRecord::used`].
pub mod queue_use {
    /// Free.
    pub const FREE: u64 = 0;
    /// In handshake.
    pub const MADE: u64 = 1;
    /// In use.
    pub const LIVE: u64 = 2;
    /// Closed or closing; commands may still be at devices.
    pub const LEAVING: u64 = 3;
}

cells! {
    /// A queue: 192 bytes.
    pub struct QueueRecord {
        /// [`queue_use`]; stored last in the handshake.
        pub used: AtomicU64,
        /// Controller slot.
        pub controller: AtomicU64,
        /// [`QueueIdentity`].
        pub identity: AtomicU64,
        /// Negotiated by ICReq and ICResp (the engine's `frontend::nvme_tcp::record`).
        pub params: AtomicU64,
        /// The socket's number.
        pub socket: AtomicU64,
        /// The reactor that serves it.
        pub reactor: AtomicU64,
        /// Its pair of buffers for kept bytes.
        pub keep: AtomicU64,
        /// Over the six words before.
        pub check: AtomicU64,

        /// Commands taken, including the Connect.
        pub number: AtomicU64,
        /// The received stream's position after the last PDU taken.
        pub taken: AtomicU64,
        /// Received bytes kept: [`Kept`].
        pub kept: AtomicU64,
        /// The stream position at which each buffer's bytes begin.
        pub kept_at: [AtomicU64; 2],
        /// The transmitted stream's position when nothing is published.
        pub tx_at: AtomicU64,
        /// Items published but not fully sent: [`super::item::Span`].
        pub tx_span: AtomicU64,
        reserved: AtomicU64,

        /// While `data_begin <= taken < data_end`, a PDU's data follows.
        pub data_begin: AtomicU64,
        /// The position after that data and its digest.
        pub data_end: AtomicU64,
        /// The command: [`InData`].
        pub data_slot: AtomicU64,
        /// The last command answered without a slot: its number.
        pub odd_number: AtomicU64,
        /// The transmitted stream's position after the answer.
        pub odd_tx: AtomicU64,
        /// The received stream's position after the command. Stored in this order.
        pub odd_taken: AtomicU64,
        reserved_too: [AtomicU64; 2],
    }
}
const _: () = assert!(size_of::<QueueRecord>() == 192);

/// A queue's identity.
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

    /// Decodes a word.
    pub const fn of_word(word: u64) -> Self {
        Self {
            qid: word as u16,
            entries: (word >> 16) as u16,
            no_flow_control: word >> 32 & 1 == 1,
        }
    }
}

/// The constant words of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueConstants {
    /// Controller slot.
    pub controller: u32,
    /// Its identity.
    pub identity: QueueIdentity,
    /// Negotiated by ICReq and ICResp.
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
    /// Number of bytes.
    pub bytes: u32,
}

impl Kept {
    /// As a word.
    #[inline]
    pub const fn word(self) -> u64 {
        (self.which as u64 & 1) << 32 | self.bytes as u64
    }

    /// Decodes a word.
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
    /// The stream position of the first data byte.
    pub begin: u64,
    /// The position after the data and its digest.
    pub end: u64,
    /// The command.
    pub slot: u16,
    /// Offset in the command's data.
    pub offset_bytes: u32,
    /// The last four bytes are a digest.
    pub digest: bool,
}

const QUEUES: u64 = 1;

impl QueueRecord {
    /// Stores the constants.
    pub fn put_constants(&self, key: u64, index: u32, constants: &QueueConstants) {
        let words = constants.words();
        for (to, from) in self.constant_cells().into_iter().zip(words) {
            to.store(from, Release);
        }
        let seed = Seed::whole(key, QUEUES, index);
        self.check
            .store(check_all(seed, words.into_iter()), Release);
    }

    /// The constants, if their check is good.
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

    /// Announces a PDU's data, for positions `taken` inside it.
    pub fn put_data(&self, data: &InData) {
        let slot = u64::from(data.slot)
            | u64::from(data.digest) << 16
            | u64::from(data.offset_bytes) << 32;
        self.data_begin.store(data.begin, Release);
        self.data_end.store(data.end, Release);
        self.data_slot.store(slot, Release);
    }

    /// The data around position `taken`, if any.
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
