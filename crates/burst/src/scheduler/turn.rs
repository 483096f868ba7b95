//! The end of a window: Algorithm 1.
//!
//! **Design.** Two passes over the active tenants. The first settles what was used and sets aside what each is owed; the
//! second gives what is left in proportion to what was used and what waits. Idle tenants are not looked at.
//! **Not here:** when a window ends.

use super::Scheduler;
use super::state::{Lane, Tenant};
use crate::board::{Entry, WHOLE};
use crate::params::{Params, Policy};
use crate::units::{COUNT, PARTS, PLENTY, Resource, SHARED, Units};

/// The tenant's own resources, in the order of its credit.
const OWN: [usize; 2] = [Resource::Ops as usize, Resource::Bytes as usize];

impl Tenant {
    /// So many windows' base: saved for the next windows, and what is above that is credit.
    pub(super) fn earn(&mut self, entry: &Entry, windows: u64, saved: u32) {
        self.save(entry, windows, saved, &Units::ZERO);
    }

    fn save(&mut self, entry: &Entry, windows: u64, saved: u32, wanted: &Units) {
        for (credit, own) in entry.credit.iter().zip(OWN) {
            let base = (self.base.0[own] as f32 * self.share) as u64;
            let most = (base * u64::from(saved))
                .max(wanted.0[own] as u64)
                .min(PLENTY as u64);
            let sum = self.due.0[own] as u64 + base.saturating_mul(windows);
            let due = sum.min(most);
            self.due.0[own] = due as i32;
            if !self.metered {
                credit.put(sum - due);
            }
        }
    }

    /// What it may use of its own in the window that begins.
    pub(super) fn limit(&mut self, entry: &Entry, policy: Policy) -> Units {
        let mut limit = self.due.own();
        for (at, own) in OWN.into_iter().enumerate() {
            let above = (self.burst.0[own] - self.base.0[own]).max(0);
            let above = (above as f32 * self.share) as u64;
            let more = match policy {
                Policy::Base => 0,
                _ if self.metered => above,
                _ => entry.credit[at].draw(above),
            };
            self.drawn[at] = more;
            limit.0[own] = limit.0[own].saturating_add(more as i32);
        }
        limit
    }

    /// What was used in the window that ended is paid: first of what was due, then of what was drawn.
    fn settle(&mut self, entry: &Entry, used: &Units) {
        let mut above = [0u64; 2];
        for (at, own) in OWN.into_iter().enumerate() {
            let due = self.due.0[own].min(used.0[own]);
            self.due.0[own] -= due;
            above[at] = (used.0[own] - due) as u64;
            let drawn = std::mem::take(&mut self.drawn[at]);
            if !self.metered {
                entry.credit[at].put(drawn.saturating_sub(above[at]));
            }
        }
        self.seen.used_parts += used.0[OWN[0]] as u64;
        self.seen.used_bytes += used.0[OWN[1]] as u64;
        if self.metered {
            self.seen.metered_parts += above[0];
            self.seen.metered_bytes += above[1];
        }
        self.seen.burst_windows += u64::from(above != [0; 2]);
        self.seen.active_windows += u64::from(used.0[OWN[0]] > 0);
        self.seen.used = *used;
    }

    /// Its demand as parts of its base.
    fn told(&self, used: &Units, waiting: &Units) -> u64 {
        let mut most = 0f32;
        for own in OWN {
            let demand = used.0[own] as f32 + waiting.0[own] as f32;
            most = most.max(demand / (self.base.0[own].max(1) as f32));
        }
        // A queue may be long, but no demand is a thousand times a base.
        (most.min(1000.0) * WHOLE as f32) as u64
    }
}

