//! Scheduling policies: the product's, and the paper's for comparison.
//!
//! The scheduler has one policy; the others result from budgets and a node without limits. `base`
//! has burst limits equal to the base; `wild` has only burst limits.
//!
//! **Not here:** `wild`'s rounds ([`crate::simulation`]).

use forebay_qos::budget::{Budget, Burst};
use forebay_qos::params::Params as SchedulerParams;
use forebay_qos::resources::{PLENTY, SHARED};
use std::ops::{Deref, DerefMut};

/// A scheduling policy.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Policy {
    /// Base guaranteed, the rest shared: BurstCBS.
    #[default]
    Burst,
    /// Base and never more: the paper's BaseCBS.
    Base,
    /// Up to the burst limit, lanes in a weighted round robin: the paper's WildCBS.
    Wild,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Burst, Self::Base, Self::Wild];

    /// Its name in a figure.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Burst => "burst",
            Self::Base => "base",
            Self::Wild => "wild",
        }
    }

    /// A tenant's budget under this policy.
    #[must_use]
    pub fn budget(self, budget: &Budget) -> Budget {
        match self {
            Self::Base => Budget {
                burst: budget.base,
                how: Burst::Metered,
                ..*budget
            },
            _ => *budget,
        }
    }

    /// Each shared resource per second; `own` is the model's.
    #[must_use]
    pub fn per_second(self, own: [f64; SHARED], window_ns: u64) -> [f64; SHARED] {
        match self {
            Self::Burst => own,
            _ => [f64::from(PLENTY / 2) * 1e9 / window_ns as f64; SHARED],
        }
    }
}

/// Which reactors serve a tenant's queues.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SimSpread {
    /// One reactor for each queue.
    OneToOne,
    /// Likewise, but idle reactors take from the longest queue.
    Stealing,
    /// All idle reactors serve all queues.
    #[default]
    OneToN,
}

impl SimSpread {
    /// All spreads.
    pub const ALL: [Self; 3] = [Self::OneToOne, Self::Stealing, Self::OneToN];

    /// Its name in a figure.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneToOne => "one-to-one",
            Self::Stealing => "stealing",
            Self::OneToN => "one-to-n",
        }
    }
}

/// The policy and the scheduler's parameters.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Params {
    /// The policy.
    pub policy: Policy,
    /// The scheduler's parameters.
    pub scheduler: SchedulerParams,
}

impl Deref for Params {
    type Target = SchedulerParams;

    fn deref(&self) -> &SchedulerParams {
        &self.scheduler
    }
}

impl DerefMut for Params {
    fn deref_mut(&mut self) -> &mut SchedulerParams {
        &mut self.scheduler
    }
}
