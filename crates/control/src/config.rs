//! What the daemon is told when it starts.
//!
//! Purpose: the resolved configuration: every path absolute, every default filled in.
//! Design: plain data. The command line reads `forebay.toml` and makes one of these.
//! Not here: the file format and its errors, which are the binary's.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Everything the daemon needs to know from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonConfig {
    /// What must survive: which devices form the pool, reports, logs (in `log/`). Exists.
    pub state_dir: PathBuf,
    /// Sockets and locks. Exists.
    pub run_dir: PathBuf,
    /// Where the API listens; beneath `run_dir` unless configured otherwise.
    pub api_socket: PathBuf,
    /// This node's name in NQNs of new exports; without one the pool's UUID names it.
    pub node_name: Option<String>,
    /// Addresses, until the configuration is read again.
    pub listen: Listen,
    /// The engine to start.
    pub engine: EngineConfig,
    /// A pool to make in a sparse file if the daemon has no pool yet.
    pub embedded_pool: Option<EmbeddedPool>,
    /// Where devices of the pool may be, besides where they were last found.
    pub pool_devices: Vec<String>,
    /// Leave the engine running when a signal ends the daemon: the next daemon goes on with it.
    pub keep_engine: bool,
    /// Version to report.
    pub version: String,
}

/// Where hosts and readers of metrics connect. It may change while the daemon runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listen {
    /// Addresses to listen on for NVMe/TCP.
    pub nvme_tcp: Vec<SocketAddr>,
    /// Where `GET /metrics` is answered, if anywhere.
    pub metrics: Option<SocketAddr>,
}

/// What only the program that runs the daemon can do.
pub trait Program {
    /// Has the log opened by its path, reads the configuration again, sets the log's level, and gives back the rest that may
    /// change.
    ///
    /// # Errors
    /// The configuration has a mistake, and the one before holds.
    fn reload(&self) -> Result<Listen, String>;

    /// Opens the log if it is not at its path, and writes what could not be written.
    ///
    /// # Errors
    /// Why it can't be written, in a sentence.
    fn open_log(&self) -> Result<(), String>;
}

impl Listen {
    /// Another configured address that can't be listened on beside this one.
    #[must_use]
    pub fn in_the_way_of(&self, address: SocketAddr) -> Option<SocketAddr> {
        let all = self.nvme_tcp.iter().chain(&self.metrics).copied();
        let mut there = all.filter(|other| overlap(*other, address));
        match there.next()? {
            // Once it is itself.
            first if first == address => there.next(),
            first => Some(first),
        }
    }

    /// What an operator should know about listeners that others than this machine can reach, and about those of `held` (what hosts
    /// can connect to now) that are configured no more.
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
                "the listener {address} is not configured any more, but the engine serves it on: \
                 `forebay shutdown` and a new start close it"
            )
        });
        let hosts = self
            .nvme_tcp
            .iter()
            .chain(&left)
            .filter(beyond)
            .map(|address| {
                format!(
                    "the listener {address} is beyond loopback, and hosts are taken at their word: \
                 whoever can reach it can say any host's name, and read what is on the wire"
                )
            });
        let metrics = self.metrics.iter().filter(beyond).map(|address| {
            format!(
                "the metrics on {address} are beyond loopback: whoever can reach them reads the \
                 names and figures of all tenants"
            )
        });
        old.chain(hosts).chain(metrics).collect()
    }
}

/// Whether only one of two addresses can be listened on.
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
    /// An engine with a reactor that takes no turn for so long is replaced; zero: never.
    pub stuck_after: Duration,
}

/// A pool in a sparse file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddedPool {
    /// The file.
    pub path: PathBuf,
    /// Its size when it is made.
    pub size_bytes: u64,
}

#[cfg(test)]
impl Program for () {
    fn reload(&self) -> Result<Listen, String> {
        Ok(Listen::default())
    }
    fn open_log(&self) -> Result<(), String> {
        Ok(())
    }
}

#[cfg(test)]
impl DaemonConfig {
    /// Of a daemon that has nothing.
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
    fn listeners_beyond_loopback_are_told_of() {
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
            let told = config.exposures(&[]);
            assert_eq!(told.len(), 2, "{open}");
            assert!(told.iter().all(|told| told.contains(open)), "{told:?}");
        }
        // What an engine holds from before is told of as well.
        config.nvme_tcp = vec!["127.0.0.1:0".parse().unwrap()];
        config.metrics = None;
        let held = ["127.0.0.1:4420", "10.0.0.1:4420"].map(|held| held.parse().unwrap());
        assert_eq!(config.exposures(&held[..1]), Vec::<String>::new());
        let told = config.exposures(&held);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("not configured") && told[1].contains("at their word"));
    }
}
