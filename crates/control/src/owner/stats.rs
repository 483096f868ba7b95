//! Counters, as the API says them.
//!
//! Purpose: what the engine counts in its state region, with names from the pool.
//! Design: reads the region of the running engine; another process writes there at any time, so a
//! figure may be torn from its neighbours and every index is bounded. The region counts latencies
//! in four buckets to each doubling; a percentile is its bucket's upper end.
//! Not here: rates (readers take differences).

use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_xlate::boundary::region::{
    LaneRecord, MAX_REACTORS, OpKind, OpStats as RegionOpStats, Times, TimesOf,
    latency_bucket_end_ns,
};

use super::Owner;
use super::session::Session;
use super::show::{tenant_name, total_extents};
use crate::api::events::TakeoverStats;
use crate::api::stats::{
    Bucket, EngineStats, Histogram, LaneStats, Latency, OpStats, PoolStats, Stats,
};

/// Milliseconds since the Unix epoch.
pub(crate) fn now_unix_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn histogram(times: &Times) -> Histogram {
    let buckets = times.buckets.iter().enumerate().map(|(at, count)| Bucket {
        end_ns: latency_bucket_end_ns(at),
        count: count.load(Relaxed),
    });
    let buckets: Vec<Bucket> = buckets.filter(|bucket| bucket.count > 0).collect();
    Histogram {
        count: buckets
            .iter()
            .fold(0, |n: u64, b| n.saturating_add(b.count)),
        sum_ns: times.sum_ns.load(Relaxed),
        buckets,
    }
}

fn op_stats(ops: &RegionOpStats) -> OpStats {
    let of = |what: TimesOf| histogram(&ops.times[what as usize]);
    let latency = Latency {
        total: of(TimesOf::Total),
        waiting: of(TimesOf::Waiting),
        translating: of(TimesOf::Translating),
        device: of(TimesOf::Device),
    };
    OpStats {
        ops: ops.ops.load(Relaxed),
        bytes: ops.bytes.load(Relaxed),
        errors: ops.errors.load(Relaxed),
        latency_p50_ns: latency.total.percentile_ns(50),
        latency_p99_ns: latency.total.percentile_ns(99),
        latency,
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
    use forebay_xlate::boundary::region::Region;

    #[test]
    fn a_percentile_is_in_its_bucket() {
        let region = Region::anonymous(1).unwrap();
        let ops = &region.lanes()[0].ops[0];
        for n in 0..100 {
            ops.record(0, if n < 98 { 1000 } else { 1_000_000 }, false);
        }
        let stats = op_stats(ops);
        let times = &stats.latency.total;
        assert_eq!((times.count, times.buckets.len()), (100, 2));
        assert_eq!(times.sum_ns, 98 * 1000 + 2_000_000);
        let (p50, p99) = (stats.latency_p50_ns.unwrap(), stats.latency_p99_ns.unwrap());
        assert!((1000..=1280).contains(&p50), "{p50}");
        assert!((1_000_000..=1_400_000).contains(&p99), "{p99}");
    }

    #[test]
    fn this_process_uses_memory() {
        let (_, _, resident) = process_usage(std::process::id()).unwrap();
        assert!(resident > 100_000, "{resident}");
    }
}
