//! The owner of every volume: faults, reservations, commits of mappings, releases, laundering.
//!
//! **Design.** An extent goes clean -> reserved (durably, ahead of need) -> granted, its mapping in
//! memory -> owned (its mapping durable) -> freed -> dirty (durably) -> laundering -> clean. The
//! caller moves data and talks to the engine; the pool says what may happen next.
//!
//! **Order of durability**, the caller's part:
//! - [`Pool::commit_mappings`]: the devices must have been flushed since the data arrived.
//! - [`Pool::release`], [`Pool::delete_volume`]: grants must have been revoked and drained.
//! - [`Pool::laundered`]: the run must have been zeroed, and then the device flushed.
//! - The grant table's entry of a mapping that is not durable is written before the grant is sent,
//!   and removed only when the batch that commits or frees it is durable; for eviction too.
//!
//! **Not here:** grants themselves (`xlate` and the caller), placement policies, snapshots.

use crate::{
    batch::{BatchId, Table},
    error::{PoolError, Result},
    extents::ExtentState,
    pool::{MAPPING_BYTES, Pending, Pool, Volume},
    runs::DeviceRun,
    volume_map::MAP_CHUNK,
};
use forebay_xlate::types::{DeviceIndex, ExtentIndex, VolumeId};

/// How many extents an answer covers at most.
const RUN_LIMIT: u64 = 4096;
/// The first reservation of a volume, in extents; it doubles with each.
pub(crate) const MIN_RESERVE: u64 = 16;
/// The largest reservation, in extents.
const MAX_RESERVE: u64 = 1024;
/// In a stock run of this many extents or more, every stream but the volume's first starts in the
/// middle, so that both it and whoever writes before it can go on contiguously.
const SPLIT_EXTENTS: u64 = 4;

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
}

/// What was released.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Released {
    /// The extents, which are dirty once the open batch is durable.
    pub runs: Vec<DeviceRun>,
    /// How many.
    pub extents: u64,
}

impl Volume {
    /// Takes the extent from stock that fits `logical` best.
    fn pick(&mut self, logical: u64) -> Option<DeviceRun> {
        // Where it would be if its neighbours' runs went on through it.
        for (device, extent) in self.map.wishes(logical).into_iter().flatten() {
            let run = DeviceRun::new(device, extent, 1);
            if self.stock.take(run) {
                return Some(run);
            }
        }
        let longest = self.stock.longest()?;
        let split = longest.count >= SPLIT_EXTENTS && self.map.mapped() > 0;
        let shift = if split { longest.count / 2 } else { 0 };
        let run = DeviceRun::new(longest.device, longest.first.0 + shift, 1);
        self.stock.take(run).then_some(run)
    }

    pub(crate) fn add_pending(&mut self, logical: u64, seq: u64) {
        self.pending.insert(
            logical,
            Pending {
                seq,
                committing: None,
            },
        );
        self.by_seq.insert((seq, logical));
    }
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
        let target = self.volume_mut(volume)?;
        let logical = logical.0;
        let end = target.extents(extent_bytes);
        if logical >= end {
            return Err(PoolError::invalid(format!(
                "extent {logical} of {volume}, which has {end}"
            )));
        }
        if let Some(run) = target.map.run_at(logical, RUN_LIMIT) {
            let commit_seq = target
                .pending
                .range(logical..logical + run.count)
                .map(|(_, pending)| pending.seq)
                .max();
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
        if let Some(run) = target.pick(logical) {
            target.map.insert(logical, run.device, run.first.0);
            target.add_pending(logical, next_seq);
            self.next_seq += 1;
            return Ok(FaultAnswer::Allocated {
                device: run.device,
                extent: run.first,
                commit_seq: next_seq,
            });
        }
        let (goal, waits) = (target.goal, !target.incoming.is_empty());
        Ok(self.why_no_stock(volume, goal, waits))
    }

    fn why_no_stock(&self, volume: VolumeId, goal: u64, waits: bool) -> FaultAnswer {
        let newest = BatchId(self.open_batch_id().0);
        if waits {
            return FaultAnswer::AwaitCommit { batch: newest };
        }
        if self.extents.count(ExtentState::Clean) > 0 || self.richest_other(volume).is_some() {
            return FaultAnswer::NeedReserve { count: goal };
        }
        let space = self.space();
        if space.dirty > 0 {
            FaultAnswer::AwaitLaunder
        } else if self
            .volumes
            .values()
            .any(|other| !other.incoming.is_empty())
        {
            FaultAnswer::AwaitCommit { batch: newest }
        } else {
            FaultAnswer::NoSpace
        }
    }

