//! What happened to engines, as the API shows it.
//!
//! Purpose: the answer of `GET /v1/events`, and the counters of take-overs.
//! Design: plain data; times are nanoseconds and say so.
//! Not here: gathering.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What kind of thing happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// An engine died.
    EngineDied,
    /// A reactor took no turn for too long; the engine is killed.
    EngineStuck,
    /// A successor goes on with a dead engine's connections and commands.
    TookOver,
    /// A successor could not, so hosts have to connect again.
    NotTakenOver,
    /// A dead engine's last request on a device has ended.
    FencePassed,
    /// An export kills engines: it is not served any more.
    ExportQuarantined,
    /// A quarantined export is served again.
    ExportResumed,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// When, milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// What kind.
    pub kind: EventKind,
    /// Engine generation that it is about.
    pub generation: u64,
    /// In a sentence.
    pub message: String,
    /// The export (tenant/volume), if it is about one.
    pub export: Option<String>,
    /// Of a take-over: from the engine's death as the daemon saw it until its successor acted.
    pub pause_ns: Option<u64>,
    /// Of a fence: which device, and how long after the death.
    pub fence: Option<DeviceFence>,
    /// Of a take-over: connections that were closed.
    pub connections_closed: Vec<ClosedConnections>,
}

/// How long a dead engine's requests outlived it on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceFence {
    /// The device's index.
    pub device: u8,
    /// From the death as the daemon saw it until the successor had the device to itself.
    pub fence_ns: u64,
}

/// Connections that a take-over closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClosedConnections {
    /// Why.
    pub reason: String,
    /// How many.
    pub count: u64,
}

/// What take-overs cost, since the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TakeoverStats {
    /// How many there were.
    pub takeovers: u64,
    /// The last one's pause: from the engine's death as the daemon saw it until its successor acted.
    pub last_pause_ns: Option<u64>,
    /// Connections that they closed.
    pub connections_closed: Vec<ClosedConnections>,
    /// The last fence of each device.
    pub last_fences: Vec<DeviceFence>,
}
