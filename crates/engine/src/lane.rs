//! A lane: one export's private path through a reactor.
//!
//! **Design.** All connections of an export are on one reactor, so a lane has one writer and no
//! lock. Its statistics are in the state region. **Not here:** admission
//! ([`crate::qos::Admission`]).

use crate::volume::Volume;
use forebay_nvme::controller::{Health, NamespaceInfo};
use forebay_nvme::io::NamespaceGeometry;
use forebay_nvme::reservation::{Access, Reservations};
use forebay_qos::budget::Budget;
use forebay_xlate::boundary::message::{ExportConfig, Past};
use forebay_xlate::boundary::region::{LaneRecord, OpKind, Region};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Its slot in the state region and in its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct LaneIndex(pub u32);

/// Statistics of a volume that only the owner knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct VolumeStatistics {
    /// `None`: unknown, reported as the volume's size.
    pub used_bytes: Option<u64>,
    /// Free space that it may still take, per cent.
    pub spare_percent: u8,
    /// Below this, `spare_percent` is a warning.
    pub spare_threshold_percent: u8,
    /// Critical Warning bits of the SMART / Health Information log (Base 2.0, 5.16.1.3).
    pub warnings: u8,
    pub past: Past,
}

impl Default for VolumeStatistics {
    fn default() -> Self {
        Self {
            used_bytes: None,
            spare_percent: 100,
            spare_threshold_percent: 0,
            warnings: 0,
            past: Past::default(),
        }
    }
}

/// Commands that succeeded at once, counted together.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct AtOnce {
    any: bool,
    /// (Number, bytes) of reads and of writes.
    kinds: [(u64, u64); 2],
}

impl AtOnce {
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        !self.any
    }

    #[inline]
    pub(crate) fn add(&mut self, write: bool, bytes: u32) {
        let (ops, sum) = &mut self.kinds[usize::from(write)];
        *ops += 1;
        *sum += u64::from(bytes);
        self.any = true;
    }
}

/// A volume's part of its tenant's budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Share {
    /// Slot in the state region.
    pub tenant: u32,
    /// `None`: an equal part, no limit of its own.
    pub budget: Option<Budget>,
}

#[derive(Debug)]
pub(crate) struct Lane {
    pub index: LaneIndex,
    pub volume: Arc<Volume>,
    pub reservations: Arc<Reservations>,
    /// Access of VMs, which cannot register.
    pub vm_access: Access,
    pub statistics: VolumeStatistics,
    /// `None`: nothing is charged.
    pub share: Option<Share>,
    pub export: Arc<ExportConfig>,
    /// The lane can go only at zero.
    pub in_flight: u32,
    pub slices: u32,
    /// Slices that other reactors carry out.
    pub remote: u32,
    pub removed: bool,
    /// The highest commit requested.
    pub commit_asked: u64,
    region: Arc<Region>,
}

impl Lane {
    pub(crate) fn new(
        index: LaneIndex,
        volume: Arc<Volume>,
        export: Arc<ExportConfig>,
        region: Arc<Region>,
    ) -> Self {
        Self {
            index,
            volume,
            reservations: Arc::default(),
            vm_access: Access::ALL,
            statistics: VolumeStatistics::default(),
            share: None,
            export,
            in_flight: 0,
            slices: 0,
            remote: 0,
            removed: false,
            commit_asked: 0,
            region,
        }
    }

    pub(crate) fn set_reservations(&mut self, reservations: &Arc<Reservations>) {
        self.vm_access = reservations.access_of_strangers();
        self.reservations = reservations.clone();
    }

    pub(crate) fn record(&self) -> &LaneRecord {
        &self.region.lanes()[self.index.0 as usize]
    }

    /// `ns`: time since they were taken, called only if there are any.
    #[inline]
    pub(crate) fn count_at_once(&self, ended: &mut AtOnce, ns: impl FnOnce() -> u64) {
        if std::mem::take(&mut ended.any) {
            let ns = ns();
            let ops = &self.record().ops;
            for (kind, at) in [(OpKind::Read, 0), (OpKind::Write, 1)] {
                let (count, bytes) = std::mem::take(&mut ended.kinds[at]);
                if count > 0 {
                    ops[kind as usize].record_at_once(count, bytes, ns);
                }
            }
        }
    }

    pub(crate) fn namespace_info(&self) -> NamespaceInfo {
        let volume = &self.volume.config;
        NamespaceInfo {
            geometry: self.geometry(),
            used_blocks: (self.statistics.used_bytes).map_or(self.volume.blocks(), |bytes| {
                bytes.div_ceil(u64::from(volume.block_bytes))
            }),
            extent_bytes: volume.extent_bytes,
            nguid: volume.uuid,
            uuid: volume.uuid,
        }
    }

    #[inline]
    pub(crate) fn geometry(&self) -> NamespaceGeometry {
        self.volume.geometry()
    }

    pub(crate) fn health(&self) -> Health {
        let of = |kind: OpKind| &self.record().ops[kind as usize];
        let figure =
            |past: u64, cell: &AtomicU64| u128::from(past) + u128::from(cell.load(Relaxed));
        let past = &self.statistics.past;
        Health {
            available_spare_percent: self.statistics.spare_percent,
            spare_threshold_percent: self.statistics.spare_threshold_percent,
            critical_warning: self.statistics.warnings,
            bytes_read: figure(past.bytes_read, &of(OpKind::Read).bytes),
            bytes_written: figure(past.bytes_written, &of(OpKind::Write).bytes),
            host_reads: figure(past.reads, &of(OpKind::Read).ops),
            host_writes: figure(past.writes, &of(OpKind::Write).ops),
            media_errors: figure(past.media_errors, &self.record().media_errors),
            power_on_hours: hours_since(past.created_s),
            ..Health::default()
        }
    }
}

/// `created_s` is in seconds since the epoch; 0 is unknown.
fn hours_since(created_s: u64) -> u128 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now_s = now.map_or(0, |now| now.as_secs());
    match created_s {
        0 => 0,
        _ => u128::from(now_s.saturating_sub(created_s) / 3600),
    }
}

#[cfg(test)]
pub(crate) fn assert_times(record: &LaneRecord, ops: u64) {
    use forebay_xlate::boundary::region::{TimesOf, latency_bucket};
    let mut counted = 0;
    for kind in &record.ops {
        let times = &kind.times[TimesOf::Total as usize];
        let sum = (times.buckets.iter())
            .map(|bucket| bucket.load(Relaxed))
            .sum::<u64>();
        assert_eq!(times.buckets[latency_bucket(0)].load(Relaxed), 0);
        assert_eq!(sum, kind.ops.load(Relaxed));
        assert!(times.sum_ns.load(Relaxed) >= sum);
        counted += sum;
    }
    assert_eq!(counted, ops);
}
