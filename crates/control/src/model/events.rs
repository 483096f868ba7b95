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
    /// A host was not let in, or several were not; or a virtual machine was refused something.
    HostRefused,
    /// The pool, or its catalog, has less space left than an operator wants, or has enough again.
    PoolSpace,
    /// A device gives errors, hangs, or can't be used.
    DeviceFailed,
    /// A device can be used again, without errors.
    DeviceReturned,
    /// A part of the configuration can't be served: an address, the log, a CPU. It is tried again.
    PartMissing,
    /// Such a part is served now.
    PartReturned,
    /// Somebody changed something through the API: `audit` says who, and what.
    Changed,
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
    /// The same time in UTC, as in RFC 3339.
    #[serde(default)]
    pub at: String,
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
    /// Of a change through the API: who changed what.
    #[serde(default)]
    pub audit: Option<Audit>,
}

impl Event {
    /// An event with its number and time, milliseconds since the Unix epoch, that is about nothing yet.
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
    /// The caller's user id, as the kernel says.
    pub uid: u32,
    /// Its name in /etc/passwd, or the number.
    pub user: String,
    /// Who had logged in, if that was another user (`sudo`, `su`).
    pub login: Option<String>,
    /// The caller's process.
    pub pid: Option<i32>,
    /// That process's program.
    pub program: String,
    /// The kind of change, e.g. `delete a volume`.
    pub action: String,
    /// The request's method, path and query.
    pub request: String,
    /// Whether something was destroyed or cut off, or could have been.
    pub destructive: bool,
    /// `done`, or why it is not known whether it was.
    pub result: String,
    /// The object as it was; if it is there before and after, only what differs. Nothing if there was none.
    #[schema(value_type = Option<Object>)]
    pub before: Option<serde_json::Value>,
    /// The same afterwards.
    #[schema(value_type = Option<Object>)]
    pub after: Option<serde_json::Value>,
}

impl Audit {
    /// Who made the change, e.g. `root (ann), forebay[4711]`.
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
    // Counted in years that begin in March, so that a leap day is a year's last; from 0000-03-01 on.
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
