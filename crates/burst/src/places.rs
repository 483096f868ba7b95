//! Whether the reactors can give the bases that are promised, to whom that is guaranteed, and where a new export is best served.
//!
//! **Design.** A node's sum says too little: an export is served by one reactor, and all its processor time is used there. A
//! tenant's base goes to whichever of its volumes ask for it, so every reactor that serves one of its exports *owes* all of
//! it; of a base that is more than a reactor has, all that this reactor has. Nobody loses anything by others' choices
//! if no reactor owes more than it has. A base that is more than a reactor has is had if the reactors that serve it
//! come to as much together, and as it takes each of them whole, nobody else's base is there.
//!
//! A base is *guaranteed* by a [`Promise`]: so much, at these reactors. Whoever needs no more than it was promised comes first
//! ([`Places::settle`]), and after them, as far as it fits beside them, who needs more, or was promised nothing. So what one does
//! later takes nothing from another; and what becomes free is for those who had nothing. Whom no reactor serves yet is
//! promised its base at one, which is kept for it. Only guaranteed bases count against what a reactor has.
//!
//! A new export goes where its tenant's base is promised and nothing of it served, else where it fits; of such reactors where
//! least is served, an export counting as its part of its tenant's base, and as a little in any case. If there is none, where least is
//! lacking.
//! **Not here:** what reactors share ([`crate::admission`]), which reactor serves what now.

use std::collections::{BTreeMap, BTreeSet};

/// An export counts as this part of a reactor at least.
const LEAST_PART: f64 = 1.0 / 16.0;
/// Such a part of a reactor is rounding.
const ROUNDING: f64 = 1e-9;

/// What of a tenant one reactor serves.
#[derive(Clone, Copy, Default, Debug)]
struct At {
    /// None: its base is kept there, for its first.
    exports: u32,
    /// What its volumes have as bases of their own that only this reactor can give.
    own: f64,
}

/// A base that is guaranteed.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Promise {
    /// What it needs of processors at most, ns a second.
    pub cost: f64,
    /// Those that owe it.
    pub reactors: BTreeSet<usize>,
}

#[derive(Clone, Default, Debug)]
struct Tenant {
    /// What its base needs at most of processors, ns a second.
    cost: f64,
    at: BTreeMap<usize, At>,
    promise: Option<Promise>,
    /// What it needs counts as owed.
    counts: bool,
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

    fn is_served(&self) -> bool {
        self.at.values().any(|at| at.exports > 0)
    }

    /// It needs no more than it was promised.
    fn is_within_promise(&self) -> bool {
        self.promise.as_ref().is_some_and(|promise| {
            self.cost <= promise.cost * (1.0 + ROUNDING)
                && (self.at.iter())
                    .all(|(reactor, at)| at.exports == 0 || promise.reactors.contains(reactor))
        })
    }
}

