//! `forebay pool` and `forebay device`: commands and options.
//!
//! Not here: what they do (`command::pool`).

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use forebay_control::model::Placement;
use forebay_device::size::{Size, parse_bytes, parse_size};

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Make the pool of devices
    Create(PoolCreateArgs),
    /// Open the pool, or take missing devices back, after what was wrong is repaired
    Open {
        /// Where a device that moved is now; others are looked for where they were
        #[arg(long = "device", value_name = "SPEC")]
        devices: Vec<String>,
        /// Take these devices as they are: cut short while in use (what was cut off reads as zeros), or an older copy
        /// (what no volume maps there is zeroed before its next use)
        #[arg(long, requires = "devices")]
        force: bool,
        /// Make another machine's pool this one's; refused while the other one's heartbeat goes on. Takes 16 s
        #[arg(long)]
        take_over: bool,
    },
    /// Give the labels of a pool that an older version made the current format; older versions refuse it from then on
    Upgrade,
    /// Show the pool
    Show,
    /// Change what is set for the pool
    #[command(group(
        ArgGroup::new("changes")
            .args(["placement", "warn_percent", "critical_percent"])
            .required(true)
            .multiple(true)
    ))]
    Set(SettingsArgs),
    /// Check the maps against the extents, while the pool is used; exit code 1 if something is wrong
    Check {
        /// Give back extents that have leaked, and write labels again that something lies over
        #[arg(long)]
        repair: bool,
    },
    /// End the pool and wipe its labels
    Destroy {
        /// The pool's name or UUID
        #[arg(value_name = "NAME|UUID")]
        name: String,
        /// Destroy its volumes too; their data is lost
        #[arg(long)]
        delete_volumes: bool,
        /// Go on even if hosts or virtual machines are connected: they lose their disks
        #[arg(long)]
        disconnect_hosts: bool,
        /// Give up a pool that can't be opened: nothing of it is left here, and its devices stay as they are
        #[arg(long, conflicts_with = "delete_volumes")]
        forget: bool,
    },
}

/// Where a volume's extents come from when there are several devices.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum PlacementArg {
    /// From all devices in turn
    Stripe,
    /// From the first device that has space
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

/// What can be set for a pool.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SettingsArgs {
    /// Where a volume's extents come from when there are several devices
    #[arg(long, value_enum)]
    pub(crate) placement: Option<PlacementArg>,
    /// Warn from this much used on, in percent
    #[arg(long, value_name = "N")]
    pub(crate) warn_percent: Option<u8>,
    /// Warn louder from this much used on, in percent
    #[arg(long, value_name = "N")]
    pub(crate) critical_percent: Option<u8>,
}

#[derive(Debug, Args)]
pub(crate) struct PoolCreateArgs {
    /// A device: file:/path, /path, ram:/path?size=1G or null:/path?size=64G
    #[arg(long = "device", value_name = "SPEC", required = true)]
    pub(crate) devices: Vec<String>,
    /// Its name
    #[arg(long, default_value = "pool")]
    pub(crate) name: String,
    /// Use devices that hold something else; what they hold is lost
    #[arg(long)]
    pub(crate) force: bool,
    /// What the pool allocates in: 64K to 4M
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) extent_size: Option<u64>,
    /// Make files that are missing, sparse, of --size each
    #[arg(long)]
    pub(crate) create: bool,
    /// The size of files that are made, and of ram and null devices that name none
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) size: Option<Size>,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeviceCommand {
    /// List the devices
    List,
    /// Show a device, and which volumes have something there
    Show {
        /// Its place in the pool, as `device list` shows it
        index: u8,
    },
    /// Make a device part of the pool, while it is used
    Add {
        /// The device: file:/path, /path, ram:/path?size=1G or null:/path?size=64G
        spec: String,
        /// Use it even if it holds something else; what it holds is lost
        #[arg(long)]
        force: bool,
        /// Make a file that is missing, sparse, of --size
        #[arg(long)]
        create: bool,
        /// The size of a file that is made, or of a ram or null device that names none
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: Option<Size>,
    },
}
