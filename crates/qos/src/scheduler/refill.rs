//! The refill at the end of a window: algorithm 1.
//!
//! The first pass settles use and sets entitlements aside. The second divides the rest in
//! proportion to use and waiting I/Os. Idle tenants cost nothing.

use super::Scheduler;
use super::accrual::Accrual;
use super::divide::divide;
use super::each::Each;
use super::state::{Lane, NOBODY, TenantShare};
use crate::ledger::{LedgerEntry, Published, WHOLE};
use crate::params::{BEGINNER, FORGET, LATE_WINDOWS, LINK_CARRIED, MOST_PUBLISHED, Params};
use crate::resources::{COUNT, PARTS, PLENTY, Resource, ResourceVector, SHARED};

/// The tenant's own resources, in the order of its credit.
pub(super) const OWN: [usize; 2] = [Resource::Ops as usize, Resource::Bytes as usize];

const TIMED: [usize; 3] = [
    Resource::Cpu as usize,
    Resource::DeviceRead as usize,
    Resource::DeviceWrite as usize,
];

/// Links have no measured delay, so no correction finds spare capacity. Unused allocation carries
/// over instead.
const LINKS: [usize; 2] = [Resource::LinkIn as usize, Resource::LinkOut as usize];

impl TenantShare {
    /// Returns use and waiting I/Os.
    #[inline]
    fn end_lanes(
        &mut self,
        lanes: &mut [Lane],
        is_shared: bool,
        passed: u64,
        saved: u64,
    ) -> (ResourceVector, ResourceVector) {
        self.found = ResourceVector::ZERO;
        let mut used = std::mem::take(&mut self.extra);
        let mut waiting = ResourceVector::ZERO;
        if self.only != NOBODY {
            let lane = &mut lanes[self.only as usize];
            used.add(&lane.end(passed, saved));
            waiting = lane.waiting;
            if is_shared {
                lane.demand = used;
                lane.demand.add(&waiting);
            }
        } else {
            for lane in &self.lanes {
                let lane = &mut lanes[*lane as usize];
                let own = lane.end(passed, saved);
                lane.demand = own.plus(&lane.debt());
                lane.demand.add(&lane.waiting);
                used.add(&own);
                waiting.add(&lane.waiting);
            }
        }
        (used, waiting)
    }

    /// Pays debt, then saves at most `saved` windows' accrual. The rest of the base becomes credit.
    #[inline]
    pub(super) fn save(&mut self, entry: &LedgerEntry, accrual: Accrual, saved: u64) {
        let wakes = matches!(accrual, Accrual::Idle(_, true));
        let is_shared = entry.shares.is_shared();
        for (at, (credit, own)) in entry.credit.iter().zip(OWN).enumerate() {
            let above = (self.burst.0[own] - self.base.0[own]).max(0);
            let [of_base, of_above] = &mut self.above.fractions;
            let (more, above) = accrual.of(above, self.share, &mut of_above[at]);
            let paid = match self.metered {
                true => more.min(self.above.debt[at]),
                false => credit.draw(more.min(self.above.debt[at])),
            };
            self.above.debt[at] -= paid;
            let sum = self.above.saved[at].saturating_add(more - paid);
            self.above.saved[at] = sum.min(above * saved).min(PLENTY as u64);
            let (more, base) = accrual.of(self.base.0[own], self.share, &mut of_base[at]);
            let most = (base * saved).min(PLENTY as u64);
            let paid = more.min(self.above.debt[at]);
            self.above.debt[at] -= paid;
            let sum = (self.entitlement.0[own] as u64).saturating_add(more - paid);
            let mut entitlement = sum.min(most);
            let mut left = sum - entitlement;
            if is_shared {
                // Base that one reactor doesn't use serves the tenant on others.
                let unused = &entry.unused[at];
                let most = if wakes {
                    most.max(self.base.0[own] as u64)
                } else {
                    most
                };
                entitlement += unused.draw(most.saturating_sub(entitlement));
                left = unused.put(left);
            }
            self.entitlement.0[own] = entitlement as i32;
            if !self.metered {
                credit.put(left);
            }
        }
    }

    /// The limit of its own resources for the new window.
    #[inline]
    pub(super) fn limit(&mut self, entry: &LedgerEntry) -> ResourceVector {
        let mut limit = self.entitlement.own();
        for (at, own) in OWN.into_iter().enumerate() {
            let above = self.above.saved[at];
            let more = match self.metered {
                true => above,
                false => entry.credit[at].draw(above),
            };
            self.above.drawn[at] = more;
            limit.0[own] = limit.0[own].saturating_add(more as i32);
        }
        self.above.of_credit = !self.metered;
        limit
    }

