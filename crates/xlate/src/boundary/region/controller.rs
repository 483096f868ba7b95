//! A controller's record: a host's association with an export or with discovery.
//!
//! The changing state has two copies. A new state overwrites the older one; its `sequence` is
//! stored last, and it holds from the admin queue's transmit position `valid_from` on. A successor
//! takes the newest copy whose response is published. A command without a published response is
//! executed again on the state before it.

use super::check::{Seed, check_all};
use crate::cells;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Words of a controller's state.
pub const STATE_WORDS: usize = 56;

cells! {
    /// One of the two copies.
    pub struct ControllerCopy {
        /// Rising; 0: unused. Stored last.
        pub sequence: AtomicU64,
        /// The admin queue's transmit position from which this holds.
        pub valid_from: AtomicU64,
        /// The namespace's size last told to the host, blocks.
        pub blocks: AtomicU64,
        /// Over the words above and below.
        pub check: AtomicU64,
        /// The registers and features, as exported by the controller.
        pub state: [AtomicU64; STATE_WORDS],
    }
}

cells! {
    /// A controller: 1024 bytes.
    pub struct ControllerRecord {
        /// 1 while in use.
        pub used: AtomicU64,
        /// Lane slot; `u64::MAX` for a discovery controller.
        pub lane: AtomicU64,
        /// Controller id.
        pub cntlid: AtomicU64,
        /// Export id + 1; 0 for a discovery controller.
        pub export: AtomicU64,
        /// Our address as the host sees it: IPv6, port.
        pub local: [AtomicU64; 3],
        /// Over the six words before.
        pub check: AtomicU64,
        /// The state.
        pub copies: [ControllerCopy; 2],
    }
}
const _: () = assert!(size_of::<ControllerRecord>() == 1024);

/// A controller's constants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControllerConstants {
    /// Lane slot; `None` for a discovery controller.
    pub lane: Option<u32>,
    /// Controller id.
    pub cntlid: u16,
    /// Export id; `None` for a discovery controller.
    pub export: Option<u64>,
    /// Our address as the host sees it.
    pub local: SocketAddr,
}

impl ControllerConstants {
    fn words(&self) -> [u64; 6] {
        let ip = match self.local.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let ip = u128::from(ip);
        [
            self.lane.map_or(u64::MAX, u64::from),
            u64::from(self.cntlid),
            self.export.map_or(0, |e| e.wrapping_add(1)),
            (ip >> 64) as u64,
            ip as u64,
            u64::from(self.local.port()) | u64::from(self.local.is_ipv4()) << 16,
        ]
    }

    fn of_words(words: [u64; 6]) -> Option<Self> {
        let [lane, cntlid, export, high, low, port] = words;
        let ip = Ipv6Addr::from(u128::from(high) << 64 | u128::from(low));
        let ip = match port >> 16 & 1 == 1 {
            true => IpAddr::V4(ip.to_ipv4_mapped()?),
            false => IpAddr::V6(ip),
        };
        let constants = Self {
            lane: (lane != u64::MAX).then_some(lane as u32),
            cntlid: cntlid as u16,
            export: export.checked_sub(1),
            local: SocketAddr::new(ip, port as u16),
        };
        (constants.words() == words).then_some(constants)
    }
}

/// The content of one copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ControllerContent {
    /// Rising.
    pub sequence: u64,
    /// The admin queue's transmit position from which this holds.
    pub valid_from: u64,
    /// The namespace's size last told to the host, blocks.
    pub blocks: u64,
    /// The state.
    pub state: [u64; STATE_WORDS],
}

const CONTROLLERS: u64 = 2;
const COPIES: u64 = 3;

impl ControllerRecord {
    /// Stores the constants.
    pub fn put_constants(&self, key: u64, index: u32, constants: &ControllerConstants) {
        let words = constants.words();
        for (to, from) in self.constant_cells().into_iter().zip(words) {
            to.store(from, Release);
        }
        let seed = Seed::whole(key, CONTROLLERS, index);
        self.check
            .store(check_all(seed, words.into_iter()), Release);
    }

    /// The constants, if their check is good.
    pub fn constants(&self, key: u64, index: u32) -> Option<ControllerConstants> {
        let words = self.constant_cells().map(|cell| cell.load(Relaxed));
        let seed = Seed::whole(key, CONTROLLERS, index);
        (check_all(seed, words.into_iter()) == self.check.load(Relaxed))
            .then(|| ControllerConstants::of_words(words))?
    }

    fn constant_cells(&self) -> [&AtomicU64; 6] {
        let [a, b, c] = &self.local;
        [&self.lane, &self.cntlid, &self.export, a, b, c]
    }

    /// Stores a state over the older copy.
    pub fn put_state(&self, key: u64, index: u32, content: &ControllerContent) {
        let [a, b] = &self.copies;
        let older = match a.sequence.load(Relaxed) <= b.sequence.load(Relaxed) {
            true => a,
            false => b,
        };
        // Invalid from here until it has its new number.
        older.sequence.store(0, Release);
        older.valid_from.store(content.valid_from, Release);
        older.blocks.store(content.blocks, Release);
        for (to, from) in older.state.iter().zip(content.state) {
            to.store(from, Release);
        }
        older.check.store(content.check(key, index), Release);
        crate::kill_point!("admin.state");
        older.sequence.store(content.sequence, Release);
    }

    /// The newest sound state at the admin queue's position `published`.
    pub fn state(&self, key: u64, index: u32, published: u64) -> Option<ControllerContent> {
        let copies = self.copies.iter().filter_map(|copy| {
            let content = ControllerContent {
                sequence: copy.sequence.load(Acquire),
                valid_from: copy.valid_from.load(Relaxed),
                blocks: copy.blocks.load(Relaxed),
                state: std::array::from_fn(|i| copy.state[i].load(Relaxed)),
            };
            let good = content.sequence > 0
                && content.valid_from <= published
                && content.check(key, index) == copy.check.load(Relaxed);
            good.then_some(content)
        });
        copies.max_by_key(|content| content.sequence)
    }

    /// The highest sequence of the copies, sound or not.
    pub fn sequence(&self) -> u64 {
        let of = |copy: &ControllerCopy| copy.sequence.load(Relaxed);
        self.copies.iter().map(of).max().unwrap_or(0)
    }
}

impl ControllerContent {
    fn check(&self, key: u64, index: u32) -> u64 {
        let seed = Seed::whole(key, COPIES, index);
        let words = [self.sequence, self.valid_from, self.blocks];
        check_all(seed, words.into_iter().chain(self.state))
    }
}
