//! From two samples of the counters to figures.
//!
//! Purpose: what each volume, each tenant and all together did between two samples.
//! Design: pure. A counter that is smaller than before belongs to another engine and counts whole. The
//! answer of `forebay top --json` is this very structure.
//! Not here: text.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use forebay_control::api::scheduling::Rate;
use forebay_control::api::stats::{Histogram, LaneStats, OpStats, PoolStats, Stats, TenantStats};
use serde::Serialize;

use crate::cli::TopOrder;
use crate::output::latency;

/// What happened between two samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct View {
    /// When the second was taken, milliseconds since the Unix epoch.
    pub(crate) at_unix_ms: u64,
    /// How long after the first.
    pub(crate) interval_ms: u64,
    /// The engine's generation.
    pub(crate) generation: u64,
    /// The engine's share of one processor, in percent; above 100 with several reactors.
    pub(crate) engine_cpu_percent: Option<f64>,
    /// Take-overs since the daemon started.
    pub(crate) takeovers: u64,
    /// The pool's space, if one is open.
    pub(crate) pool: Option<Space>,
    /// Everybody together.
    pub(crate) total: Figures,
    /// In the order that was asked for.
    pub(crate) tenants: Vec<Tenant>,
}

/// The pool's space.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Space {
    /// What volumes have.
    pub(crate) used_bytes: u64,
    /// All of it.
    pub(crate) capacity_bytes: u64,
    /// Faults answered, a second.
    pub(crate) faults_s: f64,
    /// Catalog transactions, a second.
    pub(crate) commits_s: f64,
}

/// A tenant and its exported volumes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Tenant {
    /// Name.
    pub(crate) name: String,
    /// All its volumes together.
    pub(crate) figures: Figures,
    /// What it does with its budget, if it has one or others have.
    pub(crate) budget: Option<Use>,
    /// In the order that was asked for.
    pub(crate) volumes: Vec<Volume>,
}

/// What a tenant does with its budget.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Use {
    /// Its base: operations a second, if it has one.
    pub(crate) base_iops: Option<u64>,
    /// Bytes a second.
    pub(crate) base_bytes_s: Option<u64>,
    /// Operations a second that its budget paid for.
    pub(crate) used_iops: f64,
    /// Bytes a second that its budget paid for.
    pub(crate) used_bytes_s: f64,
    /// Operations a second that it was given in the newest window.
    pub(crate) granted_iops: u64,
    /// Commands a second that waited because it was over budget.
    pub(crate) throttled_s: f64,
    /// How long they waited in the mean.
    pub(crate) throttled_ns: Option<u64>,
    /// In so much of its time it had more than its base, in percent.
    pub(crate) burst_percent: f64,
    /// Commands a second above the base that are counted for a bill.
    pub(crate) metered_iops: f64,
    /// Others' commands a second that began out of what it had been given.
    pub(crate) lost_s: f64,
    /// What it has saved, in percent of what it can.
    pub(crate) credit_percent: Option<f64>,
    /// It uses more than its base.
    pub(crate) noisy: bool,
    /// Its commands wait, or others began out of what was its own.
    pub(crate) hurt: bool,
}

impl Use {
    fn between(before: Option<&TenantStats>, now: &TenantStats, seconds: f64) -> Self {
        let none = TenantStats::default();
        let before = before.unwrap_or(&none);
        let diff = |of: fn(&TenantStats) -> u64| change(of(now), of(before));
        let rate = |of: fn(&TenantStats) -> u64| diff(of) as f64 / seconds;
        let (waited, active) = (diff(|t| t.throttled_ops), diff(|t| t.active_windows));
        let base = now.budget.map(|budget| budget.base);
        let (used_iops, used_bytes_s) = (rate(|t| t.used_ops), rate(|t| t.used_bytes));
        let burst_windows = diff(|t| t.burst_windows).min(active);
        let is_above = |base: Rate| {
            // A base is had in windows: a little more of one in an interval is no burst.
            used_iops > base.iops as f64 * 1.05 || used_bytes_s > base.bytes_s as f64 * 1.05
        };
        let percent = |has: u64, most: u64| has as f64 * 100.0 / most.max(1) as f64;
        Self {
            base_iops: base.map(|base| base.iops),
            base_bytes_s: base.map(|base| base.bytes_s),
            used_iops,
            used_bytes_s,
            granted_iops: now.granted_ops_s,
            throttled_s: rate(|t| t.throttled_ops),
            throttled_ns: diff(|t| t.throttled_ns).checked_div(waited),
            burst_percent: percent(burst_windows, active),
            metered_iops: rate(|t| t.metered_ops),
            lost_s: rate(|t| t.lost_ops),
            credit_percent: now.credit.map(|credit| {
                percent(credit.ops, credit.most_ops).min(percent(credit.bytes, credit.most_bytes))
            }),
            noisy: match base {
                Some(base) => is_above(base),
                // What is used without a base is what others leave.
                None => used_iops > 0.0,
            },
            hurt: waited > 0 || diff(|t| t.lost_ops) > 0,
        }
    }

