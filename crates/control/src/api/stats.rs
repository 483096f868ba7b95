//! Statistics as the API shows them.
//!
//! Purpose: the answer of `GET /v1/stats`, and the arithmetic from log2 latency buckets to
//! percentiles.
//! Design: counters since the engine of this generation started; a reader takes differences.
//! Bucket `i` of a latency histogram counts times in `[2^i, 2^(i+1))` ns (bucket 0 also holds 0), so
//! a percentile is exact to a factor of two; it is interpolated linearly within its bucket.
//! Not here: gathering (the owner reads the engine's counters), and rates.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::events::TakeoverStats;

/// Everything `GET /v1/stats` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// When this was gathered, milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// Engine generation that the counters belong to.
    pub generation: u64,
    /// The engine, if one runs.
    pub engine: Option<EngineStats>,
    /// The pool, if one is open.
    pub pool: Option<PoolStats>,
    /// What engines' deaths cost.
    pub takeover: TakeoverStats,
    /// One entry per lane, that is per export.
    pub lanes: Vec<LaneStats>,
}

/// The engine process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EngineStats {
    /// Process id.
    pub pid: u32,
    /// Number of reactors.
    pub reactors: u32,
    /// CPU time in user mode, seconds.
    pub cpu_user_s: f64,
    /// CPU time in the kernel, seconds.
    pub cpu_system_s: f64,
    /// Resident memory.
    pub resident_bytes: u64,
    /// Time reactors spent asleep, summed over reactors.
    pub asleep_ns: u64,
    /// Time reactors spent awake, summed over reactors.
    pub busy_ns: u64,
}

/// Space and events of the pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolStats {
    /// All extents together.
    pub capacity_bytes: u64,
    /// Extents that belong to nobody and read as zeros.
    pub clean_bytes: u64,
    /// Extents set aside for a volume.
    pub reserved_bytes: u64,
    /// Extents mapped by a volume.
    pub owned_bytes: u64,
    /// Freed extents waiting to be laundered.
    pub dirty_bytes: u64,
    /// Extents that can't be reused.
    pub quarantined_bytes: u64,
    /// Grants outstanding.
    pub grants: u64,
    /// Faults answered since the daemon started.
    pub faults: u64,
    /// Revokes completed since the daemon started.
    pub revokes: u64,
    /// Catalog transactions made durable since the daemon started.
    pub catalog_commits: u64,
}

/// One class of commands on one lane.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OpStats {
    /// Commands completed, failed ones included.
    pub ops: u64,
    /// Bytes they moved, or covered (deallocate).
    pub bytes: u64,
    /// Those that ended with an error status.
    pub errors: u64,
    /// Half of the commands took at most this.
    pub latency_p50_ns: Option<u64>,
    /// 99 of 100 commands took at most this.
    pub latency_p99_ns: Option<u64>,
}

/// One export's lane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LaneStats {
    /// Tenant of the volume.
    pub tenant: String,
    /// The volume.
    pub volume: String,
    /// Reads.
    pub read: OpStats,
    /// Writes and write zeroes.
    pub write: OpStats,
    /// Flushes.
    pub flush: OpStats,
    /// Deallocations.
    pub deallocate: OpStats,
    /// Commands in flight now.
    pub in_flight: u64,
    /// Of those, commands that wait for the owner's answer to a fault.
    pub parked: u64,
    /// Connections (queues) open now.
    pub queues: u64,
}

/// The time below which the fraction `q` (0..=1) of the counted events lie; `None` if nothing was
/// counted. Saturates rather than overflowing, whatever the counts are: they come from another
/// process's memory.
#[must_use]
pub fn quantile_ns(buckets: &[u64], q: f64) -> Option<u64> {
    let total: u128 = buckets.iter().map(|&count| u128::from(count)).sum();
    if total == 0 {
        return None;
    }
    // At least the first event, at most the last.
    let rank = ((total as f64) * q.clamp(0.0, 1.0)).ceil().max(1.0) as u128;
    let rank = rank.min(total);
    let mut before: u128 = 0;
    for (index, &count) in buckets.iter().enumerate() {
        let count = u128::from(count);
        if before + count >= rank {
            let low = if index == 0 {
                0.0
            } else {
                2f64.powi(index as i32)
            };
            let high = 2f64.powi(index as i32 + 1);
            let within = (rank - before) as f64 / count as f64;
            return Some((low + (high - low) * within) as u64);
        }
        before += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nothing_counted_is_no_latency() {
        assert_eq!(quantile_ns(&[], 0.5), None);
        assert_eq!(quantile_ns(&[0; 64], 0.99), None);
    }

    #[test]
    fn percentile_lies_in_the_bucket_of_its_event() {
        let mut buckets = [0u64; 64];
        buckets[10] = 98; // 1024..2048 ns
        buckets[20] = 2; // about a millisecond
        let p50 = quantile_ns(&buckets, 0.5).unwrap();
        assert!((1024..=2048).contains(&p50), "{p50}");
        let p99 = quantile_ns(&buckets, 0.99).unwrap();
        assert!((1 << 20..=1 << 21).contains(&p99), "{p99}");
    }

    proptest! {
        #[test]
        fn any_counts_give_growing_percentiles(
            buckets in prop::collection::vec(any::<u64>(), 0..70),
            a in -1.0..2.0f64,
            b in -1.0..2.0f64,
        ) {
            let (low, high) = if a < b { (a, b) } else { (b, a) };
            prop_assert!(quantile_ns(&buckets, low) <= quantile_ns(&buckets, high));
        }
    }
}
