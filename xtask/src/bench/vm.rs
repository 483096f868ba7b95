//! `cargo xtask bench vhost` and `bench pcie`: VM disks without VMs.
//!
//! 4 KiB random I/O on null and ram devices, target on processor 0, client on processor 1. Peers
//! are qemu-storage-daemon (vhost-user) and, with `SPDK_DIR`, SPDK's target and client. Doorbells
//! are mapped, as with SPDK. [`machine_busy`] has the processor time at a fixed rate; [`floor`] the
//! minimum wake latency.
//!
//! Rounds are short and alternate between all sides, because hypervisors that move processors can
//! triple a cache line's latency for seconds. Values are medians of undisturbed runs; ratios are
//! medians over rounds with the same client.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::process;

use super::forebay::{self, Forebay, VOLUME_BYTES};
use super::measure::{DISTURBED_CORES, Sample, Summary, median, quiet};
use super::spdk_machine::{self, SpdkTarget};
use super::tcp::{Shape, TARGET_CPU, turn};
use super::{Options, busy, floor, machine_busy, spdk};

pub(super) const CLIENT_CPU: usize = 1;
const LIMIT: Duration = Duration::from_secs(60);
const DEPTHS: [u32; 3] = [1, 32, 128];
pub(super) const QSD: &str = "qemu-storage-daemon";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Vhost,
    Pcie,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Vhost => "vhost",
            Self::Pcie => "pcie",
        }
    }

    /// Options of `forebay bench vm`.
    fn client(self, mapped: bool) -> &'static [&'static str] {
        match (self, mapped) {
            (Self::Vhost, _) => &["--vhost-user"],
            (Self::Pcie, true) => &["--doorbells", "mapped", "--vfio-user"],
            (Self::Pcie, false) => &["--vfio-user"],
        }
    }

    /// Options of `forebay export create`.
    fn export(self, mapped: bool) -> &'static [&'static str] {
        match (self, mapped) {
            // SPDK's client needs two.
            (Self::Vhost, _) => &["--vhost-user", "--queues", "2"],
            (Self::Pcie, true) => &["--nvme-pcie", "--mapped-doorbells"],
            (Self::Pcie, false) => &["--nvme-pcie"],
        }
    }
}

/// Client and target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Ours,
    /// Our client, qemu-storage-daemon.
    ToQsd,
    /// Our client, SPDK.
    ToSpdk,
    /// SPDK's client, Forebay.
    SpdkToOurs,
    /// SPDK's client, SPDK.
    SpdkToSpdk,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "forebay_client",
            Self::ToQsd => "forebay_client_qsd",
            Self::ToSpdk => "forebay_client_spdk",
            Self::SpdkToOurs => "spdk_client",
            Self::SpdkToSpdk => "spdk_both",
        }
    }
}

pub(crate) fn run_vhost(options: &Options) -> Result<()> {
    run(Kind::Vhost, options)
}

pub(crate) fn run_pcie(options: &Options) -> Result<()> {
    run(Kind::Pcie, options)
}

fn run(kind: Kind, options: &Options) -> Result<()> {
    let program = forebay::build()?;
    let peer = spdk::folder();
    let mut client_of_spdk = peer.is_some();
    if peer.is_none() {
        println!("SPDK_DIR names no built SPDK: skipping the comparison with it");
    }
    let has_qsd = kind == Kind::Vhost && process::is_installed(QSD);
    if kind == Kind::Vhost && !has_qsd {
        println!("{QSD} is not installed (package qemu-utils): skipping the comparison");
    }
    let (seconds, rounds) = if options.quick { (1, 1) } else { (2, 7) };
    let mut summary = Summary::default();
    println!(
        "{:<7}{:<6}{:>4}  {:<20}{:>10}{:>10}{:>10}{:>8}{:>8}",
        "device", "op", "QD", "client", "IOPS", "mean us", "p99 us", "target", "others"
    );
    for device in ["null", "ram"] {
        let wanted = |shape: &Shape| {
            let name = format!("{device}_{}", shape.name());
            options.only.as_ref().is_none_or(|only| name.contains(only))
        };
        let all: Vec<Shape> = ["read", "write"]
            .into_iter()
            .flat_map(|op| DEPTHS.map(|depth| Shape::random(op, depth)))
            .filter(wanted)
            .collect();
        let paced = ["read", "write"]
            .map(|op| (op, machine_busy::name(device, op)))
            .into_iter()
            .filter(|(_, name)| options.only.as_ref().is_none_or(|only| name.contains(only)));
        let paced: Vec<(&str, String)> = paced.collect();
        if all.is_empty() && paced.is_empty() {
            continue;
        }
        let ours = Ours::start(&program, device, kind, true)?;
        fill(&program, kind, &ours)?;
        let mut peers = Peers {
            program: &program,
            kind,
            device,
            ours: &ours,
            spdk: peer.as_deref(),
            has_qsd,
            client_of_spdk: &mut client_of_spdk,
            seconds,
            rounds,
        };
        for shape in all {
            let samples = peers.random(&shape)?;
            report(&mut summary, device, &shape, &samples);
        }
        for (op, name) in paced {
            busy::report(&mut summary, &name, &peers.paced(op)?);
        }
    }
    if options.only.is_none() {
        idle(&program, kind, options.quick, &mut summary)?;
    }
    summary.print(kind.name(), options.json.as_deref())
}

