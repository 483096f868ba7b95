//! Faults, commits of mappings, and releases of one volume.
//!
//! A new mapping is first in memory, with a sequence, and takes one of the volume's spare extents.
//! A commit puts it into the open batch.
//!
//! **Not here:** whether an operation is allowed (`pool::faults`), reserving (`spare`), the choice
//! of the extent (`placer`).

use super::{Volumes, layers::Place, map::MAP_CHUNK, placer::Placer};
use crate::{
    error::{PoolError, Result},
    extents::{ExtentState, Extents, allocator::Allocator, runs::DeviceRun, space::Placement},
    journal::{
        Journal,
        batch::{BatchId, Table},
    },
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};
use std::collections::BTreeSet;

const RUN_LIMIT: u64 = 4096;
/// Extents of one release, in one transaction.
pub(super) const RELEASE_EXTENTS: u64 = 4096;

/// The answer to a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultAnswer {
    /// Mapped: `count` logical extents from here on are consecutive on the device.
    Mapped {
        /// The device.
        device: DeviceIndex,
        /// The first device extent.
        extent: ExtentIndex,
        /// The number of extents.
        count: u64,
        /// The highest sequence that is not durable.
        commit_seq: Option<u64>,
    },
    /// As [`FaultAnswer::Mapped`], durably, but only for reading: a snapshot has these extents. A
    /// write needs a copy ([`Snapshots::begin_copy`](crate::Snapshots::begin_copy)).
    Shared {
        /// The device.
        device: DeviceIndex,
        /// The first device extent.
        extent: ExtentIndex,
        /// The number of extents.
        count: u64,
    },
    /// A read of `count` unmapped extents from here on.
    Hole {
        /// The number of extents.
        count: u64,
    },
    /// A write got a new extent, which reads as zeros.
    Allocated {
        /// The device.
        device: DeviceIndex,
        /// The extent.
        extent: ExtentIndex,
        /// The mapping's sequence, which is not durable.
        commit_seq: u64,
    },
    /// No spare extents: reserve this many, commit, fault again.
    NeedReserve {
        /// For [`Pool::reserve`](crate::Pool::reserve).
        count: u64,
    },
    /// Fault again when this batch is durable.
    AwaitCommit {
        /// The batch.
        batch: BatchId,
    },
    /// Only dirty extents: zero-fill, and fault again.
    AwaitZeroFill,
    /// The pool is full.
    NoSpace,
    /// It is mapped on an unusable device.
    DeviceGone {
        /// The device.
        device: DeviceIndex,
    },
}

/// Released extents.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Released {
    /// The runs: dirty once the open batch is durable, or quarantined.
    pub runs: Vec<DeviceRun>,
    /// Their extents.
    pub extents: u64,
    /// Quarantined extents among them.
    pub quarantined: u64,
    /// Extents of layers that the volume no longer shows. They are not freed.
    pub hidden: u64,
}

impl Volumes {
    pub(crate) fn answer_mapped(
        &self,
        extents: &Extents,
        volume: VolumeId,
        logical: u64,
    ) -> Result<Option<FaultAnswer>> {
        let target = self.get(volume)?;
        let end = target.extents(self.extent_bytes);
        if logical >= end {
            return Err(PoolError::invalid(format!(
                "extent {logical} is past the end of {volume}, which has {end} extents"
            )));
        }
        let (run, is_shared) =
            match self
                .layers
                .place(target, logical, RUN_LIMIT.min(end - logical))
            {
                Place::Own(run) => (run, target.record.is_snapshot()),
                Place::Shared(run) => (run, true),
                Place::Zeros(_) => return Ok(None),
            };
        // The allocator does not know the RADOS client of an image.
        if target.image.is_none() && !extents.is_served(run.device) {
            return Ok(Some(FaultAnswer::DeviceGone { device: run.device }));
        }
        if is_shared {
            return Ok(Some(FaultAnswer::Shared {
                device: run.device,
                extent: run.first,
                count: run.count,
            }));
        }
        let pending = target.pending.within(logical, logical + run.count);
        let commit_seq = pending.map(|(_, pending)| pending.seq).max();
        Ok(Some(FaultAnswer::Mapped {
            device: run.device,
            extent: run.first,
            count: run.count,
            commit_seq,
        }))
    }