    /// Charges use to the entitlement first, then to the amount drawn for this window.
    #[inline]
    pub(super) fn settle(&mut self, entry: &LedgerEntry, used: &ResourceVector) {
        let mut above = [0u64; 2];
        let is_shared = entry.shares.is_shared();
        for (at, own) in OWN.into_iter().enumerate() {
            let entitlement = self.entitlement.0[own].min(used.0[own]);
            self.entitlement.0[own] -= entitlement;
            above[at] = (used.0[own] - entitlement) as u64;
            if is_shared {
                // Base that other reactors left unused pays first.
                above[at] -= entry.unused[at].draw(above[at]);
            }
            let drawn = std::mem::take(&mut self.above.drawn[at]);
            self.above.debt[at] += above[at].saturating_sub(drawn);
            self.above.saved[at] = self.above.saved[at].saturating_sub(above[at]);
            // Metered bursts drew no credit.
            if self.above.of_credit {
                entry.credit[at].put(drawn.saturating_sub(above[at]));
            }
        }
        self.statistics.used_parts += used.0[OWN[0]] as u64;
        self.statistics.used_bytes += used.0[OWN[1]] as u64;
        if !self.above.of_credit {
            self.statistics.metered_parts += above[0];
            self.statistics.metered_bytes += above[1];
        }
        self.bursts = above != [0; 2];
        self.statistics.burst_windows += u64::from(self.bursts);
        self.statistics.active_windows += u64::from(used.0[OWN[0]] > 0);
        (self.statistics.used, self.statistics.above) = (*used, above);
    }

    /// Demand in bases: use, and the base or limit of each waiting volume. Own bases are separate.
    fn published(&self, lanes: &[Lane], used: &ResourceVector, params: &Params) -> Published {
        let headroom = 1.0 + params.headroom;
        let of_base = |amount: i32, own: usize| amount as f32 / self.base.0[own].max(1) as f32;
        let most = |of: &dyn Fn(usize) -> f32| OWN.into_iter().map(of).fold(0f32, f32::max);
        let mut demand = most(&|own| of_base(used.0[own], own));
        let mut promised = 0f32;
        for lane in &self.lanes {
            let lane = &lanes[*lane as usize];
            promised += most(&|own| {
                let wants = lane.demand.0[own] as f32 * headroom;
                of_base(lane.base.0[own].min(wants as i32), own)
            });
            if lane.waiters > 0 {
                let limits = OWN.map(|own| of_base(lane.limit.0[own], own));
                demand += limits.into_iter().fold(1f32, f32::min);
            }
        }
        Published {
            demand: published(demand - promised, MOST_PUBLISHED),
            promised: published(promised, MOST_PUBLISHED),
        }
    }
}

fn published(parts: f32, most: f32) -> u64 {
    (parts.clamp(0.0, most) * WHOLE as f32) as u64
}

impl Scheduler {
    /// Ends `passed` windows and begins the next. Makes up for at most [`LATE_WINDOWS`] in which it
    /// was awake.
    pub fn refill(&mut self, passed: u64, slept: u64) {
        let passed = passed.max(1);
        self.window += passed;
        let late = passed.saturating_sub(slept).max(1);
        let late = late.min(LATE_WINDOWS);
        let sums = self.settle_all(passed, late);
        self.any_bursts = sums.bursts;
        self.publishes = sums.publishes;
        let late = if sums.busy { late as f32 } else { 1.0 };
        let (each, scale, left) = self.shares(&sums, late);
        self.give_all(&each, &scale, left, late);
        let awake = !self.active.is_empty();
        if awake != self.awake {
            self.awake = awake;
            match awake {
                true => self.ledger.wake(true),
                false => self.sleep(),
            }
        }
    }

