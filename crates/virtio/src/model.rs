//! A simple, exact driver for tests. It panics if a device returns a chain that it does not hold.

use crate::inflight;
use crate::queue::QueueConfig;
use crate::ring::packed::Position;
use crate::ring::{RingFeatures, Window, Windows, need_event};
use forebay_guest::{Area, GuestMemory, NewRegion};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::fence;

/// Guest address of the memory.
pub const GUEST_ADDRESS: u64 = 1 << 30;
/// Front-end address of the memory.
pub const USER_ADDRESS: u64 = 0x7F00_0000_0000;
const TABLE_ENTRIES: usize = 16;

const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;
const F_INDIRECT: u16 = 4;
const F_AVAIL: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;

/// A guest's memory.
pub struct Vm {
    /// The device's view.
    pub memory: GuestMemory,
    /// The driver's view.
    pub all: Area,
    /// The file behind it.
    pub file: OwnedFd,
}

impl Vm {
    /// New memory.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let file = memfd_create("machine", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&file, bytes).expect("room");
        Self::of(file, bytes)
    }

    /// Maps existing memory.
    #[must_use]
    pub fn of(file: OwnedFd, bytes: u64) -> Self {
        let mut memory = GuestMemory::default();
        let region = NewRegion {
            guest_address: GUEST_ADDRESS,
            user_address: USER_ADDRESS,
            len_bytes: bytes,
            writable: true,
            file: Some((file.as_fd(), 0)),
        };
        memory.map(&region).expect("mapped");
        let all = memory
            .area(GUEST_ADDRESS, bytes as usize)
            .expect("it is there");
        Self { memory, all, file }
    }
}

/// Offsets of a queue's parts.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Descriptors.
    pub descriptors: usize,
    /// Driver area.
    pub driver: usize,
    /// Device area.
    pub device: usize,
    /// Inflight region.
    pub inflight: usize,
    /// Indirect tables.
    pub tables: usize,
    /// End of the queue.
    pub end: usize,
}

impl Layout {
    /// A queue at `at`, a multiple of 64.
    #[must_use]
    pub const fn new(at: usize, size: u16) -> Self {
        let n = size as usize;
        let descriptors = at;
        let driver = descriptors + 16 * n;
        let device = (driver + 6 + 2 * n).next_multiple_of(64);
        let inflight = (device + 6 + 8 * n).next_multiple_of(64);
        let tables = inflight + inflight::queue_bytes(size);
        Self {
            descriptors,
            driver,
            device,
            inflight,
            tables,
            end: tables + n * TABLE_ENTRIES * 16,
        }
    }
}

/// An offered piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Guest address.
    pub address: u64,
    /// Length.
    pub len: u32,
    /// Whether the device writes it.
    pub writable: bool,
}

#[derive(Clone)]
struct Chain {
    number: u64,
    descriptors: u16,
    places: Vec<u16>,
}

/// The guest's side of a queue.
#[derive(Clone)]
pub struct Driver {
    memory: Area,
    layout: Layout,
    size: u16,
    packed: bool,
    features: RingFeatures,
    available: Position,
    used: Position,
    free: Vec<u16>,
    room: u16,
    chains: BTreeMap<u16, Chain>,
    next_number: u64,
    /// Split: available index before the first chain without a kick. Packed: the position.
    unkicked: Position,
}

impl Driver {
    /// The driver of a new queue.
    #[must_use]
    pub fn new(
        memory: &Area,
        layout: Layout,
        size: u16,
        packed: bool,
        features: RingFeatures,
    ) -> Self {
        let start = if packed {
            Position::START
        } else {
            Position::of_word(0)
        };
        Self {
            memory: memory.clone(),
            layout,
            size,
            packed,
            features,
            available: start,
            used: start,
            free: (0..size).rev().collect(),
            room: size,
            chains: BTreeMap::new(),
            next_number: 0,
            unkicked: start,
        }
    }

    /// Configures a device.
    #[must_use]
    pub fn config(&self, memory: &GuestMemory) -> QueueConfig {
        let n = usize::from(self.size);
        let window = |at: usize, bytes: usize| -> Window {
            let area = memory.area(GUEST_ADDRESS + at as u64, bytes);
            area.expect("inside").into()
        };
        let word = u32::from(Position::START.word());
        QueueConfig {
            windows: Windows {
                descriptors: window(self.layout.descriptors, 16 * n),
                driver: window(self.layout.driver, 6 + 2 * n),
                device: window(self.layout.device, 6 + 8 * n),
            },
            size: self.size,
            packed: self.packed,
            features: self.features,
            base: if self.packed { word | word << 16 } else { 0 },
            inflight: window(self.layout.inflight, inflight::queue_bytes(self.size)),
        }
    }

