//! Counters, as the API says them.
//!
//! Purpose: what the engine counts in its state region, with names from the pool.
//! Design: reads the region of the running engine; another process writes there at any time, so a
//! figure may be torn from its neighbours and every index is bounded. The region counts latencies
//! in four buckets to each doubling; a percentile is its bucket's upper end.
//! Not here: rates (readers take differences).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_xlate::boundary::region::{
    LaneRecord, MAX_REACTORS, OpKind, OpStats as RegionOpStats, TimesOf, latency_bucket_end_ns,
};

use super::Owner;
use super::session::Session;
use super::show::{tenant_name, total_extents};
use crate::api::events::TakeoverStats;
use crate::api::stats::{EngineStats, LaneStats, OpStats, PoolStats, Stats};

/// Milliseconds since the Unix epoch.
pub(crate) fn now_unix_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn quantile_ns(buckets: &[AtomicU64], percent: u128) -> Option<u64> {
    let counts: Vec<u128> = buckets
        .iter()
        .map(|count| u128::from(count.load(Relaxed)))
        .collect();
    let total: u128 = counts.iter().sum();
    if total == 0 {
        return None;
    }
    let rank = (total * percent).div_ceil(100).max(1);
    let mut seen = 0;
    counts
        .iter()
        .position(|count| {
            seen += count;
            seen >= rank
        })
        .map(latency_bucket_end_ns)
}

fn op_stats(ops: &RegionOpStats) -> OpStats {
    let total = &ops.times[TimesOf::Total as usize].buckets;
    OpStats {
        ops: ops.ops.load(Relaxed),
        bytes: ops.bytes.load(Relaxed),
        errors: ops.errors.load(Relaxed),
        latency_p50_ns: quantile_ns(total, 50),
        latency_p99_ns: quantile_ns(total, 99),
    }
}

fn lane_stats(lane: &LaneRecord, tenant: String, volume: String) -> LaneStats {
    LaneStats {
        tenant,
        volume,
        read: op_stats(&lane.ops[OpKind::Read as usize]),
        write: op_stats(&lane.ops[OpKind::Write as usize]),
        flush: op_stats(&lane.ops[OpKind::Flush as usize]),
        deallocate: op_stats(&lane.ops[OpKind::Deallocate as usize]),
        in_flight: lane.in_flight.load(Relaxed),
        parked: lane.parked.load(Relaxed),
        queues: lane.connections.load(Relaxed),
    }
}

/// CPU seconds in user and kernel mode, and resident bytes, from /proc.
fn process_usage(pid: u32) -> Option<(f64, f64, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may hold anything: fields 3 and on.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let number = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
    let resident = number(24)? as u64 * rustix::param::page_size() as u64;
    Some((number(14)? / ticks, number(15)? / ticks, resident))
}

fn engine_stats(session: &Session) -> Option<EngineStats> {
    let (cpu_user_s, cpu_system_s, resident_bytes) = process_usage(session.pid)?;
    let header = session.region.header();
    let reactors = header.reactors.load(Relaxed).min(MAX_REACTORS as u64);
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now_ns =
        now.tv_sec.unsigned_abs().saturating_mul(1_000_000_000) + now.tv_nsec.unsigned_abs();
    let life_ns = now_ns.saturating_sub(header.started_ns.load(Relaxed));
    // A reactor that is awake uses its CPU; so what it didn't use it slept.
    let busy_ns = ((cpu_user_s + cpu_system_s) * 1e9) as u64;
    Some(EngineStats {
        pid: session.pid,
        // At most MAX_REACTORS.
        reactors: reactors as u32,
        cpu_user_s,
        cpu_system_s,
        resident_bytes,
        asleep_ns: life_ns.saturating_mul(reactors).saturating_sub(busy_ns),
        busy_ns,
    })
}

impl Owner {
    /// Everything that is counted.
    pub(crate) fn stats(&self, takeover: TakeoverStats) -> Stats {
        let session = self.session();
        let core = self.core.borrow();
        let pool = &core.pool;
        let mut lanes = Vec::new();
        if let Some(session) = &session {
            let exports = pool.exports().count();
            for lane in session.region.lanes() {
                // Looking at the rest of the table would only make memory of it.
                if lanes.len() == exports {
                    break;
                }
                let slot = lane.export.load(Relaxed);
                let export = slot.checked_sub(1).map(forebay_pool::ExportId);
                let Some(export) = export.and_then(|id| pool.export(id).ok()) else {
                    continue;
                };
                let Ok(volume) = pool.volume(export.volume) else {
                    continue;
                };
                lanes.push(lane_stats(
                    lane,
                    tenant_name(&core, volume),
                    volume.name.clone(),
                ));
            }
        }
        lanes.sort_by(|a, b| (&a.tenant, &a.volume).cmp(&(&b.tenant, &b.volume)));
        let space = pool.space();
        let bytes = |extents: u64| extents.saturating_mul(pool.info().extent_bytes);
        Stats {
            at_unix_ms: now_unix_ms(),
            generation: session
                .as_ref()
                .map_or(pool.info().engine_generation, |s| s.generation),
            engine: session.as_ref().and_then(|session| engine_stats(session)),
            pool: Some(PoolStats {
                capacity_bytes: bytes(total_extents(&space)),
                clean_bytes: bytes(space.clean),
                reserved_bytes: bytes(space.reserved),
                owned_bytes: bytes(space.owned),
                dirty_bytes: bytes(space.dirty),
                quarantined_bytes: bytes(space.quarantined),
                grants: core.grants.usage().0 as u64,
                faults: self.counters.faults.get(),
                revokes: self.counters.revokes.get(),
                catalog_commits: self.committer.commits(),
            }),
            takeover,
            lanes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_xlate::boundary::region::{LATENCY_BUCKETS, latency_bucket};

    #[test]
    fn a_percentile_is_in_its_bucket() {
        let buckets: Vec<AtomicU64> = (0..LATENCY_BUCKETS).map(|_| AtomicU64::new(0)).collect();
        assert_eq!(quantile_ns(&buckets, 50), None);
        buckets[latency_bucket(1000)].store(98, Relaxed);
        buckets[latency_bucket(1_000_000)].store(2, Relaxed);
        let (p50, p99) = (
            quantile_ns(&buckets, 50).unwrap(),
            quantile_ns(&buckets, 99).unwrap(),
        );
        assert!((1000..=1280).contains(&p50), "{p50}");
        assert!((1_000_000..=1_400_000).contains(&p99), "{p99}");
    }

    #[test]
    fn this_process_uses_memory() {
        let (_, _, resident) = process_usage(std::process::id()).unwrap();
        assert!(resident > 100_000, "{resident}");
    }
}
