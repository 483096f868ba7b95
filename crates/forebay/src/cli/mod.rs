//! The command line.
//!
//! Purpose: every command and option, and from there to the module that does it.
//! Design: clap's derive; the doc comments are the help texts, and `examples` gives each command its
//! example. Help, manual pages, completion and the book's reference are all made of [`definition`].
//! Sizes are read by the same parser as in device specifications and the configuration.
//! Not here: what the commands do.

mod budgets;
mod examples;
#[cfg(test)]
mod limits_page;
pub(crate) mod line;
#[cfg(test)]
mod mentioned;
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
use forebay_device::size::{Size, parse_size};

use self::budgets::parse_seconds;
pub(crate) use self::budgets::{Amount, BudgetArgs, SchedulingArgs, SchedulingCommand};
use self::names::VolumeName;
pub(crate) use self::pool::{DeviceCommand, PoolCommand, PoolCreateArgs};
use crate::bench::BenchCommand;
use crate::calibrate::CalibrateArgs;
use crate::engine::EngineArgs;
use crate::serve::ServeArgs;

/// The whole command line, with an example at each command.
pub(crate) fn definition() -> clap::Command {
    examples::add(Cli::command())
}

/// Forebay: a storage hypervisor. Cuts physical storage into disks for tenants.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// The daemon's API socket [default: $FOREBAY_SOCKET, else what ./forebay.toml says, else
    /// ./var/run/api.sock]
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Don't ask for confirmation, which is only asked for on a terminal
    #[arg(long, global = true)]
    pub(crate) yes: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon
    Serve(ServeArgs),
    /// The pool: devices whose extents hold volumes
    #[command(subcommand)]
    Pool(PoolCommand),
    /// The pool's devices
    #[command(subcommand)]
    Device(DeviceCommand),
    /// Tenants: who is served
    #[command(subcommand)]
    Tenant(TenantCommand),
    /// How I/O is admitted where tenants have budgets: capacity, what is promised
    #[command(subcommand)]
    Scheduling(SchedulingCommand),
    /// Ports: the addresses at which hosts connect
    #[command(subcommand)]
    Port(PortCommand),
    /// Volumes: logical disks
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Exports: volumes shown to hosts over NVMe/TCP, or to virtual machines
    #[command(subcommand)]
    Export(ExportCommand),
    /// Show counters of engine, pool and exports
    Stats,
    /// Show live what tenants and volumes do
    Top(TopArgs),
    /// Show what happened: deaths, take-overs, hosts, devices, space, quarantines
    Events(EventsArgs),
    /// Show how daemon and engine are doing
    Status {
        /// Exit with 0 if all is well, 1 if there are warnings, 2 if something is not served; what is configured so does not
        /// count
        #[arg(long)]
        check: bool,
    },
    /// Measured loads
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Measure what an I/O costs on this machine: volumes of its own are read and written; nobody else should be
    Calibrate(CalibrateArgs),
    /// Have an engine of the program as it is installed now go on where the running one is; hosts and virtual machines keep
    /// their connections
    Upgrade,
    /// End engine and daemon in good order; hosts wait until they are served again
    Shutdown,
    /// Print a script that completes commands and options in a shell
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages, one for each command
    Man {
        /// The folder to write them to
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Print the versions of what this program's processes leave to another's
    #[command(hide = true)]
    Formats,
    /// The data plane; the daemon starts it
    #[command(hide = true)]
    Engine(EngineArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum TenantCommand {
    /// Make a tenant
    Create {
        /// 1 to 63 characters of a-z, 0-9 and -
        name: String,
    },
    /// List the tenants
    List,
    /// Show one tenant
    Show {
        /// Its name
        #[arg(add = names::tenants())]
        name: String,
    },
    /// State what a tenant may use (its quality of service, QoS), or take that away; says whether its base can be
    /// guaranteed
    #[command(group(
        ArgGroup::new("what")
            .args(["base_iops", "base_bandwidth", "burst_iops", "burst_bandwidth", "no_base", "none", "credit", "metered"])
            .required(true)
            .multiple(true)
    ))]
    Budget {
        /// Its name
        #[arg(add = names::tenants())]
        name: String,
        #[command(flatten)]
        budget: BudgetArgs,
        /// Let it save this much unused base for bursts, and burst out of that only, e.g. 60s or 10m
        #[arg(long, value_name = "TIME", value_parser = parse_seconds, conflicts_with_all = ["metered", "none"])]
        credit: Option<u32>,
        /// Let it burst whenever others leave something, and count what is above the base [the default]
        #[arg(long, conflicts_with = "none")]
        metered: bool,
    },
    /// End a tenant that has no volumes
    Delete {
        /// Its name
        #[arg(add = names::tenants())]
        name: String,
    },
}