/// The targets and clients compared on a device.
struct Peers<'a> {
    program: &'a Path,
    kind: Kind,
    device: &'a str,
    ours: &'a Ours,
    spdk: Option<&'a Path>,
    has_qsd: bool,
    /// Whether SPDK's client works.
    client_of_spdk: &'a mut bool,
    seconds: u32,
    rounds: usize,
}

impl Peers<'_> {
    fn random(&mut self, shape: &Shape) -> Result<BTreeMap<Side, Vec<Sample>>> {
        let (kind, device, seconds, ours) = (self.kind, self.device, self.seconds, self.ours);
        let mut samples: BTreeMap<Side, Vec<Sample>> = BTreeMap::new();
        for _ in 0..self.rounds {
            let mut put = |side, sample| samples.entry(side).or_default().push(sample);
            let load = |pid, socket: &Path| load(self.program, kind, pid, socket, shape, seconds);
            // Compared sides run in succession.
            if self.has_qsd {
                let qsd = Qsd::start(device)?;
                put(Side::ToQsd, load(qsd.child.id(), &qsd.socket)?);
            }
            put(Side::Ours, load(ours.pid(), &ours.socket)?);
            let Some(folder) = self.spdk else { continue };
            let perf = |pid, socket: &Path| {
                turn(&[pid], || {
                    spdk_machine::perf(folder, kind, CLIENT_CPU, socket, shape, seconds)
                })
            };
            {
                let theirs = SpdkTarget::start(folder, device, kind, TARGET_CPU)?;
                put(Side::ToSpdk, load(theirs.pid(), theirs.socket())?);
                if *self.client_of_spdk {
                    put(Side::SpdkToSpdk, perf(theirs.pid(), theirs.socket())?);
                }
            }
            if *self.client_of_spdk {
                match perf(ours.pid(), &ours.socket) {
                    Ok(sample) => put(Side::SpdkToOurs, sample),
                    Err(error) => {
                        println!("SPDK's client failed, and is skipped from now on: {error:#}");
                        *self.client_of_spdk = false;
                    }
                }
            }
        }
        Ok(samples)
    }

    /// Processor time of both targets at one rate.
    fn paced(&self, op: &str) -> Result<[Vec<busy::Run>; 2]> {
        let (kind, ours) = (self.kind, self.ours);
        let mut all = [Vec::new(), Vec::new()];
        for _ in 0..self.rounds {
            let paced = |socket: &Path, pid, busy: &dyn Fn() -> Result<f64>| {
                let mut command = client(self.program, kind, true, socket);
                machine_busy::run(&mut command, op, self.seconds, pid, busy)
            };
            let busy = || busy::busy_of_ours(&ours.forebay);
            all[0].push(paced(&ours.socket, ours.pid(), &busy)?);
            if let Some(folder) = self.spdk {
                let theirs = SpdkTarget::start(folder, self.device, kind, TARGET_CPU)?;
                let busy = || theirs.busy_ns(folder);
                all[1].push(paced(theirs.socket(), theirs.pid(), &busy)?);
            }
        }
        Ok(all)
    }
}

struct Ours {
    forebay: Forebay,
    socket: PathBuf,
}

