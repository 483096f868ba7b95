//! The messages between daemon and engine.
//!
//! **Design.** Plain enums, encoded by postcard, one a datagram, at most [`MAX_MESSAGE_BYTES`]. Each
//! side checks [`BOUNDARY_VERSION`] in the first message. The daemon's requests carry a number that
//! [`FromEngine::Done`] returns; they are idempotent, so that a new daemon may say them all again.
//! Likewise the engine repeats to a new daemon every fault, release and commit that is unanswered.
//!
//! **A take-over** of a dead engine's connections: after devices, volumes and exports come
//! [`ToEngine::TakeOver`], [`ToEngine::Sockets`] and [`ToEngine::SocketsEnd`]. The successor converts
//! without any effect outside itself and answers [`FromEngine::Converted`] (or `Refused`: what the
//! dead engine left is of no use). [`ToEngine::Resume`] makes it act; listeners follow.
//!
//! **A machine** ([`Frontend::is_machine`]) has one client on a socket of its own, who hands over
//! descriptors of its memory and interrupts. The daemon is given the socket and the machine file
//! ([`FromEngine::Machine`]), and each descriptor ([`FromEngine::Deposits`]) *before* the message that it
//! came with is acted on: so these are acknowledged ([`ToEngine::Deposited`]). A successor gets all of them
//! ([`ToEngine::Machine`], [`ToEngine::Deposits`]) before [`ToEngine::SocketsEnd`].
//!
//! **Not here:** sockets ([`super::socket`]), what messages carry ([`super::parts`]).

pub use super::frontend::{Frontend, MAX_MACHINE_QUEUES};
pub use super::parts::*;
use crate::types::{DeviceIndex, ExtentRange, Rights, VolumeId};
use forebay_nvme::reservation::Reservations;
use serde::{Deserialize, Serialize};

/// The language's version; a side that hears another one says so and hangs up.
pub const BOUNDARY_VERSION: u32 = 9;
/// The longest message in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;
/// The most faults or grants in one message.
pub const MAX_BATCH: usize = 512;
/// The most extents that one [`ToEngine::TakeBack`] or [`ToEngine::CountAhead`] names: every second one
/// may be a run of its own.
pub const MAX_TAKE_BACK: u64 = 4096;

