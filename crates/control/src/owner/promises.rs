//! What is promised, and whether it can be had.
//!
//! Purpose: a base is refused that the node does not have; of one that is granted it is said whether it can be had at any time.
//! Design: a base doesn't fit if the node has too little of something beside what is promised already, times the
//! oversubscription that is set. One that was promised stays so, whatever is measured or set later, and wherever exports are
//! served: an engine serves them elsewhere after its start, and the next one elsewhere again. So what a reactor can't give
//! is no refusal, but it is said, and warned of. Exports that no engine serves now count where one would.
//! That reactors help each other counts for nothing: who helps has time left, and nobody promised that.
//! Not here: the arithmetic (`forebay_burst`), settings and costs (`scheduling`), where exports are served (the engine).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;

use forebay_burst::admission::{Node, interference, largest, usable};
use forebay_burst::budget::{Budget, Rate};
use forebay_burst::cost::CostTable;
use forebay_burst::places::{Lack, Places};
use forebay_burst::units::{Resource, SHARED_RESOURCES};
use forebay_pool::{ExportId, TenantId};
use forebay_xlate::VolumeId;

use super::Owner;
use crate::api::error::ApiError;
use crate::api::events::EventKind;
use crate::api::scheduling::{self as api, Admission, LackingBase, Promised, ReactorPromised};
use crate::events::News;

/// So many of the affected tenants are named.
const NAMED: usize = 5;

/// Volumes that are served: whose, and by which reactors.
type Volumes = BTreeMap<VolumeId, (TenantId, BTreeSet<usize>)>;

/// What a rate needs of processors at most, ns a second.
fn processors(rate: Rate, costs: &CostTable) -> f64 {
    costs.most_of(rate)[Resource::Cpu as usize]
}

impl Owner {
    /// The node with what is promised, but for one tenant; and its costs.
    fn promised_node(&self, but: Option<TenantId>) -> (Node, CostTable) {
        let told = self.scheduling_config();
        let costs = told.cost_table();
        let params = told.params().unwrap_or_default();
        let capacity = told.capacity.capacity(self.node.reactors.get());
        let oversubscription = self.node.settings.borrow().oversubscription;
        let mut node = Node::new(capacity, &params, oversubscription);
        let core = self.core.borrow();
        for (tenant, budget) in core.pool.tenant_budgets() {
            if Some(tenant) != but {
                node.keep(budget, &costs);
            }
        }
        (node, costs)
    }

    /// Refuses a tenant's budget whose base the node does not have.
    pub(super) fn admit_base(&self, tenant: TenantId, budget: &Budget) -> Result<(), ApiError> {
        let (mut node, costs) = self.promised_node(Some(tenant));
        let core = self.core.borrow();
        let before = core.pool.tenant_budget(tenant).map(|budget| budget.base);
        let is_less =
            |before: Rate| budget.base.iops <= before.iops && budget.base.bytes <= before.bytes;
        budget
            .check()
            .map_err(|bad| ApiError::invalid(bad.to_string()))?;
        if before.is_some_and(is_less) {
            return Ok(());
        }
        node.take(budget, &costs).map_err(|refused| {
            let hint = match self.node.measured.borrow().is_some() {
                true => "this was calculated from what `forebay calibrate` measured; `forebay scheduling set \
                         --oversubscription` lets more be promised",
                false => "this was calculated from defaults: `forebay calibrate` measures this machine; `forebay \
                          scheduling set --oversubscription` lets more be promised",
            };
            ApiError::new(crate::api::error::ErrorKind::NoSpace, refused.to_string()).hint(hint)
        })
    }

    /// Whether what is promised can be had.
    pub(super) fn admission(&self) -> Admission {
        let (node, _) = self.promised_node(None);
        let (places, costs) = self.places();
        let lacking = self.lacking(&places, &costs);
        let settings = self.node.settings.borrow();
        let promised = SHARED_RESOURCES.into_iter().zip(node.promised());
        let percent = |part: f64| (part * 100_000.0).round() / 1000.0;
        Admission {
            guaranteed: node.at_once() >= node.tenants() && lacking.is_empty(),
            calibrated: self.node.measured.borrow().is_some(),
            tenants: node.tenants(),
            at_once: node.at_once(),
            interference: places
                .at_once()
                .map(|(tenants, most)| interference(tenants, most + 1, settings.wants_base))
                .fold(node.interference(settings.wants_base), f64::max),
            promised: promised
                .map(|(resource, part)| Promised {
                    resource: resource.name().to_owned(),
                    percent: percent(part),
                })
                .collect(),
            reactors: (0..)
                .zip(places.parts())
                .map(|(reactor, part)| ReactorPromised {
                    reactor,
                    percent: percent(part),
                })
                .collect(),
            lacking,
        }
    }

    /// Bases were promised that can't all be had, and nobody asked for that: costs or reactors are others now, or exports are
    /// served where their bases don't fit.
    pub(super) fn promise_warning(&self) -> Option<String> {
        let now = self.admission();
        let is_meant = self.node.settings.borrow().oversubscription > 1.0;
        if now.guaranteed || is_meant {
            return None;
        }
        let (some, all) = (now.at_once, now.tenants);
        if some < all {
            return Some(format!(
                "only {some} of {all} tenants can have their bases at once, as this node is now: see `forebay scheduling show`"
            ));
        }
        let names = now.lacking.iter().map(|base| base.tenant.as_str());
        let mut named = names.take(NAMED).collect::<Vec<_>>().join(", ");
        if now.lacking.len() > NAMED {
            named.push_str(&format!(" and {} others", now.lacking.len() - NAMED));
        }
        Some(format!(
            "the reactors that serve their exports can't always give these tenants their bases: {named}; see `forebay scheduling show`"
        ))
    }

