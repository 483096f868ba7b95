//! Admission of bases: refuses a base that the node does not have, and tells whether another is
//! guaranteed.
//!
//! A base fits if the node has room beside other promises, times the oversubscription. A lack on
//! one reactor is only a warning. Help between reactors counts for nothing.

use std::collections::BTreeSet;

use forebay_pool::{Pool, TenantId};
use forebay_qos::admission::{Node, interference, largest};
use forebay_qos::budget::{Budget, LEAST, Rate};
use forebay_qos::cost::{self, CostTable, Routes};
use forebay_qos::placement::{Lack, PlacementPlan};
use forebay_qos::resources::{Resource, SHARED_RESOURCES};

use crate::events::EventFields;
use crate::model::error::{ApiError, ErrorKind};
use crate::model::events::EventKind;
use crate::model::scheduling as api;
use crate::model::scheduling::{Admission, LackingBase, Promised, ReactorPromised};
use crate::qos::placement::{ReactorPlacement, processors};

const FRONTENDS: usize = cost::FRONTENDS.len();
const NAMED: usize = 5;

/// The ways of a tenant's I/O: only data in a Ceph cluster also uses the links.
fn routes_of(pool: &Pool, tenant: TenantId) -> Routes {
    let mut volumes = pool.volumes().of_tenant(tenant);
    match volumes.any(|volume| pool.images().of(volume.id).is_some()) {
        true => Routes::ALL,
        false => Routes::LOCAL,
    }
}

impl ReactorPlacement {
    /// The node with all promises except one tenant's, and its costs.
    fn promised_node(&self, but: Option<TenantId>) -> (Node, CostTable) {
        let published = self.node.scheduling_config();
        let costs = published.cost_table();
        let params = published.params().unwrap_or_default();
        let capacity = published.capacity.capacity(self.reactors());
        let oversubscription = self.node.settings.borrow().oversubscription;
        let mut node = Node::new(capacity, &params, oversubscription);
        let core = self.base.core.borrow();
        for (tenant, budget) in core.pool.budgets().tenants() {
            if Some(tenant) != but {
                let routes = routes_of(&core.pool, tenant);
                node.keep(budget, &costs, routes);
            }
        }
        (node, costs)
    }

    /// Admits any base that is no larger than before.
    pub(crate) fn admit_base(&self, tenant: TenantId, budget: &Budget) -> Result<(), ApiError> {
        let (mut node, costs) = self.promised_node(Some(tenant));
        let core = self.base.core.borrow();
        let before = core
            .pool
            .budgets()
            .of_tenant(tenant)
            .map(|budget| budget.base);
        let is_less =
            |before: Rate| budget.base.iops <= before.iops && budget.base.bytes <= before.bytes;
        if before.is_some_and(is_less) {
            return Ok(());
        }
        let routes = routes_of(&core.pool, tenant);
        node.promise(budget, &costs, routes).map_err(|refused| {
            let from = match self.node.measured().len() {
                FRONTENDS => "measurements of `forebay calibrate`",
                0 => "defaults: `forebay calibrate` measures this machine",
                _ => "measurements of `forebay calibrate`, with defaults for frontends that were not measured",
            };
            ApiError::new(ErrorKind::NoSpace, refused.to_string()).hint(format!(
                "this was calculated from {from}; `forebay scheduling set --oversubscription` lets you promise more"
            ))
        })
    }

