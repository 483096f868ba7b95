//! Sums of tenants' use and of reactors' scheduling over all engines. Earlier engines' counts and
//! those of dropped tenants are added, so no metric falls. A dropped tenant's credit is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use forebay_pool::TenantId;
use forebay_qos::budget::MOST;
use forebay_qos::resources::SHARED_RESOURCES;
use forebay_xlate::boundary::region::{MAX_REACTORS, ReactorRecord, Region, TenantRecord};
use serde::{Deserialize, Deserializer, Serialize};

use crate::base::show::limit;
use crate::model::scheduling::{Budget, Credit};
use crate::model::stats::{Correction, ReactorStats, TenantStats};
use crate::statistics::Statistics;

/// In the order of [`TenantRecord::sums`].
type TenantSums = [u64; 13];

/// In the order of [`reactor_sums`].
type ReactorSums = [u64; 4];

fn reactor_sums(record: &ReactorRecord) -> ReactorSums {
    let (given, taken) = (&record.handed_over, &record.carried_out);
    [&record.windows, &record.scheduling_ns, given, taken].map(|cell| cell.load(Relaxed))
}

fn add(sums: &mut [u64], more: &[u64]) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum = sum.saturating_add(*more);
    }
}

fn tenants_of<'a>(
    region: &'a Region,
    tenants: &BTreeSet<TenantId>,
) -> BTreeMap<TenantId, (TenantSums, &'a TenantRecord)> {
    let mut all = BTreeMap::new();
    for record in region.tenants() {
        // Reading the rest of the table would only allocate its pages.
        if all.len() == tenants.len() {
            break;
        }
        let tenant = record.tenant.load(Relaxed).checked_sub(1).map(TenantId);
        if let Some(tenant) = tenant.filter(|tenant| tenants.contains(tenant)) {
            let sums = record.sums().map(|cell| cell.load(Relaxed));
            all.insert(tenant, (sums, record));
        }
    }
    all
}

fn reactors_of(region: &Region) -> &[ReactorRecord] {
    let reactors = region.header().reactors.load(Relaxed);
    let reactors = reactors.min(MAX_REACTORS as u64) as usize;
    &region.reactors()[..reactors]
}

/// Sums that an older daemon did not count are 0.
fn with_all_sums<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(u64, TenantSums)>, D::Error> {
    let found = Vec::<(u64, Vec<u64>)>::deserialize(from)?;
    let padded = found.into_iter().map(|(tenant, sums)| {
        let mut all = TenantSums::default();
        add(&mut all, &sums);
        (tenant, all)
    });
    Ok(padded.collect())
}

#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(crate) struct UsedBefore {
    #[serde(deserialize_with = "with_all_sums")]
    tenants: Vec<(u64, TenantSums)>,
    reactors: Vec<ReactorSums>,
    /// The last known credit of tenants: operations, bytes.
    #[serde(default)]
    credit: Vec<(u64, [u64; 2])>,
}

fn saved_of(record: &TenantRecord) -> [u64; 2] {
    [&record.credit_ops, &record.credit_bytes].map(|cell| cell.load(Relaxed))
}

impl UsedBefore {
    fn of(&self, tenant: TenantId) -> TenantSums {
        let found = self.tenants.iter().find(|(id, _)| *id == tenant.0);
        found.map_or([0; 13], |(_, sums)| *sums)
    }

    /// A tenant's credit: from `region` if its engine knows the tenant, else the last known.
    pub(crate) fn credit(&self, region: Option<&Region>, tenant: TenantId) -> [u64; 2] {
        let now = region.and_then(|region| tenants_of(region, &[tenant].into()).remove(&tenant));
        self.saved(tenant, now.map(|(_, record)| record))
    }

    fn saved(&self, tenant: TenantId, record: Option<&TenantRecord>) -> [u64; 2] {
        let before = self.credit.iter().find(|(id, _)| *id == tenant.0);
        let before = before.map_or([0; 2], |(_, saved)| *saved);
        record.map_or(before, saved_of)
    }

    /// Adds a dead engine's sums of the `counted` tenants, and drops deleted tenants.
    pub(crate) fn add_region(
        &mut self,
        region: &Region,
        tenants: &BTreeSet<TenantId>,
        counted: &BTreeSet<TenantId>,
    ) {
        let is_there = |id: u64| tenants.contains(&TenantId(id));
        self.tenants.retain(|(id, _)| is_there(*id));
        self.credit.retain(|(id, _)| is_there(*id));
        self.add_tenants(region, counted);
        let records = reactors_of(region);
        let count = self.reactors.len().max(records.len());
        self.reactors.resize(count, ReactorSums::default());
        for (sums, record) in self.reactors.iter_mut().zip(records) {
            add(sums, &reactor_sums(record));
        }
    }

    /// Adds the sums of tenants that an engine drops.
    pub(crate) fn add_tenants(&mut self, region: &Region, tenants: &BTreeSet<TenantId>) {
        for (tenant, (sums, record)) in tenants_of(region, tenants) {
            self.credit.retain(|(id, _)| *id != tenant.0);
            self.credit.push((tenant.0, saved_of(record)));
            match self.tenants.iter_mut().find(|(id, _)| *id == tenant.0) {
                Some((_, before)) => add(before, &sums),
                None => self.tenants.push((tenant.0, sums)),
            }
        }
    }

