//! What a command counts as, of the operations that have costs.
//!
//! **Design.** Reads and writes by their bytes, which the short way looks up by itself ([`super::gates::Admission::admit`]). What
//! is done to many places counts as so many operations: ranges that are given back, zeroes by the MiB.

use super::super::io::IoOp;
use forebay_burst::cost::{CostTable, Frontend, Operation};
use forebay_burst::units::Units;

/// What is charged at most for zeroing: its bytes are on no link, and devices do it in their own way.
const MAX_ZEROED_BYTES: u64 = 1 << 20;
/// What zeroes or gives back counts as so many operations at most: a small budget must be able to save for it.
const MAX_PIECES: u64 = 32;

/// Of any command.
pub(super) fn cost_of(costs: &CostTable, frontend: Frontend, op: &IoOp) -> Units {
    let of = |operation, len_bytes| costs.of(frontend, operation, len_bytes);
    let (first, pieces) = match *op {
        IoOp::Read { len_bytes, .. } | IoOp::Compare { len_bytes, .. } => {
            return of(Operation::Read, len_bytes);
        }
        IoOp::Write { len_bytes, .. } | IoOp::CompareAndWrite { len_bytes, .. } => {
            return of(Operation::Write, len_bytes);
        }
        IoOp::WriteZeroes {
            len_bytes,
            deallocate,
            ..
        } => {
            let first = match deallocate {
                true => of(Operation::Other, 0),
                false => of(Operation::Write, len_bytes.min(MAX_ZEROED_BYTES) as u32),
            };
            (first, len_bytes.div_ceil(MAX_ZEROED_BYTES))
        }
        IoOp::Deallocate { ranges } => (of(Operation::Other, 0), ranges.into()),
        IoOp::Flush => (of(Operation::Other, 0), 1),
    };
    let (mut cost, other) = (first, of(Operation::Other, 0));
    for _ in 1..pieces.min(MAX_PIECES) {
        cost.add(&other);
    }
    cost
}
