//! State of a function for a successor, without padding, as [`ControllerState`].
//!
//! Doorbells, heads and tails are not included: they change with every command.

use super::space::SPACE_BYTES;
use super::{PAGE_BYTES, QUEUES, VECTORS};
use crate::Cqe;
use crate::controller::{ControllerState, StateError};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Admin completions kept; more are never pending.
pub const OUTBOX: usize = 8;
pub(super) const MSIX_TABLE_BYTES: usize = VECTORS as usize * 16;

/// A submission queue.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct SqState {
    /// Address.
    pub base: u64,
    /// Size; 0: no queue.
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
    /// Address.
    pub base: u64,
    /// Size; 0: no queue.
    pub entries: u32,
    /// Interrupt vector.
    pub vector: u16,
    /// 1: interrupts enabled.
    pub interrupts: u16,
}

/// A function's changing state. Queue 0 is the admin queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FunctionState {
    /// The controller's state.
    pub controller: ControllerState,
    /// Admin submission queue base.
    pub asq: u64,
    /// Admin completion queue base.
    pub acq: u64,
    /// Admin queue attributes.
    pub aqa: u32,
    /// Zero.
    pub reserved: u32,
    /// Admin commands taken since enable.
    pub admin_taken: u64,
    /// Address of the shadow doorbells; 0: none.
    pub shadow: u64,
    /// Address of the event indexes.
    pub event_index: u64,
    /// Admin completions since enable; the last are in `outbox`.
    pub admin_completed: u64,
    /// Completion n, without phase tag, is at n modulo the length.
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
    /// An admin completion in the outbox, without phase tag.
    pub fn completion(&self, number: u64) -> Cqe {
        zerocopy::transmute!(self.outbox[(number % OUTBOX as u64) as usize])
    }

    /// Validates the state, except the controller's.
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
