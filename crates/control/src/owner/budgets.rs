//! Budgets of tenants and volumes: stated by people, kept by the engine.
//!
//! Purpose: what is stated is durable, and the engine keeps to it within a window of the answer.
//! Design: the catalog has them. What the engine has to know follows from that: nothing while nobody has a budget; else how
//! I/O is admitted, each tenant that has exports (those without a budget have what others leave) and each volume that is
//! exported. How queues are spread over reactors is no budget's matter, but told with them, always. What it was told is
//! remembered for as long as its conversation, and each change tells the difference, in an order in which nothing is named
//! before it is there; so however many changes come together, each is told once. They are told one after the other, and
//! whoever finds nothing to tell has waited for those who told it. An engine that was there before this daemon may know
//! tenants that are gone: its region names them. Of who measures what I/O costs it is told nothing (`calibration`).
//! Not here: what can be stated (`forebay_burst::budget`), what the node has (`scheduling`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering::Relaxed;

use forebay_burst::budget::{Budget, Burst, LEAST};
use forebay_burst::stated::Stated;
use forebay_pool::{Pool, TenantId};
use forebay_xlate::VolumeId;
use forebay_xlate::boundary::message::{Scheduling, Spread, TenantId as EngineTenantId, ToEngine};
use forebay_xlate::boundary::region::MAX_TENANTS;

use super::Owner;
use super::session::{AskError, Pending, Session};
use super::volume::engine_error;
use crate::api::error::ApiError;
use crate::api::model::Volume;
use crate::api::scheduling::{self as api, BudgetChange, TenantBudget};
use crate::devices::api_error;

/// What an engine is to know.
#[derive(Debug, Default, Clone, PartialEq)]
struct Known {
    /// Always, once it was told anything.
    spread: Option<Spread>,
    scheduling: Option<Scheduling>,
    /// And whether their bases come first.
    tenants: BTreeMap<TenantId, (Budget, bool)>,
    volumes: BTreeMap<VolumeId, (TenantId, Option<Budget>)>,
}

/// What the engine was told.
#[derive(Debug, Default)]
pub(super) struct Told {
    session: RefCell<Weak<Session>>,
    known: RefCell<Known>,
    /// One change is told at a time.
    telling: tokio::sync::Mutex<()>,
}

/// A limit as the API says it: the most that can be stated is none.
pub(super) fn limit(limit: u64, most: u64) -> Option<u64> {
    (limit < most).then_some(limit)
}

/// A budget as the API says it.
fn show_budget(budget: &Budget, stated: &Stated) -> api::Budget {
    api::Budget {
        base: stated.has_base().then_some(api::Rate {
            iops: budget.base.iops,
            bytes_s: budget.base.bytes,
        }),
        // Who states the most that can be stated has that limit.
        burst: api::Limit {
            iops: (stated.burst_iops.or(stated.base_iops)).map(|_| budget.burst.iops),
            bytes_s: (stated.burst_bytes.or(stated.base_bytes)).map(|_| budget.burst.bytes),
        },
        credit_s: match budget.how {
            Burst::Credit { seconds } => Some(seconds),
            Burst::Metered => None,
        },
        stated: api::BudgetPut {
            base: rate_put(stated.base_iops, stated.base_bytes),
            burst: rate_put(stated.burst_iops, stated.burst_bytes),
            credit_s: stated.credit_seconds,
        },
    }
}

fn rate_put(iops: Option<u64>, bytes_s: Option<u64>) -> Option<api::RatePut> {
    (iops.or(bytes_s).is_some()).then_some(api::RatePut { iops, bytes_s })
}

/// What is stated from now on, if it can be.
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
        return Err(ApiError::invalid(
            "credit is what is not used of a base, and there is no base",
        )
        .hint("state a base; without credit, bursts are metered"));
    }
    match stated.budget() {
        Ok(_) => Ok(Some(stated)),
        Err(bad) => Err(or_say_assumed(
            ApiError::invalid(bad.to_string()),
            Some(&stated),
        )),
    }
}

/// A tenant's budget as the API says it.
pub(super) fn show_tenant_budget(pool: &Pool, tenant: TenantId) -> Option<api::Budget> {
    let budget = pool.tenant_budget(tenant)?;
    Some(show_budget(budget, &pool.tenant_stated(tenant)))
}

/// A volume's budget as the API says it.
pub(super) fn show_volume_budget(pool: &Pool, volume: VolumeId) -> Option<api::Budget> {
    let budget = pool.volume_budget(volume)?;
    Some(show_budget(budget, &pool.volume_stated(volume)))
}

/// A refusal that names what of a base was not stated says what was taken for it.
fn or_say_assumed(error: ApiError, stated: Option<&Stated>) -> ApiError {
    let stated = stated.copied().unwrap_or_default();
    let what = match (stated.base_iops, stated.base_bytes) {
        (Some(_), None) if error.message.contains("bytes/s") => {
            "bandwidth was not stated: a base of IOPS alone has 4 KiB/s for each"
        }
        (None, Some(_)) if error.message.contains("IOPS") => {
            "IOPS were not stated: a base of bandwidth alone has one for every 128 KiB/s"
        }
        _ => return error,
    };
    match error.hint.clone() {
        Some(hint) => error.hint(format!("{what}; {hint}")),
        None => error.hint(what),
    }
}

