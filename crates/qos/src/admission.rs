//! Whom a node can take.
//!
//! **Design.** A base is guaranteed if the most that it can use of each resource, whatever the sizes and operations, fits
//! beside that of all others into what was measured of the node. More can be promised, as a setting says (oversubscription);
//! then interference has a probability, and it is told: of N tenants of which each wants its base with probability p,
//! that k or more do is `1 - sum(i < k) C(N, i) p^i (1 - p)^(N - i)`. **Not here:** measuring; which
//! reactor gives it ([`crate::placement`]).

use crate::budget::{BadBudget, Budget, LEAST, Rate};
use crate::cost::CostTable;
use crate::params::Params;
use crate::resources::{Resource, SHARED, SHARED_RESOURCES};

/// What was measured of a node, a second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Capacity {
    /// Reactors, each with a processor of its own.
    pub reactors: u32,
    /// Devices that can be read from at once at their whole speed, in the costs' terms: 1 if costs are of all devices.
    pub device_reads: f64,
    /// The same of writes.
    pub device_writes: f64,
    /// Bytes a second that can come in.
    pub link_in: f64,
    /// Bytes a second that can go out.
    pub link_out: f64,
    /// Operations a second that the software carries at most.
    pub operations: f64,
}

impl Capacity {
    /// Of each resource, a second, in the units of costs.
    #[must_use]
    pub fn per_second(&self) -> [f64; SHARED] {
        [
            f64::from(self.reactors) * 1e9,
            self.device_reads * 1e9,
            self.device_writes * 1e9,
            self.link_in,
            self.link_out,
            self.operations * f64::from(crate::resources::PARTS),
        ]
    }
}

/// Of what is measured, so much may be promised: the reserve is nobody's base.
#[must_use]
pub fn usable(params: &Params) -> f64 {
    f64::from(params.utilisation * (1.0 - params.reserve_most))
}

/// The largest base like this one of which `has` says that there is so much: the same, smaller, but not below the least that
/// there is; nothing if not even that.
pub fn largest(base: Rate, has: impl Fn(Rate) -> bool) -> Rate {
    let of = |part: f64| Rate {
        iops: ((base.iops as f64 * part) as u64).max(LEAST.iops),
        bytes: ((base.bytes as f64 * part) as u64).max(LEAST.bytes),
    };
    if !has(of(0.0)) {
        return Rate { iops: 0, bytes: 0 };
    }
    let (mut fits, mut too_much) = (0.0, 1.0);
    for _ in 0..40 {
        let middle = (fits + too_much) / 2.0;
        *if has(of(middle)) {
            &mut fits
        } else {
            &mut too_much
        } = middle;
    }
    of(fits)
}

/// A node and what it has promised.
#[derive(Clone, Debug)]
pub struct Node {
    capacity: Capacity,
    /// Of what is there, so much may be promised: 1 guarantees all of it.
    oversubscription: f64,
    usable: f64,
    promised: [f64; SHARED],
    tenants: u32,
}

/// A tenant that is not taken.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Refused {
    /// Its budget can't be.
    Bad(BadBudget),
    /// There isn't so much.
    Full {
        /// Of what.
        resource: Resource,
        /// So much of the node's would be needed, per cent.
        needed_percent: f64,
        /// So much is left, per cent.
        left_percent: f64,
        /// The same base, smaller: this much would fit.
        fits: Rate,
    },
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bad(bad) => bad.fmt(f),
            Self::Full {
                resource,
                needed_percent,
                left_percent,
                fits,
            } => {
                write!(
                    f,
                    "this base needs {needed_percent:.1} % of the node's {}, and {left_percent:.1} % is not promised yet: ",
                    resource.name()
                )?;
                if fits.iops < LEAST.iops || fits.bytes < LEAST.bytes {
                    write!(f, "no base fits")
                } else {
                    write!(
                        f,
                        "a base of {} IOPS and {} bytes/s fits",
                        fits.iops, fits.bytes
                    )
                }
            }
        }
    }
}

