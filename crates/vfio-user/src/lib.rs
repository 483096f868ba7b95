//! The server side of vfio-user without I/O: *vfio-user Protocol Specification*, version 0.1
//! (QEMU's `docs/interop/vfio-user.rst`).
//!
//! A VM's monitor drives a PCI device in another process by messages on a Unix socket. [`frame`]
//! delimits a message; [`VfioSession`] checks it against the [`Device`] and returns a [`Request`]
//! or an errno. [`Message::answer`], [`Message::refuse`] and [`VfioSession::describe`] write
//! answers. Judging has no effect, so a successor can judge a peeked message again.
//!
//! **Not here:** sockets, descriptors, mapping memory. Memory without a descriptor is inaccessible.
//! Refused: a second socket, several writes in one message, descriptors for region I/O, migration,
//! dirty pages.

pub mod device;
pub mod errno;
mod request;
mod session;
#[cfg(test)]
mod tests;
mod version;
pub mod wire;

pub use device::{Device, Irq, Region, SparseArea};
pub use errno::Errno;
pub use request::{DmaMap, DmaUnmap, IrqAction, IrqData, RegionAccess, Request, SetIrqs};
pub use session::{Message, Reply, VfioSession};
pub use version::{MAX_VERSION_DATA_BYTES, Negotiated};
pub use wire::{Broken, Header, MessageFrame, frame};

/// The most bytes of a region access. Clients are told.
pub const MAX_DATA_BYTES: u32 = 64 << 10;

/// The longest message: a write of [`MAX_DATA_BYTES`] with its headers.
pub const MAX_MESSAGE_BYTES: usize = 16 + 16 + MAX_DATA_BYTES as usize;

/// The longest answer: a read of [`MAX_DATA_BYTES`] with its headers.
pub const MAX_ANSWER_BYTES: usize = MAX_MESSAGE_BYTES;

/// The most descriptors in one message. Clients are told.
pub const MAX_DESCRIPTORS: usize = 16;

/// The most memory regions mapped at once. Clients are told.
pub const MAX_DMA_MAPS: u32 = 256;