/// How much of a volume is reserved.
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
                .map_err(|error| format!("{error}; or say `full`")),
        }
    }

    /// In bytes, for a volume of this size that has such blocks.
    pub(crate) fn of(self, size_bytes: u64, block_bytes: u64) -> u64 {
        match self {
            Self::Size(size) => size.to_blocks(block_bytes),
            Self::Full => size_bytes,
        }
    }
}

/// The size of a block, which may have a unit. Whether a volume can have it is the daemon's to say.
fn parse_block(text: &str) -> Result<u32, String> {
    let size = parse_size(text).map_err(|error| error.to_string())?;
    u32::try_from(size.bytes)
        .map_err(|_| format!("`{text}` is too large: blocks have 512 or 4096 bytes"))
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Make a volume; it takes no space until it is written
    Create {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::new_volumes())]
        volume: VolumeName,
        /// Its size, e.g. 10G
        #[arg(long, value_parser = parse_size)]
        size: Size,
        /// The block size hosts see, 512 or 4096 [default: 4096]
        #[arg(long, value_name = "BYTES", value_parser = parse_block)]
        block_size: Option<u32>,
        /// Promise it this much space, whatever other volumes do: a size, or `full`
        #[arg(long, value_name = "SIZE|full", value_parser = Reserve::parse)]
        reserve: Option<Reserve>,
    },
    /// List volumes
    List {
        /// Of this tenant only
        #[arg(add = names::tenants())]
        tenant: Option<String>,
    },
    /// Show a volume
    Show {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
    },
    /// Grow a volume; connected hosts see it
    Resize {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
        /// Its new size, e.g. 20G
        #[arg(long, value_parser = parse_size)]
        size: Size,
    },
    /// Change how much space a volume is promised, whatever other volumes do
    Set {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
        /// A size (0: nothing is promised), or `full`
        #[arg(long, value_name = "SIZE|full", value_parser = Reserve::parse)]
        reserve: Reserve,
    },
    /// State what a volume may use of its tenant's budget (QoS), or take that away
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
    /// End a volume that is not exported
    Delete {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
    },
    /// Copy a raw image into an empty volume, as large as the image or larger; it keeps to the tenant's budget
    Import {
        /// The image: a file, a block device, or `-` for standard input, whose end is the image's
        file: PathBuf,
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
        /// Replace everything that the volume holds
        #[arg(long)]
        force: bool,
        /// Import the image's bytes as they are, even if they look like another format or are made for other blocks
        #[arg(long)]
        raw: bool,
    },
    /// Copy a volume into a new raw image, sparse where the volume is zero; it keeps to the tenant's budget
    Export {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
        volume: VolumeName,
        /// The image: a new file, or `-` for standard output, which has no holes; the result goes to standard error then, with --json too
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Show a volume to hosts over NVMe/TCP, or to a virtual machine as its disk
    Create(ExportCreateArgs),
    /// List the exports
    List,
    /// Show an export and how to attach it; TENANT/VOLUME@ID where a volume has several
    Show {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports())]
        volume: VolumeName,
    },
    /// Change who may connect; refused while hosts are connected that may no longer connect
    #[command(group(
        ArgGroup::new("changes")
            .args(["add_hosts", "remove_hosts", "any_host", "listed_hosts"])
            .required(true)
            .multiple(true)
    ))]
    Set(ExportSetArgs),
    /// Serve an export again that is quarantined because engines died of it
    Resume {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports())]
        volume: VolumeName,
    },
    /// End an export; refused while hosts or a virtual machine are connected
    Delete {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports())]
        volume: VolumeName,
        /// Go on even if hosts or a virtual machine are connected: they lose the disk
        #[arg(long)]
        disconnect_hosts: bool,
    },
}

