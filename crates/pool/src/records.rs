//! The catalog's records as structs, encoded with postcard behind a version byte (`codec`). Ids
//! come from one counter per pool and are never reused.

use crate::extents::space::PoolSettings;
use forebay_nvme::reservation::Reservations;
use forebay_xlate::boundary::message::{FrontendKind, PortConfig, ReserveToken};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use serde::{Deserialize, Serialize};
use std::fmt;
use uuid::Uuid;

/// A tenant's id in its pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct TenantId(pub u64);

/// An export's id in its pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ExportId(pub u64);

/// A layer's id in its pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct LayerId(pub u64);

/// The key of a map's records in the catalog. A map keeps it when it changes hands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub(crate) struct MapId(pub(crate) u64);

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tenant {}", self.0)
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

impl fmt::Display for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "export {}", self.0)
    }
}

/// The pool's record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PoolInfo {
    /// The name.
    pub name: String,
    /// The identity, as in every label.
    #[serde(with = "uuid::serde::compact")]
    pub uuid: Uuid,
    /// The size of an extent in bytes, a power of two.
    pub extent_bytes: u64,
    /// Creation time, Unix seconds.
    pub created_s: u64,
    /// Boot of the last daemon; empty for never.
    pub boot_id: String,
    /// Newest engine generation.
    pub engine_generation: u64,
    /// Next id of a tenant, volume or export.
    pub next_id: u64,
    /// Starts and stops: the upper part of every commit sequence.
    pub opens: u64,
    /// The pool's settings.
    pub settings: PoolSettings,
}

impl PoolInfo {
    /// Boot of the last daemon, if any.
    pub fn boot_id(&self) -> Option<&str> {
        Some(self.boot_id.as_str()).filter(|id| !id.is_empty())
    }
}

/// A device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceRecord {
    /// Its index.
    pub index: DeviceIndex,
    /// Its identity in its label.
    #[serde(with = "uuid::serde::compact")]
    pub uuid: Uuid,
    /// Where it was last found, as in `file:/path`.
    pub spec: String,
    /// The number of extents.
    pub extents: u64,
    /// The start of extent 0.
    pub data_offset_bytes: u64,
    /// The logical block in bytes.
    pub block_bytes: u32,
    /// Whether never used extents are known zeros (clean).
    pub known_zero: bool,
}

/// A tenant.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TenantRecord {
    /// Its identity.
    pub id: TenantId,
    /// Its unique name.
    pub name: String,
    /// Creation time, Unix seconds.
    pub created_s: u64,
}

/// A volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Its identity.
    pub id: VolumeId,
    /// Identity for hosts: the source of NGUID, UUID and serial.
    #[serde(with = "uuid::serde::compact")]
    pub uuid: Uuid,
    /// Its tenant.
    pub tenant: TenantId,
    /// Unique in the tenant; empty while being deleted.
    pub name: String,
    /// Size in bytes, a multiple of `block_bytes`.
    pub size_bytes: u64,
    /// The logical block in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// The space reservation in bytes; 0 for none.
    pub reserved_bytes: u64,
    /// Creation time, Unix seconds.
    pub created_s: u64,
    /// What snapshots and clones made of it.
    #[serde(skip)]
    pub layering: Layering,
}

impl VolumeRecord {
    pub(crate) fn map_id(&self) -> MapId {
        self.layering.map.unwrap_or(MapId(self.id.0))
    }

    /// Whether it is a snapshot, which is never written.
    pub fn is_snapshot(&self) -> bool {
        self.layering.snapshot_of.is_some()
    }

    /// The present epoch of its translations.
    pub fn epoch(&self) -> u16 {
        // Below 2^13.
        (self.layering.freezes % EPOCHS) as u16
    }

    /// The epoch after its next snapshot.
    pub fn next_epoch(&self) -> u16 {
        (self.layering.freezes.wrapping_add(1) % EPOCHS) as u16
    }
}

/// Epochs of translations before their number repeats.
const EPOCHS: u64 = 1 << 13;

/// A volume's place among snapshots and clones. All default in a volume without them.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Layering {
    /// Its own map, if that does not have the volume's number.
    pub(crate) map: Option<MapId>,
    /// The frozen layer below its own map.
    pub parent: Option<LayerId>,
    /// How many snapshots of it were ever taken.
    pub freezes: u64,
    /// For a snapshot, its volume, which may be gone.
    pub snapshot_of: Option<VolumeId>,
}