    fn settle_all(&mut self, passed: u64, late: u64) -> Sums {
        let Self {
            params,
            active,
            tenants,
            lanes,
            ledger,
            estimator,
            ..
        } = self;
        let mut sums = Sums::default();
        let keep = params.keep.powi((passed - late).min(64) as i32 + 1);
        let weight = params.weight_waiting;
        let times = *estimator.factors();
        let headroom = 1.0 + params.headroom;
        let saved = late - 1 + u64::from(params.saved_windows);
        for &tenant in &*active {
            let one = &mut tenants[tenant as usize];
            let entry = ledger.entry(tenant as usize);
            let is_shared = entry.shares.is_shared();
            let (used, waiting) = one.end_lanes(lanes, is_shared, passed, saved);
            one.settle(entry, &used);
            one.statistics.passed = passed;
            one.statistics.waiting = (waiting.0[OWN[0]].max(0) / PARTS) as u64;
            let ns = TIMED.map(|at| used.0[at].max(0));
            let corrected = TIMED.map(|at| (used.0[at].max(0) as f32 * times[at]) as u64);
            let costs = [ns.iter().map(|ns| *ns as u64).sum(), corrected.iter().sum()];
            one.statistics.costs = costs;
            one.statistics.cost_ns += costs[0];
            one.statistics.corrected_ns += costs[1];
            sums.bursts |= one.bursts;
            one.rests = used.0[OWN[0]] | waiting.0[OWN[0]] == 0;
            sums.busy |= !one.rests;
            one.share = match is_shared {
                true => {
                    let published = one.published(lanes, &used, params);
                    let share = (entry.shares).share(&mut one.published, published, BEGINNER);
                    entry.have(share, passed);
                    share
                }
                false => 1.0,
            };
            sums.publishes |= is_shared && one.published != Published::default();
            one.save(entry, Accrual::Work(passed), saved);
            let late = if one.rests { 1 } else { late };
            let base = one.shared_base.times(one.share * late as f32);
            let (uses, waits) = (Each::shared(&used), Each::shared(&waiting));
            // Only unused allocation decays. In the paper, used allocation decays too, so a steady
            // load waits now and then.
            let had = one.allocated;
            let fades = had.times(keep).max(&uses.times(headroom)).min(&base);
            let mut entitlement = base;
            for at in 0..COUNT {
                let whole = (waits.0[at] > 0.0) | (had.0[at] > base.0[at]);
                entitlement.0[at] = if whole { base.0[at] } else { fades.0[at] };
            }
            one.demand = uses.plus(&waits.times(weight));
            one.allocated = entitlement;
            sums.used = sums.used.plus(&uses);
            sums.demand = sums.demand.plus(&one.demand);
            sums.entitlement = sums.entitlement.plus(&entitlement);
            if one.guaranteed {
                sums.guaranteed = sums.guaranteed.plus(&entitlement);
            }
        }
        sums
    }

    /// Returns the remainder per unit of demand, the factors that shrink plain and guaranteed
    /// entitlements, and the remainder.
    fn shares(&mut self, sums: &Sums, late: f32) -> (Each, [Each; 2], Each) {
        let mut whole = self.whole;
        whole[TIMED[0]] *= self.processors;
        let awake = self.ledger.awake() as f32;
        // Bases fit the node: each reactor gets its entitlements, and an equal part of the rest.
        for resource in 1..SHARED {
            let entitlement = sums.entitlement.0[resource] / late;
            let published = &mut self.published_entitlements[resource];
            let all = self
                .ledger
                .publish_entitlement(resource, published, entitlement as u64)
                as f32;
            let whole = &mut whole[resource];
            *whole = match all > *whole {
                true => *whole * entitlement / all,
                false => entitlement + (*whole - all) / awake,
            };
        }
        for whole in &mut whole {
            *whole = (*whole * late).min(PLENTY as f32);
        }
        let mut parts = [0f32; SHARED];
        for resource in 0..SHARED {
            parts[resource] = sums.used.0[resource] / whole[resource].max(1.0);
        }
        self.estimator.end_window(&self.params, &parts);
        let most = self.params.reserve_tenants as f32;
        let (mut left, mut each) = (Each::ZERO, Each::ZERO);
        let mut scale = [Each([1.0; COUNT]); 2];
        for resource in 0..SHARED {
            // Higher costs act as less capacity.
            let whole = whole[resource] / self.estimator.factors()[resource];
            let entitlement = sums.entitlement.0[resource];
            let reserve = (whole * self.params.reserve_most).min(self.largest.0[resource] * most);
            // The reserve takes nothing from bases.
            let reserve = reserve.min((whole - entitlement).max(0.0));
            // Unused reserve carries over.
            let mut carried = self.reserve.0[resource] as f32;
            self.reserve.0[resource] = reserve as i32;
            let first = sums.guaranteed.0[resource];
            if LINKS.contains(&resource) {
                carried += self.lost.0[resource].min(whole * LINK_CARRIED);
            }
            let mut overdrawn = 0.0;
            if resource == Resource::Cpu as usize {
                self.bases_fit = [entitlement <= whole, first <= whole];
                overdrawn = std::mem::take(&mut self.overdrawn_ns) as f32;
            }
            left.0[resource] = whole - reserve - entitlement + carried - overdrawn;
            if entitlement > whole {
                // Guaranteed bases come first. Others keep a part, so that none stops.
                let rest = entitlement - first;
                let part = rest.min(whole * self.params.reserve_most);
                let had = first.min(whole - part);
                scale[1].0[resource] = had / first.max(1.0);
                scale[0].0[resource] = (whole - had - overdrawn).max(part) / rest.max(1.0);
            }
            left.0[resource] = left.0[resource].max(0.0);
            if sums.demand.0[resource] > 0.0 {
                each.0[resource] = left.0[resource] / sums.demand.0[resource];
            }
        }
        (each, scale, left)
    }