/// An export to be made.
#[derive(Debug, Args)]
pub(crate) struct ExportCreateArgs {
    #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::volumes())]
    pub(crate) volume: VolumeName,
    /// A host that may connect (its NQN, on Linux in /etc/nvme/hostnqn); may be repeated
    #[arg(long = "host", value_name = "NQN", conflicts_with_all = ["nvme_pcie", "vhost_user"])]
    pub(crate) hosts: Vec<String>,
    /// Let every host connect
    #[arg(long, conflicts_with_all = ["nvme_pcie", "vhost_user"])]
    pub(crate) any_host: bool,
    /// For a virtual machine, as an NVMe disk of its own (vfio-user: QEMU 10.1 or newer)
    #[arg(long, conflicts_with = "vhost_user")]
    pub(crate) nvme_pcie: bool,
    /// Have the engine poll the doorbells in shared memory: faster for a machine that is always busy, and a core
    /// never sleeps; drivers that need the doorbells mapped (SPDK's) need it
    #[arg(long, requires = "nvme_pcie")]
    pub(crate) mapped_doorbells: bool,
    /// For a virtual machine, as a virtio disk (vhost-user-blk)
    #[arg(long)]
    pub(crate) vhost_user: bool,
    /// How many request queues the virtio disk has [default: 1]
    #[arg(long, value_name = "N", requires = "vhost_user", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) queues: Option<u16>,
    /// Say that the machine has no balloon and keeps all of its memory, so that the kernel may hold it: large transfers
    /// cost half as much
    #[arg(long)]
    pub(crate) pinned_memory: bool,
    /// Where the machine's Unix socket is made [default: beneath the daemon's runtime folder]
    #[arg(long, value_name = "PATH")]
    pub(crate) vm_socket: Option<PathBuf>,
    /// To whom the machine's socket is to belong, e.g. libvirt-qemu:kvm
    #[arg(long, value_name = "USER[:GROUP]")]
    pub(crate) owner: Option<String>,
    /// Let the volume have several exports; each of them must say so
    #[arg(long)]
    pub(crate) shared: bool,
}

/// Who may connect to an export from now on.
#[derive(Debug, Args)]
pub(crate) struct ExportSetArgs {
    #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse, add = names::exports())]
    pub(crate) volume: VolumeName,
    /// Let this host connect; may be repeated
    #[arg(long = "add-host", value_name = "NQN")]
    pub(crate) add_hosts: Vec<String>,
    /// Don't let this host connect any more; may be repeated
    #[arg(long = "remove-host", value_name = "NQN")]
    pub(crate) remove_hosts: Vec<String>,
    /// Let every host connect, listed or not
    #[arg(long)]
    pub(crate) any_host: bool,
    /// Let only the hosts connect that are listed: takes back `--any-host`
    #[arg(long, conflicts_with = "any_host")]
    pub(crate) listed_hosts: bool,
    /// Go on even if hosts are connected that may no longer connect: they lose the disk
    #[arg(long)]
    pub(crate) disconnect_hosts: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PortCommand {
    /// List the ports
    List,
    /// Change how hosts that have several paths should use those through this port
    Set {
        /// Its address, e.g. 127.0.0.1:4420
        address: SocketAddr,
        /// How to use it
        #[arg(value_enum)]
        ana: AnaArg,
        /// Make even the last accessible port inaccessible: hosts wait until one is accessible again
        #[arg(long)]
        let_hosts_wait: bool,
    },
}

/// How hosts should use a port (NVMe's asymmetric namespace access).
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum AnaArg {
    /// As any other
    Optimized,
    /// When there is no better one
    NonOptimized,
    /// Not at all, for maintenance of what lies on the way there
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
    /// Go on with what happens from now on, until interrupted; with `--json`, one object a line
    #[arg(long)]
    pub(crate) follow: bool,
    /// Only what came after the event of this number
    #[arg(long, value_name = "N")]
    pub(crate) after: Option<u64>,
    /// Only what happened in this time up to now, e.g. 10m, 2h or 1d
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub(crate) since: Option<u32>,
    /// Only what was changed through the API: who, what, before and after. Kept over restarts of the daemon
    #[arg(long)]
    pub(crate) audit: bool,
}

/// What `top` sorts by, largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopOrder {
    /// Commands a second
    Iops,
    /// Bytes a second
    Bytes,
    /// The time that 99 of 100 commands did not exceed
    P99,
    /// Commands in flight
    #[value(alias = "queue")]
    InFlight,
    /// Commands a second that wait because they are over budget
    Throttled,
    /// The name, smallest first
    Name,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Seconds from one look to the next
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) interval: u32,
    /// What to sort by; on a terminal the keys i, b, p, u, t and n change it
    #[arg(long, value_enum, default_value_t = TopOrder::Iops)]
    pub(crate) sort: TopOrder,
    /// Print one interval's figures and end; so does `--json`
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
        }) = cli.command
        else {
            panic!("another command");
        };
        assert_eq!(volume.to_string(), "acme/disk");
        assert_eq!((size.bytes, block_size, reserve), (1 << 30, None, None));
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
            &["forebay", "volume", "set", "a/b", "--reserve", "most"],
            &["forebay", "volume", "set", "a/b"],
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
