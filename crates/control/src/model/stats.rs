//! Statistics as the API shows them.
//!
//! Purpose: the answer of `GET /v1/stats`, and the arithmetic on latency histograms.
//! Design: counters; a reader takes differences, of histograms by [`Histogram::since`]. A histogram
//! names only the buckets that counted something. The engine has four buckets to each doubling, and a
//! percentile is its bucket's upper end, so it is at most a quarter too high.
//! Not here: gathering (the owner reads the engine's counters), and rates.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::events::TakeoverStats;
use super::scheduling::{Budget, Credit};

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
    /// Tenants with a budget, and others whose use was counted.
    #[serde(default)]
    pub tenants: Vec<TenantStats>,
    /// The engine's reactors.
    #[serde(default)]
    pub reactors: Vec<ReactorStats>,
}

/// What a tenant used of its budget. Sums go on over engines' deaths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantStats {
    /// Name.
    pub tenant: String,
    /// Its budget, if one is stated.
    pub budget: Option<Budget>,
    /// Commands that its budget paid for.
    pub used_ops: u64,
    /// Their bytes.
    pub used_bytes: u64,
    /// Of them those above its base, if it is metered.
    pub metered_ops: u64,
    /// Their bytes.
    pub metered_bytes: u64,
    /// Commands that waited because it was over budget.
    pub throttled_ops: u64,
    /// How long they waited together.
    pub throttled_ns: u64,
    /// Commands that began out of what a bursting tenant had been given.
    pub taken_ops: u64,
    /// Others' commands that began out of what this one had been given.
    pub lost_ops: u64,
    /// Commands that began out of the reserve.
    pub reserve_ops: u64,
    /// Windows in which it had more than its base, on any reactor.
    pub burst_windows: u64,
    /// Windows in which it had anything.
    pub active_windows: u64,
    /// Time of processors and devices that its commands cost as they are calibrated.
    #[serde(default)]
    pub cost_ns: u64,
    /// The same as it counted, corrected: how far that is from the other is the estimator's error.
    #[serde(default)]
    pub corrected_ns: u64,
    /// Commands a second granted in the newest window; null if there is no limit.
    #[serde(default)]
    pub granted_iops: Option<u64>,
    /// Bytes a second; null: no limit.
    #[serde(default)]
    pub granted_bytes_s: Option<u64>,
    /// What it used in the newest window that ended: commands a second.
    #[serde(default)]
    pub window_iops: u64,
    /// Bytes a second.
    #[serde(default)]
    pub window_bytes_s: u64,
    /// Commands that waited at the end of that window, for their budget or for a turn, and had a place in the engine.
    #[serde(default)]
    pub window_throttled: u64,
    /// Of what it used in that window, what was above its base: commands a second.
    #[serde(default)]
    pub above_iops: u64,
    /// Bytes a second.
    #[serde(default)]
    pub above_bytes_s: u64,
    /// Time of processors and devices that its commands cost in that window as they are calibrated: ns a second.
    #[serde(default)]
    pub window_cost_ns_s: u64,
    /// The same as it counted, corrected.
    #[serde(default)]
    pub window_corrected_ns_s: u64,
    /// What it has saved, if it can.
    pub credit: Option<Credit>,
}

impl TenantStats {
    /// Of what it used in the newest window, the part above its base: of operations or of bytes, whichever is more.
    pub fn burst_share(&self) -> f64 {
        let part = |above: u64, used: u64| above as f64 / used.max(1) as f64;
        let ops = part(self.above_iops, self.window_iops);
        let bytes = part(self.above_bytes_s, self.window_bytes_s);
        ops.max(bytes).min(1.0)
    }

    /// In the newest window its commands counted as so many times what is calibrated; nothing if it used nothing.
    pub fn window_correction(&self) -> Option<f64> {
        let [cost, corrected] = [self.window_cost_ns_s, self.window_corrected_ns_s];
        (cost > 0).then(|| corrected as f64 / cost as f64)
    }
}

/// What a reactor did for scheduling. Sums go on over engines' deaths.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReactorStats {
    /// Which.
    pub reactor: u32,
    /// Windows that ended.
    pub windows: u64,
    /// How long their ends took.
    pub scheduling_ns: u64,
    /// Operations at devices that other reactors were given to carry out.
    pub handed_over: u64,
    /// Operations at devices that it carried out for others.
    pub carried_out: u64,
    /// Time in turns that found something to do, of the engine that serves now.
    #[serde(default)]
    pub working_ns: u64,
    /// How far costs are off now, of each resource; nothing while there are no budgets.
    pub corrections: Vec<Correction>,
}

