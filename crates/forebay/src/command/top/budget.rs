//! Use of budgets between two samples: noisy and hurt tenants, and why commands wait.
//!
//! A tenant is hurt if its commands wait although use and allocation are below its base. An idle
//! tenant with waits asked for too much at once.

use forebay_control::model::scheduling::Rate;
use forebay_control::model::stats::{Histogram, LaneStats, TenantStats};
use serde::Serialize;
use std::collections::BTreeMap;

use super::super::scheduling::rates_text;
use super::view::{VolumeView, change};
use crate::output::{bandwidth, latency};

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Use {
    pub(crate) base_iops: Option<u64>,
    pub(crate) base_bytes_s: Option<u64>,
    pub(crate) burst_iops: Option<u64>,
    pub(crate) burst_bytes_s: Option<u64>,
    pub(crate) used_iops: f64,
    pub(crate) used_bytes_s: f64,
    pub(crate) granted_iops: Option<u64>,
    pub(crate) granted_bytes_s: Option<u64>,
    pub(crate) window_iops: u64,
    pub(crate) window_bytes_s: u64,
    pub(crate) window_throttled: u64,
    /// The part of the window's use above the base.
    pub(crate) window_burst_percent: f64,
    /// Corrected cost divided by calibrated cost.
    pub(crate) window_cost_correction: Option<f64>,
    pub(crate) throttled_s: f64,
    pub(crate) throttled_ns: Option<u64>,
    /// The part of its active windows above the base.
    pub(crate) burst_percent: f64,
    /// Billed commands per second above the base.
    pub(crate) metered_iops: f64,
    /// Others' commands per second that used its allocation.
    pub(crate) lost_s: f64,
    /// Corrected cost divided by calibrated cost.
    pub(crate) cost_correction: Option<f64>,
    pub(crate) credit_percent: Option<f64>,
    #[serde(skip)]
    pub(crate) has_budget: bool,
    /// Above its base; false without a base.
    pub(crate) noisy: bool,
    pub(crate) hurt: bool,
    pub(crate) why: Option<String>,
}

/// Whether at least 95 % of `most` is used.
fn is_near(used: f64, most: Option<u64>) -> bool {
    most.is_some_and(|most| used >= most as f64 * 0.95)
}

/// The limit that use or allocation reaches; of two, the more used one.
fn reached(
    used: (f64, f64),
    given: (f64, f64),
    most_iops: Option<u64>,
    most_bytes_s: Option<u64>,
) -> Option<String> {
    let part = |used: f64, given: f64, most: Option<u64>| {
        let most = most.filter(|_| is_near(used, most) || is_near(given, most))?;
        Some(used / most.max(1) as f64)
    };
    let iops = part(used.0, given.0, most_iops);
    let bytes_s = part(used.1, given.1, most_bytes_s);
    if iops.is_some() && iops >= bytes_s {
        most_iops.map(|most| format!("{most} IOPS"))
    } else {
        most_bytes_s.filter(|_| bytes_s.is_some()).map(bandwidth)
    }
}

const BELOW_BASE: &str = "below its base";
const VOLUMES: &str = "its volumes are at their own limits";

impl Use {
    pub(super) fn between(before: Option<&TenantStats>, now: &TenantStats, seconds: f64) -> Self {
        let none = TenantStats::default();
        let before = before.unwrap_or(&none);
        let diff = |of: fn(&TenantStats) -> u64| change(of(now), of(before));
        let rate = |of: fn(&TenantStats) -> u64| diff(of) as f64 / seconds;
        let (waited, active) = (diff(|t| t.throttled_ops), diff(|t| t.active_windows));
        let base = now.budget.and_then(|budget| budget.base);
        let (used_iops, used_bytes_s) = (rate(|t| t.used_ops), rate(|t| t.used_bytes));
        let burst_windows = diff(|t| t.burst_windows).min(active);
        let is_above = |base: Rate| {
            // Bases accrue in windows, so a slight excess is no burst.
            used_iops > base.iops as f64 * 1.05 || used_bytes_s > base.bytes_s as f64 * 1.05
        };
        let percent = |has: u64, most: u64| has as f64 * 100.0 / most.max(1) as f64;
        let burst = now.budget.map(|budget| budget.burst);
        let mut all = Self {
            base_iops: base.map(|base| base.iops),
            base_bytes_s: base.map(|base| base.bytes_s),
            burst_iops: burst.and_then(|burst| burst.iops),
            burst_bytes_s: burst.and_then(|burst| burst.bytes_s),
            used_iops,
            used_bytes_s,
            granted_iops: now.granted_iops,
            granted_bytes_s: now.granted_bytes_s,
            window_iops: now.window_iops,
            window_bytes_s: now.window_bytes_s,
            window_throttled: now.window_throttled,
            window_burst_percent: now.burst_share() * 100.0,
            window_cost_correction: now.window_correction(),
            throttled_s: rate(|t| t.throttled_ops),
            throttled_ns: diff(|t| t.throttled_ns).checked_div(waited),
            burst_percent: percent(burst_windows, active),
            metered_iops: rate(|t| t.metered_ops),
            lost_s: rate(|t| t.lost_ops),
            cost_correction: match diff(|t| t.cost_ns) {
                0 => None,
                ns => Some(diff(|t| t.corrected_ns) as f64 / ns as f64),
            },
            credit_percent: now.credit.map(|credit| {
                percent(credit.ops, credit.most_ops).min(percent(credit.bytes, credit.most_bytes))
            }),
            // A tenant without a base uses only spare resources.
            noisy: base.is_some_and(is_above),
            hurt: false,
            has_budget: now.budget.is_some(),
            why: None,
        };
        all.why = (waited > 0).then(|| all.reason());
        all.hurt = all.why.as_deref() == Some(BELOW_BASE);
        all
    }

