//! Divides a tenant's allocation among its lanes on a reactor.
//!
//! Own bases of volumes come first, then equal parts; unwanted parts go to other lanes. A large I/O
//! begins while anything is left of its part, and later windows pay.

use super::each::Each;
use super::refill::OWN;
use super::state::Lane;
use crate::params::Params;
use crate::resources::{COUNT, PLENTY, ResourceVector, SHARED};

/// Divides an allocation; returns the rest that no lane wants.
pub(super) fn divide(
    given: &ResourceVector,
    own: &[u32],
    lanes: &mut [Lane],
    params: &Params,
    window: u64,
    late: f32,
    lost: &mut Each,
) -> ResourceVector {
    let headroom = 1.0 + params.headroom;
    let promised = promise(own, lanes, headroom, late);
    let mut spare = *given;
    let mut parts = 0;
    for lane in own {
        parts += i32::from(!lanes[*lane as usize].demand.is_zero());
    }
    let mut fair = *given;
    fair.sub(&promised);
    for fair in &mut fair.0 {
        *fair /= parts.max(1);
    }
    // An allocation below the promises is divided in proportion.
    let first = |lane: &Lane, resource: usize| {
        let (first, promised) = (lane.promise.0[resource], promised.0[resource]);
        match given.0[resource] {
            given if promised > given => {
                (i64::from(first) * i64::from(given.max(0)) / i64::from(promised)) as i32
            }
            _ => first,
        }
    };
    let mut hungry = [0i32; COUNT];
    for lane in own {
        let lane = &lanes[*lane as usize];
        for resource in 0..COUNT {
            let fair = first(lane, resource) + fair.0[resource];
            let want = lane.wants(resource, headroom);
            spare.0[resource] -= want.min(fair);
            hungry[resource] += i32::from(want > fair);
        }
    }
    let mut rest = ResourceVector::ZERO;
    for resource in 0..COUNT {
        // Promises may exceed the allocation.
        let left = spare.0[resource].max(0);
        if hungry[resource] > 0 {
            rest.0[resource] = left / hungry[resource];
            spare.0[resource] = left % hungry[resource];
        } else {
            spare.0[resource] = left;
        }
    }
    for (at, lane) in (0..).zip(own) {
        let lane = &mut lanes[*lane as usize];
        let mut part = ResourceVector::ZERO;
        for resource in 0..COUNT {
            let fair = first(lane, resource) + fair.0[resource];
            let want = lane.wants(resource, headroom);
            part.0[resource] = if want > fair {
                fair.saturating_add(rest.0[resource])
            } else {
                want
            };
            // An indivisible remainder goes to each lane in turn.
            if hungry[resource] > 0 && at == window % own.len() as u64 {
                part.0[resource] += std::mem::take(&mut spare.0[resource]);
            }
        }
        let within = part.min(&lane.may());
        let mut cut = part;
        cut.sub(&within);
        spare.add(&cut);
        *lost = lost.plus(&lane.begin(&within));
    }
    spare
}

/// Returns the sum of the promises, which may exceed the allocation.
fn promise(own: &[u32], lanes: &mut [Lane], headroom: f32, late: f32) -> ResourceVector {
    let mut sum = ResourceVector::ZERO;
    for lane in own {
        let lane = &mut lanes[*lane as usize];
        lane.promise = lane.entitlement(headroom, late);
        lane.promise_shared(headroom);
        sum.add(&lane.promise);
    }
    sum
}

impl Lane {
    fn wants(&self, resource: usize, headroom: f32) -> i32 {
        (self.demand.0[resource] as f32 * headroom).min(PLENTY as f32) as i32
    }

    /// The wanted part of its volume's own base.
    fn entitlement(&self, headroom: f32, late: f32) -> ResourceVector {
        let mut entitlement = ResourceVector::ZERO;
        if self.limited && !self.demand.is_zero() {
            for (at, own) in OWN.into_iter().enumerate() {
                let accrual = (self.base.0[own] as f32 * late).min(PLENTY as f32) as i32;
                let most = accrual.saturating_add(self.debt().0[own]);
                entitlement.0[own] = self.entitlement[at]
                    .min(2 * most)
                    .min(self.wants(own, headroom));
            }
        }
        entitlement
    }

    /// Promises the fraction of the node's resources that the lane was promised of its budget.
    fn promise_shared(&mut self, headroom: f32) {
        let part = |own: usize| match self.demand.0[own] {
            0 => 1.0,
            _ => self.promise.0[own] as f32 / self.wants(own, headroom) as f32,
        };
        let part = OWN.into_iter().map(part).fold(1f32, f32::min);
        for resource in 0..SHARED {
            self.promise.0[resource] = (self.wants(resource, headroom) as f32 * part) as i32;
        }
    }

    /// Accrues its volume's own base, saved for at most `saved` windows.
    #[inline]
    pub(super) fn earn(&mut self, used: &ResourceVector, passed: u64, saved: u64) {
        for (at, own) in OWN.into_iter().enumerate() {
            let base = self.base.0[own] as u64;
            let more = base.saturating_mul(passed);
            let entitlement = i64::from(self.entitlement[at]) - i64::from(used.0[own]);
            let most = base.saturating_mul(saved);
            let entitlement = (entitlement.max(0) as u64).saturating_add(more).min(most);
            self.entitlement[at] = entitlement.min(PLENTY as u64) as i32;
        }
    }
}
