//! Costs of commands, from the costs of operations.
//!
//! **Design.** [`super::admission::Admission::admit`] looks up reads and writes itself. Others cost an
//! operation per range or MiB. Written zeroes also take device time by their bytes, but few of the
//! tenant's bytes.

use crate::io::command::IoOp;
use forebay_qos::cost::{CostTable, Operation, Route};
use forebay_qos::resources::{Resource, ResourceVector};

/// Most of a tenant's bytes charged for zeroing, which uses no link; also the size of a piece.
const MAX_ZEROED_BYTES: u64 = 1 << 20;
/// Most operations per command, so that a small budget can save for it.
const MAX_PIECES: u64 = 32;

pub(super) fn cost_of(costs: &CostTable, route: Route, op: &IoOp) -> ResourceVector {
    let of = |operation, len_bytes| costs.of(route, operation, len_bytes);
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
    let (mut cost, mut other) = (first, of(Operation::Other, 0));
    if let IoOp::WriteZeroes {
        deallocate: false, ..
    } = op
    {
        other[Resource::DeviceWrite] = first[Resource::DeviceWrite];
    }
    for _ in 1..pieces.min(MAX_PIECES) {
        cost.add(&other);
    }
    cost
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_qos::cost::{Transport, default_profiles};

    #[test]
    fn zeroes_take_a_devices_time_by_the_mib() {
        let costs = CostTable::new(default_profiles());
        let zeroes = |len_bytes, deallocate| {
            let op = IoOp::WriteZeroes {
                offset_bytes: 0,
                len_bytes,
                deallocate,
                fua: false,
            };
            cost_of(&costs, Transport::Pcie.into(), &op)
        };
        let write = costs.of(Transport::Pcie, Operation::Write, 1 << 20);
        let at_device = |mib: u64, deallocate| zeroes(mib << 20, deallocate)[Resource::DeviceWrite];
        for (mib, times) in [(1, 1), (4, 4), (32, 32), (256, 32)] {
            assert_eq!(at_device(mib, false), times * write[Resource::DeviceWrite]);
            let bytes = zeroes(mib << 20, false)[Resource::Bytes];
            assert_eq!(bytes, 1 << 20, "{mib}");
        }
        assert!(at_device(256, true) < write[Resource::DeviceWrite]);
    }
}
