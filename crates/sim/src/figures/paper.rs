//! Figures from the paper.

use super::{Better, Claim, Effort, Figure, about, described};
use crate::model::{Guest, Load, Model, metered};
use crate::policy::{Params, Policy};
use crate::simulation::{SimSpread, Simulation};
use crate::stats::Had;
use forebay_qos::resources::Resource;

/// The paper's node has 2 to 4 control threads, here 2.
pub(super) fn node() -> Model {
    Model {
        reactors: 2,
        ..Model::default()
    }
}

pub(super) fn params(policy: Policy) -> Params {
    Params {
        policy,
        ..Params::default()
    }
}

pub(super) fn run(
    model: Model,
    params: &Params,
    guests: Vec<Guest>,
    effort: Effort,
) -> (Vec<Had>, Simulation) {
    run_again(model, params, guests, effort, 42)
}

pub(super) fn run_again(
    model: Model,
    params: &Params,
    guests: Vec<Guest>,
    effort: Effort,
    seed: u64,
) -> (Vec<Had>, Simulation) {
    let mut simulation = Simulation::new(model, params, guests, SimSpread::OneToOne, seed)
        .unwrap_or_else(|bad| panic!("{bad}"));
    let had = simulation.run(30_000_000, effort.ms * 1_000_000).to_vec();
    (had, simulation)
}

/// Runs with different seeds.
pub(super) const CHANCES: u64 = 8;

/// A victim at depth 1 within its base, and its neighbours.
pub(super) fn beside(
    budget: forebay_qos::budget::Budget,
    neighbours: usize,
    load: &Load,
) -> Vec<Guest> {
    let mut guests = vec![Guest::new(budget, Load::small(1))];
    guests.extend((0..neighbours).map(|_| Guest::new(budget, load.clone())));
    guests
}

/// [`beside`] with the paper's VMs as neighbours: four queues each, two on each reactor.
pub(super) fn beside_vms(
    budget: forebay_qos::budget::Budget,
    neighbours: usize,
    load: &Load,
) -> Vec<Guest> {
    let mut guests = beside(budget, neighbours, load);
    for guest in &mut guests[1..] {
        guest.queues = QUEUES.to_vec();
    }
    guests
}

/// An even spread, as of a load generator.
const QUEUES: [f64; 4] = [25.0; 4];

const DEPTHS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Operations and bytes per second.
pub(super) type Rates = (u64, u64);
pub(super) type LoadAt = fn(u32) -> Load;
/// Two products, as in the paper: name, base, burst limit.
pub(super) const PRODUCTS: [(&str, Rates, Rates); 2] = [
    ("small", (20_000, 140_000_000), (1_000_000, 4_096_000_000)),
    ("large", (45_000, 315_000_000), (1_000_000, 4_096_000_000)),
];

pub(super) fn latency(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "Latency of 4 KiB at depth 1, neighbours bursting".into(),
        across: "depth",
        unit: "us",
        assumed: "2 reactors, 100 Gbit/s, 31 neighbours of the small product (20,000 IOPS), 15 of the large (45,000), each with 4 queues".into(),
        ..Figure::default()
    };
    let mut rows: Vec<(f64, Vec<f64>)> = DEPTHS
        .iter()
        .map(|depth| (f64::from(*depth), Vec::new()))
        .collect();
    let kinds: [(&str, LoadAt); 2] = [("bytes", Load::bytes), ("IOPS", Load::iops)];
    for (kind, load) in kinds {
        let mut cuts = Vec::new();
        let mut plain = Vec::new();
        for (product, base, burst) in PRODUCTS {
            let neighbours = if product == "small" { 31 } else { 15 };
            for policy in [Policy::Wild, Policy::Burst] {
                figure
                    .columns
                    .push(format!("{kind} {product} {}", policy.name()));
            }
            for (depth, row) in DEPTHS.into_iter().zip(&mut rows) {
                let mean = |policy, base_first| {
                    let guests = beside_vms(metered(base, burst), neighbours, &load(depth));
                    let model = Model {
                        base_first,
                        ..node()
                    };
                    run(model, &params(policy), guests, effort).0[0]
                        .latency
                        .mean_us()
                };
                let (wild, ours) = (mean(Policy::Wild, false), mean(Policy::Burst, true));
                row.1.extend([wild, ours]);
                cuts.push((wild, 100.0 * (1.0 - ours / wild)));
                let ours = mean(Policy::Burst, false);
                plain.push((wild, 100.0 * (1.0 - ours / wild)));
            }
        }
        // Only where wild at least doubles a victim's latency alone, about 76 us.
        let mean = |cuts: &[(f64, f64)]| {
            let hurt = cuts.iter().filter(|(wild, _)| *wild >= 152.0);
            let (sum, count) = hurt.fold((0.0, 0), |(sum, count), (_, cut)| (sum + cut, count + 1));
            sum / f64::from(count.max(1))
        };
        let (paper, range) = if kind == "bytes" {
            ("68 to 85 % less than wild", (68.0, 85.0))
        } else {
            ("40 to 66 % less than wild", (40.0, 66.0))
        };
        figure.claims.push(Claim {
            what: format!(
                "{kind}, with a first-come, first-served processor: latency reduction against wild, the mean where wild's latency is at least twice that alone, %"
            ),
            paper,
            range,
            better: Better::More,
            ours: mean(&plain),
            why: "Not our scheduler, but what the paper seems to use: only the shorter queue at the processor remains",
        });
        figure.claims.push(Claim {
            what: format!("{kind}, as in the table"),
            paper,
            range,
            better: Better::More,
            ours: mean(&cuts),
            why: "Here, tenants within their base go first at the processor",
        });
    }
    figure.rows = rows;
    figure
}

