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
//! **Not here:** grants themselves (`xlate` and the caller), stock (`stock`), where an extent comes
//! from (`placement`), snapshots.

use crate::{
    batch::{BatchId, Table},
    error::{PoolError, Result},
    extents::ExtentState,
    placement::Placer,
    pool::Pool,
    runs::DeviceRun,
    volume_map::MAP_CHUNK,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeSet;

/// How many extents an answer covers at most.
const RUN_LIMIT: u64 = 4096;
/// Extents that one release unmaps: they are one transaction.
const RELEASE_EXTENTS: u64 = 4096;
/// What a fault may be answered with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultAnswer {
    /// Mapped: `count` logical extents from the faulting one on are consecutive on the device.
    Mapped {
        /// The device.
        device: DeviceIndex,
        /// The device extent of the faulting one.
        extent: ExtentIndex,
        /// How many.
        count: u64,
        /// The highest sequence among them that is not durable.
        commit_seq: Option<u64>,
    },
    /// A read of nothing: `count` logical extents from the faulting one on are unmapped.
    Hole {
        /// How many.
        count: u64,
    },
    /// A write to nothing got an extent, which reads as zeros.
    Allocated {
        /// The device.
        device: DeviceIndex,
        /// The extent.
        extent: ExtentIndex,
        /// The sequence of its mapping, which is not durable.
        commit_seq: u64,
    },
    /// The volume's stock is empty: reserve this many, commit, fault again.
    NeedReserve {
        /// What to ask [`Pool::reserve`] for.
        count: u64,
    },
    /// What it needs comes with this batch: fault again when it is durable.
    AwaitCommit {
        /// The batch.
        batch: BatchId,
    },
    /// Nothing is clean, but something is dirty: launder, and fault again.
    AwaitLaunder,
    /// The pool is full.
    NoSpace,
    /// It is mapped on a device that can't be used.
    DeviceGone {
        /// The device.
        device: DeviceIndex,
    },
}

/// What was released.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Released {
    /// The extents: dirty once the open batch is durable, or quarantined.
    pub runs: Vec<DeviceRun>,
    /// How many.
    pub extents: u64,
    /// Of those, how many are quarantined.
    pub quarantined: u64,
}

impl Pool {
    /// Answers a fault; a write fault may allocate.
    pub fn fault(
        &mut self,
        volume: VolumeId,
        logical: ExtentIndex,
        want_write: bool,
    ) -> Result<FaultAnswer> {
        let extent_bytes = self.info.extent_bytes;
        let ready = self.ready();
        let opened = self.committed_id() >= self.opening_batch;
        let opening_batch = self.opening_batch;
        let next_seq = self.next_seq;
        let target = self
            .volumes
            .get_mut(&volume)
            .ok_or_else(|| PoolError::not_found(format!("no {volume}")))?;
        let logical = logical.0;
        let end = target.extents(extent_bytes);
        if logical >= end {
            return Err(PoolError::invalid(format!(
                "extent {logical} of {volume}, which has {end}"
            )));
        }
        if let Some(run) = target.map.run_at(logical, RUN_LIMIT) {
            if !self.extents.is_served(run.device) {
                return Ok(FaultAnswer::DeviceGone { device: run.device });
            }
            let pending = target.pending.within(logical, logical + run.count);
            let commit_seq = pending.map(|(_, pending)| pending.seq).max();
            return Ok(FaultAnswer::Mapped {
                device: run.device,
                extent: run.first,
                count: run.count,
                commit_seq,
            });
        }
        // What is not mapped may be mapped by a grant that is not adopted yet.
        ready?;
        if !want_write {
            let count = target.map.hole_at(logical, RUN_LIMIT.min(end - logical));
            return Ok(FaultAnswer::Hole { count });
        }
        if !opened {
            return Ok(FaultAnswer::AwaitCommit {
                batch: opening_batch,
            });
        }
        let placer = Placer {
            placement: self.info.settings.placement,
            pattern: &self.pattern,
            extents: &self.extents,
        };
        if let Some(run) = placer.pick(target, logical) {
            target.map.insert(logical, run.device, run.first.0);
            target.pending.add(logical, run.device, next_seq);
            target.used += 1;
            self.extents.mark_moved(run);
            self.next_seq += 1;
            return Ok(FaultAnswer::Allocated {
                device: run.device,
                extent: run.first,
                commit_seq: next_seq,
            });
        }
        self.why_no_stock(volume)
    }

    /// The highest sequence of a volume's mappings that is not durable.
    pub fn uncommitted(&self, volume: VolumeId) -> Option<u64> {
        self.volumes.get(&volume)?.pending.newest()
    }

    /// Every mapping of the volume with this sequence or a lower one is durable; of a volume that is
    /// gone there is nothing to wait for.
    pub fn durable_seq(&self, volume: VolumeId) -> u64 {
        let volume = self.volumes.get(&volume);
        let oldest = volume.and_then(|volume| volume.pending.oldest());
        oldest.unwrap_or(self.next_seq).saturating_sub(1)
    }

    /// The devices on which a volume has mappings up to a sequence that no batch carries yet.
    pub fn pending_on(&self, volume: VolumeId, up_to_seq: u64) -> BTreeSet<DeviceIndex> {
        let volume = self.volumes.get(&volume).into_iter();
        volume
            .flat_map(|volume| volume.pending.waiting_devices(up_to_seq))
            .collect()
    }

