//! Whether the reactors can give the bases that are promised, and where a new export is best served.
//!
//! **Design.** A node's sum says too little: an export is served by one reactor, and all its processor time is used there. A
//! tenant's base goes to whichever of its volumes ask for it, so every reactor that serves one of its exports *owes* all of
//! it; of a base that is more than a reactor has, all that this reactor has. Nobody loses anything by others' choices
//! if no reactor owes more than it has. A base that is more than a reactor has is had if the reactors that serve it
//! come to as much together, and as it takes each of them whole, nobody else's base is there.
//!
//! A new export goes where its tenant's base fits; of such reactors where least is served, an export counting as its part of
//! its tenant's base, and as a little in any case. If there is none, where least is lacking.
//! **Not here:** what reactors share ([`crate::admission`]), which reactor serves what now.

use std::collections::BTreeMap;

/// An export counts as this part of a reactor at least.
const LEAST_PART: f64 = 1.0 / 16.0;
/// Such a part of a reactor is rounding.
const ROUNDING: f64 = 1e-9;

/// What of a tenant one reactor serves.
#[derive(Clone, Copy, Default, Debug)]
struct At {
    exports: u32,
    /// What its volumes have as bases of their own that only this reactor can give.
    own: f64,
}

#[derive(Clone, Default, Debug)]
struct Tenant {
    /// What its base needs at most of processors, ns a second.
    cost: f64,
    at: BTreeMap<usize, At>,
}

impl Tenant {
    /// What a reactor that has so much must have for it.
    fn owed(&self, each: f64, at: &At) -> f64 {
        self.cost.min(each).max(at.own)
    }

    /// What one of its exports counts as.
    fn part(&self, each: f64) -> f64 {
        let exports: u32 = self.at.values().map(|at| at.exports).sum();
        (self.cost / f64::from(exports.max(1))).max(each * LEAST_PART)
    }
}

/// Why a base can't be had whatever others do, and what of it could.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Lack {
    /// The reactor that owes too much, of those that serve the tenant; none: all of them together have too little.
    pub reactor: Option<usize>,
    /// A base that needs so much of processors would be had, ns a second.
    pub fits: f64,
}

/// See the module's text. Tenants are told apart by numbers of the caller's.
#[derive(Clone, Debug)]
pub struct Places {
    each: f64,
    tenants: BTreeMap<u64, Tenant>,
    /// Of each reactor, what it owes, and what its exports count as.
    owed: Vec<f64>,
    served: Vec<f64>,
}

impl Places {
    /// So many reactors that serve nobody, each of which can promise `each` ns a second.
    #[must_use]
    pub fn new(reactors: usize, each: f64) -> Self {
        Self {
            each: each.max(0.0),
            tenants: BTreeMap::new(),
            owed: vec![0.0; reactors.max(1)],
            served: vec![0.0; reactors.max(1)],
        }
    }

    /// A tenant's base needs `cost` of processors at most, ns a second.
    pub fn promise(&mut self, tenant: u64, cost: f64) {
        self.change(tenant, |of| of.cost = cost);
    }

    /// Reactors owe and serve what a tenant has, and not what it had.
    fn change(&mut self, tenant: u64, change: impl FnOnce(&mut Tenant)) {
        let of = self.tenants.entry(tenant).or_default();
        for (sign, change) in [(-1.0, Some(change)), (1.0, None)] {
            let part = of.part(self.each);
            for (reactor, at) in &of.at {
                if let Some(owed) = self.owed.get_mut(*reactor) {
                    *owed += sign * of.owed(self.each, at);
                    self.served[*reactor] += sign * part * f64::from(at.exports);
                }
            }
            if let Some(change) = change {
                change(of);
            }
        }
    }

    /// One of its exports is served by this reactor.
    pub fn export(&mut self, tenant: u64, reactor: usize) {
        self.change(tenant, |of| {
            of.at.entry(reactor).or_default().exports += 1;
        });
    }

    /// One of its volumes, which has a base of its own that needs `cost`, is served by this reactor alone.
    pub fn own(&mut self, tenant: u64, reactor: usize, cost: f64) {
        self.change(tenant, |of| of.at.entry(reactor).or_default().own += cost);
    }

    /// Tenants that no reactor serves yet count where their first export would go now, the largest base first.
    pub fn assume_first_exports(&mut self) {
        let nowhere = |of: &Tenant| of.at.is_empty() && of.cost > 0.0;
        let rest = self.tenants.iter().filter(|(_, of)| nowhere(of));
        let mut rest: Vec<(u64, f64)> = rest.map(|(tenant, of)| (*tenant, of.cost)).collect();
        rest.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        for (tenant, _) in rest {
            self.export(tenant, self.best(tenant));
        }
    }

