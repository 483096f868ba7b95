//! Figures of several reactors.

use super::paper::{beside, node, params};
use super::{Better, Claim, Effort, Figure, about};
use crate::model::{Guest, Load, Model, SKEWED, metered};
use crate::policy::Policy;
use crate::simulation::{SimSpread, Simulation};

/// One tenant with the paper's uneven queues, over 1 to 6 reactors.
pub(super) fn balance(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "4 KiB I/Os of one tenant, its queues used 81 : 14 : 3 : 2".into(),
        across: "reactors",
        unit: "thousand IOPS",
        columns: ["one-to-one", "stealing", "one-to-n", "busiest/idlest 1:1", "busiest/idlest 1:n"]
            .map(str::to_owned)
            .to_vec(),
        assumed: "depth 1024, 100 Gbit/s; with one-to-n, one reactor is home to all of the tenant's queues and the idle others help; with stealing, an I/O takes 54 % more processor time (the paper's 35 % less throughput)".into(),
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
            if spread == SimSpread::OneToN {
                // One volume's queues.
                guest.homes = vec![0; guest.queues.len()];
            }
            let mut simulation =
                Simulation::new(model, &params(Policy::Burst), vec![guest], spread, 7)
                    .unwrap_or_else(|bad| panic!("{bad}"));
            let had = simulation.run(30_000_000, effort.ms * 1_000_000);
            let iops = had[0].latency.count() as f64 / effort.ms as f64;
            let busy = simulation.busy();
            let most = busy.iter().copied().fold(0.0, f64::max);
            let least = busy.iter().copied().fold(f64::MAX, f64::min);
            (iops, (most / least.max(1e-3)).min(999.0))
        };
        let (one, stolen, all) = (
            of(SimSpread::OneToOne),
            of(SimSpread::Stealing),
            of(SimSpread::OneToN),
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
            "The idle reactor with the least work processes an I/O at no extra cost; the home reactor admits them all",
        ),
        (
            "one-to-n: busiest to idlest of six",
            "about the same as when users balance",
            (1.0, 1.1),
            at(5, 4),
            "The same",
        ),
        (
            "stealing, two reactors: reduction against one-to-n, %",
            "stealing costs 35 % of throughput",
            about(35.0),
            100.0 * (1.0 - at(1, 1) / at(1, 2)),
            "Assumed, not measured: the extra cost of an I/O is derived from it",
        ),
    ];
    figure.claims = claims
        .into_iter()
        .map(|(what, paper, range, ours, why)| Claim {
            what: what.into(),
            paper,
            range,
            better: Better::Neither,
            ours,
            why,
        })
        .collect();
    figure
}

/// 32 tenants per reactor, up to 64 reactors.
pub(super) fn scale(effort: Effort) -> Figure {
    let mut figure = Figure {
        title:
            "A node that grows: 32 tenants to each reactor, one of them at depth 1 within its base"
                .into(),
        across: "reactors",
        unit: "us; million IOPS",
        columns: ["tenants", "mean", "p99", "wild mean", "IOPS", "wild IOPS"]
            .map(str::to_owned)
            .to_vec(),
        assumed: "100 Gbit/s for every two reactors, the others at depth 16, 4 to 16 KiB".into(),
        ..Figure::default()
    };
    // With many more I/Os a shorter time suffices.
    let ms = (effort.ms / 20).max(5);
    for reactors in [1usize, 4, 16, 64] {
        let tenants = 32 * reactors;
        let mut row = vec![tenants as f64];
        let mut rates = Vec::new();
        for policy in [Policy::Burst, Policy::Wild] {
            let model = Model {
                reactors,
                link: 6.25e9 * reactors as f64,
                ..node()
            };
            let budget = metered((15_000, 100_000_000), (1_000_000, 4_096_000_000));
            let guests = beside(budget, tenants - 1, &Load::iops(16));
            let simulation =
                Simulation::new(model, &params(policy), guests, SimSpread::OneToOne, 11);
            let mut simulation = simulation.unwrap_or_else(|bad| panic!("{bad}"));
            let had = simulation.run(15_000_000, ms * 1_000_000);
            let latency = &had[0].latency;
            row.push(latency.mean_us());
            if policy == Policy::Burst {
                row.push(latency.percentile_us(99.0));
            }
            let count: u64 = had.iter().map(|had| had.latency.count()).sum();
            rates.push(count as f64 / ms as f64 / 1e3);
        }
        row.extend(rates);
        figure.rows.push((reactors as f64, row));
    }
    figure
}
