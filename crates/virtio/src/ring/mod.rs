//! Virtqueues from the device's side: [`split`] (VIRTIO 1.2, 2.7) and [`packed`] (2.8).
//!
//! **Design.** A ring lies in the guest's memory, which the guest changes at will. So each word is read once, every
//! index is checked, every loop is bounded, and what makes no sense is a [`RingError`], after which the ring must not
//! be used again. What is taken is a [`Chain`]: a bounded list of pieces by guest address.
//!
//! **Not here:** what of a ring outlives its device ([`crate::inflight`]).

use forebay_guest::{GuestMemory, View};

mod chain;
pub mod packed;
pub mod split;
mod window;

pub use chain::{Chain, MAX_PIECES, Piece};
pub use window::Window;

/// The largest queue that is served.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// VIRTQ_DESC_F_NEXT: the chain goes on.
pub(crate) const F_NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE: the device writes there.
pub(crate) const F_WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT: a table of descriptors.
pub(crate) const F_INDIRECT: u16 = 4;
/// Bytes of a descriptor.
pub(crate) const DESCRIPTOR_BYTES: usize = 16;

crate::named::named_errors! {
    /// What is wrong with a ring. It can't be used any more.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RingError {
        /// No such size.
        #[error("a queue of that size can't be served")]
        Size,
        /// A part of the ring is too short for its size.
        #[error("a part of the ring is shorter than its size demands")]
        TooShort,
        /// A part of the ring is not in the memory.
        #[error("a part of the ring is not in the guest's memory")]
        Address,
        /// A part of the ring can't be written.
        #[error("a part of the ring can't be written")]
        ReadOnly,
        /// A part of the ring is not aligned (VIRTIO 2.7, 2.8).
        #[error("a part of the ring is not aligned")]
        Alignment,
        /// The index of the available ring moved by more than the queue holds.
        #[error("the available index is beyond the queue")]
        AvailableIndex,
        /// A descriptor's number is not one of the queue's.
        #[error("a descriptor's number is beyond the queue or its table")]
        DescriptorIndex,
        /// A chain does not end.
        #[error("a chain of descriptors does not end")]
        Loop,
        /// A descriptor of length 0.
        #[error("a descriptor of no bytes")]
        Empty,
        /// A descriptor's address and length, or a chain's lengths together, overflow.
        #[error("a descriptor's or chain's length overflows")]
        Overflow,
        /// A part for the device to read follows one for it to write (VIRTIO 2.7.4.2).
        #[error("a readable descriptor follows a writable one")]
        Order,
        /// More pieces than a request may have.
        #[error("a chain of more pieces than a request may have")]
        TooManyPieces,
        /// An indirect table without the feature, inside another, with NEXT, or of a wrong length.
        #[error("an indirect table that may not be")]
        Indirect,
        /// An indirect table that is not in the guest's memory.
        #[error("an indirect table outside the guest's memory")]
        IndirectAddress,
        /// A descriptor that is in use was made available again.
        #[error("a descriptor in use was made available again")]
        InUse,
        /// The inflight region is not of this ring, or not what the specification says.
        #[error("the inflight region does not fit the queue")]
        Inflight,
    }
}

/// What was negotiated of how rings work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
}

impl RingFeatures {
    /// Of the acknowledged feature bits.
    pub const fn of(bits: u64) -> Self {
        Self {
            event_idx: bits & crate::feature::EVENT_IDX != 0,
            indirect: bits & crate::feature::INDIRECT_DESC != 0,
        }
    }
}

/// Where a ring lies.
#[derive(Clone, Debug)]
pub struct Windows {
    /// The descriptor area.
    pub descriptors: Window,
    /// The driver area: the available ring, or the driver's event suppression.
    pub driver: Window,
    /// The device area: the used ring, or the device's event suppression.
    pub device: Window,
}

/// Bytes of a ring's areas: descriptors, driver's, device's.
pub const fn area_bytes(packed: bool, size: u16) -> (usize, usize, usize) {
    let n = size as usize;
    if packed {
        (n * DESCRIPTOR_BYTES, 4, 4)
    } else {
        (n * DESCRIPTOR_BYTES, 6 + 2 * n, 6 + 8 * n)
    }
}

/// Whether the event that the other side waits for lies in what was just passed (VIRTIO 2.7.10).
#[inline]
pub(crate) fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A descriptor, read once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub address: u64,
    pub len: u32,
    /// Split: flags then next. Packed: buffer identifier then flags.
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

/// Memory for a table of descriptors that must be copied out.
pub(crate) struct IndirectTable([u8; MAX_PIECES * DESCRIPTOR_BYTES]);

/// An indirect table.
pub(crate) struct Entries<'a> {
    /// How many it has; of one that is copied no more than [`MAX_PIECES`] can be got.
    pub count: u32,
    at: Place<'a>,
}

/// Where its descriptors are: each is read once, by itself where they lie together and aligned, else all of them together.
enum Place<'a> {
    Memory(View<'a>),
    Copied(&'a [u8]),
}

impl IndirectTable {
    /// The table that `at` points to.
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
