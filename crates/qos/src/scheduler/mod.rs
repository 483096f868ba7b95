//! Divides a reactor's resources once a window: algorithm 1 of BurstCBS.
//!
//! An I/O begins if its lane's allocation covers it ([`Scheduler::spend`]). Otherwise [`fallback`]
//! tries what no lane of the tenant was allocated, what no tenant was allocated, a bursting tenant,
//! and the reserve. Unlike the paper, the last two serve only tenants below their base, and
//! resources are compared one by one. Only unused allocation decays, and base is saved for a few
//! windows ([`crate::params::Params::saved_windows`]). The engine keeps the waiting commands; a
//! lane only counts them.

mod accrual;
mod divide;
mod each;
mod fallback;
mod refill;
mod state;
#[cfg(test)]
mod tests;

use crate::budget::{Budget, Burst, Rate};
use crate::cost::{CostTable, Routes};
use crate::estimator::Estimator;
use crate::ledger::{Ledger, Newest};
use crate::params::{BadParam, Params};
use crate::resources::{PARTS, PLENTY, Resource, ResourceVector, SHARED, in_window};
use each::Each;
use refill::OWN;
use state::{AboveBase, Lane, NOBODY, TenantShare};
use std::sync::Arc;

pub use state::TenantStatistics;

/// One reactor's scheduler.
#[derive(Debug)]
pub struct Scheduler {
    params: Params,
    /// Per window: this reactor's processor, and the node's other resources.
    whole: [f32; SHARED],
    processors: f32,
    lanes: Vec<Lane>,
    tenants: Vec<TenantShare>,
    active: Vec<u32>,
    /// Active tenants with an allocation above their base.
    bursting: Vec<u32>,
    reserve: ResourceVector,
    free: ResourceVector,
    /// Unused allocation that lanes can't keep.
    lost: Each,
    window: u64,
    random: u32,
    estimator: Estimator,
    awake: bool,
    published_entitlements: [u64; SHARED],
    wants_processor: bool,
    /// Whether all bases, and whether guaranteed ones, fit the processor.
    bases_fit: [bool; 2],
    /// Processor time taken from the next window in advance.
    overdrawn_ns: i32,
    any_bursts: bool,
    publishes: bool,
    /// The largest base of each resource, of tenants with lanes on this reactor.
    largest: Each,
    ledger: Arc<Ledger>,
}

impl Scheduler {
    /// A scheduler for a node with `per_second` of each shared resource; fails for a bad parameter.
    pub fn new(
        params: Params,
        per_second: &[f64; SHARED],
        lanes: usize,
        ledger: &Arc<Ledger>,
    ) -> Result<Self, BadParam> {
        params.check()?;
        let mut whole = [0f32; SHARED];
        for (whole, per_second) in whole.iter_mut().zip(per_second) {
            let usable = per_second * f64::from(params.utilisation);
            // This may exceed a vector's range; each reactor's part does not ([`refill`]).
            *whole = (usable * params.window_ns as f64 / 1e9).max(0.0) as f32;
        }
        let tenants = ledger.tenants();
        // All is free before the first refill.
        let mut free = ResourceVector::ZERO;
        for (free, whole) in free.0.iter_mut().zip(whole) {
            *free = whole.min(PLENTY as f32) as i32;
        }
        Ok(Self {
            params,
            whole,
            processors: 1.0,
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            tenants: (0..tenants).map(|_| TenantShare::default()).collect(),
            active: Vec::with_capacity(tenants),
            bursting: Vec::with_capacity(tenants),
            reserve: ResourceVector::ZERO,
            free,
            lost: Each::ZERO,
            window: 0,
            random: 0x9E37_79B9,
            estimator: Estimator::default(),
            awake: false,
            published_entitlements: [0; SHARED],
            wants_processor: false,
            bases_fit: [false; 2],
            overdrawn_ns: 0,
            any_bursts: false,
            publishes: false,
            largest: Each::ZERO,
            ledger: ledger.clone(),
        })
    }

    /// Clears savings and debt for the new tenant of this index.
    pub fn begin_tenant(&mut self, tenant: usize) {
        let one = &mut self.tenants[tenant];
        one.entitlement = ResourceVector::ZERO;
        one.above = AboveBase {
            of_credit: one.above.of_credit,
            ..AboveBase::default()
        };
        one.is_known = false;
        one.counts_from(self.window, self.ledger.entry(tenant));
    }

