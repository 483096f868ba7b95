//! Figures beyond the paper's.

use super::paper::{beside, node, params, run};
use super::{Effort, Figure, described};
use crate::model::{Guest, Load, Model, metered};
use crate::policy::{Params, Policy};
use forebay_qos::resources::Resource;

const BASE: (u64, u64) = (20_000, 140_000_000);
const BURST: (u64, u64) = (1_000_000, 4_096_000_000);

/// A victim at depth 1 beside 31 adversaries of each kind.
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

/// Tenants wake at once and ask for their base; the result is the slowest one's.
pub(super) fn wakers(_: Effort) -> Figure {
    let mut figure = Figure {
        title: "Tenants that wake at once: the slowest tenant's share of its base since it woke".into(),
        across: "wakers",
        unit: "% of its base",
        columns: ["2 windows", "4 windows", "8 windows", "32 windows", "most behind, I/Os"]
            .map(str::to_owned)
            .to_vec(),
        assumed: "2 reactors, 100 Gbit/s, 2 bursting at depth 512; each wakes with a base of 20,000 (6 I/Os a window); an I/O in flight does not count yet"
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
        let mut simulation =
            crate::simulation::Simulation::new(node(), &params, guests, Default::default(), 3)
                .unwrap_or_else(|bad| panic!("{bad}"));
        simulation.count_windows();
        let had = simulation.run(30_000_000, 10_000_000);
        let base = 20_000.0 * params.window_ns as f64 / 1e9;
        let (mut parts, mut behind) = ([f64::MAX; 4], 0f64);
        for one in &had[2..] {
            let mut sum = 0.0;
            for window in 0..32 {
                sum += f64::from(one.by_window.get(window).copied().unwrap_or(0));
                let due = base * (window + 1) as f64;
                behind = behind.max(due - sum);
                if let Some(at) = [2, 4, 8, 32].iter().position(|end| *end == window + 1) {
                    parts[at] = parts[at].min(100.0 * sum / due);
                }
            }
        }
        let mut row = parts.to_vec();
        row.push(behind);
        figure.rows.push((wakers as f64, row));
    }
    figure
}

/// A node with a device for 300,000 reads of 4 KiB per second; `device_truth` scales its real time.
fn with_device(device_truth: f64) -> Model {
    Model {
        device_ns: (2_900.0, 0.1),
        device_truth,
        ..node()
    }
}

/// A victim before a device with wrong costs.
pub(super) fn device(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "4 KiB reads at depth 1 beside 15 bursting, on a device slower or faster than its calibrated costs"
            .into(),
        across: "of its cost",
        unit: "us; thousand IOPS",
        columns: [
            "mean uncorrected",
            "mean",
            "p99 uncorrected",
            "p99",
            "IOPS uncorrected",
            "IOPS",
            "correction",
        ]
        .map(str::to_owned)
        .to_vec(),
        assumed: "reads of 4 to 16 KiB, neighbours at depth 32, bases of 4,000 IOPS".into(),
        parameters: described(&with_device(1.0), &Params::default()),
        ..Figure::default()
    };
    for truth in [0.25, 0.5, 1.0, 2.0, 3.0] {
        let (mut rows, mut correction) = (Vec::new(), 1.0);
        for corrected in [false, true] {
            let mut params = params(Policy::Burst);
            if !corrected {
                (params.correction_least, params.correction_most) = (1.0, 1.0);
            }
            let load = Load {
                reads: 100,
                ..Load::iops(32)
            };
            let mut guests = beside(metered((4_000, 28_000_000), BURST), 15, &load);
            guests[0].load.reads = 100;
            let (had, simulation) = run(with_device(truth), &params, guests, effort);
            let latency = &had[0].latency;
            let iops: u64 = had.iter().map(|had| had.latency.count()).sum();
            rows.push([
                latency.mean_us(),
                latency.percentile_us(99.0),
                iops as f64 / effort.ms as f64,
            ]);
            correction = f64::from(simulation.correction(Resource::DeviceRead));
        }
        let mut row: Vec<f64> = (0..3).flat_map(|at| [rows[0][at], rows[1][at]]).collect();
        row.push(correction);
        figure.rows.push((truth, row));
    }
    figure
}

/// Without one technique each.
pub(super) fn ablation(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "With one technique off at a time: a victim at depth 1, 7 that pulse within their base, 24 bursting at depth 64".into(),
        across: "without",
        unit: "us, and %",
        columns: ["mean", "p99", "p99.9", "bytes, % of wild's", "pulses throttled, %"]
            .map(str::to_owned)
            .to_vec(),
        names: vec![
            "nothing",
            "cost vector",
            "correction",
            "reserve",
            "taking",
            "saving",
            "fading",
            "base first",
            "short queue",
            "policy (wild)",
        ],
        assumed: "2 reactors, 100 Gbit/s, 4 to 16 KiB, costs 1.3 times the calibrated ones".into(),
        ..Figure::default()
    };
    let model = || Model {
        cpu_truth: 1.3,
        ..node()
    };
    figure.parameters = described(&model(), &Params::default());
    let mut all = vec![(params(Policy::Burst), model()); figure.names.len()];
    all[1].1.counted = true;
    (all[2].0.correction_least, all[2].0.correction_most) = (1.0, 1.0);
    all[3].0.reserve_most = 0.0;
    all[4].0.choices = 0;
    all[5].0.saved_windows = 1;
    all[6].0.keep = 0.98;
    all[7].1.base_first = false;
    all[8].1.ahead_ns = u64::MAX;
    all[9].0.policy = Policy::Wild;
    let mut sums = Vec::new();
    for (row, (params, model)) in all.into_iter().enumerate() {
        let mut guests = beside(metered(BASE, BURST), 31, &Load::iops(64));
        for guest in &mut guests[1..8] {
            // 1,500 on average: a tenth of the time, ten times the rate.
            guest.load = Load {
                rate: Some(15_000.0),
                pulse: Some((1_000_000, 10_000_000)),
                ..Load::small(64)
            };
        }
        let (had, _) = run(model, &params, guests, effort);
        let latency = &had[0].latency;
        figure.rows.push((
            row as f64,
            vec![
                latency.mean_us(),
                latency.percentile_us(99.0),
                latency.percentile_us(99.9),
            ],
        ));
        let asked: u64 = had[1..8].iter().map(|had| had.latency.count()).sum();
        let throttled: u64 = had[1..8].iter().map(|had| had.throttled).sum();
        let bytes = had.iter().map(|had| had.bytes as f64).sum::<f64>();
        sums.push((bytes, 100.0 * throttled as f64 / asked.max(1) as f64));
    }
    let wild = sums.last().map_or(1.0, |(bytes, _)| *bytes);
    for (row, (bytes, throttled)) in figure.rows.iter_mut().zip(&sums) {
        row.1.extend([100.0 * bytes / wild, *throttled]);
    }
    figure
}
