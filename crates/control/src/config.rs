//! The daemon's resolved configuration: every path absolute, every default filled in. The command
//! line reads `forebay.toml` and creates it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use forebay_qos::budget::Rate;

use crate::model::ExportFrontend;

/// The configuration of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Durable files: the pool's devices, reports, logs (in `log/`). Exists.
    pub state_dir: PathBuf,
    /// Sockets and locks. Exists.
    pub run_dir: PathBuf,
    /// The API's socket, in `run_dir` by default.
    pub api_socket: PathBuf,
    /// The node's name in NQNs of new exports; the pool's UUID by default.
    pub node_name: Option<String>,
    /// Addresses, until the configuration is read again.
    pub listen: Listen,
    /// The engine to start.
    pub engine: EngineConfig,
    /// A pool to create in a sparse file if there is none.
    pub embedded_pool: Option<EmbeddedPool>,
    /// Further places where the pool's devices may be.
    pub pool_devices: Vec<String>,
    /// Keep the engine running when a signal ends the daemon, for the next daemon.
    pub keep_engine: bool,
    /// The version to report.
    pub version: String,
    /// The endpoint for management controllers, if there is one.
    pub out_of_band: Option<OutOfBand>,
    /// Signed images of the program.
    pub firmware: FirmwareConfig,
    /// Ceph clusters by name, until the configuration is read again.
    pub clusters: BTreeMap<String, ClusterConfig>,
}

/// A Ceph cluster. Keys are named by file only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Ceph's configuration file.
    pub config: PathBuf,
    /// The user without `client.`, as in `admin`.
    pub user: String,
    /// The file with the user's key; without one, as Ceph's configuration says.
    pub keyring: Option<PathBuf>,
    /// Ceph's own name of the cluster: `ceph` unless its administrator chose another.
    pub cluster: String,
    /// Which volumes of it share a client in the engine.
    pub client: ClientFor,
    /// The capacity that it has for this node. Without one, no tenant's base is guaranteed there.
    pub capacity: Option<Rate>,
}

/// The volumes that one RADOS client serves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ClientFor {
    /// All of a tenant's.
    #[default]
    Tenant,
    /// One.
    Volume,
}

/// Which firmware images are accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FirmwareConfig {
    /// Public keys, in PEM. One of them must have signed an image.
    pub keys: Vec<PathBuf>,
    /// The version of slot 1's program, if known.
    pub installed_version: Option<String>,
}

/// The endpoint for management controllers: NVMe-MI over MCTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfBand {
    /// The line.
    pub serial: Serial,
    /// The changes that it may make.
    pub allow: BTreeSet<Right>,
    /// The tenant of the volumes that it creates; it is created with the first one.
    pub tenant: String,
    /// The functions, by number: 1 to [`MAX_FUNCTIONS`].
    pub functions: Vec<Function>,
}

/// The most functions, and the highest number of one.
pub const MAX_FUNCTIONS: u16 = 128;

/// A serial line (DSP0253).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Serial {
    /// A Unix socket to listen at. Each connection is a line.
    Socket(PathBuf),
    /// A terminal device, at this speed.
    Terminal {
        /// For example `/dev/ttyS1`.
        path: PathBuf,
        /// Bits per second.
        baud: u32,
    },
    /// A new pseudoterminal, with a symbolic link to its device.
    Pseudoterminal(PathBuf),
}

/// A kind of change out of band.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Right {
    /// Namespaces: create, delete, attach, detach.
    Namespaces,
    /// The budgets of volumes.
    Budgets,
    /// Devices of the pool: add.
    Devices,
    /// The erasure of a volume.
    Format,
    /// Settings of the endpoint and of its controllers.
    Configuration,
    /// Firmware: download and commit.
    Firmware,
}

