//! Events and take-over counters, as the API shows them. Times are in nanoseconds unless their
//! names say otherwise. Event numbers rise, also over restarts of the daemon.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A daemon has begun to serve; earlier events are in the logs.
    DaemonStarted,
    /// The previous daemon died or was killed.
    DaemonDied,
    /// An engine died.
    EngineDied,
    /// An engine was ended on request, so that one of the installed program takes over.
    EngineReplaced,
    /// The program in firmware slot 2 failed or can't be used; slot 1's takes its place.
    FirmwareFellBack,
    /// A reactor took no turn for too long; the engine is killed.
    EngineStuck,
    /// A successor continues a dead engine's connections and commands.
    TookOver,
    /// A successor could not, so hosts must connect again.
    NotTakenOver,
    /// A dead engine's last request on a device has ended.
    FencePassed,
    /// An export that kills engines is no longer served.
    ExportQuarantined,
    /// A quarantined export is served again.
    ExportResumed,
    /// An export was created.
    ExportCreated,
    /// The hosts that may connect to an export were changed.
    ExportChanged,
    /// An export was deleted.
    ExportDeleted,
    /// A port's ANA state was changed.
    PortChanged,
    /// A host preempted other hosts' reservation or registrations of a volume.
    ReservationPreempted,
    /// One or more hosts have connected.
    HostConnected,
    /// One or more hosts have disconnected.
    HostDisconnected,
    /// One or more hosts were refused, or a request of a VM was.
    HostRefused,
    /// The pool or its catalog has less space left than configured, or has enough again.
    PoolSpace,
    /// A device gives errors, hangs, or can't be used.
    DeviceFailed,
    /// A device can be used again, without errors.
    DeviceReturned,
    /// A part of the configuration can't be served (an address, the log, a CPU). It is retried.
    PartMissing,
    /// Such a part is served now.
    PartReturned,
    /// A change through the API; `audit` has the user and the change.
    Changed,
    /// Another warning for the operator.
    Warning,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// The event's number. Numbers rise by one; after a restart of the daemon they continue above
    /// the last.
    pub sequence: u64,
    /// Time in milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// The same time in UTC, in RFC 3339 format.
    #[serde(default)]
    pub at: String,
    /// The kind.
    pub kind: EventKind,
    /// The engine generation concerned.
    pub generation: u64,
    /// The event in a sentence.
    pub message: String,
    /// The export concerned (tenant/volume), if any.
    pub export: Option<String>,
    /// The index of the device concerned, if any.
    pub device: Option<u8>,
    /// The host concerned (NQN or identifier), if any.
    pub host: Option<String>,
    /// The number of occurrences, if the event stands for several.
    pub count: Option<u64>,
    /// For a take-over: from the detection of the engine's death until the successor acted.
    pub pause_ns: Option<u64>,
    /// For a fence: the device, and the time after the death.
    pub fence: Option<DeviceFence>,
    /// For a take-over: closed connections.
    pub connections_closed: Vec<ClosedConnections>,
    /// For a change through the API: the user and the change.
    #[serde(default)]
    pub audit: Option<Audit>,
}

impl Event {
    /// An event with its number and its time (milliseconds since the Unix epoch); other fields are
    /// empty.
    pub(crate) fn new((sequence, at_unix_ms): (u64, u64), kind: EventKind) -> Self {
        Self {
            sequence,
            at_unix_ms,
            at: utc(at_unix_ms),
            kind,
            generation: 0,
            message: String::new(),
            export: None,
            device: None,
            host: None,
            count: None,
            pause_ns: None,
            fence: None,
            connections_closed: Vec::new(),
            audit: None,
        }
    }
}

/// A change through the API: the user and the difference.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Audit {
    /// The caller's user id, from the kernel.
    pub uid: u32,
    /// The user's name in /etc/passwd, or the number.
    pub user: String,
    /// The login user, if it is another one (`sudo`, `su`).
    pub login: Option<String>,
    /// The caller's process.
    pub pid: Option<i32>,
    /// That process's program.
    pub program: String,
    /// The kind of change, e.g. `delete a volume`.
    pub action: String,
    /// The request's method, path and query.
    pub request: String,
    /// Whether the change destroyed data or disconnected hosts, or could have.
    pub destructive: bool,
    /// `done`, or why the outcome is unknown.
    pub result: String,
    /// The object before the change; if it exists before and after, only the differences. Null if
    /// there was none.
    #[schema(value_type = Option<Object>)]
    pub before: Option<serde_json::Value>,
    /// The object after the change, likewise.
    #[schema(value_type = Option<Object>)]
    pub after: Option<serde_json::Value>,
}

impl Audit {
    /// The user in a short form, e.g. `root (ann), forebay[4711]`.
    #[must_use]
    pub fn who(&self) -> String {
        let login = self.login.as_ref();
        let login = login.map_or_else(String::new, |login| format!(" ({login})"));
        let pid = self
            .pid
            .map_or_else(String::new, |pid| format!(", {}[{pid}]", self.program));
        format!("{}{login}{pid}", self.user)
    }
}

/// `2026-11-22T07:05:00.042Z`.
#[must_use]
pub fn utc(unix_ms: u64) -> String {
    let (days, ms) = (unix_ms / 86_400_000, unix_ms % 86_400_000);
    // Counts years from March, from 0000-03-01 on, so that a leap day ends its year.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let year = era * 400 + year + u64::from(month >= 10);
    let month = if month < 10 { month + 3 } else { month - 9 };
    let (hour, minute) = (ms / 3_600_000, ms / 60_000 % 60);
    let (second, ms) = (ms / 1000 % 60, ms % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// Answer of `GET /v1/events`: the events after the requested number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Oldest first.
    pub events: Vec<Event>,
    /// How many of this daemon's later events are missing: no longer kept, or above the rate limit.
    pub missed: u64,
    /// The number of the newest event, for the next request.
    pub newest: u64,
}

/// How long a dead engine's requests remained on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceFence {
    /// The device's index.
    pub device: u8,
    /// From the detection of the death until the successor had the device to itself.
    pub fence_ns: u64,
}

/// Connections that a take-over closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClosedConnections {
    /// The reason.
    pub reason: String,
    /// The number of connections.
    pub count: u64,
}

/// Costs of take-overs since the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TakeoverStats {
    /// Deaths of engines.
    pub deaths: u64,
    /// Take-overs.
    pub takeovers: u64,
    /// The last pause: from the detection of the engine's death until the successor acted.
    pub last_pause_ns: Option<u64>,
    /// Connections that take-overs closed.
    pub connections_closed: Vec<ClosedConnections>,
    /// The last fence of each device.
    pub last_fences: Vec<DeviceFence>,
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn times_are_written_as_everybody_writes_them() {
        for (unix_s, text) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_399, "2000-02-28T23:59:59.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (1_709_251_199, "2024-02-29T23:59:59.007Z"),
            (1_795_331_100, "2026-11-22T07:05:00.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            assert_eq!(utc(unix_s * 1000 + 7), text);
        }
    }
}
