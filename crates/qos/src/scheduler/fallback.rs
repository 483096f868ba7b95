//! An I/O that its lane's allocation does not cover.
//!
//! **Design.** Its own lane's budget must allow it; then each source is asked for all that is shared of it. Nothing here is on
//! the path of an I/O of a tenant within what it was given. **Not here:** what waits.

use super::Scheduler;
use super::accrual::Accrual;
use super::each::Each;
use super::state::{NOBODY, Tenant};
use crate::params::BEGINNER;
use crate::resources::{COUNT, PLENTY, Resource, ResourceVector, SHARED};

impl Scheduler {
    #[cold]
    #[inline(never)]
    pub(super) fn fall_back(&mut self, lane: usize, cost: &ResourceVector) -> bool {
        let tenant = self.lanes[lane].tenant;
        if tenant == NOBODY {
            return false;
        }
        if !self.tenants[tenant as usize].active {
            self.activate(tenant as usize);
            if self.lanes[lane].left.take(cost) {
                return true;
            }
        }
        self.begin_borrowing(lane, cost) || self.begin_beyond(lane, tenant as usize, cost)
    }

    /// An I/O begins while anything is left of the tenant's own, and if it exceeds a window's shared resources: later windows pay.
    /// Saving for it would keep others from what is saved.
    fn begin_borrowing(&mut self, lane: usize, cost: &ResourceVector) -> bool {
        let lane = &mut self.lanes[lane];
        let shared = cost.shared();
        let begins = has_some(&lane.left, cost)
            && (lane.left.covers(&shared) || !lane.given.covers(&shared));
        if begins {
            lane.left = lane.left.minus(cost);
        }
        begins
    }

    /// What its lane was given, as far as that goes; all the rest from one of the sources.
    fn begin_beyond(&mut self, lane: usize, tenant: usize, cost: &ResourceVector) -> bool {
        let mut short = *cost;
        // Debt is not asked for again.
        short.sub(&self.lanes[lane].left.max(&ResourceVector::ZERO));
        let own = short.own();
        let one = &mut self.tenants[tenant];
        if !own.is_zero() {
            // No volume comes above its limit by its siblings' part.
            let mut would = self.lanes[lane].used();
            would.add(&cost.own());
            if !self.lanes[lane].room.covers(&would.own()) || !one.spare.covers(&own) {
                return false;
            }
        }
        let shared = short.shared();
        let mut source = one.spare.take(&shared);
        if !source {
            source = self.free.take(&shared);
            if !source && self.is_below_base(tenant, &cost.own()) {
                // What lies free of one resource is had with what those have of another: the processor's time of who has nothing
                // to do is no use without a link's.
                let free = self.free.max(&ResourceVector::ZERO).min(&shared);
                let rest = shared.minus(&free);
                source = self.take_from_bursting(tenant, &rest);
                if !source && self.take_from_reserve(tenant, &rest) {
                    self.tenants[tenant].statistics.from_reserve += 1;
                    source = true;
                }
                if source {
                    self.free.sub(&free);
                }
            }
            let cpu = Resource::Cpu;
            self.wants_processor |= !source && shared[cpu] > self.free[cpu];
        }
        if source {
            let lane = &mut self.lanes[lane];
            let mut from_lane = *cost;
            from_lane.sub(&short);
            let left = &mut lane.left;
            *left = left.minus(&from_lane);
            lane.beyond.add(&short);
            let one = &mut self.tenants[tenant];
            one.spare.sub(&own);
        }
        source
    }

    /// Where bases fit, the processor's time is there for whoever is below its base: it is given to those above in small parts.
    /// What the reserve has not, the next window has less.
    fn take_from_reserve(&mut self, tenant: usize, shared: &ResourceVector) -> bool {
        if self.reserve.take(shared) {
            return true;
        }
        let mut others = *shared;
        let ns = std::mem::take(&mut others[Resource::Cpu]);
        let fits = self.bases_fit[usize::from(self.tenants[tenant].guaranteed)];
        let has = ns > 0 && fits && self.reserve.take(&others);
        if has {
            self.overdrawn_ns = self.overdrawn_ns.saturating_add(ns);
        }
        has
    }

    /// The guard: with this I/O too, the tenant is not above its base.
    fn is_below_base(&mut self, tenant: usize, own: &ResourceVector) -> bool {
        let allows = |one: &Tenant, used: &ResourceVector| {
            let mut would = *used;
            would.add(own);
            one.entitlement.covers(&would.own())
        };
        // What was used only grows in a window: not every volume that is refused looks at all of its siblings.
        let one = &self.tenants[tenant];
        if !allows(one, &one.found) {
            return false;
        }
        let used = self.used(tenant);
        let one = &mut self.tenants[tenant];
        one.found = used;
        allows(one, &used)
    }

    /// In this window, with what later ones pay.
    pub(super) fn used(&self, tenant: usize) -> ResourceVector {
        let one = &self.tenants[tenant];
        let mut used = one.extra;
        for lane in &one.lanes {
            let lane = &self.lanes[*lane as usize];
            used.add(&lane.used());
            used.add(&lane.debt());
        }
        used
    }