impl Right {
    /// All, with their names in the configuration.
    pub const ALL: [(Self, &'static str); 6] = [
        (Self::Namespaces, "namespaces"),
        (Self::Budgets, "budgets"),
        (Self::Devices, "devices"),
        (Self::Format, "format"),
        (Self::Configuration, "configuration"),
        (Self::Firmware, "firmware"),
    ];
}

/// A secondary controller: the export of the namespace that is attached to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// The controller's CNTLID.
    pub number: u16,
    /// The protocol.
    pub frontend: ExportFrontend,
    /// For NVMe/TCP: NQNs of hosts that may connect.
    pub hosts: Vec<String>,
    /// For NVMe/TCP: whether every host may connect.
    pub any_host: bool,
    /// For a VM: the path of the socket; by default in the daemon's runtime folder.
    pub socket: Option<String>,
}

/// Addresses for hosts and metrics, which may change while the daemon runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listen {
    /// Addresses for NVMe/TCP.
    pub nvme_tcp: Vec<SocketAddr>,
    /// The address of `GET /metrics`, if any.
    pub metrics: Option<SocketAddr>,
}

/// The settings that may change while the daemon runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Addresses.
    pub listen: Listen,
    /// Ceph clusters by name.
    pub clusters: BTreeMap<String, ClusterConfig>,
}

/// Operations of the program that runs the daemon.
pub trait Program {
    /// Reopens the log, reads the configuration again and sets the log's level. Returns the other
    /// settings that may change.
    ///
    /// # Errors
    /// The configuration has a mistake; the previous one still applies.
    fn reload(&self) -> Result<Reloaded, String>;

    /// Opens the log if its file is gone, and writes messages that failed before.
    ///
    /// # Errors
    /// Why it can't be written, in a sentence.
    fn open_log(&self) -> Result<(), String>;
}

impl Listen {
    /// Another configured address that conflicts with this one.
    #[must_use]
    pub fn in_the_way_of(&self, address: SocketAddr) -> Option<SocketAddr> {
        let all = self.nvme_tcp.iter().chain(&self.metrics).copied();
        let mut there = all.filter(|other| overlap(*other, address));
        match there.next()? {
            // The first match is the address itself.
            first if first == address => there.next(),
            first => Some(first),
        }
    }

    /// Warnings about listeners that other machines can reach, and about listeners in `held` (now
    /// open) that are no longer configured.
    #[must_use]
    pub fn exposures(&self, held: &[SocketAddr]) -> Vec<String> {
        let beyond = |address: &&SocketAddr| !address.ip().to_canonical().is_loopback();
        let is_configured = |held: &SocketAddr| {
            self.nvme_tcp
                .iter()
                .any(|address| held == address || address.port() == 0 && held.ip() == address.ip())
        };
        let left: Vec<SocketAddr> = held.iter().copied().filter(|h| !is_configured(h)).collect();
        let old = left.iter().map(|address| {
            format!(
                "the listener {address} is no longer configured, but the engine still serves it: to close it, run \
                `forebay shutdown` and start the daemon again"
            )
        });
        let hosts = self
            .nvme_tcp
            .iter()
            .chain(&left)
            .filter(beyond)
            .map(|address| {
                format!(
                    "the listener {address} is reachable beyond loopback, and hosts are not authenticated: anyone who \
                    can reach it can use any host's NQN and read the traffic"
                )
            });
        let metrics = self.metrics.iter().filter(beyond).map(|address| {
            format!(
                "the metrics at {address} are reachable beyond loopback: anyone who can reach them reads the names and \
                statistics of all tenants"
            )
        });
        old.chain(hosts).chain(metrics).collect()
    }
}

/// Whether only one of two addresses can be bound.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let (a, b) = (one.ip().to_canonical(), other.ip().to_canonical());
    let covers = |a: IpAddr, b: IpAddr| a.is_unspecified() && (a.is_ipv6() || b.is_ipv4());
    one.port() != 0 && one.port() == other.port() && (a == b || covers(a, b) || covers(b, a))
}

