//! A new daemon learns what its predecessor had granted.
//!
//! **Design.** After [`open`](fn@crate::open) the pool waits. The caller reads the grant table and tells
//! each grant; those of reserved extents are mappings in memory again. Then it says whether this is
//! still the boot in which they were granted. If so, reserved extents that no grant names were never
//! written and are stock again; if not, nobody knows, and they are dirty.
//!
//! That rests on the rule in `faults` about entries of the grant table: an entry of a mapping that is
//! not durable is there before the grant, and until after the commit.
//!
//! **Not here:** reading the grant table, the fence.

use super::Pool;
use crate::{
    error::{PoolError, Result},
    extents::runs::DeviceRun,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};

/// What a told grant turned out to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adopted {
    /// It shows what the catalog maps.
    Durable,
    /// At least one of its extents was reserved: its mapping is in memory again.
    Uncommitted,
    /// At least one of its extents is not, or no longer, what the catalog says: revoke and drain it
    /// before anything is laundered.
    Stale,
}

/// What adoption found.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AdoptionReport {
    /// Mappings that are in memory again, to be committed.
    pub uncommitted: u64,
    /// Reserved extents that are stock again.
    pub stock: u64,
    /// Reserved or quarantined extents that must be laundered.
    pub dirty: u64,
}

impl Pool {
    /// Tells a grant that the grant table shows (no holes). Repeating one is harmless.
    ///
    /// `NotFound`: the volume is gone; treat the grant as [`Adopted::Stale`].
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
                    // Granted for a place that is taken, or is not there (yet): it may hold bytes.
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

    /// Ends adoption. `same_boot` may be said only if the pool's [`PoolInfo::boot_id`](crate::PoolInfo::boot_id), as opened, is this
    /// boot's, and the grant table was there, carries this boot's and this pool's ids, and was told
    /// completely. Otherwise say false, set the boot id, commit, and only then make a new grant table:
    /// an empty one made before would vouch, after another crash, for extents that were written.
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
            // Whatever hung then hangs no more.
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
