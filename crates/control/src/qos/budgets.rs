//! Keeps budgets of tenants and volumes in the catalog, and sends them to the engine.
//!
//! Without any budget, the engine learns only the spread of queues; otherwise also parameters,
//! tenants with exports and exported volumes. A change sends only differences, tenants before their
//! volumes. The region of an engine older than this daemon may name deleted tenants.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use forebay_pool::TenantId;
use forebay_qos::budget::{Budget, LEAST};
use forebay_qos::stated_budget::Stated;
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{Scheduling, Spread, TenantId as EngineTenantId, ToEngine};
use forebay_xlate::boundary::region::MAX_TENANTS;

use crate::base::Base;
use crate::base::show::show_tenant_budget;
use crate::devices::api_error;
use crate::link::session::{AskError, PendingAnswer, Session};
use crate::link::{Link, engine_error};
use crate::model::Volume;
use crate::model::error::ApiError;
use crate::model::scheduling::{BudgetChange, TenantBudget};
use crate::qos::calibration::Calibrating;
use crate::qos::placement::ReactorPlacement;
use crate::qos::settings::NodeSettings;
use crate::statistics::Statistics;

#[derive(Debug, Default, Clone, PartialEq)]
struct KnownBudgets {
    spread: Option<Spread>,
    scheduling: Option<Scheduling>,
    tenants: BTreeMap<TenantId, (Budget, bool)>,
    volumes: BTreeMap<VolumeId, (TenantId, Option<Budget>)>,
}

type Update = (String, PendingAnswer);

fn checked(change: &BudgetChange, before: Stated) -> Result<Option<Stated>, ApiError> {
    let Some(stated) = change.apply(before) else {
        return Ok(None);
    };
    if stated.is_empty() {
        return Err(ApiError::invalid(
            "a budget has a base, a burst limit, or both, in IOPS, in bytes/s, or in both",
        ));
    }
    if !stated.has_base() && stated.credit_seconds.is_some() {
        return Err(
            ApiError::invalid("credit is saved from an unused base, and there is no base")
                .hint("set a base; without credit, bursts are metered"),
        );
    }
    match stated.budget() {
        Ok(_) => Ok(Some(stated)),
        Err(bad) => Err(or_say_assumed(ApiError::invalid(bad.to_string()), stated)),
    }
}

/// Adds to an error which half of a base was assumed.
fn or_say_assumed(error: ApiError, stated: Stated) -> ApiError {
    let what = match (stated.base_iops, stated.base_bytes) {
        (Some(_), None) if error.message.contains("bytes/s") => {
            "no bandwidth was given: a base of IOPS alone gets 4 KiB/s for each"
        }
        (None, Some(_)) if error.message.contains("IOPS") => {
            "no IOPS were given: a base of bandwidth alone gets one for every 128 KiB/s"
        }
        _ => return error,
    };
    let hint = error.hint.as_ref();
    let hint = hint.map_or_else(|| what.to_owned(), |hint| format!("{what}; {hint}"));
    error.hint(hint)
}

#[derive(Debug)]
pub(crate) struct Budgets {
    pub(super) base: Rc<Base>,
    pub(super) link: Rc<Link>,
    pub(super) node: Rc<NodeSettings>,
    pub(crate) placement: Rc<ReactorPlacement>,
    pub(crate) statistics: Rc<Statistics>,
    known: RefCell<KnownBudgets>,
    telling: tokio::sync::Mutex<()>,
    pub(super) calibrating: Calibrating,
}

impl Budgets {
    pub(crate) fn new(
        base: &Rc<Base>,
        link: &Rc<Link>,
        node: &Rc<NodeSettings>,
        placement: &Rc<ReactorPlacement>,
        statistics: &Rc<Statistics>,
    ) -> Rc<Self> {
        Rc::new(Self {
            base: base.clone(),
            link: link.clone(),
            node: node.clone(),
            placement: placement.clone(),
            statistics: statistics.clone(),
            known: RefCell::default(),
            telling: tokio::sync::Mutex::new(()),
            calibrating: Default::default(),
        })
    }

    pub(crate) fn set_node(&self, folder: &Path, reactors: u16) {
        self.node.read_settings(folder, reactors);
        self.placement.read_promises();
    }