    pub(crate) fn answer_hole(&self, volume: VolumeId, logical: u64) -> Result<FaultAnswer> {
        let target = self.get(volume)?;
        let left = target.extents(self.extent_bytes).saturating_sub(logical);
        match self.layers.place(target, logical, RUN_LIMIT.min(left)) {
            Place::Zeros(count) => Ok(FaultAnswer::Hole { count }),
            place => Err(PoolError::invalid(format!(
                "extent {logical} of {volume} is mapped: {place:?}"
            ))),
        }
    }

    /// `None` if no spare extent can be used.
    pub(crate) fn allocate(
        &mut self,
        allocator: &mut Allocator,
        placement: Placement,
        volume: VolumeId,
        logical: u64,
    ) -> Result<Option<FaultAnswer>> {
        let seq = self.next_seq;
        let target = self.get_mut(volume)?;
        let Some(run) = Placer::new(allocator, placement).pick(target, logical) else {
            return Ok(None);
        };
        target.map.insert(logical, run.device, run.first.0);
        target.pending.add(logical, run.device, seq);
        target.used += 1;
        allocator.extents.mark_allocated(run);
        self.next_seq += 1;
        Ok(Some(FaultAnswer::Allocated {
            device: run.device,
            extent: run.first,
            commit_seq: seq,
        }))
    }

    /// Returns the number. Skips devices not `flushed` after the data was written.
    pub(crate) fn commit_mappings(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        up_to_seq: u64,
        flushed: impl Fn(DeviceIndex) -> bool,
    ) -> Result<u64> {
        let batch = journal.open_batch_id();
        let target = self.get_mut(volume)?;
        let devices: Vec<DeviceIndex> = target.pending.waiting_devices(up_to_seq).collect();
        let mut count = 0;
        for device in devices.into_iter().filter(|device| flushed(*device)) {
            let target = self.get_mut(volume)?;
            let due = target.pending.commit(device, up_to_seq, batch);
            count += due.len() as u64;
            let mut chunks: Vec<u64> = due.iter().map(|logical| logical / MAP_CHUNK).collect();
            chunks.dedup();
            let places = due.iter().filter_map(|logical| target.map.get(*logical));
            let mut places: Vec<(DeviceIndex, u64)> = places.collect();
            places.sort_unstable();
            let map = target.record.map_id();
            for chunk in chunks {
                journal.touch(Table::Maps, map.0, chunk);
            }
            // Randomly granted extents may be neighbours on the device.
            for run in places.chunk_by(|a, b| a.0 == b.0 && a.1 + 1 == b.1) {
                let (device, first) = run[0];
                let run = DeviceRun::new(device, first, run.len() as u64);
                allocator.set_state(journal, run, ExtentState::Owned);
            }
            let mapped = &mut journal.on_commit().mapped;
            mapped.extend(due.into_iter().map(|logical| (volume, logical)));
        }
        Ok(count)
    }

    pub(crate) fn release(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        first: ExtentIndex,
        count: u64,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        let end = self.get(volume)?.extents(self.extent_bytes);
        if first.0.checked_add(count).is_none_or(|last| last > end) {
            return Err(PoolError::invalid(format!(
                "{count} extents from {} are past the end of {volume}, which has {end} extents",
                first.0
            )));
        }
        let hidden = self.hide_shared(journal, volume, first.0, count)?;
        let released = self.unmap(allocator, journal, volume, first.0, count, hanging)?;
        Ok(Released { hidden, ..released })
    }

    /// Frees the extents; on a hanging device, quarantines them.
    pub(super) fn unmap(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        first: u64,
        count: u64,
        hanging: &BTreeSet<DeviceIndex>,
    ) -> Result<Released> {
        let target = self.get_mut(volume)?;
        let map = target.record.map_id();
        let removed = target.map.remove(first, count);
        let end = first.saturating_add(count);
        let waiting: Vec<u64> = target.pending.within(first, end).map(|(l, _)| l).collect();
        target.pending.remove(waiting);
        let mut released = Released::default();
        for mapping in removed {
            if hanging.contains(&mapping.run.device) {
                allocator.quarantine(journal, mapping.run);
                released.quarantined += mapping.run.count;
            } else {
                allocator.free(journal, mapping.run);
            }
            let last = mapping.logical + mapping.run.count - 1;
            for chunk in mapping.logical / MAP_CHUNK..=last / MAP_CHUNK {
                journal.touch(Table::Maps, map.0, chunk);
            }
            released.extents += mapping.run.count;
            released.runs.push(mapping.run);
        }
        self.settle_account(volume);
        Ok(released)
    }
}