/// From the daemon to the engine.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum ToEngine {
    /// The first message. Descriptor: the grant table, for keeping.
    Hello {
        /// [`BOUNDARY_VERSION`].
        version: u32,
        /// The sender.
        daemon_pid: u32,
        /// The pool that it serves.
        pool: [u8; 16],
    },
    /// Open, fence and serve a device. `Done` comes when it is open; [`FromEngine::DeviceReady`] when
    /// every earlier engine's lock there has fallen.
    SetDevice {
        /// Returned in `Done`.
        request: u64,
        /// Which.
        device: DeviceConfig,
    },
    /// Who holds the pool, and the devices on which the engine keeps the heartbeat. Said before the devices.
    Hold {
        /// The random id of this installation.
        owner: [u8; 16],
        /// This boot.
        boot: [u8; 16],
        /// This machine's name.
        host: String,
        /// The devices whose labels have an owner.
        devices: Vec<DeviceIndex>,
    },
    /// Serve or grow a volume.
    SetVolume {
        /// Returned in `Done`.
        request: u64,
        /// Which.
        volume: VolumeConfig,
    },
    /// Stop serving a volume; its grants are revoked already.
    RemoveVolume {
        /// Returned in `Done`.
        request: u64,
        /// Which.
        volume: VolumeId,
    },
    /// Show a volume, or change who may connect (hosts no longer allowed are disconnected).
    SetExport {
        /// Returned in `Done`.
        request: u64,
        /// Which.
        export: ExportConfig,
        /// The reactor that a new one is to be served by; one that serves its volume already comes first. `None`: any.
        reactor: Option<u32>,
    },
    /// Disconnect an export's hosts and forget it.
    RemoveExport {
        /// Returned in `Done`.
        request: u64,
        /// Which.
        export: ExportId,
    },
    /// How hosts should use a listener's paths. Comes before what a dead engine left, and before the
    /// listener.
    SetPort {
        /// Returned in `Done`.
        request: u64,
        /// Which.
        port: PortConfig,
    },
    /// How queues are spread over reactors from now on, whether or not anything is admitted by a schedule. Until it is told,
    /// as by default.
    SetSpread {
        /// Returned in `Done`.
        request: u64,
        /// How.
        spread: Spread,
    },
    /// How I/O is admitted from now on; `None`: all of it is, at once. Comes before budgets, and again when it changes.
    SetScheduling {
        /// Returned in `Done`.
        request: u64,
        /// How.
        scheduling: Option<Box<Scheduling>>,
    },
    /// What a tenant may use. Comes before its volumes are exported, and again when it changes. `None`: there is no such
    /// tenant any more.
    SetTenantBudget {
        /// Returned in `Done`.
        request: u64,
        /// Whose.
        tenant: TenantId,
        /// How much.
        budget: Option<Budget>,
        /// What it had saved when an engine knew it last: operations, bytes. One that knows it keeps what it has.
        credit: [u64; 2],
        /// Its base comes before those of whom this is not said, where bases come to more than a reactor has.
        guaranteed: bool,
    },
    /// Whose a volume is, and what of the tenant's it may use. Comes after `SetVolume` and before its export, and again
    /// when it changes.
    SetVolumeBudget {
        /// Returned in `Done`.
        request: u64,
        /// Which.
        volume: VolumeId,
        /// Whose.
        tenant: TenantId,
        /// Its part; `None`: an equal part, no limit of its own.
        budget: Option<Budget>,
    },
    /// Who has reserved a volume. Comes before its export, and whenever the daemon changes it.
    SetReservations {
        /// Returned in `Done`.
        request: u64,
        /// Which volume.
        volume: VolumeId,
        /// The whole of it.
        state: Reservations,
    },
    /// A `Reserve` is carried out, durably, or refused. Repeated for a repeated question.
    Reserved {
        /// From `Reserve`.
        token: ReserveToken,
        /// Which volume.
        volume: VolumeId,
        /// What the host is answered: the status field without its phase bit (status code in bits 7:0,
        /// its type in bits 10:8, do not retry in bit 14); 0 is success.
        status: u16,
        /// As it is now.
        state: Reservations,
    },
    /// What hosts see of a volume's space and health. No answer; repeated when it changes.
    VolumeFigures {
        /// Which.
        volume: VolumeId,
        /// What it has written, in bytes (Identify Namespace: NUSE).
        used_bytes: u64,
        /// What its pool has left, in percent (SMART: Available Spare).
        spare_percent: u8,
        /// From which on that is little, in percent (SMART: Available Spare Threshold).
        spare_threshold_percent: u8,
        /// SMART's Critical Warning bits.
        warnings: u8,
        /// What its export has behind it.
        past: Past,
    },
    /// Accept NVMe/TCP connections. Descriptor: the listening socket.
    SetListener {
        /// Returned in `Done`.
        request: u64,
        /// Its address, the key.
        address: String,
    },
    /// Accept a machine's client. Descriptor: the listening socket of its export, which is set.
    SetMachineListener {
        /// Returned in `Done`.
        request: u64,
        /// Whose.
        export: ExportId,
    },
    /// The daemon holds the deposits up to this one, or has no room for some of them.
    Deposited {
        /// Which client's.
        socket: u64,
        /// The last number of the `Deposits` that this answers.
        last: u32,
        /// It holds them.
        kept: bool,
    },
    /// Extents lie here. Answers faults, or comes unasked.
    Grants {
        /// At most [`MAX_BATCH`], in this order.
        grants: Vec<GrantOf>,
    },
    /// Faults can't be answered.
    FaultFailed {
        /// Whose.
        volume: VolumeId,
        /// Its logical extents.
        range: ExtentRange,
        /// Which question: a write that finds no room says nothing about a read.
        write: bool,
        /// Why.
        reason: FaultFailure,
    },
    /// Stop using grants.
    Revoke {
        /// Returned in `RevokeDone`.
        revoke: u64,
        /// Whose.
        volume: VolumeId,
        /// Its logical extents.
        range: ExtentRange,
        /// `Some(Rights::Read)`: only writing is taken away.
        keep: Option<Rights>,
        /// The tenant's deallocation that it carries out. If that has ended meanwhile (its time was
        /// over), the engine refuses, and nothing may change: the tenant may have written since.
        release: Option<u64>,
    },
    /// Give back the places ahead of a range that were never written. Nothing is waited for.
    TakeBack {
        /// Returned in `TookBack`.
        revoke: u64,
        /// Whose.
        volume: VolumeId,
        /// Its logical extents, at most [`MAX_TAKE_BACK`]; behind that nothing is taken.
        range: ExtentRange,
    },
    /// Say how many places of a range are still ahead.
    CountAhead {
        /// Returned in `AheadCounted`.
        count: u64,
        /// Whose.
        volume: VolumeId,
        /// Its logical extents, at most [`MAX_TAKE_BACK`]; behind that nothing is counted.
        range: ExtentRange,
    },
    /// The owner has given a revoke up and quarantined the extents: it is never answered, what it
    /// waited with is free for others. The words stay cleared.
    Abandon {
        /// From `Revoke`.
        revoke: u64,
    },
    /// Every mapping with a commit sequence up to this one is durable.
    Committed {
        /// Whose.
        volume: VolumeId,
        /// Up to which.
        sequence: u64,
    },
    /// A commit that was wanted failed; commands that wait for it fail.
    CommitFailed {
        /// Whose.
        volume: VolumeId,
        /// Up to which.
        sequence: u64,
    },
    /// A tenant's deallocation is carried out: the range reads as zeros.
    ReleaseDone {
        /// From `Release`.
        release: u64,
    },
    /// A tenant's deallocation can't be carried out, and won't be: the range is what it was, and whoever
    /// must have zeros there writes them.
    ReleaseFailed {
        /// From `Release`.
        release: u64,
    },
    /// Work for the internal lane.
    Job {
        /// Returned in `JobDone`.
        job: u64,
        /// What.
        work: Job,
    },
    /// Go on where a dead engine stopped; `Sockets` and `SocketsEnd` follow. Converting has no effect
    /// outside this process. Descriptors: the dead engine's state region and its memory.
    TakeOver {
        /// Returned in `Converted` or `Refused`.
        request: u64,
        /// The dead engine's generation.
        generation: u64,
        /// What it was doing when it crashed or was found stuck; nothing when it was killed.
        blamed: Option<Blamed>,
    },
    /// Connections of the dead engine. Descriptors: as many, in this order.
    Sockets {
        /// At most [`MAX_DESCRIPTORS`](super::socket::MAX_DESCRIPTORS).
        sockets: Vec<u64>,
    },
    /// A client of the dead engine. Descriptors: its socket and its machine file.
    Machine {
        /// The socket's number.
        socket: u64,
        /// Whose client it is.
        export: ExportId,
    },
    /// Deposits of the client named last. Descriptors: as many, in this order.
    Deposits {
        /// At most [`MAX_DESCRIPTORS`](super::socket::MAX_DESCRIPTORS).
        numbers: Vec<u32>,
    },
    /// Those were all: convert.
    SocketsEnd,
    /// From here on the successor's state region is the truth: act.
    Resume {
        /// Returned in `Done`.
        request: u64,
    },
    /// Finish what is in flight, close every connection, and exit.
    Stop,
}

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
        /// [`BOUNDARY_VERSION`].
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
        /// At most [`MAX_BATCH`].
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

