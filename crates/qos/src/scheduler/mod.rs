//! One reactor's share of everything, given out once a window.
//!
//! **Design.** Algorithm 1 of BurstCBS. A lane (a volume through this reactor) has an allocation of everything, and an I/O
//! that it covers may begin: that is all there is on the path of an I/O ([`Scheduler::take`]). What it doesn't cover is
//! looked at more closely ([`fallback`]): what a sibling left, what nobody was given, what a bursting tenant was given above
//! its base (the better of two at random), the reserve. Of the last two only a tenant *below its base* may take: the guard that
//! the printed algorithm lacks. At a window's end ([`Scheduler::turn`]) what was used and what waits says who is given what.
//!
//! Four things differ from the paper, each for a reason. Resources are judged one by one, so that who reads does not hold
//! what others could write. Only what a tenant does not use of its allocation fades, or a steady one waits every few windows. What is left because its best taker is at its burst limit lies free for anyone who is not. And a
//! base may be saved for a few windows ([`crate::params::Params::saved_windows`]), because a load is not even, and a
//! window of a small base is less than one I/O; what is not saved becomes credit.
//!
//! **Not here:** the commands that wait (the lane keeps them, in order, and says so: [`Scheduler::wait`]), their order among
//! lanes, time.

mod brings;
mod divide;
mod each;
mod fallback;
mod state;
#[cfg(test)]
mod tests;
mod turn;

use crate::board::{Board, Newest};
use crate::budget::{Budget, Burst, Rate};
use crate::cost::{CostTable, Frontends};
use crate::estimator::Estimator;
use crate::params::{BadParam, Params};
use crate::units::{PARTS, PLENTY, Resource, SHARED, Units, in_window};
use each::Each;
use state::{AboveBase, Lane, NOBODY, Tenant};
use std::sync::Arc;
use turn::OWN;

pub use state::Seen;

/// See the module's text.
#[derive(Debug)]
pub struct Scheduler {
    params: Params,
    /// Of shared resources in a window: this reactor's processor, and all of the rest.
    whole: [f32; SHARED],
    /// So many processors does this reactor have.
    processors: f32,
    lanes: Vec<Lane>,
    tenants: Vec<Tenant>,
    /// Tenants that are given something.
    active: Vec<u32>,
    /// Of them those that are given more than their base.
    bursting: Vec<u32>,
    reserve: Units,
    /// What nobody was given.
    free: Units,
    /// What lanes in which something waits had left, and may not keep.
    lost: Each,
    window: u64,
    random: u32,
    estimator: Estimator,
    awake: bool,
    /// What it told that it owes of each resource.
    told_owed: [u64; SHARED],
    /// Somebody may begin an I/O, had they more of the processor.
    wants_processor: bool,
    /// Of the processor there is as much as all bases need; as those that are guaranteed do.
    bases_fit: [bool; 2],
    /// Of the processor's time, what was used of the next window's.
    overdrawn_ns: i32,
    somebody_bursts: bool,
    /// See [`Self::shares_with_others`].
    tells: bool,
    /// Of each resource, the largest base of all who have lanes here, at work or not: any of them may wake.
    largest: Each,
    board: Arc<Board>,
}

