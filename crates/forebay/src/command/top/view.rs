//! Computes rates and latencies from two samples of the counters.
//!
//! A counter below its former value belongs to a new engine and counts whole. `forebay top --json`
//! prints this structure.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use forebay_control::model::stats::{
    Correction, Histogram, LaneStats, OpStats, PoolStats, ReactorStats, Stats, TenantStats,
};
use serde::Serialize;

use super::budget::{Use, VolumePart, add_up};
use crate::cli::TopOrder;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct View {
    /// Milliseconds since the Unix epoch.
    pub(crate) at_unix_ms: u64,
    pub(crate) interval_ms: u64,
    pub(crate) generation: u64,
    /// In percent of one processor.
    pub(crate) engine_cpu_percent: Option<f64>,
    pub(crate) takeovers: u64,
    pub(crate) pool: Option<Space>,
    pub(crate) total: SampleRates,
    pub(crate) tenants: Vec<Tenant>,
    /// Cost and accuracy of scheduling.
    pub(crate) reactors: Vec<ReactorView>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ReactorView {
    pub(crate) reactor: u32,
    pub(crate) windows_s: f64,
    /// Time of the refills, in percent.
    pub(crate) scheduling_percent: f64,
    /// Factors on the calibrated costs.
    pub(crate) corrections: Vec<Correction>,
}

impl ReactorView {
    fn between(before: Option<&ReactorStats>, now: &ReactorStats, seconds: f64) -> Self {
        let none = ReactorStats::default();
        let before = before.unwrap_or(&none);
        let ns = change(now.scheduling_ns, before.scheduling_ns);
        Self {
            reactor: now.reactor,
            windows_s: change(now.windows, before.windows) as f64 / seconds,
            scheduling_percent: ns as f64 / 1e7 / seconds,
            corrections: now.corrections.clone(),
        }
    }
}

/// The pool's space and its owner's work.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Space {
    pub(crate) used_bytes: u64,
    pub(crate) capacity_bytes: u64,
    pub(crate) faults_s: f64,
    pub(crate) commits_s: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Tenant {
    pub(crate) name: String,
    pub(crate) rates: SampleRates,
    /// If any tenant has a budget.
    pub(crate) budget: Option<Use>,
    pub(crate) volumes: Vec<VolumeView>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct VolumeView {
    pub(crate) name: String,
    pub(crate) rates: SampleRates,
    /// If any budget is stated.
    pub(crate) budget: Option<VolumePart>,
}

/// Rates, and the state at the second sample.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct SampleRates {
    pub(crate) read_iops: f64,
    pub(crate) write_iops: f64,
    pub(crate) other_iops: f64,
    pub(crate) read_bytes_s: f64,
    pub(crate) write_bytes_s: f64,
    pub(crate) errors_s: f64,
    pub(crate) p50_ns: Option<u64>,
    pub(crate) p99_ns: Option<u64>,
    pub(crate) in_flight: u64,
    pub(crate) throttled_s: f64,
}

impl SampleRates {
    pub(crate) fn iops(&self) -> f64 {
        self.read_iops + self.write_iops + self.other_iops
    }
}

#[derive(Debug, Clone, Default)]
struct Counts {
    read: [u64; 2],
    write: [u64; 2],
    other: u64,
    errors: u64,
    in_flight: u64,
    throttled: u64,
    times: Histogram,
}

pub(super) fn change(now: u64, before: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

impl Counts {
    fn between(before: Option<&LaneStats>, now: &LaneStats) -> Self {
        let none = OpStats::default();
        let pairs = [
            (before.map_or(&none, |lane| &lane.read), &now.read),
            (before.map_or(&none, |lane| &lane.write), &now.write),
            (before.map_or(&none, |lane| &lane.flush), &now.flush),
            (
                before.map_or(&none, |lane| &lane.deallocate),
                &now.deallocate,
            ),
        ];
        let pairs = pairs.map(|(before, now)| match now.ops < before.ops {
            true => (&none, now),
            false => (before, now),
        });
        let ops = pairs.map(|(before, now)| now.ops - before.ops);
        let bytes = pairs.map(|(before, now)| change(now.bytes, before.bytes));
        let mut counts = Self {
            read: [ops[0], bytes[0]],
            write: [ops[1], bytes[1]],
            other: ops[2].saturating_add(ops[3]),
            in_flight: now.in_flight,
            throttled: change(
                now.throttled_ops,
                before.map_or(0, |lane| lane.throttled_ops),
            ),
            ..Self::default()
        };
        for (before, now) in pairs {
            let errors = change(now.errors, before.errors);
            counts.errors = counts.errors.saturating_add(errors);
            let times = now.latency.total.since(&before.latency.total);
            counts.times = counts.times.plus(&times);
        }
        counts
    }

    fn add(&mut self, other: &Self) {
        let read = self.read.iter_mut().zip(other.read);
        let write = self.write.iter_mut().zip(other.write);
        let rest = [
            (&mut self.other, other.other),
            (&mut self.errors, other.errors),
            (&mut self.in_flight, other.in_flight),
            (&mut self.throttled, other.throttled),
        ];
        for (sum, more) in read.chain(write).chain(rest) {
            *sum = sum.saturating_add(more);
        }
        self.times = self.times.plus(&other.times);
    }

    fn rates(&self, seconds: f64) -> SampleRates {
        let rate = |count: u64| count as f64 / seconds;
        SampleRates {
            read_iops: rate(self.read[0]),
            write_iops: rate(self.write[0]),
            other_iops: rate(self.other),
            read_bytes_s: rate(self.read[1]),
            write_bytes_s: rate(self.write[1]),
            errors_s: rate(self.errors),
            p50_ns: self.times.percentile_ns(50),
            p99_ns: self.times.percentile_ns(99),
            in_flight: self.in_flight,
            throttled_s: rate(self.throttled),
        }
    }
}

impl View {
    pub(crate) fn between(before: &Stats, now: &Stats, order: TopOrder) -> Self {
        let interval_ms = now.at_unix_ms.saturating_sub(before.at_unix_ms);
        let seconds = interval_ms.max(1) as f64 / 1000.0;
        let mut total = Counts::default();
        let mut tenants: BTreeMap<&str, (Counts, Vec<VolumeView>)> = BTreeMap::new();
        for lane in &now.lanes {
            let earlier = before
                .lanes
                .iter()
                .find(|b| b.tenant == lane.tenant && b.volume == lane.volume);
            let counts = Counts::between(earlier, lane);
            total.add(&counts);
            let (sum, volumes) = tenants.entry(&lane.tenant).or_default();
            sum.add(&counts);
            volumes.push(VolumeView {
                name: lane.volume.clone(),
                rates: counts.rates(seconds),
                budget: of_tenant(now, &lane.tenant).map(|_| VolumePart::between(earlier, lane)),
            });
        }
        let tenants = tenants.into_iter().map(|(name, (sum, mut volumes))| {
            volumes.sort_by_key(|volume| rank(order, &volume.rates));
            add_up(&mut volumes);
            Tenant {
                name: name.to_owned(),
                rates: sum.rates(seconds),
                budget: of_tenant(now, name)
                    .map(|of| Use::between(of_tenant(before, name), of, seconds))
                    .map(|of| of.beside(&volumes)),
                volumes,
            }
        });
        let mut tenants: Vec<Tenant> = tenants.collect();
        tenants.sort_by_key(|tenant| rank(order, &tenant.rates));
        let cpu_s = |stats: &Stats| {
            let engine = stats.engine.as_ref()?;
            Some((engine.pid, engine.cpu_user_s + engine.cpu_system_s))
        };
        let engine_cpu_percent = match (cpu_s(before), cpu_s(now)) {
            (Some((was, first)), Some((is, second))) if was == is => {
                Some((second - first).max(0.0) * 100.0 / seconds)
            }
            _ => None,
        };
        let none = PoolStats::default();
        let earlier = before.pool.as_ref().unwrap_or(&none);
        let pool = now.pool.as_ref().map(|pool| Space {
            used_bytes: pool.owned_bytes.saturating_add(pool.quarantined_bytes),
            capacity_bytes: pool.capacity_bytes,
            faults_s: change(pool.faults, earlier.faults) as f64 / seconds,
            commits_s: change(pool.catalog_commits, earlier.catalog_commits) as f64 / seconds,
        });
        Self {
            at_unix_ms: now.at_unix_ms,
            interval_ms,
            generation: now.generation,
            engine_cpu_percent,
            takeovers: now.takeover.takeovers,
            pool,
            total: total.rates(seconds),
            tenants,
            reactors: now
                .reactors
                .iter()
                .map(|reactor| {
                    let mut of = before.reactors.iter();
                    let before = of.find(|before| before.reactor == reactor.reactor);
                    ReactorView::between(before, reactor, seconds)
                })
                .collect(),
        }
    }
}

fn of_tenant<'a>(stats: &'a Stats, name: &str) -> Option<&'a TenantStats> {
    stats.tenants.iter().find(|tenant| tenant.tenant == name)
}

