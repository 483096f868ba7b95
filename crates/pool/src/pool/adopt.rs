//! Adoption: a new daemon learns its predecessor's grants.
//!
//! After [`open`](fn@crate::open) the caller passes in each grant of the grant table. Grants of
//! reserved extents become mappings in memory again. Then the caller says whether this is still the
//! boot of those grants. If so, reserved extents without a grant were never written and are spare
//! again; otherwise they are dirty. That needs the grant table's entry from before the grant until
//! after the commit (`faults`).
//!
//! **Not here:** reading the grant table, the fence.

use super::Pool;
use crate::{
    error::{PoolError, Result},
    extents::runs::DeviceRun,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};

/// The result for one grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adopted {
    /// The catalog has this mapping.
    Durable,
    /// An extent was reserved: its mapping is in memory again.
    Uncommitted,
    /// An extent contradicts the catalog: revoke and drain the grant before any zero-fill.
    Stale,
}

/// The result of adoption.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AdoptionReport {
    /// Mappings in memory again, to be committed.
    pub uncommitted: u64,
    /// Reserved extents that are spare again.
    pub stock: u64,
    /// Reserved or quarantined extents that must be zero-filled.
    pub dirty: u64,
}

impl Pool {
    /// Adopts a grant of the grant table (no holes). Repeating one is harmless. `NotFound` means
    /// that the volume is gone: treat the grant as [`Adopted::Stale`].
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
                "grants are adopted once, right after opening",
            ));
        }
        let extent_bytes = self.info.extent_bytes;
        // An earlier opening's sequences are below this one's.
        let ours = commit_seq < self.volumes.next_seq;
        let on_device = self
            .devices
            .get(usize::from(device.0))
            .map_or(0, |device| device.extents);
        let target = self.volumes.get_mut(volume)?;
        let end = target.extents(extent_bytes);
        let known = count.min(on_device.saturating_sub(extent.0));
        let (mut fresh, mut stale) = (false, known < count);
        let mut doubtful = Vec::new();
        for at in 0..known {
            let (logical, extent) = (logical.0.saturating_add(at), extent.0 + at);
            let run = DeviceRun::new(device, extent, 1);
            match target.map.get(logical) {
                Some(place) if place == (device, extent) => {
                    // Durable, or adopted a moment ago.
                    fresh |= target.pending.get(logical).is_some();
                }
                None if ours && logical < end && target.stock.take(run) => {
                    target.map.insert(logical, device, extent);
                    target.pending.add(logical, device, commit_seq);
                    fresh = true;
                }
                _ => {
                    stale = true;
                    // Granted for a logical extent that is taken or missing: it may hold data.
                    if target.stock.take(run) {
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
    /// [`PoolInfo::boot_id`](crate::PoolInfo::boot_id) is this boot's, and the grant table carried
    /// both ids and was passed in completely. Otherwise pass `false`, set the boot id, commit, and
    /// only then make a new grant table. Made earlier, an empty one would vouch, after another
    /// crash, for written extents.
    pub fn finish_adoption(&mut self, same_boot: bool) -> Result<AdoptionReport> {
        if !self.adopting {
            return Err(PoolError::invalid(
                "grants are adopted once, right after opening",
            ));
        }
        self.adopting = false;
        let mut report = AdoptionReport::default();
        let mut doubtful = Vec::new();
        for volume in self.volumes.by_id.values_mut() {
            report.uncommitted += volume.pending.len();
            if same_boot {
                report.stock += volume.stock.extents();
            } else {
                doubtful.extend(volume.stock.drain());
            }
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        report.dirty += allocator.free_all(journal, &doubtful);
        if !same_boot {
            // No request of that boot hangs any longer.
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
