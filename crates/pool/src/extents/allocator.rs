//! The allocator: every change of an extent's state, with its reservation, placement and
//! quarantine.
//!
//! **Not here:** logical extents (`volumes`), zeroing.

use super::{
    DeviceHealth, ExtentState, Extents,
    placement::{Pattern, UNIT_EXTENTS},
    quarantine::{Quarantine, QuarantineMark},
    reservations::Reservations,
    runs::{DeviceRun, RunSet},
    space::{Placement, Space},
};
use crate::{
    error::{PoolError, Result},
    journal::{Journal, batch::Table},
};
use forebay_xlate::types::{DeviceIndex, VolumeId};

/// All extents of a pool.
#[derive(Debug)]
pub struct Allocator {
    pub(crate) extents: Extents,
    pub(crate) reservations: Reservations,
    pub(crate) pattern: Pattern,
    pub(crate) quarantine: Quarantine,
    pub(crate) leaked: u64,
}

impl Allocator {
    pub(crate) fn new(extents: Extents) -> Self {
        let quarantine = Quarantine::found(extents.runs_in(ExtentState::Quarantined));
        Self {
            extents,
            reservations: Reservations::default(),
            pattern: Pattern::default(),
            quarantine,
            leaked: 0,
        }
    }

    /// Extents marked as used without a user at opening.
    pub fn leaked_extents(&self) -> u64 {
        self.leaked
    }

    /// A device's extents by state, without spare and promised ones.
    pub fn device_space(&self, device: DeviceIndex) -> Option<Space> {
        self.extents.device_space(device)
    }

    /// Whether a device can be used.
    pub fn device_health(&self, device: DeviceIndex) -> DeviceHealth {
        self.extents.health(device)
    }

    /// The state of a run's first extent, if it exists.
    pub fn extent_state(&self, run: DeviceRun) -> Option<ExtentState> {
        self.extents.get(run.device, run.first.0)
    }

    /// A mark of all extents quarantined so far. Take it before asking whether a device's requests
    /// have ended, and before grants to a new engine.
    pub fn quarantine_mark(&self) -> QuarantineMark {
        self.quarantine.mark()
    }

    /// A device's quarantined extents.
    pub fn quarantined_on(&self, device: DeviceIndex) -> u64 {
        let runs = self.quarantine.iter();
        runs.filter(|run| run.device == device)
            .map(|run| run.count)
            .sum()
    }

    pub(crate) fn set_health(&mut self, device: DeviceIndex, health: DeviceHealth) -> Result<()> {
        if !self.extents.set_health(device, health) {
            return Err(PoolError::not_found(format!("no {device}")));
        }
        self.update_pattern();
        Ok(())
    }

    pub(crate) fn update_pattern(&mut self) {
        self.pattern.update(&self.extents);
    }

    /// Sets any state but reserved.
    pub(crate) fn set_state(&mut self, journal: &mut Journal, run: DeviceRun, state: ExtentState) {
        self.extents.set(run, state);
        journal.touch_chunks(Table::States, run);
        if self.reservations.remove(run) {
            journal.touch_chunks(Table::Reservations, run);
        }
    }

    /// Reserves a clean run or another volume's.
    pub(crate) fn reserve(&mut self, journal: &mut Journal, run: DeviceRun, volume: VolumeId) {
        self.extents.set(run, ExtentState::Reserved);
        journal.touch_chunks(Table::States, run);
        self.reservations.remove(run);
        self.reservations.insert(run, volume);
        journal.touch_chunks(Table::Reservations, run);
    }

    /// Dirty once the open batch is durable.
    pub(crate) fn free(&mut self, journal: &mut Journal, run: DeviceRun) {
        self.set_state(journal, run, ExtentState::Freed);
        journal.on_commit().freed.push(run);
    }

    /// Quarantines a run without an owner.
    pub(crate) fn quarantine(&mut self, journal: &mut Journal, run: DeviceRun) {
        self.set_state(journal, run, ExtentState::Quarantined);
        self.quarantine.add(run);
    }

