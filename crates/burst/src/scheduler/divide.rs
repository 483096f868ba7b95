//! A tenant's part of a window, divided among its lanes on a reactor.
//!
//! **Design.** First what is due to a volume's own base: an account says how much that is, because of a small base a window brings
//! less than one I/O. It is served once the account has one, and where there is too little for all such I/Os, in the order in which
//! the next ones of the same lanes would be due; what does not do for the next in that order is kept for it. So whatever siblings
//! want, who wants its base has it, at most one I/O late. Then equal parts; what one does not want is the others'. **Not here:** the
//! parts of tenants ([`super::turn`]), of reactors ([`crate::board`]).

use super::each::Each;
use super::state::Lane;
use super::turn::OWN;
use crate::params::Params;
use crate::units::{COUNT, PARTS, PLENTY, Resource, SHARED, Units};

/// Among the tenant's lanes: to each what is due to it, and what it wants as far as that is fair; to those that want more the rest.
/// What nobody wants is told, and any of them may have it.
pub(super) fn divide(
    given: &Units,
    own: &mut [u32],
    lanes: &mut [Lane],
    params: &Params,
    window: u64,
    late: f32,
    lost: &mut Each,
) -> Units {
    let headroom = 1.0 + params.headroom;
    let promised = promise(given, own, lanes, headroom, window, late);
    let mut spare = *given;
    let mut parts = 0;
    let mut largest = Units::ZERO;
    largest[Resource::Ops] = PARTS;
    for lane in &*own {
        let lane = &lanes[*lane as usize];
        parts += i32::from(!lane.demand.is_zero());
        for (largest, wanted) in largest.0.iter_mut().zip(&lane.wanted.0) {
            *largest = (*largest).max(*wanted);
        }
    }
    let mut fair = *given;
    fair.sub(&promised);
    for fair in &mut fair.0 {
        *fair /= parts.max(1);
    }
    // What is less than an I/O for each is for whoever comes first.
    let mut whole = [false; COUNT];
    for resource in OWN {
        whole[resource] = fair.0[resource] < largest.0[resource];
        if whole[resource] {
            fair.0[resource] = 0;
        }
    }
    // Of what is shared, there may be less than is promised: each has its part.
    let first = |lane: &Lane, resource: usize| {
        let (first, promised) = (lane.promise.0[resource], promised.0[resource]);
        match given.0[resource] {
            given if promised > given => {
                (i64::from(first) * i64::from(given.max(0)) / i64::from(promised)) as i32
            }
            _ => first,
        }
    };
    let want = |lane: &Lane, resource: usize| match whole[resource] {
        true => first(lane, resource),
        false => lane.wants(resource, headroom),
    };
    let mut hungry = [0i32; COUNT];
    for lane in &*own {
        let lane = &lanes[*lane as usize];
        for resource in 0..COUNT {
            let fair = first(lane, resource) + fair.0[resource];
            let want = want(lane, resource);
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
    for lane in &*own {
        let lane = &mut lanes[*lane as usize];
        let mut part = Units::ZERO;
        for resource in 0..COUNT {
            let fair = first(lane, resource) + fair.0[resource];
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
        *lost = lost.plus(&lane.begin(&within));
    }
    spare
}

/// What is due to each lane, as far as it wants that and there is so much. Says the sum.
fn promise(
    given: &Units,
    own: &mut [u32],
    lanes: &mut [Lane],
    headroom: f32,
    window: u64,
    late: f32,
) -> Units {
    let mut due = Units::ZERO;
    for lane in &*own {
        let lane = &mut lanes[*lane as usize];
        lane.promise = lane.due(headroom, late);
        due.add(&lane.promise);
    }
    if due.is_zero() {
        return due;
    }
    let mut left = given.max(&Units::ZERO).own();
    if !left.covers(&due) {
        for lane in &*own {
            let lane = &mut lanes[*lane as usize];
            lane.late_in = match lane.promise.is_zero() {
                true => i64::MAX,
                false => lane.is_late_in(),
            };
        }
        own.sort_unstable_by_key(|lane| lanes[*lane as usize].late_in);
    }
    let mut sum = Units::ZERO;
    for lane in &*own {
        let lane = &mut lanes[*lane as usize];
        if lane.promise.is_zero() {
            continue;
        }
        let all = left.covers(&lane.promise);
        lane.promise = lane.promise.min(&left);
        left.sub(&lane.promise);
        if !all {
            // What is left is this one's, and the others have none.
            left = Units::ZERO;
        }
        if lane.promise.covers(&lane.one()) {
            lane.began = window;
            lane.promise_shared(headroom);
        }
        sum.add(&lane.promise);
    }
    sum
}

impl Lane {
    /// Of its own, what an I/O of it needs: the one that waits.
    fn one(&self) -> Units {
        let mut one = self.wanted.own();
        one[Resource::Ops] = one[Resource::Ops].max(PARTS);
        one
    }

    /// So much would it use in a window.
    fn wants(&self, resource: usize, headroom: f32) -> i32 {
        (self.demand.0[resource] as f32 * headroom).min(PLENTY as f32) as i32
    }

    /// What is due to it, as far as it wants that: an I/O, or nothing yet. What it saved, it has one I/O a window of, or all volumes
    /// together could claim more than there is.
    fn due(&self, headroom: f32, late: f32) -> Units {
        let one = self.one();
        let mut due = Units::ZERO;
        if self.limited && !self.demand.is_zero() {
            for (at, own) in OWN.into_iter().enumerate() {
                let brings = (self.base.0[own] as f32 * late).min(PLENTY as f32) as i32;
                let most = one.0[own].saturating_add(brings);
                due.0[own] = self.due[at].min(most).min(self.wants(own, headroom));
            }
        }
        match due.covers(&one) {
            true => due,
            false => Units::ZERO,
        }
    }

    /// In so many windows, in parts of 1/256, another I/O of it would be due: then it is late with this one.
    fn is_late_in(&self) -> i64 {
        let one = self.one();
        let left = OWN.into_iter().enumerate().map(|(at, own)| {
            let more = 2 * i64::from(one.0[own]) - i64::from(self.due[at]);
            more * 256 / i64::from(self.base.0[own].max(1))
        });
        left.max().unwrap_or_default()
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
            let most = base.saturating_mul(saved) + 2 * self.wanted.0[own] as u64;
            let due = (due.max(0) as u64).saturating_add(more).min(most);
            self.due[at] = due.min(PLENTY as u64) as i32;
        }
    }
}
