//! Values that hosts see: a volume's used space (NUSE), and the pool's health (SMART log).
//!
//! Changes are sent periodically: a lack of space at the next beat, others at every tenth. A new
//! engine gets everything before it serves, with the counts of earlier engines, so no counter of
//! the SMART log falls. A fully reserved volume has all its space, whatever the pool has left.

use std::collections::{BTreeMap, BTreeSet};

use forebay_nvme::controller::Health;
use forebay_pool::{DeviceHealth, SpaceLevel};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{Past, ToEngine};

use crate::devices::now_s;
use crate::link::session::Session;
use crate::statistics::Statistics;

/// Changed numbers alone are sent at every tenth beat.
const BEATS: u32 = 10;
/// SMART's Critical Warning (Base 2.0, 5.16.1.3): the spare is below its threshold.
const SPARE_IS_LOW: u8 = 1 << 0;
/// Likewise: media errors have degraded reliability.
const RELIABILITY: u8 = 1 << 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VisibleStatistics {
    used_bytes: u64,
    spare_percent: u8,
    spare_threshold_percent: u8,
    warnings: u8,
    past: Past,
}

/// The values last sent.
#[derive(Debug, Default)]
pub(crate) struct Published {
    all: BTreeMap<VolumeId, VisibleStatistics>,
    /// Volumes with data on devices that are not healthy.
    hurt: BTreeSet<VolumeId>,
    beats: u32,
}

impl Statistics {
    fn hurt(&self) -> BTreeSet<VolumeId> {
        let pool = &self.base.core.borrow().pool;
        let devices = pool.devices().iter().map(|device| device.index);
        let unwell = devices.filter(|d| pool.allocator().device_health(*d) != DeviceHealth::Online);
        unwell.flat_map(|d| pool.volumes().on_device(d)).collect()
    }

    fn statistics(&self, hurt: &BTreeSet<VolumeId>) -> BTreeMap<VolumeId, VisibleStatistics> {
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let spare = 100 - pool.space().used_percent().min(100);
        let is_low = pool.space_level() == SpaceLevel::Critical;
        let threshold = 100 - pool.info().settings.critical_percent.min(100);
        let added = self.added.borrow();
        let pasts: BTreeMap<VolumeId, Past> = (pool.exports().iter())
            .map(|export| (export.volume, added.past(export)))
            .collect();
        let of = |volume: &forebay_pool::VolumeRecord| {
            let space = pool.volumes().space_of(volume.id).unwrap_or_default();
            let used = space.mapped.saturating_sub(space.preallocated);
            let used_bytes = used.saturating_mul(pool.info().extent_bytes);
            let has_all = volume.reserved_bytes >= volume.size_bytes;
            let low = if is_low && !has_all { SPARE_IS_LOW } else { 0 };
            let bad = if hurt.contains(&volume.id) {
                RELIABILITY
            } else {
                0
            };
            VisibleStatistics {
                used_bytes: used_bytes.min(volume.size_bytes),
                spare_percent: if has_all { 100 } else { spare },
                spare_threshold_percent: threshold,
                warnings: low | bad,
                past: pasts.get(&volume.id).copied().unwrap_or_default(),
            }
        };
        let volumes = pool
            .volumes()
            .records()
            .map(|volume| (volume.id, of(volume)));
        volumes.collect()
    }

    /// SMART values of the whole node.
    pub(crate) fn node_health(&self) -> Health {
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let mut health = Health {
            available_spare_percent: 100 - pool.space().used_percent().min(100),
            spare_threshold_percent: 100 - pool.info().settings.critical_percent.min(100),
            power_on_hours: u128::from(now_s().saturating_sub(pool.info().created_s)) / 3600,
            ..Health::default()
        };
        let mut devices = pool.devices().iter().map(|device| device.index);
        if devices.any(|d| pool.allocator().device_health(d) != DeviceHealth::Online) {
            health.critical_warning |= RELIABILITY;
        }
        if pool.space_level() == SpaceLevel::Critical {
            health.critical_warning |= SPARE_IS_LOW;
        }
        for past in self.added.borrow().pasts(pool.exports()) {
            health.host_reads += u128::from(past.reads);
            health.host_writes += u128::from(past.writes);
            health.bytes_read += u128::from(past.bytes_read);
            health.bytes_written += u128::from(past.bytes_written);
            health.media_errors += u128::from(past.media_errors);
        }
        health
    }

    #[cfg(test)]
    pub(crate) fn published_used(&self, volume: VolumeId) -> u64 {
        self.statistics(&BTreeSet::new())[&volume].used_bytes
    }

    pub(crate) fn publish_statistics(&self, session: &Session) {
        let mut published = self.statistics.borrow_mut();
        published.hurt = self.hurt();
        published.all = self.statistics(&published.hurt);
        for (volume, statistics) in &published.all {
            say(session, *volume, statistics);
        }
    }

    pub(crate) fn poll_statistics(&self) {
        let Some(session) = self.link.session() else {
            return;
        };
        let mut published = self.statistics.borrow_mut();
        published.beats += 1;
        let all_of_them = published.beats >= BEATS;
        if all_of_them {
            published.beats = 0;
            published.hurt = self.hurt();
        }
        let now = self.statistics(&published.hurt);
        published.all.retain(|volume, _| now.contains_key(volume));
        for (volume, statistics) in now {
            let before = published.all.get(&volume);
            let warns = before.map_or(0, |before| before.warnings) != statistics.warnings;
            if before != Some(&statistics) && (all_of_them || warns || before.is_none()) {
                say(&session, volume, &statistics);
                published.all.insert(volume, statistics);
            }
        }
    }
}

fn say(session: &Session, volume: VolumeId, statistics: &VisibleStatistics) {
    session.say(&ToEngine::VolumeStatistics {
        volume,
        used_bytes: statistics.used_bytes,
        spare_percent: statistics.spare_percent,
        spare_threshold_percent: statistics.spare_threshold_percent,
        warnings: statistics.warnings,
        past: statistics.past,
    });
}
