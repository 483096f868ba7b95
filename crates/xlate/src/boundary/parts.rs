//! What messages between daemon and engine carry: devices, volumes, exports, ports, jobs, and what is asked of them.
//!
//! **Design.** Plain data. **Not here:** what is said of it ([`super::message`]).

use super::frontend::Frontend;
use crate::types::{DeviceIndex, ExtentRange, VolumeId};
pub use forebay_qos::budget::{Budget, Burst, Rate};
pub use forebay_qos::spread::Spread;
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// An export's identity within its pool; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ExportId(pub u64);

/// A device for the engine to open, fence and serve.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// Its place in the pool.
    pub device: DeviceIndex,
    /// Its identity, from its label.
    pub uuid: [u8; 16],
    /// Where it is, in the words of the device crate's specification strings.
    pub spec: String,
    /// Where extent 0 begins.
    pub data_offset_bytes: u64,
    /// Bytes of an extent, a power of two.
    pub extent_bytes: u32,
    /// How many extents it has.
    pub extents: u64,
}

/// A volume to translate for.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct VolumeConfig {
    /// Its identity.
    pub volume: VolumeId,
    /// NGUID and UUID shown to hosts.
    pub uuid: [u8; 16],
    /// Size now; a later configuration may only grow it.
    pub size_bytes: u64,
    /// Logical block size: 512 or 4096.
    pub block_bytes: u32,
    /// Bytes of an extent, a power of two, at least a block.
    pub extent_bytes: u32,
}

/// A volume shown to hosts as one NVMe subsystem with one namespace, or to a machine as its disk.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ExportConfig {
    /// Its identity.
    pub export: ExportId,
    /// The volume shown.
    pub volume: VolumeId,
    /// The subsystem's NQN.
    pub nqn: String,
    /// The serial number shown (at most 20 ASCII characters).
    pub serial: String,
    /// Host NQNs that may connect.
    pub hosts: BTreeSet<String>,
    /// Whether every host may.
    pub any_host: bool,
    /// How it is reached. An export's frontend never changes.
    pub frontend: Frontend,
}

/// How hosts should use the paths through a port: NVMe's asymmetric namespace access states, of those
/// that an operator may choose (Base 2.0, 8.1).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PathState {
    /// As any other.
    #[default]
    Optimized,
    /// When there is no better one.
    NonOptimized,
    /// Not at all: commands for namespaces end with a path error.
    Inaccessible,
}

/// A configured listener, as hosts see it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct PortConfig {
    /// Where it listens, the key: a listener's address.
    pub address: String,
    /// Its number in the discovery log, which stays its own.
    pub port_id: u16,
    /// How its paths should be used.
    pub ana: PathState,
    /// How often that has changed; never less than it was (Base 2.0, 5.16.1.13: the group descriptor's
    /// Change Count).
    pub changes: u64,
}

/// What a reservation command is known by, whichever engine carries it out: the same for one command,
/// another for any other that a volume's hosts send in its pool's life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ReserveToken {
    /// The number of the connection that it came by.
    pub socket: u64,
    /// Its number on that connection.
    pub number: u64,
}

/// A host's change of a volume's reservations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ReserveAsk {
    /// The command.
    pub token: ReserveToken,
    /// Which volume.
    pub volume: VolumeId,
    /// Who asks: its Host Identifier.
    pub host: [u8; 16],
    /// What: see [`ReservationCommand::new`](forebay_nvme::reservation::ReservationCommand::new).
    pub action: u32,
    /// The keys that it brought.
    pub keys: [u64; 2],
}

/// Work of the internal lane, the one place where the system itself moves data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Make everything written to the device durable.
    Flush {
        /// Which.
        device: DeviceIndex,
    },
    /// Make extents read as zeros, giving their space back where the device can.
    Launder {
        /// Which device.
        device: DeviceIndex,
        /// Its extents.
        extents: ExtentRange,
    },
    /// Nothing but waiting: until every request that was in flight at the device when this came, of
    /// whatever lane and reactor, has ended.
    Settle {
        /// Which device.
        device: DeviceIndex,
    },
}

/// Where an extent lies is asked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct FaultAsk {
    /// Whose.
    pub volume: VolumeId,
    /// Logical extent.
    pub extent: u64,
    /// Whether it is to be written.
    pub write: bool,
}

/// Where extents lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct GrantOf {
    /// Whose.
    pub volume: VolumeId,
    /// Its logical extents.
    pub range: ExtentRange,
    /// [`crate::Word`] of the first. A place ahead answers questions for writing too.
    pub word: u64,
    /// 0, or the commit that FLUSH and FUA wait for.
    pub commit_sequence: u64,
}

/// What a volume's export has behind it: what engines before this one counted, and since when there is an export.
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
    /// Commands that ended with an error of a device.
    pub media_errors: u64,
    /// When the export was created, in seconds since the epoch; 0: not known.
    pub created_s: u64,
}

/// A tenant's identity within its pool; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct TenantId(pub u64);

/// What one operation of one frontend costs, as measured at [`forebay_qos::cost::SIZES`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct CostProfile {
    /// Time of a reactor's processor, in picoseconds.
    pub cpu_ps: [u64; 6],
    /// Time of the devices, in picoseconds, if one came after the other.
    pub device_ps: [u64; 6],
    /// Bytes on the link besides the data.
    pub header_bytes: u32,
}

/// What a node has of each resource but processors, of which each reactor has one. Endless: [`u64::MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct NodeCapacity {
    /// Thousandths of devices that can be read at their whole speed at once, in the profiles' terms: 1000 if they are of
    /// all devices together.
    pub device_reads_milli: u64,
    /// The same of writes.
    pub device_writes_milli: u64,
    /// Bytes a second that can come in.
    pub link_in_bytes_s: u64,
    /// Bytes a second that can go out.
    pub link_out_bytes_s: u64,
    /// Operations a second that the software carries at most.
    pub operations_s: u64,
}

/// How things are given out. There was a choice once, and there is a place for it in the message still.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub enum Policy {
    /// Base guaranteed, the rest shared.
    #[default]
    Burst,
}

/// How I/O is admitted: [`forebay_qos`]. Without it, everything is, at once.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Scheduling {
    /// How things are given out.
    pub policy: Policy,
    /// Settings that are not at their default: a field's name of [`forebay_qos::params::Params`], and its value's
    /// [`f64::to_bits`].
    pub params: Vec<(String, u64)>,
    /// What there is.
    pub capacity: NodeCapacity,
    /// By [`forebay_qos::cost::Transport`] and [`forebay_qos::cost::Operation`].
    pub costs: [[CostProfile; 3]; 3],
}