/// How far the costs of a resource are off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Correction {
    /// Which resource.
    pub resource: String,
    /// So many times what is calibrated they count now.
    pub times: f64,
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
    /// Of that, time in turns that found something to do.
    pub working_ns: u64,
    /// Staging memory that stays at hand for lanes, of all reactors.
    #[serde(default)]
    pub staging_own_bytes: u64,
    /// Staging memory that bursts have borrowed, until they end.
    #[serde(default)]
    pub staging_borrowed_bytes: u64,
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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
    /// How long the commands took, and where the time went.
    pub latency: Latency,
}

/// Where commands spent their time. A part counts only the commands that spent some there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// From the whole command received until its answer is handed to the connection.
    pub total: Histogram,
    /// Until it could begin: memory, data from the host, an earlier command on the same blocks.
    pub waiting: Histogram,
    /// For the owner's answers to faults.
    pub translating: Histogram,
    /// From the first slice submitted to a device until the last has ended.
    pub device: Histogram,
}

/// Times, counted in buckets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Histogram {
    /// How many were counted.
    pub count: u64,
    /// Their sum.
    pub sum_ns: u64,
    /// The buckets that are not empty, shortest times first.
    pub buckets: Vec<Bucket>,
}

/// A bucket of a [`Histogram`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bucket {
    /// All its times are below this.
    pub end_ns: u64,
    /// How many times are in it.
    pub count: u64,
}

impl OpStats {
    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let (a, b) = (&self.latency, &other.latency);
        let latency = Latency {
            total: a.total.plus(&b.total),
            waiting: a.waiting.plus(&b.waiting),
            translating: a.translating.plus(&b.translating),
            device: a.device.plus(&b.device),
        };
        Self {
            ops: self.ops.saturating_add(other.ops),
            bytes: self.bytes.saturating_add(other.bytes),
            errors: self.errors.saturating_add(other.errors),
            latency_p50_ns: latency.total.percentile_ns(50),
            latency_p99_ns: latency.total.percentile_ns(99),
            latency,
        }
    }
}

impl Histogram {
    /// The time that `percent` of 100 did not exceed; `None` if nothing was counted.
    #[must_use]
    pub fn percentile_ns(&self, percent: u8) -> Option<u64> {
        let total: u128 = self.buckets.iter().map(|b| u128::from(b.count)).sum();
        let rank = (total * u128::from(percent))
            .div_ceil(100)
            .clamp(1, total.max(1));
        let mut seen = 0;
        let at = |bucket: &&Bucket| {
            seen += u128::from(bucket.count);
            seen >= rank
        };
        self.buckets.iter().find(at).map(|bucket| bucket.end_ns)
    }

    /// How many took less than `end_ns`; exact where a bucket ends there.
    #[must_use]
    pub fn below(&self, end_ns: u64) -> u64 {
        let within = self.buckets.iter().take_while(|b| b.end_ns <= end_ns);
        within.fold(0, |sum: u64, bucket| sum.saturating_add(bucket.count))
    }

    /// What was counted since `earlier`; all of it if that counted more, for then it is another's.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        if earlier.count > self.count {
            return self.clone();
        }
        let before = |end_ns: u64| {
            let found = earlier.buckets.iter().find(|b| b.end_ns == end_ns);
            found.map_or(0, |bucket| bucket.count)
        };
        let buckets = self.buckets.iter().map(|bucket| Bucket {
            count: bucket.count.saturating_sub(before(bucket.end_ns)),
            ..*bucket
        });
        Self {
            count: self.count - earlier.count,
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
            buckets: buckets.filter(|bucket| bucket.count > 0).collect(),
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let mut ends = std::collections::BTreeMap::new();
        for bucket in self.buckets.iter().chain(&other.buckets) {
            let count: &mut u64 = ends.entry(bucket.end_ns).or_default();
            *count = count.saturating_add(bucket.count);
        }
        let buckets = ends.into_iter();
        Self {
            count: self.count.saturating_add(other.count),
            sum_ns: self.sum_ns.saturating_add(other.sum_ns),
            buckets: buckets
                .map(|(end_ns, count)| Bucket { end_ns, count })
                .collect(),
        }
    }
}

/// One export's lane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LaneStats {
    /// Tenant of the volume.
    pub tenant: String,
    /// The volume; `VOLUME@ID`, with the export's number, where that is shared.
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
    /// Connections (queues) open now; of a machine's export, 1 while it has a client.
    pub queues: u64,
    /// How it is reached: `nvme-tcp`, `nvme-pcie` or `vhost-user`.
    #[serde(default)]
    pub transport: String,
    /// Bytes of data that the engine that runs now has copied on their way between the network, or a machine's
    /// memory, and the devices.
    #[serde(default)]
    pub copied_bytes: u64,
    /// Bytes of its machine's memory that are registered with the kernel now, so that no transfer has to look them up.
    #[serde(default)]
    pub registered_bytes: u64,
    /// Interrupts raised for a machine, by the engine that runs now.
    #[serde(default)]
    pub interrupts: u64,
    /// What its volume may use of its tenant's, if that is stated.
    #[serde(default)]
    pub budget: Option<Budget>,
    /// Its part of the tenant's grant in the newest window, in commands a second, and no more than its volume's own limit; null if
    /// there is no limit.
    #[serde(default)]
    pub granted_iops: Option<u64>,
    /// Bytes a second; null: no limit.
    #[serde(default)]
    pub granted_bytes_s: Option<u64>,
    /// Commands that waited because they were over budget.
    #[serde(default)]
    pub throttled_ops: u64,
    /// Of them those that wait now.
    #[serde(default)]
    pub throttled: u64,
    /// How long they waited for it; that is in no other time but `total`.
    #[serde(default)]
    pub throttled_times: Histogram,
}

