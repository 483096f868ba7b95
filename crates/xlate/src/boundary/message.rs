//! The messages between daemon and engine.
//!
//! Plain enums, encoded by postcard, one per datagram. Each side checks [`BOUNDARY_VERSION`] in the
//! first message. The daemon's requests carry a number that [`FromEngine::Done`] returns. They are
//! idempotent, so a new daemon may repeat them.
//!
//! **Take-over.** After devices, volumes and exports come [`ToEngine::TakeOver`],
//! [`ToEngine::Sockets`] and [`ToEngine::SocketsEnd`]. The successor converts the state without
//! outside effects and answers [`FromEngine::Converted`] or `Refused`. [`ToEngine::Resume`] makes
//! it act; listeners follow.
//!
//! **VMs** ([`Frontend::is_machine`]) pass descriptors of memory and interrupts. The daemon gets
//! copies ([`FromEngine::Machine`], [`FromEngine::Deposits`]). The engine acts on the message only
//! after [`ToEngine::Deposited`]. A successor gets all of them before [`ToEngine::SocketsEnd`].

pub use super::from_engine::{Blamed, FaultFailure, FromEngine, Held};
pub use super::frontend::{Frontend, MAX_MACHINE_QUEUES};
pub use super::parts::*;
use crate::types::{DeviceIndex, ExtentRange, Rights, VolumeId};
use forebay_nvme::reservation::Reservations;
use serde::{Deserialize, Serialize};

/// Version of the messages; a side that sees another version reports it and disconnects.
pub const BOUNDARY_VERSION: u32 = 9;
/// The longest message in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;
/// The most faults or grants in one message.
pub const MAX_BATCH: usize = 512;
/// The most extents in one [`ToEngine::TakeBack`] or [`ToEngine::CountAhead`]: in the worst case
/// every second one is a run.
pub const MAX_TAKE_BACK: u64 = 4096;

