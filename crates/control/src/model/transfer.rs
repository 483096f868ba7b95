//! Images that go into volumes and come out of them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Volume;

/// What the NQNs of hosts that move images begin with; no other host's does.
pub const TRANSFER_HOST_PREFIX: &str = "nqn.2026-01.io.forebay:transfer:";

/// Which way an image goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TransferKind {
    /// Into the volume, which no other host may use meanwhile.
    Import,
    /// Out of it: no image may go in meanwhile.
    Export,
}

/// Body of `PUT /v1/tenants/{tenant}/volumes/{volume}/transfer`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TransferPut {
    /// The NQN of the host that will move the image: `nqn.2026-01.io.forebay:transfer:` and a name of its own.
    pub host: String,
    /// Which way.
    pub kind: TransferKind,
    /// Import over what the volume holds.
    #[serde(default)]
    pub overwrite: bool,
    /// The transfer is under way already, and goes on.
    #[serde(default)]
    pub renew: bool,
}

/// Answer to `PUT /v1/tenants/{tenant}/volumes/{volume}/transfer`: how the host gets to the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Transfer {
    /// The volume as it is.
    pub volume: Volume,
    /// The subsystem to connect to.
    pub nqn: String,
    /// Where it is, e.g. `127.0.0.1:4420`.
    pub addresses: Vec<String>,
    /// Hosts and virtual machines that use the volume meanwhile, in words.
    pub in_use_by: Vec<String>,
}

/// Answer to `GET /v1/tenants/{tenant}/volumes/{volume}/extents`: where the volume may hold data. Elsewhere it reads as zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeExtents {
    /// In order, apart from one another.
    pub extents: Vec<VolumeExtent>,
    /// Where to go on; null: that is all.
    pub next_bytes: Option<u64>,
}

/// Some of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeExtent {
    /// Its first byte.
    pub offset_bytes: u64,
    /// How many bytes.
    pub len_bytes: u64,
}

/// What `GET /v1/tenants/{tenant}/volumes/{volume}/extents` is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ExtentsFrom {
    /// From which byte on.
    #[serde(default)]
    pub from_bytes: u64,
}

/// What `DELETE /v1/tenants/{tenant}/volumes/{volume}/transfer` is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct TransferEnd {
    /// The NQN that the transfer was announced with.
    pub host: String,
}