impl Scheduler {
    /// A window has ended, and the next begins: the next but `passed - 1`, where a reactor was late or slept. What it did
    /// not see of others' use of the node is not made up for; bases are, as far as they can be saved.
    pub fn turn(&mut self, passed: u64) {
        let passed = passed.max(1);
        self.window += passed;
        let policy = self.params.policy;
        let mut used_sum = [0f32; SHARED];
        let mut demand_sum = [0f32; SHARED];
        let mut owed = [0f32; SHARED];
        let mut largest = [0f32; SHARED];
        for &tenant in &self.active {
            let one = &mut self.tenants[tenant as usize];
            let entry = self.board.entry(tenant as usize);
            let mut used = std::mem::take(&mut one.extra);
            let (mut waiting, mut wanted) = (Units::ZERO, Units::ZERO);
            for lane in &one.lanes {
                let lane = &mut self.lanes[*lane as usize];
                lane.end(&self.params, &mut used, &mut waiting, &mut wanted);
            }
            one.settle(entry, &used);
            let told = one.told(&used, &waiting);
            one.share = entry.share(one.demand_told, told);
            one.demand_told = told;
            one.save(entry, passed, self.params.saved_windows, &wanted);
            for resource in 0..SHARED {
                let base = one.base.0[resource] as f32 * one.share;
                let waits = waiting.0[resource] as f32;
                let demand = used.0[resource] as f32 + waits * self.params.weight_waiting;
                let had = &mut one.allocated[resource];
                *had = if waits > 0.0 || *had > base {
                    base
                } else {
                    // Only what is not used fades: as printed, a steady tenant waits every few windows.
                    let uses = used.0[resource] as f32 * (1.0 + self.params.headroom);
                    (*had * self.params.keep).max(uses).min(base)
                };
                one.demand[resource] = demand;
                used_sum[resource] += used.0[resource] as f32;
                demand_sum[resource] += demand;
                owed[resource] += *had;
                largest[resource] = largest[resource].max(base);
            }
        }
        let mut whole = self.whole;
        let awake = self.board.awake() as f32;
        for whole in &mut whole[1..] {
            *whole /= awake;
        }
        let mut parts = [0f32; SHARED];
        for resource in 0..SHARED {
            parts[resource] = used_sum[resource] / whole[resource].max(1.0);
        }
        self.estimator.turn(&self.params, &parts);
        let most = self.params.reserve_tenants as f32;
        let mut left = [0f32; SHARED];
        let mut each = [0f32; SHARED];
        let mut scale = [1f32; SHARED];
        for resource in 0..SHARED {
            // Costs that are taken for more are the same as having less.
            let whole = whole[resource] / self.estimator.factors()[resource];
            let reserve = (whole * self.params.reserve_most).min(largest[resource] * most);
            // It is not taken from bases.
            let reserve = reserve.min((whole - owed[resource]).max(0.0));
            self.reserve.0[resource] = reserve as i32;
            left[resource] = whole - reserve - owed[resource];
            if left[resource] < 0.0 {
                // More was promised than there is.
                scale[resource] = whole / owed[resource];
                left[resource] = 0.0;
            }
            if demand_sum[resource] > 0.0 {
                each[resource] = left[resource] / demand_sum[resource];
            }
        }
        self.bursting.clear();
        let mut at = 0;
        while let Some(&tenant) = self.active.get(at) {
            let one = &mut self.tenants[tenant as usize];
            let mut bursts = false;
            let mut idle = one.demand_told == 0;
            let mut given = Units::ZERO;
            for resource in 0..SHARED {
                let base = one.base.0[resource] as f32 * one.share;
                let burst = one.burst.0[resource] as f32 * one.share;
                let owed = one.allocated[resource] * scale[resource];
                let more = one.demand[resource] * each[resource];
                let sum = (owed + more).min(burst);
                left[resource] -= (sum - owed).max(0.0);
                one.allocated[resource] = sum;
                bursts |= sum > base;
                idle &= sum <= base * self.params.forget;
                given.0[resource] = sum as i32;
            }
            if idle {
                one.active = false;
                one.last = self.window;
                one.spare = Units::ZERO;
                for lane in &one.lanes {
                    self.lanes[*lane as usize].begin(Units::ZERO);
                }
                self.active.swap_remove(at);
                continue;
            }
            at += 1;
            if policy != Policy::Burst {
                given = Units::PLENTY.shared();
            } else if bursts {
                self.bursting.push(tenant);
            }
            let entry = self.board.entry(tenant as usize);
            given.add(&one.limit(entry, policy));
            one.seen.given = given;
            one.spare = divide(&given, &one.lanes, &mut self.lanes, &self.params);
        }
        for (free, left) in self.free.0.iter_mut().zip(left) {
            *free = left.max(0.0) as i32;
        }
        let awake = !self.active.is_empty();
        if awake != self.awake {
            self.awake = awake;
            self.board.wake(awake);
        }
    }
}