    fn give_all(&mut self, each: &Each, scale: &[Each; 2], mut left: Each, late: f32) {
        let Self {
            params,
            active,
            tenants,
            lanes,
            ledger,
            bursting,
            lost,
            window,
            ..
        } = self;
        let plenty = Each([PLENTY as f32; COUNT]);
        let most = late - 1.0 + params.saved_windows as f32;
        bursting.clear();
        *lost = Each::ZERO;
        let mut at = 0;
        while let Some(&tenant) = active.get(at) {
            let one = &mut tenants[tenant as usize];
            let base = one.shared_base.times(one.share * late);
            // Savings may exceed the burst limit per window; limits of own resources still hold.
            let burst = one.shared_burst.times(one.share * most).min(&plenty);
            let scale = &scale[usize::from(one.guaranteed)];
            let entitlement = one
                .allocated
                .with(scale, |entitlement, scale| entitlement * scale);
            let more = one.demand.with(each, |demand, each| demand * each);
            let sum = entitlement.plus(&more).min(&burst);
            let taken = sum
                .with(&entitlement, |sum, entitlement| sum - entitlement)
                .max(&Each::ZERO);
            left = left.with(&taken, |left, taken| left - taken);
            one.allocated = sum;
            if one.rests && !sum.exceeds(&base.times(FORGET)) {
                one.active = false;
                one.counts_from(*window, ledger.entry(tenant as usize));
                ledger.rest(tenant as usize, &mut one.published);
                (one.spare, one.whole) = (ResourceVector::ZERO, ResourceVector::ZERO);
                one.statistics.given = ResourceVector::ZERO;
                for lane in &one.lanes {
                    let _ = lanes[*lane as usize].begin(&ResourceVector::ZERO);
                }
                active.swap_remove(at);
                continue;
            }
            at += 1;
            if sum.exceeds(&base) {
                bursting.push(tenant);
            }
            // Own and shared resources are disjoint.
            let given = sum.vector().plus(&one.limit(ledger.entry(tenant as usize)));
            one.whole = given;
            // Reports the allocation without the part that makes up for earlier windows.
            one.statistics.given = given.min(&one.burst);
            if one.only == NOBODY {
                one.spare = divide(&given, &one.lanes, lanes, params, *window, late, lost);
            } else {
                let lane = &mut lanes[one.only as usize];
                let part = match lane.limited {
                    true => given.min(&lane.may()),
                    false => given,
                };
                *lost = lost.plus(&lane.begin(&part));
                one.spare = ResourceVector::ZERO;
            }
        }
        self.free = left.max(&Each::ZERO).vector();
        self.wants_processor = false;
    }
}

#[derive(Default)]
struct Sums {
    used: Each,
    demand: Each,
    entitlement: Each,
    guaranteed: Each,
    bursts: bool,
    publishes: bool,
    busy: bool,
}

impl Lane {
    #[inline]
    fn end(&mut self, passed: u64, saved: u64) -> ResourceVector {
        let own = self.used();
        if self.limited {
            self.fill(&own, passed, saved);
        }
        // Debt remains. While an I/O waits, at most one window's shared resources are saved.
        let most = match self.waiters {
            0 => ResourceVector::ZERO,
            _ => self.given.shared(),
        };
        self.left = self.left.min(&most);
        self.beyond = ResourceVector::ZERO;
        own
    }

    /// Refills own base and limit, saved for at most `saved` windows.
    #[inline]
    pub(super) fn fill(&mut self, used: &ResourceVector, passed: u64, saved: u64) {
        self.earn(used, passed, saved);
        for resource in OWN {
            let limit = i64::from(self.limit.0[resource]);
            let [more, most] = [passed, saved].map(|windows| {
                let windows = i64::try_from(windows).unwrap_or(i64::MAX);
                limit.saturating_mul(windows).min(PLENTY.into())
            });
            let room = i64::from(self.room.0[resource]) - i64::from(used.0[resource]) + more;
            self.room.0[resource] = room.min(most).clamp((-PLENTY).into(), PLENTY.into()) as i32;
        }
    }
}
