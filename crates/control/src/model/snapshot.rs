//! Snapshots, clones and rollback, as the API shows and accepts them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Volume;

/// What a snapshot is of. A snapshot is a volume named `VOLUME@NAME`, which can't be changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// The volume's name; null if it was deleted.
    pub of: Option<String>,
    /// When it was taken, Unix seconds.
    pub created_unix_s: u64,
}

/// A snapshot, with the space that its deletion would free.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotSpace {
    /// The snapshot.
    #[serde(flatten)]
    pub volume: Volume,
    /// Extents that no other volume or snapshot shows.
    pub alone_bytes: u64,
}

/// Body of `POST /v1/tenants/{tenant}/snapshots`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotsTake {
    /// Their names, `VOLUME@NAME`, one for each volume. All are taken at one moment.
    pub snapshots: Vec<String>,
}

/// Body of `POST /v1/tenants/{tenant}/volumes/{volume}/clone`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeClone {
    /// The clone's tenant; default: the snapshot's.
    #[serde(default)]
    pub tenant: Option<String>,
    /// The clone's name: `[a-z0-9-]`, 1 to 63 characters.
    pub name: String,
    /// Part that finds space whatever other volumes do, at most its size; default 0.
    #[serde(default)]
    pub reserved_bytes: u64,
    /// Of a snapshot in Ceph: the clone's image, `CLUSTER/POOL[/NAMESPACE]/IMAGE`, in the same cluster;
    /// by default `TENANT.NAME` beside the snapshot's image.
    #[serde(default)]
    pub rbd: Option<String>,
}

/// Body of `POST /v1/tenants/{tenant}/volumes/{volume}/rollback`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeRollback {
    /// One of the volume's snapshots, `VOLUME@NAME`.
    pub snapshot: String,
    /// Go on even if hosts or VMs are connected: the content changes while they use it.
    #[serde(default)]
    pub while_connected: bool,
}
