//! Forebay's vendor-specific log pages and Admin commands, for management endpoints.
//!
//! Fields are little-endian. Texts are UTF-8, filled up with zeros. Later versions only use reserved
//! fields, which are 0 now. A number of all ones is unknown, or not limited.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of all structures.
pub const VERSION: u16 = 1;
/// Log page: [`DeviceHealthHeader`], then a [`DeviceHealth`] for each of the pool's devices.
pub const LOG_DEVICE_HEALTH: u8 = 0xC0;
/// Log page of a namespace: [`NamespaceStatistics`].
pub const LOG_NAMESPACE_STATISTICS: u8 = 0xC1;
/// Log page of a namespace: [`NamespaceBudget`].
pub const LOG_NAMESPACE_BUDGET: u8 = 0xC2;
/// Admin command: sets the budget of the namespace to its data, a [`NamespaceBudget`].
pub const SET_NAMESPACE_BUDGET: u8 = 0xC1;
/// Admin command: adds the device that its data, an [`AddDevice`], names to the pool. A device that
/// holds other data is refused.
pub const ADD_DEVICE: u8 = 0xC5;
/// All log pages.
pub const LOGS: [u8; 3] = [
    LOG_DEVICE_HEALTH,
    LOG_NAMESPACE_STATISTICS,
    LOG_NAMESPACE_BUDGET,
];
/// All Admin commands.
pub const COMMANDS: [u8; 2] = [SET_NAMESPACE_BUDGET, ADD_DEVICE];

/// Unknown, or no limit.
pub const NONE: U64 = U64::MAX_VALUE;
/// Unknown.
pub const UNKNOWN: u8 = u8::MAX;

/// The begin of [`LOG_DEVICE_HEALTH`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DeviceHealthHeader {
    /// [`VERSION`].
    pub version: U16,
    /// The length of an entry.
    pub entry_bytes: U16,
    /// The number of entries.
    pub devices: U32,
    /// Reserved.
    pub reserved: [u8; 56],
}
const _: () = assert!(size_of::<DeviceHealthHeader>() == 64);

/// A device of the pool, and the drive below it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DeviceHealth {
    /// The device's index in the pool.
    pub index: u8,
    /// 0 online, 1 opening, 2 failing, 3 failed, 4 missing.
    pub state: u8,
    /// The drive's command set: 0 no drive that reports its health, 1 NVMe, 2 ATA.
    pub source: u8,
    /// The drive's Critical Warning (Base 2.0, 5.16.1.3, byte 0).
    pub critical_warning: u8,
    /// The drive's temperature in kelvins; 0 if unknown.
    pub temperature_k: U16,
    /// Spare capacity left, per cent.
    pub spare_percent: u8,
    /// The drive warns below this spare capacity.
    pub spare_threshold_percent: u8,
    /// Life used, per cent; 254 and more is 254.
    pub used_percent: u8,
    /// Reserved.
    pub reserved: [u8; 7],
    /// Media errors of the drive.
    pub media_errors: U64,
    /// Hours in operation.
    pub power_on_hours: U64,
    /// Power cuts without an orderly shutdown.
    pub unsafe_shutdowns: U64,
    /// The device's bytes for data.
    pub data_bytes: U64,
    /// The part that volumes use.
    pub used_bytes: U64,
    /// Failed reads and writes since the engine or the daemon started.
    pub errors: U64,
    /// The drive's model.
    pub model: [u8; 40],
    /// The drive's serial number.
    pub serial: [u8; 20],
    /// The drive's firmware revision.
    pub firmware: [u8; 8],
    /// The device's specification, cut at 120 bytes.
    pub specification: [u8; 120],
    /// Reserved.
    pub reserved_end: [u8; 4],
}
const _: () = assert!(size_of::<DeviceHealth>() == 256);

/// Commands of a kind since the namespace was attached.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct CommandFigures {
    /// Commands.
    pub commands: U64,
    /// Their bytes.
    pub bytes: U64,
    /// Commands that failed.
    pub errors: U64,
    /// The median of their times, in nanoseconds; the highest of all controllers.
    pub p50_ns: U64,
    /// The 99th percentile of their times, likewise.
    pub p99_ns: U64,
}

