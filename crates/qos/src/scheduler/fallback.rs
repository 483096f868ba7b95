//! Admits an I/O beyond its lane's allocation.
//!
//! Its budget must allow it. One source must cover the shared resources that its lane lacks; a
//! bursting tenant or the reserve may add to free amounts.

use super::Scheduler;
use super::accrual::Accrual;
use super::each::Each;
use super::state::{NOBODY, TenantShare};
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
            if self.lanes[lane].left.spend(cost) {
                return true;
            }
        }
        self.begin_borrowing(lane, cost) || self.begin_beyond(lane, tenant as usize, cost)
    }

    /// Begins an I/O while some of every resource is left. Shared resources must suffice, unless
    /// the I/O costs more than the lane's allocation of a whole window. Later windows pay.
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

    /// Takes what the I/O's lane has left, and the rest from other sources.
    fn begin_beyond(&mut self, lane: usize, tenant: usize, cost: &ResourceVector) -> bool {
        let mut short = *cost;
        short.sub(&self.lanes[lane].left.max(&ResourceVector::ZERO));
        let own = short.own();
        let one = &mut self.tenants[tenant];
        if !own.is_zero() {
            // Siblings' leftovers don't lift a volume's limit.
            let mut would = self.lanes[lane].used();
            would.add(&cost.own());
            if !self.lanes[lane].room.covers(&would.own()) || !one.spare.covers(&own) {
                return false;
            }
        }
        let shared = short.shared();
        let mut source = one.spare.spend(&shared);
        if !source {
            source = self.free.spend(&shared);
            if !source && self.is_below_base(tenant, &cost.own()) {
                // Free amounts of one resource combine with taken ones of another.
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

    /// Takes from the reserve. If only processor time is short and bases fit, the next window lends
    /// it.
    fn take_from_reserve(&mut self, tenant: usize, shared: &ResourceVector) -> bool {
        if self.reserve.spend(shared) {
            return true;
        }
        let mut others = *shared;
        let ns = std::mem::take(&mut others[Resource::Cpu]);
        let fits = self.bases_fit[usize::from(self.tenants[tenant].guaranteed)];
        let has = ns > 0 && fits && self.reserve.spend(&others);
        if has {
            self.overdrawn_ns = self.overdrawn_ns.saturating_add(ns);
        }
        has
    }

    /// Whether the tenant stays within its base with this I/O.
    fn is_below_base(&mut self, tenant: usize, own: &ResourceVector) -> bool {
        let allows = |one: &TenantShare, used: &ResourceVector| {
            let mut would = *used;
            would.add(own);
            one.entitlement.covers(&would.own())
        };
        // Use only grows in a window, so if an earlier sum was too much, don't add up again.
        let one = &self.tenants[tenant];
        if !allows(one, &one.found) {
            return false;
        }
        let used = self.used(tenant);
        let one = &mut self.tenants[tenant];
        one.found = used;
        allows(one, &used)
    }

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

    /// Takes allocation above the base from a random bursting tenant, or from the better of two.
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

    /// What the tenant has left above its base.
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
        // xorshift (Marsaglia 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        ((u64::from(self.random) * below as u64) >> 32) as usize
    }

    /// Saves an idle tenant's accrued base, so that it is visible and survives a crash.
    pub fn earn(&mut self, tenant: usize) {
        let one = &self.tenants[tenant];
        let idle = self.window.saturating_sub(one.earned.window);
        if idle > 0 && !one.active && !one.lanes.is_empty() {
            self.save_idle(tenant, idle, false);
        }
    }

    /// Saves idle windows, less the base that other reactors used.
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
        // The base pays lanes' debt of shared resources; limits of volumes still hold.
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

    /// Activates a tenant. If it is new or was idle for a window, it has its base at once.
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
            let lane = &mut self.lanes[one.lanes[0] as usize];
            let part = one.spare.min(&lane.may());
            let left = &mut lane.left;
            lane.given = left.shared().plus(&part);
            *left = left.plus(&part);
            one.spare = ResourceVector::ZERO;
        }
    }
}

fn has_some(has: &ResourceVector, cost: &ResourceVector) -> bool {
    let mut both = has.0.iter().zip(&cost.0);
    both.all(|(has, cost)| *cost == 0 || *has > 0)
}
