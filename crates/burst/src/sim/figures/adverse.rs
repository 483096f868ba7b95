//! Figures that the paper lacks.

use super::paper::{beside, node, params, run};
use super::{Effort, Figure};
use crate::params::{Params, Policy};
use crate::sim::model::{Guest, Load, metered};

const BASE: (u64, u64) = (20_000, 140_000_000);
const BURST: (u64, u64) = (1_000_000, 4_096_000_000);

/// A victim at depth 1 beside 31 of each kind: mean, p99 and p99.9, and under wild.
pub(super) fn adversaries(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "4 KiB at depth 1 beside 31 adversaries".into(),
        across: "adversary",
        unit: "us",
        columns: [
            "mean",
            "p99",
            "p99.9",
            "wild mean",
            "wild p99",
            "wild p99.9",
        ]
        .map(str::to_owned)
        .to_vec(),
        names: vec!["none", "steady", "pulse 1x", "pulse 2x", "fishing", "sizes"],
        assumed: "2 reactors, 100 Gbit/s, depth 64".into(),
        ..Figure::default()
    };
    let window = Params::default().window_ns;
    let pulse = |on, of| Load {
        pulse: Some((on, of)),
        ..Load::iops(64)
    };
    let kinds = [
        Load {
            start_ns: u64::MAX / 2,
            ..Load::iops(64)
        },
        Load::iops(64),
        pulse(window / 8, window),
        pulse(window, 2 * window),
        pulse(5_000_000, 50_000_000),
        Load {
            sizes: vec![512, 1 << 20],
            ..Load::iops(16)
        },
    ];
    for (row, load) in kinds.into_iter().enumerate() {
        let mut values = Vec::new();
        for policy in [Policy::Burst, Policy::Wild] {
            let (had, _) = run(
                node(),
                &params(policy),
                beside(metered(BASE, BURST), 31, &load),
                effort,
            );
            let latency = &had[0].latency;
            values.extend([
                latency.mean_us(),
                latency.percentile_us(99.0),
                latency.percentile_us(99.9),
            ]);
        }
        figure.rows.push((row as f64, values));
    }
    figure
}

/// So many wake at once and ask for their base: what the slowest of them has in the first windows.
pub(super) fn wakers(_: Effort) -> Figure {
    let mut figure = Figure {
        title: "Tenants that wake at once: the slowest one's part of its base, by window".into(),
        across: "wakers",
        unit: "% of its base",
        columns: ["window 1", "window 2", "window 3", "window 4"]
            .map(str::to_owned)
            .to_vec(),
        assumed:
            "2 reactors, 100 Gbit/s, 2 bursting at depth 512; each wakes with a base of 20,000"
                .into(),
        ..Figure::default()
    };
    for wakers in [1usize, 2, 4, 8, 16, 32] {
        let mut guests = vec![Guest::new(metered(BASE, BURST), Load::iops(512)); 2];
        let wake = Load {
            rate: Some(20_000.0),
            start_ns: 30_000_000,
            ..Load::small(64)
        };
        guests.extend(vec![Guest::new(metered(BASE, BURST), wake); wakers]);
        let params = Params::default();
        let mut machine =
            crate::sim::machine::Machine::new(node(), &params, guests, Default::default(), 3)
                .unwrap_or_else(|bad| panic!("{bad}"));
        machine.count_windows();
        let had = machine.run(30_000_000, 10_000_000);
        // The first I/Os end a backend's time later: windows are counted from then on.
        let base = 20_000.0 * params.window_ns as f64 / 1e9;
        let row = (0..4)
            .map(|window| {
                let of = |had: &crate::sim::stats::Had| {
                    had.by_window.get(window + 1).copied().unwrap_or(0)
                };
                let least = had[2..].iter().map(of).min().unwrap_or(0);
                100.0 * f64::from(least) / base
            })
            .collect();
        figure.rows.push((wakers as f64, row));
    }
    figure
}

/// Without one technique each.
pub(super) fn ablation(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "Without one technique each: a victim at depth 1, 31 neighbours at depth 64".into(),
        across: "without",
        unit: "us, and % of wild's bytes",
        columns: ["mean", "p99", "p99.9", "throughput %"]
            .map(str::to_owned)
            .to_vec(),
        names: vec![
            "nothing",
            "correction",
            "reserve",
            "saving",
            "fading",
            "policy",
        ],
        assumed: "2 reactors, 100 Gbit/s, 4 to 16 KiB, costs 1.5 times what is calibrated".into(),
        ..Figure::default()
    };
    let mut all: Vec<Params> = vec![params(Policy::Burst); 6];
    (all[1].correction_least, all[1].correction_most) = (1.0, 1.0);
    all[2].reserve_most = 0.0;
    all[3].saved_windows = 1;
    all[4].keep = 0.98;
    all[5].policy = Policy::Wild;
    let mut sums = Vec::new();
    for (row, params) in all.into_iter().enumerate() {
        let model = crate::sim::model::Model {
            cpu_truth: 1.5,
            ..node()
        };
        let (had, _) = run(
            model,
            &params,
            beside(metered(BASE, BURST), 31, &Load::iops(64)),
            effort,
        );
        let latency = &had[0].latency;
        figure.rows.push((
            row as f64,
            vec![
                latency.mean_us(),
                latency.percentile_us(99.0),
                latency.percentile_us(99.9),
            ],
        ));
        sums.push(had.iter().map(|had| had.bytes as f64).sum::<f64>());
    }
    for (row, sum) in figure.rows.iter_mut().zip(&sums) {
        row.1.push(100.0 * sum / sums[5]);
    }
    figure
}
