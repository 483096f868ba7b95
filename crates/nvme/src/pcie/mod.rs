//! An NVMe controller on PCI Express (*NVMe over PCIe Transport Specification 1.0*), without I/O.
//!
//! Guest memory, behind [`Memory`], may change at any time, so it is copied once and then checked.
//! A successor needs [`FunctionState`] and the queue cursors, which the owner records because they
//! change with every command. Admin commands go to [`crate::controller`], except those of
//! memory-based queues.
//!
//! There is no controller memory buffer, NVM subsystem reset, INTx or MSI. Vector mask bits are
//! only stored: the monitor owns the table and applies masks by vfio messages.

mod admin;
pub mod data;
mod function;
pub mod interrupt;
pub mod queue;
pub mod shadow;
pub mod space;
mod state;
#[cfg(test)]
pub(crate) mod tests;

pub use admin::{AdminRun, Change};
pub use function::{Function, RegisterEffect};
pub use state::{CqState, FunctionState, OUTBOX, SqState};

/// Maximum I/O queue pairs.
pub const MAX_IO_QUEUES: u16 = 64;
/// Queue pairs including the admin queue.
pub const QUEUES: usize = MAX_IO_QUEUES as usize + 1;
/// Interrupt vectors, one per completion queue.
pub const VECTORS: u16 = QUEUES as u16;
/// PCI vendor ID: unassigned, as the PCI-SIG assigned none to Forebay.
pub const VENDOR_ID: u16 = 0xF0BA;
/// PCI device ID.
pub const DEVICE_ID: u16 = 0x0001;

/// Size of BAR 0: registers, and doorbells at [`DOORBELLS_AT`].
pub const BAR0_BYTES: u64 = 0x4000;
/// Start of the doorbells (PCIe Transport 1.0, 3.1.2); the stride is 4.
pub const DOORBELLS_AT: u64 = 0x1000;
/// Size of the doorbell page.
pub const DOORBELLS_BYTES: u64 = 0x1000;
/// Size of BAR 4: the MSI-X table, and pending bits at [`PBA_AT`].
pub const BAR4_BYTES: u64 = 0x2000;
/// Start of the pending bits.
pub const PBA_AT: u64 = 0x1000;
/// Size of configuration space; it has no extended capabilities.
pub const CONFIG_BYTES: u64 = 4096;

/// Page size: CC.MPS is 0.
pub const PAGE_BYTES: u64 = 4096;

/// Guest memory.
pub trait Memory {
    /// Reads. Returns false if not all is accessible; `into` is then undefined.
    fn read(&self, address: u64, into: &mut [u8]) -> bool;
    /// Writes. Returns false if not all is accessible.
    fn write(&self, address: u64, from: &[u8]) -> bool;
    /// Whether a ring fits: contiguous and accessible, writable if `write`.
    fn holds(&self, address: u64, bytes: u64, write: bool) -> bool;
}

fn addresses(from: u64, bytes: usize) -> impl Iterator<Item = u64> {
    (0..bytes as u64).map(move |n| from.saturating_add(n))
}

/// A doorbell (PCIe Transport 1.0, 3.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbell {
    /// Submission Queue Tail.
    Tail(u16),
    /// Completion Queue Head.
    Head(u16),
}

impl Doorbell {
    /// The doorbell at an offset in BAR 0.
    pub fn at(offset: u64) -> Option<Self> {
        let from = offset.checked_sub(DOORBELLS_AT)?;
        let qid = u16::try_from(from / 8).ok()?;
        if usize::from(qid) >= QUEUES {
            return None;
        }
        match from % 8 {
            0 => Some(Self::Tail(qid)),
            4 => Some(Self::Head(qid)),
            _ => None,
        }
    }

    /// Offset in the pages of doorbells, shadow doorbells and event indexes.
    pub const fn offset(self) -> usize {
        match self {
            Self::Tail(qid) => qid as usize * 8,
            Self::Head(qid) => qid as usize * 8 + 4,
        }
    }
}