impl Ours {
    fn start(program: &Path, device: &str, kind: Kind, mapped: bool) -> Result<Self> {
        let forebay = Forebay::start(program, device, TARGET_CPU)?;
        // SPDK's client needs this name.
        let socket = forebay.folder().join("vm/cntrl");
        if let Some(folder) = socket.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let path = socket.display().to_string();
        let size = (VOLUME_BYTES / 2).to_string();
        forebay.cli(&["volume", "create", "bench/machine", "--size", &size])?;
        let mut export = vec!["export", "create", "bench/machine", "--vm-socket", &path];
        export.extend(kind.export(mapped));
        forebay.cli(&export)?;
        Ok(Self { forebay, socket })
    }

    fn pid(&self) -> u32 {
        self.forebay.engine
    }
}

fn fill(program: &Path, kind: Kind, ours: &Ours) -> Result<()> {
    let mut command = client(program, kind, true, &ours.socket);
    command.args(["--rw", "write", "--bs", "128K", "--depth", "8"]);
    command.args(["--seconds", "4"]);
    process::text(&mut command, LIMIT).map(drop)
}

fn client(program: &Path, kind: Kind, mapped: bool, socket: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["--json", "bench", "machine"]);
    command.args(kind.client(mapped)).arg(socket);
    command
}

fn load(
    program: &Path,
    kind: Kind,
    pid: u32,
    socket: &Path,
    shape: &Shape,
    seconds: u32,
) -> Result<Sample> {
    let mut command = client(program, kind, true, socket);
    command
        .args(["--rw", &shape.pattern()])
        .args(["--bs", &shape.block_bytes.to_string()])
        .args(["--depth", &shape.depth.to_string()])
        .args(["--seconds", &seconds.to_string()])
        .args(["--cpu", &CLIENT_CPU.to_string()]);
    turn(&[pid], || figures(&mut command).map(|figures| figures.perf))
}

pub(super) struct Figures {
    pub(super) perf: spdk::Perf,
    p50_us: f64,
}

/// Runs any of our clients.
pub(super) fn figures(command: &mut Command) -> Result<Figures> {
    let text = process::text(command, LIMIT)?;
    let report: serde_json::Value = serde_json::from_str(&text)?;
    let line = report["lines"]
        .get(0)
        .context("the load generator gave no figures")?;
    let figure = |name: &str| {
        line[name]
            .as_f64()
            .with_context(|| format!("no {name} in {line}"))
    };
    Ok(Figures {
        perf: spdk::Perf {
            iops: figure("iops")?,
            mean_us: figure("mean_us")?,
            p99_us: figure("p99_us")?,
        },
        p50_us: figure("p50_us")?,
    })
}

fn report(
    summary: &mut Summary,
    device: &str,
    shape: &Shape,
    samples: &BTreeMap<Side, Vec<Sample>>,
) {
    let (op, depth) = (shape.op, shape.depth);
    let name = format!("{device}_{}", shape.name());
    for (side, samples) in samples {
        let (kept, undisturbed) = quiet(samples);
        summary.disturbed |= !undisturbed;
        let of = |figure: fn(&Sample) -> f64| median(kept.iter().map(figure).collect());
        let (iops, mean_us, p99_us) = (of(|s| s.iops), of(|s| s.mean_us), of(|s| s.p99_us));
        println!(
            "{device:<7}{op:<6}{depth:>4}  {:<20}{iops:>10.0}{mean_us:>10.2}{p99_us:>10.1}{:>8.2}{:>8.2}{}",
            side.name(),
            of(|s| s.target_cores),
            of(|s| s.others_cores),
            if undisturbed { "" } else { "  disturbed" },
        );
        let name = format!("{name}_{}", side.name());
        summary.put(format!("{name}_iops"), iops);
        summary.put(format!("{name}_mean_us"), mean_us);
        summary.put(format!("{name}_p99_us"), p99_us);
    }
    for (ours, theirs, what) in [
        (Side::SpdkToOurs, Side::SpdkToSpdk, ""),
        (Side::Ours, Side::ToSpdk, "own_client_"),
        (Side::Ours, Side::ToQsd, "qsd_"),
    ] {
        let (Some(ours), Some(theirs)) = (samples.get(&ours), samples.get(&theirs)) else {
            continue;
        };
        let pairs: Vec<(&Sample, &Sample)> = ours.iter().zip(theirs).collect();
        let is_quiet =
            |(a, b): &(&Sample, &Sample)| a.others_cores.max(b.others_cores) <= DISTURBED_CORES;
        let mut kept = pairs.clone();
        kept.retain(is_quiet);
        if kept.is_empty() {
            kept = pairs;
        }
        let ratio =
            |of: fn(&Sample) -> f64| median(kept.iter().map(|(a, b)| of(a) / of(b)).collect());
        let (iops, latency) = (ratio(|s| s.iops), ratio(|s| s.mean_us));
        let with = match what {
            "" => "spdk_client_",
            what => what,
        };
        println!(
            "{device:<7}{op:<6}{depth:>4}  {with:<14}ours over theirs: IOPS {iops:.2}, latency {latency:.2}"
        );
        summary.put(format!("{name}_{what}iops_ratio"), iops);
        summary.put(format!("{name}_{what}latency_ratio"), latency);
    }
}