    /// What there is to say of it, in a few words; nothing while all is well.
    pub(crate) fn words(&self) -> String {
        let mut words = Vec::new();
        if self.noisy {
            words.push(match self.base_iops {
                Some(base) => format!(
                    "NOISY: {:.0} IOPS and {:.1} MB/s of a base of {base} and {:.1}",
                    self.used_iops,
                    self.used_bytes_s / 1e6,
                    self.base_bytes_s.unwrap_or(0) as f64 / 1e6
                ),
                None => "no budget: it has what others leave".to_owned(),
            });
            if self.metered_iops > 0.0 {
                words.push(format!("{:.0}/s metered", self.metered_iops));
            }
        }
        if self.throttled_s > 0.0 {
            let why = if self.noisy { "" } else { "HURT: " };
            words.push(format!(
                "{why}{:.0}/s wait {} over budget",
                self.throttled_s,
                latency(self.throttled_ns)
            ));
        }
        if self.lost_s > 0.0 {
            words.push(format!(
                "{:.0}/s given up to those below their base",
                self.lost_s
            ));
        }
        if let Some(percent) = self.credit_percent {
            words.push(format!("credit {percent:.0} %"));
        }
        words.join(", ")
    }
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Volume {
    /// Name.
    pub(crate) name: String,
    /// What it did.
    pub(crate) figures: Figures,
}

/// Rates, and the state at the second sample.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Figures {
    /// Reads a second.
    pub(crate) read_iops: f64,
    /// Writes a second.
    pub(crate) write_iops: f64,
    /// Flushes and deallocations a second.
    pub(crate) other_iops: f64,
    /// Bytes read a second.
    pub(crate) read_bytes_s: f64,
    /// Bytes written a second.
    pub(crate) write_bytes_s: f64,
    /// Commands a second that ended with an error.
    pub(crate) errors_s: f64,
    /// Half of the commands took at most this.
    pub(crate) p50_ns: Option<u64>,
    /// 99 of 100 commands took at most this.
    pub(crate) p99_ns: Option<u64>,
    /// Commands in flight.
    pub(crate) queue: u64,
}

impl Figures {
    /// Commands a second.
    pub(crate) fn iops(&self) -> f64 {
        self.read_iops + self.write_iops + self.other_iops
    }
}

/// Counts of one or more lanes.
#[derive(Debug, Clone, Default)]
struct Counts {
    read: [u64; 2],
    write: [u64; 2],
    other: u64,
    errors: u64,
    queue: u64,
    times: Histogram,
}

fn change(now: u64, before: u64) -> u64 {
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
            queue: now.in_flight,
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
            (&mut self.queue, other.queue),
        ];
        for (sum, more) in read.chain(write).chain(rest) {
            *sum = sum.saturating_add(more);
        }
        self.times = self.times.plus(&other.times);
    }

    fn figures(&self, seconds: f64) -> Figures {
        let rate = |count: u64| count as f64 / seconds;
        Figures {
            read_iops: rate(self.read[0]),
            write_iops: rate(self.write[0]),
            other_iops: rate(self.other),
            read_bytes_s: rate(self.read[1]),
            write_bytes_s: rate(self.write[1]),
            errors_s: rate(self.errors),
            p50_ns: self.times.percentile_ns(50),
            p99_ns: self.times.percentile_ns(99),
            queue: self.queue,
        }
    }
}

impl View {
    /// What happened from `before` to `now`.
    pub(crate) fn between(before: &Stats, now: &Stats, order: TopOrder) -> Self {
        let interval_ms = now.at_unix_ms.saturating_sub(before.at_unix_ms);
        let seconds = interval_ms.max(1) as f64 / 1000.0;
        let mut total = Counts::default();
        let mut tenants: BTreeMap<&str, (Counts, Vec<Volume>)> = BTreeMap::new();
        for lane in &now.lanes {
            let earlier = before
                .lanes
                .iter()
                .find(|b| b.tenant == lane.tenant && b.volume == lane.volume);
            let counts = Counts::between(earlier, lane);
            total.add(&counts);
            let (sum, volumes) = tenants.entry(&lane.tenant).or_default();
            sum.add(&counts);
            volumes.push(Volume {
                name: lane.volume.clone(),
                figures: counts.figures(seconds),
            });
        }
        let tenants = tenants.into_iter().map(|(name, (sum, mut volumes))| {
            volumes.sort_by_key(|volume| rank(order, &volume.figures));
            Tenant {
                name: name.to_owned(),
                figures: sum.figures(seconds),
                budget: of_tenant(now, name)
                    .map(|of| Use::between(of_tenant(before, name), of, seconds)),
                volumes,
            }
        });
        let mut tenants: Vec<Tenant> = tenants.collect();
        tenants.sort_by_key(|tenant| rank(order, &tenant.figures));
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
            total: total.figures(seconds),
            tenants,
        }
    }
}

