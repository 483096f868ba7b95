//! The vfio-user protocol as a server speaks it, without any I/O.
//!
//! # Purpose
//! A virtual machine monitor drives a PCI device that lives in another process through messages on a
//! Unix socket: *vfio-user Protocol Specification*, version 0.1 (QEMU's `docs/interop/vfio-user.rst`).
//! This crate frames those messages, checks them whole, and writes the answers.
//!
//! # Design
//! * [`wire`] has the numbers and the header; [`frame`] says how long a message is from its first bytes.
//! * [`Device`] describes what a client may ask about: regions, the parts of them that may be mapped, and
//!   interrupts.
//! * [`VfioSession`] turns a message into a [`Request`] that is within what the device has, or into the errno
//!   of its refusal. Judging changes nothing, so a message that was only peeked at can be judged again by
//!   a successor; what little state there is ([`VfioSession::negotiated`]) is a plain value.
//! * [`Message::answer`], [`Message::refuse`] and [`VfioSession::describe`] write answers into the caller's
//!   memory.
//!
//! # What it does not do
//! It opens no socket, receives no descriptor (it is told how many came), maps nothing. It sends no
//! message of its own: memory that comes without a descriptor can be named, but not reached. Not
//! offered: a second socket, several writes in one message, descriptors for region I/O, migration, dirty
//! pages. Those are refused with an errno, and their payload is consumed with the message.

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

/// The most bytes that one message reads from, or writes to, a region. Clients are told.
pub const MAX_DATA_BYTES: u32 = 64 << 10;

/// The longest message, header included: a write of [`MAX_DATA_BYTES`].
pub const MAX_MESSAGE_BYTES: usize = 16 + 16 + MAX_DATA_BYTES as usize;

/// The longest answer, header included: what a read of [`MAX_DATA_BYTES`] brings.
pub const MAX_ANSWER_BYTES: usize = MAX_MESSAGE_BYTES;

/// The most descriptors that come with one message. Clients are told.
pub const MAX_DESCRIPTORS: usize = 16;

/// The most regions of memory that a client may have mapped at once. Clients are told.
pub const MAX_DMA_MAPS: u32 = 256;