impl Owner {
    /// Whether anybody has a budget.
    pub(super) fn has_budgets(&self) -> bool {
        let pool = &self.core.borrow().pool;
        pool.tenant_budgets().next().is_some() || pool.volume_budgets().next().is_some()
    }

    /// What an engine is to know now.
    fn wanted(&self) -> Known {
        let pool = &self.core.borrow().pool;
        let mut known = Known {
            spread: Some(self.node.settings.borrow().spread()),
            ..Known::default()
        };
        if pool.tenant_budgets().next().is_none() && pool.volume_budgets().next().is_none() {
            return known;
        }
        known.scheduling = Some(self.scheduling_config());
        for export in pool.exports() {
            let Ok(volume) = pool.volume(export.volume) else {
                continue;
            };
            let tenant = volume.tenant;
            if self.measures(tenant) {
                continue;
            }
            if known.tenants.len() >= MAX_TENANTS && !known.tenants.contains_key(&tenant) {
                continue;
            }
            let budget = pool.tenant_budget(tenant).copied();
            let budget = budget.unwrap_or(Budget::unstated());
            known
                .tenants
                .insert(tenant, (budget, self.comes_first(tenant)));
            let budget = pool.volume_budget(volume.id).copied();
            known.volumes.insert(volume.id, (tenant, budget));
        }
        known
    }

    /// The conversation that is told, which may be about to begin.
    pub(super) fn told_session(&self) -> Option<Rc<Session>> {
        self.told_budgets.session.borrow().upgrade()
    }

    /// Tells a new conversation how queues are spread and I/O is admitted. `is_known`: the engine was there before this daemon.
    pub(super) fn say_all_budgets(
        &self,
        session: &Rc<Session>,
        is_known: bool,
    ) -> Vec<(String, Pending)> {
        *self.told_budgets.session.borrow_mut() = Rc::downgrade(session);
        *self.told_budgets.known.borrow_mut() = Known::default();
        let mut asked = Vec::new();
        self.note_served(session);
        self.settle_promises();
        let now = self.wanted();
        if is_known {
            let records = session.region.tenants().iter();
            let gone: BTreeSet<TenantId> = records
                .filter_map(|record| record.tenant.load(Relaxed).checked_sub(1).map(TenantId))
                .filter(|id| !now.tenants.contains_key(id))
                .collect();
            match now.scheduling {
                None => asked.push(say_scheduling(session, None)),
                Some(_) => {
                    let gone = gone.iter();
                    asked.extend(gone.map(|tenant| say_tenant(session, *tenant, None, [0; 2])));
                }
            }
            self.added.borrow_mut().let_go(session, &gone);
        }
        asked.extend(self.say_budgets(session));
        asked
    }

    /// Tells a conversation what has changed since it was told last.
    fn say_budgets(&self, session: &Rc<Session>) -> Vec<(String, Pending)> {
        let now = self.wanted();
        let mut asked = Vec::new();
        let mut told = self.told_budgets.known.borrow_mut();
        if let Some(spread) = now.spread.filter(|_| told.spread != now.spread) {
            asked.push(say_spread(session, spread));
        }
        if told.scheduling != now.scheduling {
            asked.push(say_scheduling(session, now.scheduling.clone()));
            if now.scheduling.is_none() {
                // It forgets all of it with that.
                *told = Known::default();
            }
        }
        for (tenant, of) in &now.tenants {
            if told.tenants.get(tenant) != Some(of) {
                let credit = self.added.borrow().credit(session, *tenant);
                asked.push(say_tenant(session, *tenant, Some(*of), credit));
            }
        }
        for (volume, of) in &now.volumes {
            if told.volumes.get(volume) != Some(of) {
                asked.push(say_volume(session, *volume, *of));
            }
        }
        for tenant in told.tenants.keys() {
            if !now.tenants.contains_key(tenant) {
                asked.push(say_tenant(session, *tenant, None, [0; 2]));
            }
        }
        *told = now;
        asked
    }

    /// Has the engine know, if there is one, what is stated now; the next one is told everything anyway.
    pub(super) async fn push_budgets(&self) -> Result<(), AskError> {
        self.keep_promises().await;
        let one = self.told_budgets.telling.lock().await;
        let Some(session) = self.session() else {
            return Ok(());
        };
        if !std::ptr::eq(
            self.told_budgets.session.borrow().as_ptr(),
            Rc::as_ptr(&session),
        ) {
            return Ok(());
        }
        let mut answer = Ok(());
        let before: BTreeSet<TenantId> = self
            .told_budgets
            .known
            .borrow()
            .tenants
            .keys()
            .copied()
            .collect();
        let asked = self.say_budgets(&session);
        let gone = {
            let known = self.told_budgets.known.borrow();
            before
                .into_iter()
                .filter(|id| !known.tenants.contains_key(id))
                .collect()
        };
        {
            let mut added = self.added.borrow_mut();
            added.let_go(&session, &gone);
            added.counts_again(self.told_budgets.known.borrow().tenants.keys());
        }
        for (what, mut pending) in asked {
            match pending.within(self.limits.request).await {
                Ok(()) => {}
                Err(AskError::Gone) => return Ok(()),
                Err(error) => {
                    tracing::error!(what, %error, "telling the engine");
                    answer = Err(error);
                }
            }
        }
        if answer.is_err() {
            // With the next change it is told everything again.
            *self.told_budgets.known.borrow_mut() = Known::default();
        }
        drop(one);
        answer
    }