fn of_tenant<'a>(stats: &'a Stats, name: &str) -> Option<&'a TenantStats> {
    stats.tenants.iter().find(|tenant| tenant.tenant == name)
}

/// Whoever ranks lowest comes first; equals stay in the order of their names.
fn rank(order: TopOrder, figures: &Figures) -> Reverse<u64> {
    Reverse(match order {
        // A thousandth still counts.
        TopOrder::Iops => (figures.iops() * 1e3) as u64,
        TopOrder::Bytes => ((figures.read_bytes_s + figures.write_bytes_s) * 1e3) as u64,
        TopOrder::P99 => figures.p99_ns.unwrap_or(0),
        TopOrder::Queue => figures.queue,
        TopOrder::Name => 0,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use forebay_control::api::events::TakeoverStats;
    use forebay_control::api::scheduling::Budget;
    use forebay_control::api::stats::{Bucket, EngineStats, Latency};

    /// Commands, bytes of each, and the end of the bucket that all are in.
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

    fn lane(tenant: &str, volume: &str, read: OpStats, write: OpStats, queue: u64) -> LaneStats {
        LaneStats {
            tenant: tenant.to_owned(),
            volume: volume.to_owned(),
            read,
            write,
            flush: OpStats::default(),
            deallocate: OpStats::default(),
            in_flight: queue,
            parked: 0,
            queues: 1,
            transport: "nvme-tcp".to_owned(),
            copied_bytes: 0,
            registered_bytes: 0,
            interrupts: 0,
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

    /// Two tenants over two seconds.
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
                // Another engine's counters.
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
        assert_eq!(acme.volumes[0].figures.write_iops, 1_200_000.0);
        assert_eq!(acme.volumes[0].figures.errors_s, 3.0);
        assert_eq!(acme.volumes[1].figures.read_iops, 100.0);
        assert_eq!(acme.figures.queue, 36);
        assert_eq!(acme.figures.p99_ns, Some(20_480));
        assert_eq!(view.tenants[1].figures.read_iops, 2000.0);
        assert_eq!(view.total.read_iops, 2100.0);
        assert_eq!(view.total.queue, 164);
    }

    #[test]
    fn who_is_noisy_and_who_is_hurt_is_told() {
        let (mut before, mut now) = samples();
        let tenant = |name: &str, iops: u64| TenantStats {
            tenant: name.to_owned(),
            budget: Some(Budget {
                base: Rate {
                    iops,
                    bytes_s: 1 << 30,
                },
                burst: Rate {
                    iops: 10 * iops,
                    bytes_s: 1 << 30,
                },
                credit_s: None,
            }),
            ..TenantStats::default()
        };
        before.tenants = vec![tenant("acme", 1000), tenant("zoo", 1000)];
        now.tenants = vec![
            TenantStats {
                used_ops: 10_000,
                metered_ops: 8000,
                active_windows: 100,
                burst_windows: 75,
                ..tenant("acme", 1000)
            },
            TenantStats {
                used_ops: 1000,
                throttled_ops: 20,
                throttled_ns: 20_000_000,
                ..tenant("zoo", 1000)
            },
        ];
        let view = View::between(&before, &now, TopOrder::Iops);
        let [acme, zoo] = [0, 1].map(|at| view.tenants[at].budget.clone().unwrap());
        assert_eq!(
            (acme.noisy, acme.hurt, acme.burst_percent),
            (true, false, 75.0)
        );
        assert!(
            acme.words().starts_with("NOISY: 5000 IOPS"),
            "{}",
            acme.words()
        );
        assert!(acme.words().ends_with("4000/s metered"), "{}", acme.words());
        assert_eq!((zoo.noisy, zoo.hurt), (false, true));
        assert_eq!(zoo.words(), "HURT: 10/s wait 1.0 ms over budget");
        assert_eq!(Use::default().words(), "");
    }

    #[test]
    fn each_order_is_kept() {
        let (before, now) = samples();
        let first = |order| View::between(&before, &now, order).tenants[0].name.clone();
        assert_eq!(first(TopOrder::Iops), "acme");
        assert_eq!(first(TopOrder::Bytes), "acme");
        assert_eq!(first(TopOrder::P99), "zoo");
        assert_eq!(first(TopOrder::Queue), "zoo");
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
