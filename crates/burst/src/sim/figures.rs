//! The paper's figures, and those that it lacks.
//!
//! **Design.** Each is a table with a name; what the paper says of it is a [`Claim`] with the range that was published, our
//! value, and why they differ where they do. **Not here:** printing and plotting (`cargo xtask sim`).

mod adverse;
mod paper;
mod scale;

/// A line of what the paper says.
#[derive(Clone, Debug)]
pub struct Claim {
    /// What is compared.
    pub what: String,
    /// In the paper.
    pub paper: &'static str,
    /// What of ours counts as the same.
    pub range: (f64, f64),
    /// Ours.
    pub ours: f64,
    /// Why they differ, or what makes them alike.
    pub why: &'static str,
}

impl Claim {
    /// Whether ours lies within the published range.
    #[must_use]
    pub fn holds(&self) -> bool {
        (self.range.0..=self.range.1).contains(&self.ours)
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
    /// What was assumed.
    pub assumed: String,
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
        paper::base,
    ),
    (
        "wake",
        "a tenant that wakes, with streams of more and more IOPS",
        paper::wake,
    ),
    (
        "transactions",
        "transactions of several I/Os each, with 8 and 15 bursting neighbours",
        paper::transactions,
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
        "ablation",
        "the same neighbours, without one technique each",
        adverse::ablation,
    ),
];

/// Makes a figure by its name.
#[must_use]
pub fn make(name: &str, effort: Effort) -> Option<Figure> {
    let found = FIGURES.iter().find(|(own, _, _)| *own == name);
    found.map(|(_, _, make)| make(effort))
}
