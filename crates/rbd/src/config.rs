//! How a client connects, and what a cluster holds.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The session of one client. Keys are named by file only.
#[derive(Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// The cluster's name: `ceph` unless its administrator chose another.
    pub cluster: String,
    /// The user without `client.`, as in `admin`.
    pub user: String,
    /// The configuration file; without one, librados searches Ceph's usual places.
    pub file: Option<PathBuf>,
    /// The file with the user's key; without one, as the configuration says.
    pub keyring: Option<PathBuf>,
    /// The longest wait for a monitor's answer, in whole seconds.
    pub monitor_limit: Duration,
    /// The longest wait for an OSD, in whole seconds; zero waits forever. A write that ended with
    /// `ETIMEDOUT` may still land.
    pub osd_limit: Duration,
    /// Options that replace those of the file. `key` is refused.
    pub options: BTreeMap<String, String>,
}

impl ClientConfig {
    /// A client whose writes are durable once they end: librbd's cache is off.
    pub fn new(user: &str) -> Self {
        let off = |name: &str| (name.to_owned(), "false".to_owned());
        Self {
            cluster: "ceph".to_owned(),
            user: user.to_owned(),
            file: None,
            keyring: None,
            monitor_limit: Duration::from_secs(30),
            osd_limit: Duration::from_secs(30),
            options: BTreeMap::from([off("rbd_cache")]),
        }
    }
}

impl fmt::Debug for ClientConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The values of options may be secrets.
        f.debug_struct("ClientConfig")
            .field("cluster", &self.cluster)
            .field("user", &self.user)
            .field("file", &self.file)
            .field("keyring", &self.keyring)
            .field("options", &self.options.keys())
            .finish_non_exhaustive()
    }
}

/// A cluster's space, a few seconds old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterUsage {
    /// All devices together, before replication.
    pub total_bytes: u64,
    /// The used part, replicas included.
    pub used_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_has_no_values_of_options() {
        let mut config = ClientConfig::new("forebay");
        let secret = ("mon_host".to_owned(), "SECRET".to_owned());
        config.options.extend([secret]);
        let shown = format!("{config:?}");
        assert!(shown.contains("mon_host"), "{shown}");
        assert!(!shown.contains("SECRET"), "{shown}");
    }
}
