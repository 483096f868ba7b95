//! Metadata of snapshots, for each TiB of a volume with extents of 64 KiB.
//!
//! A volume of 64 GiB (4 GiB with `--quick`) on a null device is written in random order, gets a
//! snapshot, and is written again. Each step shows the growth since the last one: of the catalog's
//! records, of its database (of which there are two copies), and of both processes' memory.

use anyhow::{Context, Result};

use super::burst_client::Host;
use super::pool::{EXTENT_BYTES, GIB, PoolBench, Rig};
use super::pool_load::{once_per, write_each};

const TIB: u64 = 1 << 40;

#[derive(Debug, Clone, Copy)]
struct Use {
    records_bytes: u64,
    database_bytes: u64,
    daemon_bytes: u64,
    engine_bytes: u64,
}

pub(super) fn run(bench: &mut PoolBench) -> Result<()> {
    let bytes = if bench.quick { 4 * GIB } else { 64 * GIB };
    let rig = Rig::start(bench, "null", 3 * bytes + GIB, bytes, "64K")?;
    let (port, nqn) = (rig.forebay.port, rig.forebay.nqn.clone());
    let write = || {
        let places = once_per(EXTENT_BYTES, bytes, true);
        write_each(|| Host::tcp(port, &nqn), places).map(drop)
    };
    println!(
        "{:<20}{:>14}{:>14}{:>14}{:>14}",
        "MB for each TiB", "records", "database", "daemon", "engine"
    );
    let mut before = usage(&rig)?;
    for step in ["volume", "snapshot", "rewritten"] {
        match step {
            "snapshot" => drop(rig.api.snapshot("v@s")?),
            _ => write()?,
        }
        // Mappings are committed when the volume is idle.
        rig.flush()?;
        let now = usage(&rig)?;
        report(bench, step, &before, &now, bytes);
        before = now;
    }
    Ok(())
}

fn report(bench: &mut PoolBench, step: &str, before: &Use, now: &Use, volume_bytes: u64) {
    let of_tib = |of: fn(&Use) -> u64| {
        let more = of(now).saturating_sub(of(before));
        more as f64 * TIB as f64 / volume_bytes as f64
    };
    let all = [
        ("records", of_tib(|used| used.records_bytes)),
        ("database", of_tib(|used| used.database_bytes)),
        ("daemon_memory", of_tib(|used| used.daemon_bytes)),
        ("engine_memory", of_tib(|used| used.engine_bytes)),
    ];
    print!("{step:<20}");
    for (name, value) in all {
        print!("{:>14.2}", value / 1e6);
        (bench.summary).put(format!("metadata_{step}_{name}_bytes_per_tib"), value);
    }
    println!();
}

fn usage(rig: &Rig) -> Result<Use> {
    let pool = rig.forebay.cli(&["pool", "show"])?;
    let catalog = |name: &str| {
        let value = pool["catalog"][name].as_u64();
        value.with_context(|| format!("no {name} of the catalog"))
    };
    let [daemon, engine] = rig.forebay.processes();
    Ok(Use {
        records_bytes: catalog("used_bytes")?,
        database_bytes: catalog("metadata_bytes")?,
        daemon_bytes: memory_bytes(daemon)?,
        engine_bytes: memory_bytes(engine)?,
    })
}

/// A process's own and shared memory, without files.
fn memory_bytes(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = |name: &str| -> Result<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let line = line.with_context(|| format!("no {name} of process {pid}"))?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    };
    Ok((kib("RssAnon:")? + kib("RssShmem:")?) << 10)
}
