//! Every load that is measured, and what was seen of it.
//!
//! Purpose: processor and device time of each operation at each size, over each frontend that can be driven here.
//! Design: rounds go through everything in turn, so that a change of the machine's mood meets all of it. Before and after a
//! load, which is waited for to its end, the engine's counters are read: the time of its turns that found something to do, and
//! what others' exports did, which spoils it. A load runs a moment before it counts.
//! Not here: what becomes of the samples (`fit`).

use std::time::{Duration, Instant};

use forebay_burst::cost::{FRONTENDS, Frontend, SIZES};
use forebay_control::api::client::Client;
use forebay_control::api::stats::Stats;

use super::drive::{Drive, Kind, Load};
use super::fit::{Rounds, Sample};
use super::scratch::{Scratch, TENANT, short};
use crate::failure::{Failure, Outcome};
use crate::interrupt::Interrupt;

/// Of the volume, so much is deallocated; the rest is read and written.
const DEALLOCATED_PART: u64 = 8;
/// Others' commands may be so many of a load's own, one in ...
const OTHERS_PART: u64 = 50;
/// Reactors that work for less than this part of the time wait for something else.
const REACTOR_BUSY: f64 = 0.85;
/// Reactors that work for less than this part of it may sleep between commands.
const ASLEEP: f64 = 0.5;
/// Reactors whose processes had less than this part of what their turns took had to leave their processor to others; the
/// kernel's clock is too coarse for less.
const ROBBED: f64 = 0.8;
/// A device has so much of the commands if they wait for it.
const AT_DEVICE: f64 = 0.5;
/// A load before it counts, of its time, one in ...
const WARM_PART: u32 = 4;

/// What of a frontend is measured.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) reads: [Rounds; 6],
    pub(super) writes: [Rounds; 6],
    pub(super) flushes: Rounds,
    pub(super) deallocations: Rounds,
}

/// How it is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) rounds: u32,
    /// Of each load.
    pub(super) time: Duration,
    /// To write a volume for the first time.
    pub(super) fill: Duration,
    /// Others' load is no reason to end.
    pub(super) anyway: bool,
}

/// Loads of one frontend in one round.
pub(super) const LOADS: u32 = 2 * SIZES.len() as u32 + 2;

/// The engine's counters.
struct Seen {
    generation: u64,
    working_ns: u64,
    /// Of its processes' time, polling too.
    processor_ns: u64,
    /// The sum of what our own commands were at devices.
    at_device_ns: u64,
    others: u64,
}

