//! The command line.
//!
//! Purpose: every command and option, and from there to the module that does it.
//! Design: clap's derive; the doc comments are the help texts. Sizes are read by the same parser as
//! in device specifications and the configuration.
//! Not here: what the commands do.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use forebay_device::size::parse_bytes;

use crate::bench::BenchCommand;
use crate::engine::EngineArgs;
use crate::serve::ServeArgs;

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
    /// Volumes: logical disks
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Exports: volumes shown to hosts over NVMe/TCP
    #[command(subcommand)]
    Export(ExportCommand),
    /// Show counters of engine, pool and exports
    Stats,
    /// Show how daemon and engine are doing
    Status,
    /// Measured loads
    #[command(subcommand)]
    Bench(BenchCommand),
    /// The data plane; the daemon starts it
    #[command(hide = true)]
    Engine(EngineArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Make the pool of devices
    Create(PoolCreateArgs),
    /// Open the pool, or take missing devices back, after what was wrong is repaired
    Open {
        /// Where a device that moved is now; others are looked for where they were
        #[arg(long = "device", value_name = "SPEC")]
        devices: Vec<String>,
    },
    /// Show the pool
    Show,
    /// End the pool and wipe its labels
    Destroy {
        /// Destroy its volumes too
        #[arg(long)]
        force: bool,
    },
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
    /// Create device files that are missing, sparse, with this size
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) size: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeviceCommand {
    /// List the devices
    List,
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
    /// End a tenant that has no volumes
    Delete {
        /// Its name
        name: String,
    },
}

/// `TENANT/VOLUME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeName {
    pub(crate) tenant: String,
    pub(crate) volume: String,
}

impl VolumeName {
    fn parse(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((tenant, volume))
                if !tenant.is_empty() && !volume.is_empty() && !volume.contains('/') =>
            {
                Ok(Self {
                    tenant: tenant.to_owned(),
                    volume: volume.to_owned(),
                })
            }
            _ => Err("a volume is named TENANT/VOLUME".to_owned()),
        }
    }
}

impl std::fmt::Display for VolumeName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.tenant, self.volume)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Make a volume; it takes no space until it is written
    Create {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
        /// Its size, e.g. 10G
        #[arg(long, value_parser = parse_bytes)]
        size: u64,
        /// The block size hosts see, 512 or 4096 [default: 4096]
        #[arg(long, value_name = "BYTES")]
        block_size: Option<u32>,
    },
    /// List volumes
    List {
        /// Of this tenant only
        tenant: Option<String>,
    },
    /// Show a volume
    Show {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
    },
    /// Grow a volume; connected hosts see it
    Resize {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
        /// Its new size, e.g. 20G
        #[arg(long, value_parser = parse_bytes)]
        size: u64,
    },
    /// End a volume that is not exported
    Delete {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
    },
    /// Copy a raw image into a volume; it is as large as the image, or larger
    Import {
        /// The image: a file or block device
        file: PathBuf,
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
    },
    /// Copy a volume into a new raw image, sparse where the volume is zero
    Export {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
        /// The image
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Show a volume to hosts over NVMe/TCP
    Create {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
        /// A host that may connect (its NQN, on Linux in /etc/nvme/hostnqn); may be repeated
        #[arg(long = "host", value_name = "NQN")]
        hosts: Vec<String>,
        /// Let every host connect
        #[arg(long)]
        any_host: bool,
    },
    /// List the exports
    List,
    /// Show an export and how to attach it
    Show {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
    },
    /// End an export; its hosts are disconnected
    Delete {
        #[arg(value_name = "TENANT/VOLUME", value_parser = VolumeName::parse)]
        volume: VolumeName,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
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
        }) = cli.command
        else {
            panic!("another command");
        };
        assert_eq!(volume.to_string(), "acme/disk");
        assert_eq!((size, block_size), (1 << 30, None));
        for wrong in [
            &["forebay", "volume", "create", "disk", "--size", "1G"][..],
            &["forebay", "volume", "create", "a/b/c", "--size", "1G"],
            &["forebay", "volume", "create", "a/", "--size", "1G"],
            &["forebay", "volume", "create", "a/b", "--size", "1X"],
            &["forebay", "volume", "create", "a/b"],
            &["forebay", "pool", "create"],
        ] {
            assert_eq!(
                Cli::try_parse_from(wrong).unwrap_err().exit_code(),
                2,
                "{wrong:?}"
            );
        }
    }
}