    /// Of the better of two bursting tenants, what it was given above its base.
    pub(super) fn take_from_bursting(&mut self, tenant: usize, shared: &ResourceVector) -> bool {
        let count = self.bursting.len();
        let choices = self.params.choices;
        if count == 0 || choices == 0 {
            return false;
        }
        let first = self.draw(count);
        let second = if choices > 1 { self.draw(count) } else { first };
        let (first, second) = (
            self.bursting[first] as usize,
            self.bursting[second] as usize,
        );
        let (a, b) = (self.stealable(first), self.stealable(second));
        // The better: who has more of what this I/O needs most of.
        let better = |of: &ResourceVector| {
            let parts = of.0.iter().zip(&shared.0);
            let parts = parts.filter(|(_, need)| **need > 0);
            parts
                .map(|(has, need)| i64::from(*has) * 1024 / i64::from(*need))
                .min()
                .unwrap_or(0)
        };
        let (victim, has) = if better(&b) > better(&a) {
            (second, b)
        } else {
            (first, a)
        };
        if victim == tenant || !has.covers(shared) {
            return false;
        }
        let mut need = *shared;
        let one = &mut self.tenants[victim];
        let from_spare = one.spare.min(&need);
        one.spare.sub(&from_spare);
        need.sub(&from_spare);
        for at in 0..one.lanes.len() {
            let lane = &mut self.lanes[self.tenants[victim].lanes[at] as usize];
            // The debt of one lane is not the others' to give.
            let left = &mut lane.left;
            let part = left.max(&ResourceVector::ZERO).min(&need).shared();
            *left = left.minus(&part);
            lane.given = lane.given.minus(&part);
            need.sub(&part);
        }
        let one = &mut self.tenants[victim];
        let lost = Each::of(shared);
        one.allocated = one.allocated.with(&lost, |had, lost| (had - lost).max(0.0));
        one.statistics.lost += 1;
        self.tenants[tenant].statistics.taken += 1;
        true
    }

    /// What may be taken from it: what it has left, as far as it was given it above its base.
    fn stealable(&self, tenant: usize) -> ResourceVector {
        let one = &self.tenants[tenant];
        let mut left = one.spare;
        for lane in &one.lanes {
            left.add(&self.lanes[*lane as usize].left);
        }
        let mut most = ResourceVector::ZERO;
        for resource in 0..SHARED {
            let above = one.allocated.0[resource] - one.shared_base.0[resource] * one.share;
            most.0[resource] = left.0[resource].min(above.max(0.0) as i32);
        }
        most
    }

    fn draw(&mut self, below: usize) -> usize {
        // xorshift (Marsaglia 2003): any choice will do, it need not be good.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        ((u64::from(self.random) * below as u64) >> 32) as usize
    }

    /// Saves the base that an idle tenant accrued since the last call. It comes to the same later, but so it is visible and survives a death.
    pub fn earn(&mut self, tenant: usize) {
        let one = &self.tenants[tenant];
        let idle = self.window.saturating_sub(one.earned.window);
        if idle > 0 && !one.active && !one.lanes.is_empty() {
            self.save_idle(tenant, idle, false);
        }
    }

    /// What others at work had of it meanwhile is not saved once more, however little is wanted when that is asked.
    fn save_idle(&mut self, tenant: usize, windows: u64, wakes: bool) {
        let saved = self.params.saved_windows.into();
        let entry = self.ledger.entry(tenant);
        let one = &mut self.tenants[tenant];
        let published = one.published;
        one.share = entry.shares.share(&mut one.published, published, BEGINNER);
        let worth = entry.idle(windows, one.earned.had);
        let accrual = Accrual::Idle(worth, wakes);
        one.save(entry, accrual, saved);
        one.counts_from(self.window, entry);
        // Limits of volumes hold as ever; the base pays their debt of shared resources.
        let base = one.shared_base.times(worth as f32);
        let mut pays = base.min(&Each([PLENTY as f32; COUNT])).vector();
        for lane in &one.lanes {
            let lane = &mut self.lanes[*lane as usize];
            lane.pay(&mut pays);
            if lane.limited {
                lane.fill(&ResourceVector::ZERO, windows, saved);
            }
        }
    }

    /// An idle tenant is back and has its base at once. After less than a whole idle window only a new one does: the others had this
    /// window's, and each short rest would be worth a window.
    pub(super) fn activate(&mut self, tenant: usize) {
        let one = &mut self.tenants[tenant];
        let is_new = !std::mem::replace(&mut one.is_known, true);
        let idle = self.window.saturating_sub(one.earned.window);
        if idle > 0 || is_new {
            self.save_idle(tenant, idle.max(1), true);
        }
        let entry = self.ledger.entry(tenant);
        let one = &mut self.tenants[tenant];
        one.active = true;
        one.allocated = Each::ZERO;
        one.spare = ResourceVector::ZERO;
        self.active.push(tenant as u32);
        self.publishes |= entry.shares.is_shared();
        if !self.awake {
            self.awake = true;
            self.ledger.wake(true);
        }
        one.spare = one.limit(entry);
        if one.lanes.len() == 1 {
            // No sibling to share with.
            let lane = &mut self.lanes[one.lanes[0] as usize];
            let part = one.spare.min(&lane.may());
            // Its debt stays.
            let left = &mut lane.left;
            lane.given = left.shared().plus(&part);
            *left = left.plus(&part);
            one.spare = ResourceVector::ZERO;
        }
    }
}

/// Whether there is some of everything that an I/O needs.
fn has_some(has: &ResourceVector, cost: &ResourceVector) -> bool {
    let mut both = has.0.iter().zip(&cost.0);
    both.all(|(has, cost)| *cost == 0 || *has > 0)
}
