//! The paper's figures, and those that it lacks.
//!
//! **Design.** Each is a table with a name; what the paper says of it is a [`Claim`] with the range that was published, our
//! value, and why they differ where they do. **Not here:** printing and plotting (`cargo xtask sim`).

mod adverse;
mod paper;
mod scale;
mod within;

use super::model::Model;
use crate::policy::Params;

/// A line of what the paper says.
#[derive(Clone, Debug)]
pub struct Claim {
    /// What is compared.
    pub what: String,
    /// In the paper.
    pub paper: &'static str,
    /// The range that was published; of a single value, what is [`about`] it.
    pub range: (f64, f64),
    /// On which side of it lies what is better than the paper's.
    pub better: Better,
    /// Ours.
    pub ours: f64,
    /// Why they differ, or what makes them alike.
    pub why: &'static str,
}

/// What is better than a published range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Better {
    /// Nothing.
    Neither,
    /// What is below it.
    Less,
    /// What is above it.
    More,
}

/// What counts as a value that was published alone, or as "about" so much: a tenth less to a tenth more.
#[must_use]
pub fn about(value: f64) -> (f64, f64) {
    (0.9 * value, 1.1 * value)
}

impl Claim {
    /// Whether ours lies within the published range.
    #[must_use]
    pub fn is_within(&self) -> bool {
        (self.range.0..=self.range.1).contains(&self.ours)
    }

    /// Whether it does, or is better.
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

/// A table, and what it is about.
#[derive(Clone, Default, Debug)]
pub struct Figure {
    /// For people.
    pub title: String,
    /// What the rows differ in.
    pub across: &'static str,
    /// What the numbers are.
    pub unit: &'static str,
    /// The columns.
    pub columns: Vec<String>,
    /// The rows: what it is, and a number for each column.
    pub rows: Vec<(f64, Vec<f64>)>,
    /// Rows by name, where what they differ in is no number.
    pub names: Vec<&'static str>,
    /// What the paper says.
    pub claims: Vec<Claim>,
    /// What was assumed of loads.
    pub assumed: String,
    /// All of the node and the scheduler: of what nothing else is said, the defaults.
    pub parameters: String,
}

/// How long is simulated: a quick look, or enough for tails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// Of measurement, ms.
    pub ms: u64,
}

impl Effort {
    /// A quick look.
    pub const QUICK: Self = Self { ms: 40 };
    /// Enough for tails.
    pub const FULL: Self = Self { ms: 400 };
}

/// All parameters of a node and its scheduler, for people.
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

/// All of them: name, what it is, how it is made.
pub const FIGURES: &[(&str, &str, Make)] = &[
    (
        "latency",
        "a victim's latency against its neighbours' depth, two workloads, two products",
        paper::latency,
    ),
    ("tails", "the same victim's p99 and p99.9", paper::tails),
    (
        "burst",
        "the most that one tenant and all together get, each policy",
        paper::most,
    ),
    (
        "estimate",
        "costs that are estimated at half of what they are (the paper's Table 3)",
        paper::estimate,
    ),
    (
        "base",
        "a base of 20,000 IOPS asked for at each depth",
        within::base,
    ),
    (
        "wake",
        "a tenant that wakes, with streams of more and more IOPS",
        within::wake,
    ),
    (
        "transactions",
        "transactions of several I/Os each, with 8 and 15 bursting neighbours",
        within::transactions,
    ),
    (
        "balance",
        "one tenant's queues over 1 to 6 reactors, each way of spreading",
        scale::balance,
    ),
    (
        "scale",
        "32 to 2048 tenants on 1 to 64 reactors",
        scale::scale,
    ),
    (
        "adversaries",
        "what tenants who know how this works cost a victim",
        adverse::adversaries,
    ),
    (
        "wakers",
        "1 to 32 tenants that wake at once",
        adverse::wakers,
    ),
    (
        "device",
        "a device of our own that is slower or faster than its costs say",
        adverse::device,
    ),
    (
        "ablation",
        "the same neighbours, without one technique each",
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