impl Scheduler {
    /// For `lanes` lanes at most, of the board's tenants, on a reactor of a node that has `per_second` of each shared
    /// resource ([`crate::admission::Capacity::per_second`]; of processor time, this reactor's).
    ///
    /// # Errors
    /// A parameter that is out of its range.
    pub fn new(
        params: Params,
        per_second: &[f64; SHARED],
        lanes: usize,
        board: &Arc<Board>,
    ) -> Result<Self, BadParam> {
        params.check()?;
        let mut whole = [0f32; SHARED];
        for (whole, per_second) in whole.iter_mut().zip(per_second) {
            let usable = per_second * f64::from(params.utilisation);
            // Of all reactors together it may be more than fits; each one's part does ([`turn`]).
            *whole = (usable * params.window_ns as f64 / 1e9).max(0.0) as f32;
        }
        let tenants = board.tenants();
        // Before the first window's end, all lies free for who comes first.
        let mut free = Units::ZERO;
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
            reserve: Units::ZERO,
            free,
            lost: Each::ZERO,
            window: 0,
            random: 0x9E37_79B9,
            estimator: Estimator::default(),
            awake: false,
            told_owed: [0; SHARED],
            wants_processor: false,
            bases_fit: [false; 2],
            overdrawn_ns: 0,
            somebody_bursts: false,
            tells: false,
            largest: Each::ZERO,
            board: board.clone(),
        })
    }

    /// The tenant is another from now on: what the last one had saved, or owes, is not this one's.
    pub fn begin_tenant(&mut self, tenant: usize) {
        let one = &mut self.tenants[tenant];
        one.due = Units::ZERO;
        one.above = AboveBase {
            of_credit: one.above.of_credit,
            ..AboveBase::default()
        };
        one.is_known = false;
        one.counts_from(self.window, self.board.entry(tenant));
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
        self.board.entry(tenant).set_budget(budget);
        let base = self.own(budget.base);
        for (unused, own) in self.board.entry(tenant).unused.iter().zip(OWN) {
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
            let mut units = self.own(rate);
            for (unit, most) in units.0.iter_mut().zip(costs.most_by(rate, frontends)) {
                *unit = in_window(most, window);
            }
            units
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
            None => (Units::ZERO, Units::PLENTY),
        };
        let lane = &mut self.lanes[lane];
        if (lane.base, lane.limit, lane.limited) == (base, limit, budget.is_some()) {
            return;
        }
        (lane.base, lane.limit, lane.limited) = (base, limit, budget.is_some());
        if !lane.limited {
            lane.due = [0; 2];
        }
        // What was used before there was this limit is not owed; of shared resources it takes what its budget comes to.
        let mut room = lane.limit;
        room.add(&lane.used().own());
        room.0[..SHARED].fill(PLENTY);
        lane.room = room;
    }

    /// What a budget says, in a window.
    fn own(&self, rate: Rate) -> Units {
        let mut units = Units::ZERO;
        let window = self.params.window_ns;
        units[Resource::Ops] = in_window(rate.iops as f64 * f64::from(PARTS), window);
        units[Resource::Bytes] = in_window(rate.bytes as f64, window);
        units
    }

    /// This lane is of that tenant. It had none before.
    pub fn attach(&mut self, lane: usize, tenant: usize) {
        self.lanes[lane] = Lane {
            tenant: tenant as u32,
            ..Lane::default()
        };
        let one = &mut self.tenants[tenant];
        if one.lanes.is_empty() {
            let entry = self.board.entry(tenant);
            entry.shares.attach(true);
            // Nothing was earned here before.
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
        one.extra.add(&gone.used().plus(&gone.owed()));
        one.lanes.retain(|other| *other as usize != lane);
        one.count_lanes();
        if one.lanes.is_empty() {
            let told = std::mem::take(&mut one.told);
            self.board.entry(tenant).shares.leave(told);
            self.newest(tenant);
        }
    }

    /// Takes what an I/O of this lane costs out of what the lane was given; false: it has not so much, ask [`Self::admit`].
    #[inline(always)]
    #[must_use]
    pub fn take(&mut self, lane: usize, cost: &Units) -> bool {
        self.lanes[lane].left.take(cost)
    }

    /// Whether an I/O of this lane that costs so much may begin; if so, that is paid. An I/O that may not, waits behind
    /// those of its lane that wait already ([`Self::wait`]).
    #[inline]
    pub fn admit(&mut self, lane: usize, cost: &Units) -> bool {
        if self.lanes[lane].left.take(cost) {
            return true;
        }
        // A copy, so that who looks a cost up need not put it into memory first.
        let cost = *cost;
        self.fall_back(lane, &cost)
    }

    /// An I/O begins to wait in its lane: said once of each.
    pub fn wait(&mut self, lane: usize, cost: &Units) {
        let lane = &mut self.lanes[lane];
        lane.waiting.add(cost);
        lane.waiters += 1;
        self.tenants[lane.tenant as usize].seen.waited += 1;
    }

    /// Whether the first I/O that waits in this lane may begin; if so, it does not wait any more.
    #[inline]
    pub fn resume(&mut self, lane: usize, cost: &Units) -> bool {
        let admitted = self.admit(lane, cost);
        if admitted {
            self.lanes[lane].waits_no_more(cost);
        }
        admitted
    }

    /// Whether an I/O may begin whatever there is ([`Self::owe`]): as long as less is owed than a second brings of what is the
    /// tenant's whatever others do, and less of its volume's limit. So one may begin whatever it costs, while nothing is owed; and
    /// what is owed is paid within a second and the time of that one.
    #[must_use]
    pub fn may_owe(&mut self, lane: usize) -> bool {
        let tenant = self.lanes[lane].tenant as usize;
        if tenant == NOBODY as usize {
            return true;
        }
        // What was owed may be paid by now.
        self.earn(tenant);
        let (one, tenant) = (&self.lanes[lane], &self.tenants[tenant]);
        let used = self.used(one.tenant as usize);
        OWN.into_iter().enumerate().all(|(at, own)| {
            let paid = u64::from(tenant.due.0[own].max(0) as u32) + tenant.above.drawn[at];
            let owed = tenant.above.debt[at] + (used.0[own].max(0) as u64).saturating_sub(paid);
            let over = i64::from(one.used().0[own]) - i64::from(one.room.0[own]);
            (owed as i64) < self.second(tenant.brings(own))
                && (!one.limited || over < self.second(one.limit.0[own]))
        })
    }

    /// Whether less waits in this lane than what it may owe at once: so whoever may not wait for its budget ([`Self::may_owe`]) has
    /// all of it begin, unless it did so just before.
    #[must_use]
    pub fn may_hold(&self, lane: usize) -> bool {
        let one = &self.lanes[lane];
        let Some(tenant) = self.tenants.get(one.tenant as usize) else {
            return true;
        };
        OWN.into_iter().all(|own| {
            let waiting = i64::from(one.waiting.0[own]);
            let brings = tenant.brings(own);
            waiting < self.second(brings.min(one.limit.0[own]))
        })
    }

    /// What so much a window comes to in a second, as far as it can be counted.
    fn second(&self, a_window: i32) -> i64 {
        let second = 1_000_000_000 / self.params.window_ns.max(1);
        (i64::from(a_window) * second as i64).min(i64::from(PLENTY / 2))
    }

    /// An I/O begins whatever there is: later windows give its tenant less.
    pub fn owe(&mut self, lane: usize, cost: &Units) {
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
    pub fn cancel(&mut self, lane: usize, cost: &Units) {
        self.lanes[lane].waits_no_more(cost);
    }

    /// Whether this lane's tenant stays within its base: it had no more than that in the last window, and has had no more than is
    /// due to it in this one. Those are begun first, and wait for no more than a turn. For a turn, not for each I/O.
    #[must_use]
    pub fn is_within_base(&self, lane: usize) -> bool {
        let tenant = self.lanes[lane].tenant;
        let Some(one) = self.tenants.get(tenant as usize) else {
            return false;
        };
        !one.bursts && one.due.covers(&self.used(tenant as usize).own())
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

    /// The processor has nothing to do: if somebody who waits may begin an I/O but for that, there is so much more of it now, and
    /// this is true. So costs that are taken for too high hold nobody back.
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

    /// Whether other reactors reckon with what this one uses, or will when they wake: until it has said that it uses nothing any
    /// more, which is some windows after it does, its windows must end.
    #[must_use]
    pub fn is_reckoned_with(&self) -> bool {
        self.awake
    }

    /// Whether others have more of a tenant as soon as this reactor's window ends, if nothing else is used here: it told, or will,
    /// that a tenant wants something which is theirs as well. So its windows should end in time, be it idle or not. What a volume's
    /// exports tell each other is told with that.
    #[must_use]
    pub fn shares_with_others(&self) -> bool {
        self.tells
    }

    /// This reactor does without it from now on: nobody reckons with what it told any more. It has no lanes afterwards. What was
    /// saved of its tenants' bases is credit, what was drawn and not used too.
    pub fn leave(&mut self) {
        for lane in 0..self.lanes.len() {
            self.let_go(lane);
        }
        for tenant in self.active.drain(..) {
            let entry = self.board.entry(tenant as usize);
            let one = &mut self.tenants[tenant as usize];
            let used = std::mem::take(&mut one.extra);
            one.settle(entry, &used);
            one.active = false;
            self.board.rest(tenant as usize, &mut one.told);
        }
        for (tenant, one) in self.tenants.iter_mut().enumerate() {
            let due = std::mem::take(&mut one.due);
            for (credit, own) in self.board.entry(tenant).credit.iter().zip(OWN) {
                if !one.metered {
                    credit.put(due.0[own].max(0) as u64);
                }
            }
        }
        if std::mem::take(&mut self.awake) {
            self.sleep();
        }
    }

    fn sleep(&mut self) {
        self.board.wake(false);
        for (resource, told) in self.told_owed.iter_mut().enumerate() {
            self.board.owe(resource, told, 0);
        }
    }

    /// What is known of a tenant on this reactor.
    #[must_use]
    pub fn seen(&self, tenant: usize) -> Seen {
        let one = &self.tenants[tenant];
        let entry = self.board.entry(tenant);
        let credit = |own: usize| {
            let account = &entry.credit[own];
            (account.has() + one.drawn_credit(own)).min(account.cap())
        };
        Seen {
            credit_parts: credit(0),
            credit_bytes: credit(1),
            ..one.seen
        }
    }

    /// What a tenant's last window was like on all reactors together, as each said last by asking for this.
    pub fn newest(&mut self, tenant: usize) -> Newest {
        let one = &mut self.tenants[tenant];
        let new = match one.lanes.is_empty() {
            true => Newest::default(),
            false => one.seen.newest(self.params.window_ns),
        };
        self.board.entry(tenant).tell_newest(&mut one.newest, new)
    }

    /// What a lane was given in the window that has just begun, a second: of what its tenant was ([`Seen::granted`]), its part.
    #[must_use]
    pub fn granted_to(&self, lane: usize) -> Rate {
        let one = &self.lanes[lane];
        let Some(tenant) = self.tenants.get(one.tenant as usize) else {
            return Rate { iops: 0, bytes: 0 };
        };
        let whole = tenant.seen.granted(self.params.window_ns);
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
