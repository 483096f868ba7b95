//! Writes a reactor's admission state into the shared records.

use super::Admission;
use forebay_qos::budget::Rate;
use forebay_qos::resources::PARTS;
use forebay_qos::scheduler::TenantStatistics;
use forebay_xlate::boundary::region::{LaneRecord, ReactorRecord, Region};
use std::sync::atomic::Ordering::Relaxed;

/// Tenant records per window, so that each is written about every 10 ms.
const RECORDED_AT_ONCE: usize = 32;
const LANES_AT_ONCE: usize = 8;
/// Windows in which all tenant records are written once.
pub(super) const A_ROUND: u64 = 32;

pub(super) fn grant(record: &LaneRecord, rate: Rate) {
    record.granted_ops_s.store(rate.iops, Relaxed);
    record.granted_bytes_s.store(rate.bytes, Relaxed);
}

impl Admission {
    pub(super) fn record_some(&mut self, record: &ReactorRecord, region: &Region) {
        for _ in 0..RECORDED_AT_ONCE.min(self.tenants.len()) {
            let tenant = self.record_at;
            self.record_at = (tenant + 1) % self.tenants.len();
            self.record(tenant, region);
        }
        for _ in 0..LANES_AT_ONCE.min(self.lanes) {
            let lane = self.lane_at;
            self.lane_at = (lane + 1) % self.lanes;
            // Another reactor writes other lanes' records.
            if self.lane_states[lane].tenant != u32::MAX {
                let granted = self.scheduler.granted_to(self.lane_states[lane].unit);
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

    fn record(&mut self, tenant: usize, region: &Region) {
        let Some(record) = region.tenants().get(tenant) else {
            return;
        };
        let reported = &mut self.tenants[tenant];
        if reported.lanes > 0 {
            self.scheduler.earn(tenant);
        }
        let seen = self.scheduler.statistics(tenant);
        if reported.lanes == 0 && seen == reported.seen && reported.throttled_ops == 0 {
            return;
        }
        let old = std::mem::replace(&mut reported.seen, seen);
        let throttled =
            [&mut reported.throttled_ops, &mut reported.throttled_ns].map(std::mem::take);
        let sums = |seen: &TenantStatistics, [throttled_ops, throttled_ns]: [u64; 2]| {
            [
                seen.used_parts / PARTS as u64,
                seen.used_bytes,
                seen.metered_parts / PARTS as u64,
                seen.metered_bytes,
                throttled_ops,
                throttled_ns,
                seen.taken,
                seen.lost,
                seen.from_reserve,
                seen.burst_windows,
                seen.active_windows,
                seen.cost_ns,
                seen.corrected_ns,
            ]
        };
        let more = sums(&seen, throttled).into_iter().zip(sums(&old, [0; 2]));
        for (cell, (new, old)) in record.sums().into_iter().zip(more) {
            if new > old {
                cell.fetch_add(new - old, Relaxed);
            }
        }
        let newest = self.scheduler.newest(tenant);
        let credit = [seen.credit_parts / PARTS as u64, seen.credit_bytes];
        let now = credit.into_iter().chain(newest.words());
        for (cell, value) in record.gauges().into_iter().zip(now) {
            cell.store(value, Relaxed);
        }
    }

    #[cold]
    pub(super) fn record_tenants(&mut self, region: &Region) {
        for tenant in 0..self.tenants.len() {
            self.record(tenant, region);
        }
    }

    pub(crate) fn record_all(&mut self, record: &ReactorRecord, region: &Region) {
        self.record_tenants(region);
        record
            .corrections_milli
            .iter()
            .for_each(|cell| cell.store(0, Relaxed));
        for (lane_state, lane) in self.lane_states.iter().zip(region.lanes()) {
            if lane_state.tenant != u32::MAX {
                grant(lane, Rate { iops: 0, bytes: 0 });
            }
        }
    }
}
