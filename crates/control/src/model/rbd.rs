//! Volumes in Ceph's RBD, as the API shows and accepts them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::error::ApiError;

/// The longest name of a pool, a namespace or an image.
pub const IMAGE_NAME_MAX: usize = 95;
/// The longest path of an image, with its cluster.
pub const IMAGE_PATH_MAX: usize = 4 * (IMAGE_NAME_MAX + 1);

/// An image's place: `CLUSTER/POOL[/NAMESPACE]/IMAGE`. The cluster is one of the daemon's
/// configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePath {
    /// The cluster's name in the configuration.
    pub cluster: String,
    /// The pool.
    pub pool: String,
    /// The namespace; empty for the default one.
    pub namespace: String,
    /// The image.
    pub image: String,
}

impl FromStr for ImagePath {
    type Err = ApiError;

    fn from_str(text: &str) -> Result<Self, ApiError> {
        let parts: Vec<&str> = text.splitn(5, '/').collect();
        let (cluster, pool, namespace, image) = match *parts {
            [cluster, pool, image] => (cluster, pool, "", image),
            [cluster, pool, namespace, image] if !namespace.is_empty() => {
                (cluster, pool, namespace, image)
            }
            _ => return Err(wrong(text)),
        };
        let is_name = |name: &str| {
            let is_plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'@' | b'/');
            name.len() <= IMAGE_NAME_MAX && name.bytes().all(is_plain)
        };
        let required = [cluster, pool, image];
        if required.iter().any(|name| name.is_empty()) || !parts.iter().all(|name| is_name(name)) {
            return Err(wrong(text));
        }
        let [cluster, pool, namespace, image] =
            [cluster, pool, namespace, image].map(str::to_owned);
        Ok(Self {
            cluster,
            pool,
            namespace,
            image,
        })
    }
}

fn wrong(text: &str) -> ApiError {
    let shown = text.chars().take(80).flat_map(char::escape_default);
    let shown: String = shown.collect();
    ApiError::invalid(format!("`{shown}` names no RBD image")).hint(format!(
        "an image is named CLUSTER/POOL/IMAGE or CLUSTER/POOL/NAMESPACE/IMAGE; each name has 1 to {IMAGE_NAME_MAX} \
        printable ASCII characters, without / and @"
    ))
}

impl fmt::Display for ImagePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/", self.cluster, self.pool)?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.image)
    }
}

/// Where the data of a volume in Ceph is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeImage {
    /// The image, `CLUSTER/POOL[/NAMESPACE]/IMAGE`; of a snapshot, followed by `@NAME`.
    pub path: String,
    /// The index of its client among the pool's devices.
    pub client: u8,
    /// The addresses of the engines' clients that may write to it. Normally one; none before the first
    /// connects.
    pub client_addresses: Vec<String>,
}

/// An RBD image, as its cluster describes it now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageState {
    /// Its size.
    pub size_bytes: u64,
    /// The size of its objects.
    pub object_bytes: u64,
    /// Its features, by Ceph's names.
    pub features: Vec<String>,
    /// The snapshot that it is a clone of, `POOL[/NAMESPACE]/IMAGE@NAME`.
    pub parent: Option<String>,
    /// The names of its snapshots in Ceph.
    pub snapshots: Vec<String>,
    /// The addresses of the clients that hold its exclusive lock: one at most, normally the engine's.
    pub lock_owners: Vec<String>,
}

/// The query of `DELETE /v1/tenants/{tenant}/volumes/{volume}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct VolumeDelete {
    /// Of a volume in Ceph: remove the image (of a snapshot: Ceph's snapshot) too. Without it, Ceph keeps it.
    #[serde(default)]
    pub with_image: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_images_path_reads_as_it_is_written() {
        for text in ["ceph/rbd/db", "east/rbd/team/db", "ceph/.rgw/a:b=c"] {
            let path: ImagePath = text.parse().unwrap();
            assert_eq!(path.to_string(), text);
        }
        let path: ImagePath = "east/rbd/team/db".parse().unwrap();
        let parts = [path.cluster, path.pool, path.namespace, path.image];
        assert_eq!(parts, ["east", "rbd", "team", "db"]);
    }

    #[test]
    fn other_texts_name_no_image() {
        let long = format!("ceph/rbd/{}", "x".repeat(IMAGE_NAME_MAX + 1));
        for text in [
            "",
            "db",
            "rbd/db",
            "/rbd/db",
            "ceph//db",
            "ceph/rbd/",
            "ceph/rbd//db",
            "ceph/rbd/a/b/c",
            "ceph/rbd/db@monday",
            "ceph/rbd/a b",
            "ceph/rbd/ä",
            "ceph/rbd/a\nb",
            &long,
        ] {
            let error = text.parse::<ImagePath>().unwrap_err();
            assert!(error.hint.unwrap().contains("CLUSTER/POOL/IMAGE"), "{text}");
            assert!(!error.message.contains('\n'), "{text}");
        }
    }
}