    pub(crate) fn reactors(&self, region: Option<&Region>) -> Vec<ReactorStats> {
        let now = region.map_or(&[][..], reactors_of);
        let of = |at: usize| {
            let mut sums = self.reactors.get(at).copied().unwrap_or_default();
            let record = now.get(at);
            add(&mut sums, &record.map_or([0; 4], reactor_sums));
            let [windows, scheduling_ns, handed_over, carried_out] = sums;
            let milli = |at: usize| record.map_or(0, |r| r.corrections_milli[at].load(Relaxed));
            let corrections = SHARED_RESOURCES.into_iter().enumerate();
            let corrections = corrections.filter(|(at, _)| milli(*at) > 0);
            ReactorStats {
                // At most MAX_REACTORS.
                reactor: at as u32,
                windows,
                scheduling_ns,
                handed_over,
                carried_out,
                working_ns: record.map_or(0, |record| record.busy_ns.load(Relaxed)),
                corrections: corrections
                    .map(|(at, resource)| Correction {
                        resource: resource.name().to_owned(),
                        times: milli(at) as f64 / 1000.0,
                    })
                    .collect(),
            }
        };
        let all = now.len().max(self.reactors.len());
        (0..all).map(of).collect()
    }
}

fn credit_of(budget: &Budget, [ops, bytes]: [u64; 2]) -> Option<Credit> {
    let (seconds, base) = (budget.credit_s?, budget.base?);
    let most = |rate: u64| rate.saturating_mul(seconds.into());
    let (most_ops, most_bytes) = (most(base.iops), most(base.bytes_s));
    Some(Credit {
        ops: ops.min(most_ops),
        bytes: bytes.min(most_bytes),
        most_ops,
        most_bytes,
    })
}

/// Statistics of tenants with a budget or with sums. The region's sums of `let_go` are in `before`.
pub(crate) fn tenant_stats<'a>(
    before: &UsedBefore,
    region: Option<&Region>,
    let_go: &BTreeSet<TenantId>,
    lives: bool,
    tenants: impl Iterator<Item = (TenantId, &'a str, Option<Budget>)>,
) -> Vec<TenantStats> {
    let tenants: Vec<_> = tenants.collect();
    let ids = tenants.iter().map(|(id, ..)| *id);
    let ids = ids.filter(|id| !let_go.contains(id)).collect();
    let now = region.map_or_else(BTreeMap::new, |region| tenants_of(region, &ids));
    let mut all = Vec::new();
    for (id, name, budget) in tenants {
        let mut sums = before.of(id);
        let record = now.get(&id).map(|(more, record)| {
            add(&mut sums, more);
            *record
        });
        if budget.is_none() && record.is_none() && sums == [0; 13] {
            continue;
        }
        // Credit stays without an engine or exports.
        let credit = budget.and_then(|budget| credit_of(&budget, before.saved(id, record)));
        let record = record.filter(|_| lives);
        let gauge = |cell: fn(&TenantRecord) -> &AtomicU64| {
            record.map_or(0, |record| cell(record).load(Relaxed))
        };
        all.push(TenantStats {
            tenant: name.to_owned(),
            budget,
            used_ops: sums[0],
            used_bytes: sums[1],
            metered_ops: sums[2],
            metered_bytes: sums[3],
            throttled_ops: sums[4],
            throttled_ns: sums[5],
            taken_ops: sums[6],
            lost_ops: sums[7],
            reserve_ops: sums[8],
            burst_windows: sums[9],
            active_windows: sums[10],
            cost_ns: sums[11],
            corrected_ns: sums[12],
            granted_iops: limit(gauge(|record| &record.granted_ops_s), MOST.iops),
            granted_bytes_s: limit(gauge(|record| &record.granted_bytes_s), MOST.bytes),
            window_iops: gauge(|record| &record.used_ops_s),
            window_bytes_s: gauge(|record| &record.used_bytes_s),
            window_throttled: gauge(|record| &record.throttled),
            above_iops: gauge(|record| &record.above_ops_s),
            above_bytes_s: gauge(|record| &record.above_bytes_s),
            window_cost_ns_s: gauge(|record| &record.window_cost_ns_s),
            window_corrected_ns_s: gauge(|record| &record.window_corrected_ns_s),
            credit,
        });
    }
    all.sort_by(|a, b| a.tenant.cmp(&b.tenant));
    all
}

impl Statistics {
    pub(crate) fn credit(&self, tenant: TenantId, budget: &Budget) -> Option<Credit> {
        credit_of(budget, self.added.borrow().saved(tenant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_an_older_daemon_go_on() {
        let older = r#"{"tenants":[[7,[1,2,3,4,5,6,7,8,9,10,11]]],"reactors":[]}"#;
        let before: UsedBefore = serde_json::from_str(older).unwrap();
        assert_eq!(
            before.of(TenantId(7)),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 0]
        );
    }
}