pub(super) fn tails(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "Tail latency of 4 KiB at depth 1, neighbours bursting".into(),
        across: "depth",
        unit: "us",
        assumed: "2 reactors, 100 Gbit/s, 31 neighbours (20,000 IOPS each), each with 4 queues"
            .into(),
        ..Figure::default()
    };
    let kinds: [(&str, LoadAt); 2] = [("bytes", Load::bytes), ("IOPS", Load::iops)];
    for (kind, _) in kinds {
        for policy in ["wild", "burst"] {
            for tail in ["p99", "p99.9"] {
                figure.columns.push(format!("{kind} {policy} {tail}"));
            }
        }
    }
    for depth in DEPTHS {
        let mut row = Vec::new();
        for (_, load) in kinds {
            for policy in [Policy::Wild, Policy::Burst] {
                let guests = beside_vms(metered(PRODUCTS[0].1, PRODUCTS[0].2), 31, &load(depth));
                let (had, _) = run(node(), &params(policy), guests, effort);
                let latency = &had[0].latency;
                row.extend([latency.percentile_us(99.0), latency.percentile_us(99.9)]);
            }
        }
        figure.rows.push((f64::from(depth), row));
    }
    figure
}

/// One tenant alone and thirty-two together, in GB/s and thousands of IOPS.
pub(super) fn most(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "Maximum throughput by bursting".into(),
        across: "load",
        unit: "GB/s, or 100,000 IOPS",
        columns: Policy::ALL.iter().map(|policy| policy.name().to_owned()).collect(),
        names: vec![
            "1 bytes",
            "32 bytes",
            "1 IOPS",
            "32 IOPS",
            "32 bytes apart",
            "32 bytes told",
        ],
        assumed: "2 reactors, 100 Gbit/s, limits of 3 GB/s and 1,000,000 IOPS, depth 64 alone and 32 together, each with 4 queues".into(),
        ..Figure::default()
    };
    let mut losses = Vec::new();
    for (row, (count, load)) in [
        (1, Load::bytes(64)),
        (32, Load::bytes(32)),
        (1, Load::small(256)),
        (32, Load::small(32)),
        (32, Load::bytes(32)),
        (32, Load::bytes(32)),
    ]
    .into_iter()
    .enumerate()
    {
        let budget = metered((20_000, 140_000_000), (1_000_000, 3_000_000_000));
        let mut values = Vec::new();
        for policy in Policy::ALL {
            let guest = Guest {
                queues: QUEUES.to_vec(),
                ..Guest::new(budget, load.clone())
            };
            let guests = vec![guest; count];
            let model = Model {
                apart: row == 4,
                links_known: row == 5,
                ..node()
            };
            let (had, _) = run(model, &params(policy), guests, effort);
            let seconds = effort.ms as f64 / 1e3;
            let value: f64 = had
                .iter()
                .map(|had| {
                    if row != 2 && row != 3 {
                        had.bytes as f64 / 1e9
                    } else {
                        had.latency.count() as f64 / 1e5
                    }
                })
                .sum();
            values.push(value / seconds);
        }
        losses.push(100.0 * (1.0 - values[0] / values[2]));
        figure.rows.push((row as f64, values));
    }
    figure.claims.push(twice_the_base(effort));
    figure.claims.extend(less_than_wild(&losses));
    figure
}

/// The paper's databases at twice their base, beside static limits.
fn twice_the_base(effort: Effort) -> Claim {
    let twice = |policy| {
        let budget = metered((20_000, 140_000_000), (40_000, 280_000_000));
        let mut guests = vec![Guest::new(budget, Load::small(32)); 16];
        guests[0].load.depth = 1;
        let (had, _) = run(node(), &params(policy), guests, effort);
        had[1..].iter().map(|had| had.latency.count()).sum::<u64>() as f64
    };
    Claim {
        what: "15 tenants that burst to twice their base, relative to static limits".into(),
        paper: "1.7 to 2.5 times (YCSB)",
        range: (1.7, 2.5),
        better: Better::Neither,
        ours: twice(Policy::Burst) / twice(Policy::Base),
        why: "The paper's are transactions of a database",
    }
}