fn look(client: &Client) -> Outcome<Seen> {
    let stats: Stats = client.get("/v1/stats")?;
    let engine = stats.engine.as_ref();
    let engine =
        engine.ok_or_else(|| Failure::new("no engine runs").hint("`forebay status` says why"))?;
    let mut seen = Seen {
        generation: stats.generation,
        working_ns: engine.working_ns,
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

/// A frontend that is driven.
struct Driven {
    frontend: Frontend,
    drive: Drive,
    /// Of its volume, what is read and written.
    span: u64,
}

/// What each frontend gave, and why those that are not there could not be driven.
pub(super) type Found = (Vec<(Frontend, Measured)>, Vec<String>);

/// Measures everything. Frontends that can't be driven are named with why. `step` is told how far it is.
pub(super) fn measure(
    client: &Client,
    scratch: &Scratch,
    plan: &Plan,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64),
) -> Outcome<Found> {
    let (mut driven, mut left_out) = (Vec::new(), Vec::new());
    for frontend in FRONTENDS {
        interrupt.check()?;
        let export = scratch.export(frontend)?;
        match Drive::connect(frontend, &export) {
            Ok(drive) => driven.push(prepare(frontend, drive, scratch.bytes, plan)?),
            Err(failure) => left_out.push(format!("{}: {failure}", short(frontend))),
        }
    }
    if driven.is_empty() {
        return Err(Failure::new(format!(
            "no frontend can be driven: {}",
            left_out.join("; ")
        )));
    }
    let mut all: Vec<Measured> = driven.iter().map(|_| Measured::default()).collect();
    let (steps, mut done) = (plan.rounds * driven.len() as u32 * LOADS, 0);
    for _ in 0..plan.rounds {
        for (driven, measured) in driven.iter_mut().zip(&mut all) {
            let mut one = |rounds: &mut Rounds, load: Load| {
                interrupt.check()?;
                rounds.push(sample(client, &mut driven.drive, &load, plan)?);
                done += 1;
                step(f64::from(done) / f64::from(steps));
                Outcome::Ok(())
            };
            let load = |kind, bytes| Load {
                kind,
                bytes,
                first: 0,
                span: driven.span,
                time: plan.time,
            };
            for (size, bytes) in SIZES.into_iter().enumerate() {
                one(&mut measured.reads[size], load(Kind::Read, bytes))?;
                one(&mut measured.writes[size], load(Kind::Write, bytes))?;
            }
            one(&mut measured.flushes, load(Kind::Flush, 0))?;
            let load = Load {
                first: driven.span,
                span: scratch.bytes - driven.span,
                ..load(Kind::Deallocate, 0)
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

/// Writes the volume, as far as it goes in the time there is.
fn prepare(frontend: Frontend, mut drive: Drive, bytes: u64, plan: &Plan) -> Outcome<Driven> {
    let most = bytes - bytes / DEALLOCATED_PART;
    let step = u64::from(super::drive::LARGEST);
    let fill = Load {
        kind: Kind::Fill,
        bytes: super::drive::LARGEST,
        first: 0,
        span: most / step * step,
        time: plan.fill,
    };
    let counted = drive.load(&fill)?;
    Ok(Driven {
        frontend,
        drive,
        span: (counted.ops.max(1) * step).min(most),
    })
}

/// Waits until others are quiet enough, or says that they are not.
pub(super) fn refuse_load(client: &Client, plan: &Plan) -> Outcome {
    /// Commands a second of others that spoil nothing.
    const QUIET: u64 = 200;
    if plan.anyway {
        return Ok(());
    }
    let (before, begun) = (look(client)?, Instant::now());
    std::thread::sleep(Duration::from_millis(300));
    let others = look(client)?.others.wrapping_sub(before.others);
    let each_second = others as f64 / begun.elapsed().as_secs_f64();
    if each_second > QUIET as f64 {
        return Err(disturbed(format!(
            "others' exports are under load: {each_second:.0} commands a second"
        )));
    }
    Ok(())
}

fn disturbed(what: String) -> Failure {
    Failure::new(what).hint("wait until they are idle, or say --anyway: costs will be too high")
}

fn sample(client: &Client, drive: &mut Drive, load: &Load, plan: &Plan) -> Outcome<Sample> {
    drive.load(&Load {
        time: load.time / WARM_PART,
        ..*load
    })?;
    let before = look(client)?;
    let counted = drive.load(load)?;
    let after = look(client)?;
    if after.generation != before.generation {
        return Err(Failure::new("the engine was replaced meanwhile").hint("try again"));
    }
    let ops = counted.ops.max(1);
    let others = after.others.wrapping_sub(before.others);
    if !plan.anyway && others > (ops / OTHERS_PART).max(10) {
        return Err(disturbed(format!(
            "others' exports were used meanwhile: {others} commands beside our {ops}"
        )));
    }
    let elapsed_ns = counted.elapsed.as_nanos() as f64;
    let working_ns = after.working_ns.saturating_sub(before.working_ns) as f64;
    // What a reactor does as it wakes is in no turn of its; where it sleeps much, only the kernel knows its time. And where
    // others took its processor from it, its turns took longer than they had.
    let processor_ns = after.processor_ns.saturating_sub(before.processor_ns) as f64;
    let cpu_ns = if working_ns < ASLEEP * elapsed_ns {
        working_ns.max(processor_ns)
    } else if processor_ns < ROBBED * working_ns && processor_ns > 0.0 {
        processor_ns
    } else {
        working_ns
    };
    let at_device_ns = after.at_device_ns.saturating_sub(before.at_device_ns) as f64;
    let waits = at_device_ns > AT_DEVICE * elapsed_ns * f64::from(counted.depth);
    Ok(Sample {
        cpu_ns: cpu_ns / ops as f64,
        between_ns: elapsed_ns / ops as f64,
        busy: working_ns / elapsed_ns,
        device_is_limit: waits && working_ns < REACTOR_BUSY * elapsed_ns,
    })
}
