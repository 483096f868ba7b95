//! Which device an extent comes from.
//!
//! **Design.** *Stripe*: a volume is cut into units of 16 logical extents, and the units go round the
//! devices by a pattern in which each device comes as often as its share of the free space says; so
//! unequal devices fill together. A unit that is begun gets 16 aligned extents of its own as long as
//! there are such, and its later extents join it. *Fill*, or a single device: an extent goes where a
//! neighbour's run would continue, else to the first device with stock. What a policy wants is a wish:
//! an extent is found as long as the volume's stock has one on a device that is online.
//!
//! **Not here:** how much is reserved, and for whom (`stock`).

use crate::{
    extents::Extents,
    pool::{Pool, Volume},
    runs::DeviceRun,
    space::Placement,
};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use std::ops::Range;

/// Logical extents that stay on one device under stripe.
pub(crate) const UNIT_EXTENTS: u64 = 16;
/// The levels that free space is measured in, at most; fewer with many devices.
const LEVELS: u64 = 16;
/// The pattern's greatest length.
const PATTERN_LIMIT: u64 = 1024;
/// In a stock run of this many extents or more, every stream but the volume's first starts in the
/// middle, so that both it and whoever writes before it can go on contiguously.
const SPLIT_EXTENTS: u64 = 4;

/// The order in which units go round the devices.
#[derive(Default, Debug)]
pub(crate) struct Pattern {
    levels: Vec<u64>,
    devices: Vec<DeviceIndex>,
}

impl Pattern {
    /// Makes it anew if the devices' free space has changed enough.
    pub(crate) fn update(&mut self, extents: &Extents) {
        let free: Vec<u64> = (0..extents.devices())
            // A pool has at most 256 devices.
            .map(|device| extents.clean_on(DeviceIndex(device as u8)))
            .collect();
        let most = free.iter().copied().max().unwrap_or(0).max(1);
        let scale = LEVELS.min(PATTERN_LIMIT / free.len().max(1) as u64);
        let level = |free: &u64| free.saturating_mul(scale).div_ceil(most);
        let levels: Vec<u64> = free.iter().map(level).collect();
        let near = |(old, new): (&u64, &u64)| old.abs_diff(*new) <= 1 && (*old == 0) == (*new == 0);
        if levels.len() == self.levels.len() && self.levels.iter().zip(&levels).all(near) {
            return;
        }
        let all: u64 = levels.iter().sum();
        let mut credit = vec![0i64; levels.len()];
        self.devices.clear();
        for _ in 0..all {
            // Each gets its share, and whoever has most pays for the turn.
            for (credit, level) in credit.iter_mut().zip(&levels) {
                *credit += level.cast_signed();
            }
            let next = credit
                .iter()
                .enumerate()
                .max_by_key(|(at, credit)| (**credit, std::cmp::Reverse(*at)));
            if let Some((at, _)) = next {
                credit[at] -= all.cast_signed();
                self.devices.push(DeviceIndex(at as u8));
            }
        }
        self.levels = levels;
    }

    /// The device of a volume's unit.
    pub(crate) fn device(&self, volume: VolumeId, unit: u64) -> Option<DeviceIndex> {
        let length = self.devices.len() as u64;
        // Not every volume begins on the same device.
        let at = unit.wrapping_add(volume.0).checked_rem(length)?;
        self.devices.get(at as usize).copied()
    }
}

/// What a pick needs to know beside its volume.
pub(crate) struct Placer<'a> {
    pub(crate) placement: Placement,
    pub(crate) pattern: &'a Pattern,
    pub(crate) extents: &'a Extents,
}

