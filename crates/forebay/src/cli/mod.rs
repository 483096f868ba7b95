//! The command line, by clap's derive. These doc comments are the help texts; `examples` adds
//! examples.

mod budgets;
mod examples;
mod firmware;
#[cfg(test)]
mod limits_page;
pub(crate) mod line;
#[cfg(test)]
mod mentioned;
mod mi;
pub(crate) mod names;
pub(crate) mod pages;
mod pool;
#[cfg(test)]
mod reference;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use forebay_control::model::AnaState;
use forebay_control::model::rbd::ImagePath;
use forebay_device::size::{Size, parse_size};

use self::budgets::parse_seconds;
pub(crate) use self::budgets::{Amount, BudgetArgs, SchedulingArgs, SchedulingCommand};
pub(crate) use self::firmware::FirmwareCommand;
pub(crate) use self::mi::{MiArgs, MiBudgetArgs, MiCommand};
use self::names::{SnapshotName, SnapshotsOf, VolumeName};
pub(crate) use self::pool::{DeviceCommand, PoolCommand, PoolCreateArgs};
use crate::bench::BenchCommand;
use crate::calibrate::CalibrateArgs;
use crate::engine::EngineArgs;
use crate::serve::ServeArgs;

/// The whole command line, with examples.
pub(crate) fn definition() -> clap::Command {
    examples::add(Cli::command())
}

/// Forebay: a storage hypervisor. Cuts physical storage into disks for tenants.
#[derive(Debug, Parser)]
#[command(name = "forebay", version = forebay_xlate::boundary::version(), max_term_width = 100)]
pub(crate) struct Cli {
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// The daemon's API socket [default: $FOREBAY_SOCKET, else the one in ./forebay.toml, else
    /// ./var/run/api.sock]
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Do not ask for confirmation (without a terminal, Forebay never asks)
    #[arg(long, global = true)]
    pub(crate) yes: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon
    Serve(ServeArgs),
    /// The pool: the devices that store the volumes
    #[command(subcommand)]
    Pool(PoolCommand),
    /// The pool's devices
    #[command(subcommand)]
    Device(DeviceCommand),
    /// Tenants: customers who own volumes
    #[command(subcommand)]
    Tenant(TenantCommand),
    /// Quality of service on this node: capacity, promised resources, admission
    #[command(subcommand)]
    Scheduling(SchedulingCommand),
    /// Ports: the addresses at which hosts connect
    #[command(subcommand)]
    Port(PortCommand),
    /// Volumes: logical disks
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Exports: volumes served to hosts over NVMe/TCP, or to VMs
    #[command(subcommand)]
    Export(ExportCommand),
    /// Show the counters of the engine, the pool and the exports
    Stats,
    /// Show a live view of tenants and volumes
    Top(TopArgs),
    /// Show events: deaths, take-overs, hosts, devices, space, quarantines
    Events(EventsArgs),
    /// Show the state of the daemon and the engine
    Status {
        /// Exit with 0 if all is well, 1 on warnings, 2 if something is not served; deliberate
        /// configuration does not count
        #[arg(long)]
        check: bool,
    },
    /// Benchmarks
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Measure the cost of I/O on this node. It reads and writes temporary volumes; the node
    /// should be otherwise idle
    Calibrate(CalibrateArgs),
    /// Replace the running engine with the newly installed program; hosts and VMs keep their
    /// connections
    Upgrade,
    /// Firmware: signed images of this program, and the slots that engines start from
    #[command(subcommand)]
    Firmware(FirmwareCommand),
    /// Manage a node out of band, as its management controller does: NVMe-MI over MCTP
    Mi(MiArgs),
    /// Stop the engine and the daemon cleanly; hosts wait until they are served again
    Shutdown,
    /// Print a completion script for a shell
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages, one for each command
    Man {
        /// The folder for the pages
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Print the format versions that this program's processes share with other versions
    #[command(hide = true)]
    Formats,
    /// The engine; the daemon starts it
    #[command(hide = true)]
    Engine(EngineArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum TenantCommand {
    /// Create a tenant
    Create {
        /// The tenant's name: 1 to 63 characters from a-z, 0-9 and -
        name: String,
    },
    /// List the tenants
    List,
    /// Show a tenant
    Show {
        /// The tenant's name
        #[arg(add = names::tenants())]
        name: String,
    },
    /// Set or remove a tenant's budget (quality of service, QoS); reports whether its base can be
    /// guaranteed
    #[command(group(
        ArgGroup::new("what")
            .args(["base_iops", "base_bandwidth", "burst_iops", "burst_bandwidth", "no_base", "none", "credit", "metered"])
            .required(true)
            .multiple(true)
    ))]
    Budget {
        /// The tenant's name
        #[arg(add = names::tenants())]
        name: String,
        #[command(flatten)]
        budget: BudgetArgs,
        /// Save up to this much unused base as credit, and burst only from credit, e.g. 60s or 10m
        #[arg(long, value_name = "TIME", value_parser = parse_seconds, conflicts_with_all = ["metered", "none"])]
        credit: Option<u32>,
        /// Burst whenever resources are free, and count use above the base (the default)
        #[arg(long, conflicts_with = "none")]
        metered: bool,
    },
    /// Delete a tenant without volumes
    Delete {
        /// The tenant's name
        #[arg(add = names::tenants())]
        name: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reserve {
    Size(Size),
    Full,
}

impl Reserve {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "full" => Ok(Self::Full),
            size => parse_size(size)
                .map(Self::Size)
                .map_err(|error| format!("{error}; use `full` for the whole size")),
        }
    }

