//! A tenant's part of a window, divided among its lanes on a reactor.
//!
//! **Design.** What a lane has for itself first, then equal parts; what one does not want is the others'. **Not here:** the parts of
//! tenants ([`super::turn`]), of reactors ([`crate::board`]).

use super::state::Lane;
use super::turn::OWN;
use crate::params::Params;
use crate::units::{COUNT, PARTS, PLENTY, Resource, Units};

/// Among the tenant's lanes: to each what it wants as far as that is fair; to those that want more the rest. What nobody
/// wants is told, and any of them may have it.
pub(super) fn divide(given: &Units, own: &[u32], lanes: &mut [Lane], params: &Params) -> Units {
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
    let mut least = Units::ZERO;
    least[Resource::Ops] = PARTS;
    let mut largest = least;
    for lane in own {
        for (largest, wanted) in largest.0.iter_mut().zip(&lanes[*lane as usize].wanted.0) {
            *largest = (*largest).max(*wanted);
        }
    }
    for fair in &mut fair.0 {
        *fair /= parts.max(1);
    }
    // What is less than an I/O for each is for whoever comes first: but for what a volume has for itself.
    let mut whole = [false; COUNT];
    for resource in OWN {
        whole[resource] = fair.0[resource] < largest.0[resource];
        if whole[resource] {
            fair.0[resource] = 0;
        }
    }
    // Where more is promised than there is, each has its part.
    let base = |lane: &Lane, resource: usize| {
        let (base, promised) = (lane.base.0[resource], promised.0[resource]);
        match given.0[resource] {
            given if promised > given => {
                (i64::from(base) * i64::from(given.max(0)) / i64::from(promised)) as i32
            }
            _ => base,
        }
    };
    let want = |lane: &Lane, resource: usize| {
        let want = lane.demand.0[resource] as f32 * (1.0 + params.headroom);
        let want = want.min(PLENTY as f32) as i32;
        let one = match OWN.contains(&resource) {
            true => lane.wanted.0[resource].max(least.0[resource]),
            false => 0,
        };
        if whole[resource] && base(lane, resource) < one {
            0
        } else {
            want
        }
    };
    let mut hungry = [0i32; COUNT];
    for lane in own {
        let lane = &lanes[*lane as usize];
        for resource in 0..COUNT {
            let fair = base(lane, resource) + fair.0[resource];
            let want = want(lane, resource);
            spare.0[resource] -= want.min(fair);
            hungry[resource] += i32::from(want > fair && !whole[resource]);
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
            let fair = base(lane, resource) + fair.0[resource];
            let want = want(lane, resource);
            part.0[resource] = if want > fair {
                fair.saturating_add(rest.0[resource])
            } else {
                want
            };
        }
        let within = part.min(&lane.may());
        let mut cut = part;
        cut.sub(&within);
        spare.add(&cut);
        lane.begin(&within);
    }
    spare
}
