//! SPDK's targets and clients for VM disks: `spdk_nvme_perf` over vfio-user, `bdevperf` over
//! vhost-user.
//!
//! As [`super::spdk`], but SPDK's virtio client shares only huge pages: if none are free and
//! mounted, it is skipped with a message.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::process;

use super::forebay::VOLUME_BYTES;
use super::spdk::{Perf, busy_ns, parse, program, rpc_command};
use super::tcp::Shape;
use super::vm::{Kind, wait_for};

const LIMIT: Duration = Duration::from_secs(60);
const NQN: &str = "nqn.2019-07.io.spdk:bench";

/// Runs SPDK's client on processor `cpu`. A vfio-user socket must be named `cntrl`.
pub(super) fn perf(
    folder: &Path,
    kind: Kind,
    cpu: usize,
    socket: &Path,
    shape: &Shape,
    seconds: u32,
) -> Result<Perf> {
    let mask = format!("{:#x}", 1u64 << cpu);
    let limit = LIMIT + Duration::from_secs(seconds.into());
    let load = [
        ("-w", shape.pattern()),
        ("-o", shape.block_bytes.to_string()),
        ("-q", shape.depth.to_string()),
        ("-t", seconds.to_string()),
    ];
    match kind {
        Kind::Pcie => {
            let at = socket.parent().context("a socket has a folder")?;
            // Without a subsystem name, SPDK assumes a discovery controller and does not query it.
            let target = format!("trtype:VFIOUSER traddr:{} subnqn:{NQN}", at.display());
            let mut command = program(folder, "build/bin/spdk_nvme_perf");
            command.args(["--no-huge", "-s", "256", "-L", "-r", &target, "-c", &mask]);
            for (option, value) in load {
                command.args([option, &value]);
            }
            parse(&process::text(&mut command, limit)?)
        }
        Kind::Vhost => {
            let config =
                crate::cargo::target_folder().join(format!("bdevperf-{}.json", std::process::id()));
            let method = serde_json::json!({
                "method": "bdev_virtio_attach_controller",
                "params": {
                    "name": "v", "trtype": "user", "traddr": socket, "dev_type": "blk",
                    // Examining the disk occupies a queue.
                    "vq_count": 2, "vq_size": 256,
                },
            });
            let all = serde_json::json!({
                "subsystems": [{ "subsystem": "bdev", "config": [method] }],
            });
            std::fs::write(&config, all.to_string())?;
            let mut command = program(folder, "build/examples/bdevperf");
            command.args(["-u", "-g", "-s", "400", "-m", &mask, "-l", "--huge-dir"]);
            command.arg(huge_pages()?).arg("-c").arg(&config);
            for (option, value) in load {
                command.args([option, &value]);
            }
            let text = process::text(&mut command, limit);
            let _ = std::fs::remove_file(&config);
            parse_bdevperf(&text?)
        }
    }
}

/// The mount point of huge pages, if enough are free.
fn huge_pages() -> Result<PathBuf> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let free = text
        .lines()
        .find_map(|line| line.strip_prefix("HugePages_Free:"));
    let free: u64 = free.and_then(|free| free.trim().parse().ok()).unwrap_or(0);
    let mounts = std::fs::read_to_string("/proc/mounts")?;
    let mounted = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (at, kind) = (words.next()?, words.next()?);
        (kind == "hugetlbfs").then(|| PathBuf::from(at))
    });
    match mounted {
        Some(at) if free >= 220 => Ok(at),
        _ => bail!(
            "bdevperf needs 220 free huge pages, mounted: `sysctl vm.nr_hugepages=220; mount -t hugetlbfs none /dev/hugepages`"
        ),
    }
}

/// Parses `bdevperf`: total IOPS, MiB/s, failures, timeouts, average, min, max.
fn parse_bdevperf(text: &str) -> Result<Perf> {
    let total = text.lines().rev().find(|line| line.contains("Total"));
    let total = total.with_context(|| format!("no total in the output of bdevperf:\n{text}"))?;
    let figures: Vec<f64> = total
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let p99 = text.lines().find_map(|line| {
        let (share, time) = line.trim().split_once("% :")?;
        if share != "99.00000" {
            return None;
        }
        time.trim().strip_suffix("us")?.parse().ok()
    });
    match figures[..] {
        [iops, _, _, _, mean_us, ..] => Ok(Perf {
            iops,
            mean_us,
            p99_us: p99.unwrap_or(0.0),
        }),
        _ => bail!("the total has unexpected columns: {total}"),
    }
}

