//! The messages between daemon and engine: enums, encoded by postcard, one per datagram.
//!
//! The daemon's requests carry a number that [`FromEngine::Done`] returns. They are idempotent: a
//! new daemon repeats them. A changed setting is sent again.
//!
//! **Take-over.** Devices, volumes and exports come first, then [`ToEngine::TakeOver`],
//! [`ToEngine::Sockets`], [`ToEngine::SocketsEnd`]. The successor converts without outside effects
//! and answers [`FromEngine::Converted`] or `Refused`. [`ToEngine::Resume`] makes it act; listeners
//! follow.
//!
//! **VMs** pass descriptors, which the daemon copies ([`FromEngine::Vm`],
//! [`FromEngine::Deposits`]). The engine acts on their message after [`ToEngine::Deposited`].

pub use super::from_engine::{Blamed, FaultFailure, FromEngine, Held};
pub use super::frontend::{FrontendKind, MAX_VM_QUEUES};
pub use super::parts::*;
use crate::types::{DeviceIndex, ExtentRange, VolumeId};
use forebay_nvme::reservation::Reservations;
use serde::{Deserialize, Serialize};

/// Sent in the first message; a side that sees another version disconnects.
pub const BOUNDARY_VERSION: u32 = 13;
/// The longest message in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;
/// The most faults or grants in one message.
pub const MAX_BATCH: usize = 512;
/// The most extents in a [`ToEngine::TakeBack`] or [`ToEngine::CountPreallocated`]; every second one may
/// be a run.
pub const MAX_TAKE_BACK: u64 = 4096;

