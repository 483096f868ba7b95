//! `cargo xtask bench pool`: snapshots and clones.
//!
//! Each part has a file: `pool_stall`, `pool_clone`, `pool_first_write`, `pool_chain`,
//! `pool_metadata` and `pool_qcow2`; `--only stall` runs one. The reactor is on processor 0, the
//! client on 1; the client sleeps while nothing ends. Space is clean before each measurement.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use forebay_initiator::{IoOp, Session};
use serde_json::Value;

use super::forebay::{self, Forebay};
use super::measure::{Clock, DISTURBED_CORES, Summary};
use super::place::Place;
use super::pool_api::Api;
use super::{
    Options, pool_chain, pool_clone, pool_first_write, pool_metadata, pool_qcow2, pool_stall,
};

pub(super) const TARGET_CPU: usize = 0;
pub(super) const EXTENT_BYTES: u64 = 64 << 10;
pub(super) const GIB: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(120);
const STILL: Duration = Duration::from_secs(5);

pub(super) struct PoolBench {
    pub(super) program: PathBuf,
    pub(super) quick: bool,
    pub(super) summary: Summary,
}

type Part = (&'static str, fn(&mut PoolBench) -> Result<()>);

const PARTS: [Part; 6] = [
    ("stall", pool_stall::run),
    ("clone", pool_clone::run),
    ("first_write", pool_first_write::run),
    ("chain", pool_chain::run),
    ("metadata", pool_metadata::run),
    ("qcow2", pool_qcow2::run),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut bench = PoolBench {
        program: forebay::build()?,
        quick: options.quick,
        summary: Summary::default(),
    };
    for (name, part) in PARTS {
        if (options.only.as_ref()).is_none_or(|only| name.contains(only.as_str())) {
            println!("\n{name}");
            part(&mut bench)?;
        }
    }
    println!();
    bench.summary.print("pool", options.json.as_deref())
}

/// A pool on one device, with the exported volume `bench/v`.
pub(super) struct Rig {
    pub(super) forebay: Forebay,
    pub(super) api: Api,
    // Its files go after the processes.
    _place: Place,
}

impl Rig {
    /// `kind` as in [`Place::make`]; `extent` is the pool's extent size.
    pub(super) fn start(
        bench: &PoolBench,
        kind: &'static str,
        device_bytes: u64,
        volume_bytes: u64,
        extent: &str,
    ) -> Result<Self> {
        let place = Place::make(kind, device_bytes)?.context("no device")?;
        let size = volume_bytes.to_string();
        let pool = ["--extent-size", extent];
        let forebay = Forebay::start_pool(&bench.program, &place.spec, TARGET_CPU, &size, &pool)?;
        forebay.wait_zero_filled()?;
        place.take_memory()?;
        let api = Api(forebay.folder().join("api.sock"));
        Ok(Self {
            forebay,
            api,
            _place: place,
        })
    }

    /// Waits until all space is free and clean.
    pub(super) fn wait_empty(&self) -> Result<()> {
        let until = Instant::now() + LIMIT;
        loop {
            let pool = self.forebay.cli(&["pool", "show"])?;
            if pool["owned_bytes"] == 0 && pool["dirty_bytes"] == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < until, "space was not free after {LIMIT:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until the catalog's records stay as they are for a while.
    pub(super) fn wait_catalog_still(&self) -> Result<()> {
        let (mut since, mut last) = (Instant::now(), Value::Null);
        let until = since + LIMIT;
        while since.elapsed() < STILL {
            let pool = self.forebay.cli(&["pool", "show"])?;
            let used = &pool["catalog"]["used_bytes"];
            if *used != last {
                last = used.clone();
                since = Instant::now();
            }
            ensure!(Instant::now() < until, "the catalog changed for {LIMIT:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Makes every write to `bench/v` durable, and its mappings.
    pub(super) fn flush(&self) -> Result<()> {
        let address = ([127, 0, 0, 1], self.forebay.port).into();
        let host = "nqn.2026-01.io.forebay:bench";
        let options = forebay_initiator::Options::default();
        let mut session = Session::connect(address, &self.forebay.nqn, host, &options)?;
        let mut queue = session.open_queue(1)?;
        queue.execute(&IoOp::Flush, Vec::new(), LIMIT)?;
        Ok(())
    }

    /// A new volume's NQN.
    pub(super) fn volume(&self, name: &str, bytes: u64) -> Result<String> {
        let size = bytes.to_string();
        (self.forebay).cli(&["volume", "create", name, "--size", &size])?;
        self.forebay.export(name)
    }
}

/// Whether others used the machine meanwhile.
pub(super) fn is_disturbed(clock: &Clock) -> Result<bool> {
    Ok(clock.used()?.others_user_cores > DISTURBED_CORES)
}

/// Waits until background work of earlier steps is over.
pub(super) fn settle() {
    std::thread::sleep(Duration::from_millis(300));
}
