//! Places exports on reactors and records guaranteed bases, so that a guarantee survives later
//! changes.
//!
//! `promises.json` in the state folder is written before a request is answered. A promise that no
//! longer fits stays as lapsed while its tenant has a budget. Once an export is served, the
//! engine's record of its reactor counts.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use forebay_pool::{ExportId, TenantId};
use forebay_qos::admission::usable;
use forebay_qos::budget::Rate;
use forebay_qos::cost::CostTable;
use forebay_qos::placement::{PlacementPlan, Promise};
use forebay_qos::resources::Resource;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::region::MAX_REACTORS;
use serde::{Deserialize, Serialize};

use crate::base::Base;
use crate::link::Link;
use crate::link::session::Session;
use crate::qos::settings::NodeSettings;

const FILE: &str = "promises.json";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct KeptPromise {
    base: Rate,
    reactors: BTreeSet<usize>,
    /// False if it has lapsed.
    #[serde(default = "held")]
    held: bool,
}

fn held() -> bool {
    true
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Record {
    pool: String,
    promises: BTreeMap<u64, KeptPromise>,
}

#[derive(Debug)]
pub(crate) struct ReactorPlacement {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) node: Rc<NodeSettings>,
    now: RefCell<BTreeMap<u64, KeptPromise>>,
    first: RefCell<BTreeSet<u64>>,
    written: RefCell<BTreeMap<u64, KeptPromise>>,
    /// Why the last write failed.
    trouble: RefCell<Option<String>>,
    placed: RefCell<BTreeMap<ExportId, u32>>,
    writing: tokio::sync::Mutex<()>,
}

impl ReactorPlacement {
    pub(crate) fn new(base: &Rc<Base>, link: &Rc<Link>, node: &Rc<NodeSettings>) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            node: node.clone(),
            now: Default::default(),
            first: Default::default(),
            written: Default::default(),
            trouble: Default::default(),
            placed: Default::default(),
            writing: Default::default(),
        })
    }
}

/// The most processor time that a rate needs, ns per second.
pub(crate) fn processors(rate: Rate, costs: &CostTable) -> f64 {
    costs.most_of(rate)[Resource::Cpu as usize]
}

impl ReactorPlacement {
    fn pool_uuid(&self) -> String {
        self.base.core.borrow().pool.info().uuid.to_string()
    }

    pub(crate) fn read_promises(&self) {
        let instead = "tenants with the largest bases come first";
        let read =
            self.node
                .read_record(FILE, "guaranteed bases", instead, |_: &mut Record| Ok(()));
        let read = read.filter(|read| read.pool == self.pool_uuid());
        let kept = read.unwrap_or_default().promises;
        *self.written.borrow_mut() = kept.clone();
        *self.now.borrow_mut() = kept;
    }

    /// Whether a tenant's base has priority over bases that are not guaranteed.
    pub(crate) fn comes_first(&self, tenant: TenantId) -> bool {
        self.node.is_meant() || self.first.borrow().contains(&tenant.0)
    }

    pub(crate) fn settle_promises(&self) {
        let (mut kept, mut first) = (BTreeMap::new(), BTreeSet::new());
        if self.base.has_budgets() {
            let (places, _) = self.places();
            let core = self.base.core.borrow();
            let before = self.now.borrow();
            for (tenant, promise) in places.promises() {
                let Some(budget) = core.pool.budgets().of_tenant(TenantId(tenant)) else {
                    continue;
                };
                let mut base = budget.base;
                if places.is_guaranteed(tenant) {
                    first.insert(tenant);
                } else if let Some(before) = before.get(&tenant) {
                    base = before.base;
                }
                let promise = KeptPromise {
                    base,
                    reactors: promise.reactors.clone(),
                    held: promise.held,
                };
                kept.insert(tenant, promise);
            }
        }
        *self.now.borrow_mut() = kept;
        *self.first.borrow_mut() = first;
    }

    /// Each beat retries a failed write.
    pub(crate) async fn keep_promises(&self) {
        self.settle_promises();
        self.write_promises().await;
    }

    fn is_unwritten(&self) -> bool {
        let promises = self;
        self.node.folder().is_some() && *promises.now.borrow() != *promises.written.borrow()
    }

    pub(crate) fn poll_promises(self: &Rc<Self>) {
        if self.is_unwritten() && self.writing.try_lock().is_ok() {
            let owner = self.clone();
            self.base.spawn(async move { owner.write_promises().await });
        }
    }

    pub(crate) fn unwritten_warning(&self) -> Option<String> {
        let trouble = self.trouble.borrow();
        let trouble = trouble.as_ref().filter(|_| self.is_unwritten())?;
        Some(format!(
            "the record of guaranteed bases can't be written, and is lost at a restart: {trouble}; free some space in \
            the state folder; the daemon keeps retrying"
        ))
    }