/// Why a base isn't guaranteed, and what of it could be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Lack {
    /// The reactor that has too little beside what it owes, of those that serve the tenant; none: all of them together have too
    /// little.
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

    /// Before its exports are said: this is guaranteed to a tenant, and kept for it.
    pub fn promised(&mut self, tenant: u64, mut promise: Promise) {
        let reactors = self.owed.len();
        promise.reactors.retain(|reactor| *reactor < reactors);
        self.change(tenant, |of| {
            let kept = promise.reactors.iter();
            of.at.extend(kept.map(|reactor| (*reactor, At::default())));
            (of.counts, of.promise) = (of.cost > 0.0, Some(promise));
        });
    }

    /// Reactors owe and serve what a tenant has, and not what it had.
    fn change(&mut self, tenant: u64, change: impl FnOnce(&mut Tenant)) {
        let of = self.tenants.entry(tenant).or_default();
        for (sign, change) in [(-1.0, Some(change)), (1.0, None)] {
            let part = of.part(self.each);
            for (reactor, at) in &of.at {
                if let Some(owed) = self.owed.get_mut(*reactor) {
                    *owed += sign * f64::from(u8::from(of.counts)) * of.owed(self.each, at);
                    self.served[*reactor] += sign * part * f64::from(at.exports.max(1));
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

    /// One more is to be served: says where.
    pub fn place(&mut self, tenant: u64) -> usize {
        let reactor = self.best(tenant);
        let of = self.tenants.get(&tenant);
        let is_new = of.is_some_and(|of| !of.counts && of.cost > 0.0 && self.fits(of, reactor));
        self.change(tenant, |of| of.counts |= is_new);
        self.export(tenant, reactor);
        reactor
    }

    /// One of its volumes, which has a base of its own that needs `cost`, is served by this reactor alone.
    pub fn own(&mut self, tenant: u64, reactor: usize, cost: f64) {
        self.change(tenant, |of| of.at.entry(reactor).or_default().own += cost);
    }

    /// Who comes first of all: those that need no more than they were promised, the oldest first; those that need more; the rest.
    /// Of these the largest first.
    #[must_use]
    pub fn order(&self) -> Vec<u64> {
        let rank = |of: &Tenant| match (of.is_within_promise(), &of.promise) {
            (true, _) => (0, 0.0),
            (false, Some(_)) => (1, -of.cost),
            (false, None) => (2, -of.cost),
        };
        let all = self.tenants.iter();
        let mut all: Vec<_> = all.map(|(id, of)| (rank(of), *id)).collect();
        all.sort_by(|((a, less), _), ((b, more), _)| a.cmp(b).then(less.total_cmp(more)));
        all.into_iter().map(|(_, id)| id).collect()
    }

    /// Says whose bases are guaranteed now: of those that are, the promises are what is so from now on.
    pub fn settle(&mut self) {
        let order = self.order();
        for id in &order {
            self.change(*id, |of| {
                of.counts = false;
                of.at.retain(|_, at| at.exports > 0);
            });
        }
        for id in order {
            self.settle_one(id);
        }
    }

    fn settle_one(&mut self, id: u64) {
        let Some(of) = self.tenants.get(&id).filter(|of| of.cost > 0.0) else {
            return self.change(id, |of| of.promise = None);
        };
        if !of.is_served() {
            // It stays where it is promised. One is enough.
            let own = of.promise.iter().flat_map(|promise| &promise.reactors);
            let mut own = own.copied().filter(|reactor| self.fits(of, *reactor));
            let reactor = own.next().unwrap_or_else(|| self.best(id));
            self.change(id, |of| _ = of.at.insert(reactor, At::default()));
        }
        let Some(of) = self.tenants.get(&id) else {
            return;
        };
        let is_had = of.cost <= self.each * of.at.len() as f64 * (1.0 + ROUNDING);
        let fits = is_had && of.at.keys().all(|reactor| self.fits(of, *reactor));
        self.change(id, |of| {
            of.counts = fits;
            of.promise = fits.then(|| Promise {
                cost: of.cost,
                reactors: of.at.keys().copied().collect(),
            });
        });
    }

    /// Whether a reactor has its base beside what it owes to others.
    fn fits(&self, of: &Tenant, reactor: usize) -> bool {
        let at = of.at.get(&reactor).copied().unwrap_or_default();
        let owed = self.owed.get(reactor);
        owed.is_some_and(|owed| self.over(owed + of.owed(self.each, &at)) == 0.0)
    }

    /// Everybody's base counts alike, whether it fits or not: more was promised than there is, and that is meant.
    pub fn count_all(&mut self) {
        let all: Vec<u64> = self.tenants.keys().copied().collect();
        for id in all {
            self.change(id, |of| of.counts = of.cost > 0.0);
        }
    }

    /// What is guaranteed, and to whom.
    pub fn promises(&self) -> impl Iterator<Item = (u64, &Promise)> {
        let all = self.tenants.iter();
        all.filter_map(|(tenant, of)| Some((*tenant, of.promise.as_ref()?)))
    }

    /// The reactor for a new export of this tenant.
    #[must_use]
    pub fn best(&self, tenant: u64) -> usize {
        let own = self.tenants.get(&tenant);
        let promise = own.and_then(|own| own.promise.as_ref());
        let is_served = |reactor: &usize| {
            let at = own.and_then(|own| own.at.get(reactor));
            at.is_some_and(|at| at.exports > 0)
        };
        let promised = promise.iter().flat_map(|promise| &promise.reactors);
        let promised = promised.copied().filter(|reactor| !is_served(reactor));
        let by_served = |a: &usize, b: &usize| self.served[*a].total_cmp(&self.served[*b]);
        let of_promised = match own.is_some_and(|own| own.counts) {
            true => promised.min_by(by_served),
            false => None,
        };
        if let Some(reactor) = of_promised {
            return reactor;
        }
        let cost = own.map_or(0.0, |own| own.cost).min(self.each);
        let over = |reactor: usize| {
            let is_there = own.is_some_and(|own| own.counts && own.at.contains_key(&reactor));
            self.over(self.owed[reactor] + if is_there { 0.0 } else { cost })
        };
        let by = |a: &usize, b: &usize| over(*a).total_cmp(&over(*b)).then(by_served(a, b));
        (0..self.owed.len()).min_by(by).unwrap_or(0)
    }

    /// What is more than a reactor has of what it would owe.
    fn over(&self, owed: f64) -> f64 {
        match owed - self.each {
            over if over > self.each * ROUNDING => over,
            _ => 0.0,
        }
    }

    /// What each reactor would owe if all bases were guaranteed, as a part of what it can promise.
    #[must_use]
    pub fn parts(&self) -> Vec<f64> {
        let mut parts = vec![0.0; self.owed.len()];
        for of in self.tenants.values() {
            for (reactor, at) in &of.at {
                if let Some(part) = parts.get_mut(*reactor) {
                    *part += of.owed(self.each, at) / self.each.max(1.0);
                }
            }
        }
        parts
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

    /// Tenants whose base isn't guaranteed.
    pub fn lacking(&self) -> impl Iterator<Item = (u64, Lack)> {
        let all = self.tenants.iter();
        all.filter_map(|(tenant, of)| Some((*tenant, self.lack(of)?)))
    }

    fn lack(&self, of: &Tenant) -> Option<Lack> {
        let counts = f64::from(u8::from(of.counts));
        let served = of.at.iter().filter(|_| of.cost > 0.0);
        let rooms = served.filter_map(|(reactor, at)| {
            let own = of.owed(self.each, at);
            let others = *self.owed.get(*reactor)? - counts * own;
            let is_over = self.over(others + own) > 0.0;
            Some((*reactor, is_over, (self.each - others).max(0.0)))
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

    /// Whose bases are guaranteed.
    fn guaranteed(places: &Places) -> Vec<u64> {
        places.promises().map(|(tenant, _)| tenant).collect()
    }

    /// These costs, everyone's one export, and what was promised before.
    fn again(before: &Places, tenants: &[(u64, f64, &[usize])]) -> Places {
        let mut places = two();
        for (tenant, cost, _) in tenants {
            places.promise(*tenant, *cost);
        }
        for (tenant, promise) in before.promises() {
            places.promised(tenant, promise.clone());
        }
        for (tenant, _, reactors) in tenants {
            reactors.iter().for_each(|at| places.export(*tenant, *at));
        }
        places.settle();
        places
    }

    #[test]
    fn a_base_that_is_more_than_its_reactor_has_is_not_had() {
        let mut places = two();
        places.promise(1, 150.0);
        places.export(1, 0);
        places.settle();
        let short = Lack {
            reactor: None,
            fits: 100.0,
        };
        assert_eq!(lack(&places, 1), Some(short));
        // Served by both, and by nobody else, it is.
        places.export(1, 1);
        places.settle();
        assert!(places.fit());
        // It takes each of them whole.
        places.promise(2, 1.0);
        places.export(2, 1);
        places.settle();
        assert_eq!(guaranteed(&places), [1]);
        let none = Lack {
            reactor: Some(1),
            fits: 0.0,
        };
        assert_eq!(lack(&places, 2), Some(none));
        // Where that is meant, nobody comes first.
        places.count_all();
        assert_eq!(lack(&places, 1).map(|lack| lack.reactor), Some(Some(1)));
        assert_eq!(lack(&places, 2), Some(none));
    }

    #[test]
    fn bases_that_one_reactor_owes_together_fit_there_or_are_not_had() {
        let over = Some(Lack {
            reactor: Some(0),
            fits: 40.0,
        });
        let places = again(&two(), &[(2, 60.0, &[0])]);
        let places = again(&places, &[(1, 60.0, &[0]), (2, 60.0, &[0])]);
        assert_eq!(places.parts(), [1.2, 0.0]);
        assert_eq!((lack(&places, 1), lack(&places, 2)), (over, None));
        let mut all = places.clone();
        all.count_all();
        assert_eq!((lack(&all, 1), lack(&all, 2)), (over, over));
        let at_once = |places: &Places| places.at_once().collect::<Vec<_>>();
        assert_eq!(at_once(&places), [(2, 1), (0, 0)]);
        // What is said to fit does, to the last.
        let places = again(&places, &[(1, 40.0, &[0]), (2, 60.0, &[0])]);
        assert!(places.fit());
        assert_eq!(at_once(&places), [(2, 2), (0, 0)]);
        // All of a base may be asked for by any of its volumes.
        let tenants: [(u64, f64, &[usize]); 3] =
            [(1, 40.0, &[0]), (2, 60.0, &[0]), (3, 60.0, &[1])];
        let mut places = again(&places, &tenants);
        assert!(places.fit());
        places.export(2, 1);
        places.settle();
        assert_eq!(places.parts(), [1.0, 1.2]);
        assert_eq!(guaranteed(&places), [1, 3]);
    }

    #[test]
    fn who_comes_later_takes_nothing_from_those_before() {
        // The first has least, so nothing but what was promised says who comes first.
        let first = again(&two(), &[(5, 10.0, &[0]), (6, 60.0, &[0])]);
        assert_eq!(guaranteed(&first), [5, 6]);
        let all: [(u64, f64, &[usize]); 3] = [(1, 90.0, &[0]), (5, 10.0, &[0]), (6, 60.0, &[0])];
        let then = again(&first, &all);
        assert_eq!(guaranteed(&then), [5, 6]);
        assert_eq!(lack(&then, 1).map(|lack| lack.fits), Some(30.0));
        // Whoever needs more than was promised is one who comes later: of more, and of another reactor.
        let more = again(&first, &[(5, 41.0, &[0]), (6, 60.0, &[0])]);
        assert_eq!(guaranteed(&more), [6]);
        let there = again(&first, &[(5, 10.0, &[0]), (6, 60.0, &[0]), (7, 50.0, &[1])]);
        let there = again(
            &there,
            &[(5, 10.0, &[0]), (6, 60.0, &[0, 1]), (7, 50.0, &[1])],
        );
        assert_eq!(guaranteed(&there), [5, 7]);
        assert_eq!(lack(&there, 6).map(|lack| lack.reactor), Some(Some(1)));
        // When there is room, it is theirs.
        let room = again(&then, &[(1, 90.0, &[0]), (5, 10.0, &[0]), (6, 60.0, &[1])]);
        assert_eq!(guaranteed(&room), [1, 5, 6]);
        let room = again(&then, &[(1, 90.0, &[0]), (5, 10.0, &[0])]);
        assert!(room.fit());
    }

    #[test]
    fn what_is_promised_is_kept_for_whom_nothing_is_served() {
        let none: &[usize] = &[];
        let places = again(&two(), &[(1, 60.0, none), (2, 60.0, none)]);
        assert_eq!(guaranteed(&places), [1, 2]);
        // A third is served by both, before they are.
        let all = [(1, 60.0, none), (2, 60.0, none), (3, 50.0, &[0, 1])];
        let mut then = again(&places, &all);
        assert_eq!(guaranteed(&then), [1, 2]);
        let [one, other] = [1, 2].map(|tenant| then.place(tenant));
        assert_ne!(one, other);
        then.settle();
        assert_eq!(guaranteed(&then), [1, 2]);
        // Nor is another placed there, however much is served elsewhere.
        let one = again(&two(), &[(1, 60.0, none)]);
        let mut then = two();
        then.promise(1, 60.0);
        then.promise(2, 50.0);
        for (tenant, promise) in one.promises() {
            then.promised(tenant, promise.clone());
        }
        let kept = then.best(1);
        (0..9).for_each(|_| then.export(9, 1 - kept));
        assert_eq!(then.place(2), 1 - kept);
    }

    #[test]
    fn all_that_was_served_is_served_again_so_that_it_fits() {
        // As it would not come about by chance.
        let tenants: [(u64, f64, &[usize]); 4] = [
            (1, 40.0, &[1]),
            (2, 50.0, &[0]),
            (3, 50.0, &[0]),
            (4, 60.0, &[1, 1]),
        ];
        let before = again(&two(), &tenants);
        assert!(before.fit());
        let mut after = two();
        for (tenant, cost, _) in tenants {
            after.promise(tenant, cost);
        }
        for (tenant, promise) in before.promises() {
            after.promised(tenant, promise.clone());
        }
        for (tenant, _, reactors) in tenants {
            reactors.iter().for_each(|_| _ = after.place(tenant));
        }
        after.settle();
        assert!(after.fit(), "{after:?}");
        // Who needs all of both has both again.
        let both = again(&two(), &[(1, 150.0, &[0, 1])]);
        let mut after = two();
        after.promise(1, 150.0);
        for (tenant, promise) in both.promises() {
            after.promised(tenant, promise.clone());
        }
        assert_ne!(after.place(1), after.place(1));
        after.settle();
        assert!(after.fit());
    }

    #[test]
    fn a_volumes_own_base_is_owed_where_it_is() {
        let mut places = two();
        places.promise(1, 150.0);
        places.export(1, 0);
        places.export(1, 1);
        places.own(1, 0, 90.0);
        places.settle();
        assert!(places.fit());
        places.own(1, 0, 30.0);
        places.settle();
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
        places.settle();
        // Less is served there, but its base fits on the other one only.
        let mut other = places.clone();
        (0..9).for_each(|_| other.export(9, 1));
        other.promise(2, 60.0);
        assert_eq!(other.best(2), 1);
        // Nowhere: where least is lacking.
        other.export(2, 1);
        other.promise(1, 70.0);
        other.settle();
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
        places.settle();
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
        places.settle();
        assert!(places.fit(), "{:?}", places.parts());
        places.promise(5, 1.0);
        places.settle();
        let lack = lack(&places, 5);
        assert_eq!(lack.map(|lack| lack.fits), Some(0.0));
    }
}