    /// Makes a change of budgets durable, and has the engine know of it. A change that could not be made durable yet is told once
    /// it is: it stays in the pool, and is shown.
    async fn keep_budgets(self: &Rc<Self>) -> Result<(), ApiError> {
        if let Err(error) = self.commit_for_api().await {
            let owner = self.clone();
            self.spawn(async move {
                owner.commit_through().await;
                // What goes wrong is logged, and told with the next change.
                let _ = owner.push_budgets().await;
            });
            return Err(error);
        }
        self.push_budgets()
            .await
            .map_err(|error| engine_error(&error))
    }

    /// States what a tenant may use, or takes that back.
    pub(crate) async fn tenant_budget(
        self: &Rc<Self>,
        name: &str,
        change: impl Into<BudgetChange>,
    ) -> Result<TenantBudget, ApiError> {
        let (id, before) = {
            let pool = &self.core.borrow().pool;
            let id = pool.tenant(name).map_err(api_error)?.id;
            (id, pool.tenant_stated(id))
        };
        let stated = checked(&change.into(), before)?;
        let refused = |error| or_say_assumed(error, stated.as_ref());
        if let Some(Ok(budget)) = stated.map(|stated| stated.budget()) {
            self.admit_base(id, &budget).map_err(refused)?;
        }
        let set = self.core.borrow_mut().pool.set_tenant_budget(id, stated);
        set.map_err(api_error).map_err(refused)?;
        self.keep_budgets().await?;
        let budget = show_tenant_budget(&self.core.borrow().pool, id);
        let mut admission = self.admission();
        // What it asked for comes first.
        admission.lacking.sort_by_key(|base| base.tenant != name);
        Ok(TenantBudget {
            tenant: name.to_owned(),
            budget,
            guaranteed: self.is_guaranteed(id, &admission),
            admission,
        })
    }

    /// States what a volume may use of its tenant's, or takes that back.
    pub(crate) async fn volume_budget(
        self: &Rc<Self>,
        tenant: &str,
        name: &str,
        change: impl Into<BudgetChange>,
    ) -> Result<Volume, ApiError> {
        let _turn = self.turn_for_api(tenant, name).await?;
        let id = self.volume_id(tenant, name)?;
        let before = self.core.borrow().pool.volume_stated(id);
        let stated = checked(&change.into(), before)?;
        let set = self.core.borrow_mut().pool.set_volume_budget(id, stated);
        set.map_err(|error| {
            let error = api_error(error);
            let core = self.core.borrow();
            let of = core.pool.tenant(tenant).ok();
            let of = of.and_then(|of| core.pool.tenant_budget(of.id));
            match of.is_none_or(|of| of.base == LEAST) {
                true => error.hint("its tenant has no base: `forebay tenant budget` states one; or leave the volume's base out, to limit it only"),
                false => or_say_assumed(error, stated.as_ref()),
            }
        })?;
        self.keep_budgets().await?;
        self.volume_show(tenant, name)
    }
}

fn say_spread(session: &Session, spread: Spread) -> (String, Pending) {
    let what = "how queues are spread";
    let pending = session.request(what, |request| ToEngine::SetSpread { request, spread });
    (what.to_owned(), pending)
}

fn say_scheduling(session: &Session, scheduling: Option<Scheduling>) -> (String, Pending) {
    let scheduling = scheduling.map(Box::new);
    let pending = session.request("how I/O is admitted", |request| ToEngine::SetScheduling {
        request,
        scheduling,
    });
    ("how I/O is admitted".to_owned(), pending)
}

fn say_tenant(
    session: &Session,
    tenant: TenantId,
    of: Option<(Budget, bool)>,
    credit: [u64; 2],
) -> (String, Pending) {
    let (budget, guaranteed) = (of.map(|(budget, _)| budget), of.is_some_and(|of| of.1));
    let pending = session.request("a tenant's budget", |request| ToEngine::SetTenantBudget {
        request,
        tenant: EngineTenantId(tenant.0),
        budget,
        credit,
        guaranteed,
    });
    (format!("the budget of {tenant}"), pending)
}

fn say_volume(
    session: &Session,
    volume: VolumeId,
    (tenant, budget): (TenantId, Option<Budget>),
) -> (String, Pending) {
    let pending = session.request("a volume's budget", |request| ToEngine::SetVolumeBudget {
        request,
        volume,
        tenant: EngineTenantId(tenant.0),
        budget,
    });
    (format!("the budget of {volume}"), pending)
}
