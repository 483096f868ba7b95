//! An NVMe controller on PCI Express (*NVMe over PCIe Transport Specification 1.0*), without any I/O.
//!
//! # Purpose
//! What a driver sees of a PCI function: configuration space ([`space`]), registers and queues
//! ([`Function`]), where a command's data lies ([`data`]), completions, doorbells and interrupts
//! ([`queue`], [`shadow`], [`interrupt`]).
//!
//! # Design
//! Memory is a machine's and is reached through [`Memory`]; everything there may change at any time, so it
//! is copied once and then checked. What a successor must know is one plain structure ([`FunctionState`]),
//! but for the cursors of queues, which change with every command and which the owner records itself. The
//! commands of the Admin queue are [`crate::controller`]'s, with those of memory-based queues added.
//!
//! # What it does not do
//! It starts no command, raises no interrupt and knows no vfio-user. There is no memory buffer of the controller, no
//! NVM subsystem reset, no pin interrupt, no MSI. Vectors' mask bits are kept for
//! whoever reads them: whether an interrupt gets through is up to the machine that is given it, whose monitor has the
//! table (vfio: masks are set by messages of their own).

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

/// The most I/O queue pairs of a controller.
pub const MAX_IO_QUEUES: u16 = 64;
/// Queue pairs, the Admin queue's among them.
pub const QUEUES: usize = MAX_IO_QUEUES as usize + 1;
/// Interrupt vectors: one for each completion queue.
pub const VECTORS: u16 = QUEUES as u16;
/// PCI Vendor ID. None is assigned to Forebay by the PCI-SIG; this one is nobody's.
pub const VENDOR_ID: u16 = 0xF0BA;
/// PCI Device ID.
pub const DEVICE_ID: u16 = 0x0001;

/// Bytes of BAR 0: registers, and doorbells from [`DOORBELLS_AT`] on.
pub const BAR0_BYTES: u64 = 0x4000;
/// Where the doorbells begin in BAR 0 (PCIe Transport 1.0, 3.1.2), with a stride of 4.
pub const DOORBELLS_AT: u64 = 0x1000;
/// The page that has all of them.
pub const DOORBELLS_BYTES: u64 = 0x1000;
/// Bytes of BAR 4: the MSI-X table, and the Pending Bit Array at [`PBA_AT`].
pub const BAR4_BYTES: u64 = 0x2000;
/// Where the Pending Bit Array begins in BAR 4.
pub const PBA_AT: u64 = 0x1000;
/// Bytes of configuration space, which has no extended capabilities.
pub const CONFIG_BYTES: u64 = 4096;

/// Memory page size: CC.MPS is 0.
pub const PAGE_BYTES: u64 = 4096;

/// A machine's memory.
pub trait Memory {
    /// Copies out what is at an address. False, and nothing is promised of `into`, where not all of it can
    /// be reached.
    fn read(&self, address: u64, into: &mut [u8]) -> bool;
    /// Copies in. False where not all of it can be reached.
    fn write(&self, address: u64, from: &[u8]) -> bool;
    /// Whether a ring can be there: reachable in one piece, to be written if `write`.
    fn holds(&self, address: u64, bytes: u64, write: bool) -> bool;
}

/// The addresses of so many bytes from one on.
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
    /// The doorbell at an offset in BAR 0; `None` where there is none.
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

    /// Its offset in the doorbells' page, and in shadow doorbell and event index buffers.
    pub const fn offset(self) -> usize {
        match self {
            Self::Tail(qid) => qid as usize * 8,
            Self::Head(qid) => qid as usize * 8 + 4,
        }
    }
}
