//! One reactor's share of everything, given out once a window.
//!
//! **Design.** Algorithm 1 of BurstCBS. A lane (a volume through this reactor) has an allocation of each resource; an I/O that it covers may
//! begin ([`Scheduler::take`]). For others [`fallback`] asks siblings' rest, the free rest, a bursting tenant's part (the better of
//! two at random), and the reserve. The last two serve only a tenant *below its base*: the guard that the printed algorithm lacks.
//! Three more things differ from the paper. Resources are judged one by one. Only the unused part of an allocation fades. A base can
//! be saved for a few windows ([`crate::params::Params::saved_windows`]); the rest becomes credit.
//! **Not here:** the commands that wait (lanes keep them: [`Scheduler::wait`]), their order among lanes, time.

mod accrual;
mod divide;
mod each;
mod fallback;
mod refill;
mod state;
#[cfg(test)]
mod tests;

use crate::budget::{Budget, Burst, Rate};
use crate::cost::{CostTable, Frontends};
use crate::estimator::Estimator;
use crate::ledger::{Ledger, Newest};
use crate::params::{BadParam, Params};
use crate::resources::{PARTS, PLENTY, Resource, ResourceVector, SHARED, in_window};
use each::Each;
use refill::OWN;
use state::{AboveBase, Lane, NOBODY, Tenant};
use std::sync::Arc;

pub use state::TenantStatistics;

/// See the module's text.
#[derive(Debug)]
pub struct Scheduler {
    params: Params,
    /// Of shared resources in a window: this reactor's processor, and all of the rest.
    whole: [f32; SHARED],
    processors: f32,
    lanes: Vec<Lane>,
    tenants: Vec<Tenant>,
    active: Vec<u32>,
    /// Of them those that are given more than their base.
    bursting: Vec<u32>,
    reserve: ResourceVector,
    free: ResourceVector,
    /// What lanes in which something waits had left, and may not keep.
    lost: Each,
    window: u64,
    random: u32,
    estimator: Estimator,
    awake: bool,
    /// The entitlement to each resource that the ledger has of this reactor.
    published_entitlements: [u64; SHARED],
    /// Somebody may begin an I/O, had they more of the processor.
    wants_processor: bool,
    /// Of the processor there is as much as all bases need; as those that are guaranteed do.
    bases_fit: [bool; 2],
    /// Of the processor's time, what was used of the next window's.
    overdrawn_ns: i32,
    somebody_bursts: bool,
    /// See [`Self::shares_with_others`].
    publishes: bool,
    /// Of each resource, the largest base of all who have lanes here, at work or not: any of them may wake.
    largest: Each,
    ledger: Arc<Ledger>,
}

