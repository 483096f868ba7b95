//! Statistics, as the API shows them, and arithmetic on histograms. Counters only rise: a reader
//! takes differences ([`Histogram::since`]). Empty buckets are left out. There are four buckets per
//! power of two, and a percentile is its bucket's upper end: at most a quarter too high.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::events::TakeoverStats;
use super::scheduling::{Budget, Credit};

/// Answer of `GET /v1/stats`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// When this was gathered, milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// The engine generation that counted.
    pub generation: u64,
    /// The engine, if one runs.
    pub engine: Option<EngineStats>,
    /// The pool, if one is open.
    pub pool: Option<PoolStats>,
    /// Costs of engines' deaths.
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

/// A tenant's use of its budget. Sums continue when an engine dies.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantStats {
    /// Name.
    pub tenant: String,
    /// Its budget, if one is set.
    pub budget: Option<Budget>,
    /// Commands charged to its budget.
    pub used_ops: u64,
    /// Their bytes.
    pub used_bytes: u64,
    /// Commands above its base, if it is metered.
    pub metered_ops: u64,
    /// Their bytes.
    pub metered_bytes: u64,
    /// Commands that waited for its budget.
    pub throttled_ops: u64,
    /// The sum of their waiting times.
    pub throttled_ns: u64,
    /// Commands that used the allocation of a bursting tenant.
    pub taken_ops: u64,
    /// Others' commands that used this tenant's allocation.
    pub lost_ops: u64,
    /// Commands that used the reserve.
    pub reserve_ops: u64,
    /// Windows in which it had more than its base, on any reactor.
    pub burst_windows: u64,
    /// Windows in which it had an allocation.
    pub active_windows: u64,
    /// Calibrated cost of its commands: processor and device time.
    #[serde(default)]
    pub cost_ns: u64,
    /// Corrected cost of its commands; the difference is the estimator's error.
    #[serde(default)]
    pub corrected_ns: u64,
    /// Commands per second allocated in the newest window; null: no limit.
    #[serde(default)]
    pub granted_iops: Option<u64>,
    /// Bytes per second; null: no limit.
    #[serde(default)]
    pub granted_bytes_s: Option<u64>,
    /// Commands per second used in the last complete window.
    #[serde(default)]
    pub window_iops: u64,
    /// Bytes per second.
    #[serde(default)]
    pub window_bytes_s: u64,
    /// Commands in the engine that waited at the end of that window, for their budget or for a
    /// turn.
    #[serde(default)]
    pub window_throttled: u64,
    /// Commands per second above its base in that window.
    #[serde(default)]
    pub above_iops: u64,
    /// Bytes per second.
    #[serde(default)]
    pub above_bytes_s: u64,
    /// Calibrated cost of its commands in that window: processor and device time, ns per second.
    #[serde(default)]
    pub window_cost_ns_s: u64,
    /// Their corrected cost.
    #[serde(default)]
    pub window_corrected_ns_s: u64,
    /// Its saved base, if it can save.
    pub credit: Option<Credit>,
}

impl TenantStats {
    /// The share of its use above its base in the newest window: of operations or of bytes,
    /// whichever is more.
    pub fn burst_share(&self) -> f64 {
        let part = |above: u64, used: u64| above as f64 / used.max(1) as f64;
        let ops = part(self.above_iops, self.window_iops);
        let bytes = part(self.above_bytes_s, self.window_bytes_s);
        ops.max(bytes).min(1.0)
    }

    /// The ratio of corrected to calibrated cost in the newest window; `None` without use.
    pub fn window_correction(&self) -> Option<f64> {
        let [cost, corrected] = [self.window_cost_ns_s, self.window_corrected_ns_s];
        (cost > 0).then(|| corrected as f64 / cost as f64)
    }
}

/// A reactor's scheduling. Sums continue when an engine dies.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReactorStats {
    /// The reactor.
    pub reactor: u32,
    /// Windows that ended.
    pub windows: u64,
    /// Time spent at their ends.
    pub scheduling_ns: u64,
    /// Device operations offloaded to other reactors.
    pub handed_over: u64,
    /// Device operations performed for other reactors.
    pub carried_out: u64,
    /// Time in turns with work, for the current engine.
    #[serde(default)]
    pub working_ns: u64,
    /// Current corrections of each resource's costs; empty without budgets.
    pub corrections: Vec<Correction>,
}

