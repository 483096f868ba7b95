//! What concerns several hosts at one volume, and several paths of one host.
//!
//! Purpose: the API's words for NVMe reservations and for ports.
//! Design: as in `model`, which shows them as its own.
//! Not here: their rules (`forebay_nvme::reservation`), their keeping (the owner).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a reservation allows whom (NVMe reservation types).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReservationKind {
    /// Only the holder writes.
    WriteExclusive,
    /// Only the holder reads and writes.
    ExclusiveAccess,
    /// Only registered hosts write.
    WriteExclusiveRegistrantsOnly,
    /// Only registered hosts read and write.
    ExclusiveAccessRegistrantsOnly,
    /// Only registered hosts write, and each of them holds it.
    WriteExclusiveAllRegistrants,
    /// Only registered hosts read and write, and each of them holds it.
    ExclusiveAccessAllRegistrants,
}

/// A volume's NVMe reservations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeReservation {
    /// What is reserved, if the volume is.
    pub kind: Option<ReservationKind>,
    /// How often registrations have changed.
    pub generation: u32,
    /// Whether it outlives a restart of this machine.
    pub persists: bool,
    /// Who has registered.
    pub registrants: Vec<ReservationRegistrant>,
}

/// A host that has registered with a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReservationRegistrant {
    /// Its Host Identifier, as a UUID.
    pub host_id: String,
    /// Its key, in hexadecimal.
    pub key: String,
    /// Whether it holds the reservation.
    pub is_holder: bool,
}

/// How hosts should use the paths through a port: NVMe's asymmetric namespace access (ANA).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnaState {
    /// As any other.
    #[default]
    Optimized,
    /// When there is no better one.
    NonOptimized,
    /// Not at all, until this is taken back: for maintenance of what lies on the way there.
    Inaccessible,
}

/// A port: an address at which hosts connect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Port {
    /// The address, e.g. `127.0.0.1:4420`.
    pub address: String,
    /// Its number, as hosts see it in the discovery log.
    pub id: u16,
    /// How hosts should use it.
    pub ana: AnaState,
    /// How often that has changed.
    pub changes: u64,
}

/// Body of `PATCH /v1/ports/{address}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PortUpdate {
    /// How hosts should use it.
    pub ana: AnaState,
    /// Make it inaccessible even if no other port is accessible then: hosts wait until one is.
    #[serde(default)]
    pub let_hosts_wait: bool,
}