/// How to start an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// The program; its first argument is `engine`.
    pub program: PathBuf,
    /// Number of reactors, at least 1.
    pub reactors: u16,
    /// CPUs to pin reactors to, in order; empty: not pinned.
    pub cpus: Vec<u16>,
    /// An engine with a reactor without a turn for this long is replaced; zero: never.
    pub stuck_after: Duration,
}

/// A pool in a sparse file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddedPool {
    /// The file.
    pub path: PathBuf,
    /// Its size when created.
    pub size_bytes: u64,
}

#[cfg(test)]
impl Program for () {
    fn reload(&self) -> Result<Reloaded, String> {
        Ok(Reloaded::default())
    }
    fn open_log(&self) -> Result<(), String> {
        Ok(())
    }
}

#[cfg(test)]
impl DaemonConfig {
    pub(crate) fn empty() -> Self {
        Self {
            keep_engine: false,
            state_dir: PathBuf::new(),
            run_dir: PathBuf::new(),
            api_socket: PathBuf::new(),
            node_name: None,
            listen: Listen::default(),
            engine: EngineConfig {
                program: PathBuf::new(),
                reactors: 1,
                cpus: Vec::new(),
                stuck_after: Duration::ZERO,
            },
            embedded_pool: None,
            pool_devices: Vec::new(),
            version: String::new(),
            out_of_band: None,
            firmware: FirmwareConfig::default(),
            clusters: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_each_others_way_are_known() {
        let parsed = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (one, other, metrics) in [
            ("0.0.0.0:1", "127.0.0.1:1", "127.0.0.1:2"),
            ("[::]:1", "10.0.0.1:1", "127.0.0.1:2"),
            ("127.0.0.1:2", "127.0.0.1:1", "127.0.0.1:2"),
        ] {
            let listen = Listen {
                nvme_tcp: [one, other].map(parsed).to_vec(),
                metrics: Some(parsed(metrics)),
            };
            let rest = if one == metrics { metrics } else { other };
            assert_eq!(listen.in_the_way_of(parsed(one)), Some(parsed(rest)));
            assert!(listen.in_the_way_of(parsed(rest)).is_some(), "{one} {rest}");
        }
        let listen = Listen {
            nvme_tcp: ["0.0.0.0:1", "[::1]:1", "127.0.0.1:0", "10.0.0.1:0"]
                .map(parsed)
                .to_vec(),
            metrics: Some(parsed("127.0.0.1:2")),
        };
        for address in listen.nvme_tcp.iter().chain(&listen.metrics) {
            assert_eq!(listen.in_the_way_of(*address), None, "{address}");
        }
    }

    #[test]
    fn listeners_beyond_loopback_are_reported() {
        let mut config = Listen::default();
        for safe in [
            "127.0.0.1:4420",
            "127.9.9.9:1",
            "[::1]:4420",
            "[::ffff:127.0.0.1]:1",
        ] {
            config.nvme_tcp = vec![safe.parse().unwrap()];
            config.metrics = safe.parse().ok();
            assert_eq!(config.exposures(&[]), Vec::<String>::new(), "{safe}");
        }
        for open in ["0.0.0.0:4420", "[::]:4420", "10.0.0.1:1", "[fe80::1]:1"] {
            config.nvme_tcp = vec![open.parse().unwrap()];
            config.metrics = open.parse().ok();
            let reported = config.exposures(&[]);
            assert_eq!(reported.len(), 2, "{open}");
            assert!(
                reported.iter().all(|reported| reported.contains(open)),
                "{reported:?}"
            );
        }
        config.nvme_tcp = vec!["127.0.0.1:0".parse().unwrap()];
        config.metrics = None;
        let held = ["127.0.0.1:4420", "10.0.0.1:4420"].map(|held| held.parse().unwrap());
        assert_eq!(config.exposures(&held[..1]), Vec::<String>::new());
        let reported = config.exposures(&held);
        assert_eq!(reported.len(), 2, "{reported:?}");
        assert!(
            reported[0].contains("no longer configured")
                && reported[1].contains("not authenticated")
        );
    }
}
