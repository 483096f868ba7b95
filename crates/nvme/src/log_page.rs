//! Log page identifiers and layouts, except Discovery ([`crate::fabrics`]). [`crate::controller`]
//! fills them.
//!
//! Section numbers are of Base 2.0.

use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Supported Log Pages (5.16.1.1).
pub const SUPPORTED_LOG_PAGES: u8 = 0x00;
/// Error Information (5.16.1.2).
pub const ERROR_INFORMATION: u8 = 0x01;
/// SMART / Health Information (5.16.1.3).
pub const SMART_HEALTH: u8 = 0x02;
/// Firmware Slot Information (5.16.1.4).
pub const FIRMWARE_SLOT: u8 = 0x03;
/// Changed Namespace List (5.16.1.5).
pub const CHANGED_NAMESPACE_LIST: u8 = 0x04;
/// Commands Supported and Effects (5.16.1.6).
pub const COMMANDS_SUPPORTED_AND_EFFECTS: u8 = 0x05;
/// Asymmetric Namespace Access (5.16.1.13).
pub const ASYMMETRIC_NAMESPACE_ACCESS: u8 = 0x0C;
/// Feature Identifiers Supported and Effects (5.16.1.18).
pub const FEATURES_SUPPORTED_AND_EFFECTS: u8 = 0x12;
/// NVMe-MI Commands Supported and Effects (5.16.1.19).
pub const MI_COMMANDS_SUPPORTED_AND_EFFECTS: u8 = 0x13;
/// Discovery (5.16.1.23).
pub const DISCOVERY: u8 = 0x70;
/// Reservation Notification (5.16.1.24).
pub const RESERVATION_NOTIFICATION: u8 = 0x80;

/// 256 descriptors of 4 bytes.
pub const SUPPORTED_LOG_PAGES_BYTES: usize = 1024;
/// Size of the list.
pub const CHANGED_NAMESPACE_LIST_BYTES: usize = 4096;
/// 256 admin and 256 I/O descriptors of 4 bytes, 2048 reserved.
pub const COMMANDS_SUPPORTED_BYTES: usize = 4096;
/// 256 descriptors of 4 bytes.
pub const FEATURES_SUPPORTED_BYTES: usize = 1024;

/// 256 descriptors of 4 bytes, 3072 reserved.
pub const MI_COMMANDS_SUPPORTED_BYTES: usize = 4096;

/// Log pages 00h, 05h, 12h: supported.
pub const SUPPORTED: u32 = 1 << 0;
/// Log page 05h: Logical Block Content Change.
pub const EFFECT_LBCC: u32 = 1 << 1;
/// Log page 05h: Namespace Capability Change.
pub const EFFECT_NCC: u32 = 1 << 2;
/// Log page 05h: Namespace Inventory Change.
pub const EFFECT_NIC: u32 = 1 << 3;
/// Log pages 05h, 12h: namespace scope.
pub const SCOPE_NAMESPACE: u32 = 1 << 20;
/// Log pages 05h, 12h: controller scope.
pub const SCOPE_CONTROLLER: u32 = 1 << 21;
/// Log pages 05h, 12h: NVM subsystem scope.
pub const SCOPE_SUBSYSTEM: u32 = 1 << 25;

/// Error Information entry (5.16.1.2, figure 206).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ErrorEntry {
    /// Unique, increasing error number; 0: invalid entry.
    pub error_count: U64,
    /// Submission queue; FFFFh: no command.
    pub sqid: U16,
    /// Command identifier; FFFFh: no command.
    pub cid: U16,
    /// Status in bits 15:1, phase tag in bit 0.
    pub status: U16,
    /// Byte in bits 7:0, bit in bits 10:8; FFFFh: none.
    pub parameter_location: U16,
    /// First LBA in error.
    pub lba: U64,
    /// Namespace.
    pub nsid: U32,
    /// Vendor information; 0: none.
    pub vendor: u8,
    /// Transport; 3 is TCP.
    pub trtype: u8,
    /// Reserved.
    pub reserved30: [u8; 2],
    /// Command-specific information.
    pub command_specific: U64,
    /// Transport-specific information.
    pub transport_specific: U16,
    /// Reserved.
    pub reserved42: [u8; 22],
}
const _: () = assert!(size_of::<ErrorEntry>() == 64);