    async fn write_promises(&self) {
        let _one = self.writing.lock().await;
        if !self.is_unwritten() {
            return;
        }
        let record = Record {
            pool: self.pool_uuid(),
            promises: self.now.borrow().clone(),
        };
        let written = self.node.write_record(FILE, Some(record.clone())).await;
        let trouble = written.err().map(|error| error.message);
        match &trouble {
            None => *self.written.borrow_mut() = record.promises,
            Some(error) if trouble != *self.trouble.borrow() => {
                tracing::error!(error, "can't write the record of guaranteed bases");
            }
            Some(_) => {}
        }
        *self.trouble.borrow_mut() = trouble;
    }

    /// The next engine serves exports on these reactors, too.
    pub(crate) fn note_served(&self, session: &Session) {
        let served = self.reactors_in(session);
        self.placed.borrow_mut().extend(served);
    }

    pub(crate) fn reactor_for(&self, export: ExportId) -> Option<u32> {
        let known = || self.placed.borrow().get(&export).copied();
        known().or_else(|| {
            let _ = self.places();
            known()
        })
    }

    pub(crate) fn reactors_of_exports(&self) -> BTreeMap<ExportId, u32> {
        let session = self.link.session();
        session.map_or_else(BTreeMap::new, |session| self.reactors_in(&session))
    }

    fn reactors_in(&self, session: &Session) -> BTreeMap<ExportId, u32> {
        let mut all = BTreeMap::new();
        let core = self.base.core.borrow();
        let exports: BTreeSet<ExportId> =
            core.pool.exports().iter().map(|export| export.id).collect();
        for lane in session.region.lanes() {
            // Reading the rest of the table would only allocate its pages.
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

    /// The number of reactors of the current engine, else of the next one.
    pub(crate) fn reactors(&self) -> u32 {
        let session = self.link.session().or_else(|| self.link.greeted_session());
        let has = session.map_or(0, |session| session.region.header().reactors.load(Relaxed));
        match has.min(MAX_REACTORS as u64) as u32 {
            0 => self.node.reactors.get().max(1),
            has => has,
        }
    }

    /// Places exports that have no reactor.
    pub(crate) fn places(&self) -> (PlacementPlan, CostTable) {
        if let Some(session) = self.link.session() {
            self.note_served(&session);
        }
        let published = self.node.scheduling_config();
        let costs = published.cost_table();
        let each = published.capacity.capacity(1).per_second()[Resource::Cpu as usize];
        let each = each * usable(&published.params().unwrap_or_default());
        let reactors = self.reactors();
        let core = self.base.core.borrow();
        let pool = &core.pool;
        let mut places = PlacementPlan::new(reactors as usize, each);
        for (tenant, budget) in pool.budgets().tenants() {
            places.set_cost(tenant.0, processors(budget.base, &costs));
        }
        for (tenant, kept) in &*self.now.borrow() {
            if pool.budgets().of_tenant(TenantId(*tenant)).is_some() {
                let promise = Promise {
                    cost: processors(kept.base, &costs),
                    reactors: kept.reactors.clone(),
                    held: kept.held,
                };
                places.set_promise(*tenant, promise);
            }
        }
        let mut placed = self.placed.borrow_mut();
        placed.retain(|id, reactor| pool.exports().get(*id).is_ok() && *reactor < reactors);
        let mut volumes: BTreeMap<VolumeId, (TenantId, Vec<u32>)> = BTreeMap::new();
        let mut rest = Vec::new();
        let mut counts: BTreeMap<TenantId, usize> = BTreeMap::new();
        for export in pool.exports().iter() {
            let Ok(volume) = pool.volume(export.volume) else {
                continue;
            };
            let (id, tenant) = (volume.id, volume.tenant);
            if let Some(reactor) = placed.get(&export.id) {
                places.export(tenant.0, *reactor as usize);
                let (_, at) = volumes.entry(id).or_insert((tenant, Vec::new()));
                at.push(*reactor);
            } else {
                let count = counts.entry(tenant).or_default();
                *count += 1;
                rest.push((*count, export.id, id, tenant));
            }
        }
        // Each tenant's first export comes before any tenant's second.
        let order: BTreeMap<u64, usize> = places.order().into_iter().zip(0..).collect();
        rest.sort_by_key(|(count, .., tenant)| {
            (*count, order.get(&tenant.0).unwrap_or(&usize::MAX))
        });
        for (_, export, volume, tenant) in rest {
            let (_, at) = volumes.entry(volume).or_insert((tenant, Vec::new()));
            // An engine serves all exports of a volume on one reactor.
            let reactor = match at.first() {
                Some(reactor) => {
                    places.export(tenant.0, *reactor as usize);
                    *reactor
                }
                None => places.place(tenant.0) as u32,
            };
            at.push(reactor);
            placed.insert(export, reactor);
        }
        for (volume, (tenant, at)) in volumes {
            if let (Some(budget), [first, rest @ ..]) = (pool.budgets().of_volume(volume), &*at)
                && rest.iter().all(|at| at == first)
            {
                places.own(tenant.0, *first as usize, processors(budget.base, &costs));
            }
        }
        places.settle();
        (places, costs)
    }
}
