//! A tenant's part of a window, divided among its lanes on a reactor.
//!
//! **Design.** First what is due to volumes' own bases: each volume has an account of it. Then equal parts; what one does not want is the
//! others'. An I/O that is larger than a lane's part begins as soon as something is left of the part, and later windows pay for it.
//! **Not here:** the parts of tenants ([`super::turn`]), of reactors ([`crate::board`]).

use super::each::Each;
use super::state::Lane;
use super::turn::OWN;
use crate::params::Params;
use crate::units::{COUNT, PLENTY, SHARED, Units};

/// Among the tenant's lanes: to each what is due to it, and what it wants as far as that is fair; to those that want more the rest.
/// What nobody wants is told, and any of them may have it.
pub(super) fn divide(
    given: &Units,
    own: &[u32],
    lanes: &mut [Lane],
    params: &Params,
    window: u64,
    late: f32,
    lost: &mut Each,
) -> Units {
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
    // There may be less than is promised: each has its part.
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
    let mut rest = Units::ZERO;
    for resource in 0..COUNT {
        // Of nothing given, nothing is left, whatever is promised.
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
        let mut part = Units::ZERO;
        for resource in 0..COUNT {
            let fair = first(lane, resource) + fair.0[resource];
            let want = lane.wants(resource, headroom);
            part.0[resource] = if want > fair {
                fair.saturating_add(rest.0[resource])
            } else {
                want
            };
            // What can't be divided any more is had by turns.
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

/// What is due to each lane, as far as it wants that. Says the sum, which may be more than there is.
fn promise(own: &[u32], lanes: &mut [Lane], headroom: f32, late: f32) -> Units {
    let mut sum = Units::ZERO;
    for lane in own {
        let lane = &mut lanes[*lane as usize];
        lane.promise = lane.due(headroom, late);
        lane.promise_shared(headroom);
        sum.add(&lane.promise);
    }
    sum
}

impl Lane {
    /// So much would it use in a window.
    fn wants(&self, resource: usize, headroom: f32) -> i32 {
        (self.demand.0[resource] as f32 * headroom).min(PLENTY as f32) as i32
    }

    /// What is due to it of its volume's own base, as far as it wants that.
    fn due(&self, headroom: f32, late: f32) -> Units {
        let mut due = Units::ZERO;
        if self.limited && !self.demand.is_zero() {
            for (at, own) in OWN.into_iter().enumerate() {
                let brings = (self.base.0[own] as f32 * late).min(PLENTY as f32) as i32;
                let most = brings.saturating_add(self.owed().0[own]);
                due.0[own] = self.due[at].min(2 * most).min(self.wants(own, headroom));
            }
        }
        due
    }

    /// With a part of what it wants of its own, it has the same part of what it wants of everything.
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

    /// Windows end in which so much was used: so much of its own base is due then. As of a tenant's, some windows' are saved for loads
    /// that are not even; besides, an I/O that waits, and the next one until that is served.
    #[inline]
    pub(super) fn earn(&mut self, used: &Units, passed: u64, saved: u64) {
        for (at, own) in OWN.into_iter().enumerate() {
            let base = self.base.0[own] as u64;
            let more = base.saturating_mul(passed);
            let due = i64::from(self.due[at]) - i64::from(used.0[own]);
            let most = base.saturating_mul(saved);
            let due = (due.max(0) as u64).saturating_add(more).min(most);
            self.due[at] = due.min(PLENTY as u64) as i32;
        }
    }
}