/// Critical warning: the temperature is outside its thresholds.
pub const TEMPERATURE_WARNING: u8 = 1 << 1;

/// SMART / Health (5.16.1.3, figure 207).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SmartHealth {
    /// Critical warning bits.
    pub critical_warning: u8,
    /// Composite temperature, kelvins; 0: unknown.
    pub composite_temperature: U16,
    /// Available spare, per cent.
    pub available_spare: u8,
    /// Spare threshold, per cent.
    pub available_spare_threshold: u8,
    /// Percentage used.
    pub percentage_used: u8,
    /// Endurance group warnings.
    pub endurance_group_warning: u8,
    /// Reserved.
    pub reserved7: [u8; 25],
    /// Units of 512,000 bytes, rounded up.
    pub data_units_read: U128,
    /// Units of 512,000 bytes, rounded up.
    pub data_units_written: U128,
    /// Read commands.
    pub host_read_commands: U128,
    /// Write commands.
    pub host_write_commands: U128,
    /// Controller busy time, minutes.
    pub controller_busy_minutes: U128,
    /// Power cycles.
    pub power_cycles: U128,
    /// Power-on hours.
    pub power_on_hours: U128,
    /// Unsafe shutdowns.
    pub unsafe_shutdowns: U128,
    /// Media and data integrity errors.
    pub media_errors: U128,
    /// Errors over the controller's life.
    pub error_log_entries: U128,
    /// Temperature times, sensors, thermal management.
    pub reserved192: [u8; 320],
}
const _: () = assert!(size_of::<SmartHealth>() == 512);
const _: () = assert!(std::mem::offset_of!(SmartHealth, data_units_read) == 32);
const _: () = assert!(std::mem::offset_of!(SmartHealth, error_log_entries) == 176);

/// Firmware Slot Information (5.16.1.4, figure 209).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct FirmwareSlots {
    /// Active slot in bits 2:0; slot of the next reset in bits 6:4, or 0.
    pub afi: u8,
    /// Reserved.
    pub reserved1: [u8; 7],
    /// Firmware revisions of slots 1–7, ASCII; zero if absent.
    pub frs: [[u8; 8]; 7],
    /// Reserved.
    pub reserved64: [u8; 448],
}
const _: () = assert!(size_of::<FirmwareSlots>() == 512);

/// ANA log page header (5.16.1.13).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AnaHeader {
    /// Incremented by a change of any group.
    pub change_count: U64,
    /// Number of group descriptors.
    pub groups: U16,
    /// Reserved.
    pub reserved10: [u8; 6],
}
const _: () = assert!(size_of::<AnaHeader>() == 16);

/// ANA group descriptor (5.16.1.13); namespace identifiers follow.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AnaDescriptor {
    /// Group.
    pub group: U32,
    /// Number of namespace identifiers.
    pub nsids: U32,
    /// Change count of this group.
    pub change_count: U64,
    /// ANA state in bits 3:0.
    pub state: u8,
    /// Reserved.
    pub reserved17: [u8; 15],
}
const _: () = assert!(size_of::<AnaDescriptor>() == 32);

/// Reservation Notification (5.16.1.24).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ReservationNotification {
    /// Its number; 0: empty page.
    pub count: U64,
    /// Type; 0: empty page.
    pub kind: u8,
    /// Notifications still to read.
    pub available: u8,
    /// Reserved.
    pub reserved10: [u8; 2],
    /// Namespace.
    pub nsid: U32,
    /// Reserved.
    pub reserved16: [u8; 48],
}
const _: () = assert!(size_of::<ReservationNotification>() == 64);
