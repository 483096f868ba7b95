//! 1 to 4 devices in a pool, over NVMe/TCP: throughput over that of one device, and the target's
//! cores for each device.
//!
//! The volume is striped over all devices. Each device adds a job and as many bytes. The bare
//! device is fio with a job on each of as many files.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::bmstore::Evaluation;
use super::bmstore_load::{Load, bare_file, file, fill, on_bare_files, over_tcp, turn};
use super::forebay::Forebay;
use super::measure::Sample;
use super::once::{quiet_median, quiet_ratio};
use super::recording_file::RemovedAtEnd;
use super::tcp::TARGET_CPU;

const MOST: u32 = 4;
/// That a volume uses of each device.
const DEVICE_BYTES: u64 = 256 << 20;
const POOL_BYTES: u64 = 512 << 20;
const LOADS: [Load; 2] = [Load::random("randread", 128), Load::sequential("read")];

/// IOPS of one device, ours and bare, by load.
type OfOne = BTreeMap<String, [f64; 2]>;
type Sides = [Vec<Sample>; 2];

pub(super) fn run(evaluation: &mut Evaluation) -> Result<()> {
    println!(
        "{:<9}{:<16}{:>10}{:>10}{:>11}{:>10}{:>11}{:>8}{:>12}",
        "devices",
        "load",
        "IOPS",
        "over one",
        "bare IOPS",
        "over one",
        "over bare",
        "target",
        "per device"
    );
    let mut of_one = OfOne::new();
    for count in 1..=MOST {
        devices(evaluation, count, &mut of_one)?;
    }
    Ok(())
}

fn devices(evaluation: &mut Evaluation, count: u32, of_one: &mut OfOne) -> Result<()> {
    let (seconds, rounds) = if evaluation.quick { (1, 1) } else { (3, 5) };
    let program = evaluation.program.clone();
    let all = |make: &dyn Fn(u32) -> Result<RemovedAtEnd>| -> Result<Vec<RemovedAtEnd>> {
        (0..count).map(make).collect()
    };
    // Dropped after the daemon.
    let pool = all(&|number| file(&format!("pool{number}"), POOL_BYTES))?;
    let bare = all(&|number| bare_file(&format!("bare{number}"), DEVICE_BYTES))?;
    let bare: Vec<&Path> = bare.iter().map(|file| file.0.as_path()).collect();
    let spec = |file: &RemovedAtEnd| format!("file:{}", file.0.display());
    let specs: Vec<String> = pool.iter().map(spec).collect();
    let more = specs.iter().skip(1);
    let more: Vec<&str> = more.flat_map(|spec| ["--device", spec.as_str()]).collect();
    let size = (DEVICE_BYTES * u64::from(count)).to_string();
    let forebay = Forebay::start_pool(&program, &specs[0], TARGET_CPU, &size, &more)?;
    forebay.wait_zero_filled()?;
    fill(&program, &forebay, &forebay.nqn)?;
    let pids = forebay.processes();
    for load in LOADS {
        let load = Load {
            jobs: count,
            ..load
        };
        let mut sides = Sides::default();
        for round in 0..rounds {
            for at in [round % 2, (round + 1) % 2] {
                sides[at].push(match at {
                    0 => turn(&pids, || over_tcp(&program, &forebay, &load, seconds))?,
                    _ => turn(&pids, || on_bare_files(&bare, DEVICE_BYTES, &load, seconds))?,
                });
            }
        }
        report(evaluation, count, &load.name(), &sides, of_one);
    }
    Ok(())
}

fn report(
    evaluation: &mut Evaluation,
    count: u32,
    load: &str,
    [ours, bare]: &Sides,
    of_one: &mut OfOne,
) {
    let summary = &mut evaluation.summary;
    let iops = quiet_median(summary, ours, |run| run.iops);
    let bare_iops = quiet_median(summary, bare, |run| run.iops);
    let cores = quiet_median(summary, ours, |run| run.target_cores);
    let ratio = quiet_ratio(summary, ours, bare, |run| run.iops);
    let [one, bare_one] = *of_one.entry(load.into()).or_insert([iops, bare_iops]);
    let (scaling, bare_scaling) = (iops / one, bare_iops / bare_one);
    let per_device = cores / f64::from(count);
    println!(
        "{count:<9}{load:<16}{iops:>10.0}{scaling:>10.2}{bare_iops:>11.0}{bare_scaling:>10.2}{ratio:>11.3}{cores:>8.2}{per_device:>12.2}"
    );
    let name = format!("tcp_devices_{count}_{load}");
    summary.put(format!("{name}_iops_ratio"), ratio);
    summary.put(format!("{name}_scaling"), scaling);
    summary.put(format!("{name}_bare_scaling"), bare_scaling);
    summary.put(format!("{name}_cores_per_device"), per_device);
}
