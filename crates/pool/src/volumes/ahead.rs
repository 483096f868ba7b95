//! Places ahead: mappings that a volume gets before it writes there.
//!
//! **Design.** A write fault may be answered with a run of extents instead of one, for unmapped
//! neighbours too: mappings like any other, of clean extents from the volume's own stock, so that
//! they read as zeros until they are written, whatever becomes of power or processes. Who gives them
//! takes back what was never written ([`Pool::release`](crate::Pool::release)), and tells from time to time how many there
//! are: they are not called used, and never take so much that too little stays clean for others.
//!
//! **Not here:** when and about what a window is opened, and who wrote where (the caller).

use super::{Volumes, placer::Placer};
use crate::{
    error::Result,
    extents::{Extents, allocator::Allocator, runs::DeviceRun, space::Placement},
};
use forebay_xlate::types::{ExtentIndex, VolumeId};
use std::ops::Range;

/// Of what is clean and free, this part may lie ahead of writes: so much is lost to use when a process
/// dies before it is taken back.
const CLEAN_PART: u64 = 2;
/// And no more than this, so that in a large pool such a loss is small.
const MOST_AHEAD_BYTES: u64 = 4 << 30;

/// A run that was mapped around a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Around {
    /// The first logical extent of it.
    pub first: ExtentIndex,
    /// Where it lies.
    pub run: DeviceRun,
    /// The sequence of its mappings, which are not durable.
    pub commit_seq: u64,
}

impl Volumes {
    /// How many more extents may be mapped ahead of a volume's writes in a pool that is not filling up: none where they
    /// are owed to others.
    pub(crate) fn room_ahead(&self, extents: &Extents, volume: VolumeId) -> u64 {
        let (_, clean) = self.free_for(extents, volume);
        let most = MOST_AHEAD_BYTES / self.extent_bytes;
        (clean / CLEAN_PART).min(most).saturating_sub(self.ahead())
    }

    /// How many mapped extents lie ahead of writes, as far as is known.
    pub fn ahead(&self) -> u64 {
        self.by_id.values().map(|volume| volume.ahead).sum()
    }

    /// How many extents a volume has in stock.
    pub fn stock_of(&self, volume: VolumeId) -> u64 {
        let volume = self.by_id.get(&volume);
        volume.map_or(0, |volume| volume.stock.extents())
    }

    /// How many of a volume's mapped extents lie ahead of its writes, as far as is known.
    pub(crate) fn set_ahead(&mut self, volume: VolumeId, extents: u64) {
        if let Some(volume) = self.by_id.get_mut(&volume) {
            volume.ahead = extents;
        }
    }

    /// Maps an unmapped extent with its unmapped neighbours in `around`, as far as they get one run. `None` where there
    /// is not at once something for it and a neighbour.
    pub(crate) fn map_around(
        &mut self,
        allocator: &mut Allocator,
        placement: Placement,
        volume: VolumeId,
        logical: u64,
        around: Range<u64>,
    ) -> Result<Option<Around>> {
        let (extent_bytes, seq) = (self.extent_bytes, self.next_seq);
        let target = self.get_mut(volume)?;
        let (from, to) = (around.start, around.end.min(target.extents(extent_bytes)));
        let alone = to.saturating_sub(from) < 2 || target.stock.extents() < 2;
        if alone || !(from..to).contains(&logical) || target.map.get(logical).is_some() {
            return Ok(None);
        }
        let mut first = logical;
        while first > from && target.map.get(first - 1).is_none() {
            first -= 1;
        }
        let within = first..logical + target.map.hole_at(logical, to - logical);
        let placer = Placer::new(allocator, placement);
        let Some((first, run)) = placer.pick_around(target, logical, within) else {
            return Ok(None);
        };
        target.map.insert_run(first, run);
        target
            .pending
            .add_run(first..first + run.count, run.device, seq);
        target.used += run.count;
        allocator.extents.mark_moved(run);
        self.next_seq += 1;
        Ok(Some(Around {
            first: ExtentIndex(first),
            run,
            commit_seq: seq,
        }))
    }
}