    /// Sets a tenant's budget and routes. A lower limit applies at once, a higher one from the
    /// next window.
    pub fn set_budget(
        &mut self,
        tenant: usize,
        budget: &Budget,
        costs: &CostTable,
        routes: Routes,
    ) {
        // Earlier windows accrue by the old budget.
        self.earn(tenant);
        self.ledger.entry(tenant).set_budget(budget);
        let base = self.own(budget.base);
        for (unused, own) in self.ledger.entry(tenant).unused.iter().zip(OWN) {
            unused.set_cap(base.0[own] as u64);
        }
        let metered = matches!(budget.how, Burst::Metered);
        let one = &mut self.tenants[tenant];
        one.metered = metered;
        if one.above.drawn == [0; 2] {
            one.above.of_credit = !metered;
        }
        self.set_routes(tenant, budget, costs, routes);
    }

    /// Sets the routes alone.
    pub fn set_routes(
        &mut self,
        tenant: usize,
        budget: &Budget,
        costs: &CostTable,
        routes: Routes,
    ) {
        let window = self.params.window_ns;
        let vector = |rate: Rate| {
            let mut vector = self.own(rate);
            for (unit, most) in vector.0.iter_mut().zip(costs.most_by(rate, routes)) {
                *unit = in_window(most, window);
            }
            vector
        };
        let (base, burst) = (vector(budget.base), vector(budget.burst));
        let before = self.tenants[tenant].shared_base;
        let one = &mut self.tenants[tenant];
        (one.base, one.burst) = (base, burst);
        (one.shared_base, one.shared_burst) = (Each::shared(&base), Each::shared(&burst));
        one.spare = one.spare.min(&burst);
        for lane in &one.lanes {
            let lane = &mut self.lanes[*lane as usize];
            let had = &mut lane.left;
            let left = had.min(&burst);
            let mut cut = *had;
            cut.sub(&left);
            *had = left;
            lane.given = lane.given.minus(&cut);
        }
        if !one.lanes.is_empty() {
            let now = one.shared_base;
            self.largest = self.largest.max(&now);
            if before.max(&now) != now {
                self.find_largest();
            }
        }
    }

    /// Sets whether the base comes first when bases don't all fit.
    pub fn set_guaranteed(&mut self, tenant: usize, guaranteed: bool) {
        self.tenants[tenant].guaranteed = guaranteed;
    }

    /// Sets a volume's own base and limit. `None`: an equal part, no limit.
    pub fn set_volume(&mut self, lane: usize, budget: Option<&Budget>) {
        let (base, limit) = match budget {
            Some(budget) => (self.own(budget.base), self.own(budget.burst)),
            None => (ResourceVector::ZERO, ResourceVector::PLENTY),
        };
        let lane = &mut self.lanes[lane];
        if (lane.base, lane.limit, lane.limited) == (base, limit, budget.is_some()) {
            return;
        }
        (lane.base, lane.limit, lane.limited) = (base, limit, budget.is_some());
        if !lane.limited {
            lane.entitlement = [0; 2];
        }
        // Earlier use is no debt.
        let mut room = lane.limit;
        room.add(&lane.used().own());
        room.0[..SHARED].fill(PLENTY);
        lane.room = room;
    }

    fn own(&self, rate: Rate) -> ResourceVector {
        let mut vector = ResourceVector::ZERO;
        let window = self.params.window_ns;
        vector[Resource::Ops] = in_window(rate.iops as f64 * f64::from(PARTS), window);
        vector[Resource::Bytes] = in_window(rate.bytes as f64, window);
        vector
    }

    /// Assigns a free lane to a tenant.
    pub fn attach(&mut self, lane: usize, tenant: usize) {
        self.lanes[lane] = Lane {
            tenant: tenant as u32,
            ..Lane::default()
        };
        let one = &mut self.tenants[tenant];
        if one.lanes.is_empty() {
            let entry = self.ledger.entry(tenant);
            entry.shares.attach(true);
            one.counts_from(self.window, entry);
        }
        one.lanes.push(lane as u32);
        one.count_lanes();
        self.largest = self.largest.max(&one.shared_base);
    }

    fn find_largest(&mut self) {
        let there = self.tenants.iter().filter(|one| !one.lanes.is_empty());
        self.largest = there.fold(Each::ZERO, |largest, one| largest.max(&one.shared_base));
    }

    /// Detaches a lane from its tenant.
    pub fn detach(&mut self, lane: usize) {
        self.let_go(lane);
        self.find_largest();
    }

    fn let_go(&mut self, lane: usize) {
        let gone = std::mem::take(&mut self.lanes[lane]);
        if gone.tenant == NOBODY {
            return;
        }
        let tenant = gone.tenant as usize;
        self.earn(tenant);
        let one = &mut self.tenants[tenant];
        one.extra.add(&gone.used().plus(&gone.debt()));
        one.lanes.retain(|other| *other as usize != lane);
        one.count_lanes();
        if one.lanes.is_empty() {
            let published = std::mem::take(&mut one.published);
            self.ledger.entry(tenant).shares.detach(published);
            self.newest(tenant);
        }
    }

