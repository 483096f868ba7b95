//! The catalog's records, as structs.
//!
//! **Design.** Plain data, encoded with postcard behind a version byte (`codec`). Ids come from one
//! counter per pool and are never reused. **Not here:** packed records (states, maps,
//! reservations), which `codec` encodes from memory.

use crate::{extents::space::PoolSettings, uuid::Uuid};
use forebay_nvme::reservation::Reservations;
use forebay_xlate::boundary::message::{Frontend, PortConfig, ReserveToken};
use forebay_xlate::types::{DeviceIndex, VolumeId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A tenant's identity within its pool; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct TenantId(pub u64);

/// An export's identity within its pool; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ExportId(pub u64);

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tenant {}", self.0)
    }
}

impl fmt::Display for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "export {}", self.0)
    }
}

/// The pool's own record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PoolInfo {
    /// Its name.
    pub name: String,
    /// Its identity, which every label repeats.
    pub uuid: Uuid,
    /// The size of an extent in bytes, a power of two.
    pub extent_bytes: u64,
    /// When it was created, in seconds since the epoch.
    pub created_s: u64,
    /// The boot in which a daemon last used it; empty: never.
    pub boot_id: String,
    /// The newest engine generation that was handed out.
    pub engine_generation: u64,
    /// The next id for a tenant, volume or export.
    pub next_id: u64,
    /// How often the pool was started or stopped: the upper part of every commit sequence.
    pub opens: u64,
    /// What can be set for it.
    pub settings: PoolSettings,
}

impl PoolInfo {
    /// The boot in which a daemon last used the pool; none: never.
    pub fn boot_id(&self) -> Option<&str> {
        Some(self.boot_id.as_str()).filter(|id| !id.is_empty())
    }
}

/// A device of the pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceRecord {
    /// Its place in the pool.
    pub index: DeviceIndex,
    /// Its identity, as its label says.
    pub uuid: Uuid,
    /// Where it was last found (`file:/path` and the like).
    pub spec: String,
    /// How many extents it holds.
    pub extents: u64,
    /// Where extent 0 begins.
    pub data_offset_bytes: u64,
    /// Its logical block, in bytes.
    pub block_bytes: u32,
    /// Whether extents never used are clean (known zeros), or dirty.
    pub known_zero: bool,
}

/// A tenant.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TenantRecord {
    /// Its identity.
    pub id: TenantId,
    /// Its name, unique in the pool.
    pub name: String,
    /// When it was created, in seconds since the epoch.
    pub created_s: u64,
}

/// A volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Its identity.
    pub id: VolumeId,
    /// Its stable identity towards hosts: NGUID, UUID and serial come from it.
    pub uuid: Uuid,
    /// Whose it is.
    pub tenant: TenantId,
    /// Its name, unique within the tenant. Empty: it is being deleted.
    pub name: String,
    /// Its size in bytes, a multiple of `block_bytes`.
    pub size_bytes: u64,
    /// Its logical block: 512 or 4096.
    pub block_bytes: u32,
    /// How much of it will find space whatever others do, in bytes; 0: nothing is promised.
    pub reserved_bytes: u64,
    /// When it was created, in seconds since the epoch.
    pub created_s: u64,
}

/// A volume shown to hosts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ExportRecord {
    /// Its identity.
    pub id: ExportId,
    /// What it shows.
    pub volume: VolumeId,
    /// The NVMe qualified name of its subsystem.
    pub nqn: String,
    /// The NQNs of the hosts that may connect.
    pub hosts: Vec<String>,
    /// Whether any host may connect, whatever `hosts` says.
    pub any_host: bool,
    /// When it was created, in seconds since the epoch.
    pub created_s: u64,
    /// How it is reached.
    pub frontend: Frontend,
    /// Where its socket is, of a machine's; none: beneath the runtime folder.
    pub socket: Option<String>,
    /// To whom the socket belongs: user and group ids.
    pub socket_owner: SocketOwner,
    /// Whether others that say the same may show the volume too.
    pub shared: bool,
}

/// To whom a socket belongs, by numbers; `None`: to the daemon's user or group.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SocketOwner {
    /// The user.
    pub user: Option<u32>,
    /// The group.
    pub group: Option<u32>,
}

/// An export to be made.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct NewExport {
    /// The NQNs of the hosts that may connect; of a machine's none, and not any.
    pub hosts: Vec<String>,
    /// Whether any host may.
    pub any_host: bool,
    /// How it is reached.
    pub frontend: Frontend,
    /// Where its socket is, of a machine's.
    pub socket: Option<String>,
    /// To whom the socket belongs.
    pub socket_owner: SocketOwner,
    /// Whether others that say the same may show the volume too.
    pub shared: bool,
    /// The node's name, for the NQN; without one the pool's UUID names the node.
    pub node: Option<String>,
    /// Whoever uses it only reads, so it may be beside others that are not shared. Not kept.
    pub only_reads: bool,
}

/// An export of the network's that shares with nobody, as it is stored: versions of Forebay that know no
/// other read it.
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
    /// As it is stored, if it is one of these.
    pub(crate) fn plain(&self) -> Option<PlainExport> {
        let is_plain = self.frontend == Frontend::NvmeTcp && !self.shared;
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
            frontend: Frontend::NvmeTcp,
            socket: None,
            socket_owner: SocketOwner::default(),
            shared: false,
        }
    }
}

/// A port: where hosts connect, and how they should use it.
pub type PortRecord = PortConfig;

/// What hosts have reserved of a volume.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct HostReservations {
    /// Who has registered, and who holds what.
    pub state: Reservations,
    /// The newest commands that changed it, oldest first: who asks for one again is told the same.
    pub recent: Vec<ReserveToken>,
}