/// Statistics of a namespace, over all controllers that it is attached to.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NamespaceStatistics {
    /// [`VERSION`].
    pub version: U16,
    /// Reserved.
    pub reserved: U16,
    /// The namespace.
    pub nsid: U32,
    /// Controllers and other exports that it is attached to.
    pub exports: U32,
    /// Open queues of hosts; 1 for a VM.
    pub queues: U32,
    /// Reads.
    pub reads: CommandFigures,
    /// Writes and Write Zeroes.
    pub writes: CommandFigures,
    /// Flushes.
    pub flushes: CommandFigures,
    /// Deallocations.
    pub deallocations: CommandFigures,
    /// Commands in flight.
    pub in_flight: U64,
    /// Commands that waited for the budget.
    pub throttled: U64,
    /// Written bytes: space that the namespace uses.
    pub used_bytes: U64,
    /// Reserved.
    pub reserved_end: [u8; 312],
}
const _: () = assert!(size_of::<NamespaceStatistics>() == 512);

/// The budget of a namespace, as it was stated. Rates are per second; a number of all ones is not
/// stated. Without any, there is no budget.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NamespaceBudget {
    /// [`VERSION`].
    pub version: U16,
    /// Reserved.
    pub reserved: [u8; 6],
    /// Guaranteed commands, out of its tenant's.
    pub base_iops: U64,
    /// Guaranteed bytes.
    pub base_bytes: U64,
    /// The limit in commands.
    pub burst_iops: U64,
    /// The limit in bytes.
    pub burst_bytes: U64,
    /// Reserved.
    pub reserved_end: [u8; 24],
}
const _: () = assert!(size_of::<NamespaceBudget>() == 64);

/// A device to add.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AddDevice {
    /// The device's specification, for example `/dev/nvme1n1`.
    pub specification: [u8; 512],
}

impl NamespaceBudget {
    /// Nothing is stated.
    #[must_use]
    pub fn none() -> Self {
        Self {
            version: VERSION.into(),
            base_iops: NONE,
            base_bytes: NONE,
            burst_iops: NONE,
            burst_bytes: NONE,
            ..Self::new_zeroed()
        }
    }
}

/// A text for a field, cut at a character's begin.
#[must_use]
pub fn text<const BYTES: usize>(text: &str) -> [u8; BYTES] {
    let mut field = [0; BYTES];
    let bytes = text.floor_char_boundary(BYTES);
    field[..bytes].copy_from_slice(&text.as_bytes()[..bytes]);
    field
}

/// The text of a field; `None` if it is not UTF-8, or has zeros within.
#[must_use]
pub fn text_of(field: &[u8]) -> Option<&str> {
    let length = field
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |at| at + 1);
    let text = std::str::from_utf8(&field[..length]).ok()?;
    (!text.contains('\0')).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_fill_their_fields() {
        assert_eq!(text::<4>("ab"), *b"ab\0\0");
        assert_eq!(text::<4>("abcdef"), *b"abcd");
        assert_eq!(text::<4>("abc\u{e4}"), *b"abc\0");
        assert_eq!(text_of(b"ab\0\0"), Some("ab"));
        assert_eq!(text_of(b"\0\0"), Some(""));
        assert_eq!(text_of(b"a\0b\0"), None);
        assert_eq!(text_of(b"\xFF\0"), None);
    }

    #[test]
    fn places_of_fields() {
        let mut health = DeviceHealth::new_zeroed();
        health.used_percent = 1;
        health.media_errors = 2.into();
        health.model[0] = 3;
        health.specification[0] = 4;
        let bytes = health.as_bytes();
        assert_eq!((bytes[8], bytes[16], bytes[64], bytes[132]), (1, 2, 3, 4));
        let mut statistics = NamespaceStatistics::new_zeroed();
        statistics.reads.commands = 1.into();
        statistics.deallocations.p99_ns = 2.into();
        statistics.used_bytes = 3.into();
        let bytes = statistics.as_bytes();
        assert_eq!((bytes[16], bytes[168], bytes[192]), (1, 2, 3));
        let mut budget = NamespaceBudget::none();
        budget.base_bytes = 5.into();
        let bytes = budget.as_bytes();
        assert_eq!((bytes[0], bytes[8], bytes[16]), (1, 255, 5));
        assert_eq!(bytes[40..], [0; 24]);
    }
}