    /// Which reactor serves which export, as the engine says.
    pub(super) fn reactors_of_exports(&self) -> BTreeMap<ExportId, u32> {
        let mut all = BTreeMap::new();
        let Some(session) = self.session() else {
            return all;
        };
        let core = self.core.borrow();
        let exports: BTreeSet<ExportId> = core.pool.exports().map(|export| export.id).collect();
        for lane in session.region.lanes() {
            // Looking at the rest of the table would only make memory of it.
            if all.len() == exports.len() {
                break;
            }
            let export = lane.export.load(Relaxed).checked_sub(1).map(ExportId);
            let reactor = u32::try_from(lane.reactor.load(Relaxed)).ok();
            if let (Some(export), Some(reactor)) = (export, reactor)
                && exports.contains(&export)
            {
                all.insert(export, reactor);
            }
        }
        all
    }

    /// What each reactor has promised, and the costs of it.
    fn places(&self) -> (Places, CostTable) {
        let told = self.scheduling_config();
        let costs = told.cost_table();
        let each = told.capacity.capacity(1).per_second()[Resource::Cpu as usize];
        let each = each * usable(&told.params().unwrap_or_default());
        let reactors = self.node.reactors.get();
        let served = self.reactors_of_exports();
        let core = self.core.borrow();
        let pool = &core.pool;
        let mut places = Places::new(reactors as usize, each);
        for (tenant, budget) in pool.tenant_budgets() {
            places.promise(tenant.0, processors(budget.base, &costs));
        }
        let mut volumes = Volumes::new();
        let add = |places: &mut Places, volumes: &mut Volumes, volume, reactor: Option<usize>| {
            if let Ok(volume) = pool.volume(volume) {
                let tenant = volume.tenant;
                let reactor = reactor.unwrap_or_else(|| places.best(tenant.0));
                places.export(tenant.0, reactor);
                let (_, at) = volumes
                    .entry(volume.id)
                    .or_insert((tenant, BTreeSet::new()));
                at.insert(reactor);
            }
        };
        let mut rest = Vec::new();
        for export in pool.exports() {
            match served.get(&export.id) {
                Some(reactor) if *reactor < reactors => {
                    add(
                        &mut places,
                        &mut volumes,
                        export.volume,
                        Some(*reactor as usize),
                    );
                }
                _ => rest.push(export.volume),
            }
        }
        for volume in rest {
            // An engine serves all exports of a volume on one reactor.
            let its = volumes.get(&volume).and_then(|(_, at)| at.first().copied());
            add(&mut places, &mut volumes, volume, its);
        }
        for (volume, (tenant, at)) in volumes {
            if let (Some(budget), 1) = (pool.volume_budget(volume), at.len()) {
                let cost = processors(budget.base, &costs);
                at.iter().for_each(|at| places.own(tenant.0, *at, cost));
            }
        }
        places.assume_first_exports();
        (places, costs)
    }

    /// Whose base can't be had on the reactors that serve it.
    fn lacking(&self, places: &Places, costs: &CostTable) -> Vec<LackingBase> {
        let core = self.core.borrow();
        let all = core.pool.tenants();
        let names: BTreeMap<u64, &str> = all.map(|of| (of.id.0, of.name.as_str())).collect();
        let of = |(tenant, lack): (u64, Lack)| {
            let budget = core.pool.tenant_budget(TenantId(tenant))?;
            let fits = largest(budget.base, |base| processors(base, costs) <= lack.fits);
            Some(LackingBase {
                tenant: (*names.get(&tenant)?).to_owned(),
                reactor: lack.reactor.and_then(|reactor| u32::try_from(reactor).ok()),
                fits: (fits.iops > 0).then_some(api::Rate {
                    iops: fits.iops,
                    bytes_s: fits.bytes,
                }),
            })
        };
        places.lacking().filter_map(of).collect()
    }

    /// Tenants whose base can't be had on the reactors that serve them, and nobody asked for that.
    fn unmeant_lacking(&self) -> Vec<LackingBase> {
        let is_meant = self.node.settings.borrow().oversubscription > 1.0;
        if is_meant || !self.has_budgets() {
            return Vec::new();
        }
        let (places, costs) = self.places();
        self.lacking(&places, &costs)
    }

    /// Those whose base can't be had on the reactors that serve them.
    pub(super) fn lacking_now(&self) -> BTreeSet<String> {
        let all = self.unmeant_lacking().into_iter();
        all.map(|base| base.tenant).collect()
    }

    /// An export is served since these were all that lacked something: says whose base can't be had any more, to everybody and
    /// to its maker.
    pub(super) fn say_lacking(&self, before: &BTreeSet<String>) -> Vec<String> {
        let all = self.unmeant_lacking().into_iter();
        let new = all
            .filter(|base| !before.contains(&base.tenant))
            .take(NAMED);
        let texts: Vec<String> = new.map(|base| base.text()).collect();
        for text in &texts {
            self.tell(EventKind::Warning, text.clone(), News::default());
        }
        texts
    }
}
