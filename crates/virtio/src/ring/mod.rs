//! Virtqueues from the device's side: [`split`] (VIRTIO 1.2, 2.7) and [`packed`] (2.8).
//!
//! The guest may change its ring at any time. So each word is read once, indexes are checked, and
//! loops are bounded. After a [`RingError`] the ring must not be used.

use forebay_guest::{GuestMemory, View};

mod chain;
pub mod packed;
pub mod split;
mod window;

pub use chain::{Chain, MAX_PIECES, Piece};
pub use window::Window;

/// The largest supported queue.
pub const MAX_QUEUE_SIZE: u16 = 1024;

pub(crate) const F_NEXT: u16 = 1;
pub(crate) const F_WRITE: u16 = 2;
pub(crate) const F_INDIRECT: u16 = 4;
pub(crate) const DESCRIPTOR_BYTES: usize = 16;

crate::named::named_errors! {
    /// Why a ring is broken.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RingError {
        /// Unsupported queue size.
        #[error("a queue of a size that is not supported")]
        Size,
        /// A part is too short for the size.
        #[error("a part of the ring is shorter than its size requires")]
        TooShort,
        /// A part is not in guest memory.
        #[error("a part of the ring is not in the guest's memory")]
        Address,
        /// A part is read-only.
        #[error("a part of the ring can't be written")]
        ReadOnly,
        /// A part is not aligned (VIRTIO 2.7, 2.8).
        #[error("a part of the ring is not aligned")]
        Alignment,
        /// The available index moved by more than the queue size.
        #[error("the available index is beyond the queue")]
        AvailableIndex,
        /// A descriptor's number is out of range.
        #[error("a descriptor's number is beyond the queue or its table")]
        DescriptorIndex,
        /// A chain does not end.
        #[error("a chain of descriptors does not end")]
        Loop,
        /// A descriptor of length 0.
        #[error("a descriptor of zero bytes")]
        Empty,
        /// An address or a length overflows.
        #[error("a descriptor's or chain's length overflows")]
        Overflow,
        /// A readable part follows a writable one (VIRTIO 2.7.4.2).
        #[error("a readable descriptor follows a writable one")]
        Order,
        /// Too many pieces.
        #[error("a chain with more pieces than a request may have")]
        TooManyPieces,
        /// An indirect table without the feature, nested, with NEXT, or of a wrong length.
        #[error("an indirect table that is not allowed")]
        Indirect,
        /// An indirect table outside guest memory.
        #[error("an indirect table outside the guest's memory")]
        IndirectAddress,
        /// A descriptor in use was made available.
        #[error("a descriptor in use was made available again")]
        InUse,
        /// The inflight region doesn't match the ring.
        #[error("the inflight region does not fit the queue")]
        Inflight,
    }
}

/// Negotiated features of rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
}

impl RingFeatures {
    /// From acknowledged feature bits.
    pub const fn of(bits: u64) -> Self {
        Self {
            event_idx: bits & crate::feature::EVENT_IDX != 0,
            indirect: bits & crate::feature::INDIRECT_DESC != 0,
        }
    }
}

/// The memory of a ring.
#[derive(Clone, Debug)]
pub struct Windows {
    /// The descriptor area.
    pub descriptors: Window,
    /// The available ring, or the driver's event suppression.
    pub driver: Window,
    /// The used ring, or the device's event suppression.
    pub device: Window,
}

/// Sizes of the areas: descriptors, driver, device.
pub const fn area_bytes(packed: bool, size: u16) -> (usize, usize, usize) {
    let n = size as usize;
    if packed {
        (n * DESCRIPTOR_BYTES, 4, 4)
    } else {
        (n * DESCRIPTOR_BYTES, 6 + 2 * n, 6 + 8 * n)
    }
}

/// Whether the step from `old` to `new` passes the event (VIRTIO 2.7.10).
#[inline]
pub(crate) fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub address: u64,
    pub len: u32,
    /// Split: flags and next. Packed: buffer identifier and flags.
    pub words: [u16; 2],
}

impl Descriptor {
    #[inline]
    pub(crate) const fn of_words(address: u64, rest: u64) -> Self {
        Self {
            address,
            len: rest as u32,
            words: [(rest >> 32) as u16, (rest >> 48) as u16],
        }
    }
}

pub(crate) struct IndirectTable([u8; MAX_PIECES * DESCRIPTOR_BYTES]);

pub(crate) struct Entries<'a> {
    /// Number of entries; a copy holds at most [`MAX_PIECES`].
    pub count: u32,
    at: Place<'a>,
}

/// Aligned, contiguous tables are read in place, others copied.
enum Place<'a> {
    Memory(View<'a>),
    Copied(&'a [u8]),
}

impl IndirectTable {
    #[inline]
    pub(crate) fn read<'a>(
        &'a mut self,
        at: &Descriptor,
        memory: &'a GuestMemory,
    ) -> Result<Entries<'a>, RingError> {
        let len = at.len as usize;
        if len == 0 || !len.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(RingError::Indirect);
        }
        if at.address.checked_add(u64::from(at.len)).is_none() {
            return Err(RingError::Overflow);
        }
        let count = (len / DESCRIPTOR_BYTES) as u32;
        let at = match memory.view(at.address, len) {
            Some(view) if view.load_two(0).is_some() => Place::Memory(view),
            _ => {
                let len = len.min(MAX_PIECES * DESCRIPTOR_BYTES);
                Place::Copied(self.copy(at.address, len, memory)?)
            }
        };
        Ok(Entries { count, at })
    }

    #[cold]
    fn copy(&mut self, address: u64, len: usize, memory: &GuestMemory) -> Result<&[u8], RingError> {
        let bytes = &mut self.0[..len];
        match memory.read(address, bytes) {
            true => Ok(bytes),
            false => Err(RingError::IndirectAddress),
        }
    }
}

impl Entries<'_> {
    #[inline]
    pub(crate) fn get(&self, entry: usize) -> Result<Descriptor, RingError> {
        let from = entry * DESCRIPTOR_BYTES;
        let found = match &self.at {
            Place::Memory(view) => view.load_two(from),
            Place::Copied(bytes) => (bytes.get(from..))
                .and_then(|bytes| bytes.first_chunk())
                .map(|bytes| u128::from_le_bytes(*bytes))
                .map(|both| [both as u64, (both >> 64) as u64]),
        };
        match found {
            Some([address, rest]) => Ok(Descriptor::of_words(address, rest)),
            None if entry < self.count as usize => Err(RingError::TooManyPieces),
            None => Err(RingError::DescriptorIndex),
        }
    }
}

impl Default for IndirectTable {
    fn default() -> Self {
        Self([0; MAX_PIECES * DESCRIPTOR_BYTES])
    }
}
