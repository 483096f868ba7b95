//! `cargo xtask bench bmstore`: the evaluation of BM-Store (HPCA 2023), as ratios to the bare device.
//!
//! Each part has a file: `bmstore_cases`, `bmstore_devices`, `bmstore_clients` and
//! `bmstore_upgrade`; `--only cases` runs one. The bare device is an equal file under fio. Every
//! client has a thread for each job, which sleeps while nothing ends. All clients run on processor
//! 1, and the reactor on processor 0. A table at the end compares with the published figures.

use std::path::PathBuf;

use anyhow::{Result, bail};
use xtask::process;

use super::forebay;
use super::measure::Summary;
use super::{Options, bmstore_cases, bmstore_clients, bmstore_devices, bmstore_upgrade};

pub(super) struct Evaluation {
    pub(super) program: PathBuf,
    pub(super) quick: bool,
    pub(super) summary: Summary,
}

type Part = (&'static str, fn(&mut Evaluation) -> Result<()>);

const PARTS: [Part; 4] = [
    ("cases", bmstore_cases::run),
    ("devices", bmstore_devices::run),
    ("clients", bmstore_clients::run),
    ("upgrade", bmstore_upgrade::run),
];

/// Prefixes of metrics, in the order of the table's columns.
const SIDES: [&str; 4] = ["tcp", "vfio_user", "vhost_user", "spdk_vhost"];

/// A figure, BM-Store's, SPDK vhost's by the same paper, and our metric without the side.
type Row = (&'static str, &'static str, &'static str, &'static str);

/// The slides of the paper have the ratios of all cases. A third party quotes the latencies.
const ROWS: [Row; 15] = [
    (
        "IOPS over bare, lowest case",
        "0.96 (0.83)",
        "0.63",
        "iops_ratio_lowest",
    ),
    (
        "IOPS over bare, highest case",
        "1.01",
        "0.96",
        "iops_ratio_highest",
    ),
    (
        "random read, depth 1: latency",
        "1.04",
        "1.04",
        "randread_qd1_latency_ratio",
    ),
    ("  us added", "3.2", "3.0", "randread_qd1_added_us"),
    (
        "random write, depth 1: latency",
        "1.25",
        "1.29",
        "randwrite_qd1_latency_ratio",
    ),
    ("  us added", "2.9", "4.3", "randwrite_qd1_added_us"),
    (
        "random read, depth 128: latency",
        "1.01",
        "1.15",
        "randread_qd128_latency_ratio",
    ),
    (
        "4 devices: IOPS over one device",
        "plot",
        "",
        "devices_4_randread_qd128_scaling",
    ),
    (
        "4 devices: bandwidth over one",
        "plot",
        "",
        "devices_4_seqread_qd256_scaling",
    ),
    (
        "  cores for each device",
        "0",
        "2 or more",
        "devices_4_seqread_qd256_cores_per_device",
    ),
    (
        "26 clients: lowest over highest",
        "plot",
        "",
        "clients_26_file_fairness_share",
    ),
    (
        "  on a device in memory",
        "",
        "",
        "clients_26_ram_fairness_share",
    ),
    (
        "upgrade, reads: longest gap, ms",
        "plot",
        "",
        "randread_upgrade_gap_ms",
    ),
    (
        "upgrade, writes: longest gap, ms",
        "plot",
        "",
        "randwrite_upgrade_gap_ms",
    ),
    (
        "  IOPS of that second over before",
        "plot",
        "",
        "randwrite_upgrade_second_share",
    ),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    if !process::is_installed("fio") {
        bail!("fio is not installed: `apt install fio`, or the equivalent of your system");
    }
    let mut evaluation = Evaluation {
        program: forebay::build()?,
        quick: options.quick,
        summary: Summary::default(),
    };
    for (name, part) in PARTS {
        if (options.only.as_ref()).is_none_or(|only| name.contains(only.as_str())) {
            println!("\n{name}");
            part(&mut evaluation)?;
        }
    }
    println!();
    compare(&evaluation.summary);
    limits(&evaluation.summary);
    evaluation.summary.print("bmstore", options.json.as_deref())
}

fn compare(summary: &Summary) {
    print!("{:<34}{:>12}{:>12}", "", "BM-Store", "its SPDK");
    for side in SIDES {
        print!("{side:>12}");
    }
    println!();
    for (what, theirs, spdk, metric) in ROWS {
        print!("{what:<34}{theirs:>12}{spdk:>12}");
        for side in SIDES {
            match summary.metrics.get(&format!("{side}_{metric}")) {
                Some(value) => print!("{value:>12.2}"),
                None => print!("{:>12}", "-"),
            }
        }
        println!();
    }
    println!(
        "The paper's latencies are over those of its bare drive, and SPDK's over those of the same drive passed to a VM. In brackets is a case that a third party quotes. `plot`: published as a plot only."
    );
}

/// What this machine cannot show.
fn limits(summary: &Summary) {
    let processors = std::thread::available_parallelism().map_or(0, |count| count.get());
    println!("This machine can't show:");
    if let Some(us) = summary.metrics.get("bare_randread_qd1_mean_us") {
        println!(
            "- a bare NVMe drive. The device is a file, which takes {us:.0} us for a read at depth 1 with 4 jobs; the paper's drive took 77 us."
        );
    }
    println!(
        "- more processors: of {processors}, the target has one, and all clients share another."
    );
    println!(
        "- separate devices: 1 to 4 files share one disk, so the bare files' own scaling stands beside ours."
    );
    println!(
        "- a host's NVMe driver, a guest's kernel or SR-IOV: the clients are programs that speak the protocols."
    );
}