impl Lane {
    /// A window ends; what it was goes to the sums.
    #[inline]
    fn end(&mut self, params: &Params, used: &mut Units, waiting: &mut Units, wanted: &mut Units) {
        let own = self.used();
        used.add(&own);
        waiting.add(&self.waiting);
        if self.waiting.is_zero() {
            self.wanted = Units::ZERO;
        }
        for (wanted, own) in wanted.0.iter_mut().zip(&self.wanted.0) {
            *wanted = (*wanted).max(*own);
        }
        if self.is_limited() {
            for resource in OWN {
                let limit = self.limit.0[resource];
                let most = limit
                    .saturating_mul(params.saved_windows as i32)
                    .max(self.wanted.0[resource]);
                let room = self.room.0[resource] - own.0[resource];
                self.room.0[resource] = room.max(0).saturating_add(limit).min(most);
            }
        }
        self.demand = own;
        self.demand.add(&self.waiting);
        // What is owed stays. While something waits, what is left is saved, at most what one window gave: the I/O that
        // waits keeps those behind it from using it.
        let most = if self.wanted.is_zero() {
            Units::ZERO
        } else {
            self.given
        };
        self.left = self.left.min(&most).shared();
        self.beyond = Units::ZERO;
    }

    /// A window begins, with so much and what was saved.
    #[inline]
    fn begin(&mut self, given: Units) {
        let saved = self.left;
        self.left = given;
        for (left, saved) in self.left.0.iter_mut().zip(&saved.0) {
            *left = left.saturating_add((*saved).min(*left));
        }
        self.given = self.left;
    }
}

/// Among the tenant's lanes: to each what it wants as far as that is fair; to those that want more the rest. What nobody
/// wants is told, and any of them may have it.
fn divide(given: &Units, own: &[u32], lanes: &mut [Lane], params: &Params) -> Units {
    if let [lane] = own {
        let lane = &mut lanes[*lane as usize];
        let part = given.min(&lane.room);
        lane.begin(part);
        return Units::ZERO;
    }
    let mut spare = *given;
    let mut parts = 0;
    let mut promised = Units::ZERO;
    for lane in own {
        let lane = &lanes[*lane as usize];
        parts += i32::from(!lane.demand.is_zero());
        promised.add(&lane.base);
    }
    let mut fair = *given;
    fair.sub(&promised);
    let mut largest = Units::ZERO;
    largest[Resource::Ops] = PARTS;
    for lane in own {
        for (largest, wanted) in largest.0.iter_mut().zip(&lanes[*lane as usize].wanted.0) {
            *largest = (*largest).max(*wanted);
        }
    }
    for fair in &mut fair.0 {
        *fair /= parts.max(1);
    }
    // What is less than an I/O for each is for whoever comes first.
    let mut whole = [false; COUNT];
    for resource in OWN {
        whole[resource] = fair.0[resource] < largest.0[resource];
    }
    let want = |lane: &Lane, resource: usize| {
        let want = lane.demand.0[resource] as f32 * (1.0 + params.headroom);
        let want = want.min(PLENTY as f32) as i32;
        if whole[resource] { 0 } else { want }
    };
    let mut hungry = [0i32; COUNT];
    for lane in own {
        let lane = &lanes[*lane as usize];
        for resource in 0..COUNT {
            let fair = lane.base.0[resource] + fair.0[resource];
            let want = want(lane, resource);
            spare.0[resource] -= want.min(fair);
            hungry[resource] += i32::from(want > fair);
        }
    }
    let mut rest = Units::ZERO;
    for resource in 0..COUNT {
        // Of nothing given, nothing is left, whatever bases say.
        let left = spare.0[resource].max(0);
        if hungry[resource] > 0 {
            rest.0[resource] = left / hungry[resource];
            spare.0[resource] = left % hungry[resource];
        } else {
            spare.0[resource] = left;
        }
    }
    for lane in own {
        let lane = &mut lanes[*lane as usize];
        let mut part = Units::ZERO;
        for resource in 0..COUNT {
            let fair = lane.base.0[resource] + fair.0[resource];
            let want = want(lane, resource);
            part.0[resource] = if want > fair {
                fair.saturating_add(rest.0[resource])
            } else {
                want
            };
        }
        let within = part.min(&lane.room);
        let mut cut = part;
        cut.sub(&within);
        spare.add(&cut);
        lane.begin(within);
    }
    spare
}
