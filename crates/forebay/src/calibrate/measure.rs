//! Runs each load of a calibration and takes samples.
//!
//! Rounds go through all loads in turn, so that changes of the node affect all. The engine's
//! counters are read around each load; commands of other exports spoil a sample. In the first
//! round, the depth doubles while commands wait for the device and throughput grows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forebay_control::api::client::Client;
use forebay_control::model::stats::Stats;
use forebay_qos::cost::{FRONTENDS, SIZES, Transport};

use super::drive::{Drive, Load, LoadKind, deeper, first_depth};
use super::fit::{DeviceFit, Rounds, Sample};
use super::scratch::{Scratch, TENANT, short};
use crate::failure::{Failure, Outcome};
use crate::interrupt::Interrupt;

/// The deallocated fraction of the volume, one in this number.
const DEALLOCATED_PART: u64 = 8;
/// Tolerated commands of other exports, one in this number.
const OTHERS_PART: u64 = 50;
/// Below this busy fraction, reactors wait for something else.
const REACTOR_BUSY: f64 = 0.85;
/// Below this busy fraction, reactors may sleep between commands.
const ASLEEP: f64 = 0.5;
/// Below this ratio of processor to turn time, other processes took the processor. The kernel's
/// clock is too coarse for a higher value.
const ROBBED: f64 = 0.8;
/// Commands wait for the device if it has at least this fraction of them.
const AT_DEVICE: f64 = 0.5;
/// A device that gains this factor with twice the depth is not at its limit.
const GROWTH: f64 = 1.05;
/// The warm-up, one in this number of a load's time.
const WARM_PART: u32 = 4;

#[derive(Debug, Default)]
pub(super) struct FrontendMeasurement {
    pub(super) reads: [Rounds; 6],
    pub(super) writes: [Rounds; 6],
    pub(super) flushes: Rounds,
    pub(super) deallocations: Rounds,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct MeasurePlan {
    pub(super) rounds: u32,
    pub(super) time: Duration,
    pub(super) fill: Duration,
    /// Tolerate other load.
    pub(super) anyway: bool,
}

pub(super) const LOADS: u32 = 2 * SIZES.len() as u32 + 2;

struct Seen {
    generation: u64,
    working_ns: u64,
    each_working_ns: Vec<u64>,
    /// Its processes' time, including polling.
    processor_ns: u64,
    /// Total device time of our own commands.
    at_device_ns: u64,
    others: u64,
}

fn poll(client: &Client) -> Outcome<Seen> {
    let stats: Stats = client.get("/v1/stats")?;
    let engine = stats.engine.as_ref();
    let engine = engine
        .ok_or_else(|| Failure::new("no engine is running").hint("`forebay status` says why"))?;
    let mut seen = Seen {
        generation: stats.generation,
        working_ns: engine.working_ns,
        each_working_ns: stats.reactors.iter().map(|of| of.working_ns).collect(),
        processor_ns: engine.busy_ns,
        at_device_ns: 0,
        others: 0,
    };
    for lane in &stats.lanes {
        for ops in [&lane.read, &lane.write, &lane.flush, &lane.deallocate] {
            if lane.tenant == TENANT {
                seen.at_device_ns = seen.at_device_ns.wrapping_add(ops.latency.device.sum_ns);
            } else {
                seen.others = seen.others.wrapping_add(ops.ops);
            }
        }
    }
    Ok(seen)
}

/// A possible depth for the device's limit.
#[derive(Debug, Clone, Copy)]
struct Depth {
    depth: u16,
    /// Twice as many get no more done.
    enough: bool,
}

/// Warm-up, depth search and load take at most this multiple of the load's time.
const TIMES: u32 = 3;

struct Driven {
    frontend: Transport,
    drive: Drive,
    span: u64,
    /// By kind and size. Batches make a command cheaper, so the depth must not exceed the device's
    /// need.
    depths: BTreeMap<(LoadKind, u32), Depth>,
}

/// Measurements, and the reasons for missing frontends.
pub(super) type FrontendResults = (Vec<(Transport, FrontendMeasurement)>, Vec<String>);

/// `step` gets the progress.
pub(super) fn measure(
    client: &Client,
    scratch: &Scratch,
    plan: &MeasurePlan,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64),
) -> Outcome<FrontendResults> {
    let (mut driven, mut left_out) = (Vec::new(), Vec::new());
    for frontend in FRONTENDS {
        interrupt.check()?;
        scratch.goes_on(plan.fill)?;
        let export = scratch.export(frontend)?;
        match Drive::connect(frontend, &export) {
            Ok(drive) => driven.push(prepare(frontend, drive, scratch.bytes, plan)?),
            Err(failure) => left_out.push(format!("{}: {failure}", short(frontend))),
        }
    }
    if driven.is_empty() {
        return Err(Failure::new(format!(
            "no frontend could be measured: {}",
            left_out.join("; ")
        )));
    }
    let mut all: Vec<FrontendMeasurement> = driven
        .iter()
        .map(|_| FrontendMeasurement::default())
        .collect();
    let (steps, mut done) = (plan.rounds * driven.len() as u32 * LOADS, 0);
    for _ in 0..plan.rounds {
        for (driven, measured) in driven.iter_mut().zip(&mut all) {
            let span = driven.span;
            let mut one = |rounds: &mut Rounds, load: Load| {
                interrupt.check()?;
                scratch.goes_on(TIMES * load.time)?;
                rounds.push(sample(client, driven, load, plan)?);
                done += 1;
                step(f64::from(done) / f64::from(steps));
                Outcome::Ok(())
            };
            let load = |kind, bytes| Load {
                kind,
                bytes,
                first: 0,
                span,
                time: plan.time,
                depth: first_depth(bytes),
            };
            for (size, bytes) in SIZES.into_iter().enumerate() {
                one(&mut measured.reads[size], load(LoadKind::Read, bytes))?;
                one(&mut measured.writes[size], load(LoadKind::Write, bytes))?;
            }
            one(&mut measured.flushes, load(LoadKind::Flush, 0))?;
            let load = Load {
                first: span,
                span: scratch.bytes - span,
                ..load(LoadKind::Deallocate, 0)
            };
            one(&mut measured.deallocations, load)?;
        }
    }
    let mut frontends = Vec::new();
    for (driven, measured) in driven.into_iter().zip(all) {
        frontends.push((driven.frontend, measured));
        driven.drive.close()?;
    }
    Ok((frontends, left_out))
}

