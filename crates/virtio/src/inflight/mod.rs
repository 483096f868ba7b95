//! vhost-user's inflight region: the chains that a device has taken and not returned, in shared
//! memory.
//!
//! Layouts and order of stores follow the specification ("Inflight I/O tracking"), so that any
//! backend can succeed another. A device may die between any two instructions; its successor
//! returns each outstanding chain once. The client shares the region, so it is checked, and read
//! only on recovery.

pub mod packed;
pub mod split;

pub(crate) const VERSION: u16 = 1;
const HEAD_BYTES: usize = 32;
const ENTRY_BYTES: usize = 32;

/// Bytes per queue, enough for both layouts. Regions follow each other.
#[must_use]
pub const fn queue_bytes(size: u16) -> usize {
    (HEAD_BYTES + size as usize * ENTRY_BYTES).next_multiple_of(64)
}
