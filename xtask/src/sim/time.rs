//! The figure `scheduler_time`: the real time of a refill, which virtual time cannot show.
//!
//! The example in `crates/qos/examples/scheduler_time.rs`, built in release, prints a line per
//! number of active tenants; the best of three runs counts.

use std::time::Duration;

use anyhow::{Context, Result};
use forebay_qos::params::Params;
use forebay_sim::figures::{Better, Claim, Figure};
use xtask::process;

use crate::bench::profile;

/// Name and title.
pub(super) const FIGURE: (&str, &str) = (
    "scheduler_time",
    "duration of a window's end, by active tenants (real time, on this machine)",
);
const LIMIT: Duration = Duration::from_secs(600);

pub(super) fn make() -> Result<Figure> {
    let mut rows: Vec<(f64, Vec<f64>)> = Vec::new();
    for _ in 0..3 {
        let mut cargo = profile::cargo("run");
        cargo.arg("--quiet");
        cargo.args(["--package", "forebay-qos", "--example", FIGURE.0]);
        let text = process::text(&mut cargo, LIMIT)?;
        for (at, line) in text.lines().enumerate() {
            let numbers = line.split_whitespace().map(str::parse);
            let numbers: Vec<f64> = numbers.collect::<Result<_, _>>().context("no number")?;
            let [active, median, tail] = numbers[..] else {
                anyhow::bail!("not three numbers: {line}");
            };
            let row = vec![median / 1e3, tail / 1e3];
            match rows.get_mut(at) {
                Some((_, best)) => {
                    for (best, new) in best.iter_mut().zip(row) {
                        *best = best.min(new);
                    }
                }
                None => rows.push((active, row)),
            }
        }
    }
    let at = |wanted: f64| {
        let row = rows.iter().find(|(active, _)| *active == wanted);
        row.map_or(f64::NAN, |(_, values)| values[0])
    };
    let claim = |what: &str, paper, most, ours| Claim {
        what: what.to_owned(),
        paper,
        range: (0.0, most),
        better: Better::Neither,
        ours,
        why: "The paper's processors run at 2 GHz; these are this machine's",
    };
    let claims = vec![
        claim("64 active of 1024, us", "below 5 us", 5.0, at(64.0)),
        claim("1024 active, us", "below 100 us", 100.0, at(1024.0)),
        Claim {
            range: (12.0, 24.0),
            better: Better::Less,
            why: "The data of 1024 tenants does not fit into the caches that hold the data of 64",
            ..claim(
                "time for 16 times as many tenants, relative",
                "linear (16, to within a half)",
                0.0,
                at(1024.0) / at(64.0),
            )
        },
    ];
    let values = Params::default();
    let values = values
        .values()
        .map(|(name, value)| format!("{name} {}", value as f32));
    Ok(Figure {
        title: "The end of a window, by active tenants of 1024".into(),
        across: "active",
        unit: "us",
        columns: vec!["median".into(), "p99".into()],
        rows,
        claims,
        assumed: "this machine, one reactor; every other tenant bursts and has waiting commands"
            .into(),
        parameters: values.collect::<Vec<_>>().join(", "),
        ..Figure::default()
    })
}