/// The correction of a resource's costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Correction {
    /// The resource.
    pub resource: String,
    /// The factor on calibrated costs.
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
    /// Part of that in turns with work.
    pub working_ns: u64,
    /// Staging memory kept ready for lanes, of all reactors.
    #[serde(default)]
    pub staging_own_bytes: u64,
    /// Staging memory borrowed for bursts.
    #[serde(default)]
    pub staging_borrowed_bytes: u64,
}

/// Space and events of the pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolStats {
    /// All extents together.
    pub capacity_bytes: u64,
    /// Free extents that read as zeros.
    pub clean_bytes: u64,
    /// Extents set aside for a volume.
    pub reserved_bytes: u64,
    /// Extents mapped by a volume.
    pub owned_bytes: u64,
    /// Freed extents waiting for zero-fill.
    pub dirty_bytes: u64,
    /// Quarantined extents, which can't be reused.
    pub quarantined_bytes: u64,
    /// Outstanding grants.
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
    /// Completed commands, including failed ones.
    pub ops: u64,
    /// Bytes moved or, for deallocate, covered.
    pub bytes: u64,
    /// Commands that ended with an error status.
    pub errors: u64,
    /// The median latency: half of the commands took at most this.
    pub latency_p50_ns: Option<u64>,
    /// The 99th percentile of latency.
    pub latency_p99_ns: Option<u64>,
    /// How long the commands took, and where.
    pub latency: Latency,
}

/// Where commands spent their time. A part counts only commands that spent time there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// From the complete reception of a command until its answer is handed to the connection.
    pub total: Histogram,
    /// Until it could begin: for memory, data from the host, or an earlier command on the same
    /// blocks.
    pub waiting: Histogram,
    /// For the owner's answers to faults.
    pub translating: Histogram,
    /// From the first slice submitted to a device until the last has ended.
    pub device: Histogram,
}

/// Times, counted in buckets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Histogram {
    /// Number of times.
    pub count: u64,
    /// Their sum.
    pub sum_ns: u64,
    /// The non-empty buckets, shortest times first.
    pub buckets: Vec<Bucket>,
}

/// A bucket of a [`Histogram`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bucket {
    /// All its times are below this.
    pub end_ns: u64,
    /// Number of times in it.
    pub count: u64,
}

impl OpStats {
    /// The sum of both.
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
    /// The given percentile; `None` if nothing was counted.
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

    /// How many took less than `end_ns`; exact if a bucket ends there.
    #[must_use]
    pub fn below(&self, end_ns: u64) -> u64 {
        let within = self.buckets.iter().take_while(|b| b.end_ns <= end_ns);
        within.fold(0, |sum: u64, bucket| sum.saturating_add(bucket.count))
    }

    /// The counts since `earlier`; all counts if `earlier` has more, because then another engine
    /// counted it.
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

    /// The sum of both.
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
    /// The volume's tenant.
    pub tenant: String,
    /// The volume; `VOLUME@ID`, with the export's number, for a shared export.
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
    /// Commands in flight that wait for the owner's answer to a fault.
    pub parked: u64,
    /// Open connections (queues); for a VM's export, 1 while it has a client.
    pub queues: u64,
    /// The protocol: `nvme-tcp`, `nvme-pcie` or `vhost-user`.
    #[serde(default)]
    pub transport: String,
    /// Bytes that the current engine has copied between the network or a VM's memory and the
    /// devices.
    #[serde(default)]
    pub copied_bytes: u64,
    /// Bytes of the VM's memory that are registered with the kernel, so that transfers need not
    /// look them up.
    #[serde(default)]
    pub registered_bytes: u64,
    /// Interrupts that the current engine has raised for a VM.
    #[serde(default)]
    pub interrupts: u64,
    /// The volume's budget within its tenant's, if one is set.
    #[serde(default)]
    pub budget: Option<Budget>,
    /// Its part of the tenant's allocation in the newest window, at most its volume's own limit, in
    /// commands per second; null: no limit.
    #[serde(default)]
    pub granted_iops: Option<u64>,
    /// Bytes per second; null: no limit.
    #[serde(default)]
    pub granted_bytes_s: Option<u64>,
    /// Commands that waited for their budget.
    #[serde(default)]
    pub throttled_ops: u64,
    /// Commands that wait for it now.
    #[serde(default)]
    pub throttled: u64,
    /// Times of these waits; of the other histograms, only `total` includes them.
    #[serde(default)]
    pub throttled_times: Histogram,
}

impl LaneStats {
    /// Caps allocations by the volume's own limit. A part of an unlimited allocation is unlimited.
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
        fn histogram_sums_and_differences_are_inverse(
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
