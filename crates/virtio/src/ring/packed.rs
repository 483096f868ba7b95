//! The device's side of a packed virtqueue (VIRTIO 1.2, 2.8).
//!
//! Like [`super::split`], but a chain is named by its buffer identifier. In a batch, the first
//! descriptor's flags are stored last: the driver reads in order, so it sees all or nothing.

use super::{
    Chain, Descriptor, F_INDIRECT, F_NEXT, F_WRITE, IndirectTable, MAX_QUEUE_SIZE, RingError,
    RingFeatures, Windows, area_bytes, need_event,
};
use forebay_guest::GuestMemory;
use std::sync::atomic::{Ordering::SeqCst, fence};

const F_AVAIL: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;

/// RING_EVENT_FLAGS_ENABLE, _DISABLE and _DESC (VIRTIO 2.8.10).
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;

/// Prefetch distance, in descriptors.
const AHEAD: u16 = 4;

/// A ring position with the wrap counter of its pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Descriptor index.
    pub index: u16,
    /// Wrap counter.
    pub wrap: bool,
}

impl Position {
    /// Start of a new ring.
    pub const START: Self = Self {
        index: 0,
        wrap: true,
    };

    /// Encoded for messages and event suppression: the wrap counter in the top bit.
    pub const fn word(self) -> u16 {
        self.index | (self.wrap as u16) << 15
    }

    /// Decodes [`Self::word`].
    pub const fn of_word(word: u16) -> Self {
        Self {
            index: word & 0x7FFF,
            wrap: word >> 15 != 0,
        }
    }

    /// The position this many descriptors later.
    #[inline]
    #[must_use]
    pub const fn plus(self, descriptors: u16, size: u16) -> Self {
        let index = self.index + descriptors;
        if index >= size {
            Self {
                index: index - size,
                wrap: !self.wrap,
            }
        } else {
            Self {
                index,
                wrap: self.wrap,
            }
        }
    }
}

/// A descriptor of a taken chain, for a successor: used descriptors overwrite others' places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Raw {
    /// Guest address.
    pub address: u64,
    /// Length.
    pub len: u32,
    /// Buffer identifier.
    pub id: u16,
    /// Flags.
    pub flags: u16,
}

/// See the module.
pub struct Packed {
    windows: Windows,
    size: u16,
    features: RingFeatures,
    next_available: Position,
    next_used: Position,
    /// Position of the last check for a call.
    asked: Position,
    /// The first descriptor of the unpublished batch: index and second half.
    first: Option<(u16, u64)>,
    call_anyway: bool,
    /// Last descriptor's buffer and first piece of the last chain: the next chain is often near.
    last: [u64; 2],
    table: Box<IndirectTable>,
}

impl Packed {
    /// A ring at these positions. Fails if it is unsupported.
    pub fn new(
        windows: Windows,
        size: u16,
        features: RingFeatures,
        available: Position,
        used: Position,
    ) -> Result<Self, RingError> {
        if size == 0 || size > MAX_QUEUE_SIZE {
            return Err(RingError::Size);
        }
        if available.index >= size || used.index >= size {
            return Err(RingError::AvailableIndex);
        }
        check(&windows, size)?;
        Ok(Self {
            windows,
            size,
            features,
            next_available: available,
            next_used: used,
            asked: used,
            first: None,
            call_anyway: true,
            last: [0; 2],
            table: Box::default(),
        })
    }

    pub(crate) fn move_to(&mut self, windows: Windows) -> Result<(), RingError> {
        check(&windows, self.size)?;
        self.windows = windows;
        Ok(())
    }

    /// Number of descriptors.
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// The next available descriptor.
    pub const fn next_available(&self) -> Position {
        self.next_available
    }

    /// The next used descriptor.
    pub const fn next_used(&self) -> Position {
        self.next_used
    }

