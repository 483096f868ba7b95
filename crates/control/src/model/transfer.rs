//! Transfers of images into and out of volumes, as the API shows them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Volume;

/// The prefix of transfer hosts' NQNs; other hosts may not use it.
pub const TRANSFER_HOST_PREFIX: &str = "nqn.2026-01.io.forebay:transfer:";

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TransferKind {
    /// Into the volume, which no other host may use meanwhile.
    Import,
    /// Out of the volume; no import may run meanwhile.
    Export,
}

/// Body of `PUT /v1/tenants/{tenant}/volumes/{volume}/transfer`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TransferPut {
    /// The NQN of the transfer's host: `nqn.2026-01.io.forebay:transfer:` and a unique name.
    pub host: String,
    /// The direction.
    pub kind: TransferKind,
    /// Import over existing data of the volume.
    #[serde(default)]
    pub overwrite: bool,
    /// Renew a running transfer.
    #[serde(default)]
    pub renew: bool,
}

/// Answer to `PUT /v1/tenants/{tenant}/volumes/{volume}/transfer`: how the host connects to the
/// volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Transfer {
    /// The volume.
    pub volume: Volume,
    /// The subsystem to connect to.
    pub nqn: String,
    /// Its addresses, e.g. `127.0.0.1:4420`.
    pub addresses: Vec<String>,
    /// Hosts and VMs that use the volume meanwhile, in words.
    pub in_use_by: Vec<String>,
}

/// Answer to `GET /v1/tenants/{tenant}/volumes/{volume}/extents`: where the volume may hold data.
/// Elsewhere it reads as zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeExtents {
    /// In order, with gaps between them.
    pub extents: Vec<VolumeExtent>,
    /// Where to continue; null at the end.
    pub next_bytes: Option<u64>,
}

/// A range of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeExtent {
    /// Its first byte.
    pub offset_bytes: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
}

/// The query of `GET /v1/tenants/{tenant}/volumes/{volume}/extents`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ExtentsFrom {
    /// The first byte of interest.
    #[serde(default)]
    pub from_bytes: u64,
}

/// The query of `DELETE /v1/tenants/{tenant}/volumes/{volume}/transfer`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct TransferEnd {
    /// The NQN with which the transfer was announced.
    pub host: String,
}