impl std::error::Error for Refused {}

impl Node {
    /// A node that has promised nothing yet. `oversubscription` below 1 counts as 1.
    #[must_use]
    pub fn new(capacity: Capacity, params: &Params, oversubscription: f64) -> Self {
        Self {
            capacity,
            oversubscription: oversubscription.max(1.0),
            usable: usable(params),
            promised: [0.0; SHARED],
            tenants: 0,
        }
    }

    /// Takes a tenant, if its base fits beside the others'.
    /// Errors: what there is too little of, and what would fit.
    pub fn take(&mut self, budget: &Budget, costs: &CostTable) -> Result<(), Refused> {
        budget.check().map_err(Refused::Bad)?;
        let most = costs.most_of(budget.base);
        let whole = self.capacity.per_second();
        let mut worst: Option<(f64, usize)> = None;
        for resource in 0..SHARED {
            let left = self.left(resource);
            if most[resource] > left {
                let part = left.max(0.0) / most[resource];
                if worst.is_none_or(|(least, _)| part < least) {
                    worst = Some((part, resource));
                }
            }
        }
        if let Some((_, resource)) = worst {
            let percent = |value: f64| 100.0 * value / whole[resource].max(1.0);
            return Err(Refused::Full {
                resource: SHARED_RESOURCES[resource],
                needed_percent: percent(most[resource]),
                left_percent: percent(self.left(resource).max(0.0)),
                fits: largest(budget.base, |base| {
                    let most = costs.most_of(base);
                    (0..SHARED).all(|resource| most[resource] <= self.left(resource))
                }),
            });
        }
        self.keep(budget, costs);
        Ok(())
    }

    /// One that was promised before, whatever there is now.
    pub fn keep(&mut self, budget: &Budget, costs: &CostTable) {
        for (promised, most) in self.promised.iter_mut().zip(costs.most_of(budget.base)) {
            *promised += most;
        }
        self.tenants += 1;
    }

    /// Gives back what [`Self::take`] took.
    pub fn release(&mut self, budget: &Budget, costs: &CostTable) {
        for (promised, most) in self.promised.iter_mut().zip(costs.most_of(budget.base)) {
            *promised = (*promised - most).max(0.0);
        }
        self.tenants = self.tenants.saturating_sub(1);
    }

    /// What of each resource is promised, as a part of what may be without oversubscription.
    #[must_use]
    pub fn promised(&self) -> [f64; SHARED] {
        let whole = self.capacity.per_second();
        std::array::from_fn(|resource| {
            self.promised[resource] / (whole[resource] * self.usable).max(1.0)
        })
    }

    /// Tenants that were taken.
    #[must_use]
    pub fn tenants(&self) -> u32 {
        self.tenants
    }

    /// What of a resource can still be promised, a second.
    fn left(&self, resource: usize) -> f64 {
        self.capacity.per_second()[resource] * self.usable * self.oversubscription
            - self.promised[resource]
    }

    /// How many tenants of the mean base can have it at once: of the resource that ends first.
    #[must_use]
    pub fn at_once(&self) -> u32 {
        let mut least = f64::from(self.tenants);
        for (whole, promised) in self.capacity.per_second().iter().zip(self.promised) {
            if promised > 0.0 {
                least = least.min(whole * self.usable * f64::from(self.tenants) / promised);
            }
        }
        // Exactly full is not over.
        (least + 1e-9).floor() as u32
    }

    /// The probability that bases can't all be had, when each tenant wants its base with probability `wants`.
    #[must_use]
    pub fn interference(&self, wants: f64) -> f64 {
        interference(self.tenants, self.at_once() + 1, wants)
    }
}