    /// Moves to other positions. Makes an unpublished batch's descriptors available again, or they
    /// would follow the next batch.
    pub(crate) fn set_positions(&mut self, available: Position, used: Position) {
        let mut at = used;
        while at != available {
            if self.is_used(at) {
                let flags = if at.wrap { F_AVAIL } else { F_USED };
                (self.windows.descriptors).store_u16(16 * usize::from(at.index) + 14, flags);
            }
            at = at.plus(1, self.size);
        }
        self.next_available = available;
        self.next_used = used;
        self.asked = used;
    }

    /// Whether the device has returned the descriptor in this pass.
    pub(crate) fn is_used(&self, at: Position) -> bool {
        let flags = (self.windows.descriptors).load_u16_acquire(16 * usize::from(at.index) + 14);
        (flags & F_USED != 0) == at.wrap
    }

    #[inline]
    fn available(&self) -> Option<u64> {
        self.available_at(self.next_available)
    }

    #[inline]
    fn available_at(&self, at: Position) -> Option<u64> {
        // Length, identifier and flags are one word, so none is older than the flags.
        let rest = (self.windows.descriptors).load_u64_acquire(16 * usize::from(at.index) + 8);
        let flags = (rest >> 48) as u16;
        ((flags & F_AVAIL != 0) == at.wrap && (flags & F_USED != 0) != at.wrap).then_some(rest)
    }

    /// Whether a chain is available.
    #[inline]
    pub fn has_available(&self) -> bool {
        self.available().is_some()
    }

    /// Prefetches the buffers of later descriptors; the descriptors themselves are contiguous.
    #[inline]
    fn fetch_ahead(&self, memory: &GuestMemory) {
        let at = self.next_available.plus(AHEAD % self.size, self.size);
        if self.available_at(at).is_some() {
            memory.prefetch((self.windows.descriptors).load_u64(16 * usize::from(at.index)));
        } else {
            for address in self.last {
                memory.prefetch(address);
            }
        }
    }

    /// Takes the next chain. `keep` gets its descriptors, at most `room`. Returns buffer identifier
    /// and number of descriptors.
    #[inline]
    pub fn pop(
        &mut self,
        memory: &GuestMemory,
        room: u16,
        chain: &mut Chain,
        mut keep: impl FnMut(Raw),
    ) -> Result<Option<(u16, u16)>, RingError> {
        let Some(mut rest) = self.available() else {
            return Ok(None);
        };
        self.fetch_ahead(memory);
        chain.clear();
        let mut at = self.next_available;
        let mut count = 0;
        loop {
            if count >= room {
                return Err(if count > 0 {
                    RingError::Loop
                } else {
                    RingError::AvailableIndex
                });
            }
            let address = (self.windows.descriptors).load_u64(16 * usize::from(at.index));
            let d = Descriptor::of_words(address, rest);
            let [id, flags] = d.words;
            keep(Raw {
                address,
                len: d.len,
                id,
                flags,
            });
            count += 1;
            at = at.plus(1, self.size);
            self.piece(&d, count == 1, memory, chain)?;
            if flags & F_NEXT == 0 {
                chain.end()?;
                self.next_available = at;
                self.last = [address, chain.first_address()];
                return Ok(Some((id, count)));
            }
            rest = (self.windows.descriptors).load_u64(16 * usize::from(at.index) + 8);
        }
    }

    /// Rereads a chain from its saved descriptors.
    pub fn walk(
        &mut self,
        raws: impl Iterator<Item = Raw>,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        chain.clear();
        for (i, raw) in raws.enumerate() {
            let d = Descriptor {
                address: raw.address,
                len: raw.len,
                words: [raw.id, raw.flags],
            };
            self.piece(&d, i == 0, memory, chain)?;
            if raw.flags & F_NEXT == 0 {
                return chain.end();
            }
        }
        Err(RingError::Loop)
    }

