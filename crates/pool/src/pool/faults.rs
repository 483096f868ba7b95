//! The owner of every volume: faults, commits of mappings, releases, zero-filling.
//!
//! ```text
//! clean -> reserved (durably) -> granted (mapping in memory) -> owned (mapping durable) -> freed -> dirty
//!       (durably) -> zero-filling -> clean
//! ```
//!
//! **Order of durability**, the caller's part:
//! - [`Pool::commit_mappings`]: the devices were flushed after the data arrived.
//! - [`Pool::release`], [`Pool::delete_volume`]: grants were revoked and drained; extents that did
//!   not drain are quarantined.
//! - [`Pool::zero_filled`]: the run was zeroed, then the device flushed.
//! - A non-durable mapping's grant table entry is written before the grant is sent. It stays until
//!   the batch that commits or frees the mapping is durable, even on eviction.

use super::Pool;
use crate::{
    error::Result,
    extents::{ExtentState, quarantine::QuarantineMark, runs::DeviceRun, space::SpaceLevel},
    volumes::{
        faults::{FaultAnswer, Released},
        preallocated::Around,
        spare::RESERVED_BYTES,
    },
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeSet;
use std::ops::Range;

impl Pool {
    /// Answers a fault; a write fault may allocate.
    pub fn fault(
        &mut self,
        volume: VolumeId,
        logical: ExtentIndex,
        want_write: bool,
    ) -> Result<FaultAnswer> {
        let (volumes, allocator) = (&mut self.volumes, &mut self.allocator);
        if let Some(answer) = volumes.answer_mapped(&allocator.extents, volume, logical.0)? {
            return Ok(answer);
        }
        // An unadopted grant may map it.
        self.ready()?;
        let (volumes, allocator) = (&mut self.volumes, &mut self.allocator);
        if !want_write {
            return volumes.answer_hole(volume, logical.0);
        }
        volumes.writable(volume)?;
        if self.journal.committed_id() < self.opening_batch {
            return Ok(FaultAnswer::AwaitCommit {
                batch: self.opening_batch,
            });
        }
        let placement = self.info.settings.placement;
        match volumes.allocate(allocator, placement, volume, logical.0)? {
            Some(answer) => Ok(answer),
            None => volumes.why_no_spare(&allocator.extents, volume),
        }
    }

    /// How many more extents may be preallocated for a volume: 0 if the pool is short.
    pub fn preallocation_room(&self, volume: VolumeId) -> u64 {
        if self.adopting || self.space_level() != SpaceLevel::Normal {
            return 0;
        }
        self.volumes
            .preallocation_room(&self.allocator.extents, volume)
    }

    /// Sets a volume's preallocated extents.
    pub fn set_preallocated(&mut self, volume: VolumeId, extents: u64) {
        self.volumes.set_preallocated(volume, extents);
    }

    /// Answers a write fault at the unmapped `logical`: maps it and unmapped neighbours in
    /// `around`, in one run. `None`: use [`Pool::fault`].
    pub fn map_around(
        &mut self,
        volume: VolumeId,
        logical: ExtentIndex,
        around: Range<u64>,
    ) -> Result<Option<Around>> {
        self.ready()?;
        self.volumes.writable(volume)?;
        if self.journal.committed_id() < self.opening_batch {
            return Ok(None);
        }
        let placement = self.info.settings.placement;
        self.volumes
            .map_around(&mut self.allocator, placement, volume, logical.0, around)
    }

    /// Puts a volume's mappings up to a sequence into the open batch; returns their number. Skips
    /// devices not `flushed` after the data was written.
    pub fn commit_mappings(
        &mut self,
        volume: VolumeId,
        up_to_seq: u64,
        flushed: impl Fn(DeviceIndex) -> bool,
    ) -> Result<u64> {
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes
            .commit_mappings(allocator, journal, volume, up_to_seq, flushed)
    }

    /// Unmaps whole extents: dirty once the open batch is durable. Every grant of the range must be
    /// revoked and drained before. Extents on `hanging` devices are quarantined, as a write may be
    /// in flight.
    pub fn release(
        &mut self,
        volume: VolumeId,
        first: ExtentIndex,
        count: u64,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        self.ready()?;
        self.volumes.writable(volume)?;
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes
            .release(allocator, journal, volume, first, count, hanging)
    }

    /// Reserves up to `want` extents, grantable once the open batch is durable. Returns the number,
    /// at least 1. Takes other volumes' surplus if nothing is clean.
    pub fn reserve(&mut self, volume: VolumeId, want: u64) -> Result<u64> {
        self.ready()?;
        self.volumes.writable(volume)?;
        let room = self.usage.room(self.volumes.catalog_promised) / RESERVED_BYTES;
        if room == 0 {
            self.admit(RESERVED_BYTES)?;
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        let placement = self.info.settings.placement;
        self.volumes
            .reserve(allocator, journal, volume, want, placement, room)
    }

    /// How much to reserve ahead, if spare extents run low. With `much`, the need will soon exceed
    /// past use.
    pub fn wants_reserve(&self, volume: VolumeId, much: bool) -> Option<u64> {
        self.volumes
            .wants_reserve(&self.allocator.extents, volume, much)
    }

    /// The largest space reservation possible now for a volume, existing or new, in bytes.
    pub fn reservable_bytes(&self, volume: Option<VolumeId>) -> u64 {
        self.volumes
            .reservable_bytes(&self.allocator.extents, volume)
    }

    /// Changes a volume's space reservation. Fails if the pool lacks the space now.
    pub fn set_volume_reservation(&mut self, volume: VolumeId, reserved_bytes: u64) -> Result<()> {
        if reserved_bytes > self.volumes.writable(volume)?.record.reserved_bytes {
            self.ready()?;
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes
            .set_reservation(allocator, journal, volume, reserved_bytes)
    }

    /// Idle volumes return their spare extents. Returns their number. Call it about once a second.
    pub fn return_idle_spare(&mut self) -> u64 {
        if self.adopting {
            return 0;
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes.return_idle_spare(allocator, journal)
    }

    /// Takes up to `max_extents` dirty extents to be zeroed. They stay untouched until
    /// [`Pool::zero_filled`], [`Pool::zero_fill_failed`] or [`Pool::quarantine`]. None before adoption
    /// ends, nor from an offline device.
    pub fn take_dirty(&mut self, device: DeviceIndex, max_extents: u64) -> Vec<DeviceRun> {
        if self.adopting {
            return Vec::new();
        }
        self.allocator.take_dirty(device, max_extents)
    }

    /// Makes a run from [`Pool::take_dirty`], or part of one, clean. It must be zeroed, and its
    /// device flushed since.
    pub fn zero_filled(&mut self, run: DeviceRun) -> Result<()> {
        self.allocator.check_zeroing(run)?;
        self.allocator
            .set_state(&mut self.journal, run, ExtentState::Clean);
        Ok(())
    }

    /// Zeroing failed: the run stays dirty.
    pub fn zero_fill_failed(&mut self, run: DeviceRun) -> Result<()> {
        self.allocator.check_zeroing(run)?;
        self.allocator.extents.set(run, ExtentState::Dirty);
        Ok(())
    }

    /// Zeroing hangs: quarantines the run.
    pub fn quarantine(&mut self, run: DeviceRun) -> Result<()> {
        self.allocator.check_zeroing(run)?;
        self.allocator.quarantine(&mut self.journal, run);
        Ok(())
    }

    /// Every request to a device before the mark has ended: extents quarantined by then become
    /// dirty. Returns their number.
    pub fn end_quarantine_on(&mut self, device: DeviceIndex, mark: QuarantineMark) -> u64 {
        self.allocator
            .end_quarantine_on(&mut self.journal, device, mark)
    }
}