/// Of `tenants`, each of which wants its base with probability `p`: the probability that `k` or more do at once.
#[must_use]
pub fn interference(tenants: u32, k: u32, p: f64) -> f64 {
    if k > tenants {
        return 0.0;
    }
    if k == 0 {
        return 1.0;
    }
    let p = p.clamp(0.0, 1.0);
    if p == 0.0 || p == 1.0 {
        return p;
    }
    // In logarithms, from the larger side: C(n, i) is too large for a number.
    let (ln_p, ln_q) = (p.ln(), (-p).ln_1p());
    let mut ln_choose = 0.0;
    let mut sum = 0.0;
    for i in 0..=tenants {
        if i > 0 {
            ln_choose += (f64::from(tenants - i + 1) / f64::from(i)).ln();
        }
        if i >= k {
            sum += (ln_choose + f64::from(i) * ln_p + f64::from(tenants - i) * ln_q).exp();
        }
    }
    sum.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Burst;
    use crate::cost::tests::table;

    fn node(oversubscription: f64) -> Node {
        let capacity = Capacity {
            reactors: 2,
            device_reads: 4.0,
            device_writes: 4.0,
            link_in: 12.5e9,
            link_out: 12.5e9,
            operations: 4e6,
        };
        let params = Params {
            utilisation: 1.0,
            ..Params::default()
        };
        Node::new(capacity, &params, oversubscription)
    }

    fn budget(iops: u64) -> Budget {
        let base = Rate {
            iops,
            bytes: iops * 4096,
        };
        Budget {
            base,
            burst: Rate {
                iops: 1_000_000,
                bytes: 4 << 30,
            },
            how: Burst::Metered,
        }
    }

    #[test]
    fn more_base_than_there_is_says_what_would_fit() {
        let table = table();
        let mut node = node(1.0);
        // A write costs 1364 ns of a processor and 0.04 ns a byte more in the worst case: 1.53 us; two processors do 1.3 M.
        let refused = node.take(&budget(2_000_000), &table);
        assert!(matches!(refused, Err(Refused::Bad(_))), "{refused:?}");
        let mut large = budget(999_999);
        assert_eq!(node.take(&large, &table), Ok(()));
        let said = node.take(&large, &table);
        let Err(Refused::Full { resource, fits, .. }) = said else {
            panic!("{said:?}");
        };
        assert_eq!(resource, Resource::Cpu);
        let text = said.map_err(|refused| refused.to_string());
        assert!(
            text.as_ref()
                .is_err_and(|text| text.contains("processor time") && text.contains("fits")),
            "{text:?}"
        );
        // What is said to fit does, and no more.
        large.base = fits;
        assert_eq!(node.take(&large, &table), Ok(()));
        assert!(node.take(&budget(1000), &table).is_err());
        node.release(&large, &table);
        assert_eq!(node.take(&budget(1000), &table), Ok(()));
    }

    #[test]
    fn oversubscription_promises_more_and_says_how_likely_it_breaks() {
        let table = table();
        let fill = |node: &mut Node| {
            let mut taken = 0;
            while node.take(&budget(50_000), &table).is_ok() {
                taken += 1;
            }
            taken
        };
        let (mut one, mut two) = (node(1.0), node(2.0));
        let (taken, twice) = (fill(&mut one), fill(&mut two));
        assert!(
            (2 * taken..=2 * taken + 1).contains(&twice),
            "{taken} {twice}"
        );
        assert_eq!(one.interference(1.0), 0.0);
        assert_eq!(two.interference(1.0), 1.0);
        let seldom = two.interference(0.2);
        assert!(seldom > 0.0 && seldom < 0.05, "{seldom}");
    }

    #[test]
    fn the_papers_formula() {
        // By hand: of 3, at least 2 with 1/2 each: 3/8 + 1/8.
        assert!((interference(3, 2, 0.5) - 0.5).abs() < 1e-12);
        assert!((interference(10, 1, 0.1) - (1.0 - 0.9f64.powi(10))).abs() < 1e-12);
        assert_eq!(interference(5, 6, 0.9), 0.0);
        assert_eq!(interference(5, 0, 0.0), 1.0);
        let large = interference(4096, 2048, 0.5);
        assert!((0.5..0.52).contains(&large), "{large}");
    }
}
