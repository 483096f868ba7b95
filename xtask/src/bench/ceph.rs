//! `cargo xtask bench ceph`: volumes in RBD images, beside fio's rbd engine.
//!
//! 4 KiB random I/O on one cluster with one OSD, in turns: fio's rbd engine, NVMe/TCP and
//! vfio-user. Each has an image of its own, all alike and fully written. librbd's cache is off for
//! all. Clients sleep while nothing ends, and no thread is pinned: on a small machine clients,
//! engine and OSD share the processors. Values are medians of undisturbed rounds; ratios are medians
//! over rounds. [`ceph_pause`] has the pauses of take-over.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use xtask::ceph::{self, Cluster, Daemon, Release};
use xtask::process;

use super::bmstore_load::{file, fill};
use super::ceph_load::{LATENCIES, Load, Side, Turn};
use super::forebay::{self, Forebay, Setup};
use super::measure::Summary;
use super::once::{Measured as _, quiet_median, quiet_ratio};
use super::recording_file::RemovedAtEnd;
use super::{Options, ceph_pause};

const LIMIT: Duration = Duration::from_secs(300);
const MIB: u64 = 1 << 20;
/// Of the local pool's file.
const POOL_BYTES: u64 = 1 << 30;
/// Of the local volume `bench/v`.
pub(super) const LOCAL_BYTES: u64 = 256 * MIB;
const SIDES: [Side; 3] = [Side::Fio, Side::Tcp, Side::VfioUser];

/// A cluster with an image for each side, and a daemon with volumes in two of them.
pub(super) struct Rig {
    pub(super) program: PathBuf,
    pub(super) forebay: Forebay,
    pub(super) nqn: String,
    pub(super) socket: PathBuf,
    pub(super) cluster: Cluster,
    /// `ceph.conf` for fio.
    pub(super) config: PathBuf,
    pub(super) image_bytes: u64,
    // They go after the processes.
    _pool: RemovedAtEnd,
    _folder: RemovedFolder,
}

struct RemovedFolder(PathBuf);

impl Drop for RemovedFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let program = forebay::build()?;
    let mut summary = Summary::default();
    let wanted = |name: &str| (options.only.as_ref()).is_none_or(|only| name.contains(only));
    let depths: &[u32] = match options.quick {
        true => &[1, 16, 128],
        false => &[1, 4, 16, 32, 64, 128],
    };
    let loads = ["read", "write"].into_iter();
    let loads = loads.flat_map(|op| depths.iter().map(move |&depth| Load { op, depth }));
    let loads: Vec<Load> = loads.filter(|load| wanted(&load.name())).collect();
    let pauses = wanted(ceph_pause::NAME);
    if pauses {
        ceph_pause::alone(&program, options.quick, &mut summary)?;
    }
    if pauses || !loads.is_empty() {
        let image_bytes = if options.quick { 256 * MIB } else { 1024 * MIB };
        let mut rig = Rig::start(program, image_bytes)?;
        if !loads.is_empty() {
            beside_fio(&rig, &loads, options.quick, &mut summary)?;
        }
        if pauses {
            ceph_pause::run(&mut rig, options.quick, &mut summary)?;
        }
    }
    summary.print("ceph", options.json.as_deref())
}

impl Rig {
    fn start(program: PathBuf, image_bytes: u64) -> Result<Self> {
        let folder = crate::cargo::target_folder().join(format!("bc-{}", std::process::id()));
        let folder = RemovedFolder(folder);
        let cluster = Cluster::start(&ceph::Options::new(&folder.0, Release::V16))?;
        let config = cluster.folder().join("fio.conf");
        let text = std::fs::read_to_string(cluster.config_file())?;
        std::fs::write(&config, text + "[client]\nrbd cache = false\n")?;
        for side in SIDES {
            make_image(&cluster, side.image(), image_bytes)?;
        }
        let libraries = cluster.programs().client_libraries();
        let libraries = libraries.display().to_string();
        let setup = Setup {
            config: format!("[ceph.c]\nconfig = {:?}\n", cluster.config_file()),
            environment: ["LD_LIBRARY_PATH", "FOREBAY_CEPH_LIBRARIES"]
                .map(|name| (name.to_owned(), libraries.clone()))
                .into(),
        };
        let (forebay, pool) = local(&program, setup)?;
        let volume = |name: &str| {
            let image = format!("c/{}/{name}", ceph::POOL);
            let volume = format!("bench/{name}");
            let create = ["volume", "create", &volume, "--rbd", &image];
            let block = ["--block-size", "4096"];
            forebay.cli(&[&create[..], &block].concat()).map(|_| volume)
        };
        let nqn = forebay.export(&volume(Side::Tcp.image())?)?;
        let socket = forebay.folder().join("vm.sock");
        let path = socket.display().to_string();
        let disk = volume(Side::VfioUser.image())?;
        forebay.cli(&[
            "export",
            "create",
            &disk,
            "--vm-socket",
            &path,
            "--nvme-pcie",
        ])?;
        Ok(Self {
            program,
            forebay,
            nqn,
            socket,
            cluster,
            config,
            image_bytes,
            _pool: pool,
            _folder: folder,
        })
    }

    /// The cluster's processes.
    pub(super) fn ceph(&self) -> Result<Vec<u32>> {
        let daemons = self.cluster.daemons();
        daemons
            .into_iter()
            .map(|one| self.cluster.pid(one))
            .collect()
    }

