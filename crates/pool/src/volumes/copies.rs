//! Copies of shared extents for writes.
//!
//! The caller copies a shared extent to one of the volume's spare extents, which then becomes the
//! volume's own. Until that is durable, a power cut leaves the old mapping.
//!
//! **Not here:** the copying, the drain of earlier grants (the caller).

use super::{PoolVolume, placer::Placer};
use crate::{
    error::{PoolError, Result},
    extents::runs::DeviceRun,
};

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
    /// All writes to it have ended.
    Ended,
    /// A request may still write to it.
    Hangs,
}

impl PoolVolume {
    /// Takes a spare extent for a copy of the shared extent `logical`. `None` if no spare extent can
    /// be used.
    pub(crate) fn begin_copy(
        &mut self,
        placer: &Placer<'_>,
        logical: u64,
        source: DeviceRun,
    ) -> Result<Option<ExtentCopy>> {
        if self.copying.contains_key(&logical) {
            return Err(PoolError::in_use(format!(
                "extent {logical} of {} is being copied",
                self.record.id
            )));
        }
        let Some(target) = placer.pick(self, logical) else {
            return Ok(None);
        };
        self.copying.insert(logical, target);
        self.used += 1;
        Ok(Some(ExtentCopy { source, target }))
    }

    /// Takes the target of a copy that has ended or failed.
    pub(crate) fn take_copy(&mut self, logical: u64) -> Result<DeviceRun> {
        let taken = self.copying.remove(&logical);
        taken.ok_or_else(|| {
            let id = self.record.id;
            PoolError::not_found(format!("extent {logical} of {id} is not being copied"))
        })
    }

    /// Maps the target of a complete copy.
    pub(crate) fn end_copy(&mut self, logical: u64, seq: u64) -> Result<DeviceRun> {
        let target = self.take_copy(logical)?;
        self.map.insert(logical, target.device, target.first.0);
        self.pending.add(logical, target.device, seq);
        Ok(target)
    }
}
