//! What the daemon is told when it starts.
//!
//! Purpose: the resolved configuration: every path absolute, every default filled in.
//! Design: plain data. The command line reads `forebay.toml` and makes one of these.
//! Not here: the file format and its errors, which are the binary's.

use std::net::SocketAddr;
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
    /// Addresses to listen on for NVMe/TCP.
    pub nvme_tcp: Vec<SocketAddr>,
    /// The engine to start.
    pub engine: EngineConfig,
    /// A pool to make in a sparse file if the daemon has no pool yet.
    pub embedded_pool: Option<EmbeddedPool>,
    /// Where devices of the pool may be, besides where they were last found.
    pub pool_devices: Vec<String>,
    /// Version to report.
    pub version: String,
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