/// Cost of an idle VM, and latency of the first command after a pause.
fn idle(program: &Path, kind: Kind, quick: bool, summary: &mut Summary) -> Result<()> {
    let ours = Ours::start(program, "null", kind, false)?;
    let (seconds, pauses) = if quick { (3, 20) } else { (10, 20) };
    let with_pauses = |pause_ms: u64, seconds: u64| {
        let mut command = client(program, kind, false, &ours.socket);
        command
            .args(["--depth", "1", "--cpu", &CLIENT_CPU.to_string()])
            .args(["--pause", &pause_ms.to_string()])
            .args(["--seconds", &seconds.to_string()]);
        command
    };
    // One command, then a pause to the end.
    let mut command = with_pauses(seconds * 1000, seconds);
    let used = turn(&[ours.pid()], || figures(&mut command).map(|f| f.perf))?;
    let mut command = with_pauses(pauses, seconds);
    let resumed = figures(&mut command)?;
    let floor_us = floor::wake_us(Duration::from_millis(pauses), seconds as u32 * 40)?;
    println!(
        "idle: {:.2} % of a core; the first command after {pauses} ms: median {:.1} us, mean {:.1} us, p99 {:.1} us; a bare wake here: {floor_us:.1} us",
        used.target_cores * 100.0,
        resumed.p50_us,
        resumed.perf.mean_us,
        resumed.perf.p99_us
    );
    summary.put("resume_floor_us", floor_us);
    summary.put("resume_over_floor", resumed.p50_us / floor_us);
    summary.put("idle_cores", used.target_cores);
    summary.put("resume_p50_us", resumed.p50_us);
    summary.put("resume_mean_us", resumed.perf.mean_us);
    summary.put("resume_p99_us", resumed.perf.p99_us);
    Ok(())
}

struct Qsd {
    child: Child,
    socket: PathBuf,
    memory: PathBuf,
}

impl Qsd {
    fn start(device: &str) -> Result<Self> {
        let number = std::process::id();
        let socket = crate::cargo::target_folder().join(format!("qsd-{number}.sock"));
        let memory = PathBuf::from(format!("/dev/shm/forebay-bench-qsd-{number}"));
        let _ = std::fs::remove_file(&socket);
        let node = match device {
            "ram" => {
                let file = std::fs::File::create(&memory)?;
                file.set_len(VOLUME_BYTES / 2)?;
                format!("driver=file,node-name=b,filename={}", memory.display())
            }
            _ => format!("driver=null-co,node-name=b,size={}", VOLUME_BYTES / 2),
        };
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=b,addr.type=unix,addr.path={},writable=on",
            socket.display()
        );
        let child = Command::new("taskset")
            .args(["-c", &TARGET_CPU.to_string(), QSD])
            .args(["--blockdev", &node, "--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {QSD}"))?;
        let mut this = Self {
            child,
            socket,
            memory,
        };
        wait_for(&this.socket, &mut this.child)?;
        Ok(this)
    }
}

impl Drop for Qsd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
        let _ = std::fs::remove_file(&self.memory);
    }
}

/// Waits until a process created its socket.
pub(super) fn wait_for(socket: &Path, child: &mut Child) -> Result<()> {
    let until = Instant::now() + LIMIT;
    while !socket.exists() {
        if let Some(status) = child.try_wait()? {
            bail!("it exited at once: {status}");
        }
        if Instant::now() > until {
            bail!("it did not create {} within {LIMIT:?}", socket.display());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