    /// The other volume with the most unused stock.
    fn richest_other(&self, volume: VolumeId) -> Option<VolumeId> {
        self.volumes
            .iter()
            .filter(|(id, other)| **id != volume && !other.stock.is_empty())
            .max_by_key(|(_, other)| other.stock.extents())
            .map(|(id, _)| *id)
    }

    /// Whether a volume's stock runs low, and how much to reserve ahead.
    pub fn wants_reserve(&self, volume: VolumeId) -> Option<u64> {
        let volume = self.volumes.get(&volume)?;
        // Only ahead of a volume that writes, and only from what is free.
        let writes = !volume.pending.is_empty();
        let there = volume.stock.extents() + volume.incoming.extents();
        (writes && there < volume.goal / 2 && self.extents.count(ExtentState::Clean) > 0)
            .then_some(volume.goal)
    }

    /// Reserves up to `want` extents for a volume: grantable once the open batch is durable. Returns
    /// how many, at least one. When nothing is clean, other volumes' unused stock is taken.
    pub fn reserve(&mut self, volume: VolumeId, want: u64) -> Result<u64> {
        self.ready()?;
        self.volume_ref(volume)?;
        let clean = self.extents.count(ExtentState::Clean);
        // Near the end, small steps: what one volume hoards another misses.
        let want = want.clamp(1, MAX_RESERVE).min((clean / 8).max(MIN_RESERVE));
        self.admit(want * MAPPING_BYTES)?;
        let mut got = 0;
        while got < want {
            let Some(run) = self.extents.take_clean(want - got) else {
                break;
            };
            self.add_incoming(volume, run)?;
            got += run.count;
        }
        if got == 0 {
            got = self.reclaim(volume, want)?;
        }
        if got == 0 {
            return Err(PoolError::no_space(
                "the pool is full: delete volumes, or discard within them (fstrim)",
            ));
        }
        let target = self.volume_mut(volume)?;
        target.goal = (target.goal * 2).min(MAX_RESERVE);
        Ok(got)
    }

    fn add_incoming(&mut self, volume: VolumeId, run: DeviceRun) -> Result<()> {
        self.volume_mut(volume)?.incoming.insert(run);
        self.reserve_run(run, volume);
        self.on_commit().reserved.push((volume, run));
        Ok(())
    }

    /// Moves never-granted stock from the volume that has most of it.
    fn reclaim(&mut self, volume: VolumeId, want: u64) -> Result<u64> {
        let mut got = 0;
        while got < want.min(MIN_RESERVE) {
            let Some(other) = self.richest_other(volume) else {
                break;
            };
            let stock = &mut self.volume_mut(other)?.stock;
            // Half of it, so that two writers of a full pool don't take turns robbing all.
            let share = stock.extents().div_ceil(2).min(want.min(MIN_RESERVE) - got);
            let Some(run) = stock.pop(share) else { break };
            self.add_incoming(volume, run)?;
            got += run.count;
        }
        Ok(got)
    }

    /// Gives back what a volume has reserved and not used.
    pub(crate) fn return_reservation(&mut self, volume: VolumeId) -> Result<()> {
        let target = self.volume_mut(volume)?;
        let mut runs = target.stock.drain();
        runs.extend(target.incoming.drain());
        for run in runs {
            // Never granted, so it still reads as zeros.
            self.set_extents(run, ExtentState::Clean);
        }
        Ok(())
    }

    /// The highest sequence of a volume's mappings that is not durable.
    pub fn uncommitted(&self, volume: VolumeId) -> Option<u64> {
        self.volumes
            .get(&volume)?
            .by_seq
            .last()
            .map(|(seq, _)| *seq)
    }

    /// Every mapping of the volume with this sequence or a lower one is durable; of a volume that is
    /// gone there is nothing to wait for.
    pub fn durable_seq(&self, volume: VolumeId) -> u64 {
        let outstanding = self
            .volumes
            .get(&volume)
            .and_then(|volume| volume.by_seq.first());
        outstanding
            .map_or(self.next_seq, |(seq, _)| *seq)
            .saturating_sub(1)
    }

