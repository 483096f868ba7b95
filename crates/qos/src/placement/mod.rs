//! Decides which reactors can guarantee which bases, and where a new export is served.
//!
//! A tenant is entitled to its base on each reactor with one of its exports, at most to the whole
//! reactor. A [`Promise`] guarantees a base at some reactors until it no longer fits.
//! [`PlacementPlan::settle`] honours promises first.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// The least load counted for an export, as a part of a reactor.
const LEAST_PART: f64 = 1.0 / 16.0;
const ROUNDING: f64 = 1e-9;

#[derive(Clone, Copy, Default, Debug)]
struct At {
    /// 0: reserved for the first export.
    exports: u32,
    /// Own bases of volumes at this reactor only.
    own: f64,
}

/// A guaranteed base.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Promise {
    /// The most processor time it needs, in ns per second.
    pub cost: f64,
    /// The reactors where it is guaranteed.
    pub reactors: BTreeSet<usize>,
    /// False once it has lapsed.
    pub held: bool,
}

/// The guaranteed part of a base.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
enum Coverage {
    #[default]
    Nothing,
    Promised,
    All,
}

#[derive(Clone, Default, Debug)]
struct PlacedTenant {
    cost: f64,
    at: BTreeMap<usize, At>,
    promise: Option<Promise>,
    counts: Coverage,
}

impl PlacedTenant {
    fn entitlement(&self, each: f64, at: &At) -> f64 {
        self.cost.min(each).max(at.own)
    }

    fn counted(&self, counts: Coverage, each: f64, reactor: usize, at: &At) -> f64 {
        match (counts, &self.promise) {
            (Coverage::All, _) => self.entitlement(each, at),
            (Coverage::Promised, Some(promise)) if promise.reactors.contains(&reactor) => {
                self.cost.min(promise.cost).min(each)
            }
            _ => 0.0,
        }
    }

    fn as_promised(&self) -> Coverage {
        match &self.promise {
            Some(promise) if promise.held && self.cost > 0.0 => match self.is_within_promise() {
                true => Coverage::All,
                false => Coverage::Promised,
            },
            _ => Coverage::Nothing,
        }
    }

    fn part(&self, each: f64) -> f64 {
        let exports: u32 = self.at.values().map(|at| at.exports).sum();
        (self.cost / f64::from(exports.max(1))).max(each * LEAST_PART)
    }

    fn is_served(&self) -> bool {
        self.at.values().any(|at| at.exports > 0)
    }

    fn is_within_promise(&self) -> bool {
        self.promise.as_ref().is_some_and(|promise| {
            self.cost <= promise.cost * (1.0 + ROUNDING)
                && (self.at.iter())
                    .all(|(reactor, at)| at.exports == 0 || promise.reactors.contains(reactor))
        })
    }
}

/// Why a base isn't guaranteed, and what would fit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Lack {
    /// The fullest of its reactors; `None`: all together are too small.
    pub reactor: Option<usize>,
    /// Processor time of a base that fits, in ns per second.
    pub fits: f64,
}

/// Entitlements at reactors. The caller numbers the tenants.
#[derive(Clone, Debug)]
pub struct PlacementPlan {
    each: f64,
    tenants: BTreeMap<u64, PlacedTenant>,
    /// Per reactor: entitlements, and served load.
    entitlement: Vec<f64>,
    served: Vec<f64>,
}

impl PlacementPlan {
    /// A plan for reactors that can promise `each` ns per second.
    #[must_use]
    pub fn new(reactors: usize, each: f64) -> Self {
        Self {
            each: each.max(0.0),
            tenants: BTreeMap::new(),
            entitlement: vec![0.0; reactors.max(1)],
            served: vec![0.0; reactors.max(1)],
        }
    }

    /// Sets the processor time that a tenant's base needs, in ns per second.
    pub fn set_cost(&mut self, tenant: u64, cost: f64) {
        self.change(tenant, |of| of.cost = cost);
    }

    /// Sets a tenant's last promise; call it before adding exports.
    pub fn set_promise(&mut self, tenant: u64, mut promise: Promise) {
        let reactors = self.entitlement.len();
        promise.reactors.retain(|reactor| *reactor < reactors);
        self.change(tenant, |of| {
            let kept = promise.reactors.iter().filter(|_| promise.held);
            of.at.extend(kept.map(|reactor| (*reactor, At::default())));
            of.promise = Some(promise);
            of.counts = of.as_promised();
        });
    }

    fn change(&mut self, tenant: u64, change: impl FnOnce(&mut PlacedTenant)) {
        let of = self.tenants.entry(tenant).or_default();
        for (sign, change) in [(-1.0, Some(change)), (1.0, None)] {
            let part = of.part(self.each);
            for (reactor, at) in &of.at {
                if let Some(entitlement) = self.entitlement.get_mut(*reactor) {
                    *entitlement += sign * of.counted(of.counts, self.each, *reactor, at);
                    self.served[*reactor] += sign * part * f64::from(at.exports.max(1));
                }
            }
            if let Some(change) = change {
                change(of);
            }
        }
    }