    #[inline]
    fn piece(
        &mut self,
        d: &Descriptor,
        is_first: bool,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        let flags = d.words[1];
        if flags & F_INDIRECT == 0 {
            chain.push(d.address, d.len, flags & F_WRITE != 0);
            return Ok(());
        }
        // An indirect table must be a chain of its own (VIRTIO 2.8.5).
        if !self.features.indirect || flags & F_NEXT != 0 || !is_first {
            return Err(RingError::Indirect);
        }
        let table = self.table.read(d, memory)?;
        if table.count > MAX_QUEUE_SIZE.into() {
            return Err(RingError::TooManyPieces);
        }
        for entry in 0..table.count as usize {
            let d = table.get(entry)?;
            if d.words[1] & F_INDIRECT != 0 {
                return Err(RingError::Indirect);
            }
            chain.push(d.address, d.len, d.words[1] & F_WRITE != 0);
        }
        Ok(())
    }

    /// Returns a chain, still invisible to the driver.
    #[inline]
    pub fn put(&mut self, id: u16, descriptors: u16, written_bytes: u32) {
        let at = self.next_used;
        let mut flags = if at.wrap { F_AVAIL | F_USED } else { 0 };
        if written_bytes > 0 {
            flags |= F_WRITE;
        }
        let rest = u64::from(flags) << 48 | u64::from(id) << 32 | u64::from(written_bytes);
        if self.first.is_none() {
            self.first = Some((at.index, rest));
        } else {
            (self.windows.descriptors).store_u64(16 * usize::from(at.index) + 8, rest);
        }
        self.next_used = at.plus(descriptors, self.size);
    }

    /// Shows returned chains to the driver.
    #[inline]
    pub fn publish(&mut self) {
        if let Some((index, rest)) = self.first.take() {
            (self.windows.descriptors).store_u64(16 * usize::from(index) + 8, rest);
        }
    }

    /// Whether the driver wants a call for chains published since the last check.
    #[inline]
    pub fn wants_call(&mut self) -> bool {
        let (asked, used) = (self.asked, self.next_used);
        if asked == used {
            return false;
        }
        self.asked = used;
        fence(SeqCst);
        let word = self.windows.driver.load_u32(0);
        let (event, flags) = (Position::of_word(word as u16), (word >> 16) as u16 & 3);
        let wants = match flags {
            EVENT_DISABLE => false,
            EVENT_DESC if self.features.event_idx => {
                let new = used.index;
                let mut old = asked.index;
                if new <= old {
                    old = old.wrapping_sub(self.size);
                }
                let mut event_index = event.index;
                if event.wrap != used.wrap {
                    event_index = event_index.wrapping_sub(self.size);
                }
                need_event(event_index, new, old)
            }
            _ => true,
        };
        std::mem::take(&mut self.call_anyway) || wants
    }

    /// Asks for kicks; true if a chain is available already.
    pub fn arm(&mut self) -> bool {
        let word = if self.features.event_idx {
            u32::from(EVENT_DESC) << 16 | u32::from(self.next_available.word())
        } else {
            u32::from(EVENT_ENABLE) << 16
        };
        self.windows.device.store_u32(0, word);
        fence(SeqCst);
        self.has_available()
    }

    /// Asks for no kicks.
    pub fn disarm(&mut self) {
        self.windows
            .device
            .store_u32(0, u32::from(EVENT_DISABLE) << 16);
    }
}

fn check(windows: &Windows, size: u16) -> Result<(), RingError> {
    let (descriptors, driver, device) = area_bytes(true, size);
    if windows.descriptors.len() < descriptors
        || windows.driver.len() < driver
        || windows.device.len() < device
    {
        return Err(RingError::TooShort);
    }
    if !windows.descriptors.is_aligned(16)
        || !windows.driver.is_aligned(4)
        || !windows.device.is_aligned(4)
    {
        return Err(RingError::Alignment);
    }
    if !windows.descriptors.is_writable() || !windows.device.is_writable() {
        return Err(RingError::ReadOnly);
    }
    Ok(())
}
