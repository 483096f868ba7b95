//! The paper's figures of a tenant within its base.

use super::paper::{CHANCES, LoadAt, PRODUCTS, beside_vms, node, params, run, run_again};
use super::{Better, Claim, Effort, Figure, about, described};
use crate::model::{Load, Model, metered};
use crate::policy::{Params, Policy};
use crate::stats::Latency;

/// A node with a faster backend.
fn near() -> Model {
    Model {
        backend_read_ns: (24_000.0, 6_000.0),
        backend_write_ns: (20_000.0, 5_000.0),
        ..node()
    }
}

/// A base of 20,000 IOPS at each depth up to 8, beside 8 bursting tenants.
pub(super) fn base(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "IOPS of a tenant with a base of 20,000 that requests exactly its base".into(),
        across: "depth",
        unit: "IOPS",
        columns: ["burst", "wild", "alone", "bytes burst", "bytes wild"].map(str::to_owned).to_vec(),
        assumed: "2 reactors, 8 neighbours at depth 32, each with 4 queues, 4 to 16 KiB, and 4 to 128 KiB (bytes); wild: the mean of 8 runs; a backend of 30 us (the paper's 20,000 sequential I/Os need one below 50 us)".into(),
        ..Figure::default()
    };
    figure.parameters = described(&near(), &Params::default());
    let mut had_it = 0;
    let mut missed = 0;
    let mut lowest = f64::MAX;
    for depth in 1..=8 {
        let iops = |policy, neighbours, load: LoadAt| {
            let budget = metered(PRODUCTS[0].1, PRODUCTS[0].2);
            let mut guests = beside_vms(budget, neighbours, &load(32));
            guests[0].load.depth = depth;
            guests[0].load.rate = Some(20_000.0);
            // Under wild, I/Os gather at one reactor or the other, so average several runs.
            let (chances, effort) = match policy {
                Policy::Wild => (
                    CHANCES,
                    Effort {
                        ms: effort.ms.max(200),
                    },
                ),
                _ => (1, effort),
            };
            let mut count = 0;
            for seed in 0..chances {
                let (had, _) =
                    run_again(near(), &params(policy), guests.clone(), effort, 42 + seed);
                count += had[0].latency.count();
            }
            count as f64 * 1e3 / (effort.ms * chances) as f64
        };
        let values = vec![
            iops(Policy::Burst, 8, Load::iops),
            iops(Policy::Wild, 8, Load::iops),
            iops(Policy::Burst, 0, Load::iops),
            iops(Policy::Burst, 8, Load::bytes),
            iops(Policy::Wild, 8, Load::bytes),
        ];
        // Within the random error of a short run.
        had_it += u32::from(values[0] >= 19_800.0);
        missed += u32::from(values[1] < 19_800.0);
        lowest = lowest.min(values[1]);
        figure.rows.push((f64::from(depth), values));
    }
    figure.claims = vec![
        Claim {
            what: "depths at which the base is reached".into(),
            paper: "8 of 8",
            range: (8.0, 8.0),
            better: Better::Neither,
            ours: f64::from(had_it),
            why: "Beside 4 to 16 KiB. Beside large I/Os, a link's queue is too long for 20,000 sequential I/Os: there the base is reached from a slightly larger depth on",
        },
        Claim {
            what: "depths at which wild misses it".into(),
            paper: "7 of 8",
            range: (7.0, 7.0),
            better: Better::Neither,
            ours: f64::from(missed),
            why: "With the most I/Os in flight, a round takes as long as the neighbours' batches (`batch_ns`) make it",
        },
        Claim {
            what: "wild's lowest, IOPS".into(),
            paper: "as low as 4,000",
            range: about(4_000.0),
            better: Better::Neither,
            ours: lowest,
            why: "8 neighbours at depth 32 with 4 queues each, as beside the paper's databases. I/Os in flight gather at one reactor, then at the other, so IOPS grow less than the depth",
        },
    ];
    figure
}