impl Placer<'_> {
    /// Takes the extent from a volume's stock that fits `logical` best.
    pub(crate) fn pick(&self, volume: &mut Volume, logical: u64) -> Option<DeviceRun> {
        let striped = self.placement == Placement::Stripe && self.extents.devices() > 1;
        let at_most = |unit: u64| if striped { unit } else { u64::MAX };
        let into = logical % UNIT_EXTENTS;
        let reach = [at_most(into), at_most(UNIT_EXTENTS - 1 - into)];
        for (wish, reach) in volume.map.wishes(logical).into_iter().zip(reach) {
            if let Some(wish) = wish.filter(|wish| wish.distance <= reach) {
                let run = DeviceRun::new(wish.device, wish.extent, 1);
                if self.extents.is_online(run.device) && volume.stock.take(run) {
                    return Some(run);
                }
            }
        }
        let run = if striped {
            let wanted = self
                .pattern
                .device(volume.record.id, logical / UNIT_EXTENTS);
            wanted
                .filter(|device| self.extents.is_online(*device))
                .and_then(|device| volume.stock.longest_on(device))
                .or_else(|| self.longest(volume))
                .map(|longest| unit_in(longest, into))
        } else {
            let first = volume
                .stock
                .devices()
                .map(|(device, _)| device)
                .find(|device| self.extents.is_online(*device));
            first
                .and_then(|device| volume.stock.longest_on(device))
                .map(|longest| {
                    let split = longest.count >= SPLIT_EXTENTS && volume.map.mapped() > 0;
                    let shift = if split { longest.count / 2 } else { 0 };
                    DeviceRun::new(longest.device, longest.first.0 + shift, 1)
                })
        }?;
        volume.stock.take(run).then_some(run)
    }

    /// Takes a run from a volume's stock for `logical` and as many as fit of the logical extents about it
    /// that `within` names, all unmapped; under stripe of its unit alone. Says where the run begins.
    pub(crate) fn pick_around(
        &self,
        volume: &mut Volume,
        logical: u64,
        mut within: Range<u64>,
    ) -> Option<(u64, DeviceRun)> {
        let striped = self.placement == Placement::Stripe && self.extents.devices() > 1;
        if striped {
            let unit = logical - logical % UNIT_EXTENTS;
            within = within.start.max(unit)..within.end.min(unit + UNIT_EXTENTS);
        }
        let wanted = within.end.checked_sub(within.start)?;
        // Where the run before goes on.
        let [before, _] = volume.map.wishes(within.start);
        let reach = if striped {
            within.start % UNIT_EXTENTS
        } else {
            u64::MAX
        };
        if let Some(wish) = before.filter(|wish| wish.distance <= reach)
            && self.extents.is_online(wish.device)
            && let Some(there) = volume.stock.run_of(wish.device, wish.extent)
        {
            let count = wanted.min(there.end() - wish.extent);
            let run = DeviceRun::new(wish.device, wish.extent, count);
            if within.start + count > logical && volume.stock.take(run) {
                return Some((within.start, run));
            }
        }
        let device = if striped {
            self.pattern
                .device(volume.record.id, logical / UNIT_EXTENTS)
        } else {
            let mut devices = volume.stock.devices().map(|(device, _)| device);
            devices.find(|device| self.extents.is_online(*device))
        };
        let device = device.filter(|device| self.extents.is_online(*device))?;
        let longest = volume.stock.longest_on(device)?;
        let (mut first, mut count) = (within.start, wanted);
        if count > longest.count {
            // As much about it as there is in one piece.
            let most = 1u64 << longest.count.ilog2();
            first = first.max(logical - logical % most);
            count = most.min(within.end - first);
        }
        let shift = if striped {
            let start = longest.first.0.next_multiple_of(UNIT_EXTENTS) + first % UNIT_EXTENTS;
            let fits = start + count <= longest.end();
            if fits { start - longest.first.0 } else { 0 }
        } else if volume.map.mapped() > 0 {
            let middle = longest.count / 2;
            (middle - middle % count).min(longest.count - count)
        } else {
            0
        };
        let run = DeviceRun::new(device, longest.first.0 + shift, count);
        volume.stock.take(run).then_some((first, run))
    }

    fn longest(&self, volume: &Volume) -> Option<DeviceRun> {
        let stock = &volume.stock;
        stock
            .devices()
            .filter(|(device, _)| self.extents.is_online(*device))
            .filter_map(|(device, _)| stock.longest_on(device))
            .max_by_key(|run| run.count)
    }
}

