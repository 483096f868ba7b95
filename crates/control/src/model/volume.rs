//! Volumes, as the API shows, creates and changes them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::rbd::VolumeImage;
use super::scheduling::Budget;
use super::{SnapshotInfo, VolumeReservation};

/// A volume: a logical disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its tenant.
    pub tenant: String,
    /// Name, unique within its tenant; a snapshot's is `VOLUME@NAME`.
    pub name: String,
    /// Number, unique within the pool and never reused.
    pub id: u64,
    /// UUID; hosts see it as the namespace's NGUID and UUID.
    pub uuid: String,
    /// Serial number for hosts.
    pub serial: String,
    /// Size.
    pub size_bytes: u64,
    /// Block size for hosts: 512 or 4096.
    pub block_bytes: u32,
    /// Extents it owns or has set aside for its next writes. Snapshots' extents don't count. 0 in
    /// Ceph.
    pub allocated_bytes: u64,
    /// Part that it has written, since its last snapshot. In Ceph, its size: the written part is not
    /// known.
    pub mapped_bytes: u64,
    /// Part that finds space whatever other volumes do; 0 if none.
    pub reserved_bytes: u64,
    /// Whether an export of it exists.
    pub exported: bool,
    /// Its NVMe reservations; absent if no host has registered.
    pub reservation: Option<VolumeReservation>,
    /// Its budget within its tenant's, if one is set.
    #[serde(default)]
    pub budget: Option<Budget>,
    /// For a snapshot: its volume and its time.
    #[serde(default)]
    pub snapshot: Option<SnapshotInfo>,
    /// For a volume in Ceph: its image.
    #[serde(default)]
    pub rbd: Option<VolumeImage>,
}

/// Body of `POST /v1/tenants/{tenant}/volumes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeCreate {
    /// Name: `[a-z0-9-]`, 1 to 63 characters.
    pub name: String,
    /// Size, a multiple of the block size. With `rbd`, by default that of an existing image.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Block size, 512 or 4096; default 4096, with `rbd` 512.
    #[serde(default)]
    pub block_bytes: Option<u32>,
    /// Part that finds space whatever other volumes do, at most its size; default 0.
    #[serde(default)]
    pub reserved_bytes: u64,
    /// Its image in Ceph, `CLUSTER/POOL[/NAMESPACE]/IMAGE`, instead of space in the pool. With
    /// `size_bytes`, a missing image is created.
    #[serde(default)]
    pub rbd: Option<String>,
}

/// Body of `PATCH /v1/tenants/{tenant}/volumes/{volume}`: `size_bytes` or
/// `reserved_bytes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeUpdate {
    /// New size; only a volume in Ceph can shrink.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Shrink, which loses the data beyond the new size.
    #[serde(default)]
    pub shrink: bool,
    /// Part that finds space whatever other volumes do, at most its size.
    #[serde(default)]
    pub reserved_bytes: Option<u64>,
}
