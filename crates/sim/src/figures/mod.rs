//! The paper's figures, and further ones.
//!
//! Each is a table; a [`Claim`] compares a published range with our value and explains the
//! difference.
//!
//! **Not here:** printing and plotting (`cargo xtask sim`).

mod adverse;
mod paper;
mod scale;
mod within;

use super::model::Model;
use crate::policy::Params;

/// A comparison with the paper.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The compared quantity.
    pub what: String,
    /// The paper's statement.
    pub paper: &'static str,
    /// The published range, or [`about`] a value.
    pub range: (f64, f64),
    /// The better side of the range.
    pub better: Better,
    /// Our value.
    pub ours: f64,
    /// Reason of the difference or agreement.
    pub why: &'static str,
}

/// Which values are better than a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Better {
    /// None.
    Neither,
    /// Values below.
    Less,
    /// Values above.
    More,
}

/// A single published value, 10 % either way.
#[must_use]
pub fn about(value: f64) -> (f64, f64) {
    (0.9 * value, 1.1 * value)
}

impl Claim {
    /// Whether our value is in the range.
    #[must_use]
    pub fn is_within(&self) -> bool {
        (self.range.0..=self.range.1).contains(&self.ours)
    }

    /// Whether it is in the range or better.
    #[must_use]
    pub fn holds(&self) -> bool {
        let better = match self.better {
            Better::Neither => false,
            Better::Less => self.ours < self.range.0,
            Better::More => self.ours > self.range.1,
        };
        better || self.is_within()
    }
}

/// A table with its claims.
#[derive(Clone, Default, Debug)]
pub struct Figure {
    /// The title.
    pub title: String,
    /// Meaning of the rows.
    pub across: &'static str,
    /// Unit of the values.
    pub unit: &'static str,
    /// Column names.
    pub columns: Vec<String>,
    /// Rows: a key, and a value for each column.
    pub rows: Vec<(f64, Vec<f64>)>,
    /// Row names, if the key is no number.
    pub names: Vec<&'static str>,
    /// Comparisons with the paper.
    pub claims: Vec<Claim>,
    /// The assumed loads.
    pub assumed: String,
    /// Parameters of node and scheduler.
    pub parameters: String,
}

/// The length of a simulation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// Measured time in ms.
    pub ms: u64,
}

impl Effort {
    /// A quick look.
    pub const QUICK: Self = Self { ms: 40 };
    /// Long enough for tail latencies.
    pub const FULL: Self = Self { ms: 400 };
}

/// Parameters of node and scheduler as text.
#[must_use]
pub fn described(model: &Model, params: &Params) -> String {
    let mut all = model.described();
    all.extend(
        params
            .values()
            .map(|(name, value)| format!("{name} {}", value as f32)),
    );
    all.join(", ")
}

type Make = fn(Effort) -> Figure;

/// All figures: name, description, function.
pub const FIGURES: &[(&str, &str, Make)] = &[
    (
        "latency",
        "a victim's latency against its neighbours' depth, two workloads, two products",
        paper::latency,
    ),
    ("tails", "the same victim's p99 and p99.9", paper::tails),
    (
        "burst",
        "the maximum for one tenant and for all together, under each policy",
        paper::most,
    ),
    (
        "estimate",
        "costs estimated at half their real value (the paper's Table 3)",
        paper::estimate,
    ),
    (
        "base",
        "a base of 20,000 IOPS, requested at each depth",
        within::base,
    ),
    (
        "wake",
        "a tenant that wakes, with streams of increasing IOPS",
        within::wake,
    ),
    (
        "transactions",
        "transactions of several I/Os each, with 8 and 15 bursting neighbours",
        within::transactions,
    ),
    (
        "balance",
        "one tenant's queues over 1 to 6 reactors, with each way of spreading",
        scale::balance,
    ),
    (
        "scale",
        "32 to 2048 tenants on 1 to 64 reactors",
        scale::scale,
    ),
    (
        "adversaries",
        "how much tenants that exploit the scheduler cost a victim",
        adverse::adversaries,
    ),
    (
        "wakers",
        "1 to 32 tenants that wake at once",
        adverse::wakers,
    ),
    (
        "device",
        "a local device that is slower or faster than its calibrated costs",
        adverse::device,
    ),
    (
        "ablation",
        "the same neighbours, with one technique off at a time",
        adverse::ablation,
    ),
];

/// Makes a figure by its name.
#[must_use]
pub fn make(name: &str, effort: Effort) -> Option<Figure> {
    let found = FIGURES.iter().find(|(own, _, _)| *own == name);
    found.map(|(_, _, make)| {
        let mut figure = make(effort);
        if figure.parameters.is_empty() {
            figure.parameters = described(&paper::node(), &Params::default());
        }
        figure
    })
}