    fn limit(&self, given: (f64, f64)) -> Option<String> {
        let used = (self.used_iops, self.used_bytes_s);
        reached(used, given, self.burst_iops, self.burst_bytes_s)
    }

    fn reason(&self) -> String {
        let used = (self.used_iops, self.used_bytes_s);
        let of = |given: Option<u64>| given.map_or(f64::INFINITY, |given| given as f64);
        let given = (of(self.granted_iops), of(self.granted_bytes_s));
        let is_near = |(iops, bytes_s): (f64, f64), most_iops, most_bytes_s| {
            is_near(iops, most_iops) || is_near(bytes_s, most_bytes_s)
        };
        let has_base = is_near(used, self.base_iops, self.base_bytes_s);
        let base = self.base_iops.zip(self.base_bytes_s);
        let is_idle = given == (0.0, 0.0) && self.window_throttled == 0;
        // An unscheduled reactor allocates the whole limit.
        if let Some(limit) = self.limit(given) {
            return format!("at its limit of {limit}");
        }
        let why = if has_base && self.credit_percent.is_some_and(|percent| percent < 1.0) {
            "its credit is spent"
        } else if has_base || base.is_none() {
            "others use the rest"
        } else if is_near(given, self.base_iops, self.base_bytes_s) || is_idle {
            "its load peaks above its base"
        } else {
            BELOW_BASE
        };
        why.to_owned()
    }

    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        if self.used_iops > 0.0 {
            let (used, mb_s) = (self.used_iops, self.used_bytes_s / 1e6);
            let who = if self.noisy { "NOISY:" } else { "used" };
            let base_mb_s = self.base_bytes_s.unwrap_or(0) as f64 / 1e6;
            words.push(match (self.base_iops, self.has_budget) {
                (Some(base), _) => format!(
                    "{who} {used:.0} IOPS and {mb_s:.1} MB/s of a base of {base} and {base_mb_s:.1}"
                ),
                (None, true) => format!("used {used:.0} IOPS and {mb_s:.1} MB/s of no base"),
                (None, false) => "no budget: it gets what others leave".to_owned(),
            });
            words.push(given_text(self.granted_iops, self.granted_bytes_s));
            let (iops, mb_s) = (self.window_iops, self.window_bytes_s as f64 / 1e6);
            let mut window = format!("{iops} and {mb_s:.1} of that used");
            if self.window_burst_percent >= 0.5 {
                window.push_str(&format!(" ({:.0} % above base)", self.window_burst_percent));
            }
            words.push(window);
            if self.window_throttled > 0 {
                words.push(format!("{} waiting", self.window_throttled));
            }
            if self.burst_percent >= 0.5 {
                words.push(format!("{:.0} % of it bursting", self.burst_percent));
            }
            if self.metered_iops > 0.0 {
                words.push(format!("{:.0}/s metered", self.metered_iops));
            }
        }
        if let Some(why) = &self.why {
            let who = if self.hurt { "HURT: " } else { "" };
            let (throttled_s, time) = (self.throttled_s, latency(self.throttled_ns));
            words.push(format!("{who}{throttled_s:.0}/s wait {time}, {why}"));
        }
        let lost_s = self.lost_s;
        if lost_s > 0.0 {
            words.push(format!(
                "{lost_s:.0}/s given up to tenants below their base"
            ));
        }
        let is_off = |times: Option<f64>| times.is_some_and(|times| (times - 1.0).abs() >= 0.01);
        if is_off(self.cost_correction) || is_off(self.window_cost_correction) {
            let times = self.cost_correction.unwrap_or(1.0);
            let mut costs = format!("costs {times:.2} times the calibrated ones");
            if let Some(now) = self.window_cost_correction {
                costs.push_str(&format!(" ({now:.2} now)"));
            }
            words.push(costs);
        }
        if let Some(percent) = self.credit_percent {
            words.push(format!("credit {percent:.0} %"));
        }
        words
    }
}