    /// The reactor for a new export of this tenant.
    #[must_use]
    pub fn best(&self, tenant: u64) -> usize {
        let own = self.tenants.get(&tenant);
        let cost = own.map_or(0.0, |own| own.cost).min(self.each);
        let judged = |reactor: usize| {
            let is_there = own.is_some_and(|own| own.at.contains_key(&reactor));
            let then = self.owed[reactor] + if is_there { 0.0 } else { cost };
            (self.over(then), self.served[reactor])
        };
        let by = |a: &usize, b: &usize| {
            let ((over_a, served_a), (over_b, served_b)) = (judged(*a), judged(*b));
            over_a
                .total_cmp(&over_b)
                .then(served_a.total_cmp(&served_b))
        };
        (0..self.owed.len()).min_by(by).unwrap_or(0)
    }

    /// What is more than a reactor has of what it would owe.
    fn over(&self, owed: f64) -> f64 {
        match owed - self.each {
            over if over > self.each * ROUNDING => over,
            _ => 0.0,
        }
    }

    /// What each reactor owes, as a part of what it can promise.
    #[must_use]
    pub fn parts(&self) -> Vec<f64> {
        let owed = self.owed.iter();
        owed.map(|owed| owed / self.each.max(1.0)).collect()
    }

    /// Whether every base can be had, whatever its tenant's volumes ask for of it.
    #[must_use]
    pub fn fit(&self) -> bool {
        self.lacking().next().is_none()
    }

    /// Of each reactor the tenants that it serves with a base, and how many of them can have it there at once, whichever they are.
    pub fn at_once(&self) -> impl Iterator<Item = (u32, u32)> {
        (0..self.owed.len()).map(|reactor| {
            let at = |of: &Tenant| {
                let owed = of.owed(self.each, of.at.get(&reactor)?);
                let together = self.each * of.at.len() as f64;
                let is_had = of.cost <= together * (1.0 + ROUNDING);
                (of.cost > 0.0).then_some(if is_had { owed } else { f64::INFINITY })
            };
            let mut owed: Vec<f64> = self.tenants.values().filter_map(at).collect();
            owed.sort_by(|a, b| b.total_cmp(a));
            let mut sum = 0.0;
            let fits = owed.iter().take_while(|owed| {
                sum += **owed;
                self.over(sum) == 0.0
            });
            let fits = fits.count();
            (owed.len() as u32, fits as u32)
        })
    }

    /// Tenants whose base can't be had on the reactors that serve them, whatever others do.
    pub fn lacking(&self) -> impl Iterator<Item = (u64, Lack)> {
        let all = self.tenants.iter();
        all.filter_map(|(tenant, of)| Some((*tenant, self.lack(of)?)))
    }

