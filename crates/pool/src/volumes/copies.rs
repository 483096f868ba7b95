//! Copies of shared extents for writes.
//!
//! The caller copies a shared extent to one of the volume's spare extents, which then becomes the
//! volume's own. Until that is durable, a power cut leaves the old mapping.
//!
//! **Not here:** the copying, the drain of earlier grants (the caller).

use super::{Volumes, layers::Place, placer::Placer};
use crate::{
    error::{PoolError, Result},
    extents::{allocator::Allocator, runs::DeviceRun, space::Placement},
    journal::Journal,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};

/// A copy to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentCopy {
    /// The extent of a layer.
    pub source: DeviceRun,
    /// The volume's extent, whose content is undefined until the copy has ended.
    pub target: DeviceRun,
}

/// What becomes of a copy's target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyFailure {
    /// Nothing writes to it any more.
    Ended,
    /// A request may still write to it.
    Hangs,
}

impl Volumes {
    /// Takes a spare extent for a copy of the shared extent `logical`. `None` if no spare extent can
    /// be used.
    pub(crate) fn begin_copy(
        &mut self,
        allocator: &mut Allocator,
        placement: Placement,
        id: VolumeId,
        logical: u64,
    ) -> Result<Option<ExtentCopy>> {
        let volume = self.get(id)?;
        let Place::Shared(source) = self.place(volume, logical, 1) else {
            return Err(PoolError::invalid(format!(
                "extent {logical} of {id} is not shared"
            )));
        };
        if volume.copying.contains_key(&logical) {
            return Err(PoolError::in_use(format!(
                "extent {logical} of {id} is being copied"
            )));
        }
        let volume = self.get_mut(id)?;
        let Some(target) = Placer::new(allocator, placement).pick(volume, logical) else {
            return Ok(None);
        };
        volume.copying.insert(logical, target);
        volume.used += 1;
        allocator.extents.mark_allocated(target);
        Ok(Some(ExtentCopy { source, target }))
    }

    /// The copy is complete: maps it. Returns the mapping's sequence, which is not durable.
    pub(crate) fn end_copy(
        &mut self,
        allocator: &mut Allocator,
        id: VolumeId,
        logical: ExtentIndex,
    ) -> Result<(DeviceRun, u64)> {
        let seq = self.next_seq;
        let target = self.take_copy(id, logical)?;
        let volume = self.get_mut(id)?;
        volume.map.insert(logical.0, target.device, target.first.0);
        volume.pending.add(logical.0, target.device, seq);
        allocator.extents.mark_allocated(target);
        self.next_seq += 1;
        Ok((target, seq))
    }

    /// The copy failed: frees or quarantines its target.
    pub(crate) fn fail_copy(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        id: VolumeId,
        logical: ExtentIndex,
        failure: CopyFailure,
    ) -> Result<()> {
        let target = self.take_copy(id, logical)?;
        match failure {
            CopyFailure::Ended => allocator.free(journal, target),
            CopyFailure::Hangs => allocator.quarantine(journal, target),
        }
        self.settle_account(id);
        Ok(())
    }

    fn take_copy(&mut self, id: VolumeId, logical: ExtentIndex) -> Result<DeviceRun> {
        let taken = self.get_mut(id)?.copying.remove(&logical.0);
        taken.ok_or_else(|| {
            PoolError::not_found(format!("extent {} of {id} is not being copied", logical.0))
        })
    }

    /// A predecessor began a copy to this extent, and its end is unknown. Returns whether the extent
    /// must be freed.
    pub(crate) fn adopt_copy(&mut self, id: VolumeId, device: DeviceIndex, extent: u64) -> bool {
        let run = DeviceRun::new(device, extent, 1);
        let volume = self.by_id.get_mut(&id);
        volume.is_some_and(|volume| volume.spare.take(run))
    }
}
