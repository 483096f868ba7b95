//! Adoption: a new daemon learns its predecessor's grants.
//!
//! The caller passes in each grant of the grant table; those of reserved extents become mappings
//! again. In the same boot, reserved extents without a grant were never written and are spare
//! again; otherwise they are dirty. That needs a table entry from before the grant until after the
//! commit (`faults`).

use super::Pool;
use crate::{
    error::{PoolError, Result},
    extents::runs::DeviceRun,
    volumes::layers::Place,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};

/// The result for one grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adopted {
    /// The catalog has this mapping.
    Durable,
    /// An extent was reserved and is mapped again.
    Uncommitted,
    /// It contradicts the catalog: revoke and drain it before any zero-fill.
    Stale,
}

/// The result of adoption.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AdoptionReport {
    /// Restored mappings, to be committed.
    pub uncommitted: u64,
    /// Reserved extents that are spare again.
    pub spare: u64,
    /// Extents that must be zero-filled.
    pub dirty: u64,
}

impl Pool {
    /// Adopts a grant (no holes); may be repeated. On `NotFound` the volume is gone: treat the
    /// grant as [`Adopted::Stale`].
    pub fn adopt_grant(
        &mut self,
        volume: VolumeId,
        logical: ExtentIndex,
        device: DeviceIndex,
        extent: ExtentIndex,
        count: u64,
        commit_seq: u64,
    ) -> Result<Adopted> {
        if !self.adopting {
            return Err(PoolError::invalid(
                "grants can be adopted only once, right after opening",
            ));
        }
        let extent_bytes = self.info.extent_bytes;
        // Earlier sequences are lower.
        let ours = commit_seq < self.volumes.next_seq;
        let on_device = self
            .devices
            .get(usize::from(device.0))
            .map_or(0, |device| device.extents);
        let volumes = &mut self.volumes;
        let target = volumes.get(volume)?;
        let end = target.extents(extent_bytes);
        if let Some(image) = target.image {
            let run = DeviceRun::new(device, extent.0, count);
            let is_there = image.run(logical.0, count, end) == Some(run);
            return Ok(if is_there {
                Adopted::Durable
            } else {
                Adopted::Stale
            });
        }
        let known = count.min(on_device.saturating_sub(extent.0));
        let (mut fresh, mut stale) = (false, known < count);
        let mut doubtful = Vec::new();
        for at in 0..known {
            let (logical, extent) = (logical.0.saturating_add(at), extent.0 + at);
            let run = DeviceRun::new(device, extent, 1);
            let target = volumes.get(volume)?;
            if volumes.layers.place(target, logical, 1) == Place::Shared(run) {
                continue;
            }
            let target = volumes.get_mut(volume)?;
            match target.map.get(logical) {
                Some(place) if place == (device, extent) => {
                    // Durable, or adopted a moment ago.
                    fresh |= target.pending.get(logical).is_some();
                }
                None if ours && logical < end && target.spare.take(run) => {
                    target.map.insert(logical, device, extent);
                    target.pending.add(logical, device, commit_seq);
                    fresh = true;
                }
                _ => {
                    stale = true;
                    // It may hold data.
                    if target.spare.take(run) {
                        doubtful.push(run);
                    }
                }
            }
        }
        self.allocator.free_all(&mut self.journal, &doubtful);
        Ok(match (stale, fresh) {
            (true, _) => Adopted::Stale,
            (false, true) => Adopted::Uncommitted,
            (false, false) => Adopted::Durable,
        })
    }

    /// Ends adoption. Pass `true` only if the opened pool's
    /// [`PoolInfo::boot_id`](crate::PoolInfo::boot_id) is this boot's, and the grant table had both
    /// ids and was passed in completely. Otherwise pass `false`, set the boot id, commit, and only
    /// then make a new grant table. An earlier empty one would vouch, after a crash, for written
    /// extents.
    pub fn finish_adoption(&mut self, same_boot: bool) -> Result<AdoptionReport> {
        if !self.adopting {
            return Err(PoolError::invalid(
                "grants can be adopted only once, right after opening",
            ));
        }
        self.adopting = false;
        let mut report = AdoptionReport::default();
        let mut doubtful = Vec::new();
        for volume in self.volumes.by_id.values_mut() {
            report.uncommitted += volume.pending.len();
            if same_boot {
                report.spare += volume.spare.extents();
            } else {
                doubtful.extend(volume.spare.drain());
            }
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        report.dirty += allocator.free_all(journal, &doubtful);
        if !same_boot {
            // No request of that boot hangs.
            report.dirty += allocator.end_all_quarantine(journal);
        }
        let volumes: Vec<VolumeId> = self.volumes.by_id.keys().copied().collect();
        for volume in volumes {
            self.volumes.settle_account(volume);
        }
        self.allocator.update_pattern();
        Ok(report)
    }
}