    /// This driver in a copy of its memory.
    #[must_use]
    pub fn in_copy(&self, memory: &Area) -> Self {
        Self {
            memory: memory.clone(),
            ..self.clone()
        }
    }

    /// Chains that were not collected.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.chains.len()
    }

    fn store16(&self, at: usize, value: u16) {
        assert!(self.memory.store_u16(at, value, SeqCst));
    }

    fn load16(&self, at: usize) -> u16 {
        self.memory.load_u16(at, SeqCst).expect("inside")
    }

    fn store_descriptor(&self, at: usize, piece: &Offered, words: [u16; 2]) {
        assert!(self.memory.store_u64(at, piece.address, SeqCst));
        assert!(self.memory.store_u32(at + 8, piece.len, SeqCst));
        self.store16(at + 12, words[0]);
        self.store16(at + 14, words[1]);
    }

    fn write_flag(piece: &Offered) -> u16 {
        if piece.writable { F_WRITE } else { 0 }
    }

    /// Offers a chain, in an indirect table if `indirect`; returns its number. `None`: no room.
    pub fn offer(&mut self, pieces: &[Offered], indirect: bool) -> Option<u64> {
        let descriptors = if indirect { 1 } else { pieces.len() as u16 };
        assert!(descriptors > 0 && pieces.len() <= TABLE_ENTRIES || !indirect);
        if descriptors > self.room || self.free.is_empty() {
            return None;
        }
        let number = self.next_number;
        self.next_number += 1;
        if self.packed {
            self.offer_packed(pieces, indirect, number);
        } else {
            self.offer_split(pieces, indirect, number);
        }
        self.room -= descriptors;
        Some(number)
    }

    fn table(&self, of: u16, pieces: &[Offered]) -> Offered {
        let at = self.layout.tables + usize::from(of) * TABLE_ENTRIES * 16;
        for (i, piece) in pieces.iter().enumerate() {
            let flags = Self::write_flag(piece);
            let words = if self.packed {
                [0, flags]
            } else if i + 1 < pieces.len() {
                [flags | F_NEXT, i as u16 + 1]
            } else {
                [flags, 0]
            };
            self.store_descriptor(at + 16 * i, piece, words);
        }
        Offered {
            address: GUEST_ADDRESS + at as u64,
            len: 16 * pieces.len() as u32,
            writable: false,
        }
    }

    fn offer_split(&mut self, pieces: &[Offered], indirect: bool, number: u64) {
        let count = if indirect { 1 } else { pieces.len() };
        let places: Vec<u16> = (0..count).filter_map(|_| self.free.pop()).collect();
        let at = |place: u16| self.layout.descriptors + 16 * usize::from(place);
        if indirect {
            let table = self.table(places[0], pieces);
            self.store_descriptor(at(places[0]), &table, [F_INDIRECT, 0]);
        } else {
            for (i, piece) in pieces.iter().enumerate() {
                let next = places.get(i + 1);
                let flags = Self::write_flag(piece) | next.map_or(0, |_| F_NEXT);
                let words = [flags, next.copied().unwrap_or(0)];
                self.store_descriptor(at(places[i]), piece, words);
            }
        }
        let index = self.available.index;
        let place = usize::from(index & (self.size - 1));
        self.store16(self.layout.driver + 4 + 2 * place, places[0]);
        self.available.index = index.wrapping_add(1);
        self.store16(self.layout.driver + 2, self.available.index);
        let chain = Chain {
            number,
            descriptors: count as u16,
            places: places.clone(),
        };
        let before = self.chains.insert(places[0], chain);
        assert!(before.is_none(), "a head that is in use was free");
    }

    fn offer_packed(&mut self, pieces: &[Offered], indirect: bool, number: u64) {
        let id = self.free.pop().expect("asked before");
        let table;
        let (list, more) = if indirect {
            table = [self.table(id, pieces)];
            (&table[..], F_INDIRECT)
        } else {
            (pieces, 0)
        };
        let mut at = self.available;
        let mut first = None;
        for (i, piece) in list.iter().enumerate() {
            let mut flags = more | Self::write_flag(piece);
            if i + 1 < list.len() {
                flags |= F_NEXT;
            }
            flags |= if at.wrap { F_AVAIL } else { F_USED };
            let place = self.layout.descriptors + 16 * usize::from(at.index);
            assert!(self.memory.store_u64(place, piece.address, SeqCst));
            assert!(self.memory.store_u32(place + 8, piece.len, SeqCst));
            self.store16(place + 12, id);
            match first {
                None => first = Some((place, flags)),
                Some(_) => self.store16(place + 14, flags),
            }
            at = at.plus(1, self.size);
        }
        let (place, flags) = first.expect("a piece");
        self.store16(place + 14, flags);
        self.available = at;
        let chain = Chain {
            number,
            descriptors: list.len() as u16,
            places: Vec::new(),
        };
        let before = self.chains.insert(id, chain);
        assert!(before.is_none(), "an identifier that is in use was free");
    }

    /// Collects a used chain: its number and the bytes written.
    pub fn collect(&mut self) -> Option<(u64, u32)> {
        let (id, written) = if self.packed {
            let place = self.layout.descriptors + 16 * usize::from(self.used.index);
            let flags = self.load16(place + 14);
            let both = if self.used.wrap { F_AVAIL | F_USED } else { 0 };
            if flags & (F_AVAIL | F_USED) != both {
                return None;
            }
            let id = self.load16(place + 12);
            let written = self.memory.load_u32(place + 8, SeqCst).expect("inside");
            (id, written)
        } else {
            if self.load16(self.layout.device + 2) == self.used.index {
                return None;
            }
            let place = usize::from(self.used.index & (self.size - 1));
            let at = self.layout.device + 4 + 8 * place;
            let id = self.memory.load_u32(at, SeqCst).expect("inside");
            let written = self.memory.load_u32(at + 4, SeqCst).expect("inside");
            self.used.index = self.used.index.wrapping_add(1);
            (u16::try_from(id).expect("a head"), written)
        };
        let chain = self.chains.remove(&id);
        let chain = chain.expect("a chain was returned that the device hasn't got");
        if self.packed {
            self.used = self.used.plus(chain.descriptors, self.size);
            self.free.push(id);
        } else {
            self.free.extend(chain.places.iter().rev());
        }
        self.room += chain.descriptors;
        Some((chain.number, written))
    }

    /// Whether to kick for chains since the last call.
    pub fn must_kick(&mut self) -> bool {
        fence(SeqCst);
        let (old, new) = (self.unkicked, self.available);
        self.unkicked = new;
        if old == new {
            return false;
        }
        if !self.packed {
            return if self.features.event_idx {
                let event = self.load16(self.layout.device + 4 + 8 * usize::from(self.size));
                need_event(event, new.index, old.index)
            } else {
                self.load16(self.layout.device) & 1 == 0
            };
        }
        let word = self.memory.load_u32(self.layout.device, SeqCst);
        let word = word.expect("inside");
        match word >> 16 & 3 {
            1 => false,
            2 if self.features.event_idx => {
                let event = Position::of_word(word as u16);
                let mut at = event.index;
                if event.wrap != new.wrap {
                    at = at.wrapping_sub(self.size);
                }
                let mut from = old.index;
                if new.index <= from {
                    from = from.wrapping_sub(self.size);
                }
                need_event(at, new.index, from)
            }
            _ => true,
        }
    }

    /// Asks for a call at the next used chain, or (`false`) for none.
    pub fn want_call(&mut self, wanted: bool) {
        let at = self.layout.driver;
        if self.packed {
            let flags = match (wanted, self.features.event_idx) {
                (false, _) => 1,
                (true, false) => 0,
                (true, true) => 2,
            };
            let word = flags << 16 | u32::from(self.used.word());
            assert!(self.memory.store_u32(at, word, SeqCst));
        } else if self.features.event_idx {
            // No call: the event index is already past.
            let event = self.used.index.wrapping_sub(u16::from(!wanted));
            self.store16(at + 4 + 2 * usize::from(self.size), event);
        } else {
            self.store16(at, u16::from(!wanted));
        }
        fence(SeqCst);
    }

    /// Whether a used chain can be collected.
    #[must_use]
    pub fn has_used(&self) -> bool {
        if self.packed {
            let place = self.layout.descriptors + 16 * usize::from(self.used.index);
            let both = if self.used.wrap { F_AVAIL | F_USED } else { 0 };
            self.load16(place + 14) & (F_AVAIL | F_USED) == both && !self.chains.is_empty()
        } else {
            self.load16(self.layout.device + 2) != self.used.index
        }
    }
}