fn prepare(
    frontend: Transport,
    mut drive: Drive,
    bytes: u64,
    plan: &MeasurePlan,
) -> Outcome<Driven> {
    let most = bytes - bytes / DEALLOCATED_PART;
    let step = u64::from(super::drive::LARGEST);
    let fill = Load {
        kind: LoadKind::Fill,
        bytes: super::drive::LARGEST,
        first: 0,
        span: most / step * step,
        time: plan.fill,
        depth: first_depth(super::drive::LARGEST),
    };
    let counted = drive.load(&fill)?;
    Ok(Driven {
        frontend,
        drive,
        span: (counted.ops.max(1) * step).min(most),
        depths: BTreeMap::new(),
    })
}

/// Waits until the node is quiet, or fails.
pub(super) fn refuse_load(client: &Client, plan: &MeasurePlan) -> Outcome {
    /// Tolerable commands per second of others.
    const QUIET: u64 = 200;
    if plan.anyway {
        return Ok(());
    }
    let (before, begun) = (poll(client)?, Instant::now());
    std::thread::sleep(Duration::from_millis(300));
    let others = poll(client)?.others.wrapping_sub(before.others);
    let each_second = others as f64 / begun.elapsed().as_secs_f64();
    if each_second > QUIET as f64 {
        return Err(disturbed(format!(
            "other exports are under load: {each_second:.0} commands per second"
        )));
    }
    Ok(())
}

fn disturbed(what: String) -> Failure {
    Failure::new(what)
        .hint("wait until they are idle, or use --anyway; the costs will then be too high")
}

struct Ran {
    ops: u64,
    elapsed_ns: f64,
    working_ns: f64,
    processor_ns: f64,
    /// Most commands were at devices, and reactors had idle time.
    waits: bool,
}

impl Ran {
    fn rate(&self) -> f64 {
        self.ops as f64 / self.elapsed_ns
    }
}

fn run(client: &Client, drive: &mut Drive, load: &Load, plan: &MeasurePlan) -> Outcome<Ran> {
    let before = poll(client)?;
    let counted = drive.load(load)?;
    let after = poll(client)?;
    if after.generation != before.generation {
        return Err(
            Failure::new("the engine was replaced during the measurement").hint("try again"),
        );
    }
    let ops = counted.ops.max(1);
    let others = after.others.wrapping_sub(before.others);
    if !plan.anyway && others > (ops / OTHERS_PART).max(10) {
        return Err(disturbed(format!(
            "other exports were used during the measurement: {others} commands, beside the {ops} measured ones"
        )));
    }
    let elapsed_ns = counted.elapsed.as_nanos() as f64;
    let each = after.each_working_ns.iter().zip(&before.each_working_ns);
    let busiest = each
        .map(|(after, before)| after.saturating_sub(*before))
        .max();
    let busiest_ns = busiest.unwrap_or(0) as f64;
    let at_device_ns = after.at_device_ns.saturating_sub(before.at_device_ns) as f64;
    let is_there = at_device_ns > AT_DEVICE * elapsed_ns * f64::from(load.depth);
    Ok(Ran {
        ops,
        elapsed_ns,
        working_ns: after.working_ns.saturating_sub(before.working_ns) as f64,
        processor_ns: after.processor_ns.saturating_sub(before.processor_ns) as f64,
        waits: is_there && busiest_ns < REACTOR_BUSY * elapsed_ns,
    })
}

