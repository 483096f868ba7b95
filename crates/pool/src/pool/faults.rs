//! The owner of every volume: faults, commits of mappings, releases, laundering.
//!
//! **Design.** An extent goes clean -> reserved (durably, ahead of need) -> granted, its mapping in
//! memory -> owned (its mapping durable) -> freed -> dirty (durably) -> laundering -> clean. The
//! caller moves data and talks to the engine; the pool says what may happen next.
//!
//! **Order of durability**, the caller's part:
//! - [`Pool::commit_mappings`]: the devices must have been flushed since the data arrived.
//! - [`Pool::release`], [`Pool::delete_volume`]: grants must have been revoked and drained; what did
//!   not drain is quarantined.
//! - [`Pool::laundered`]: the run must have been zeroed, and then the device flushed.
//! - The grant table's entry of a mapping that is not durable is written before the grant is sent,
//!   and removed only when the batch that commits or frees it is durable; for eviction too.
//!
//! **Not here:** grants themselves (`xlate` and the caller), stock (`volumes::stock`), where an extent comes
//! from (`volumes::placer`), snapshots.

use super::Pool;
use crate::{
    error::Result,
    extents::{ExtentState, quarantine::QuarantineMark, runs::DeviceRun, space::SpaceLevel},
    volumes::{
        ahead::Around,
        faults::{FaultAnswer, Released},
        stock::RESERVED_BYTES,
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
        // What is not mapped may be mapped by a grant that is not adopted yet.
        self.ready()?;
        let (volumes, allocator) = (&mut self.volumes, &mut self.allocator);
        if !want_write {
            return volumes.answer_hole(volume, logical.0);
        }
        if self.journal.committed_id() < self.opening_batch {
            return Ok(FaultAnswer::AwaitCommit {
                batch: self.opening_batch,
            });
        }
        let placement = self.info.settings.placement;
        match volumes.allocate(allocator, placement, volume, logical.0)? {
            Some(answer) => Ok(answer),
            None => volumes.why_no_stock(&allocator.extents, volume),
        }
    }

    /// How many more extents may be mapped ahead of a volume's writes: none in a pool that fills up, or
    /// is owed to others.
    pub fn room_ahead(&self, volume: VolumeId) -> u64 {
        if self.adopting || self.space_level() != SpaceLevel::Normal {
            return 0;
        }
        self.volumes.room_ahead(&self.allocator.extents, volume)
    }

    /// How many of a volume's mapped extents lie ahead of its writes, as far as is known.
    pub fn set_ahead(&mut self, volume: VolumeId, extents: u64) {
        self.volumes.set_ahead(volume, extents);
    }

    /// A write fault at `logical`, which is unmapped: maps it with its unmapped neighbours in `around`,
    /// as far as they get one run. `None` where there is not at once something for it and a
    /// neighbour: then [`Pool::fault`] answers.
    pub fn map_around(
        &mut self,
        volume: VolumeId,
        logical: ExtentIndex,
        around: Range<u64>,
    ) -> Result<Option<Around>> {
        self.ready()?;
        self.volumes.get(volume)?;
        if self.journal.committed_id() < self.opening_batch {
            return Ok(None);
        }
        let placement = self.info.settings.placement;
        self.volumes
            .map_around(&mut self.allocator, placement, volume, logical.0, around)
    }

    /// Puts a volume's mappings up to a sequence into the open batch; returns how many. Only those
    /// on devices that were `flushed` after the data was written: the others stay as they are.
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

    /// Unmaps whole extents; they are dirty, and may be laundered, once the open batch is durable.
    ///
    /// Every grant of the range must be revoked and drained before. What is on devices that are
    /// `hanging`, where a write to it may still be under way, is quarantined instead.
    pub fn release(
        &mut self,
        volume: VolumeId,
        first: ExtentIndex,
        count: u64,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        self.ready()?;
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes
            .release(allocator, journal, volume, first, count, hanging)
    }

    /// Reserves up to `want` extents for a volume: grantable once the open batch is durable. Returns
    /// how many, at least one. When nothing is clean, other volumes' unused stock is taken.
    pub fn reserve(&mut self, volume: VolumeId, want: u64) -> Result<u64> {
        self.ready()?;
        self.volumes.get(volume)?;
        let room = self.usage.room(self.volumes.catalog_promised) / RESERVED_BYTES;
        if room == 0 {
            self.admit(RESERVED_BYTES)?;
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        let placement = self.info.settings.placement;
        self.volumes
            .reserve(allocator, journal, volume, want, placement, room)
    }

    /// Whether a volume's stock runs low, and how much to reserve ahead: `much`, if it will soon need
    /// more than it has needed so far.
    pub fn wants_reserve(&self, volume: VolumeId, much: bool) -> Option<u64> {
        self.volumes
            .wants_reserve(&self.allocator.extents, volume, much)
    }

    /// The most that [`Pool::set_volume_reservation`], or a new volume, may ask for now, in bytes.
    pub fn reservable_bytes(&self, volume: Option<VolumeId>) -> u64 {
        self.volumes
            .reservable_bytes(&self.allocator.extents, volume)
    }

    /// Changes how much of a volume will find space whatever others do. Refused if there is not as
    /// much now.
    pub fn set_volume_reservation(&mut self, volume: VolumeId, reserved_bytes: u64) -> Result<()> {
        if reserved_bytes > self.volumes.record(volume)?.reserved_bytes {
            self.ready()?;
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes
            .set_reservation(allocator, journal, volume, reserved_bytes)
    }

    /// Volumes that have asked for nothing since the last call give their stock back; returns how
    /// many extents that were. To be called now and then, about once a second.
    pub fn return_idle_stock(&mut self) -> u64 {
        if self.adopting {
            return 0;
        }
        let (allocator, journal) = (&mut self.allocator, &mut self.journal);
        self.volumes.return_idle_stock(allocator, journal)
    }

    /// Hands out a device's dirty extents to be zeroed, at most `max_extents`. Nothing else happens to
    /// them until [`Pool::laundered`], [`Pool::launder_failed`] or [`Pool::quarantine`]. None before
    /// adoption is finished, and none of a device that is not online.
    pub fn take_dirty(&mut self, device: DeviceIndex, max_extents: u64) -> Vec<DeviceRun> {
        if self.adopting {
            return Vec::new();
        }
        self.allocator.take_dirty(device, max_extents)
    }

    /// A run from [`Pool::take_dirty`] (or part of one) reads as zeros, and its device was flushed
    /// since: it is clean.
    pub fn laundered(&mut self, run: DeviceRun) -> Result<()> {
        self.allocator.check_zeroing(run)?;
        self.allocator
            .set_state(&mut self.journal, run, ExtentState::Clean);
        Ok(())
    }

    /// A run from [`Pool::take_dirty`] could not be zeroed: it stays dirty and comes again.
    pub fn launder_failed(&mut self, run: DeviceRun) -> Result<()> {
        self.allocator.check_zeroing(run)?;
        self.allocator.extents.set(run, ExtentState::Dirty);
        Ok(())
    }

    /// The zeroing of a run from [`Pool::take_dirty`] does not end: it is quarantined.
    pub fn quarantine(&mut self, run: DeviceRun) -> Result<()> {
        self.allocator.check_zeroing(run)?;
        self.allocator.quarantine(&mut self.journal, run);
        Ok(())
    }

    /// Every request to a device that began before the mark has ended: what was quarantined by then is
    /// dirty once the open batch is durable. Returns how many extents.
    pub fn end_quarantine_on(&mut self, device: DeviceIndex, mark: QuarantineMark) -> u64 {
        self.allocator
            .end_quarantine_on(&mut self.journal, device, mark)
    }
}