    /// Puts a volume's mappings up to a sequence into the open batch; returns how many.
    ///
    /// The devices must have been flushed after the data was written.
    pub fn commit_mappings(&mut self, volume: VolumeId, up_to_seq: u64) -> Result<u64> {
        let batch = self.open_batch_id();
        let target = self.volume_mut(volume)?;
        let due: Vec<u64> = target
            .by_seq
            .range(..=(up_to_seq, u64::MAX))
            .map(|(_, logical)| *logical)
            .collect();
        let mut mapped = Vec::with_capacity(due.len());
        for logical in due {
            if let Some(pending) = target.pending.get_mut(&logical)
                && pending.committing.is_none()
                && let Some((device, extent)) = target.map.get(logical)
            {
                pending.committing = Some(batch);
                mapped.push((logical, DeviceRun::new(device, extent, 1)));
            }
        }
        for (logical, run) in &mapped {
            self.set_extents(*run, ExtentState::Owned);
            self.touch(Table::Maps, volume.0, logical / MAP_CHUNK);
            self.on_commit().mapped.push((volume, *logical));
        }
        Ok(mapped.len() as u64)
    }

    /// Unmaps whole extents; they are dirty, and may be laundered, once the open batch is durable.
    ///
    /// Every grant of the range must be revoked and drained before.
    pub fn release(
        &mut self,
        volume: VolumeId,
        first: ExtentIndex,
        count: u64,
    ) -> Result<Released> {
        self.ready()?;
        let end = self.volume_ref(volume)?.extents(self.info.extent_bytes);
        if first.0.checked_add(count).is_none_or(|last| last > end) {
            return Err(PoolError::invalid(format!(
                "{count} extents from {} of {volume}, which has {end}",
                first.0
            )));
        }
        self.unmap(volume, first.0, count)
    }

    pub(crate) fn unmap(&mut self, volume: VolumeId, first: u64, count: u64) -> Result<Released> {
        let target = self.volume_mut(volume)?;
        let removed = target.map.remove(first, count);
        let waiting: Vec<u64> = target
            .pending
            .range(first..first.saturating_add(count))
            .map(|(logical, _)| *logical)
            .collect();
        for logical in waiting {
            target.forget_pending(logical);
        }
        let mut released = Released::default();
        for mapping in removed {
            self.free_extents(mapping.run);
            let last = mapping.logical + mapping.run.count - 1;
            for chunk in mapping.logical / MAP_CHUNK..=last / MAP_CHUNK {
                self.touch(Table::Maps, volume.0, chunk);
            }
            released.extents += mapping.run.count;
            released.runs.push(mapping.run);
        }
        Ok(released)
    }

    /// Hands out dirty extents to be zeroed, at most `max_extents`. Nothing else happens to them
    /// until [`Pool::laundered`], [`Pool::launder_failed`] or [`Pool::quarantine`]. None before
    /// adoption is finished.
    pub fn take_dirty(&mut self, max_extents: u64) -> Vec<DeviceRun> {
        let mut runs = Vec::new();
        let mut left = if self.adopting { 0 } else { max_extents };
        while left > 0 {
            let Some(run) = self.extents.take_dirty(left) else {
                break;
            };
            left -= run.count;
            runs.push(run);
        }
        runs
    }

    fn check_run(
        &self,
        run: DeviceRun,
        what: &str,
        wanted: impl Fn(ExtentState) -> bool,
    ) -> Result<()> {
        if self.extents.all(run, wanted) {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "extents {}..{} of {} are not all {what}",
            run.first.0,
            run.end(),
            run.device
        )))
    }

    /// A run from [`Pool::take_dirty`] (or part of one) reads as zeros, and its device was flushed
    /// since: it is clean.
    pub fn laundered(&mut self, run: DeviceRun) -> Result<()> {
        self.check_run(run, "being laundered", |state| {
            state == ExtentState::Laundering
        })?;
        self.set_extents(run, ExtentState::Clean);
        Ok(())
    }

    /// A run from [`Pool::take_dirty`] could not be zeroed: it stays dirty and comes again.
    pub fn launder_failed(&mut self, run: DeviceRun) -> Result<()> {
        self.check_run(run, "being laundered", |state| {
            state == ExtentState::Laundering
        })?;
        self.extents.set(run, ExtentState::Dirty);
        Ok(())
    }

    /// A freed run may still be written to (a revoke that did not drain, a device that hangs): it is
    /// set aside.
    pub fn quarantine(&mut self, run: DeviceRun) -> Result<()> {
        self.check_run(run, "freed", |state| {
            matches!(
                state,
                ExtentState::Dirty | ExtentState::Laundering | ExtentState::Freed
            )
        })?;
        self.set_extents(run, ExtentState::Quarantined);
        Ok(())
    }

    /// What held a quarantined run has ended: it is dirty once the open batch is durable.
    pub fn end_quarantine(&mut self, run: DeviceRun) -> Result<()> {
        self.check_run(run, "quarantined", |state| {
            state == ExtentState::Quarantined
        })?;
        self.free_extents(run);
        Ok(())
    }
}