/// SPDK's target with one disk.
pub(super) struct SpdkTarget {
    child: Child,
    folder: PathBuf,
    socket: PathBuf,
}

impl SpdkTarget {
    /// Serves a `null` or `ram` device, or a file by its absolute path, on processor `cpu`.
    pub(super) fn start(spdk: &Path, device: &str, kind: Kind, cpu: usize) -> Result<Self> {
        let folder =
            crate::cargo::target_folder().join(format!("spdk-machine-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)?;
        let log = std::fs::File::create(folder.with_extension("log"))?;
        let rpc_socket = folder.join("rpc");
        let child = program(spdk, "build/bin/spdk_tgt")
            .args(["--no-huge", "--no-pci", "-s", "2048"])
            .args(["-m", &format!("{:#x}", 1u64 << cpu), "-S"])
            .arg(&folder)
            .arg("-r")
            .arg(&rpc_socket)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut this = Self {
            child,
            socket: folder.join("cntrl"),
            folder,
        };
        let rpc = |args: &[&str]| -> Result<()> {
            process::text(rpc_command(spdk, &rpc_socket).args(args), LIMIT).map(drop)
        };
        let until = Instant::now() + LIMIT;
        while rpc(&["spdk_get_version"]).is_err() {
            if Instant::now() > until || this.child.try_wait()?.is_some() {
                bail!(
                    "SPDK's target did not start; see {}",
                    this.folder.with_extension("log").display()
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        let megabytes = (VOLUME_BYTES >> 21).to_string();
        match device {
            "ram" => rpc(&["bdev_malloc_create", "-b", "b", &megabytes, "4096"])?,
            file if file.starts_with('/') => rpc(&["bdev_aio_create", file, "b", "4096"])?,
            _ => rpc(&["bdev_null_create", "b", &megabytes, "4096"])?,
        }
        let at = this.folder.display().to_string();
        match kind {
            Kind::Vhost => rpc(&["vhost_create_blk_controller", "cntrl", "b"])?,
            Kind::Pcie => {
                rpc(&["nvmf_create_transport", "-t", "VFIOUSER"])?;
                rpc(&["nvmf_create_subsystem", NQN, "-a", "-s", "BENCH"])?;
                rpc(&["nvmf_subsystem_add_ns", NQN, "b"])?;
                let listen = "nvmf_subsystem_add_listener";
                rpc(&[listen, NQN, "-t", "VFIOUSER", "-a", &at, "-s", "0"])?;
            }
        }
        wait_for(&this.socket, &mut this.child)?;
        Ok(this)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Busy time of its reactors since start.
    pub(super) fn busy_ns(&self, spdk: &Path) -> Result<f64> {
        let mut command = rpc_command(spdk, &self.folder.join("rpc"));
        busy_ns(&process::text(
            command.arg("framework_get_reactors"),
            LIMIT,
        )?)
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for SpdkTarget {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::parse_bdevperf;

    #[test]
    fn bdevperf_output() {
        let text = "\
Device Information                     : runtime(s)       IOPS      MiB/s     Fail/s     TO/s      Average        min        max
VirtioBlk0          :       1.00  100000.00     390.62       0.00       0.00     319.00     100.00    2000.00
===================================================================================================================
Total                                  :             100000.50     390.62       0.00       0.00     319.25     100.00    2000.00

Latency summary for VirtioBlk0 on core 1
 99.00000% :   412.500us
";
        let perf = parse_bdevperf(text).unwrap();
        assert!((perf.iops - 100_000.5).abs() < 0.01);
        assert!((perf.mean_us - 319.25).abs() < 0.01);
        assert!((perf.p99_us - 412.5).abs() < 0.01);
        assert!(parse_bdevperf("nothing").is_err());
    }
}
