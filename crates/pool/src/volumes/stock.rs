//! Reserving: what each volume has ahead of need, and what the pool has promised it.
//!
//! **Design.** A volume's *stock* is reserved durably before it is granted. How much is reserved at a
//! time grows with each reservation and follows from how much was used while the last one was
//! committed, so that faults don't wait for commits; a volume that is idle gives its stock back. A volume may have a *reservation*:
//! so many extents it will get whatever others do. What it has not got of them yet is *owed*; the sum
//! of what is owed is kept back from everyone else, and clean and dirty extents cover it. Stock that
//! a volume's reservation does not cover is taken for others before they hear of a full pool.
//!
//! **Not here:** from which device (`placement`), the fault that uses stock (`owner`).

use super::{PoolVolume, Volumes, faults::FaultAnswer, map::MAP_CHUNK};
use crate::{
    error::{PoolError, Result},
    extents::{ExtentState, Extents, allocator::Allocator, runs::DeviceRun, space::Placement},
    journal::{
        Journal,
        batch::{BatchId, Table},
    },
};
use forebay_device::size::format_bytes;
use forebay_xlate::types::{DeviceIndex, VolumeId};

/// The first reservation of a volume, in extents.
pub(crate) const MIN_RESERVE: u64 = 16;
/// The largest reservation, in extents.
const MAX_RESERVE: u64 = 32_768;
/// Up to here each reservation of a volume that writes is twice the one before, in extents.
const GROWS_TO: u64 = 1024;
/// A volume keeps this many times what it used during a commit.
const COMMITS_AHEAD: u64 = 4;
/// What an extent that gets mapped takes in the catalog at most, in bytes: 12 in its map's record and
/// 1 of state, and some.
const MAPPING_BYTES: u64 = 14;
/// What a map's record takes beside its mappings, in bytes.
const CHUNK_BYTES: u64 = 32;
/// What the catalog must have room for before an extent is reserved, in bytes.
pub(crate) const RESERVED_BYTES: u64 = MAPPING_BYTES + CHUNK_BYTES;

impl PoolVolume {
    /// What it has, durably or not, and used or not.
    pub(crate) fn has(&self) -> u64 {
        self.map.mapped() + self.unused()
    }

    /// What it has and was never granted.
    pub(crate) fn unused(&self) -> u64 {
        self.stock.extents() + self.incoming_extents
    }

    /// How many extents are reserved for it whatever others do.
    pub(crate) fn reservation(&self, extent_bytes: u64) -> u64 {
        self.record
            .reserved_bytes
            .div_ceil(extent_bytes)
            .min(self.extents(extent_bytes))
    }

    /// What the pool owes it, and what its mappings to come may take in the catalog, in bytes.
    pub(crate) fn account(&self, extent_bytes: u64) -> (u64, u64) {
        let owed = self.reservation(extent_bytes).saturating_sub(self.has());
        let coming = self.pending.len() + self.unused();
        let chunks = self.extents(extent_bytes).div_ceil(MAP_CHUNK);
        let bytes = coming * MAPPING_BYTES + coming.min(chunks) * CHUNK_BYTES;
        (owed, bytes)
    }

    /// Never granted, and not part of what it was promised.
    fn spare(&self, extent_bytes: u64) -> u64 {
        let over = self.has().saturating_sub(self.reservation(extent_bytes));
        self.stock.extents().min(over)
    }
}

/// Near the end, small steps: what one volume hoards another misses.
fn small_step(clean: u64) -> u64 {
    (clean / 8).max(MIN_RESERVE)
}

impl Volumes {
    /// Brings what is owed and what the catalog must keep room for up to date, after a volume got or
    /// lost extents.
    pub(crate) fn settle_account(&mut self, volume: VolumeId) {
        let Some(volume) = self.by_id.get_mut(&volume) else {
            return;
        };
        let (owed, catalog_bytes) = volume.account(self.extent_bytes);
        self.promised = self.promised - volume.owed + owed;
        self.catalog_promised = self.catalog_promised - volume.catalog_bytes + catalog_bytes;
        (volume.owed, volume.catalog_bytes) = (owed, catalog_bytes);
    }

