//! `[ceph.NAME]`: the Ceph clusters that volumes may lie in.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_control::config::{ClientFor, ClusterConfig};
use forebay_control::model::validate;
use forebay_device::size::parse_bytes;
use forebay_qos::budget::Rate;
use serde::Deserialize;

const DEFAULT_CONFIG: &str = "/etc/ceph/ceph.conf";
const DEFAULT_USER: &str = "admin";
const DEFAULT_CLUSTER: &str = "ceph";
/// The longest user or cluster name.
const MAX_NAME_BYTES: usize = 63;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ClusterTable {
    config: Option<PathBuf>,
    user: Option<String>,
    keyring: Option<PathBuf>,
    cluster: Option<String>,
    #[serde(default)]
    client: ClientWord,
    iops: Option<u64>,
    bandwidth: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ClientWord {
    #[default]
    Tenant,
    Volume,
}

pub(super) fn parse(
    tables: BTreeMap<String, ClusterTable>,
    base: &Path,
) -> Result<BTreeMap<String, ClusterConfig>, String> {
    let one = |(name, table): (String, ClusterTable)| {
        let at = format!("[ceph.{name}]");
        validate::name("cluster", &name).map_err(|error| format!("{at}: {error}"))?;
        let user = table.user.unwrap_or_else(|| DEFAULT_USER.to_owned());
        if user.starts_with("client.") {
            return Err(format!(
                "{at} user {user:?}: leave `client.` out, as in {:?}",
                user.trim_start_matches("client.")
            ));
        }
        let cluster = table.cluster.unwrap_or_else(|| DEFAULT_CLUSTER.to_owned());
        plain(&at, "user", &user)?;
        plain(&at, "cluster", &cluster)?;
        let keyring = table.keyring.map(|keyring| base.join(keyring));
        let file = base.join(table.config.unwrap_or_else(|| DEFAULT_CONFIG.into()));
        plain_path(&at, "config", &file)?;
        if let Some(keyring) = &keyring {
            plain_path(&at, "keyring", keyring)?;
        }
        let config = ClusterConfig {
            config: file,
            user,
            keyring,
            cluster,
            client: match table.client {
                ClientWord::Tenant => ClientFor::Tenant,
                ClientWord::Volume => ClientFor::Volume,
            },
            capacity: capacity(&at, table.iops, table.bandwidth.as_deref())?,
        };
        Ok((name, config))
    };
    tables.into_iter().map(one).collect()
}

fn capacity(at: &str, iops: Option<u64>, bandwidth: Option<&str>) -> Result<Option<Rate>, String> {
    match (iops, bandwidth) {
        (None, None) => Ok(None),
        (Some(iops), Some(bandwidth)) => match parse_bytes(bandwidth) {
            Ok(bytes) if iops > 0 && bytes > 0 => Ok(Some(Rate { iops, bytes })),
            Ok(_) => Err(format!("{at} iops and bandwidth: not 0")),
            Err(error) => Err(format!("{at} bandwidth {bandwidth:?}: {error}")),
        },
        _ => Err(format!(
            "{at} states a capacity by both `iops` and `bandwidth`"
        )),
    }
}

/// The names become part of paths and of a device's specification.
fn plain(at: &str, key: &str, name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    match (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_plain) {
        true => Ok(()),
        false => Err(format!(
            "{at} {key} {name:?}: a name has 1 to {MAX_NAME_BYTES} characters from A-Z, a-z, 0-9, -, _ and ."
        )),
    }
}

/// `?` and `&` separate the parts of a device's specification.
fn plain_path(at: &str, key: &str, path: &Path) -> Result<(), String> {
    let is_plain = |text: &str| !text.contains(|c: char| matches!(c, '?' | '&') || c.is_control());
    match path.to_str().is_some_and(is_plain) {
        true => Ok(()),
        false => Err(format!(
            "{at} {key} {path:?}: a path there is UTF-8 without `?`, `&` and control characters"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<BTreeMap<String, ClusterConfig>, String> {
        let tables = toml::from_str(text).map_err(|error| error.to_string())?;
        parse(tables, Path::new("/etc/forebay"))
    }

    #[test]
    fn a_cluster_has_cephs_defaults() {
        let clusters = parsed("[east]").unwrap();
        let expected = ClusterConfig {
            config: "/etc/ceph/ceph.conf".into(),
            user: "admin".to_owned(),
            keyring: None,
            cluster: "ceph".to_owned(),
            client: ClientFor::Tenant,
            capacity: None,
        };
        assert_eq!(clusters, BTreeMap::from([("east".to_owned(), expected)]));
    }

    #[test]
    fn paths_are_relative_to_the_file() {
        let clusters = parsed(
            r#"
            [west]
            config = "west.conf"
            user = "forebay"
            keyring = "/k/forebay.keyring"
            cluster = "west"
            client = "volume"
            iops = 5000
            bandwidth = "1G"
            "#,
        )
        .unwrap();
        let expected = ClusterConfig {
            config: "/etc/forebay/west.conf".into(),
            user: "forebay".to_owned(),
            keyring: Some("/k/forebay.keyring".into()),
            cluster: "west".to_owned(),
            client: ClientFor::Volume,
            capacity: Some(Rate {
                iops: 5000,
                bytes: 1 << 30,
            }),
        };
        assert_eq!(clusters["west"], expected);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("[East]", "[ceph.East]"),
            ("[east]\nuser = \"client.admin\"", "as in \"admin\""),
            ("[east]\nuser = \"a b\"", "[ceph.east] user"),
            ("[east]\ncluster = \"\"", "[ceph.east] cluster"),
            ("[east]\ncluster = \"../ceph\"", "[ceph.east] cluster"),
            ("[east]\nconfig = \"/a?b\"", "[ceph.east] config"),
            ("[east]\nkeyring = \"/a&b\"", "[ceph.east] keyring"),
            ("[east]\nkey = \"AQ==\"", "unknown field `key`"),
            ("[east]\nclient = \"node\"", "`tenant` or `volume`"),
            ("[east]\niops = 5", "by both `iops` and"),
            ("[east]\niops = 5\nbandwidth = \"x\"", "bandwidth \"x\""),
        ] {
            let message = parsed(text).unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
