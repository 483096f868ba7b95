//! Clones of a golden image: 64 GiB (4 GiB with `--quick`) on a null device, each extent of 64 KiB
//! mapped, in random order.
//!
//! The time is that of the API's call. A clone's first write shows that it can be used at once.

use std::time::Instant;

use anyhow::Result;

use super::burst_client::Host;
use super::measure::{Clock, median};
use super::pool::{EXTENT_BYTES, GIB, PoolBench, Rig, is_disturbed, settle};
use super::pool_load::{once_per, write_each};

const CLONES: usize = 100;

pub(super) fn run(bench: &mut PoolBench) -> Result<()> {
    let bytes = if bench.quick { 4 * GIB } else { 64 * GIB };
    let rig = Rig::start(bench, "null", 2 * bytes + GIB, bytes, "64K")?;
    let (port, nqn) = (rig.forebay.port, rig.forebay.nqn.clone());
    let places = once_per(EXTENT_BYTES, bytes, true);
    let mapped = write_each(|| Host::tcp(port, &nqn), places)?.len();
    println!(
        "golden image: {} GiB, {mapped} extents mapped",
        mapped as u64 * EXTENT_BYTES / GIB
    );
    rig.api.snapshot("v@golden")?;
    settle();
    let clock = Clock::start(&rig.forebay.processes())?;
    let (mut times_ms, all) = (Vec::new(), Instant::now());
    for number in 0..CLONES {
        let (begun, ended) = rig.api.clone_of("v@golden", &format!("c{number}"))?;
        times_ms.push((ended - begun).as_secs_f64() * 1e3);
    }
    let all_ms = all.elapsed().as_secs_f64() * 1e3;
    bench.summary.disturbed |= is_disturbed(&clock)?;
    let nqn = rig.forebay.export("bench/c0")?;
    let writes = write_each(|| Host::tcp(port, &nqn), once_per(EXTENT_BYTES, GIB, true))?;
    let first_ms = (writes[0].ended - writes[0].begun).as_secs_f64() * 1e3;
    let longest_ms = times_ms.iter().copied().fold(0.0, f64::max);
    let clone_ms = median(times_ms);
    println!(
        "a clone: {clone_ms:.2} ms (median), {longest_ms:.2} ms (longest); {CLONES} clones: {all_ms:.0} ms; a clone's first write: {first_ms:.2} ms"
    );
    let gib = (mapped as u64 * EXTENT_BYTES / GIB) as f64;
    bench.summary.put("clone_golden_gib", gib);
    bench.summary.put("clone_ms", clone_ms);
    bench.summary.put("clone_max_ms", longest_ms);
    bench.summary.put("clone_100_ms", all_ms);
    bench.summary.put("clone_first_write_ms", first_ms);
    Ok(())
}