/// An idle tenant with a base of 45,000 wakes and asks for ever more.
pub(super) fn wake(_: Effort) -> Figure {
    let mut figure = Figure {
        title: "A tenant with a base of 45,000 that wakes among bursting tenants".into(),
        across: "thousand IOPS",
        unit: "% of its I/Os",
        columns: vec!["throttled".into(), "throttled, no reserve".into()],
        assumed: "2 reactors, 15 neighbours at depth 64, each with 4 queues, 4 to 16 KiB; the first 10 ms".into(),
        ..Figure::default()
    };
    for thousand in [15, 30, 45, 60, 75] {
        let throttled = |reserve: f32| {
            let mut params = params(Policy::Burst);
            params.reserve_most = reserve;
            let mut guests = beside_vms(metered(PRODUCTS[1].1, PRODUCTS[1].2), 15, &Load::iops(64));
            guests[0].load = Load {
                depth: 64,
                rate: Some(f64::from(thousand) * 1e3),
                start_ns: 30_000_000,
                ..Load::small(64)
            };
            let (had, _) = run(node(), &params, guests, Effort { ms: 10 });
            100.0 * had[0].throttled as f64 / had[0].latency.count().max(1) as f64
        };
        figure
            .rows
            .push((f64::from(thousand), vec![throttled(0.05), throttled(0.0)]));
    }
    let below: f64 = figure.rows[..3]
        .iter()
        .map(|(_, values)| values[0])
        .fold(0.0, f64::max);
    figure.claims = vec![Claim {
        what: "most throttled up to its base, % of its I/Os".into(),
        paper: "none until the stream of 60,000",
        range: (0.0, 0.0),
        better: Better::Neither,
        ours: below,
        why: "What the tenant has not been given yet comes from the reserve, or from bursting tenants; without a reserve, more I/Os wait",
    }];
    figure
}

/// A database's assumed own time for a writing transaction, us.
const OWN_US: f64 = 200.0;
/// Its writes, in sequence: MySQL's log and binary log.
const WRITES: f64 = 2.0;

/// Latency of 16 KiB I/Os beside bursting tenants.
fn transaction_ios(policy: Policy, reads: u32, bursters: usize, effort: Effort) -> Latency {
    let budget = metered((100_000, 1_400_000_000), (200_000, 2_800_000_000));
    let mut guests = beside_vms(budget, bursters, &Load::bytes(32));
    guests[0].load = Load {
        reads,
        sizes: vec![16 << 10],
        ..Load::small(4)
    };
    guests[0].queues = guests[1].queues.clone();
    // Under wild, link queues grow slowly, so average several runs.
    let mut all = Latency::default();
    for seed in 0..CHANCES {
        let (had, _) = run_again(node(), &params(policy), guests.clone(), effort, 42 + seed);
        all.add_all(&had[0].latency);
    }
    all
}

/// Transactions: sequential reads and a write, beside 8 and 15 tenants bursting at depth 32.
pub(super) fn transactions(effort: Effort) -> Figure {
    let mut figure = Figure {
        title: "Transactions' I/Os of 16 KiB beside bursting neighbours".into(),
        across: "bursters",
        unit: "us",
        columns: ["reads wild", "reads burst", "writes wild", "writes burst", "p99 wild", "p99 burst", "p99.9 wild", "p99.9 burst"]
            .map(str::to_owned)
            .to_vec(),
        assumed: "2 reactors, a base of 100,000 IOPS and 1,400 MB/s, limits of 200,000 and 2,800 MB/s, neighbours at depth 32, each with 4 queues, 4 to 128 KiB; 4 transactions at once, each with 2 sequential writes (a log, and a binary log) and 200 us of the database's own work".into(),
        ..Figure::default()
    };
    for bursters in [8usize, 15] {
        let of = |policy, reads| transaction_ios(policy, reads, bursters, effort);
        let (rw, rb) = (of(Policy::Wild, 100), of(Policy::Burst, 100));
        let (ww, wb) = (of(Policy::Wild, 0), of(Policy::Burst, 0));
        let takes = |latency: &Latency| WRITES * latency.mean_us() + OWN_US;
        let (published, range) = match bursters {
            8 => ("up to 83 % (RDS)", (0.0, 83.0)),
            _ => (
                "about 60 % (MySQL, RocksDB), up to 83 % (RDS)",
                (about(60.0).0, 83.0),
            ),
        };
        let less = |ours: f64, wild: f64| 100.0 * (1.0 - ours / wild);
        let claims = [
            (
                format!(
                    "transactions that write, beside {bursters}: latency reduction against wild, %"
                ),
                published,
                range,
                less(takes(&wb), takes(&ww)),
                "The more work the database itself does, the smaller the reduction: 200 us are assumed",
            ),
            (
                format!("reads' I/Os, beside {bursters}: latency reduction against wild, %"),
                "transactions that read: about the same as with wild",
                (-10.0, 10.0),
                less(rb.mean_us(), rw.mean_us()),
                "The paper's databases find most reads in their own memory; these are the I/Os of the remaining reads",
            ),
        ];
        let claims = claims.map(|(what, paper, range, ours, why)| Claim {
            what,
            paper,
            range,
            better: Better::More,
            ours,
            why,
        });
        figure.claims.extend(claims);
        figure.rows.push((
            bursters as f64,
            vec![
                rw.mean_us(),
                rb.mean_us(),
                ww.mean_us(),
                wb.mean_us(),
                ww.percentile_us(99.0),
                wb.percentile_us(99.0),
                ww.percentile_us(99.9),
                wb.percentile_us(99.9),
            ],
        ));
    }
    figure
}