    /// What is owed to others is not for this volume.
    fn promised_to_others(&self, volume: Option<VolumeId>) -> u64 {
        let own = volume.and_then(|volume| self.by_id.get(&volume));
        self.promised - own.map_or(0, |volume| volume.owed)
    }

    /// Clean and dirty extents that are not owed to others, and how many of them are clean.
    pub(crate) fn free_for(&self, extents: &Extents, volume: VolumeId) -> (u64, u64) {
        let clean = extents.clean_online();
        let all = clean + extents.dirty_online();
        let free = all.saturating_sub(self.promised_to_others(Some(volume)));
        (free, free.min(clean))
    }

    /// The most that [`Pool::set_volume_reservation`](crate::Pool::set_volume_reservation), or a new volume, may ask for now, in bytes.
    pub(crate) fn reservable_bytes(&self, extents: &Extents, volume: Option<VolumeId>) -> u64 {
        let spare: u64 = self
            .by_id
            .iter()
            .filter(|(id, _)| Some(**id) != volume)
            .map(|(_, other)| self.spare_online(extents, other))
            .sum();
        let free = extents.clean_online() + extents.dirty_online() + spare;
        let has = volume
            .and_then(|volume| self.by_id.get(&volume))
            .map_or(0, PoolVolume::has);
        (free.saturating_sub(self.promised_to_others(volume)) + has)
            .saturating_mul(self.extent_bytes)
    }

    /// Makes sure that a volume, there or to be, can be promised so much. What is promised is clean or
    /// dirty from now on: others' spare stock is given back for it.
    pub(crate) fn make_room_for_reservation(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: Option<VolumeId>,
        reserved_bytes: u64,
        size_bytes: u64,
    ) -> Result<()> {
        if reserved_bytes == 0 {
            return Ok(());
        }
        if reserved_bytes > size_bytes {
            return Err(PoolError::invalid(format!(
                "{} can't be reserved for a volume of {}: no more than its size can be",
                format_bytes(reserved_bytes),
                format_bytes(size_bytes)
            )));
        }
        let extent_bytes = self.extent_bytes;
        let wanted = reserved_bytes.div_ceil(extent_bytes);
        let most = self.reservable_bytes(&allocator.extents, volume);
        if wanted > most / extent_bytes {
            return Err(PoolError::no_space(format!(
                "{} can't be reserved: the pool can promise {} to this volume",
                format_bytes(reserved_bytes),
                format_bytes(most)
            )));
        }
        let has = volume
            .and_then(|volume| self.by_id.get(&volume))
            .map_or(0, PoolVolume::has);
        let needed = wanted.saturating_sub(has) + self.promised_to_others(volume);
        let others: Vec<VolumeId> = self.by_id.keys().copied().collect();
        for other in others.into_iter().filter(|id| Some(*id) != volume) {
            let free = allocator.extents.clean_online() + allocator.extents.dirty_online();
            let lacks = needed.saturating_sub(free);
            self.return_spare(allocator, journal, other, lacks)?;
        }
        Ok(())
    }

    /// Gives up to `max` extents of a volume's spare stock back.
    fn return_spare(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        max: u64,
    ) -> Result<()> {
        let mut left = max.min(self.spare_online(&allocator.extents, self.get(volume)?));
        while left > 0 {
            let device = self.richest_device(&allocator.extents, volume);
            let stock = &mut self.get_mut(volume)?.stock;
            let Some(run) = device.and_then(|device| stock.pop_on(device, left)) else {
                break;
            };
            left -= run.count;
            // Never granted, so it still reads as zeros.
            allocator.set_state(journal, run, ExtentState::Clean);
        }
        self.settle_account(volume);
        Ok(())
    }

    /// Changes how much of a volume will find space whatever others do. Refused if there is not as
    /// much now.
    pub(crate) fn set_reservation(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        reserved_bytes: u64,
    ) -> Result<()> {
        let record = self.record(volume)?;
        // Less is always possible.
        if reserved_bytes > record.reserved_bytes {
            let size_bytes = record.size_bytes;
            self.make_room_for_reservation(
                allocator,
                journal,
                Some(volume),
                reserved_bytes,
                size_bytes,
            )?;
        }
        self.get_mut(volume)?.record.reserved_bytes = reserved_bytes;
        self.settle_account(volume);
        journal.touch(Table::Volumes, volume.0, 0);
        Ok(())
    }

