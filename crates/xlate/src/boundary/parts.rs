//! Data in the messages between daemon and engine.

use super::frontend::FrontendKind;
use crate::types::{DeviceIndex, ExtentIndex, ExtentRange, VolumeId};
pub use forebay_qos::budget::{Budget, Burst, Rate};
pub use forebay_qos::spread::Spread;
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// An export's identity within its pool; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ExportId(pub u64);

/// A device of the pool.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// Its index in the pool.
    pub device: DeviceIndex,
    /// Its identity, from its label.
    pub uuid: [u8; 16],
    /// Its location (a specification string of the device crate).
    pub spec: String,
    /// Offset of extent 0.
    pub data_offset_bytes: u64,
    /// Bytes of an extent, a power of two.
    pub extent_bytes: u32,
    /// Its number of extents.
    pub extents: u64,
    /// How a new engine waits for the end of earlier engines' writes.
    pub fence: DeviceFence,
}

/// What separates an engine's writes from those of earlier engines.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum DeviceFence {
    /// Locks on the device, which the kernel releases after the last request.
    Locks,
    /// A Ceph client whose address the daemon has not noted yet: only reads.
    Unnoted,
    /// A Ceph client whose address is noted. These addresses of earlier clients must be
    /// blocklisted.
    Blocklist(Vec<String>),
}

/// A Ceph image behind a volume.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Its client.
    pub device: DeviceIndex,
    /// Its part of the client's addresses.
    pub span: u32,
    /// The pool.
    pub pool: String,
    /// The namespace; empty for none.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// The snapshot that is read, if any.
    pub snapshot: Option<String>,
}

/// A volume to serve.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct VolumeConfig {
    /// Its identity.
    pub volume: VolumeId,
    /// NGUID and UUID shown to hosts.
    pub uuid: [u8; 16],
    /// Whether every host's write fails; it never changes.
    pub read_only: bool,
    /// Its size; without an image, it may only grow.
    pub size_bytes: u64,
    /// Logical block size: 512 or 4096.
    pub block_bytes: u32,
    /// Bytes of an extent: a power of two, at least a block.
    pub extent_bytes: u32,
    /// Its present epoch: grants of others allow no write ([`crate::Word::as_of`]).
    pub epoch: u16,
    /// The Ceph image that holds its data; `None`: extents of the pool.
    pub image: Option<ImageConfig>,
}

/// An export: an NVMe subsystem with one namespace, or a VM's disk.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ExportConfig {
    /// Its identity.
    pub export: ExportId,
    /// The volume.
    pub volume: VolumeId,
    /// The subsystem's NQN.
    pub nqn: String,
    /// The serial number (at most 20 ASCII characters).
    pub serial: String,
    /// Host NQNs that may connect.
    pub hosts: BTreeSet<String>,
    /// Whether every host may connect.
    pub any_host: bool,
    /// The frontend, which never changes.
    pub frontend: FrontendKind,
}

/// A path's state: the asymmetric namespace access states that operators may choose (Base 2.0,
/// 8.1).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PathState {
    /// Normal.
    #[default]
    Optimized,
    /// To be used when no better path exists.
    NonOptimized,
    /// Unusable: commands for namespaces end with a path error.
    Inaccessible,
}

/// A configured listener, as hosts see it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct PortConfig {
    /// The listener's address, the key.
    pub address: String,
    /// Its permanent number in the discovery log.
    pub port_id: u16,
    /// The state of its paths.
    pub ana: PathState,
    /// Changes of that state, never fewer (Base 2.0, 5.16.1.13: Change Count).
    pub changes: u64,
}

/// Identifies a reservation command, across engines and for ever.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ReserveToken {
    /// The connection's number.
    pub socket: u64,
    /// Its number on that connection.
    pub number: u64,
}

/// A host's change of a volume's reservations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ReserveAsk {
    /// The command.
    pub token: ReserveToken,
    /// The volume.
    pub volume: VolumeId,
    /// The Host Identifier.
    pub host: [u8; 16],
    /// See [`ReservationCommand::new`](forebay_nvme::reservation::ReservationCommand::new).
    pub action: u32,
    /// Its keys.
    pub keys: [u64; 2],
}

