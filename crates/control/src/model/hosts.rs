//! NVMe reservations and ports, as the API shows them. The rules are in
//! `forebay_nvme::reservation`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The type of an NVMe reservation.
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
    /// The reservation's type, if there is one.
    pub kind: Option<ReservationKind>,
    /// How often registrations have changed.
    pub generation: u32,
    /// Whether it survives a restart of this node.
    pub persists: bool,
    /// The registered hosts.
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

/// The ANA state (asymmetric namespace access) of the paths through a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnaState {
    /// Hosts use it.
    #[default]
    Optimized,
    /// Hosts use it if there is no optimized path.
    NonOptimized,
    /// Hosts don't use it until this is changed, e.g. for maintenance of the network.
    Inaccessible,
}

/// A port: an address at which hosts connect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Port {
    /// The address, e.g. `127.0.0.1:4420`.
    pub address: String,
    /// Its number, as hosts see it in the discovery log.
    pub id: u16,
    /// Its ANA state.
    pub ana: AnaState,
    /// How often the state has changed.
    pub changes: u64,
}

/// Body of `PATCH /v1/ports/{address}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PortUpdate {
    /// The ANA state.
    pub ana: AnaState,
    /// Make it inaccessible even if no other port is accessible: hosts wait until one is.
    #[serde(default)]
    pub let_hosts_wait: bool,
}