    /// What others may take of a volume's stock, now.
    fn spare_online(&self, extents: &Extents, volume: &PoolVolume) -> u64 {
        volume
            .spare(self.extent_bytes)
            .min(self.stock_online(extents, volume))
    }

    fn stock_online(&self, extents: &Extents, volume: &PoolVolume) -> u64 {
        let stock = volume.stock.devices();
        stock
            .filter(|(device, _)| extents.is_online(*device))
            .map(|(_, extents)| extents)
            .sum()
    }

    /// The other volume with the most unused stock that can be taken.
    fn richest_other(&self, extents: &Extents, volume: VolumeId) -> Option<(VolumeId, u64)> {
        self.by_id
            .iter()
            .filter(|(id, _)| **id != volume)
            .map(|(id, other)| (*id, self.spare_online(extents, other)))
            .filter(|(_, spare)| *spare > 0)
            .max_by_key(|(_, spare)| *spare)
    }

    /// Why a write can't have an extent now.
    pub(crate) fn why_no_stock(
        &mut self,
        extents: &Extents,
        volume: VolumeId,
    ) -> Result<FaultAnswer> {
        let target = self.get_mut(volume)?;
        target.used += 1;
        let goal = target.goal;
        let incoming = target
            .incoming
            .iter()
            .map(|(batch, run)| (*batch, run.device))
            .collect::<Vec<_>>();
        let usable = incoming
            .iter()
            .find(|(_, device)| extents.is_online(*device));
        if let Some((batch, _)) = usable {
            return Ok(FaultAnswer::AwaitCommit { batch: *batch });
        }
        let (free, clean) = self.free_for(extents, volume);
        if clean > 0 || self.richest_other(extents, volume).is_some() {
            return Ok(FaultAnswer::NeedReserve { count: goal });
        }
        if free > 0 || self.has_more_to_delete() {
            return Ok(FaultAnswer::AwaitLaunder);
        }
        // What another is about to get may be more than it needs.
        let waits = |other: &PoolVolume| {
            let over = other.has() > other.reservation(self.extent_bytes);
            let last = other.incoming.back();
            last.filter(|(_, run)| over && extents.is_online(run.device))
                .map(|(batch, _)| *batch)
        };
        Ok(match self.by_id.values().find_map(waits) {
            Some(batch) => FaultAnswer::AwaitCommit { batch },
            None => FaultAnswer::NoSpace,
        })
    }

    /// Whether a volume's stock runs low, and how much to reserve ahead: `much`, if it will soon need
    /// more than it has needed so far.
    pub(crate) fn wants_reserve(
        &self,
        extents: &Extents,
        volume: VolumeId,
        much: bool,
    ) -> Option<u64> {
        let target = self.by_id.get(&volume)?;
        let clean = self.free_for(extents, volume).1;
        let goal = if much { MAX_RESERVE } else { target.goal };
        let goal = goal.min(small_step(clean));
        // Only ahead of a volume that writes, and only from what is free.
        let there = self.stock_online(extents, target) + target.incoming_extents;
        (target.used > 0 && there < goal / 2 && clean > 0).then_some(goal)
    }

    /// Reserves up to `want` extents for a volume, of which the catalog has room for `room`. Returns how many, at least
    /// one. When nothing is clean, other volumes' unused stock is taken.
    pub(crate) fn reserve(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        want: u64,
        placement: Placement,
        room: u64,
    ) -> Result<u64> {
        let clean = self.free_for(&allocator.extents, volume).1;
        // With several devices, something of each.
        let each = MIN_RESERVE * (allocator.extents.devices() as u64).min(MIN_RESERVE);
        let want = want
            .clamp(1, MAX_RESERVE)
            .max(each)
            .min(small_step(clean))
            .min(room);
        allocator.update_pattern();
        let mut got = 0;
        let stock = &self.get(volume)?.stock;
        for run in allocator.take_clean(stock, want.min(clean), placement) {
            self.add_incoming(allocator, journal, volume, run)?;
            got += run.count;
        }
        if got == 0 {
            got = self.reclaim(allocator, journal, volume, want)?;
        }
        if got == 0 {
            return Err(PoolError::no_space(
                "the pool is full: delete volumes, or discard within them (fstrim)",
            ));
        }
        self.settle_account(volume);
        Ok(got)
    }