    /// Charges an I/O to its lane's allocation. If false, call [`Self::admit`].
    #[inline(always)]
    #[must_use]
    pub fn spend(&mut self, lane: usize, cost: &ResourceVector) -> bool {
        self.lanes[lane].left.spend(cost)
    }

    /// Admits and charges an I/O. If false, call [`Self::wait`].
    #[inline]
    pub fn admit(&mut self, lane: usize, cost: &ResourceVector) -> bool {
        if self.lanes[lane].left.spend(cost) {
            return true;
        }
        // A copy keeps the caller's cost in registers.
        let cost = *cost;
        self.fall_back(lane, &cost)
    }

    /// Counts a waiting I/O, once.
    pub fn wait(&mut self, lane: usize, cost: &ResourceVector) {
        let lane = &mut self.lanes[lane];
        lane.waiting.add(cost);
        lane.waiters += 1;
        self.tenants[lane.tenant as usize].statistics.waited += 1;
    }

    /// Admits the lane's first waiting I/O, if possible.
    #[inline]
    pub fn resume(&mut self, lane: usize, cost: &ResourceVector) -> bool {
        let admitted = self.admit(lane, cost);
        if admitted {
            self.lanes[lane].waits_no_more(cost);
        }
        admitted
    }

    /// Whether an I/O may begin on debt: only while the debt is below a second's accrual.
    #[must_use]
    pub fn may_borrow(&mut self, lane: usize) -> bool {
        let tenant = self.lanes[lane].tenant as usize;
        if tenant == NOBODY as usize {
            return true;
        }
        // The debt may be paid by now.
        self.earn(tenant);
        let (one, tenant) = (&self.lanes[lane], &self.tenants[tenant]);
        let used = self.used(one.tenant as usize);
        OWN.into_iter().enumerate().all(|(at, own)| {
            let paid = u64::from(tenant.entitlement.0[own].max(0) as u32) + tenant.above.drawn[at];
            let debt = tenant.above.debt[at] + (used.0[own].max(0) as u64).saturating_sub(paid);
            let over = i64::from(one.used().0[own]) - i64::from(one.room.0[own]);
            (debt as i64) < self.second(tenant.accrual(own))
                && (!one.limited || over < self.second(one.limit.0[own]))
        })
    }

    /// Whether the lane's waiting I/Os are below a second's accrual.
    #[must_use]
    pub fn may_hold(&self, lane: usize) -> bool {
        let one = &self.lanes[lane];
        let Some(tenant) = self.tenants.get(one.tenant as usize) else {
            return true;
        };
        OWN.into_iter().all(|own| {
            let waiting = i64::from(one.waiting.0[own]);
            let accrual = tenant.accrual(own);
            waiting < self.second(accrual.min(one.limit.0[own]))
        })
    }

    /// One window's amount times the windows in a second, capped.
    fn second(&self, a_window: i32) -> i64 {
        let second = 1_000_000_000 / self.params.window_ns.max(1);
        (i64::from(a_window) * second as i64).min(i64::from(PLENTY / 2))
    }

    /// Begins an I/O on debt, which later windows pay.
    pub fn borrow(&mut self, lane: usize, cost: &ResourceVector) {
        let tenant = self.lanes[lane].tenant;
        if tenant == NOBODY {
            return;
        }
        if !self.tenants[tenant as usize].active {
            self.activate(tenant as usize);
        }
        let lane = &mut self.lanes[lane];
        for (left, cost) in lane.left.0.iter_mut().zip(&cost.shared().0) {
            *left = left.saturating_sub(*cost).max(-PLENTY);
        }
        lane.beyond.add(&cost.own());
    }

    /// Removes a waiting I/O.
    pub fn cancel(&mut self, lane: usize, cost: &ResourceVector) {
        self.lanes[lane].waits_no_more(cost);
    }

    /// Whether the tenant is within its base now and in the last window, so that its I/Os come
    /// first.
    #[must_use]
    pub fn is_within_base(&self, lane: usize) -> bool {
        let tenant = self.lanes[lane].tenant;
        let Some(one) = self.tenants.get(tenant as usize) else {
            return false;
        };
        !one.bursts && one.entitlement.covers(&self.used(tenant as usize).own())
    }

    /// Sets the number of processors, helpers included. A decrease also scales the processor's
    /// correction.
    pub fn set_processors(&mut self, processors: f32) {
        if processors < self.processors {
            (self.estimator).shrink(Resource::Cpu as usize, processors / self.processors);
        }
        self.processors = processors;
    }

    /// Whether any tenant used more than its base in the last window.
    #[must_use]
    pub fn any_bursts(&self) -> bool {
        self.any_bursts
    }