/// Searches the depth: doubles it while commands wait for the device and throughput grows.
fn try_out(client: &Client, drive: &mut Drive, load: &Load, plan: &MeasurePlan) -> Outcome<Depth> {
    search(load.depth, load.bytes, &mut |depth| {
        let load = Load { depth, ..*load };
        let ran = run(client, drive, &load, plan)?;
        Ok((ran.waits, ran.rate()))
    })
}

fn search(
    first: u16,
    bytes: u32,
    run: &mut dyn FnMut(u16) -> Outcome<(bool, f64)>,
) -> Outcome<Depth> {
    let (mut depth, enough) = (first, |depth, enough| Ok(Depth { depth, enough }));
    let (mut waits, mut rate) = run(depth)?;
    while let (true, Some(next)) = (waits, deeper(depth, bytes)) {
        let (next_waits, next_rate) = run(next)?;
        if next_rate < rate * GROWTH {
            // Unless the reactors are the limit.
            return enough(depth, next_waits);
        }
        (depth, waits, rate) = (next, next_waits, next_rate);
    }
    enough(depth, false)
}

fn sample(
    client: &Client,
    driven: &mut Driven,
    mut load: Load,
    plan: &MeasurePlan,
) -> Outcome<Sample> {
    let drive = &mut driven.drive;
    let of = (load.kind, load.bytes);
    let mut depth = driven.depths.get(&of).copied().unwrap_or(Depth {
        depth: load.depth,
        // Commands without data get no faster with depth.
        enough: !matches!(load.kind, LoadKind::Read | LoadKind::Write),
    });
    let warm = Load {
        time: load.time / WARM_PART,
        depth: depth.depth,
        ..load
    };
    match depth.enough {
        true => _ = drive.load(&warm)?,
        false => depth = try_out(client, drive, &warm, plan)?,
    }
    driven.depths.insert(of, depth);
    load.depth = depth.depth;
    let ran = run(client, drive, &load, plan)?;
    let (elapsed_ns, working_ns, processor_ns) = (ran.elapsed_ns, ran.working_ns, ran.processor_ns);
    // Wake-ups belong to no turn, so the kernel's clock is better for sleeping reactors. Turns are
    // too long if other processes took the processor.
    let cpu_ns = if working_ns < ASLEEP * elapsed_ns {
        working_ns.max(processor_ns)
    } else if processor_ns < ROBBED * working_ns && processor_ns > 0.0 {
        processor_ns
    } else {
        working_ns
    };
    Ok(Sample {
        cpu_ns: cpu_ns / ran.ops as f64,
        between_ns: elapsed_ns / ran.ops as f64,
        busy: working_ns / elapsed_ns,
        device: match (ran.waits, depth.enough) {
            (true, true) => DeviceFit::AtLimit,
            (true, false) => DeviceFit::Deeper,
            (false, _) => DeviceFit::Unknown,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that runs `at_once` commands in parallel, each in one unit of time.
    fn searched(at_once: u16, reactors_do: f64, bytes: u32) -> (Depth, Vec<u16>) {
        let mut tried = Vec::new();
        let found = search(first_depth(bytes), bytes, &mut |depth| {
            tried.push(depth);
            let rate = f64::from(depth.min(at_once));
            Ok((rate < reactors_do, rate.min(reactors_do)))
        });
        (found.unwrap(), tried)
    }

    #[test]
    fn a_device_that_does_more_at_once_is_given_more() {
        let (found, tried) = searched(100, 1e9, 4096);
        assert_eq!(tried, [32, 64, 128, 255]);
        assert_eq!((found.depth, found.enough), (128, true));
        let (found, tried) = searched(20, 1e9, 4096);
        assert_eq!((found.depth, found.enough, tried), (32, true, vec![32, 64]));
        let (found, _) = searched(1000, 1e9, 4096);
        assert_eq!((found.depth, found.enough), (255, false));
        let (found, tried) = searched(1000, 1e9, 128 << 10);
        assert_eq!(tried, [16, 32, 64]);
        assert!(!found.enough);
        let (found, _) = searched(1000, 33.0, 4096);
        assert_eq!((found.depth, found.enough), (32, false));
        let (found, tried) = searched(1000, 50.0, 4096);
        assert_eq!(
            (found.depth, found.enough, tried),
            (64, false, vec![32, 64])
        );
    }
}