impl LaneStats {
    /// A grant above the volume's own limit can't be used. A part of a tenant's grant without a limit has none either.
    pub(crate) fn limit_grants(&mut self, tenant: Option<&TenantStats>) {
        if let Some(tenant) = tenant {
            self.granted_iops = self.granted_iops.filter(|_| tenant.granted_iops.is_some());
            self.granted_bytes_s =
                (self.granted_bytes_s).filter(|_| tenant.granted_bytes_s.is_some());
        }
        let limit = self.budget.map(|budget| budget.burst).unwrap_or_default();
        for (granted, most) in [
            (&mut self.granted_iops, limit.iops),
            (&mut self.granted_bytes_s, limit.bytes_s),
        ] {
            *granted = [*granted, most].into_iter().flatten().min();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_grant_is_no_more_than_the_limit() {
        let lane = |granted_iops, iops| {
            let none = OpStats::default();
            let json = serde_json::json!({
                "tenant": "a", "volume": "b", "read": none, "write": none, "flush": none,
                "deallocate": none, "in_flight": 0, "parked": 0, "queues": 0,
            });
            let mut lane: LaneStats = serde_json::from_value(json).unwrap();
            lane.granted_iops = granted_iops;
            lane.budget = Some(Budget::default());
            lane.budget.as_mut().unwrap().burst.iops = iops;
            let tenant = TenantStats {
                granted_iops: Some(5000),
                ..TenantStats::default()
            };
            (
                lane.granted_bytes_s,
                lane.budget.as_mut().unwrap().burst.bytes_s,
            ) = (Some(99), None);
            lane.limit_grants(Some(&tenant));
            assert_eq!(lane.granted_bytes_s, None);
            lane.granted_iops
        };
        assert_eq!(lane(Some(2012), Some(200)), Some(200));
        assert_eq!(lane(None, Some(200)), Some(200));
        assert_eq!(lane(Some(60), Some(200)), Some(60));
        assert_eq!(lane(Some(60), None), Some(60));
        assert_eq!(lane(None, None), None);
    }

    fn histogram(counts: &[(u64, u64)]) -> Histogram {
        Histogram {
            count: counts.iter().map(|(_, count)| count).sum(),
            sum_ns: counts.iter().map(|(end_ns, count)| end_ns * count).sum(),
            buckets: counts
                .iter()
                .map(|&(end_ns, count)| Bucket { end_ns, count })
                .collect(),
        }
    }

    #[test]
    fn a_percentile_is_its_buckets_end() {
        assert_eq!(histogram(&[]).percentile_ns(50), None);
        let times = histogram(&[(1024, 98), (1 << 20, 2)]);
        assert_eq!(times.percentile_ns(0), Some(1024));
        assert_eq!(times.percentile_ns(98), Some(1024));
        assert_eq!(times.percentile_ns(99), Some(1 << 20));
        assert_eq!(times.percentile_ns(255), Some(1 << 20));
        assert_eq!((times.below(1023), times.below(1024)), (0, 98));
        let huge = histogram(&[]).plus(&Histogram {
            buckets: vec![
                Bucket {
                    end_ns: 4,
                    count: u64::MAX,
                },
                Bucket {
                    end_ns: 8,
                    count: u64::MAX,
                },
            ],
            ..Histogram::default()
        });
        assert_eq!(huge.percentile_ns(50), Some(4));
        assert_eq!(huge.below(8), u64::MAX);
    }

    #[test]
    fn another_engines_counts_are_no_difference() {
        let (before, now) = (histogram(&[(4, 9)]), histogram(&[(4, 2), (8, 1)]));
        assert_eq!(now.since(&before), now);
    }

    proptest! {
        #[test]
        fn what_came_since_and_what_was_are_what_is(
            a in prop::collection::btree_map(1u64..40, 1u64..9, 0..8),
            b in prop::collection::btree_map(1u64..40, 1u64..9, 0..8),
        ) {
            let a: Vec<_> = a.into_iter().collect();
            let b: Vec<_> = b.into_iter().collect();
            let (a, b) = (histogram(&a), histogram(&b));
            let both = a.plus(&b);
            prop_assert_eq!(both.since(&a), b);
            prop_assert!(both.percentile_ns(50) <= both.percentile_ns(99));
        }
    }
}
