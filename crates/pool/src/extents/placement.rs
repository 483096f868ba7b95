//! Stripe: the order in which a volume's units of 16 logical extents go round the devices.
//!
//! Each device appears in the pattern in proportion to its free space, so unequal devices fill
//! together.
//!
//! **Not here:** the extent on a device (`volumes::placer`).

use super::Extents;
use forebay_xlate::types::{DeviceIndex, VolumeId};

/// Logical extents that stay on one device with stripe.
pub(crate) const UNIT_EXTENTS: u64 = 16;
/// Maximal number of levels of free space; fewer with many devices.
const LEVELS: u64 = 16;
/// The pattern's maximal length.
const PATTERN_LIMIT: u64 = 1024;

#[derive(Default, Debug)]
pub(crate) struct Pattern {
    levels: Vec<u64>,
    devices: Vec<DeviceIndex>,
}

impl Pattern {
    /// Recomputes the pattern if a device's free space changed enough.
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
            // Each device gains its share; the one with the most credit gets the turn.
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

    pub(crate) fn device(&self, volume: VolumeId, unit: u64) -> Option<DeviceIndex> {
        let length = self.devices.len() as u64;
        // Volumes begin on different devices.
        let at = unit.wrapping_add(volume.0).checked_rem(length)?;
        self.devices.get(at as usize).copied()
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
        all.set_health(DeviceIndex(0), crate::DeviceHealth::Missing);
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
}
