//! Decides which bases a node accepts.
//!
//! A base is guaranteed if its worst mix of sizes and operations fits into the node beside all
//! others. Oversubscription promises more, so bases can interfere. [`crate::placement`] chooses
//! reactors; [`crate::scheduler`] admits I/Os.

use crate::budget::{BadBudget, Budget, LEAST, Rate};
use crate::cost::{CostTable, Routes};
use crate::params::Params;
use crate::resources::{Resource, SHARED, SHARED_RESOURCES};

/// The measured capacity of a node, per second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Capacity {
    /// Reactors, each with its own processor.
    pub reactors: u32,
    /// Devices that can read at full speed at once; 1 if costs were measured over all devices
    /// together.
    pub device_reads: f64,
    /// Devices that can write at full speed at once.
    pub device_writes: f64,
    /// Received bytes per second.
    pub link_in: f64,
    /// Sent bytes per second.
    pub link_out: f64,
    /// Operations per second that the software can handle.
    pub operations: f64,
}

impl Capacity {
    /// Capacity per second, in the units of costs.
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

/// The part that may be promised: `utilisation` of the capacity, less the reserve.
#[must_use]
pub fn usable(params: &Params) -> f64 {
    f64::from(params.utilisation * (1.0 - params.reserve_most))
}

/// The largest base with these proportions that `has` accepts; zero if that is below [`LEAST`].
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

/// A node and its promises.
#[derive(Clone, Debug)]
pub struct Node {
    capacity: Capacity,
    /// Multiple of the capacity that may be promised; 1 guarantees all bases.
    oversubscription: f64,
    usable: f64,
    promised: [f64; SHARED],
    tenants: u32,
}

/// Why a tenant is refused.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Refused {
    /// The budget is invalid.
    Bad(BadBudget),
    /// The base doesn't fit.
    Full {
        /// The scarcest resource.
        resource: Resource,
        /// The base's need, in percent of the node.
        needed_percent: f64,
        /// The room left, in percent of the node.
        left_percent: f64,
        /// A smaller base that would fit.
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
                    "this base needs {needed_percent:.1} % of the node's {}, but only {left_percent:.1} % is not yet promised: ",
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
    /// A node without promises; an `oversubscription` below 1 counts as 1.
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

    /// Promises a tenant its base, by these routes, if it fits.
    pub fn promise(
        &mut self,
        budget: &Budget,
        costs: &CostTable,
        routes: Routes,
    ) -> Result<(), Refused> {
        budget.check().map_err(Refused::Bad)?;
        let most = costs.most_by(budget.base, routes);
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
                    let most = costs.most_by(base, routes);
                    (0..SHARED).all(|resource| most[resource] <= self.left(resource))
                }),
            });
        }
        self.keep(budget, costs, routes);
        Ok(())
    }

    /// Counts a base that was promised earlier, whether it fits or not.
    pub fn keep(&mut self, budget: &Budget, costs: &CostTable, routes: Routes) {
        let most = costs.most_by(budget.base, routes);
        for (promised, most) in self.promised.iter_mut().zip(most) {
            *promised += most;
        }
        self.tenants += 1;
    }

    /// Withdraws a promise.
    pub fn release(&mut self, budget: &Budget, costs: &CostTable, routes: Routes) {
        let most = costs.most_by(budget.base, routes);
        for (promised, most) in self.promised.iter_mut().zip(most) {
            *promised = (*promised - most).max(0.0);
        }
        self.tenants = self.tenants.saturating_sub(1);
    }

    /// The promised part of each resource, without oversubscription.
    #[must_use]
    pub fn promised(&self) -> [f64; SHARED] {
        let whole = self.capacity.per_second();
        std::array::from_fn(|resource| {
            self.promised[resource] / (whole[resource] * self.usable).max(1.0)
        })
    }

    /// Tenants with a promise.
    #[must_use]
    pub fn tenants(&self) -> u32 {
        self.tenants
    }

    fn left(&self, resource: usize) -> f64 {
        self.capacity.per_second()[resource] * self.usable * self.oversubscription
            - self.promised[resource]
    }

    /// How many tenants with the mean base can use it at once.
    #[must_use]
    pub fn at_once(&self) -> u32 {
        let mut least = f64::from(self.tenants);
        for (whole, promised) in self.capacity.per_second().iter().zip(self.promised) {
            if promised > 0.0 {
                least = least.min(whole * self.usable * f64::from(self.tenants) / promised);
            }
        }
        (least + 1e-9).floor() as u32
    }

    /// The probability of interference if each tenant wants its base with probability `wants`.
    #[must_use]
    pub fn interference(&self, wants: f64) -> f64 {
        interference(self.tenants, self.at_once() + 1, wants)
    }
}

/// The probability that `k` or more of `tenants` want their base at once:
/// `1 - sum(i < k) C(N, i) p^i (1 - p)^(N - i)`.
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
    // Sums the upper tail in logarithms, because C(n, i) overflows.
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
        let refused = node.promise(&budget(2_000_000), &table, Routes::LOCAL);
        assert!(matches!(refused, Err(Refused::Bad(_))), "{refused:?}");
        let mut large = budget(999_999);
        assert_eq!(node.promise(&large, &table, Routes::LOCAL), Ok(()));
        let said = node.promise(&large, &table, Routes::LOCAL);
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
        large.base = fits;
        assert_eq!(node.promise(&large, &table, Routes::LOCAL), Ok(()));
        assert!(node.promise(&budget(1000), &table, Routes::LOCAL).is_err());
        node.release(&large, &table, Routes::LOCAL);
        assert_eq!(node.promise(&budget(1000), &table, Routes::LOCAL), Ok(()));
    }

    #[test]
    fn oversubscription_promises_more_and_says_how_likely_it_breaks() {
        let table = table();
        let fill = |node: &mut Node| {
            let mut taken = 0;
            while node.promise(&budget(50_000), &table, Routes::LOCAL).is_ok() {
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
        // By hand: at least 2 of 3 at p = 1/2 is 3/8 + 1/8.
        assert!((interference(3, 2, 0.5) - 0.5).abs() < 1e-12);
        assert!((interference(10, 1, 0.1) - (1.0 - 0.9f64.powi(10))).abs() < 1e-12);
        assert_eq!(interference(5, 6, 0.9), 0.0);
        assert_eq!(interference(5, 0, 0.0), 1.0);
        let large = interference(4096, 2048, 0.5);
        assert!((0.5..0.52).contains(&large), "{large}");
    }
}
