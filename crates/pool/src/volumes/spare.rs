//! Reserved extents of each volume, and the space promised to it.
//!
//! A volume's spare extents are reserved durably before they are granted. Reservations follow the
//! use during the last commit, so that faults don't wait for commits. An idle volume returns its
//! spare extents. A volume may also have a space reservation. The part not yet taken is owed: other
//! volumes can't use it, and clean and dirty extents cover it. Surplus beyond that goes to others
//! before they see a full pool.
//!
//! **Not here:** the choice of the device (`placement`), the fault (`volumes::faults`).

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
use std::collections::BTreeSet;

pub(crate) const MIN_RESERVE: u64 = 16;
const MAX_RESERVE: u64 = 32_768;
/// Up to this many extents, each reservation of a writing volume doubles.
const GROWS_TO: u64 = 1024;
/// Spare extents per extent used during a commit.
const COMMITS_AHEAD: u64 = 4;
/// Bound of a mapping's catalog bytes: 12 in its map's record, 1 of state, and a margin.
const MAPPING_BYTES: u64 = 14;
/// Overhead of a map's record in bytes.
const CHUNK_BYTES: u64 = 32;
/// Catalog room required before an extent is reserved.
pub(crate) const RESERVED_BYTES: u64 = MAPPING_BYTES + CHUNK_BYTES;

impl PoolVolume {
    pub(crate) fn has(&self) -> u64 {
        self.map.mapped() + self.unused()
    }

    pub(crate) fn unused(&self) -> u64 {
        self.spare.extents() + self.incoming_extents + self.copying.len() as u64
    }

    /// Its space reservation in extents.
    pub(crate) fn reservation(&self, extent_bytes: u64) -> u64 {
        self.record
            .reserved_bytes
            .div_ceil(extent_bytes)
            .min(self.extents(extent_bytes))
    }

    /// What a snapshot adds to the extents owed to it: its mapped ones no longer count.
    pub(crate) fn entitlement_after_freeze(&self, extent_bytes: u64) -> u64 {
        let owed = self.reservation(extent_bytes).saturating_sub(self.unused());
        owed.saturating_sub(self.entitlement)
    }

    /// Owed extents, and catalog bytes of future mappings.
    pub(crate) fn account(&self, extent_bytes: u64) -> (u64, u64) {
        let entitlement = self.reservation(extent_bytes).saturating_sub(self.has());
        let coming = self.pending.len() + self.unused();
        let chunks = self.extents(extent_bytes).div_ceil(MAP_CHUNK);
        let bytes = coming * MAPPING_BYTES + coming.min(chunks) * CHUNK_BYTES;
        (entitlement, bytes)
    }

    /// Surplus: spare extents beyond the space reservation.
    fn spare(&self, extent_bytes: u64) -> u64 {
        let over = self.has().saturating_sub(self.reservation(extent_bytes));
        self.spare.extents().min(over)
    }

    fn online_spare(&self, extents: &Extents) -> u64 {
        let spare = self.spare.devices();
        spare
            .filter(|(device, _)| extents.is_online(*device))
            .map(|(_, extents)| extents)
            .sum()
    }
}

/// In a nearly full pool, one volume's spare extents are another's shortage.
fn small_step(clean: u64) -> u64 {
    (clean / 8).max(MIN_RESERVE)
}

impl Volumes {
    /// Call after a volume gained or lost extents.
    pub(crate) fn settle_account(&mut self, volume: VolumeId) {
        let Some(volume) = self.by_id.get_mut(&volume) else {
            return;
        };
        let (entitlement, catalog_bytes) = volume.account(self.extent_bytes);
        self.promised = self.promised - volume.entitlement + entitlement;
        self.catalog_promised = self.catalog_promised - volume.catalog_bytes + catalog_bytes;
        (volume.entitlement, volume.catalog_bytes) = (entitlement, catalog_bytes);
    }

    fn promised_to_others(&self, volume: Option<VolumeId>) -> u64 {
        let own = volume.and_then(|volume| self.by_id.get(&volume));
        self.promised - own.map_or(0, |volume| volume.entitlement)
    }

    /// Extents not owed to others: clean and dirty ones, and the clean ones alone.
    pub(crate) fn free_for(&self, extents: &Extents, volume: VolumeId) -> (u64, u64) {
        let clean = extents.clean_online();
        let all = clean + extents.dirty_online();
        let free = all.saturating_sub(self.promised_to_others(Some(volume)));
        (free, free.min(clean))
    }

    /// The largest space reservation possible now, in bytes.
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

    /// Extents that can be promised in addition, without the surplus of these volumes.
    pub(crate) fn promisable(&self, extents: &Extents, except: &BTreeSet<VolumeId>) -> u64 {
        let others = self.by_id.iter().filter(|(id, _)| !except.contains(id));
        let spare: u64 = others
            .map(|(_, other)| self.spare_online(extents, other))
            .sum();
        (extents.clean_online() + extents.dirty_online() + spare).saturating_sub(self.promised)
    }