/// Losses against wild in the rows of [`most`].
fn less_than_wild(losses: &[f64]) -> Vec<Claim> {
    let rows = [
        (
            "one tenant, bytes",
            losses[0],
            "Limited by its depth as much as by the policy",
        ),
        (
            "one tenant, IOPS",
            losses[2],
            "Limited by its depth as much as by the policy",
        ),
        (
            "32 tenants, IOPS",
            losses[3],
            "The loss is the share that is not given out (`utilisation`); an unused reserve is given out one window later",
        ),
        (
            "32 tenants, bytes",
            losses[1],
            "An I/O that waits in a lane for one link blocks the I/Os behind it from the other link (`32 bytes apart` is without this). The loss is given out again (`link_carried`)",
        ),
        (
            "32 tenants, bytes, if the links' delays were known",
            losses[5],
            "Not our scheduler: the engine can't measure them. The paper's delays include everything but the backend",
        ),
    ];
    let claim = |(name, ours, why): (&str, f64, &'static str)| Claim {
        what: format!("{name}: reduction against wild, %"),
        paper: "5 to 8 % less",
        range: (5.0, 8.0),
        better: Better::Less,
        ours,
        why,
    };
    rows.map(claim).into()
}

/// A node with costs at half of the truth and no priority. Like the paper's threads, it visits each
/// queue and executes its admitted I/Os.
fn wrong() -> Model {
    Model {
        cpu_truth: 2.0,
        rounds: true,
        base_first: false,
        ..node()
    }
}

/// Table 3: costs at half of the truth.
pub(super) fn estimate(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "Real costs twice the calibrated ones".into(),
        across: "policy",
        unit: "us",
        columns: vec!["reads".into(), "writes".into(), "correction".into()],
        names: vec!["wild", "uncorrected", "corrected", "ours, not c.", "ours"],
        assumed: "2 reactors, 31 neighbours at depth 32, 4 to 16 KiB; the real processor time is twice the calibrated one. In the first three, lanes start in wild's rounds under each policy, and no tenant goes first. Ours: as in all other figures".into(),
        ..Figure::default()
    };
    let ours = || Model {
        cpu_truth: 2.0,
        ..node()
    };
    let cases = [
        (wrong(), Policy::Wild, true),
        (wrong(), Policy::Burst, false),
        (wrong(), Policy::Burst, true),
        (ours(), Policy::Burst, false),
        (ours(), Policy::Burst, true),
    ];
    for (row, (model, policy, corrected)) in cases.into_iter().enumerate() {
        let mut values = Vec::new();
        let mut correction = 1.0;
        for reads in [100, 0] {
            let mut params = params(policy);
            if !corrected {
                (params.correction_least, params.correction_most) = (1.0, 1.0);
            }
            let mut guests = beside(metered(PRODUCTS[0].1, PRODUCTS[0].2), 31, &Load::iops(32));
            guests[0].load.reads = reads;
            let (had, simulation) = run(model.clone(), &params, guests, effort);
            values.push(had[0].latency.mean_us());
            correction = f64::from(simulation.correction(Resource::Cpu));
        }
        values.push(correction);
        figure.rows.push((row as f64, values));
    }
    figure.parameters = described(&wrong(), &Params::default());
    let part =
        |row: usize, column: usize| 100.0 * figure.rows[row].1[column] / figure.rows[0].1[column];
    // Reads and writes, corrected and not.
    let published = [22.7, 31.1, 77.4, 86.3];
    for (name, rows, why) in [
        (
            "",
            [4, 3],
            "Tenants within their base go first, and the queue at the processor is short, whatever the costs",
        ),
        (
            ", in wild's rounds",
            [2, 1],
            "Not our scheduler, but what the paper seems to use: in a window, a lane starts what it was given, which is twice the capacity. All I/Os take twice as long, as the paper's hardware faults cause. If all permitted I/Os queued at the processor at once, in order, the uncorrected result would be 89 and 91 %, but threads that poll queues have no such order",
        ),
    ] {
        for (at, published) in published.into_iter().enumerate() {
            let kind = ["reads", "writes"][at % 2];
            let how = ["corrected", "uncorrected"][at / 2];
            figure.claims.push(Claim {
                what: format!("{kind}, {how}{name}: % of wild's"),
                paper: ["22.7", "31.1", "77.4", "86.3"][at],
                range: about(published),
                better: Better::Less,
                ours: part(rows[at / 2], at % 2),
                why,
            });
        }
    }
    figure
}