/// From the daemon to the engine.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum ToEngine {
    /// The first message. Descriptor: the grant table, to be kept.
    Hello {
        /// [`BOUNDARY_VERSION`].
        version: u32,
        /// The sender's process.
        daemon_pid: u32,
        /// Its pool.
        pool: [u8; 16],
    },
    /// Open, fence and serve a device. `Done` means open. [`FromEngine::DeviceReady`] follows when
    /// every earlier engine's lock on it is gone.
    SetDevice {
        /// Returned in `Done`.
        request: u64,
        /// The device.
        device: DeviceConfig,
    },
    /// The pool's owner, and the devices that get the heartbeat. Sent before the devices.
    Hold {
        /// The random id of this installation.
        owner: [u8; 16],
        /// This boot.
        boot: [u8; 16],
        /// This node's name.
        host: String,
        /// The devices whose labels have an owner.
        devices: Vec<DeviceIndex>,
    },
    /// Serve or grow a volume.
    SetVolume {
        /// Returned in `Done`.
        request: u64,
        /// The volume.
        volume: VolumeConfig,
    },
    /// Stop serving a volume whose grants are already revoked.
    RemoveVolume {
        /// Returned in `Done`.
        request: u64,
        /// The volume.
        volume: VolumeId,
    },
    /// Create an export, or change its allowed hosts; others are disconnected.
    SetExport {
        /// Returned in `Done`.
        request: u64,
        /// The export.
        export: ExportConfig,
        /// The reactor for a new export; a reactor that already serves the volume has priority.
        /// `None`: any.
        reactor: Option<u32>,
    },
    /// Disconnect an export's hosts and remove it.
    RemoveExport {
        /// Returned in `Done`.
        request: u64,
        /// The export.
        export: ExportId,
    },
    /// The state of a listener's paths. Sent before the take-over and before the listener.
    SetPort {
        /// Returned in `Done`.
        request: u64,
        /// The port.
        port: PortConfig,
    },
    /// How queues are spread over reactors, with or without scheduling.
    SetSpread {
        /// Returned in `Done`.
        request: u64,
        /// The rule.
        spread: Spread,
    },
    /// How I/O is admitted; `None`: always at once. Sent before budgets and on each change.
    SetScheduling {
        /// Returned in `Done`.
        request: u64,
        /// The settings.
        scheduling: Option<Box<Scheduling>>,
    },
    /// A tenant's budget. Sent before its exports and on each change. `None`: the tenant is
    /// removed.
    SetTenantBudget {
        /// Returned in `Done`.
        request: u64,
        /// The tenant.
        tenant: TenantId,
        /// The budget.
        budget: Option<Budget>,
        /// Its last known credit: operations, bytes. An engine that knows the tenant ignores it.
        credit: [u64; 2],
        /// Its base has priority where the bases exceed a reactor's capacity.
        guaranteed: bool,
    },
    /// A volume's tenant and budget. Sent after `SetVolume`, before the export, and on each change.
    SetVolumeBudget {
        /// Returned in `Done`.
        request: u64,
        /// The volume.
        volume: VolumeId,
        /// Its tenant.
        tenant: TenantId,
        /// The budget; `None`: an equal part of the tenant's, without a limit.
        budget: Option<Budget>,
    },
    /// A volume's reservations. Sent before its export and on each change.
    SetReservations {
        /// Returned in `Done`.
        request: u64,
        /// The volume.
        volume: VolumeId,
        /// The complete state.
        state: Reservations,
    },
    /// A `Reserve` is durable, or refused. Repeated for a repeated `Reserve`.
    Reserved {
        /// From `Reserve`.
        token: ReserveToken,
        /// The volume.
        volume: VolumeId,
        /// The status field without its phase bit: status code in bits 7:0, type in bits 10:8, do
        /// not retry in bit 14. 0 is success.
        status: u16,
        /// The present state.
        state: Reservations,
    },
    /// A volume's space and health, as hosts see them. Unanswered; repeated on change.
    VolumeFigures {
        /// The volume.
        volume: VolumeId,
        /// Written bytes (Identify Namespace: NUSE).
        used_bytes: u64,
        /// Free space of its pool, percent (SMART: Available Spare).
        spare_percent: u8,
        /// The threshold of low space, percent (SMART: Available Spare Threshold).
        spare_threshold_percent: u8,
        /// SMART's Critical Warning bits.
        warnings: u8,
        /// Its export's earlier statistics.
        past: Past,
    },
    /// Accept NVMe/TCP connections. Descriptor: the listening socket.
    SetListener {
        /// Returned in `Done`.
        request: u64,
        /// Its address, the key.
        address: String,
    },
    /// Accept a VM for an existing export. Descriptor: the listening socket.
    SetMachineListener {
        /// Returned in `Done`.
        request: u64,
        /// The export.
        export: ExportId,
    },
    /// The daemon has the deposits up to this one, or had no room for some.
    Deposited {
        /// The VM's socket number.
        socket: u64,
        /// The last number of these `Deposits`.
        last: u32,
        /// Whether it holds them.
        kept: bool,
    },
    /// Grants, as answers to faults or unasked.
    Grants {
        /// At most [`MAX_BATCH`], in this order.
        grants: Vec<GrantOf>,
    },
    /// Faults cannot be answered.
    FaultFailed {
        /// The volume.
        volume: VolumeId,
        /// Its logical extents.
        range: ExtentRange,
        /// Whether writes fail; a write without space says nothing about reads.
        write: bool,
        /// The reason.
        reason: FaultFailure,
    },
    /// Stop using grants.
    Revoke {
        /// Returned in `RevokeDone`.
        revoke: u64,
        /// The volume.
        volume: VolumeId,
        /// Its logical extents.
        range: ExtentRange,
        /// `Some(Rights::Read)`: revokes only writing.
        keep: Option<Rights>,
        /// The release that this revoke serves. If it has timed out, the engine refuses and nothing
        /// may change: a later write may have come.
        release: Option<u64>,
    },
    /// Give back preallocated extents that were never written. Nothing is waited for.
    TakeBack {
        /// Returned in `TookBack`.
        revoke: u64,
        /// The volume.
        volume: VolumeId,
        /// Its logical extents, at most [`MAX_TAKE_BACK`]; the rest is ignored.
        range: ExtentRange,
    },
    /// Count the preallocated extents of a range.
    CountAhead {
        /// Returned in `AheadCounted`.
        count: u64,
        /// The volume.
        volume: VolumeId,
        /// Its logical extents, at most [`MAX_TAKE_BACK`]; the rest is ignored.
        range: ExtentRange,
    },
    /// The owner gave up a revoke and quarantined the extents. The engine frees its place and never
    /// answers it. The words stay cleared.
    Abandon {
        /// From `Revoke`.
        revoke: u64,
    },
    /// Every mapping with a commit sequence up to this one is durable.
    Committed {
        /// The volume.
        volume: VolumeId,
        /// The last sequence.
        sequence: u64,
    },
    /// A commit failed, and with it the commands that wait for it.
    CommitFailed {
        /// The volume.
        volume: VolumeId,
        /// The last sequence.
        sequence: u64,
    },
    /// A release is done: the range reads as zeros.
    ReleaseDone {
        /// From `Release`.
        release: u64,
    },
    /// A release failed for good and changed nothing; a command that needs zeros must write them.
    ReleaseFailed {
        /// From `Release`.
        release: u64,
    },
    /// Work for the internal lane.
    Job {
        /// Returned in `JobDone`.
        job: u64,
        /// The job.
        work: Job,
    },
    /// Take over a dead engine's state; `Sockets` and `SocketsEnd` follow. Converting has no
    /// outside effect. Descriptors: its state region and its memory.
    TakeOver {
        /// Returned in `Converted` or `Refused`.
        request: u64,
        /// The dead engine's generation.
        generation: u64,
        /// Its work when it crashed or hung; `None` when it was killed.
        blamed: Option<Blamed>,
    },
    /// The dead engine's connections. Descriptors: one each, in this order.
    Sockets {
        /// At most [`MAX_DESCRIPTORS`](super::socket::MAX_DESCRIPTORS).
        sockets: Vec<u64>,
    },
    /// A VM of the dead engine. Descriptors: its socket and its machine file.
    Machine {
        /// The socket's number.
        socket: u64,
        /// The export.
        export: ExportId,
    },
    /// Deposits of the VM named last. Descriptors: one each, in this order.
    Deposits {
        /// At most [`MAX_DESCRIPTORS`](super::socket::MAX_DESCRIPTORS).
        numbers: Vec<u32>,
    },
    /// No more sockets: convert.
    SocketsEnd,
    /// Act: from now on the successor's state region is the truth.
    Resume {
        /// Returned in `Done`.
        request: u64,
    },
    /// Finish commands in flight, close every connection, exit.
    Stop,
}

/// Encodes a datagram; fails above [`MAX_MESSAGE_BYTES`].
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, postcard::Error> {
    let bytes = postcard::to_stdvec(message)?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        Err(postcard::Error::SerializeBufferFull)
    } else {
        Ok(bytes)
    }
}

/// Decodes a datagram; trailing bytes are an error.
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
