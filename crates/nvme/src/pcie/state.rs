//! What a successor must know of a function, but for the cursors of its queues.
//!
//! Design: native integers without padding, as in [`ControllerState`]. Does NOT hold doorbells, heads and
//! tails: those change with every command.

use super::space::SPACE_BYTES;
use super::{PAGE_BYTES, QUEUES, VECTORS};
use crate::Cqe;
use crate::controller::{ControllerState, StateError};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The last completions of the Admin queue: more are never under way.
pub const OUTBOX: usize = 8;
/// Bytes of the MSI-X table.
pub(super) const MSIX_TABLE_BYTES: usize = VECTORS as usize * 16;

/// A submission queue.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct SqState {
    /// Where it begins.
    pub base: u64,
    /// Its entries; 0: there is none.
    pub entries: u32,
    /// Its completion queue.
    pub cqid: u16,
    /// Zero.
    pub reserved: u16,
}

/// A completion queue.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct CqState {
    /// Where it begins.
    pub base: u64,
    /// Its entries; 0: there is none.
    pub entries: u32,
    /// Its interrupt vector.
    pub vector: u16,
    /// 1: interrupts are enabled.
    pub interrupts: u16,
}

/// Everything that changes in a function. Index 0 of the queues is the Admin queue's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FunctionState {
    /// The controller's.
    pub controller: ControllerState,
    /// Admin Submission Queue Base Address.
    pub asq: u64,
    /// Admin Completion Queue Base Address.
    pub acq: u64,
    /// Admin Queue Attributes.
    pub aqa: u32,
    /// Zero.
    pub reserved: u32,
    /// Commands taken from the Admin queue, since it was enabled.
    pub admin_taken: u64,
    /// Where the shadow doorbells are; 0: there are none.
    pub shadow: u64,
    /// Where the event indexes are.
    pub event_index: u64,
    /// Completions of the Admin queue since it was enabled: the last of them are in `outbox`.
    pub admin_completed: u64,
    /// Completion n is at n modulo its length, without its phase tag.
    pub outbox: [[u8; 16]; OUTBOX],
    /// Submission queues.
    pub sqs: [SqState; QUEUES],
    /// Completion queues.
    pub cqs: [CqState; QUEUES],
    /// The MSI-X table.
    pub msix: [u8; MSIX_TABLE_BYTES],
    /// Configuration space.
    pub space: [u8; SPACE_BYTES],
}
const _: () = assert!(size_of::<FunctionState>().is_multiple_of(8));

impl FunctionState {
    /// A completion of the Admin queue that is in the outbox, without its phase tag.
    pub fn completion(&self, number: u64) -> Cqe {
        zerocopy::transmute!(self.outbox[(number % OUTBOX as u64) as usize])
    }

    /// Checks what the rest relies on; the controller's part is checked by itself.
    pub(super) fn check(&self) -> Result<(), StateError> {
        let ok = |good: bool, field| if good { Ok(()) } else { Err(StateError(field)) };
        let aligned = |address: u64| address.is_multiple_of(PAGE_BYTES);
        for (qid, sq) in self.sqs.iter().enumerate() {
            if sq.entries == 0 {
                continue;
            }
            ok((2..=4096).contains(&sq.entries), "submission queue's size")?;
            ok(aligned(sq.base), "submission queue's address")?;
            let cq = self.cqs.get(usize::from(sq.cqid));
            ok(cq.is_some_and(|cq| cq.entries > 0), "cqid")?;
            ok((qid == 0) == (sq.cqid == 0), "cqid")?;
        }
        for cq in self.cqs.iter().filter(|cq| cq.entries > 0) {
            ok((2..=4096).contains(&cq.entries), "completion queue's size")?;
            ok(aligned(cq.base), "completion queue's address")?;
            ok(cq.vector < VECTORS && cq.interrupts <= 1, "vector")?;
        }
        ok(
            (self.sqs[0].entries > 0) == (self.cqs[0].entries > 0),
            "admin queue",
        )?;
        ok(
            aligned(self.shadow) && aligned(self.event_index),
            "shadow doorbells",
        )?;
        ok(
            (self.shadow == 0) == (self.event_index == 0),
            "shadow doorbells",
        )
    }
}