    /// Adds `ns` to the free processor time if an I/O was short of it; returns whether one was.
    pub fn is_idle(&mut self, ns: i32) -> bool {
        let wanted = std::mem::take(&mut self.wants_processor);
        if wanted {
            let free = &mut self.free[Resource::Cpu];
            *free = free.saturating_add(ns).min(PLENTY);
        }
        wanted
    }

    /// Processor time left to a lane in this window.
    #[must_use]
    pub fn processor_left_ns(&self, lane: usize) -> u64 {
        self.lanes[lane].left[Resource::Cpu].max(0) as u64
    }

    /// Reports queueing delays of a resource, which correct its costs.
    pub fn observe(&mut self, resource: Resource, sum_ns: u64, count: u32) {
        if (resource as usize) < SHARED {
            self.estimator.observe(resource as usize, sum_ns, count);
        }
    }

    /// Reports that delays of a resource are not known yet.
    pub fn hold(&mut self, resource: Resource) {
        if (resource as usize) < SHARED {
            self.estimator.hold(resource as usize);
        }
    }

    /// Caps a resource's correction at 1. Call it when a healthy device comes into use.
    pub fn relieve(&mut self, resource: Resource) {
        if (resource as usize) < SHARED {
            self.estimator.relieve(resource as usize);
        }
    }

    /// Whether this reactor must go on ending windows, because others count on it.
    #[must_use]
    pub fn is_reckoned_with(&self) -> bool {
        self.awake
    }

    /// Whether demand is published, so that even idle windows should end in time.
    #[must_use]
    pub fn shares_with_others(&self) -> bool {
        self.publishes
    }

    /// Detaches all lanes and withdraws published sums. Saved base and unused draws become credit.
    pub fn withdraw(&mut self) {
        for lane in 0..self.lanes.len() {
            self.let_go(lane);
        }
        for tenant in self.active.drain(..) {
            let entry = self.ledger.entry(tenant as usize);
            let one = &mut self.tenants[tenant as usize];
            let used = std::mem::take(&mut one.extra);
            one.settle(entry, &used);
            one.active = false;
            self.ledger.rest(tenant as usize, &mut one.published);
        }
        for (tenant, one) in self.tenants.iter_mut().enumerate() {
            let entitlement = std::mem::take(&mut one.entitlement);
            for (credit, own) in self.ledger.entry(tenant).credit.iter().zip(OWN) {
                if !one.metered {
                    credit.put(entitlement.0[own].max(0) as u64);
                }
            }
        }
        if std::mem::take(&mut self.awake) {
            self.sleep();
        }
    }

    fn sleep(&mut self) {
        self.ledger.wake(false);
        for (resource, published) in self.published_entitlements.iter_mut().enumerate() {
            self.ledger.publish_entitlement(resource, published, 0);
        }
    }

    /// A tenant's statistics on this reactor.
    #[must_use]
    pub fn statistics(&self, tenant: usize) -> TenantStatistics {
        let one = &self.tenants[tenant];
        let entry = self.ledger.entry(tenant);
        let credit = |own: usize| {
            let bucket = &entry.credit[own];
            (bucket.has() + one.drawn_credit(own)).min(bucket.cap())
        };
        TenantStatistics {
            credit_parts: credit(0),
            credit_bytes: credit(1),
            ..one.statistics
        }
    }

    /// Publishes a tenant's newest window, and returns the sum of all reactors.
    pub fn newest(&mut self, tenant: usize) -> Newest {
        let one = &mut self.tenants[tenant];
        let new = match one.lanes.is_empty() {
            true => Newest::default(),
            false => one.statistics.newest(self.params.window_ns),
        };
        self.ledger
            .entry(tenant)
            .publish_newest(&mut one.newest, new)
    }

    /// A lane's part of its tenant's allocation, per second ([`TenantStatistics::granted`]).
    #[must_use]
    pub fn granted_to(&self, lane: usize) -> Rate {
        let one = &self.lanes[lane];
        let Some(tenant) = self.tenants.get(one.tenant as usize) else {
            return Rate { iops: 0, bytes: 0 };
        };
        let whole = tenant.statistics.granted(self.params.window_ns);
        let part = |rate: u64, own: Resource| {
            let (given, of) = (
                one.given[own].max(0) as u64,
                tenant.whole[own].max(1) as u64,
            );
            (u128::from(rate) * u128::from(given.min(of)) / u128::from(of)) as u64
        };
        Rate {
            iops: part(whole.iops, Resource::Ops),
            bytes: part(whole.bytes, Resource::Bytes),
        }
    }

    /// Current corrections of costs.
    #[must_use]
    pub fn corrections(&self) -> &[f32; SHARED] {
        self.estimator.factors()
    }

    /// Number of active tenants.
    #[must_use]
    pub fn active(&self) -> usize {
        self.active.len()
    }

    /// The parameters.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }
}