/// A frozen map, which volumes and other layers see where their own maps say nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct LayerRecord {
    pub(crate) map: MapId,
    pub(crate) parent: Option<LayerId>,
}

/// The RBD image, or its snapshot, that a volume shows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageRecord {
    /// The cluster's name in the configuration.
    pub cluster: String,
    /// The Ceph pool.
    pub pool: String,
    /// The namespace in that pool; empty for none.
    pub namespace: String,
    /// The image's name.
    pub image: String,
    /// The snapshot's name, for a volume that is one.
    pub snapshot: Option<String>,
    /// Its client.
    pub client: DeviceIndex,
    /// Its part of the client's addresses: extents `span << 24` and on.
    pub span: u32,
}

/// The volumes that a RADOS client serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ClientOwner {
    /// A tenant's volumes.
    Tenant(TenantId),
    /// One volume and its snapshots.
    Volume(VolumeId),
}

/// A RADOS client: a device that is not part of the pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientRecord {
    /// Its index, which no device of the pool has.
    pub index: DeviceIndex,
    /// Its identity.
    #[serde(with = "uuid::serde::compact")]
    pub uuid: Uuid,
    /// The cluster's name in the configuration.
    pub cluster: String,
    /// The volumes that it serves.
    pub owner: ClientOwner,
    /// Addresses of its sessions that may still write.
    pub addresses: Vec<String>,
}

/// An export.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ExportRecord {
    /// Its identity.
    pub id: ExportId,
    /// Its volume.
    pub volume: VolumeId,
    /// Its subsystem's NVMe qualified name.
    pub nqn: String,
    /// NQNs of the hosts that may connect.
    pub hosts: Vec<String>,
    /// Whether any host may connect.
    pub any_host: bool,
    /// Creation time, Unix seconds.
    pub created_s: u64,
    /// Its frontend.
    pub frontend: FrontendKind,
    /// A VM's socket path; `None` for the runtime folder.
    pub socket: Option<String>,
    /// Owner of the socket.
    pub socket_owner: SocketOwner,
    /// Whether other shared exports may serve it too.
    pub shared: bool,
}

/// A socket's owner; `None` for the daemon's user or group.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SocketOwner {
    /// The user id.
    pub user: Option<u32>,
    /// The group id.
    pub group: Option<u32>,
}

/// A new export.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct NewExport {
    /// NQNs of the hosts that may connect; none for a VM.
    pub hosts: Vec<String>,
    /// Whether any host may connect.
    pub any_host: bool,
    /// Its frontend.
    pub frontend: FrontendKind,
    /// A VM's socket path.
    pub socket: Option<String>,
    /// Owner of the socket.
    pub socket_owner: SocketOwner,
    /// Whether other shared exports may serve it too.
    pub shared: bool,
    /// The node's name in the NQN; by default the pool's UUID.
    pub node: Option<String>,
    /// It only reads, so it may join unshared exports. Not stored.
    pub only_reads: bool,
    /// The out-of-band function that it belongs to.
    pub function: Option<u16>,
}

/// An unshared NVMe/TCP export as stored, readable by earlier versions.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct PlainExport {
    id: ExportId,
    volume: VolumeId,
    nqn: String,
    hosts: Vec<String>,
    any_host: bool,
    created_s: u64,
}

impl ExportRecord {
    pub(crate) fn plain(&self) -> Option<PlainExport> {
        let is_plain = self.frontend == FrontendKind::NvmeTcp && !self.shared;
        is_plain.then(|| PlainExport {
            id: self.id,
            volume: self.volume,
            nqn: self.nqn.clone(),
            hosts: self.hosts.clone(),
            any_host: self.any_host,
            created_s: self.created_s,
        })
    }
}

impl From<PlainExport> for ExportRecord {
    fn from(plain: PlainExport) -> Self {
        let PlainExport {
            id,
            volume,
            nqn,
            hosts,
            any_host,
            created_s,
        } = plain;
        Self {
            id,
            volume,
            nqn,
            hosts,
            any_host,
            created_s,
            frontend: FrontendKind::NvmeTcp,
            socket: None,
            socket_owner: SocketOwner::default(),
            shared: false,
        }
    }
}

/// A port: where hosts connect, and how they should use it.
pub type PortRecord = PortConfig;

/// Hosts' reservations of a volume.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct HostReservations {
    /// Registrants and holders.
    pub state: Reservations,
    /// The newest commands that changed it, oldest first. A repeated one gets the same answer.
    pub recent: Vec<ReserveToken>,
}
