//! Messages from the engine to the daemon.
//!
//! A new daemon first gets every [`Held`], then the unanswered faults, releases and commits again.

use super::parts::*;
use crate::types::{DeviceIndex, ExtentRange, VolumeId};
use serde::{Deserialize, Serialize};

/// A dead engine's work when it crashed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Blamed {
    /// A queue's command, or its bytes before there is a command.
    Queue {
        /// Its index in the state region.
        queue: u32,
        /// The command's slot.
        slot: Option<u16>,
    },
    /// A VM's command, or its messages or rings.
    Vm {
        /// The export.
        export: ExportId,
        /// The frontend's number of the command.
        slot: Option<u16>,
    },
    /// A connection in handshake.
    Handshake {
        /// Its number.
        socket: u64,
    },
}

/// Why a fault failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FaultFailure {
    /// The pool is full: Capacity Exceeded.
    NoSpace,
    /// The owner's catalog failed: Internal Error.
    Internal,
    /// Device missing or failed: Unrecovered Read Error or Write Fault.
    Device,
    /// Too many faults: Command Interrupted; the host may retry.
    Busy,
}

/// Something that the engine holds, for a new daemon.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Held {
    /// A device, and whether its fence has passed.
    Device(DeviceConfig, bool),
    /// A volume.
    Volume(VolumeConfig),
    /// An export.
    Export(ExportConfig),
    /// A listener. Descriptor: its socket.
    Listener(String),
    /// An unacknowledged revoke.
    Revoke(u64),
    /// An open job.
    Job(u64, Job),
    /// A connection. Descriptor: its socket.
    Socket(u64),
    /// A VM's listener. Descriptor: its socket.
    VmListener(ExportId),
    /// A VM. Descriptors: its socket and its VM file.
    Vm(u64, ExportId),
    /// Deposits of the last VM. Descriptors: one each, in order.
    Deposits(Vec<u32>),
    /// The memory that the state region refers to. Descriptor: its file.
    Memory,
}

/// From the engine to the daemon.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FromEngine {
    /// Answers `Hello`; every [`Held`] and `HeldEnd` follow. Descriptors: the state region, and a
    /// deposited grant table.
    Welcome {
        /// [`BOUNDARY_VERSION`](super::message::BOUNDARY_VERSION).
        version: u32,
        /// The engine's process.
        engine_pid: u32,
        /// Its generation.
        generation: u64,
        /// The first pool that it was given; zeros for none.
        pool: [u8; 16],
        /// Its program's [`version`](super::version()), for people.
        program: String,
    },
    /// Something that the engine holds.
    Held(Held),
    /// The end of the `Held` messages.
    HeldEnd,
    /// A connection was accepted. Descriptor: its socket, which the daemon keeps.
    Socket {
        /// The accepting generation << 32 | a counter.
        socket: u64,
    },
    /// A VM attached. Descriptors, which the daemon keeps: its socket and its VM file.
    Vm {
        /// Its number, among those of all sockets.
        socket: u64,
        /// The export.
        export: ExportId,
    },
    /// Descriptors from a VM's message, which waits for `Deposited`; one each, in order. Repeated
    /// to a new daemon.
    Deposits {
        /// The VM's socket number.
        socket: u64,
        /// Ascending numbers, at most [`MAX_DESCRIPTORS`](super::socket::MAX_DESCRIPTORS).
        numbers: Vec<u32>,
    },
    /// These deposits are no longer used.
    Withdrawn {
        /// The VM's socket number.
        socket: u64,
        /// Their numbers.
        numbers: Vec<u32>,
    },
    /// A VM detached, as an event; `SocketGone` comes too.
    VmDetached {
        /// The export.
        export: ExportId,
        /// The reason.
        why: String,
    },
    /// A connection or a VM with its deposits is gone.
    SocketGone {
        /// Its number.
        socket: u64,
    },
    /// The dead engine's state is converted, but not acted on.
    Converted {
        /// From `TakeOver`.
        request: u64,
        /// Queues that continue.
        queues: u32,
        /// Their commands.
        commands: u32,
        /// VMs that continue.
        vms: u32,
        /// Connections that are lost: reason and count.
        closed: Vec<(String, u32)>,
    },
    /// The dead engine's state is unreadable; hosts must reconnect.
    Refused {
        /// From `TakeOver`.
        request: u64,
        /// The reason, for people.
        error: String,
    },
    /// A request succeeded or failed.
    Done {
        /// From the request.
        request: u64,
        /// The error, for people.
        error: Option<String>,
    },
    /// The device's fence has passed: it is served.
    DeviceReady {
        /// The device.
        device: DeviceIndex,
    },
    /// The device's fence timed out, or another process holds its lock.
    DeviceFailed {
        /// The device.
        device: DeviceIndex,
        /// The reason.
        error: String,
    },
    /// A Ceph client is connected. It writes nothing before the daemon has noted its address.
    Client {
        /// The device.
        device: DeviceIndex,
        /// Its address, as a blocklist names it.
        address: String,
    },
    /// A volume's image is open, or its size may have changed.
    ImageOpened {
        /// The volume.
        volume: VolumeId,
        /// The image's size.
        size_bytes: u64,
    },
    /// A volume's image can't be opened, or not be written. `SetVolume` tries again.
    ImageFailed {
        /// The volume.
        volume: VolumeId,
        /// The reason, for people.
        error: String,
    },
    /// Translations wanted. Each extent is asked once.
    Faults {
        /// At most [`MAX_BATCH`](super::message::MAX_BATCH).
        faults: Vec<FaultAsk>,
    },
    /// A FLUSH or FUA waits for a commit up to this sequence; its devices are flushed.
    CommitWanted {
        /// The volume.
        volume: VolumeId,
        /// The last sequence.
        sequence: u64,
    },
    /// A host changes reservations. Repeated to a new daemon until answered.
    Reserve(ReserveAsk),
    /// Follows `Done` of `SetExport` or `RemoveExport`: removed hosts' connections are closed and
    /// their commands ended, except at devices.
    ExportSettled {
        /// From the request.
        request: u64,
        /// Commands still at devices.
        at_devices: u32,
    },
    /// A host or VM deallocates extents.
    Release {
        /// Returned in `ReleaseDone` or `ReleaseFailed`.
        release: u64,
        /// The volume.
        volume: VolumeId,
        /// Its logical extents.
        range: ExtentRange,
    },
    /// The revoked grants are no longer used.
    RevokeDone {
        /// From `Revoke`.
        revoke: u64,
    },
    /// These unwritten preallocated extents are given back.
    TookBack {
        /// From `TakeBack`.
        revoke: u64,
        /// Runs, in order.
        taken: Vec<ExtentRange>,
    },
    /// The number of preallocated extents now; any may be claimed since.
    PreallocatedCounted {
        /// From `CountPreallocated`.
        count: u64,
        /// The number.
        preallocated: u64,
    },
    /// The revoke's deallocation has ended; nothing was revoked.
    RevokeRefused {
        /// From `Revoke`.
        revoke: u64,
    },
    /// The internal lane ended a job.
    JobDone {
        /// From `Job`.
        job: u64,
        /// The errno of a failure.
        errno: Option<i32>,
    },
    /// Hosts were rejected (sent at most once a second), or a VM's request refused.
    HostRefused {
        /// The last host's name; empty for a VM.
        host: String,
        /// The requested subsystem; for a VM, its export's number.
        subsystem: String,
        /// The reason, for people.
        why: String,
        /// Rejections since the last such message.
        count: u32,
    },
    /// An event for the operator.
    Notice {
        /// The text.
        text: String,
    },
}
