//! SPDK's target and client over TCP, from `SPDK_DIR`; without it comparisons are skipped with a
//! message.
//!
//! They use neither hugepages nor PCI, so the machine needs no preparation. RPC scripts configure
//! the target.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::process;

use super::forebay::VOLUME_BYTES;
use super::tcp::Shape;

const LIMIT: Duration = Duration::from_secs(60);
const NQN: &str = "nqn.2016-06.io.spdk:bench";

pub(crate) fn folder() -> Option<PathBuf> {
    let folder = PathBuf::from(std::env::var_os("SPDK_DIR")?);
    folder
        .join("build/bin/spdk_nvme_perf")
        .exists()
        .then_some(folder)
}

/// A program in SPDK's folder.
pub(super) fn program(folder: &Path, path: &str) -> Command {
    let mut command = Command::new(folder.join(path));
    let libraries = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let own = folder.join("build/lib");
    // For its vfio-user library.
    let vfio_user = folder.join("build/libvfio-user");
    command.env(
        "LD_LIBRARY_PATH",
        format!("{}:{}:{libraries}", own.display(), vfio_user.display()),
    );
    command
}

/// Output of `spdk_nvme_perf`.
pub(crate) struct Perf {
    pub(crate) iops: f64,
    pub(crate) mean_us: f64,
    pub(crate) p99_us: f64,
}

pub(crate) fn perf(
    folder: &Path,
    cpu: usize,
    port: u16,
    nqn: &str,
    shape: &Shape,
    seconds: u32,
) -> Result<Perf> {
    let target = format!("trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{port} subnqn:{nqn}");
    let mut command = program(folder, "build/bin/spdk_nvme_perf");
    command
        .args(["--no-huge", "-s", "256", "-L", "-r", &target])
        .args(["-w", &shape.pattern(), "-o", &shape.block_bytes.to_string()])
        .args(["-q", &shape.depth.to_string(), "-t", &seconds.to_string()])
        .args(["-c", &format!("{:#x}", 1u64 << cpu)]);
    if shape.has_digests() {
        command.args(["-H", "-I"]);
    }
    let text = process::text(&mut command, LIMIT + Duration::from_secs(seconds.into()))?;
    parse(&text)
}

pub(super) fn parse(text: &str) -> Result<Perf> {
    let total = text.lines().find(|line| line.starts_with("Total"));
    let total =
        total.with_context(|| format!("no total in the output of spdk_nvme_perf:\n{text}"))?;
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
        [iops, _, mean_us, ..] => Ok(Perf {
            iops,
            mean_us,
            p99_us: p99.unwrap_or(0.0),
        }),
        _ => bail!("the total has unexpected columns: {total}"),
    }
}

pub(super) fn rpc_command(folder: &Path, socket: &Path) -> Command {
    let mut command = Command::new("python3");
    command
        .arg(folder.join("scripts/rpc.py"))
        .arg("-s")
        .arg(socket);
    command
}

/// Busy time of all reactors, from `framework_get_reactors`.
pub(super) fn busy_ns(text: &str) -> Result<f64> {
    let said: serde_json::Value = serde_json::from_str(text)?;
    let rate = said["tick_rate"].as_f64().filter(|rate| *rate > 0.0);
    let reactors = said["reactors"].as_array().context("no reactors")?;
    let busy = reactors.iter().map(|reactor| reactor["busy"].as_f64());
    let ticks: f64 = busy.sum::<Option<f64>>().context("no busy ticks")?;
    Ok(ticks * 1e9 / rate.context("no tick_rate")?)
}

/// SPDK's target with one namespace.
pub(crate) struct Target {
    child: Child,
    pub(crate) port: u16,
    socket: PathBuf,
}

impl Target {
    /// Serves a `null` or `ram` device on processor `cpu`.
    pub(crate) fn start(folder: &Path, device: &str, cpu: usize) -> Result<Self> {
        let socket =
            crate::cargo::target_folder().join(format!("spdk-{}.sock", std::process::id()));
        let log = std::fs::File::create(socket.with_extension("log"))?;
        let child = program(folder, "build/bin/nvmf_tgt")
            .args([
                "--no-huge",
                "--no-pci",
                "-s",
                "2048",
                "-m",
                &format!("{:#x}", 1u64 << cpu),
                "-r",
            ])
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?
            .local_addr()?
            .port();
        let mut this = Self {
            child,
            port,
            socket,
        };
        let rpc = |args: &[&str]| -> Result<()> {
            let mut command = rpc_command(folder, &this.socket);
            process::text(command.args(args), LIMIT).map(|_| ())
        };
        let until = Instant::now() + LIMIT;
        while rpc(&["spdk_get_version"]).is_err() {
            if Instant::now() > until || this.child.try_wait()?.is_some() {
                bail!(
                    "SPDK's target did not start; see {}",
                    this.socket.with_extension("log").display()
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        let megabytes = (VOLUME_BYTES >> 20).to_string();
        rpc(&["nvmf_create_transport", "-t", "TCP"])?;
        match device {
            "ram" => rpc(&["bdev_malloc_create", "-b", "b0", &megabytes, "4096"])?,
            _ => rpc(&["bdev_null_create", "b0", &megabytes, "4096"])?,
        }
        rpc(&["nvmf_create_subsystem", NQN, "-a", "-s", "BENCH"])?;
        rpc(&["nvmf_subsystem_add_ns", NQN, "b0"])?;
        let port = this.port.to_string();
        rpc(&[
            "nvmf_subsystem_add_listener",
            NQN,
            "-t",
            "tcp",
            "-a",
            "127.0.0.1",
            "-s",
            &port,
        ])?;
        Ok(this)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Busy time of its reactors since start.
    pub(crate) fn busy_ns(&self, folder: &Path) -> Result<f64> {
        let mut command = rpc_command(folder, &self.socket);
        let text = process::text(command.arg("framework_get_reactors"), LIMIT)?;
        busy_ns(&text)
    }

    pub(crate) fn nqn(&self) -> &'static str {
        NQN
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[cfg(test)]
mod tests {
    use super::{busy_ns, parse};

    #[test]
    fn busy_reactors() {
        let text = r#"{"tick_rate": 2000000000, "reactors": [{"lcore": 0, "busy": 3000, "idle": 9}, {"lcore": 1, "busy": 1000}]}"#;
        assert!((busy_ns(text).unwrap() - 2000.0).abs() < 1e-6);
        assert!(busy_ns(r#"{"reactors": []}"#).is_err());
    }

    #[test]
    fn perf_output() {
        let text = "\
Device Information                 :       IOPS      MiB/s    Average        min        max
TCP (addr:127.0.0.1) from core  1:   46664.74     182.28     685.72      47.55   24179.50
========================================================
Total                              :   46664.74     182.28     685.72      47.55   24179.50

 98.00000% : 11998.129us
 99.00000% : 12149.366us
";
        let perf = parse(text).unwrap();
        assert!((perf.iops - 46664.74).abs() < 0.01);
        assert!((perf.mean_us - 685.72).abs() < 0.01);
        assert!((perf.p99_us - 12149.366).abs() < 0.01);
        assert!(parse("nothing").is_err());
    }
}