    /// Bytes, for a volume of this size and block size.
    pub(crate) fn of(self, size_bytes: u64, block_bytes: u64) -> u64 {
        match self {
            Self::Size(size) => size.to_blocks(block_bytes),
            Self::Full => size_bytes,
        }
    }
}

fn parse_block(text: &str) -> Result<u32, String> {
    let size = parse_size(text).map_err(|error| error.to_string())?;
    u32::try_from(size.bytes)
        .map_err(|_| format!("`{text}` is too large: a block has 512 or 4096 bytes"))
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create a volume; it uses no space until it is written. With --rbd, it is an image in Ceph
    Create {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::new_volumes())]
        volume: VolumeName,
        /// Its size, e.g. 10G [default with --rbd: that of the existing image]
        #[arg(long, value_parser = parse_size, required_unless_present = "rbd")]
        size: Option<Size>,
        /// The block size hosts see, 512 or 4096 [default: 4096, with --rbd 512]
        #[arg(long, value_name = "BYTES", value_parser = parse_block)]
        block_size: Option<u32>,
        /// Reserve this much space: a size, or `full`
        #[arg(long, value_name = "SIZE|full", value_parser = Reserve::parse, conflicts_with = "rbd")]
        reserve: Option<Reserve>,
        /// An image in Ceph, which is created with --size if it does not exist
        #[arg(long, value_name = "CLUSTER/POOL[/NAMESPACE]/IMAGE", value_parser = names::image)]
        rbd: Option<ImagePath>,
    },
    /// List volumes and snapshots; MAPPED counts writes since the latest snapshot
    List {
        /// Only this tenant's
        #[arg(add = names::tenants())]
        tenant: Option<String>,
    },
    /// Show a volume or a snapshot
    Show {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes_and_snapshots())]
        volume: VolumeName,
    },
    /// Grow a volume; connected hosts see the new size. Only a volume in Ceph can shrink
    Resize {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
        /// Its new size, e.g. 20G
        #[arg(long, value_parser = parse_size)]
        size: Size,
        /// Shrink it; the data beyond the new size is lost
        #[arg(long)]
        shrink: bool,
    },
    /// Change a volume's space reservation
    Set {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
        /// A size (0: no reservation), or `full`
        #[arg(long, value_name = "SIZE|full", value_parser = Reserve::parse)]
        reserve: Reserve,
    },
    /// Set or remove a volume's own budget, a part of its tenant's (QoS)
    #[command(group(
        ArgGroup::new("what")
            .args(["base_iops", "base_bandwidth", "burst_iops", "burst_bandwidth", "no_base", "none"])
            .required(true)
            .multiple(true)
    ))]
    Budget {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
        #[command(flatten)]
        budget: BudgetArgs,
    },
    /// Take a snapshot of a volume, also while hosts write; of several volumes at one moment
    Snapshot {
        /// The snapshots' names, of volumes of one tenant
        #[arg(value_name = "TENANT/VOLUME@NAME", required = true, value_parser = SnapshotName::parse, add = names::new_snapshots())]
        snapshots: Vec<SnapshotName>,
    },
    /// List snapshots
    Snapshots {
        /// Only this tenant's, or this volume's
        #[arg(value_name = "TENANT[/VOLUME]", value_parser = SnapshotsOf::parse, add = names::tenants())]
        of: Option<SnapshotsOf>,
    },
    /// Make a volume with a snapshot's content; it uses no space until it is written
    Clone {
        #[arg(value_name = "TENANT/VOLUME@NAME", value_parser = SnapshotName::parse, add = names::snapshots())]
        snapshot: SnapshotName,
        /// The new volume, of any tenant
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::new_volumes())]
        volume: VolumeName,
        /// Reserve this much space: a size, or `full`
        #[arg(long, value_name = "SIZE|full", value_parser = Reserve::parse)]
        reserve: Option<Reserve>,
        /// The clone's image, of a snapshot in Ceph [default: TENANT.VOLUME beside the snapshot's image]
        #[arg(long, value_name = "CLUSTER/POOL[/NAMESPACE]/IMAGE", value_parser = names::image)]
        rbd: Option<ImagePath>,
    },
    /// Give a volume the content of one of its snapshots; later snapshots stay. Refused while hosts
    /// or VMs are connected
    Rollback {
        #[arg(value_name = "TENANT/VOLUME@NAME", value_parser = SnapshotName::parse, add = names::snapshots())]
        snapshot: SnapshotName,
        /// Do it even if hosts or VMs are connected; the content changes while they use it
        #[arg(long)]
        while_connected: bool,
    },
    /// Delete a volume or a snapshot that is not exported; a volume's snapshots stay. Of a volume in Ceph,
    /// the image stays
    Delete {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes_and_snapshots())]
        volume: VolumeName,
        /// Remove the image in Ceph too (of a snapshot: Ceph's snapshot)
        #[arg(long)]
        with_image: bool,
    },
    /// Copy a raw image into an empty volume of at least its size, within the tenant's budget
    Import {
        /// The image: a file, a block device, or `-` for standard input (until it ends)
        file: PathBuf,
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
        /// Replace the volume's content
        #[arg(long)]
        force: bool,
        /// Import the image's bytes unchanged, even if they look like another format or are made
        /// for another block size
        #[arg(long)]
        raw: bool,
    },
    /// Copy a volume or a snapshot into a new raw image, sparse where the volume is zero, within the tenant's
    /// budget
    Export {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes_and_snapshots())]
        volume: VolumeName,
        /// The image: a new file, or `-` for standard output (without holes). With `-`, the result
        /// goes to standard error, also with --json
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Serve a volume to hosts over NVMe/TCP, or to a VM as a disk
    Create(ExportCreateArgs),
    /// List the exports
    List,
    /// Show an export and how to attach it; use TENANT/VOLUME@ID if a volume has several
    Show {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports())]
        volume: VolumeName,
    },
    /// Change which hosts may connect; refused while a host that would lose access is connected
    #[command(group(
        ArgGroup::new("changes")
            .args(["add_hosts", "remove_hosts", "any_host", "listed_hosts"])
            .required(true)
            .multiple(true)
    ))]
    Set(ExportSetArgs),
    /// Serve an export again that was quarantined because its commands killed engines
    Resume {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports())]
        volume: VolumeName,
    },
    /// Delete an export; refused while hosts or a VM are connected
    Delete {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports())]
        volume: VolumeName,
        /// Delete it even if hosts or a VM are connected; they lose the disk
        #[arg(long)]
        disconnect_hosts: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ExportCreateArgs {
    /// The volume, or a snapshot, which can only be read
    #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes_and_snapshots())]
    pub(crate) volume: VolumeName,
    /// A host that may connect (its NQN, on Linux in /etc/nvme/hostnqn); may be repeated
    #[arg(long = "host", value_name = "NQN", conflicts_with_all = ["nvme_pcie", "vhost_user"])]
    pub(crate) hosts: Vec<String>,
    /// Let every host connect
    #[arg(long, conflicts_with_all = ["nvme_pcie", "vhost_user"])]
    pub(crate) any_host: bool,
    /// Serve a VM, as an NVMe disk (vfio-user: QEMU 10.1 or newer)
    #[arg(long, conflicts_with = "vhost_user")]
    pub(crate) nvme_pcie: bool,
    /// Poll the doorbells in shared memory: faster for a busy VM, but a core never sleeps. Drivers
    /// that need mapped doorbells (such as SPDK's) require it
    #[arg(long, requires = "nvme_pcie")]
    pub(crate) mapped_doorbells: bool,
    /// Serve a VM, as a virtio disk (vhost-user-blk)
    #[arg(long)]
    pub(crate) vhost_user: bool,
    /// The number of request queues of the virtio disk [default: 1]
    #[arg(long, value_name = "N", requires = "vhost_user", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) queues: Option<u16>,
    /// Declare that the VM has no balloon and keeps all of its memory, so that the kernel may pin
    /// it. Large transfers then cost half as much
    #[arg(long)]
    pub(crate) pinned_memory: bool,
    /// The path of the VM's Unix socket [default: in the daemon's runtime folder]
    #[arg(long, value_name = "PATH")]
    pub(crate) vm_socket: Option<PathBuf>,
    /// The owner of the VM's socket, e.g. libvirt-qemu:kvm
    #[arg(long, value_name = "USER[:GROUP]")]
    pub(crate) owner: Option<String>,
    /// Allow several exports of the volume; each of them needs this option
    #[arg(long)]
    pub(crate) shared: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExportSetArgs {
    #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports())]
    pub(crate) volume: VolumeName,
    /// Let this host connect; may be repeated
    #[arg(long = "add-host", value_name = "NQN")]
    pub(crate) add_hosts: Vec<String>,
    /// Remove this host; may be repeated
    #[arg(long = "remove-host", value_name = "NQN")]
    pub(crate) remove_hosts: Vec<String>,
    /// Let every host connect, listed or not
    #[arg(long)]
    pub(crate) any_host: bool,
    /// Let only listed hosts connect; reverses `--any-host`
    #[arg(long, conflicts_with = "any_host")]
    pub(crate) listed_hosts: bool,
    /// Change it even if hosts that lose access are connected; they lose the disk
    #[arg(long)]
    pub(crate) disconnect_hosts: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PortCommand {
    /// List the ports
    List,
    /// Change how hosts with several paths should use the paths through this port
    Set {
        /// Its address, e.g. 127.0.0.1:4420
        address: SocketAddr,
        /// The state of its paths
        #[arg(value_enum)]
        ana: AnaArg,
        /// Make even the last accessible port inaccessible; hosts then wait for an accessible one
        #[arg(long)]
        let_hosts_wait: bool,
    },
}

/// The state of a port's paths (NVMe's asymmetric namespace access).
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum AnaArg {
    /// Normal
    Optimized,
    /// Used when no better path exists
    NonOptimized,
    /// Not used, for maintenance
    Inaccessible,
}

impl From<AnaArg> for AnaState {
    fn from(state: AnaArg) -> Self {
        match state {
            AnaArg::Optimized => Self::Optimized,
            AnaArg::NonOptimized => Self::NonOptimized,
            AnaArg::Inaccessible => Self::Inaccessible,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Keep printing new events until interrupted; with `--json`, one object per line
    #[arg(long)]
    pub(crate) follow: bool,
    /// Only events after this number
    #[arg(long, value_name = "N")]
    pub(crate) after: Option<u64>,
    /// Only the events of the last TIME, e.g. 10m, 2h or 1d
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub(crate) since: Option<u32>,
    /// Only changes through the API: user, object, before and after. They survive a restart of the
    /// daemon
    #[arg(long)]
    pub(crate) audit: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopOrder {
    /// Commands per second
    Iops,
    /// Bytes per second
    Bytes,
    /// The 99th percentile of the latency
    P99,
    /// Commands in flight
    #[value(alias = "queue")]
    InFlight,
    /// Commands per second that are throttled
    Throttled,
    /// The name, in alphabetical order
    Name,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Seconds between updates
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) interval: u32,
    /// The sort order; on a terminal the keys i, b, p, u, t and n change it
    #[arg(long, value_enum, default_value_t = TopOrder::Iops)]
    pub(crate) sort: TopOrder,
    /// Print one interval's statistics and exit; `--json` implies it
    #[arg(long)]
    pub(crate) once: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definition_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn sizes_and_names() {
        let cli = Cli::try_parse_from([
            "forebay",
            "volume",
            "create",
            "acme/disk",
            "--size",
            "1G",
            "--json",
        ])
        .unwrap();
        assert!(cli.json);
        let Command::Volume(VolumeCommand::Create {
            volume,
            size,
            block_size,
            reserve,
            rbd,
        }) = cli.command
        else {
            panic!("another command");
        };
        assert_eq!(volume.to_string(), "acme/disk");
        let size_bytes = size.map(|size| size.bytes);
        assert_eq!(
            (size_bytes, block_size, reserve, rbd),
            (Some(1 << 30), None, None, None)
        );
        assert_eq!(Reserve::parse("full").unwrap().of(7, 512), 7);
        assert_eq!(Reserve::parse("1K").unwrap().of(7, 4096), 1024);
        assert_eq!(Reserve::parse("1MB").unwrap().of(7, 4096), 1_003_520);
        assert_eq!((parse_block("4K"), parse_block("512")), (Ok(4096), Ok(512)));
        parse_block("16E").unwrap_err();
        parse_block("8G").unwrap_err();
        for wrong in [
            &["forebay", "volume", "create", "disk", "--size", "1G"][..],
            &["forebay", "volume", "create", "a/b/c", "--size", "1G"],
            &["forebay", "volume", "create", "a/", "--size", "1G"],
            &["forebay", "volume", "create", "a/b", "--size", "1X"],
            &["forebay", "volume", "create", "a/b"],
            &["forebay", "volume", "create", "a/b", "--rbd", "rbd/db"],
            &[
                "forebay",
                "volume",
                "create",
                "a/b",
                "--rbd",
                "ceph/rbd/db@s",
            ],
            &[
                "forebay",
                "volume",
                "create",
                "a/b",
                "--rbd",
                "ceph/rbd/db",
                "--reserve",
                "full",
            ],
            &["forebay", "volume", "set", "a/b", "--reserve", "most"],
            &["forebay", "volume", "set", "a/b"],
            &["forebay", "volume", "snapshot"],
            &["forebay", "volume", "snapshot", "a/b"],
            &["forebay", "volume", "clone", "a/b", "a/c"],
            &["forebay", "volume", "rollback", "a/b"],
            &["forebay", "pool", "create"],
            &["forebay", "pool", "set"],
            &["forebay", "pool", "set", "--placement", "mirror"],
            &["forebay", "export", "set", "a/b"],
            &[
                "forebay",
                "export",
                "set",
                "a/b",
                "--any-host",
                "--listed-hosts",
            ],
            &["forebay", "top", "--interval", "0"],
        ] {
            assert_eq!(
                Cli::try_parse_from(wrong).unwrap_err().exit_code(),
                2,
                "{wrong:?}"
            );
        }
    }
}
