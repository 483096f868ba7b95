//! Which of its spare extents a volume gets for a logical extent.
//!
//! *Stripe*: a new unit gets 16 aligned extents if possible, and its later extents join it. *Fill*,
//! or a single device: an extent continues a neighbour's run, else comes from the first device. Any
//! spare extent on an online device will do.

use super::PoolVolume;
use crate::extents::{
    Extents,
    allocator::Allocator,
    placement::{Pattern, UNIT_EXTENTS},
    runs::DeviceRun,
    space::Placement,
};
use std::ops::Range;

/// In a spare run of this size, streams but the volume's first start in the middle, so that both
/// parts can continue contiguously.
const SPLIT_EXTENTS: u64 = 4;

pub(crate) struct Placer<'a> {
    placement: Placement,
    pattern: &'a Pattern,
    extents: &'a Extents,
}

impl<'a> Placer<'a> {
    pub(crate) fn new(allocator: &'a Allocator, placement: Placement) -> Self {
        Self {
            placement,
            pattern: &allocator.pattern,
            extents: &allocator.extents,
        }
    }

    /// Takes the spare extent that fits `logical` best.
    pub(super) fn pick(&self, volume: &mut PoolVolume, logical: u64) -> Option<DeviceRun> {
        let striped = self.placement == Placement::Stripe && self.extents.devices() > 1;
        let at_most = |unit: u64| if striped { unit } else { u64::MAX };
        let into = logical % UNIT_EXTENTS;
        let reach = [at_most(into), at_most(UNIT_EXTENTS - 1 - into)];
        for (wish, reach) in volume.map.wishes(logical).into_iter().zip(reach) {
            if let Some(wish) = wish.filter(|wish| wish.distance <= reach) {
                let run = DeviceRun::new(wish.device, wish.extent, 1);
                if self.extents.is_online(run.device) && volume.spare.take(run) {
                    return Some(run);
                }
            }
        }
        let run = if striped {
            let wanted = self
                .pattern
                .device(volume.record.id, logical / UNIT_EXTENTS);
            wanted
                .filter(|device| self.extents.is_online(*device))
                .and_then(|device| volume.spare.longest_on(device))
                .or_else(|| self.longest(volume))
                .map(|longest| unit_in(longest, into))
        } else {
            let first = volume
                .spare
                .devices()
                .map(|(device, _)| device)
                .find(|device| self.extents.is_online(*device));
            first
                .and_then(|device| volume.spare.longest_on(device))
                .map(|longest| {
                    let split = longest.count >= SPLIT_EXTENTS && volume.map.mapped() > 0;
                    let shift = if split { longest.count / 2 } else { 0 };
                    DeviceRun::new(longest.device, longest.first.0 + shift, 1)
                })
        }?;
        volume.spare.take(run).then_some(run)
    }

    /// Takes a spare run for `logical` and unmapped neighbours in `within`; with stripe only in its
    /// unit. Returns the first logical extent too.
    pub(super) fn pick_around(
        &self,
        volume: &mut PoolVolume,
        logical: u64,
        mut within: Range<u64>,
    ) -> Option<(u64, DeviceRun)> {
        let striped = self.placement == Placement::Stripe && self.extents.devices() > 1;
        if striped {
            let unit = logical - logical % UNIT_EXTENTS;
            within = within.start.max(unit)..within.end.min(unit + UNIT_EXTENTS);
        }
        let wanted = within.end.checked_sub(within.start)?;
        // Continue the run before.
        let [before, _] = volume.map.wishes(within.start);
        let reach = if striped {
            within.start % UNIT_EXTENTS
        } else {
            u64::MAX
        };
        if let Some(wish) = before.filter(|wish| wish.distance <= reach)
            && self.extents.is_online(wish.device)
            && let Some(there) = volume.spare.run_of(wish.device, wish.extent)
        {
            let count = wanted.min(there.end() - wish.extent);
            let run = DeviceRun::new(wish.device, wish.extent, count);
            if within.start + count > logical && volume.spare.take(run) {
                return Some((within.start, run));
            }
        }
        let device = if striped {
            self.pattern
                .device(volume.record.id, logical / UNIT_EXTENTS)
        } else {
            let mut devices = volume.spare.devices().map(|(device, _)| device);
            devices.find(|device| self.extents.is_online(*device))
        };
        let device = device.filter(|device| self.extents.is_online(*device))?;
        let longest = volume.spare.longest_on(device)?;
        let (mut first, mut count) = (within.start, wanted);
        if count > longest.count {
            // As much as fits in one piece.
            let most = 1u64 << longest.count.ilog2();
            first = first.max(logical - logical % most);
            count = most.min(within.end - first);
        }
        let shift = if striped {
            let start = longest.first.0.next_multiple_of(UNIT_EXTENTS) + first % UNIT_EXTENTS;
            let fits = start + count <= longest.end();
            if fits { start - longest.first.0 } else { 0 }
        } else if volume.map.mapped() > 0 {
            let middle = longest.count / 2;
            (middle - middle % count).min(longest.count - count)
        } else {
            0
        };
        let run = DeviceRun::new(device, longest.first.0 + shift, count);
        volume.spare.take(run).then_some((first, run))
    }

    fn longest(&self, volume: &PoolVolume) -> Option<DeviceRun> {
        let spare = &volume.spare;
        spare
            .devices()
            .filter(|(device, _)| self.extents.is_online(*device))
            .filter_map(|(device, _)| spare.longest_on(device))
            .max_by_key(|run| run.count)
    }
}

/// In 16 aligned extents if possible.
fn unit_in(run: DeviceRun, into: u64) -> DeviceRun {
    let start = run.first.0.next_multiple_of(UNIT_EXTENTS);
    let first = if start + UNIT_EXTENTS <= run.end() {
        start + into
    } else {
        run.first.0
    };
    DeviceRun::new(run.device, first, 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_xlate::types::DeviceIndex;

    #[test]
    fn a_unit_lies_aligned_where_it_can() {
        let at = |first, count, into| {
            unit_in(DeviceRun::new(DeviceIndex(0), first, count), into)
                .first
                .0
        };
        assert_eq!(at(0, 64, 5), 5);
        assert_eq!(at(6, 64, 5), 21);
        assert_eq!(at(6, 20, 5), 6);
    }
}
