//! 1 to 26 clients on one device, each with its own volume: the lowest client's bandwidth over the
//! highest one's, and the sum over that of one client.
//!
//! Random reads of 4 KiB, without budgets: from a file, whose system queues more than the disk
//! takes, and from memory. One thread polls all clients equally often, so it favours none.

use std::time::Duration;

use anyhow::Result;

use super::bmstore::Evaluation;
use super::burst_client::{Did, Does, run as load};
use super::burst_rig::{Rig, Way};
use super::measure::Clock;
use super::once::{Measured, quiet_median};
use super::pool_load::pin;

const MOST: usize = 26;
const DEPTH: u16 = 16;

struct Together {
    /// Lowest over highest.
    share: f64,
    iops: f64,
    target_cores: f64,
    others_cores: f64,
}

impl Measured for Together {
    fn others_cores(&self) -> f64 {
        self.others_cores
    }
}

/// In metric names.
pub(super) fn name(way: Way) -> &'static str {
    match way {
        Way::Tcp => "tcp",
        Way::Pcie => "vfio_user",
    }
}

pub(super) fn run(evaluation: &mut Evaluation) -> Result<()> {
    let (time, rounds) = match evaluation.quick {
        true => (Duration::from_secs(1), 1),
        false => (Duration::from_secs(3), 3),
    };
    let counts: &[usize] = match evaluation.quick {
        true => &[1, 4, MOST],
        false => &[1, 4, 13, MOST],
    };
    println!(
        "{:<9}{:<11}{:<8}{:>10}{:>10}{:>21}{:>8}",
        "clients", "transport", "device", "IOPS", "over one", "lowest over highest", "target"
    );
    for device in ["file", "ram"] {
        for way in [Way::Tcp, Way::Pcie] {
            let mut rig = Rig::start(&evaluation.program, device, way, MOST)?;
            rig.forebay.wait_zero_filled()?;
            let summary = &mut evaluation.summary;
            let mut of_one = None;
            for &count in counts {
                let runs = (0..rounds).map(|_| together(&mut rig, count, time));
                let runs = runs.collect::<Result<Vec<Together>>>()?;
                let mut of = |figure: fn(&Together) -> f64| quiet_median(summary, &runs, figure);
                let (share, iops) = (of(|run| run.share), of(|run| run.iops));
                let target = of(|run| run.target_cores);
                let over_one = iops / *of_one.get_or_insert(iops);
                println!(
                    "{count:<9}{:<11}{device:<8}{iops:>10.0}{over_one:>10.2}{share:>21.3}{target:>8.2}",
                    name(way)
                );
                let name = format!("{}_clients_{count}_{device}", name(way));
                summary.put(format!("{name}_fairness_share"), share);
                summary.put(format!("{name}_over_one"), over_one);
            }
        }
    }
    Ok(())
}

fn together(rig: &mut Rig, count: usize, time: Duration) -> Result<Together> {
    // The first is polled more often than others, so it does nothing.
    let mut does = vec![(0, Does::All(0))];
    does.extend((0..count).map(|client| (client, Does::All(DEPTH))));
    let clock = Clock::start(&rig.forebay.processes())?;
    let streams = &mut rig.streams;
    let did = std::thread::scope(|scope| {
        let clients = scope.spawn(|| {
            pin()?;
            load(streams, &does, time)
        });
        clients.join().expect("the clients do not panic")
    })?;
    let used = clock.used()?;
    let iops: Vec<f64> = did.iter().skip(1).map(Did::iops).collect();
    let lowest = iops.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = iops.iter().copied().fold(0.0, f64::max);
    Ok(Together {
        share: lowest / highest.max(1e-9),
        iops: iops.iter().sum(),
        target_cores: used.target_cores,
        others_cores: used.others_user_cores,
    })
}