    fn lack(&self, of: &Tenant) -> Option<Lack> {
        let served = of.at.iter();
        let rooms = served.filter_map(|(reactor, at)| {
            let owed = *self.owed.get(*reactor)?;
            let others = owed - of.owed(self.each, at);
            Some((
                *reactor,
                self.over(owed) > 0.0,
                (self.each - others).max(0.0),
            ))
        });
        let rooms: Vec<(usize, bool, f64)> = rooms.collect();
        let (reactor, _, least) = *rooms.iter().min_by(|(.., a), (.., b)| a.total_cmp(b))?;
        let together = self.each * rooms.len() as f64;
        // Who is alone may have more than one of them.
        let fits = match least < self.each * (1.0 - ROUNDING) {
            true => least,
            false => together,
        };
        // Volumes' own bases that are more than their reactor has are to be smaller, and the tenant's with them.
        let own = of.at.values().map(|at| at.own).fold(0.0, f64::max);
        let fits = match own > least.min(self.each) {
            true => fits.min(of.cost * least.min(self.each) / own),
            false => fits,
        };
        let is_short = of.cost > together * (1.0 + ROUNDING);
        let is_over = rooms.iter().any(|(_, is_over, _)| *is_over);
        (is_short || is_over).then_some(Lack {
            reactor: is_over.then_some(reactor),
            fits,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two reactors of 100 each.
    fn two() -> Places {
        Places::new(2, 100.0)
    }

    fn lack(places: &Places, tenant: u64) -> Option<Lack> {
        let mut all = places.lacking();
        all.find(|(of, _)| *of == tenant).map(|(_, lack)| lack)
    }

    #[test]
    fn a_base_that_is_more_than_its_reactor_has_is_not_had() {
        let mut places = two();
        places.promise(1, 150.0);
        places.export(1, 0);
        let short = Lack {
            reactor: None,
            fits: 100.0,
        };
        assert_eq!(lack(&places, 1), Some(short));
        // Served by both, and by nobody else, it is.
        places.export(1, 1);
        assert!(places.fit());
        // It takes each of them whole.
        places.promise(2, 1.0);
        places.export(2, 1);
        assert_eq!(lack(&places, 1).map(|lack| lack.reactor), Some(Some(1)));
        let lack = lack(&places, 2);
        assert_eq!(
            lack.map(|lack| (lack.reactor, lack.fits)),
            Some((Some(1), 0.0))
        );
    }

    #[test]
    fn bases_that_one_reactor_owes_together_fit_there_or_are_not_had() {
        let mut places = two();
        for tenant in [1, 2] {
            places.promise(tenant, 60.0);
            places.export(tenant, 0);
        }
        assert_eq!(places.parts(), [1.2, 0.0]);
        for tenant in [1, 2] {
            let over = Lack {
                reactor: Some(0),
                fits: 40.0,
            };
            assert_eq!(lack(&places, tenant), Some(over));
        }
        let at_once = |places: &Places| places.at_once().collect::<Vec<_>>();
        assert_eq!(at_once(&places), [(2, 1), (0, 0)]);
        // What is said to fit does, to the last.
        places.promise(2, 40.0);
        assert!(places.fit());
        assert_eq!(at_once(&places), [(2, 2), (0, 0)]);
        // All of a base may be asked for by any of its volumes.
        places.promise(3, 60.0);
        places.export(3, 1);
        assert!(places.fit());
        places.export(1, 1);
        assert_eq!(places.parts(), [1.0, 1.2]);
        assert_eq!(lack(&places, 2), None);
        assert!(lack(&places, 1).is_some() && lack(&places, 3).is_some());
    }

    #[test]
    fn a_volumes_own_base_is_owed_where_it_is() {
        let mut places = two();
        places.promise(1, 150.0);
        places.export(1, 0);
        places.export(1, 1);
        places.own(1, 0, 90.0);
        assert!(places.fit());
        places.own(1, 0, 30.0);
        assert_eq!(places.parts(), [1.2, 1.0]);
        assert!(!places.fit());
    }

    #[test]
    fn a_new_export_goes_where_its_base_fits() {
        let mut places = two();
        places.promise(1, 60.0);
        // Others without a base keep it busy.
        for _ in 0..3 {
            places.export(9, 1);
        }
        assert_eq!(places.best(1), 0);
        places.export(1, 0);
        // Less is served there, but its base fits on the other one only.
        let mut other = places.clone();
        (0..9).for_each(|_| other.export(9, 1));
        other.promise(2, 60.0);
        assert_eq!(other.best(2), 1);
        // Nowhere: where least is lacking.
        other.export(2, 1);
        other.promise(1, 70.0);
        other.promise(3, 45.0);
        assert_eq!(other.best(3), 1);
        // Its own base is owed there already.
        assert_eq!(other.best(1), 0);
    }

    #[test]
    fn without_bases_exports_are_dealt_out_and_with_them_the_busy_have_less() {
        let mut places = two();
        for at in 0..6 {
            let reactor = places.best(at % 2);
            places.export(at % 2, reactor);
            assert_eq!(reactor as u64, at % 2);
        }
        let mut places = two();
        places.promise(1, 80.0);
        places.export(1, 0);
        // So do a tenant's own, where they fit: it is to have several reactors for its bursts.
        assert_eq!(places.best(1), 1);
        for _ in 0..5 {
            assert_eq!(places.best(2), 1);
            places.export(2, 1);
        }
    }

    #[test]
    fn who_is_not_served_yet_counts_where_it_would_be() {
        let mut places = two();
        for (tenant, cost) in [(1, 40.0), (2, 40.0), (3, 60.0), (4, 60.0)] {
            places.promise(tenant, cost);
        }
        places.assume_first_exports();
        assert!(places.fit(), "{:?}", places.parts());
        places.promise(5, 1.0);
        places.assume_first_exports();
        let lack = lack(&places, 5);
        assert_eq!(lack.map(|lack| lack.fits), Some(0.0));
    }
}