    fn wanted(&self) -> KnownBudgets {
        let mut known = KnownBudgets {
            spread: Some(self.node.settings.borrow().spread()),
            ..KnownBudgets::default()
        };
        if !self.base.has_budgets() {
            return known;
        }
        known.scheduling = Some(self.node.scheduling_config());
        let pool = &self.base.core.borrow().pool;
        for export in pool.exports().iter() {
            let Ok(volume) = pool.volume(export.volume) else {
                continue;
            };
            let (id, tenant) = (volume.id, volume.tenant);
            let is_full = known.tenants.len() >= MAX_TENANTS;
            if self.measures(tenant) || is_full && !known.tenants.contains_key(&tenant) {
                continue;
            }
            let budget = pool.budgets().of_tenant(tenant).copied();
            let budget = budget.unwrap_or(Budget::unstated());
            let published = (budget, self.placement.comes_first(tenant));
            known.tenants.insert(tenant, published);
            let budget = pool.budgets().of_volume(id).copied();
            known.volumes.insert(id, (tenant, budget));
        }
        known
    }

    /// `is_known`: the engine is older than this daemon.
    pub(crate) fn say_all_budgets(&self, session: &Rc<Session>, is_known: bool) -> Vec<Update> {
        *self.link.greeted.borrow_mut() = Rc::downgrade(session);
        *self.known.borrow_mut() = KnownBudgets::default();
        let mut asked = Vec::new();
        self.placement.note_served(session);
        self.placement.settle_promises();
        let now = self.wanted();
        if is_known {
            let records = session.region.tenants().iter();
            let gone: BTreeSet<TenantId> = records
                .filter_map(|record| record.tenant.load(Relaxed).checked_sub(1).map(TenantId))
                .filter(|id| !now.tenants.contains_key(id))
                .collect();
            match now.scheduling {
                None => asked.push(say_scheduling(session, None)),
                Some(_) => asked.extend(gone.iter().map(|id| self.say_tenant(session, *id, None))),
            }
            self.statistics.added.borrow_mut().let_go(session, &gone);
        }
        asked.extend(self.say_budgets(session));
        asked
    }

    fn say_budgets(&self, session: &Rc<Session>) -> Vec<Update> {
        let now = self.wanted();
        let mut asked = Vec::new();
        let published = self.known.take();
        if let Some(spread) = now.spread.filter(|_| published.spread != now.spread) {
            let what = "the spread of queues";
            let pending = session.request(what, |request| ToEngine::SetSpread { request, spread });
            asked.push((what.to_owned(), pending));
        }
        if published.scheduling != now.scheduling {
            asked.push(say_scheduling(session, now.scheduling.clone()));
        }
        for (tenant, of) in &now.tenants {
            if published.tenants.get(tenant) != Some(of) {
                asked.push(self.say_tenant(session, *tenant, Some(*of)));
            }
        }
        for (volume, of) in &now.volumes {
            if published.volumes.get(volume) != Some(of) {
                asked.push(say_volume(session, *volume, *of));
            }
        }
        let gone = published.tenants.into_keys();
        let gone: BTreeSet<_> = gone.filter(|id| !now.tenants.contains_key(id)).collect();
        // An engine without scheduling has forgotten its tenants.
        let named = gone.iter().filter(|_| now.scheduling.is_some());
        asked.extend(named.map(|id| self.say_tenant(session, *id, None)));
        self.statistics.added.borrow_mut().let_go(session, &gone);
        *self.known.borrow_mut() = now;
        asked
    }

    fn say_tenant(&self, session: &Session, id: TenantId, of: Option<(Budget, bool)>) -> Update {
        let credit = of.map_or([0; 2], |_| {
            self.statistics.added.borrow().credit(session, id)
        });
        let pending = session.request("a tenant's budget", |request| ToEngine::SetTenantBudget {
            request,
            tenant: EngineTenantId(id.0),
            budget: of.map(|(budget, _)| budget),
            credit,
            guaranteed: of.is_some_and(|(_, is_first)| is_first),
        });
        (format!("the budget of {id}"), pending)
    }

