//! `forebay mi`: its arguments.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use forebay_device::size::parse_capacity;

use super::budgets::Amount;

#[derive(Debug, Args)]
pub(crate) struct MiArgs {
    /// The line to the node: the Unix socket of its out-of-band endpoint, or a terminal
    #[arg(
        long,
        value_name = "PATH",
        global = true,
        default_value = "/run/forebay/mctp.sock"
    )]
    pub(crate) line: PathBuf,
    #[command(subcommand)]
    pub(crate) command: MiCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MiCommand {
    /// Show the endpoint, the node's health and its controllers
    Show,
    /// Give the endpoint another EID
    SetEid {
        /// The EID
        #[arg(value_parser = clap::value_parser!(u8).range(8..=254))]
        eid: u8,
    },
    /// List the namespaces: the node's volumes
    Namespaces,
    /// Show the devices of the pool, with the health of the drives below
    Devices,
    /// Show the statistics of a namespace
    Statistics {
        /// The namespace
        nsid: u32,
    },
    /// Show the budget of a namespace, or set it
    Budget(MiBudgetArgs),
    /// Create a namespace: a volume
    Create {
        /// Its size, e.g. 10G
        #[arg(long, value_parser = parse_capacity)]
        size: u64,
    },
    /// Delete a namespace with its data
    Delete {
        /// The namespace
        nsid: u32,
    },
    /// Attach a namespace to a controller, which exports it
    Attach {
        /// The namespace
        nsid: u32,
        /// The controller: a function's number
        controller: u16,
    },
    /// Detach a namespace from a controller
    Detach {
        /// The namespace
        nsid: u32,
        /// The controller: a function's number
        controller: u16,
    },
    /// Erase the data of a namespace
    Format {
        /// The namespace
        nsid: u32,
    },
    /// Add a device to the pool
    AddDevice {
        /// The device on the node, e.g. /dev/nvme1n1
        spec: String,
    },
    /// Send a signed image of the program, and replace the engine by it; hosts and VMs keep their
    /// connections
    Firmware {
        /// The image
        image: PathBuf,
        /// Leave the running engine; the next one starts from the image
        #[arg(long)]
        at_next_start: bool,
    },
}

/// Values that are not named are removed.
#[derive(Debug, Args)]
pub(crate) struct MiBudgetArgs {
    /// The namespace
    pub(crate) nsid: u32,
    /// Base operations per second
    #[arg(long, value_name = "N", value_parser = Amount::iops)]
    pub(crate) base_iops: Option<Amount>,
    /// Base bytes per second, e.g. 100M
    #[arg(long, value_name = "SIZE", value_parser = Amount::bandwidth)]
    pub(crate) base_bandwidth: Option<Amount>,
    /// Maximum operations per second
    #[arg(long, value_name = "N", value_parser = Amount::iops)]
    pub(crate) burst_iops: Option<Amount>,
    /// Maximum bytes per second, e.g. 300M
    #[arg(long, value_name = "SIZE", value_parser = Amount::bandwidth)]
    pub(crate) burst_bandwidth: Option<Amount>,
    /// Remove the budget
    #[arg(long, conflicts_with_all = ["base_iops", "base_bandwidth", "burst_iops", "burst_bandwidth"])]
    pub(crate) none: bool,
}