    pub(super) fn osd(&self) -> Result<u32> {
        self.cluster.pid(Daemon::Osd(0))
    }

    /// fio's rbd engine on an image.
    pub(super) fn fio(&self, image: &str) -> Command {
        let mut command = fio(&self.cluster, image);
        command.env("CEPH_CONF", &self.config);
        command
    }
}

/// A daemon with the local, written volume `bench/v`.
pub(super) fn local(program: &std::path::Path, setup: Setup) -> Result<(Forebay, RemovedAtEnd)> {
    let pool = file("ceph-pool", POOL_BYTES)?;
    let spec = format!("file:{}", pool.0.display());
    let forebay = Forebay::start_as(program, setup, &spec, &LOCAL_BYTES.to_string(), &[])?;
    forebay.wait_zero_filled()?;
    fill(program, &forebay, &forebay.nqn)?;
    Ok((forebay, pool))
}

fn fio(cluster: &Cluster, image: &str) -> Command {
    let mut command = cluster.command("fio");
    command
        .args(["--output-format=json", "--ioengine=rbd", "--name=job"])
        .args(["--clientname=admin", &format!("--pool={}", ceph::POOL)])
        .arg(format!("--rbdname={image}"));
    command
}

/// Makes an image and writes all of it: a read of an unwritten object would be faster.
fn make_image(cluster: &Cluster, name: &str, bytes: u64) -> Result<()> {
    let path = format!("{}/{name}", ceph::POOL);
    cluster.rbd(&["create", &path, "--size", &format!("{}M", bytes / MIB)])?;
    let mut write = fio(cluster, name);
    write.args(["--rw=write", "--bs=1M", "--iodepth=8"]);
    process::text(&mut write, LIMIT).map(drop)
}

fn beside_fio(rig: &Rig, loads: &[Load], quick: bool, summary: &mut Summary) -> Result<()> {
    let (seconds, rounds) = if quick { (2, 2) } else { (4, 5) };
    // The first commands wait until the images are open.
    for side in [Side::Tcp, Side::VfioUser] {
        let load = Load {
            op: "write",
            depth: 1,
        };
        rig.turn(side, load, 1, 0.0)?;
    }
    let fio_start_s = rig.fio_start_s()?;
    println!(
        "{:<6}{:>4}  {:<10}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}{:>8}{:>7}{:>8}",
        "op",
        "QD",
        "side",
        "IOPS",
        "mean us",
        "p50",
        "p90",
        "p99",
        "p99.9",
        "p99.99",
        "client",
        "engine",
        "OSD",
        "others",
        "IOPS",
        "latency"
    );
    let mut sides = SIDES;
    for load in loads {
        let mut turns: BTreeMap<Side, Vec<Turn>> = BTreeMap::new();
        for _ in 0..rounds {
            for side in sides {
                let turn = rig.turn(side, *load, seconds, fio_start_s)?;
                turns.entry(side).or_default().push(turn);
            }
            sides.rotate_left(1);
        }
        report(summary, *load, &turns);
    }
    println!("client, engine, OSD: processor time per I/O in us; fio's includes librbd's threads");
    Ok(())
}

fn report(summary: &mut Summary, load: Load, turns: &BTreeMap<Side, Vec<Turn>>) {
    let fio = turns.get(&Side::Fio).map_or(&[][..], Vec::as_slice);
    for (side, turns) in turns {
        let mut of = |figure: &dyn Fn(&Turn) -> f64| quiet_median(summary, turns, figure);
        let iops = of(&|turn| turn.iops);
        let latencies: Vec<f64> = (0..LATENCIES.len())
            .map(|at| of(&|turn| turn.latency_us[at]))
            .collect();
        let cpu = [0, 1, 2].map(|at| of(&|turn| turn.cpu_us[at]));
        let others = of(&|turn| turn.others_cores);
        print!(
            "{:<6}{:>4}  {:<10}{iops:>7.0}",
            load.op,
            load.depth,
            side.name()
        );
        for latency in &latencies {
            print!("{latency:>9.0}");
        }
        print!("{:>8.1}{:>8.1}{:>8.1}{others:>8.2}", cpu[0], cpu[1], cpu[2]);
        let name = format!("{}_{}", side.name(), load.name());
        if *side != Side::Fio {
            let iops = quiet_ratio(summary, turns, fio, |turn| turn.iops);
            let latency = quiet_ratio(summary, turns, fio, |turn| turn.latency_us[0]);
            print!("{iops:>7.2}{latency:>8.2}");
            summary.put(format!("{name}_iops_ratio"), iops);
            summary.put(format!("{name}_latency_ratio"), latency);
        }
        let disturbed = !turns.iter().any(Turn::is_quiet);
        println!("{}", if disturbed { "  disturbed" } else { "" });
        summary.put(format!("{name}_iops"), iops);
        for (latency, value) in LATENCIES.iter().zip(latencies) {
            if load.depth == 1 || *latency == "mean" {
                summary.put(format!("{name}_{latency}_us"), value);
            }
        }
        for (part, value) in ["client", "engine", "osd"].iter().zip(cpu) {
            if *side != Side::Fio || *part != "engine" {
                summary.put(format!("{name}_{part}_cpu_us"), value);
            }
        }
    }
}
