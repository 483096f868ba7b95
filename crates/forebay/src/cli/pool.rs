//! Options of `forebay pool` and `forebay device`; their work is in `command::pool`.

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use forebay_control::model::Placement;
use forebay_device::size::{Size, parse_bytes, parse_size};

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Create the pool
    Create(PoolCreateArgs),
    /// Open the pool after a repair, or reattach missing devices
    Open {
        /// The new location of a moved device; the others are expected at their old locations
        #[arg(long = "device", value_name = "SPEC")]
        devices: Vec<String>,
        /// Accept these devices as they are. A device truncated in use reads as zeros beyond its
        /// end. On an older copy, extents without a volume are zero-filled before their next use
        #[arg(long, requires = "devices")]
        force: bool,
        /// Take over another node's pool; refused while that node's heartbeat continues. Takes 16 s
        #[arg(long)]
        take_over: bool,
    },
    /// Convert the labels of an older pool to the current format; older versions then can't open
    /// it
    Upgrade,
    /// Show the pool
    Show,
    /// Change the pool's settings
    #[command(group(
        ArgGroup::new("changes")
            .args(["placement", "warn_percent", "critical_percent"])
            .required(true)
            .multiple(true)
    ))]
    Set(SettingsArgs),
    /// Check maps and extents while the pool is in use; exits with 1 if it finds problems
    Check {
        /// Free leaked extents, and rewrite overwritten labels
        #[arg(long)]
        repair: bool,
    },
    /// Destroy the pool and wipe its labels
    Destroy {
        /// The pool's name or UUID
        #[arg(value_name = "NAME|UUID")]
        name: String,
        /// Destroy its volumes too; their data is lost
        #[arg(long)]
        delete_volumes: bool,
        /// Destroy it even if hosts or VMs are connected; they lose their disks
        #[arg(long)]
        disconnect_hosts: bool,
        /// Forget a pool that cannot be opened; its devices stay unchanged
        #[arg(long, conflicts_with = "delete_volumes")]
        forget: bool,
    },
}

/// The device for a volume's new extents.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum PlacementArg {
    /// All devices in turn
    Stripe,
    /// The first device with space
    Fill,
}

impl From<PlacementArg> for Placement {
    fn from(placement: PlacementArg) -> Self {
        match placement {
            PlacementArg::Stripe => Self::Stripe,
            PlacementArg::Fill => Self::Fill,
        }
    }
}

#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SettingsArgs {
    /// How to choose among several devices for a volume's new extents
    #[arg(long, value_enum)]
    pub(crate) placement: Option<PlacementArg>,
    /// Warn when this percentage of the space is used
    #[arg(long, value_name = "N")]
    pub(crate) warn_percent: Option<u8>,
    /// Warn urgently when this percentage of the space is used
    #[arg(long, value_name = "N")]
    pub(crate) critical_percent: Option<u8>,
}

#[derive(Debug, Args)]
pub(crate) struct PoolCreateArgs {
    /// A device: file:/path, /path, ram:/path?size=1G or null:/path?size=64G
    #[arg(long = "device", value_name = "SPEC", required = true)]
    pub(crate) devices: Vec<String>,
    /// The pool's name
    #[arg(long, default_value = "pool")]
    pub(crate) name: String,
    /// Use devices that hold other data, which is lost
    #[arg(long)]
    pub(crate) force: bool,
    /// The pool's extent size: 64K to 4M
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) extent_size: Option<u64>,
    /// Create missing files as sparse files of --size each
    #[arg(long)]
    pub(crate) create: bool,
    /// The size of created files, and of ram and null devices without a size
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) size: Option<Size>,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeviceCommand {
    /// List the devices
    List,
    /// Show a device, and the volumes with extents on it
    Show {
        /// The device's index in the pool, as shown by `device list`
        index: u8,
    },
    /// Add a device to the pool while it is in use
    Add {
        /// The device: file:/path, /path, ram:/path?size=1G or null:/path?size=64G
        spec: String,
        /// Use it even if it holds other data, which is lost
        #[arg(long)]
        force: bool,
        /// Create a missing file as a sparse file of --size
        #[arg(long)]
        create: bool,
        /// The size of a created file, or of a ram or null device without a size
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: Option<Size>,
    },
}
