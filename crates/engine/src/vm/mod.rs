//! Machines: exports that a virtual machine's monitor, or a user-space driver, reaches by a Unix socket.
//!
//! **Purpose.** Both kinds (NVMe over vfio-user, vhost-user-blk) have the same needs: one client at a
//! time on one socket, descriptors of memory and interrupts, messages that must survive the engine. This
//! is their common part; a kind is a [`frontend::Frontend`].
//!
//! **Design.** One [`Machines`] for each reactor. **Not here:** accepting (the control thread's door),
//! what the messages mean.

#![allow(dead_code)]

pub(crate) mod client;
pub(crate) mod descriptor;
pub(crate) mod file;
pub(crate) mod frontend;
pub(crate) mod signal;

/// How long a client may take to go when its export is removed.
pub(crate) const REMOVAL_GRACE_NS: u64 = 5_000_000_000;

/// The top byte of the epoll keys of machines.
pub(crate) const KEY_BYTE: u64 = 0x4D;

/// The epoll key of a client's socket (0) or of what it watches (its slot + 1).
fn key(index: u32, generation: u16, what: usize) -> u64 {
    KEY_BYTE << 56
        | u64::from(generation) << 40
        | u64::from(index & 0xFF_FFFF) << 16
        | (what as u64 & 0xFFFF)
}
