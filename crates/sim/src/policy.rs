//! How the node's time and devices are given out: as the product does it, and as what the paper compares with.
//!
//! **Design.** The scheduler knows one policy. The others are made of budgets and of a node without an end: `base` is a
//! burst limit that equals the base; `wild` is burst limits alone, in rounds in which lanes begin a batch each.
//! **Not here:** the rounds ([`crate::simulation`]).

use forebay_qos::budget::{Budget, Burst};
use forebay_qos::params::Params as SchedulerParams;
use forebay_qos::resources::{PLENTY, SHARED};
use std::ops::{Deref, DerefMut};

/// See the module's text.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Policy {
    /// Base guaranteed, the rest shared: BurstCBS.
    #[default]
    Burst,
    /// Everyone has their base and never more: the paper's BaseCBS.
    Base,
    /// Everyone up to their burst limit, lanes in a weighted round robin: the paper's WildCBS.
    Wild,
}

impl Policy {
    /// All of them.
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

    /// What there is of each shared resource a second, where `own` is what the model has.
    #[must_use]
    pub fn per_second(self, own: [f64; SHARED], window_ns: u64) -> [f64; SHARED] {
        match self {
            Self::Burst => own,
            _ => [f64::from(PLENTY / 2) * 1e9 / window_ns as f64; SHARED],
        }
    }
}

/// Which reactor serves what of a tenant's queues.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SimSpread {
    /// A queue is one reactor's.
    OneToOne,
    /// And who is idle takes from the longest queue.
    Stealing,
    /// All that are idle serve all.
    #[default]
    OneToN,
}

impl SimSpread {
    /// All of them.
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

/// The scheduler's parameters, and the policy.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Params {
    /// How things are given out.
    pub policy: Policy,
    /// What can be set of the scheduler.
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
