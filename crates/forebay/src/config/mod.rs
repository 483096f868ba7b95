//! `forebay.toml`: from a file (or none) to a complete configuration with absolute paths.
//!
//! Unknown keys are errors with a line number. Without a file, everything lies in `./var`, with a
//! pool in a sparse file.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

mod ceph;
mod out_of_band;

use forebay_control::config::{ClusterConfig, OutOfBand};
use forebay_device::DeviceSpec;
use forebay_device::size::parse_capacity;
use serde::{Deserialize, Deserializer, de};

use crate::failure::{Failure, Outcome, While};
use ceph::ClusterTable;
use out_of_band::OutOfBandTable;

pub(crate) const FILE_NAME: &str = "forebay.toml";
/// The installed service's configuration.
const SERVICE_FILE: &str = "/etc/forebay/forebay.toml";
pub(crate) const DEFAULT_DIR: &str = "var";
const EMBEDDED_BYTES: u64 = 16 << 30;
const DEFAULT_LISTEN: &str = "127.0.0.1:4420";
/// A turn takes microseconds; no device can block it.
const DEFAULT_STUCK_S: u32 = 5;
/// A label of a host name (RFC 1123).
const MAX_NODE_NAME_BYTES: usize = 63;
pub(crate) const REACTORS_MAX: u16 = forebay_xlate::boundary::region::MAX_REACTORS as u16;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileConfig {
    state_dir: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    #[serde(default)]
    node: NodeTable,
    #[serde(default)]
    log: LogTable,
    #[serde(default)]
    listen: ListenTable,
    #[serde(default)]
    engine: EngineTable,
    #[serde(default)]
    pool: PoolTable,
    #[serde(default)]
    devices: DevicesTable,
    out_of_band: Option<OutOfBandTable>,
    #[serde(default)]
    firmware: FirmwareTable,
    #[serde(default)]
    ceph: BTreeMap<String, ClusterTable>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct FirmwareTable {
    #[serde(default)]
    keys: Vec<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeTable {
    name: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogTable {
    level: Option<String>,
    #[serde(default)]
    format: LogFormat,
    file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListenTable {
    nvme_tcp: Option<Vec<SocketAddr>>,
    metrics: Option<SocketAddr>,
    api: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineTable {
    reactors: Option<u16>,
    #[serde(default)]
    cpus: Vec<u16>,
    stuck_s: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolTable {
    embedded: Option<EmbeddedTable>,
    #[serde(default)]
    devices: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct DevicesTable {
    #[serde(default)]
    allow_faulty: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EmbeddedTable {
    path: PathBuf,
    #[serde(deserialize_with = "size")]
    size: u64,
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_capacity(&text).map_err(de::Error::custom)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) source: Option<PathBuf>,
    pub(crate) state_dir: PathBuf,
    pub(crate) run_dir: PathBuf,
    pub(crate) api_socket: PathBuf,
    pub(crate) node_name: Option<String>,
    pub(crate) log_level: String,
    pub(crate) log_format: LogFormat,
    pub(crate) log_file: PathBuf,
    pub(crate) nvme_tcp: Vec<SocketAddr>,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) reactors: u16,
    pub(crate) cpus: Vec<u16>,
    /// Seconds without a turn after which an engine is replaced; 0: never.
    pub(crate) stuck_s: u32,
    /// Path and size of the pool to create if there is none.
    pub(crate) embedded: Option<(PathBuf, u64)>,
    pub(crate) devices: Vec<String>,
    /// Whether devices that fail on purpose may be used.
    pub(crate) allow_faulty: bool,
    pub(crate) out_of_band: Option<OutOfBand>,
    /// Public keys that firmware images are signed with.
    pub(crate) firmware_keys: Vec<PathBuf>,
    pub(crate) clusters: BTreeMap<String, ClusterConfig>,
}

/// Loads `file`; else `./forebay.toml` if it exists and `dir` is absent; else the defaults in `dir`
/// (or `./var`).
pub(crate) fn load(file: Option<&Path>, dir: Option<&Path>) -> Outcome<Config> {
    let named = match (file, dir) {
        (Some(file), _) => Some(file),
        (None, None) if Path::new(FILE_NAME).exists() => Some(Path::new(FILE_NAME)),
        _ => None,
    };
    let Some(file) = named else {
        return defaults(dir.unwrap_or(Path::new(DEFAULT_DIR)));
    };
    let text = std::fs::read_to_string(file).while_doing(format!("read {}", file.display()))?;
    let file = absolute(file)?;
    parse(&text, &file, dir)
}

fn absolute(path: &Path) -> Outcome<PathBuf> {
    std::path::absolute(path).while_doing(format!("make {} absolute", path.display()))
}

fn default_listen() -> Vec<SocketAddr> {
    DEFAULT_LISTEN.parse().into_iter().collect()
}

fn defaults(dir: &Path) -> Outcome<Config> {
    let dir = absolute(dir)?;
    Ok(Config {
        source: None,
        state_dir: dir.join("state"),
        run_dir: dir.join("run"),
        api_socket: dir.join("run/api.sock"),
        node_name: None,
        log_level: "info".to_owned(),
        log_format: LogFormat::default(),
        log_file: dir.join("state/log/forebay.log"),
        nvme_tcp: default_listen(),
        metrics: None,
        reactors: 1,
        cpus: Vec::new(),
        stuck_s: DEFAULT_STUCK_S,
        embedded: Some((dir.join("pool.img"), EMBEDDED_BYTES)),
        devices: Vec::new(),
        allow_faulty: false,
        out_of_band: None,
        firmware_keys: Vec::new(),
        clusters: BTreeMap::new(),
    })
}

/// The name becomes part of an NQN, between colons.
fn is_node_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=MAX_NODE_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_plain)
}

fn parse(text: &str, path: &Path, dir: Option<&Path>) -> Outcome<Config> {
    let wrong = |message: String| {
        Failure::new(format!("{}: {message}", path.display()))
            .hint("the keys and their meanings are in docs/src/configuration.md")
    };
    let file: FileConfig = toml::from_str(text)
        .map_err(|error| wrong(format!("\n{}", error.to_string().trim_end())))?;
    let base = path.parent().unwrap_or(Path::new("/"));
    let dir = match dir {
        Some(dir) => absolute(dir)?,
        None => base.join(DEFAULT_DIR),
    };
    let state_dir = base.join(file.state_dir.unwrap_or_else(|| dir.join("state")));
    let run_dir = base.join(file.run_dir.unwrap_or_else(|| dir.join("run")));
    let nvme_tcp = file.listen.nvme_tcp.unwrap_or_else(default_listen);
    no_address_twice(&nvme_tcp).map_err(&wrong)?;
    let cpus = file.engine.cpus;
    let reactors = reactors(file.engine.reactors, &cpus).map_err(&wrong)?;
    if let Some(name) = &file.node.name
        && !is_node_name(name)
    {
        return Err(wrong(format!(
            "[node] name {name:?}: a name has 1 to {MAX_NODE_NAME_BYTES} characters from a-z, 0-9 and -"
        )));
    }
    let log_level = file.log.level.unwrap_or_else(|| "info".to_owned());
    if !["error", "warn", "info", "debug", "trace"].contains(&log_level.as_str()) {
        return Err(wrong(format!(
            "[log] level `{log_level}` is not one of error, warn, info, debug, trace"
        )));
    }
    if file.devices.allow_faulty && !cfg!(feature = "test-device") {
        return Err(wrong(
            "[devices] allow_faulty: this build has no such devices; build with the feature `test-device`".to_owned(),
        ));
    }
    let mut devices = Vec::new();
    for spec in &file.pool.devices {
        let spec = DeviceSpec::parse_in(base, spec)
            .map_err(|error| wrong(format!("[pool] devices: {error}")))?;
        devices.push(spec.to_string());
    }
    let out_of_band = file.out_of_band;
    let out_of_band = out_of_band.map(|table| out_of_band::parse(table, base));
    let out_of_band = out_of_band.transpose().map_err(&wrong)?;
    let clusters = ceph::parse(file.ceph, base).map_err(&wrong)?;
    Ok(Config {
        source: Some(path.to_owned()),
        api_socket: base.join(file.listen.api.unwrap_or_else(|| run_dir.join("api.sock"))),
        log_file: base.join(
            file.log
                .file
                .unwrap_or_else(|| state_dir.join("log/forebay.log")),
        ),
        node_name: file.node.name,
        state_dir,
        run_dir,
        log_level,
        log_format: file.log.format,
        nvme_tcp,
        metrics: file.listen.metrics,
        reactors,
        cpus,
        stuck_s: file.engine.stuck_s.unwrap_or(DEFAULT_STUCK_S),
        embedded: file
            .pool
            .embedded
            .map(|pool| (base.join(pool.path), pool.size)),
        devices,
        allow_faulty: file.devices.allow_faulty,
        out_of_band,
        firmware_keys: file
            .firmware
            .keys
            .iter()
            .map(|key| base.join(key))
            .collect(),
        clusters,
    })
}

fn no_address_twice(nvme_tcp: &[SocketAddr]) -> Result<(), String> {
    let mut addresses = nvme_tcp.iter().enumerate();
    match addresses.find(|(i, address)| nvme_tcp[..*i].contains(address)) {
        Some((_, twice)) => Err(format!("[listen] nvme_tcp lists {twice} twice")),
        None => Ok(()),
    }
}

fn reactors(stated: Option<u16>, cpus: &[u16]) -> Result<u16, String> {
    let of_cpus = || u16::try_from(cpus.len()).unwrap_or(u16::MAX).max(1);
    let reactors = stated.unwrap_or_else(of_cpus);
    if !(1..=REACTORS_MAX).contains(&reactors) {
        return Err(format!("[engine] reactors must be 1 to {REACTORS_MAX}"));
    }
    if !cpus.is_empty() && cpus.len() != usize::from(reactors) {
        return Err(format!(
            "[engine] cpus lists {} CPUs for {reactors} reactors",
            cpus.len()
        ));
    }
    Ok(reactors)
}

/// The API socket, from the argument, `FOREBAY_SOCKET`, the current directory's configuration, an
/// existing default, or the service's configuration.
pub(crate) fn socket(said: Option<PathBuf>) -> Outcome<PathBuf> {
    if let Some(path) = said {
        return Ok(path);
    }
    if let Some(path) = std::env::var_os("FOREBAY_SOCKET").filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    if Path::new(FILE_NAME).exists() {
        return Ok(load(None, None)?.api_socket);
    }
    // A relative path, short enough for a socket address.
    let default = Path::new(DEFAULT_DIR).join("run/api.sock");
    let service = Path::new(SERVICE_FILE);
    if !default.exists() && service.exists() {
        return Ok(load(Some(service), None)?.api_socket);
    }
    Ok(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Outcome<Config> {
        parse(text, Path::new("/etc/forebay/forebay.toml"), None)
    }

    #[test]
    fn nothing_said_is_beneath_one_folder() {
        let config = defaults(Path::new("/x/var")).unwrap();
        assert_eq!(config.api_socket, Path::new("/x/var/run/api.sock"));
        assert_eq!(config.embedded, Some(("/x/var/pool.img".into(), 16 << 30)));
        assert!(
            config
                .nvme_tcp
                .iter()
                .all(|address| address.ip().is_loopback())
        );
        assert_eq!(config.nvme_tcp.len(), 1);
    }

    #[test]
    fn everything_said() {
        let config = parsed(
            r#"
            state_dir = "/var/lib/forebay"
            run_dir = "/run/forebay"
            [node]
            name = "rack1-n7"
            [log]
            level = "debug"
            file = "f.log"
            format = "json"
            [listen]
            metrics = "127.0.0.1:9464"
            nvme_tcp = ["0.0.0.0:4420", "[::1]:4420"]
            [engine]
            cpus = [2, 3]
            stuck_s = 0
            [pool]
            embedded = { path = "pool.img", size = "1G" }
            devices = ["/dev/disk/by-id/a", "ram:b?size=1G"]
            [firmware]
            keys = ["firmware.pub"]
            "#,
        )
        .unwrap();
        assert_eq!(config.api_socket, Path::new("/run/forebay/api.sock"));
        assert_eq!(config.log_file, Path::new("/etc/forebay/f.log"));
        assert_eq!(config.node_name.as_deref(), Some("rack1-n7"));
        assert_eq!((config.reactors, config.stuck_s), (2, 0));
        assert_eq!(config.nvme_tcp.len(), 2);
        assert_eq!(config.metrics, "127.0.0.1:9464".parse().ok());
        assert_eq!(config.log_format, LogFormat::Json);
        assert_eq!(
            config.embedded,
            Some(("/etc/forebay/pool.img".into(), 1 << 30))
        );
        assert_eq!(
            config.devices,
            ["/dev/disk/by-id/a", "ram:/etc/forebay/b?size=1G"]
        );
        assert_eq!(
            config.firmware_keys,
            [Path::new("/etc/forebay/firmware.pub")]
        );
    }

    #[test]
    fn an_empty_file_has_no_embedded_pool() {
        let config = parsed("").unwrap();
        assert_eq!(config.embedded, None);
        assert_eq!(config.run_dir, Path::new("/etc/forebay/var/run"));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("state_dri = \"x\"", "state_dri"),
            ("[engine]\nreactor = 1", "line 2"),
            (
                "[engine]\nreactor = 1",
                "expected one of `reactors`, `cpus`, `stuck_s`",
            ),
            ("[engine]\nreactors = 0", "1 to 64"),
            (
                "[engine]\nreactors = 2\ncpus = [1]",
                "1 CPUs for 2 reactors",
            ),
            ("[listen]\nnvme_tcp = [\"localhost\"]", "socket address"),
            (
                "[listen]\nnvme_tcp = [\"127.0.0.1:1\", \"127.0.0.1:1\"]",
                "twice",
            ),
            ("[node]\nname = \"Rack:1\"", "a-z, 0-9 and -"),
            ("[log]\nlevel = \"loud\"", "loud"),
            ("[log]\nformat = \"xml\"", "expected `text` or `json`"),
            (
                "[pool]\nembedded = { path = \"x\", size = \"big\" }",
                "`big` is not a size",
            ),
            (
                "[pool]\ndevices = [\"tape:/x\"]",
                "unknown device kind `tape`",
            ),
            ("[pool", "line 1"),
        ] {
            let message = parsed(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
            assert!(
                message.starts_with("/etc/forebay/forebay.toml"),
                "{message}"
            );
        }
    }
}