    pub(crate) fn admission(&self) -> Admission {
        let (node, _) = self.promised_node(None);
        let (mut places, costs) = self.places();
        if self.node.is_meant() {
            places.count_all();
        }
        let lacking = places.lacking();
        let lacking: Vec<_> = lacking.filter_map(|of| self.lacking(of, &costs)).collect();
        let (settings, measured) = (self.node.settings.borrow(), self.node.measured());
        let promised = SHARED_RESOURCES.into_iter().zip(node.promised());
        let percent = |part: f64| (part * 100_000.0).round() / 1000.0;
        Admission {
            guaranteed: node.at_once() >= node.tenants() && lacking.is_empty(),
            calibrated: measured.len() == FRONTENDS,
            measured,
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

    /// The placement plan; `None` without budgets, or with oversubscription.
    fn owed(&self) -> Option<(PlacementPlan, CostTable)> {
        (!self.node.is_meant() && self.base.has_budgets()).then(|| self.places())
    }

    pub(crate) fn promise_warning(&self) -> Option<String> {
        let (places, _) = self.owed()?;
        let (node, _) = self.promised_node(None);
        let (some, all) = (node.at_once(), node.tenants());
        if some < all {
            return Some(format!(
                "only {some} of {all} tenants can have their bases at once on this node: see `forebay scheduling show`"
            ));
        }
        let core = self.base.core.borrow();
        let of = |(tenant, _)| core.pool.tenants().get(TenantId(tenant)).ok();
        let names = places.lacking().filter_map(of).take(NAMED);
        let mut named = names.map(|of| &*of.name).collect::<Vec<_>>().join(", ");
        match places.lacking().count() {
            0 => return None,
            1..=NAMED => {}
            count => named.push_str(&format!(" and {} others", count - NAMED)),
        }
        Some(format!(
            "the reactors that serve their exports have too little left, beside other guaranteed bases, to give these \
            tenants their bases: {named}; see `forebay scheduling show`"
        ))
    }

    /// Whether a tenant's base is guaranteed; `None` without a base.
    pub(crate) fn is_guaranteed(&self, tenant: TenantId, all: &Admission) -> Option<bool> {
        let core = self.base.core.borrow();
        // A budget that is only a limit has the minimum base.
        (core.pool.budgets().of_tenant(tenant)).filter(|of| of.base != LEAST)?;
        let in_clusters = self.cluster_promises(tenant);
        if !in_clusters.iter().all(|cluster| cluster.guaranteed) {
            return Some(false);
        }
        if all.guaranteed || self.node.is_meant() {
            return Some(all.guaranteed);
        }
        // A promise has priority on its reactor, but not for resources that all reactors share.
        let (node, _) = self.promised_node(None);
        let shared = (SHARED_RESOURCES.into_iter().zip(node.promised()))
            .filter(|(resource, _)| *resource != Resource::Cpu);
        let fits = shared.into_iter().all(|(_, part)| part <= 1.0);
        Some(fits && self.comes_first(tenant))
    }

    /// Where a tenant's base does not fit, and the largest base that would.
    fn lacking(&self, (tenant, lack): (u64, Lack), costs: &CostTable) -> Option<LackingBase> {
        let core = self.base.core.borrow();
        let tenant = TenantId(tenant);
        let budget = core.pool.budgets().of_tenant(tenant)?;
        let fits = largest(budget.base, |base| processors(base, costs) <= lack.fits);
        Some(LackingBase {
            tenant: core.pool.tenants().get(tenant).ok()?.name.clone(),
            reactor: lack.reactor.and_then(|reactor| u32::try_from(reactor).ok()),
            fits: (fits.iops > 0).then_some(api::Rate {
                iops: fits.iops,
                bytes_s: fits.bytes,
            }),
        })
    }

    /// Empty if oversubscription is set.
    pub(crate) fn lacking_now(&self) -> BTreeSet<u64> {
        let owed = self.owed();
        let lacking = owed.iter().flat_map(|(places, _)| places.lacking());
        lacking.map(|(tenant, _)| tenant).collect()
    }

    /// Emits warnings for tenants not in `before`; returns them for the export's creator.
    pub(crate) fn say_lacking(&self, before: &BTreeSet<u64>) -> Vec<String> {
        let Some((places, costs)) = self.owed() else {
            return Vec::new();
        };
        let new = (places.lacking()).filter(|(tenant, _)| !before.contains(tenant));
        let new = new.filter_map(|of| self.lacking(of, &costs)).take(NAMED);
        let texts: Vec<String> = new.map(|base| base.text()).collect();
        for text in &texts {
            self.base
                .report(EventKind::Warning, text.clone(), EventFields::default());
        }
        texts
    }
}