impl Scheduler {
    /// For at most `lanes` lanes of the ledger's tenants, on a reactor of a node that has `per_second` of each shared
    /// Errors: a parameter that is out of its range.
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
            // The sum of all reactors may not fit; the part of each does ([`refill`]).
            *whole = (usable * params.window_ns as f64 / 1e9).max(0.0) as f32;
        }
        let tenants = ledger.tenants();
        // Before the first window's end, all lies free for who comes first.
        let mut free = ResourceVector::ZERO;
        for (free, whole) in free.0.iter_mut().zip(whole) {
            *free = whole.min(PLENTY as f32) as i32;
        }
        Ok(Self {
            params,
            whole,
            processors: 1.0,
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            tenants: (0..tenants).map(|_| Tenant::default()).collect(),
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
            somebody_bursts: false,
            publishes: false,
            largest: Each::ZERO,
            ledger: ledger.clone(),
        })
    }

    /// The slot has a new tenant: savings and debt of the last one are not its own.
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

    /// The tenant, which comes by these frontends, has this budget from now on. What it was given in this window is cut to it at once;
    /// all else follows with the next. Of what is shared, its base is what that takes by these frontends.
    pub fn set_budget(
        &mut self,
        tenant: usize,
        budget: &Budget,
        costs: &CostTable,
        frontends: Frontends,
    ) {
        // By what was stated until now.
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
        self.set_frontends(tenant, budget, costs, frontends);
    }

    /// The tenant, which has this budget already, comes by these frontends from now on. Nothing of what all reactors have of it changes.
    pub fn set_frontends(
        &mut self,
        tenant: usize,
        budget: &Budget,
        costs: &CostTable,
        frontends: Frontends,
    ) {
        let window = self.params.window_ns;
        let vector = |rate: Rate| {
            let mut vector = self.own(rate);
            for (unit, most) in vector.0.iter_mut().zip(costs.most_by(rate, frontends)) {
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

    /// Whether the tenant's base comes first, where bases come to more than there is: of two of whom the same is said, neither does.
    pub fn set_guaranteed(&mut self, tenant: usize, guaranteed: bool) {
        self.tenants[tenant].guaranteed = guaranteed;
    }

    /// The volume of this lane may use so much of its tenant's: a part of the base that is its own, and a limit.
    /// `None`: an equal part, no limit.
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
        // Use from before this limit is no debt; shared resources follow from the budget.
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

    /// This lane is of that tenant. It had none before.
    pub fn attach(&mut self, lane: usize, tenant: usize) {
        self.lanes[lane] = Lane {
            tenant: tenant as u32,
            ..Lane::default()
        };
        let one = &mut self.tenants[tenant];
        if one.lanes.is_empty() {
            let entry = self.ledger.entry(tenant);
            entry.shares.attach(true);
            // Nothing accrued here before.
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

    /// This lane is nobody's any more.
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
            self.ledger.entry(tenant).shares.leave(published);
            self.newest(tenant);
        }
    }

    /// Takes what an I/O of this lane costs out of what the lane was given; false: it has not so much, ask [`Self::admit`].
    #[inline(always)]
    #[must_use]
    pub fn take(&mut self, lane: usize, cost: &ResourceVector) -> bool {
        self.lanes[lane].left.take(cost)
    }

    /// Whether an I/O of this lane that costs so much may begin; if so, that is paid. An I/O that may not, waits behind
    /// those of its lane that wait already ([`Self::wait`]).
    #[inline]
    pub fn admit(&mut self, lane: usize, cost: &ResourceVector) -> bool {
        if self.lanes[lane].left.take(cost) {
            return true;
        }
        // A copy, so that who looks a cost up need not put it into memory first.
        let cost = *cost;
        self.fall_back(lane, &cost)
    }

    /// An I/O begins to wait in its lane: said once of each.
    pub fn wait(&mut self, lane: usize, cost: &ResourceVector) {
        let lane = &mut self.lanes[lane];
        lane.waiting.add(cost);
        lane.waiters += 1;
        self.tenants[lane.tenant as usize].statistics.waited += 1;
    }

    /// Whether the first I/O that waits in this lane may begin; if so, it does not wait any more.
    #[inline]
    pub fn resume(&mut self, lane: usize, cost: &ResourceVector) -> bool {
        let admitted = self.admit(lane, cost);
        if admitted {
            self.lanes[lane].waits_no_more(cost);
        }
        admitted
    }

    /// Whether an I/O may begin on debt ([`Self::borrow`]): the tenant's debt must be below its accrual of one second, and below that of its
    /// volume's limit. Without debt an I/O of any cost may begin; its debt is paid within a second and the time of that I/O.
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

    /// Whether all that waits in this lane may begin on debt at once, unless it did so just before (see [`Self::may_borrow`]).
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

    /// What so much a window comes to in a second, as far as it can be counted.
    fn second(&self, a_window: i32) -> i64 {
        let second = 1_000_000_000 / self.params.window_ns.max(1);
        (i64::from(a_window) * second as i64).min(i64::from(PLENTY / 2))
    }

    /// Begins an I/O on debt: later windows give its tenant less.
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

    /// An I/O that waited is gone.
    pub fn cancel(&mut self, lane: usize, cost: &ResourceVector) {
        self.lanes[lane].waits_no_more(cost);
    }

    /// Whether this lane's tenant stays within its base in the last window and in this one. Its I/Os begin first: asked once a turn.
    #[must_use]
    pub fn is_within_base(&self, lane: usize) -> bool {
        let tenant = self.lanes[lane].tenant;
        let Some(one) = self.tenants.get(tenant as usize) else {
            return false;
        };
        !one.bursts && one.entitlement.covers(&self.used(tenant as usize).own())
    }

    /// From the next window on this reactor has so many processors: others, that have nothing to do, do a part of its work.
    /// What could not be had of theirs has made the processor dear: that is not held against this one's tenants without them.
    pub fn set_processors(&mut self, processors: f32) {
        if processors < self.processors {
            (self.estimator).shrink(Resource::Cpu as usize, processors / self.processors);
        }
        self.processors = processors;
    }

    /// Whether any tenant used more than its base in the last window.
    #[must_use]
    pub fn somebody_bursts(&self) -> bool {
        self.somebody_bursts
    }

    /// Gives an idle processor's time to an I/O that lacks only that; true if one does. So costs that are too high hold nobody back.
    pub fn is_idle(&mut self, ns: i32) -> bool {
        let wanted = std::mem::take(&mut self.wants_processor);
        if wanted {
            let free = &mut self.free[Resource::Cpu];
            *free = free.saturating_add(ns).min(PLENTY);
        }
        wanted
    }

    /// Of what it was given in this window, what a lane has left of the processor.
    #[must_use]
    pub fn processor_left_ns(&self, lane: usize) -> u64 {
        self.lanes[lane].left[Resource::Cpu].max(0) as u64
    }

    /// I/Os waited so long for a resource in this window: what costs are corrected by.
    pub fn observe(&mut self, resource: Resource, sum_ns: u64, count: u32) {
        if (resource as usize) < SHARED {
            self.estimator.observe(resource as usize, sum_ns, count);
        }
    }

    /// What an I/O waits for this resource is not known in this window, but will be.
    pub fn hold(&mut self, resource: Resource) {
        if (resource as usize) < SHARED {
            self.estimator.hold(resource as usize);
        }
    }

    /// Somebody needs this resource who did not make it dear: its costs are taken for no more than is calibrated.
    pub fn relieve(&mut self, resource: Resource) {
        if (resource as usize) < SHARED {
            self.estimator.relieve(resource as usize);
        }
    }

    /// Whether its windows must end: others reckon with its use, or will when awake, until some windows after the last one.
    #[must_use]
    pub fn is_reckoned_with(&self) -> bool {
        self.awake
    }

    /// Whether other reactors get more of a tenant once this reactor's window ends, as the ledger has, or will have, a demand of it here.
    /// So its windows should end in time, idle or not. What a volume's exports publish goes with that.
    #[must_use]
    pub fn shares_with_others(&self) -> bool {
        self.publishes
    }

    /// Withdraws what this reactor published, and detaches all lanes. Saved bases and unused draws of its tenants become credit.
    pub fn leave(&mut self) {
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

    /// What is known of a tenant on this reactor.
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

    /// What a tenant's last window was like on all reactors together, as each said last by asking for this.
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

    /// What a lane was given in the window that has just begun, a second: of what its tenant was ([`TenantStatistics::granted`]), its part.
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

    /// How many times what is calibrated costs count now.
    #[must_use]
    pub fn corrections(&self) -> &[f32; SHARED] {
        self.estimator.factors()
    }

    /// Tenants that are given something.
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
