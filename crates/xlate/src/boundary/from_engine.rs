//! What the engine says to the daemon.
//!
//! **Design.** Plain enums; a new daemon is told first what the engine holds ([`Held`]), and each fault, release and commit
//! that is unanswered is repeated to it. **Not here:** the daemon's side of the language ([`super::message`]).

use super::parts::*;
use crate::types::{DeviceIndex, ExtentRange, VolumeId};
use serde::{Deserialize, Serialize};

/// What a dead engine was working on when it crashed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Blamed {
    /// A queue's command, or its bytes when there is no command yet.
    Queue {
        /// Its index in the state region.
        queue: u32,
        /// The command's slot.
        slot: Option<u16>,
    },
    /// A machine's command, or what its client said or has in its rings.
    Machine {
        /// Whose.
        export: ExportId,
        /// The command: its frontend's number for it.
        slot: Option<u16>,
    },
    /// A connection that had said nothing of NVMe yet.
    Newcomer {
        /// Its number.
        socket: u64,
    },
}

/// Why a fault failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FaultFailure {
    /// The pool is full: Capacity Exceeded.
    NoSpace,
    /// The owner can't answer (its catalog failed): Internal Error.
    Internal,
    /// It lies on a device that is missing or failed: Unrecovered Read Error or Write Fault.
    Device,
    /// Too much is asked at once: Command Interrupted, which the host may retry.
    Busy,
}

/// What the engine holds, told to a new daemon one by one.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Held {
    /// A device, and whether its fence is passed.
    Device(DeviceConfig, bool),
    /// A volume.
    Volume(VolumeConfig),
    /// An export.
    Export(ExportConfig),
    /// A listener. Descriptor: its socket.
    Listener(String),
    /// A revoke that is not yet acknowledged.
    Revoke(u64),
    /// A job that is not yet done.
    Job(u64, Job),
    /// A connection. Descriptor: its socket.
    Socket(u64),
    /// A machine's listener. Descriptor: its socket.
    MachineListener(ExportId),
    /// A machine's client. Descriptors: its socket and its machine file.
    Machine(u64, ExportId),
    /// Deposits of the client named last. Descriptors: as many, in this order.
    Deposits(Vec<u32>),
    /// The memory that the state region's records refer to. Descriptor: its file.
    Memory,
}

/// From the engine to the daemon.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FromEngine {
    /// The answer to `Hello`. Descriptors: the state region; then the grant table deposited earlier,
    /// if there is one. Every [`Held`] follows, then `HeldEnd`.
    Welcome {
        /// [`BOUNDARY_VERSION`](super::message::BOUNDARY_VERSION).
        version: u32,
        /// The engine.
        engine_pid: u32,
        /// Its generation.
        generation: u64,
        /// The pool that it was first told; all zeros when none.
        pool: [u8; 16],
    },
    /// One thing that the engine holds.
    Held(Held),
    /// That was all.
    HeldEnd,
    /// A connection was accepted, and is the daemon's to keep too. Descriptor: its socket.
    Socket {
        /// Its number: the generation that accepted it << 32 | a counter.
        socket: u64,
    },
    /// A machine's client was accepted, and is the daemon's to keep too. Descriptors: its socket and its
    /// machine file.
    Machine {
        /// Its number, among those of all sockets.
        socket: u64,
        /// Whose client it is.
        export: ExportId,
    },
    /// Descriptors that a client sent, in a message that is not acted on before `Deposited`. Descriptors: as
    /// many, in this order. Repeated to a new daemon, among what is held.
    Deposits {
        /// Which client's.
        socket: u64,
        /// Their numbers, rising; at most [`MAX_DESCRIPTORS`](super::socket::MAX_DESCRIPTORS).
        numbers: Vec<u32>,
    },
    /// These deposits are used no more.
    Withdrawn {
        /// Which client's.
        socket: u64,
        /// Their numbers.
        numbers: Vec<u32>,
    },
    /// A machine's client is gone, for people; `SocketGone` says so too.
    MachineLeft {
        /// Whose client it was.
        export: ExportId,
        /// Why.
        why: String,
    },
    /// A connection has ended, or a machine's client with its deposits.
    SocketGone {
        /// Its number.
        socket: u64,
    },
    /// What the dead engine left is converted; nothing of it is acted on yet.
    Converted {
        /// From `TakeOver`.
        request: u64,
        /// Queues that go on.
        queues: u32,
        /// Their commands.
        commands: u32,
        /// Machines' clients that go on.
        machines: u32,
        /// Connections that can't go on: why, and how many for that reason.
        closed: Vec<(String, u32)>,
    },
    /// What the dead engine left can't be read; its hosts must connect again.
    Refused {
        /// From `TakeOver`.
        request: u64,
        /// Why, for people.
        error: String,
    },
    /// A request is carried out, or why not.
    Done {
        /// From the request.
        request: u64,
        /// What went wrong, for people.
        error: Option<String>,
    },
    /// The device's fence is passed: it is served.
    DeviceReady {
        /// Which.
        device: DeviceIndex,
    },
    /// The device can't be used (its fence timed out or its lock is another's).
    DeviceFailed {
        /// Which.
        device: DeviceIndex,
        /// Why.
        error: String,
    },
    /// Where do these extents lie? Each is asked once.
    Faults {
        /// At most [`MAX_BATCH`](super::message::MAX_BATCH).
        faults: Vec<FaultAsk>,
    },
    /// A FLUSH or FUA waits: commit the mappings up to this sequence. The devices are flushed.
    CommitWanted {
        /// Whose.
        volume: VolumeId,
        /// Up to which.
        sequence: u64,
    },
    /// A host changes a volume's reservations. Repeated to a new daemon until it is answered.
    Reserve(ReserveAsk),
    /// What `SetExport` or `RemoveExport` has taken from hosts is taken: follows the request's `Done`
    /// when their connections are shut and their commands have ended, but for those at devices.
    ExportSettled {
        /// From the request.
        request: u64,
        /// Their commands that are still at devices.
        at_devices: u32,
    },
    /// A tenant deallocates these extents.
    Release {
        /// Returned in `ReleaseDone` or `ReleaseFailed`.
        release: u64,
        /// Whose.
        volume: VolumeId,
        /// Its logical extents.
        range: ExtentRange,
    },
    /// Nothing uses the revoked grants any more.
    RevokeDone {
        /// From `Revoke`.
        revoke: u64,
    },
    /// These extents had a place ahead, and have none any more: nothing was written there, and nothing
    /// will be.
    TookBack {
        /// From `TakeBack`.
        revoke: u64,
        /// Runs, in order.
        taken: Vec<ExtentRange>,
    },
    /// So many were ahead when this was said; each may have been claimed since.
    AheadCounted {
        /// From `CountAhead`.
        count: u64,
        /// How many.
        ahead: u64,
    },
    /// The deallocation that the revoke was for has ended; nothing was revoked.
    RevokeRefused {
        /// From `Revoke`.
        revoke: u64,
    },
    /// The internal lane finished.
    JobDone {
        /// From `Job`.
        job: u64,
        /// The error number, if it failed.
        errno: Option<i32>,
    },
    /// Hosts were not let in (at most one of these a second), or a machine was refused something.
    HostRefused {
        /// The newest's name; empty: a machine, which has none.
        host: String,
        /// The subsystem that it asked for; of a machine, its export's number.
        subsystem: String,
        /// Why, for people.
        why: String,
        /// How many there were since the last of these messages.
        count: u32,
    },
    /// Something that people should know.
    Notice {
        /// The text.
        text: String,
    },
}
