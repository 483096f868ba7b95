//! What happened, as the API shows it.
//!
//! Purpose: the answer of `GET /v1/events`, and the counters of take-overs.
//! Design: plain data; times are nanoseconds and say so. Numbers of events rise, over restarts of the
//! daemon too, so a reader asks for what came after the last one that it has.
//! Not here: gathering.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What kind of thing happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A daemon has begun to serve; what happened before it is in the logs.
    DaemonStarted,
    /// The daemon before this one died, or was killed.
    DaemonDied,
    /// An engine died.
    EngineDied,
    /// An engine was ended, as was asked for, so that another one of the installed program goes on.
    EngineReplaced,
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
    /// An export was made.
    ExportCreated,
    /// Who may connect to an export was changed.
    ExportChanged,
    /// An export was ended.
    ExportDeleted,
    /// How hosts should use a port was changed.
    PortChanged,
    /// A host took other hosts' reservation or registrations of a volume away.
    ReservationPreempted,
    /// A host has connected, or several have.
    HostConnected,
    /// A host has disconnected, or several have.
    HostDisconnected,
    /// A host was not let in, or several were not.
    HostRefused,
    /// The pool, or its catalog, has less space left than an operator wants, or has enough again.
    PoolSpace,
    /// A device gives errors, hangs, or can't be used.
    DeviceFailed,
    /// A device can be used again, without errors.
    DeviceReturned,
    /// Something else that an operator should know.
    Warning,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number. They rise by one, and go on higher when the daemon is started again.
    pub sequence: u64,
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
    /// The device's index, if it is about one.
    pub device: Option<u8>,
    /// The host (NQN, or identifier), if it is about one.
    pub host: Option<String>,
    /// How many, of what comes in numbers.
    pub count: Option<u64>,
    /// Of a take-over: from the engine's death as the daemon saw it until its successor acted.
    pub pause_ns: Option<u64>,
    /// Of a fence: which device, and how long after the death.
    pub fence: Option<DeviceFence>,
    /// Of a take-over: connections that were closed.
    pub connections_closed: Vec<ClosedConnections>,
}

/// Answer of `GET /v1/events`: what happened after the event that was asked from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Oldest first.
    pub events: Vec<Event>,
    /// How many events of this daemon's the reader has not seen that are not kept any more, or were too many to keep.
    pub missed: u64,
    /// What to ask from next: the number of the newest event.
    pub newest: u64,
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
    /// How many engines have died.
    pub deaths: u64,
    /// How many there were.
    pub takeovers: u64,
    /// The last one's pause: from the engine's death as the daemon saw it until its successor acted.
    pub last_pause_ns: Option<u64>,
    /// Connections that they closed.
    pub connections_closed: Vec<ClosedConnections>,
    /// The last fence of each device.
    pub last_fences: Vec<DeviceFence>,
}
