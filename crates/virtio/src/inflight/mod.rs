//! The inflight region of vhost-user: which chains a device has taken and not yet returned, in shared memory.
//!
//! **Design.** The layouts and the order of stores are those of the vhost-user specification ("Inflight I/O tracking"),
//! so that any backend can take up what another left. A store is never seen before one that came earlier
//! ([`crate::ring::Window`]), so a device may die between any two instructions: its successor returns each chain that
//! the driver has not got back, once, and none that it has. The region is shared with the client: what is read from it
//! is checked, and it is read only when a device takes up what another left. [`split`], [`packed`]: the two layouts.

pub mod packed;
pub mod split;

/// The version of both layouts.
pub(crate) const VERSION: u16 = 1;
/// Bytes of the head of a queue's region, of either layout.
const HEAD_BYTES: usize = 32;
/// Bytes of an entry of the longer layout.
const ENTRY_BYTES: usize = 32;

/// Bytes of the region of one queue, long enough for either layout. The next queue's follows it.
#[must_use]
pub const fn queue_bytes(size: u16) -> usize {
    (HEAD_BYTES + size as usize * ENTRY_BYTES).next_multiple_of(64)
}