    /// Adds an export at a reactor.
    pub fn export(&mut self, tenant: u64, reactor: usize) {
        self.change(tenant, |of| {
            of.at.entry(reactor).or_default().exports += 1;
        });
    }

    /// Places an export; returns its reactor.
    pub fn place(&mut self, tenant: u64) -> usize {
        let reactor = self.best(tenant);
        let of = self.tenants.get(&tenant);
        let is_new = of.is_some_and(|of| {
            of.counts == Coverage::Nothing && of.cost > 0.0 && self.fits(of, reactor, Coverage::All)
        });
        if is_new {
            self.change(tenant, |of| of.counts = Coverage::All);
        }
        self.export(tenant, reactor);
        reactor
    }

    /// Adds the own base of a volume at this reactor only.
    pub fn own(&mut self, tenant: u64, reactor: usize, cost: f64) {
        self.change(tenant, |of| of.at.entry(reactor).or_default().own += cost);
    }

    /// Held promises, then lapsed ones, oldest first; then the rest, largest first.
    #[must_use]
    pub fn order(&self) -> Vec<u64> {
        let rank = |of: &PlacedTenant| match &of.promise {
            Some(promise) => (u8::from(!promise.held), 0.0),
            None => (2, -of.cost),
        };
        let all = self.tenants.iter();
        let mut all: Vec<_> = all.map(|(id, of)| (rank(of), *id)).collect();
        all.sort_by(|((a, less), _), ((b, more), _)| a.cmp(b).then(less.total_cmp(more)));
        all.into_iter().map(|(_, id)| id).collect()
    }

    /// Decides whose bases are guaranteed, and renews promises.
    pub fn settle(&mut self) {
        let order = self.order();
        for id in &order {
            self.change(*id, |of| {
                of.counts = Coverage::Nothing;
                of.at.retain(|_, at| at.exports > 0);
                of.promise = of.promise.take().filter(|_| of.cost > 0.0);
            });
        }
        for id in &order {
            let of = self.tenants.get(id);
            if let Some(of) = of.filter(|of| of.promise.is_some()) {
                self.settle_one(
                    *id,
                    match of.is_within_promise() {
                        true => Coverage::All,
                        false => Coverage::Promised,
                    },
                );
            }
        }
        let mut next = 0;
        while let Some(id) = order.get(next) {
            let before = self.tenants.get(id).map_or(Coverage::All, |of| of.counts);
            let is_new = before != Coverage::All && self.settle_one(*id, Coverage::All);
            // A base newly guaranteed elsewhere frees room, so begin again with the first tenant.
            next = match is_new && before == Coverage::Promised {
                true => 0,
                false => next + 1,
            };
        }
    }

    fn settle_one(&mut self, id: u64, counts: Coverage) -> bool {
        let Some(of) = self.tenants.get(&id).filter(|of| of.cost > 0.0) else {
            return false;
        };
        let (mut at, mut cost) = (of.at.clone(), of.cost);
        if !of.is_served() {
            // A tenant without exports keeps one promised reactor. Each reactor in `owing` needs
            // room.
            let own = of.promise.iter().flat_map(|promise| &promise.reactors);
            let mut own = own.filter(|reactor| self.fits(of, **reactor, counts));
            let reactor = own.next().copied().or_else(|| match counts {
                Coverage::All => Some(self.roomiest(id)),
                _ => None,
            });
            at = reactor.map(|at| (at, At::default())).into_iter().collect();
        }
        let mut owing: BTreeSet<usize> = at.keys().copied().collect();
        if let (Coverage::Promised, Some(promise)) = (counts, &of.promise) {
            cost = cost.min(promise.cost);
            owing.retain(|reactor| promise.reactors.contains(reactor));
        }
        let is_had = cost <= self.each * owing.len() as f64 * (1.0 + ROUNDING);
        let fits = is_had && (owing.iter()).all(|reactor| self.fits(of, *reactor, counts));
        self.change(id, |of| {
            if fits || of.counts == Coverage::Nothing {
                of.at = at;
            }
            if fits {
                of.counts = counts;
            }
            match (&mut of.promise, counts) {
                (promise, Coverage::All) if fits => {
                    *promise = Some(Promise {
                        cost,
                        reactors: owing,
                        held: true,
                    });
                }
                (Some(promise), _) => promise.held = of.counts != Coverage::Nothing,
                (None, _) => {}
            }
        });
        fits
    }

    fn fits(&self, of: &PlacedTenant, reactor: usize, counts: Coverage) -> bool {
        let at = of.at.get(&reactor).copied().unwrap_or_default();
        let counted = |counts| of.counted(counts, self.each, reactor, &at);
        let entitlement = self.entitlement.get(reactor);
        entitlement.is_some_and(|entitlement| {
            self.over(entitlement - counted(of.counts) + counted(counts)) == 0.0
        })
    }