    /// Clean or dirty extents must cover a promise, so other volumes return surplus.
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
                "{} can't be reserved for a volume of {}: a reservation can't exceed the volume's size",
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
        let except = volume.into_iter().collect();
        self.make_room(allocator, journal, needed, &except)
    }

    /// Other volumes return surplus until `needed` extents are clean or dirty.
    pub(crate) fn make_room(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        needed: u64,
        except: &BTreeSet<VolumeId>,
    ) -> Result<()> {
        let others: Vec<VolumeId> = self.by_id.keys().copied().collect();
        for other in others.into_iter().filter(|id| !except.contains(id)) {
            let free = allocator.extents.clean_online() + allocator.extents.dirty_online();
            let lacks = needed.saturating_sub(free);
            self.return_spare(allocator, journal, other, lacks)?;
        }
        Ok(())
    }

    /// Returns up to `max` surplus extents.
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
            let spare = &mut self.get_mut(volume)?.spare;
            let Some(run) = device.and_then(|device| spare.pop_on(device, left)) else {
                break;
            };
            left -= run.count;
            // Never granted, so it still reads as zeros.
            allocator.set_state(journal, run, ExtentState::Clean);
        }
        self.settle_account(volume);
        Ok(())
    }

    /// Fails if the pool lacks the space now.
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

    fn spare_online(&self, extents: &Extents, volume: &PoolVolume) -> u64 {
        volume
            .spare(self.extent_bytes)
            .min(volume.online_spare(extents))
    }

    /// The other volume with the most surplus.
    fn richest_other(&self, extents: &Extents, volume: VolumeId) -> Option<(VolumeId, u64)> {
        self.by_id
            .iter()
            .filter(|(id, _)| **id != volume)
            .map(|(id, other)| (*id, self.spare_online(extents, other)))
            .filter(|(_, spare)| *spare > 0)
            .max_by_key(|(_, spare)| *spare)
    }

    /// Why a write gets no extent now.
    pub(crate) fn why_no_spare(
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
            return Ok(FaultAnswer::AwaitZeroFill);
        }
        // Another volume's incoming extents may exceed its need.
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

    /// How much to reserve ahead, if spare extents run low. With `much`, the need will soon exceed
    /// past use.
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
        // Only for a volume that writes, and only free extents.
        let there = target.online_spare(extents) + target.incoming_extents;
        (target.used > 0 && there < goal / 2 && clean > 0).then_some(goal)
    }

    /// Reserves up to `want` extents, at most `room`; returns the number, at least 1. Takes other
    /// volumes' surplus if nothing is clean.
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
        // With several devices, some extents of each.
        let each = MIN_RESERVE * (allocator.extents.devices() as u64).min(MIN_RESERVE);
        let want = want
            .clamp(1, MAX_RESERVE)
            .max(each)
            .min(small_step(clean))
            .min(room);
        allocator.update_pattern();
        let mut got = 0;
        let spare = &self.get(volume)?.spare;
        for run in allocator.take_clean(spare, want.min(clean), placement) {
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
            // Use beyond this count happens during this commit.
            target.reserved_at.push_back((batch, target.used));
        }
        target.incoming.push_back((batch, run));
        target.incoming_extents += run.count;
        allocator.reserve(journal, run, volume);
        journal.on_commit().reserved.insert(volume);
        Ok(())
    }

    /// Makes a durable batch's extents spare.
    pub(crate) fn promote_incoming(&mut self, volume: VolumeId, batch: BatchId) {
        // A volume deleted meanwhile has returned its reservation.
        let Some(target) = self.by_id.get_mut(&volume) else {
            return;
        };
        while let Some((_, run)) = target.incoming.pop_front_if(|(by, _)| *by <= batch) {
            target.incoming_extents -= run.count;
            target.spare.insert(run);
        }
        while let Some((_, used)) = target.reserved_at.pop_front_if(|(by, _)| *by <= batch) {
            let during = target.used.saturating_sub(used);
            // Doubles up to a limit; above it follows the use, and shrinks by halves.
            target.goal = (during * COMMITS_AHEAD)
                .max((target.goal * 2).min(GROWS_TO))
                .max(target.goal / 2)
                .min(MAX_RESERVE);
        }
    }

    /// Moves surplus from the volumes with the most.
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
            // Half of it, so that two writers of a full pool don't rob each other in turns.
            let share = spare.div_ceil(2).min(want - got);
            let device = self.richest_device(&allocator.extents, other);
            let spare = &mut self.get_mut(other)?.spare;
            let Some(run) = device.and_then(|device| spare.pop_on(device, share)) else {
                break;
            };
            self.settle_account(other);
            self.add_incoming(allocator, journal, volume, run)?;
            got += run.count;
        }
        Ok(got)
    }

    fn richest_device(&self, extents: &Extents, volume: VolumeId) -> Option<DeviceIndex> {
        let spare = self.by_id.get(&volume)?.spare.devices();
        spare
            .filter(|(device, _)| extents.is_online(*device))
            .max_by_key(|(_, extents)| *extents)
            .map(|(device, _)| device)
    }

    /// Returns spare and incoming extents.
    pub(crate) fn return_reservation(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
        volume: VolumeId,
    ) -> Result<()> {
        let target = self.get_mut(volume)?;
        let mut runs = target.spare.drain();
        runs.extend(target.incoming.drain(..).map(|(_, run)| run));
        target.incoming_extents = 0;
        for run in runs {
            // Never granted, so it still reads as zeros.
            allocator.set_state(journal, run, ExtentState::Clean);
        }
        self.settle_account(volume);
        Ok(())
    }

    /// Idle volumes return their spare extents. Returns their number. Call it about once a second.
    pub(crate) fn return_idle_spare(
        &mut self,
        allocator: &mut Allocator,
        journal: &mut Journal,
    ) -> u64 {
        let mut idle = Vec::new();
        for (id, volume) in &mut self.by_id {
            if volume.used == volume.used_before && volume.incoming.is_empty() {
                if volume.spare.extents() > 0 {
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
            for run in volume.spare.drain() {
                returned += run.count;
                allocator.set_state(journal, run, ExtentState::Clean);
            }
            self.settle_account(id);
        }
        returned
    }
}