/// A stable sort keeps equal ones by name.
fn rank(order: TopOrder, rates: &SampleRates) -> Reverse<u64> {
    Reverse(match order {
        // Keeps three decimals.
        TopOrder::Iops => (rates.iops() * 1e3) as u64,
        TopOrder::Bytes => ((rates.read_bytes_s + rates.write_bytes_s) * 1e3) as u64,
        TopOrder::P99 => rates.p99_ns.unwrap_or(0),
        TopOrder::InFlight => rates.in_flight,
        TopOrder::Throttled => (rates.throttled_s * 1e3) as u64,
        TopOrder::Name => 0,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use forebay_control::model::events::TakeoverStats;
    use forebay_control::model::stats::{Bucket, EngineStats, Latency};

    /// All in the bucket that ends at `end_ns`.
    fn ops(ops: u64, each_bytes: u64, end_ns: u64, errors: u64) -> OpStats {
        let total = Histogram {
            count: ops,
            sum_ns: ops * end_ns,
            buckets: match ops {
                0 => Vec::new(),
                count => vec![Bucket { end_ns, count }],
            },
        };
        OpStats {
            ops,
            bytes: ops * each_bytes,
            errors,
            latency: Latency {
                total,
                ..Latency::default()
            },
            ..OpStats::default()
        }
    }

    fn lane(
        tenant: &str,
        volume: &str,
        read: OpStats,
        write: OpStats,
        in_flight: u64,
    ) -> LaneStats {
        LaneStats {
            tenant: tenant.to_owned(),
            volume: volume.to_owned(),
            read,
            write,
            flush: OpStats::default(),
            deallocate: OpStats::default(),
            in_flight,
            parked: 0,
            queues: 1,
            transport: "nvme-tcp".to_owned(),
            copied_bytes: 0,
            registered_bytes: 0,
            interrupts: 0,
            budget: None,
            granted_iops: Some(0),
            granted_bytes_s: Some(0),
            throttled_ops: 0,
            throttled: 0,
            throttled_times: Histogram::default(),
        }
    }

    fn stats(at_unix_ms: u64, cpu_s: f64, lanes: Vec<LaneStats>) -> Stats {
        Stats {
            at_unix_ms,
            generation: 3,
            engine: Some(EngineStats {
                pid: 17,
                reactors: 1,
                cpu_user_s: cpu_s / 2.0,
                cpu_system_s: cpu_s / 2.0,
                resident_bytes: 1 << 24,
                asleep_ns: 0,
                busy_ns: 0,
                working_ns: 0,
                staging_own_bytes: 0,
                staging_borrowed_bytes: 0,
            }),
            pool: Some(PoolStats {
                capacity_bytes: 100 << 30,
                owned_bytes: 12 << 30,
                faults: at_unix_ms / 100,
                catalog_commits: at_unix_ms / 1000,
                ..PoolStats::default()
            }),
            takeover: TakeoverStats {
                takeovers: 2,
                ..TakeoverStats::default()
            },
            lanes,
            tenants: Vec::new(),
            reactors: Vec::new(),
        }
    }

    pub(in super::super) fn samples() -> (Stats, Stats) {
        let none = || OpStats::default();
        let before = stats(
            1000,
            1.0,
            vec![
                lane("acme", "db", ops(100, 4096, 80_000, 0), none(), 0),
                lane("acme", "log", none(), none(), 0),
                lane("zoo", "big", ops(5000, 4096, 8000, 0), none(), 0),
            ],
        );
        let now = stats(
            3000,
            2.5,
            vec![
                lane("acme", "db", ops(300, 4096, 80_000, 0), none(), 4),
                lane("acme", "log", none(), ops(2_400_000, 8192, 20_480, 6), 32),
                lane("zoo", "big", ops(4000, 131_072, 3 << 20, 0), none(), 128),
            ],
        );
        (before, now)
    }

    #[test]
    fn rates_are_of_the_interval() {
        let (before, now) = samples();
        let view = View::between(&before, &now, TopOrder::Iops);
        assert_eq!(
            (view.interval_ms, view.engine_cpu_percent),
            (2000, Some(75.0))
        );
        let names: Vec<_> = view.tenants.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["acme", "zoo"]);
        let acme = &view.tenants[0];
        assert_eq!(acme.volumes[0].name, "log");
        assert_eq!(acme.volumes[0].rates.write_iops, 1_200_000.0);
        assert_eq!(acme.volumes[0].rates.errors_s, 3.0);
        assert_eq!(acme.volumes[1].rates.read_iops, 100.0);
        assert_eq!(acme.rates.in_flight, 36);
        assert_eq!(acme.rates.p99_ns, Some(20_480));
        assert_eq!(view.tenants[1].rates.read_iops, 2000.0);
        assert_eq!(view.total.read_iops, 2100.0);
        assert_eq!(view.total.in_flight, 164);
    }

    #[test]
    fn each_order_is_kept() {
        let (before, now) = samples();
        let first = |order| View::between(&before, &now, order).tenants[0].name.clone();
        assert_eq!(first(TopOrder::Iops), "acme");
        assert_eq!(first(TopOrder::Bytes), "acme");
        assert_eq!(first(TopOrder::P99), "zoo");
        assert_eq!(first(TopOrder::InFlight), "zoo");
        assert_eq!(first(TopOrder::Name), "acme");
    }

    #[test]
    fn the_same_sample_twice_is_silence() {
        let (before, _) = samples();
        let view = View::between(&before, &before, TopOrder::P99);
        assert_eq!(view.total.iops(), 0.0);
        assert_eq!(view.total.p99_ns, None);
    }
}