fn given_text(iops: Option<u64>, bytes_s: Option<u64>) -> String {
    let bandwidth = bytes_s.map(|bytes_s| format!("{:.1} MB/s", bytes_s as f64 / 1e6));
    let given = rates_text(iops, bandwidth, "as much as it asks for");
    format!("given {given}")
}

/// A volume's part of its tenant's budget.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct VolumePart {
    pub(crate) base_iops: Option<u64>,
    pub(crate) base_bytes_s: Option<u64>,
    pub(crate) limit_iops: Option<u64>,
    pub(crate) limit_bytes_s: Option<u64>,
    pub(crate) granted_iops: Option<u64>,
    pub(crate) granted_bytes_s: Option<u64>,
    pub(crate) throttled_ns: Option<u64>,
    /// The reason, if it is the volume's own limit.
    pub(crate) why: Option<String>,
}

impl VolumePart {
    pub(super) fn between(before: Option<&LaneStats>, now: &LaneStats) -> Self {
        let none = Histogram::default();
        let times = (now.throttled_times).since(before.map_or(&none, |b| &b.throttled_times));
        let budget = now.budget;
        let base = budget.and_then(|budget| budget.base);
        Self {
            base_iops: base.map(|base| base.iops),
            base_bytes_s: base.map(|base| base.bytes_s),
            limit_iops: budget.and_then(|budget| budget.burst.iops),
            limit_bytes_s: budget.and_then(|budget| budget.burst.bytes_s),
            granted_iops: now.granted_iops,
            granted_bytes_s: now.granted_bytes_s,
            throttled_ns: times.sum_ns.checked_div(times.count),
            why: None,
        }
    }
}

/// Sets reasons by the volume's sums: `db@3` is an export of `db`, `db@monday@4` of a snapshot.
pub(super) fn add_up(volumes: &mut [VolumeView]) {
    let name = |export: &VolumeView| {
        let name = export.name.rsplit_once('@').map(|(name, _)| name);
        name.unwrap_or(&export.name).to_owned()
    };
    let mut sums: BTreeMap<String, [(f64, f64); 2]> = BTreeMap::new();
    for export in &*volumes {
        let (rates, sum) = (&export.rates, sums.entry(name(export)).or_default());
        let given = |of: fn(&VolumePart) -> Option<u64>| {
            let part = export.budget.as_ref().and_then(of);
            part.map_or(0.0, |given| given as f64)
        };
        sum[0].0 += rates.iops();
        sum[0].1 += rates.read_bytes_s + rates.write_bytes_s;
        sum[1].0 += given(|part| part.granted_iops);
        sum[1].1 += given(|part| part.granted_bytes_s);
    }
    for export in volumes {
        let sum = sums.get(&name(export));
        if let (Some([used, given]), Some(part)) = (sum, &mut export.budget) {
            let limit = reached(*used, *given, part.limit_iops, part.limit_bytes_s);
            let limit = limit.filter(|_| export.rates.throttled_s > 0.0);
            part.why = limit.map(|limit| format!("at its own limit of {limit}"));
        }
    }
}

impl Use {
    /// A tenant below its limit is not hurt if only its volumes' limits cause waits.
    pub(super) fn beside(mut self, volumes: &[VolumeView]) -> Self {
        let waits = |volume: &&VolumeView| volume.rates.throttled_s > 0.0;
        let waiting: Vec<&VolumeView> = volumes.iter().filter(waits).collect();
        let at_limit =
            |volume: &&VolumeView| volume.budget.as_ref().is_some_and(|of| of.why.is_some());
        let is_elsewhere = self.why.is_some() && self.limit((0.0, 0.0)).is_none();
        if is_elsewhere && !waiting.is_empty() && waiting.iter().all(at_limit) {
            (self.why, self.hurt) = (Some(VOLUMES.to_owned()), false);
        }
        self
    }
}

impl VolumeView {
    pub(crate) fn words(&self) -> Vec<String> {
        let rates = &self.rates;
        let Some(part) = self.budget.as_ref().filter(|_| rates.throttled_s > 0.0) else {
            return Vec::new();
        };
        let (throttled_s, time) = (rates.throttled_s, latency(part.throttled_ns));
        let mut words = vec![format!("{throttled_s:.0}/s wait {time}")];
        words.extend(part.why.clone());
        words.push(given_text(part.granted_iops, part.granted_bytes_s));
        words
    }
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;
