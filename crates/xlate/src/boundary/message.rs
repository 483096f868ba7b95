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

pub use super::from_engine::{Blamed, FaultFailure, FromEngine, Held};
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
