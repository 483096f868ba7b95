//! Figures of several reactors.

use super::paper::{node, params};
use super::{Claim, Effort, Figure};
use crate::params::Policy;
use crate::sim::machine::{Machine, Spread};
use crate::sim::model::{Guest, Load, Model, SKEWED, metered};

/// One tenant whose four queues are used as unevenly as the paper's, over 1 to 6 reactors.
pub(super) fn balance(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "4 KiB I/Os of one tenant, its queues used 81 : 14 : 3 : 2".into(),
        across: "reactors",
        unit: "thousand IOPS",
        columns: ["one-to-one", "stealing", "one-to-n", "busiest/idlest 1:1", "busiest/idlest 1:n"]
            .map(str::to_owned)
            .to_vec(),
        assumed: "depth 1024, 100 Gbit/s; a stolen I/O takes 54 % more of a processor (35 % less throughput)".into(),
        ..Figure::default()
    };
    for reactors in 1..=6usize {
        let of = |spread| {
            let model = Model { reactors, ..node() };
            let mut guest = Guest::new(
                metered((100_000, 400_000_000), (9_000_000, 40_000_000_000)),
                Load::small(1024),
            );
            guest.queues = SKEWED.to_vec();
            let mut machine = Machine::new(model, &params(Policy::Burst), vec![guest], spread, 7)
                .unwrap_or_else(|bad| panic!("{bad}"));
            let had = machine.run(30_000_000, effort.ms * 1_000_000);
            let iops = had[0].latency.count() as f64 / effort.ms as f64;
            let busy = machine.busy();
            let most = busy.iter().copied().fold(0.0, f64::max);
            let least = busy.iter().copied().fold(f64::MAX, f64::min);
            (iops, (most / least.max(1e-3)).min(999.0))
        };
        let (one, stolen, all) = (
            of(Spread::OneToOne),
            of(Spread::Stealing),
            of(Spread::OneToN),
        );
        figure
            .rows
            .push((reactors as f64, vec![one.0, stolen.0, all.0, one.1, all.1]));
    }
    let at = |row: usize, column: usize| figure.rows[row].1[column];
    let claims = [
        (
            "one-to-n: two reactors over one",
            "near linear",
            (1.8, 2.1),
            at(1, 2) / at(0, 2),
        ),
        (
            "one-to-n: busiest to idlest of six",
            "about as when users balance",
            (1.0, 1.1),
            at(5, 4),
        ),
        (
            "one-to-n over stealing, two reactors, %",
            "stealing costs 35 % of throughput",
            (5.0, 60.0),
            100.0 * (at(1, 2) / at(1, 1) - 1.0),
        ),
    ];
    figure.claims = claims
        .into_iter()
        .map(|(what, paper, range, ours)| Claim {
            what: what.into(),
            paper,
            range,
            ours,
            why: "",
        })
        .collect();
    figure
}
