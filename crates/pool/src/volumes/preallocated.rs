//! Preallocated extents: mappings that a volume gets before it writes there.
//!
//! A write fault may map a run of the volume's spare extents, unmapped neighbours included. They
//! read as zeros until written, even after a crash. The caller returns unwritten ones
//! ([`Pool::release`](crate::Pool::release)) and reports their number. They do not count as used.

use super::{Volumes, layers::Place, placer::Placer};
use crate::{
    error::Result,
    extents::{Extents, allocator::Allocator, runs::DeviceRun, space::Placement},
};
use forebay_xlate::types::{ExtentIndex, VolumeId};
use std::ops::Range;

/// The part of clean extents that may be preallocated; a crash leaks them for a time.
const CLEAN_PART: u64 = 2;
/// An upper limit of that loss in a large pool.
const MAX_PREALLOCATED_BYTES: u64 = 4 << 30;

/// A run mapped around a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Around {
    /// Its first logical extent.
    pub first: ExtentIndex,
    /// Its place.
    pub run: DeviceRun,
    /// The sequence of its mappings, which are not durable.
    pub commit_seq: u64,
}

impl Volumes {
    /// How many more extents may be preallocated for a volume.
    pub(crate) fn preallocation_room(&self, extents: &Extents, volume: VolumeId) -> u64 {
        let (_, clean) = self.free_for(extents, volume);
        let most = MAX_PREALLOCATED_BYTES / self.extent_bytes;
        (clean / CLEAN_PART)
            .min(most)
            .saturating_sub(self.preallocated())
    }

    /// Preallocated extents, as far as known.
    pub fn preallocated(&self) -> u64 {
        self.by_id.values().map(|volume| volume.preallocated).sum()
    }

    /// A volume's spare extents.
    pub fn spare_of(&self, volume: VolumeId) -> u64 {
        let volume = self.by_id.get(&volume);
        volume.map_or(0, |volume| volume.spare.extents())
    }

    pub(crate) fn set_preallocated(&mut self, volume: VolumeId, extents: u64) {
        if let Some(volume) = self.by_id.get_mut(&volume)
            && volume.image.is_none()
        {
            volume.preallocated = extents;
        }
    }

    /// `None` if no run of two or more is ready.
    pub(crate) fn map_around(
        &mut self,
        allocator: &mut Allocator,
        placement: Placement,
        volume: VolumeId,
        logical: u64,
        around: Range<u64>,
    ) -> Result<Option<Around>> {
        let (extent_bytes, seq) = (self.extent_bytes, self.next_seq);
        let target = self.get(volume)?;
        let (from, to) = (around.start, around.end.min(target.extents(extent_bytes)));
        let alone = to.saturating_sub(from) < 2 || target.spare.extents() < 2;
        if alone || !(from..to).contains(&logical) {
            return Ok(None);
        }
        let Place::Zeros(zeros) = self.layers.place(target, logical, to - logical) else {
            return Ok(None);
        };
        let is_unmapped = |at| matches!(self.layers.place(target, at, 1), Place::Zeros(_));
        let mut first = logical;
        while first > from && is_unmapped(first - 1) {
            first -= 1;
        }
        let within = first..logical + zeros;
        let target = self.get_mut(volume)?;
        let placer = Placer::new(allocator, placement);
        let Some((first, run)) = placer.pick_around(target, logical, within) else {
            return Ok(None);
        };
        target.map.insert_run(first, run);
        target
            .pending
            .add_run(first..first + run.count, run.device, seq);
        target.used += run.count;
        allocator.extents.mark_allocated(run);
        self.next_seq += 1;
        Ok(Some(Around {
            first: ExtentIndex(first),
            run,
            commit_seq: seq,
        }))
    }
}
