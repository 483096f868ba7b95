//! What a reactor's admission writes into the records that others read.

use super::Admission;
use forebay_burst::budget::Rate;
use forebay_burst::units::PARTS;
use forebay_xlate::boundary::region::{LaneRecord, ReactorRecord, Region};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Tenants whose records are written at a window's end: each is about every 10 ms.
const RECORDED_AT_ONCE: usize = 32;
/// The same of lanes, which are more.
const LANES_AT_ONCE: usize = 8;
/// So many windows are about a round of them.
pub(super) const A_ROUND: u64 = 32;

/// A lane's record says that it was given this.
pub(super) fn grant(record: &LaneRecord, rate: Rate) {
    record.granted_ops_s.store(rate.iops, Relaxed);
    record.granted_bytes_s.store(rate.bytes, Relaxed);
}

impl Admission {
    /// A window has ended: the next of them are written.
    pub(super) fn record_some(&mut self, record: &ReactorRecord, region: &Region) {
        for _ in 0..RECORDED_AT_ONCE.min(self.tenants.len()) {
            let tenant = self.record_at;
            self.record_at = (tenant + 1) % self.tenants.len();
            self.record(tenant, region);
        }
        for _ in 0..LANES_AT_ONCE.min(self.lanes) {
            let lane = self.lane_at;
            self.lane_at = (lane + 1) % self.lanes;
            // The record of a lane that is not here is another reactor's to write.
            if self.gates[lane].tenant != u32::MAX {
                let granted = self.scheduler.granted_to(lane);
                grant(&region.lanes()[lane], granted);
            }
        }
        for (cell, factor) in record
            .corrections_milli
            .iter()
            .zip(self.scheduler.corrections())
        {
            cell.store((factor * 1000.0) as u64, Relaxed);
        }
    }

    /// Writes what is known of a tenant into its record.
    fn record(&mut self, tenant: usize, region: &Region) {
        let Some(record) = region.tenants().get(tenant) else {
            return;
        };
        let told = &mut self.tenants[tenant];
        if told.lanes > 0 {
            self.scheduler.earn(tenant);
        }
        let seen = self.scheduler.seen(tenant);
        if told.lanes == 0 && seen == told.seen && told.throttled_ops == 0 {
            return;
        }
        let old = std::mem::replace(&mut told.seen, seen);
        let add = |cell: &AtomicU64, more: u64| {
            if more > 0 {
                cell.fetch_add(more, Relaxed);
            }
        };
        let parts = |new: u64, old: u64| new / PARTS as u64 - old / PARTS as u64;
        add(&record.used_ops, parts(seen.used_parts, old.used_parts));
        add(&record.used_bytes, seen.used_bytes - old.used_bytes);
        add(
            &record.metered_ops,
            parts(seen.metered_parts, old.metered_parts),
        );
        add(
            &record.metered_bytes,
            seen.metered_bytes - old.metered_bytes,
        );
        add(
            &record.throttled_ops,
            std::mem::take(&mut told.throttled_ops),
        );
        add(&record.throttled_ns, std::mem::take(&mut told.throttled_ns));
        add(&record.taken_ops, seen.taken - old.taken);
        add(&record.lost_ops, seen.lost - old.lost);
        add(&record.reserve_ops, seen.from_reserve - old.from_reserve);
        add(
            &record.active_windows,
            seen.active_windows - old.active_windows,
        );
        add(&record.cost_ns, seen.cost_ns - old.cost_ns);
        add(&record.corrected_ns, seen.corrected_ns - old.corrected_ns);
        add(
            &record.burst_windows,
            seen.burst_windows - old.burst_windows,
        );
        let newest = self.scheduler.newest(tenant);
        for (cell, value) in [
            (&record.credit_ops, seen.credit_parts / PARTS as u64),
            (&record.credit_bytes, seen.credit_bytes),
            (&record.granted_ops_s, newest.granted.iops),
            (&record.granted_bytes_s, newest.granted.bytes),
            (&record.used_ops_s, newest.used.iops),
            (&record.used_bytes_s, newest.used.bytes),
            (&record.throttled, newest.waited),
            (&record.above_ops_s, newest.above.iops),
            (&record.above_bytes_s, newest.above.bytes),
            (&record.window_cost_ns_s, newest.cost_ns),
            (&record.window_corrected_ns_s, newest.corrected_ns),
        ] {
            cell.store(value, Relaxed);
        }
    }

    #[cold]
    pub(super) fn record_tenants(&mut self, region: &Region) {
        for tenant in 0..self.tenants.len() {
            self.record(tenant, region);
        }
    }

    /// Writes all records, for the last time.
    pub(in crate::core::admit) fn record_all(&mut self, record: &ReactorRecord, region: &Region) {
        self.record_tenants(region);
        record
            .corrections_milli
            .iter()
            .for_each(|cell| cell.store(0, Relaxed));
        for (gate, lane) in self.gates.iter().zip(region.lanes()) {
            if gate.tenant != u32::MAX {
                grant(lane, Rate { iops: 0, bytes: 0 });
            }
        }
    }
}