    /// A new engine gets everything instead.
    pub(crate) async fn push_budgets(&self) -> Result<(), AskError> {
        self.placement.keep_promises().await;
        let _one = self.telling.lock().await;
        let published = self.link.greeted_session();
        let is_greeted = |session: &Rc<Session>| {
            published.is_some_and(|published| Rc::ptr_eq(&published, session))
        };
        let Some(session) = self.link.session().filter(is_greeted) else {
            return Ok(());
        };
        let asked = self.say_budgets(&session);
        self.statistics
            .added
            .borrow_mut()
            .counts_again(self.known.borrow().tenants.keys());
        let mut answer = Ok(());
        for (what, mut pending) in asked {
            match pending.within(self.base.limits.request).await {
                Ok(()) => {}
                Err(AskError::Gone) => return Ok(()),
                Err(error) => {
                    tracing::error!(what, %error, "can't send a change to the engine");
                    answer = Err(error);
                }
            }
        }
        if answer.is_err() {
            // The next change sends everything again.
            *self.known.borrow_mut() = KnownBudgets::default();
        }
        answer
    }

    pub(crate) async fn push_budgets_for_api(&self) -> Result<(), ApiError> {
        let published = self.push_budgets().await;
        published.map_err(|error| engine_error(&error))
    }

    /// After a failed commit, a task retries it and tells the engine later.
    async fn keep_budgets(self: &Rc<Self>) -> Result<(), ApiError> {
        if let Err(error) = self.base.commit_for_api().await {
            let owner = self.clone();
            self.base.spawn(async move {
                owner.base.commit_through().await;
                let _ = owner.push_budgets().await;
            });
            return Err(error);
        }
        self.push_budgets_for_api().await
    }

    pub(crate) async fn tenant_budget(
        self: &Rc<Self>,
        name: &str,
        change: impl Into<BudgetChange>,
    ) -> Result<TenantBudget, ApiError> {
        let (id, before) = {
            let pool = &self.base.core.borrow().pool;
            let id = pool.tenants().named(name).map_err(api_error)?.id;
            (id, pool.budgets().stated_of_tenant(id))
        };
        let stated = checked(&change.into(), before)?;
        let refused = |error| or_say_assumed(error, stated.unwrap_or_default());
        if let Some(Ok(budget)) = stated.map(|stated| stated.budget()) {
            self.placement.admit_base(id, &budget).map_err(refused)?;
        }
        let set = self
            .base
            .core
            .borrow_mut()
            .pool
            .set_tenant_budget(id, stated);
        set.map_err(api_error).map_err(refused)?;
        self.keep_budgets().await?;
        let budget = show_tenant_budget(&self.base.core.borrow().pool, id);
        let mut admission = self.placement.admission();
        admission.lacking.sort_by_key(|base| base.tenant != name);
        Ok(TenantBudget {
            tenant: name.to_owned(),
            budget,
            guaranteed: self.placement.is_guaranteed(id, &admission),
            clusters: self.placement.cluster_promises(id),
            admission,
        })
    }

    pub(crate) async fn volume_budget(
        self: &Rc<Self>,
        tenant: &str,
        name: &str,
        change: impl Into<BudgetChange>,
    ) -> Result<Volume, ApiError> {
        let _turn = self.base.turn_for_api(tenant, name).await?;
        let id = self.base.volume_id(tenant, name)?;
        self.base.refuse_snapshot(id, tenant, name)?;
        let before = self.base.core.borrow().pool.budgets().stated_of_volume(id);
        let stated = checked(&change.into(), before)?;
        let set = self
            .base
            .core
            .borrow_mut()
            .pool
            .set_volume_budget(id, stated);
        set.map_err(|error| {
            let error = api_error(error);
            let core = self.base.core.borrow();
            let of = core.pool.tenants().named(tenant).ok();
            let of = of.and_then(|of| core.pool.budgets().of_tenant(of.id));
            match of.is_none_or(|of| of.base == LEAST) {
                true => error.hint("its tenant has no base: set one with `forebay tenant budget`, or omit the volume's \
                base to limit it only"),
                false => or_say_assumed(error, stated.unwrap_or_default()),
            }
        })?;
        self.keep_budgets().await?;
        self.base.volume_show(tenant, name)
    }
}

fn say_scheduling(session: &Session, scheduling: Option<Scheduling>) -> Update {
    let (what, scheduling) = ("the scheduling settings", scheduling.map(Box::new));
    let message = |request| ToEngine::SetScheduling {
        request,
        scheduling,
    };
    (what.to_owned(), session.request(what, message))
}

fn say_volume(session: &Session, volume: VolumeId, of: (TenantId, Option<Budget>)) -> Update {
    let pending = session.request("a volume's budget", |request| ToEngine::SetVolumeBudget {
        request,
        volume,
        tenant: EngineTenantId(of.0.0),
        budget: of.1,
    });
    (format!("the budget of {volume}"), pending)
}