    /// The same of all volumes, whatever the sequence.
    pub fn pending_devices(&self) -> BTreeSet<DeviceIndex> {
        self.volumes
            .values()
            .flat_map(|volume| volume.pending.waiting_devices(u64::MAX))
            .collect()
    }

    /// Puts a volume's mappings up to a sequence into the open batch; returns how many. Only those
    /// on devices that were `flushed` after the data was written: the others stay as they are.
    pub fn commit_mappings(
        &mut self,
        volume: VolumeId,
        up_to_seq: u64,
        flushed: impl Fn(DeviceIndex) -> bool,
    ) -> Result<u64> {
        let batch = self.open_batch_id();
        let target = self.volume_mut(volume)?;
        let devices: Vec<DeviceIndex> = target.pending.waiting_devices(up_to_seq).collect();
        let mut count = 0;
        for device in devices.into_iter().filter(|device| flushed(*device)) {
            let target = self.volume_mut(volume)?;
            let due = target.pending.commit(device, up_to_seq, batch);
            count += due.len() as u64;
            let mut chunks: Vec<u64> = due.iter().map(|logical| logical / MAP_CHUNK).collect();
            chunks.dedup();
            let places = due.iter().filter_map(|logical| target.map.get(*logical));
            let mut places: Vec<(DeviceIndex, u64)> = places.collect();
            places.sort_unstable();
            for chunk in chunks {
                self.touch(Table::Maps, volume.0, chunk);
            }
            // What was granted at random was taken from stock in one piece.
            for run in places.chunk_by(|a, b| a.0 == b.0 && a.1 + 1 == b.1) {
                let (device, first) = run[0];
                let run = DeviceRun::new(device, first, run.len() as u64);
                self.set_extents(run, ExtentState::Owned);
            }
            let mapped = &mut self.on_commit().mapped;
            mapped.extend(due.into_iter().map(|logical| (volume, logical)));
        }
        Ok(count)
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
        let end = self.volume_ref(volume)?.extents(self.info.extent_bytes);
        if first.0.checked_add(count).is_none_or(|last| last > end) {
            return Err(PoolError::invalid(format!(
                "{count} extents from {} of {volume}, which has {end}",
                first.0
            )));
        }
        self.unmap(volume, first.0, count, hanging)
    }

    /// How many extents from `first` on, up to `count`, one [`Pool::release`] may take. The range holds at most
    /// [`RELEASE_EXTENTS`] mapped extents; unmapped ones are not limited.
    pub fn releases_at_once(&self, volume: VolumeId, first: ExtentIndex, count: u64) -> u64 {
        self.volume_ref(volume).map_or(count, |target| {
            target.map.reach(first.0, count, RELEASE_EXTENTS)
        })
    }

    pub(crate) fn unmap(
        &mut self,
        volume: VolumeId,
        first: u64,
        count: u64,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        let target = self.volume_mut(volume)?;
        let removed = target.map.remove(first, count);
        let end = first.saturating_add(count);
        let waiting: Vec<u64> = target.pending.within(first, end).map(|(l, _)| l).collect();
        target.pending.remove(waiting);
        let mut released = Released::default();
        for mapping in removed {
            if hanging.contains(&mapping.run.device) {
                self.quarantine_extents(mapping.run);
                released.quarantined += mapping.run.count;
            } else {
                self.free_extents(mapping.run);
            }
            let last = mapping.logical + mapping.run.count - 1;
            for chunk in mapping.logical / MAP_CHUNK..=last / MAP_CHUNK {
                self.touch(Table::Maps, volume.0, chunk);
            }
            released.extents += mapping.run.count;
            released.runs.push(mapping.run);
        }
        self.settle_account(volume);
        Ok(released)
    }

    /// Hands out a device's dirty extents to be zeroed, at most `max_extents`. Nothing else happens to
    /// them until [`Pool::laundered`], [`Pool::launder_failed`] or [`Pool::quarantine`]. None before
    /// adoption is finished, and none of a device that is not online.
    pub fn take_dirty(&mut self, device: DeviceIndex, max_extents: u64) -> Vec<DeviceRun> {
        let mut runs = Vec::new();
        let mut left = if self.adopting { 0 } else { max_extents };
        while left > 0 {
            let Some(run) = self.extents.take_dirty(device, left) else {
                break;
            };
            left -= run.count;
            runs.push(run);
        }
        runs
    }

    fn check_laundering(&self, run: DeviceRun) -> Result<()> {
        if self
            .extents
            .all(run, |state| state == ExtentState::Laundering)
        {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "extents {}..{} of {} are not all being laundered",
            run.first.0,
            run.end(),
            run.device
        )))
    }

    /// A run from [`Pool::take_dirty`] (or part of one) reads as zeros, and its device was flushed
    /// since: it is clean.
    pub fn laundered(&mut self, run: DeviceRun) -> Result<()> {
        self.check_laundering(run)?;
        self.set_extents(run, ExtentState::Clean);
        Ok(())
    }

    /// A run from [`Pool::take_dirty`] could not be zeroed: it stays dirty and comes again.
    pub fn launder_failed(&mut self, run: DeviceRun) -> Result<()> {
        self.check_laundering(run)?;
        self.extents.set(run, ExtentState::Dirty);
        Ok(())
    }

    /// The zeroing of a run from [`Pool::take_dirty`] does not end: it is quarantined.
    pub fn quarantine(&mut self, run: DeviceRun) -> Result<()> {
        self.check_laundering(run)?;
        self.quarantine_extents(run);
        Ok(())
    }
}