/// Encodes a message into a datagram.
///
/// # Errors
/// When it would be longer than [`MAX_MESSAGE_BYTES`].
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, postcard::Error> {
    let bytes = postcard::to_stdvec(message)?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        Err(postcard::Error::SerializeBufferFull)
    } else {
        Ok(bytes)
    }
}

/// Decodes a datagram; trailing bytes are an error.
///
/// # Errors
/// When the bytes are not one whole message.
pub fn decode<'a, M: Deserialize<'a>>(bytes: &'a [u8]) -> Result<M, postcard::Error> {
    match postcard::take_from_bytes(bytes)? {
        (message, []) => Ok(message),
        _ => Err(postcard::Error::DeserializeBadEncoding),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn trailing_bytes_are_refused() {
        let mut bytes = encode(&ToEngine::Stop).unwrap();
        assert_eq!(decode::<ToEngine>(&bytes).unwrap(), ToEngine::Stop);
        bytes.push(0);
        assert!(decode::<ToEngine>(&bytes).is_err());
    }

    #[test]
    fn the_longest_list_of_sockets_fits() {
        let sockets = vec![u64::MAX; super::super::socket::MAX_DESCRIPTORS];
        let message = ToEngine::Sockets { sockets };
        assert_eq!(
            decode::<ToEngine>(&encode(&message).unwrap()).unwrap(),
            message
        );
    }

    #[test]
    fn the_most_scattered_places_taken_back_fit() {
        let taken = (0..MAX_TAKE_BACK / 2).map(|i| ExtentRange::new(u64::MAX - i, 1));
        let message = FromEngine::TookBack {
            revoke: u64::MAX,
            taken: taken.collect(),
        };
        assert_eq!(
            decode::<FromEngine>(&encode(&message).unwrap()).unwrap(),
            message
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = decode::<ToEngine>(&bytes);
            let _ = decode::<FromEngine>(&bytes);
        }
    }
}