/// Work of the internal lane: the only I/O without a host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Makes everything written to the device durable.
    Flush {
        /// The device.
        device: DeviceIndex,
    },
    /// Zero-fill extents, and return their space where possible.
    ZeroFill {
        /// The device.
        device: DeviceIndex,
        /// Its extents.
        extents: ExtentRange,
    },
    /// Copies extents, which must not overlap; a flush makes the copy durable. Until `JobDone` the
    /// target may be written, also after a `Settle`, which knows only present requests.
    Copy {
        /// The device to read.
        from: DeviceIndex,
        /// Its first extent.
        source: ExtentIndex,
        /// The device to write.
        to: DeviceIndex,
        /// Its first extent.
        target: ExtentIndex,
        /// Number of extents.
        count: u64,
    },
    /// Writes a parked command's data, which covers the extent, to the new place, instead of a copy.
    /// The command goes on when the place is granted. Fails if no such command waits.
    Overwrite {
        /// The command's volume.
        volume: VolumeId,
        /// Its logical extent.
        extent: u64,
        /// The device to write.
        to: DeviceIndex,
        /// Its extent.
        target: ExtentIndex,
    },
    /// Wait until every request now in flight at the device has ended, on all reactors.
    Settle {
        /// The device.
        device: DeviceIndex,
    },
}

/// A question for the translation of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct FaultAsk {
    /// The volume.
    pub volume: VolumeId,
    /// Logical extent.
    pub extent: u64,
    /// Whether it will be written.
    pub write: bool,
    /// The first command that waits writes the whole extent: see [`Job::Overwrite`].
    pub whole: bool,
}

/// A translation of extents.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct GrantOf {
    /// The volume.
    pub volume: VolumeId,
    /// Its logical extents.
    pub range: ExtentRange,
    /// [`crate::Word`] of the first. Preallocated extents also answer write faults.
    pub word: u64,
    /// The commit that FLUSH and FUA wait for; 0: none.
    pub commit_sequence: u64,
}

/// An export's statistics from earlier engines, and its age.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Past {
    /// Read commands.
    pub reads: u64,
    /// Bytes that hosts read.
    pub bytes_read: u64,
    /// Write commands.
    pub writes: u64,
    /// Bytes that hosts wrote.
    pub bytes_written: u64,
    /// Commands that ended with a device error.
    pub media_errors: u64,
    /// Creation of the export, seconds since the epoch; 0: unknown.
    pub created_s: u64,
}

/// A tenant's identity within its pool; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct TenantId(pub u64);

/// The cost of a frontend's operation, measured at [`forebay_qos::cost::SIZES`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct CostProfile {
    /// Processor time, picoseconds.
    pub cpu_ps: [u64; 6],
    /// Device time, picoseconds, as if devices worked one by one.
    pub device_ps: [u64; 6],
    /// Bytes on the link besides the data.
    pub header_bytes: u32,
}

/// The node's resources besides processors. Unlimited: [`u64::MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct NodeCapacity {
    /// Devices readable at full speed at once, in thousandths; 1000 if the profiles cover all
    /// devices.
    pub device_reads_milli: u64,
    /// As above, for writes.
    pub device_writes_milli: u64,
    /// Incoming bytes per second.
    pub link_in_bytes_s: u64,
    /// Outgoing bytes per second.
    pub link_out_bytes_s: u64,
    /// Operations per second that the software handles at most.
    pub operations_s: u64,
}

/// How resources are divided; only one policy remains.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub enum Policy {
    /// Base guaranteed, the rest shared.
    #[default]
    Burst,
}

/// How I/O is admitted: [`forebay_qos`].
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Scheduling {
    /// The policy.
    pub policy: Policy,
    /// Changed settings: a field's name of [`forebay_qos::params::Params`], and its value's
    /// [`f64::to_bits`].
    pub params: Vec<(String, u64)>,
    /// The node's resources.
    pub capacity: NodeCapacity,
    /// By [`forebay_qos::cost::Transport`] and [`forebay_qos::cost::Operation`].
    pub costs: [[CostProfile; 3]; 3],
}