    /// Counts every base, for oversubscription.
    pub fn count_all(&mut self) {
        let all: Vec<u64> = self.tenants.keys().copied().collect();
        for id in all {
            self.change(id, |of| {
                of.counts = match of.cost > 0.0 {
                    true => Coverage::All,
                    false => Coverage::Nothing,
                };
            });
        }
    }

    /// Whether the whole base is guaranteed.
    #[must_use]
    pub fn is_guaranteed(&self, tenant: u64) -> bool {
        let of = self.tenants.get(&tenant);
        of.is_some_and(|of| of.counts == Coverage::All)
    }

    /// Promises by tenant.
    pub fn promises(&self) -> impl Iterator<Item = (u64, &Promise)> {
        let all = self.tenants.iter();
        all.filter_map(|(tenant, of)| Some((*tenant, of.promise.as_ref()?)))
    }

    /// The reactor for a tenant's next export.
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
        let of_promised = match own.is_some_and(|own| own.counts != Coverage::Nothing) {
            true => promised.min_by(|a, b| self.by_served(*a, *b)),
            false => None,
        };
        of_promised.unwrap_or_else(|| self.roomiest(tenant))
    }

    fn by_served(&self, a: usize, b: usize) -> Ordering {
        self.served[a].total_cmp(&self.served[b])
    }

    fn roomiest(&self, tenant: u64) -> usize {
        let own = self.tenants.get(&tenant);
        let cost = own.map_or(0.0, |own| own.cost).min(self.each);
        let over = |reactor: usize| {
            let counted = own.and_then(|own| {
                let at = own.at.get(&reactor)?;
                Some(own.counted(own.counts, self.each, reactor, at))
            });
            let counted = counted.unwrap_or(0.0);
            self.over(self.entitlement[reactor] - counted + cost.max(counted))
        };
        let by = |a: &usize, b: &usize| {
            let by_served = || self.by_served(*a, *b);
            over(*a).total_cmp(&over(*b)).then_with(by_served)
        };
        (0..self.entitlement.len()).min_by(by).unwrap_or(0)
    }

    fn over(&self, entitlement: f64) -> f64 {
        match entitlement - self.each {
            over if over > self.each * ROUNDING => over,
            _ => 0.0,
        }
    }

    /// Load of each reactor if all bases were guaranteed, in parts of its capacity.
    #[must_use]
    pub fn parts(&self) -> Vec<f64> {
        let mut parts = vec![0.0; self.entitlement.len()];
        for of in self.tenants.values() {
            for (reactor, at) in &of.at {
                if let Some(part) = parts.get_mut(*reactor) {
                    *part += of.entitlement(self.each, at) / self.each.max(1.0);
                }
            }
        }
        parts
    }

    /// Whether every base is guaranteed.
    #[must_use]
    pub fn fit(&self) -> bool {
        self.lacking().next().is_none()
    }

    /// Per reactor: tenants with a base, and how many of these fit at once, whichever they are.
    pub fn at_once(&self) -> impl Iterator<Item = (u32, u32)> {
        (0..self.entitlement.len()).map(|reactor| {
            let at = |of: &PlacedTenant| {
                let entitlement = of.entitlement(self.each, of.at.get(&reactor)?);
                let together = self.each * of.at.len() as f64;
                let is_had = of.cost <= together * (1.0 + ROUNDING);
                (of.cost > 0.0).then_some(if is_had { entitlement } else { f64::INFINITY })
            };
            let mut entitlement: Vec<f64> = self.tenants.values().filter_map(at).collect();
            entitlement.sort_by(|a, b| b.total_cmp(a));
            let mut sum = 0.0;
            let fits = entitlement.iter().take_while(|entitlement| {
                sum += **entitlement;
                self.over(sum) == 0.0
            });
            let fits = fits.count();
            (entitlement.len() as u32, fits as u32)
        })
    }

    /// Tenants without a guarantee.
    pub fn lacking(&self) -> impl Iterator<Item = (u64, Lack)> {
        let all = self.tenants.iter();
        all.filter_map(|(tenant, of)| Some((*tenant, self.lack(of)?)))
    }

    fn lack(&self, of: &PlacedTenant) -> Option<Lack> {
        let served = of.at.iter().filter(|_| of.cost > 0.0);
        let rooms = served.filter_map(|(reactor, at)| {
            let own = of.entitlement(self.each, at);
            let counted = of.counted(of.counts, self.each, *reactor, at);
            let others = *self.entitlement.get(*reactor)? - counted;
            let is_over = self.over(others + own) > 0.0;
            Some((*reactor, is_over, (self.each - others).max(0.0)))
        });
        let rooms: Vec<(usize, bool, f64)> = rooms.collect();
        let (reactor, _, least) = *rooms.iter().min_by(|(.., a), (.., b)| a.total_cmp(b))?;
        let together = self.each * rooms.len() as f64;
        // A tenant alone may have several whole reactors.
        let fits = match least < self.each * (1.0 - ROUNDING) {
            true => least,
            false => together,
        };
        // Own bases above their reactor's room reduce the tenant's in proportion.
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
mod tests;