    /// Returns the number of extents.
    pub(crate) fn end_quarantine_on(
        &mut self,
        journal: &mut Journal,
        device: DeviceIndex,
        mark: QuarantineMark,
    ) -> u64 {
        let ended = (self.quarantine).take(|since, run| since <= mark && run.device == device);
        self.free_all(journal, &ended)
    }

    /// Frees all quarantined extents, once nothing can hang. Returns their number.
    pub(crate) fn end_all_quarantine(&mut self, journal: &mut Journal) -> u64 {
        let ended = self.quarantine.take(|_, _| true);
        self.free_all(journal, &ended)
    }

    /// Returns the number of extents.
    pub(crate) fn free_all(&mut self, journal: &mut Journal, runs: &[DeviceRun]) -> u64 {
        for run in runs {
            self.free(journal, *run);
        }
        runs.iter().map(|run| run.count).sum()
    }

    /// Takes up to `want` clean extents for a volume with these spare ones.
    pub(crate) fn take_clean(
        &mut self,
        spare: &RunSet,
        want: u64,
        placement: Placement,
    ) -> Vec<DeviceRun> {
        let mut runs = Vec::new();
        let mut left = want;
        for (device, share) in self.shares(spare, want, placement) {
            let mut share = share.min(left);
            while share > 0 {
                let Some(run) = self.extents.take_clean(device, share) else {
                    break;
                };
                share -= run.count;
                left -= run.count;
                runs.push(run);
            }
        }
        runs
    }

    /// The most that each device gives.
    fn shares(&self, spare: &RunSet, want: u64, placement: Placement) -> Vec<(DeviceIndex, u64)> {
        let free: Vec<(DeviceIndex, u64)> = (0..self.extents.devices())
            .map(|device| DeviceIndex(device as u8))
            .map(|device| (device, self.extents.clean_on(device)))
            .filter(|(_, free)| *free > 0)
            .collect();
        if placement == Placement::Fill || free.len() < 2 {
            return free;
        }
        let all: u128 = free.iter().map(|(_, free)| u128::from(*free)).sum();
        let there = |device| spare.extents_on(device);
        let goal: u64 = want + free.iter().map(|(device, _)| there(*device)).sum::<u64>();
        // Devices that most lack their share come first.
        let mut shares: Vec<(u64, DeviceIndex, u64)> = free
            .iter()
            .map(|(device, free)| {
                // At most `goal`.
                let share = (u128::from(goal) * u128::from(*free)).div_ceil(all) as u64;
                let lacks = share.saturating_sub(there(*device));
                (lacks, *device, *free)
            })
            .collect();
        shares.sort_by_key(|(lacks, device, _)| (std::cmp::Reverse(*lacks), *device));
        let units = |lacks: &u64| lacks.next_multiple_of(UNIT_EXTENTS);
        let wanted = shares
            .iter()
            .map(|(lacks, device, _)| (*device, units(lacks)));
        // Any device gives the rest.
        let rest = shares.iter().map(|(_, device, free)| (*device, *free));
        wanted.chain(rest).collect()
    }

    pub(crate) fn take_dirty(&mut self, device: DeviceIndex, max_extents: u64) -> Vec<DeviceRun> {
        let mut runs = Vec::new();
        let mut left = max_extents;
        while left > 0 {
            let Some(run) = self.extents.take_dirty(device, left) else {
                break;
            };
            left -= run.count;
            runs.push(run);
        }
        runs
    }

    pub(crate) fn check_zeroing(&self, run: DeviceRun) -> Result<()> {
        if self
            .extents
            .all(run, |state| state == ExtentState::ZeroFilling)
        {
            return Ok(());
        }
        Err(PoolError::invalid(format!(
            "extents {}..{} of {} are not all being zero-filled",
            run.first.0,
            run.end(),
            run.device
        )))
    }

    /// Clean extents may hold deleted data: makes them dirty.
    pub(crate) fn distrust_clean(&mut self, journal: &mut Journal, device: DeviceIndex) {
        let clean: Vec<DeviceRun> = self.extents.runs_in(ExtentState::Clean);
        for run in clean.into_iter().filter(|run| run.device == device) {
            self.set_state(journal, run, ExtentState::Dirty);
        }
    }
}