/// From the daemon to the engine.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum ToEngine {
    /// The first message. Descriptor: the grant table.
    Hello {
        /// [`BOUNDARY_VERSION`].
        version: u32,
        /// The sender's process.
        daemon_pid: u32,
        /// Its pool.
        pool: [u8; 16],
    },
    /// Open, fence and serve a device. `Done`: it is open. [`FromEngine::DeviceReady`]: earlier
    /// engines' locks are gone.
    SetDevice {
        /// Returned in `Done`.
        request: u64,
        /// The device.
        device: DeviceConfig,
    },
    /// The pool's owner, and the devices with a heartbeat. Sent before the devices.
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
    /// Serve or grow a volume, or set its epoch: after a failed freeze, the earlier epoch gives the
    /// write right back.
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
    /// Create an export, or change its hosts; removed hosts are disconnected.
    SetExport {
        /// Returned in `Done`.
        request: u64,
        /// The export.
        export: ExportConfig,
        /// The reactor of a new export; one that serves the volume has priority. `None`: any.
        reactor: Option<u32>,
    },
    /// Disconnect an export's hosts and remove it.
    RemoveExport {
        /// Returned in `Done`.
        request: u64,
        /// The export.
        export: ExportId,
    },
    /// The state of a listener's paths; before take-over and listener.
    SetPort {
        /// Returned in `Done`.
        request: u64,
        /// The port.
        port: PortConfig,
    },
    /// How queues are spread over reactors.
    SetSpread {
        /// Returned in `Done`.
        request: u64,
        /// The rule.
        spread: Spread,
    },
    /// How I/O is admitted; `None`: always at once. Sent before budgets.
    SetScheduling {
        /// Returned in `Done`.
        request: u64,
        /// The settings.
        scheduling: Option<Box<Scheduling>>,
    },
    /// A tenant's budget; before its exports. `None`: the tenant is removed.
    SetTenantBudget {
        /// Returned in `Done`.
        request: u64,
        /// The tenant.
        tenant: TenantId,
        /// The budget.
        budget: Option<Budget>,
        /// Its last known credit (operations, bytes); an engine that knows the tenant keeps its own.
        credit: [u64; 2],
        /// Its base has priority where bases exceed a reactor's capacity.
        guaranteed: bool,
    },
    /// A volume's tenant and budget; between `SetVolume` and its export.
    SetVolumeBudget {
        /// Returned in `Done`.
        request: u64,
        /// The volume.
        volume: VolumeId,
        /// Its tenant.
        tenant: TenantId,
        /// The budget; `None`: an equal part of the tenant's, no limit.
        budget: Option<Budget>,
    },
    /// A volume's reservations; before its export.
    SetReservations {
        /// Returned in `Done`.
        request: u64,
        /// The volume.
        volume: VolumeId,
        /// The complete state.
        state: Reservations,
    },
    /// A `Reserve` is durable or refused; repeated like it.
    Reserved {
        /// From `Reserve`.
        token: ReserveToken,
        /// The volume.
        volume: VolumeId,
        /// The status field without its phase bit: code in bits 7:0, type in 10:8, do not retry in
        /// 14. 0 is success.
        status: u16,
        /// The present state.
        state: Reservations,
    },
    /// A volume's space and health, as hosts see them. No answer.
    VolumeStatistics {
        /// The volume.
        volume: VolumeId,
        /// Written bytes (Identify Namespace: NUSE).
        used_bytes: u64,
        /// Free space of its pool, percent (SMART: Available Spare).
        spare_percent: u8,
        /// Threshold of low space, percent (SMART: Available Spare Threshold).
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
    /// Accept a VM for an export. Descriptor: the listening socket.
    SetVmListener {
        /// Returned in `Done`.
        request: u64,
        /// The export.
        export: ExportId,
    },
    /// Acknowledges the deposits up to this one.
    Deposited {
        /// The VM's socket number.
        socket: u64,
        /// The last number of these `Deposits`.
        last: u32,
        /// False: there was no room for some.
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
        /// Whether writes fail; reads may still succeed.
        write: bool,
        /// The reason.
        reason: FaultFailure,
    },
    /// Stop using grants, or only stop writing under them.
    Revoke {
        /// Returned in `RevokeDone`.
        revoke: u64,
        /// The volume.
        volume: VolumeId,
        /// Its logical extents.
        range: ExtentRange,
        /// The volume's new epoch: grants of earlier ones stay, for reading. The range says which
        /// writes in flight must end first.
        freeze: Option<u16>,
        /// The release that this revoke serves. If it has timed out, the engine refuses and nothing
        /// may change: writes may have followed.
        release: Option<u64>,
    },
    /// Give back unwritten preallocated extents, without waiting.
    TakeBack {
        /// Returned in `TookBack`.
        revoke: u64,
        /// The volume.
        volume: VolumeId,
        /// Its logical extents; at most [`MAX_TAKE_BACK`] count.
        range: ExtentRange,
    },
    /// Count the preallocated extents of a range.
    CountPreallocated {
        /// Returned in `PreallocatedCounted`.
        count: u64,
        /// The volume.
        volume: VolumeId,
        /// Its logical extents; at most [`MAX_TAKE_BACK`] count.
        range: ExtentRange,
    },
    /// The owner gave up a revoke and quarantined the extents, or gave up a freeze. It is never
    /// answered; the words stay cleared, and the epoch stays.
    Abandon {
        /// From `Revoke`.
        revoke: u64,
    },
    /// Every mapping up to this commit sequence is durable.
    Committed {
        /// The volume.
        volume: VolumeId,
        /// The last sequence.
        sequence: u64,
    },
    /// A commit failed, and the commands that wait for it.
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
    /// A release failed and changed nothing; commands that need zeros must write them.
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
    /// Convert a dead engine's state, without outside effects; `Sockets` and `SocketsEnd` follow.
    /// Descriptors: its state region and memory.
    TakeOver {
        /// Returned in `Converted` or `Refused`.
        request: u64,
        /// The dead engine's generation.
        generation: u64,
        /// Its work when it crashed or hung; `None`: it was killed.
        blamed: Option<Blamed>,
    },
    /// The dead engine's connections. Descriptors: one each, in order.
    Sockets {
        /// At most [`MAX_DESCRIPTORS`](super::socket::MAX_DESCRIPTORS).
        sockets: Vec<u64>,
    },
    /// A VM of the dead engine. Descriptors: its socket and VM file.
    Vm {
        /// The socket's number.
        socket: u64,
        /// The export.
        export: ExportId,
    },
    /// Deposits of the last VM. Descriptors: one each, in order.
    Deposits {
        /// At most [`MAX_DESCRIPTORS`](super::socket::MAX_DESCRIPTORS).
        numbers: Vec<u32>,
    },
    /// No more sockets: convert.
    SocketsEnd,
    /// Act; the successor's state region now counts.
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