    fn add_incoming(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        run: DeviceRun,
    ) -> Result<()> {
        let batch = journal.open_batch_id();
        let target = self.get_mut(volume)?;
        if target.incoming.back().is_none_or(|(last, _)| *last < batch) {
            // Used from here on is used during this commit.
            target.reserved_at.push_back((batch, target.used));
        }
        target.incoming.push_back((batch, run));
        target.incoming_extents += run.count;
        allocator.reserve(journal, run, volume);
        journal.on_commit().reserved.insert(volume);
        Ok(())
    }

    /// What came with a durable batch is stock.
    pub(crate) fn promote_incoming(&mut self, volume: VolumeId, batch: BatchId) {
        // A volume deleted meanwhile gave its reservation back.
        let Some(target) = self.by_id.get_mut(&volume) else {
            return;
        };
        while let Some((_, run)) = target.incoming.pop_front_if(|(by, _)| *by <= batch) {
            target.incoming_extents -= run.count;
            target.stock.insert(run);
        }
        while let Some((_, used)) = target.reserved_at.pop_front_if(|(by, _)| *by <= batch) {
            let during = target.used.saturating_sub(used);
            // Twice as much each time; above a limit as much as is used, and less by halves.
            target.goal = (during * COMMITS_AHEAD)
                .max((target.goal * 2).min(GROWS_TO))
                .max(target.goal / 2)
                .min(MAX_RESERVE);
        }
    }

    /// Moves stock from the volume that has most to spare.
    fn reclaim(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
        want: u64,
    ) -> Result<u64> {
        let (mut got, want) = (0, want.min(MIN_RESERVE));
        while got < want {
            let Some((other, spare)) = self.richest_other(&allocator.extents, volume) else {
                break;
            };
            // Half of it, so that two writers of a full pool don't take turns robbing all.
            let share = spare.div_ceil(2).min(want - got);
            let device = self.richest_device(&allocator.extents, other);
            let stock = &mut self.get_mut(other)?.stock;
            let Some(run) = device.and_then(|device| stock.pop_on(device, share)) else {
                break;
            };
            self.settle_account(other);
            self.add_incoming(allocator, journal, volume, run)?;
            got += run.count;
        }
        Ok(got)
    }

    fn richest_device(&self, extents: &Extents, volume: VolumeId) -> Option<DeviceIndex> {
        let stock = self.by_id.get(&volume)?.stock.devices();
        stock
            .filter(|(device, _)| extents.is_online(*device))
            .max_by_key(|(_, extents)| *extents)
            .map(|(device, _)| device)
    }

    /// Gives back what a volume has reserved and not used: its stock, and what is incoming.
    pub(crate) fn return_reservation(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
    ) -> Result<()> {
        let target = self.get_mut(volume)?;
        let mut runs = target.stock.drain();
        runs.extend(target.incoming.drain(..).map(|(_, run)| run));
        target.incoming_extents = 0;
        for run in runs {
            // Never granted, so it still reads as zeros.
            allocator.set_state(journal, run, ExtentState::Clean);
        }
        self.settle_account(volume);
        Ok(())
    }

    /// Volumes that have asked for nothing since the last call give their stock back; returns how
    /// many extents that were. To be called now and then, about once a second.
    pub(crate) fn return_idle_stock(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
    ) -> u64 {
        let mut idle = Vec::new();
        for (id, volume) in &mut self.by_id {
            if volume.used == volume.used_before && volume.incoming.is_empty() {
                if volume.stock.extents() > 0 {
                    idle.push(*id);
                }
                volume.goal = MIN_RESERVE;
            }
            volume.used_before = volume.used;
        }
        let mut returned = 0;
        for id in idle {
            let Some(volume) = self.by_id.get_mut(&id) else {
                continue;
            };
            for run in volume.stock.drain() {
                returned += run.count;
                allocator.set_state(journal, run, ExtentState::Clean);
            }
            self.settle_account(id);
        }
        returned
    }
}