/// The place of a unit's extent in a run: in 16 aligned extents of its own if there are such.
fn unit_in(run: DeviceRun, into: u64) -> DeviceRun {
    let start = run.first.0.next_multiple_of(UNIT_EXTENTS);
    let first = if start + UNIT_EXTENTS <= run.end() {
        start + into
    } else {
        run.first.0
    };
    DeviceRun::new(run.device, first, 1)
}

impl Pool {
    /// Takes up to `want` clean extents for a volume, from where its placement wants them.
    pub(crate) fn take_clean(&mut self, volume: VolumeId, want: u64) -> Vec<DeviceRun> {
        let mut runs = Vec::new();
        let mut left = want;
        for (device, share) in self.shares(volume, want) {
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

    /// How much of `want` each device gives at most.
    fn shares(&self, volume: VolumeId, want: u64) -> Vec<(DeviceIndex, u64)> {
        let free: Vec<(DeviceIndex, u64)> = (0..self.extents.devices())
            .map(|device| DeviceIndex(device as u8))
            .map(|device| (device, self.extents.clean_on(device)))
            .filter(|(_, free)| *free > 0)
            .collect();
        if self.info.settings.placement == Placement::Fill || free.len() < 2 {
            return free;
        }
        let all: u128 = free.iter().map(|(_, free)| u128::from(*free)).sum();
        let stock = self.volumes.get(&volume).map(|volume| &volume.stock);
        let there = |device| stock.map_or(0, |stock| stock.extents_on(device));
        let goal: u64 = want + free.iter().map(|(device, _)| there(*device)).sum::<u64>();
        // What each lacks of its share; who lacks most comes first, and gets whole units.
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
        // Whatever rounding and the end of a device leave comes from anywhere.
        let rest = shares.iter().map(|(_, device, free)| (*device, *free));
        wanted.chain(rest).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(counts: &[usize]) -> Extents {
        let mut extents = Extents::new(65536);
        for count in counts {
            extents.add_device(vec![0; *count]);
        }
        extents
    }

    fn order(pattern: &Pattern, units: u64) -> Vec<u8> {
        let device = |unit| pattern.device(VolumeId(0), unit).unwrap().0;
        (0..units).map(device).collect()
    }

    #[test]
    fn equal_devices_take_turns_and_unequal_ones_by_their_share() {
        let mut pattern = Pattern::default();
        assert_eq!(pattern.device(VolumeId(1), 1), None);
        pattern.update(&extents(&[100, 100, 100]));
        assert_eq!(order(&pattern, 6), [0, 1, 2, 0, 1, 2]);
        pattern.update(&extents(&[300, 100]));
        let turns = order(&pattern, 400);
        let second = turns.iter().filter(|device| **device == 1).count();
        assert!((90..=112).contains(&second), "{second}");
        // The small one's turns are spread.
        assert!(turns.windows(5).all(|turns| turns.contains(&1)));
    }

    #[test]
    fn a_device_with_nothing_has_no_turn_and_small_changes_change_nothing() {
        let mut all = extents(&[100, 100]);
        let mut pattern = Pattern::default();
        pattern.update(&all);
        let before = order(&pattern, 8);
        all.take_clean(DeviceIndex(0), 3);
        pattern.update(&all);
        assert_eq!(order(&pattern, 8), before);
        all.set_health(DeviceIndex(0), crate::Health::Missing);
        pattern.update(&all);
        assert_eq!(order(&pattern, 4), [1; 4]);
        pattern.update(&extents(&[1000; 256]));
        assert!(
            order(&pattern, 256)
                .iter()
                .enumerate()
                .all(|(at, device)| at == usize::from(*device))
        );
    }

    #[test]
    fn a_unit_lies_aligned_where_it_can() {
        let at = |first, count, into| {
            unit_in(DeviceRun::new(DeviceIndex(0), first, count), into)
                .first
                .0
        };
        assert_eq!(at(0, 64, 5), 5);
        assert_eq!(at(6, 64, 5), 21);
        assert_eq!(at(6, 20, 5), 6);
    }
}
