//! Log page identifiers and layouts.
//!
//! Purpose: the log pages that Forebay's controllers keep, as types. The Discovery log page is in
//! [`crate::fabrics`]. Does NOT fill them: see [`crate::controller`].

use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Supported Log Pages (Base 2.0, 5.16.1.1).
pub const SUPPORTED_LOG_PAGES: u8 = 0x00;
/// Error Information (Base 2.0, 5.16.1.2).
pub const ERROR_INFORMATION: u8 = 0x01;
/// SMART / Health Information (Base 2.0, 5.16.1.3).
pub const SMART_HEALTH: u8 = 0x02;
/// Firmware Slot Information (Base 2.0, 5.16.1.4).
pub const FIRMWARE_SLOT: u8 = 0x03;
/// Changed Namespace List (Base 2.0, 5.16.1.5).
pub const CHANGED_NAMESPACE_LIST: u8 = 0x04;
/// Commands Supported and Effects (Base 2.0, 5.16.1.6).
pub const COMMANDS_SUPPORTED_AND_EFFECTS: u8 = 0x05;
/// Asymmetric Namespace Access (Base 2.0, 5.16.1.13).
pub const ASYMMETRIC_NAMESPACE_ACCESS: u8 = 0x0C;
/// Feature Identifiers Supported and Effects (Base 2.0, 5.16.1.18).
pub const FEATURES_SUPPORTED_AND_EFFECTS: u8 = 0x12;
/// NVMe-MI Commands Supported and Effects (Base 2.0, 5.16.1.19).
pub const MI_COMMANDS_SUPPORTED_AND_EFFECTS: u8 = 0x13;
/// Discovery (Base 2.0, 5.16.1.23).
pub const DISCOVERY: u8 = 0x70;
/// Reservation Notification (Base 2.0, 5.16.1.24).
pub const RESERVATION_NOTIFICATION: u8 = 0x80;

/// Bytes of the Supported Log Pages log page: 256 descriptors of 4.
pub const SUPPORTED_LOG_PAGES_BYTES: usize = 1024;
/// Bytes of the Changed Namespace List.
pub const CHANGED_NAMESPACE_LIST_BYTES: usize = 4096;
/// Bytes of the Commands Supported and Effects log page: 256 Admin and 256 I/O descriptors of 4,
/// then 2048 reserved.
pub const COMMANDS_SUPPORTED_BYTES: usize = 4096;
/// Bytes of the Feature Identifiers Supported and Effects log page: 256 descriptors of 4.
pub const FEATURES_SUPPORTED_BYTES: usize = 1024;

/// Bytes of the NVMe-MI Commands Supported and Effects log page: 256 descriptors of 4, then 3072
/// reserved.
pub const MI_COMMANDS_SUPPORTED_BYTES: usize = 4096;

/// Bit 0 of a descriptor of log pages 00h, 05h and 12h: supported.
pub const SUPPORTED: u32 = 1 << 0;
/// Bit 1 of a descriptor of log page 05h: Logical Block Content Change.
pub const EFFECT_LBCC: u32 = 1 << 1;
/// Bit 20 of a descriptor of log pages 05h and 12h: the scope is a namespace.
pub const SCOPE_NAMESPACE: u32 = 1 << 20;
/// Bit 21 of a descriptor of log pages 05h and 12h: the scope is the controller.
pub const SCOPE_CONTROLLER: u32 = 1 << 21;

/// Error Information log entry (Base 2.0, 5.16.1.2, figure 206).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ErrorEntry {
    /// Error Count: unique, rising; 0 means that the entry is invalid.
    pub error_count: U64,
    /// Submission Queue ID; FFFFh: not specific to a command.
    pub sqid: U16,
    /// Command ID; FFFFh: not specific to a command.
    pub cid: U16,
    /// Status Field: bits 15:1, the phase tag in bit 0.
    pub status: U16,
    /// Parameter Error Location: byte in bits 7:0, bit in bits 10:8; FFFFh: none.
    pub parameter_location: U16,
    /// First LBA that had the error.
    pub lba: U64,
    /// Namespace.
    pub nsid: U32,
    /// Vendor Specific Information Available: 0, none.
    pub vendor: u8,
    /// Transport Type: 3 is TCP.
    pub trtype: u8,
    /// Reserved.
    pub reserved30: [u8; 2],
    /// Command Specific Information.
    pub command_specific: U64,
    /// Transport Type Specific Information.
    pub transport_specific: U16,
    /// Reserved.
    pub reserved42: [u8; 22],
}
const _: () = assert!(size_of::<ErrorEntry>() == 64);

/// SMART / Health Information (Base 2.0, 5.16.1.3, figure 207).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SmartHealth {
    /// Critical Warning bits.
    pub critical_warning: u8,
    /// Composite Temperature in kelvins; 0: not known.
    pub composite_temperature: U16,
    /// Available Spare, per cent.
    pub available_spare: u8,
    /// Available Spare Threshold, per cent.
    pub available_spare_threshold: u8,
    /// Percentage Used.
    pub percentage_used: u8,
    /// Endurance Group Critical Warning Summary.
    pub endurance_group_warning: u8,
    /// Reserved.
    pub reserved7: [u8; 25],
    /// Data Units Read: thousands of 512 bytes, rounded up.
    pub data_units_read: U128,
    /// Data Units Written: thousands of 512 bytes, rounded up.
    pub data_units_written: U128,
    /// Host Read Commands.
    pub host_read_commands: U128,
    /// Host Write Commands.
    pub host_write_commands: U128,
    /// Controller Busy Time, minutes.
    pub controller_busy_minutes: U128,
    /// Power Cycles.
    pub power_cycles: U128,
    /// Power On Hours.
    pub power_on_hours: U128,
    /// Unsafe Shutdowns.
    pub unsafe_shutdowns: U128,
    /// Media and Data Integrity Errors.
    pub media_errors: U128,
    /// Number of Error Information Log Entries over the life of the controller.
    pub error_log_entries: U128,
    /// Warning and Critical Composite Temperature Time, sensors, thermal management: not kept.
    pub reserved192: [u8; 320],
}
const _: () = assert!(size_of::<SmartHealth>() == 512);
const _: () = assert!(std::mem::offset_of!(SmartHealth, data_units_read) == 32);
const _: () = assert!(std::mem::offset_of!(SmartHealth, error_log_entries) == 176);

/// Firmware Slot Information (Base 2.0, 5.16.1.4, figure 209).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct FirmwareSlots {
    /// Active Firmware Info: the active slot in bits 2:0.
    pub afi: u8,
    /// Reserved.
    pub reserved1: [u8; 7],
    /// Firmware Revision of slots 1 to 7, ASCII; zero for a slot that isn't there.
    pub frs: [[u8; 8]; 7],
    /// Reserved.
    pub reserved64: [u8; 448],
}
const _: () = assert!(size_of::<FirmwareSlots>() == 512);

/// Header of the Asymmetric Namespace Access log page (Base 2.0, 5.16.1.13).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AnaHeader {
    /// Change Count: rises with each change of any group.
    pub change_count: U64,
    /// Number of ANA Group Descriptors.
    pub groups: U16,
    /// Reserved.
    pub reserved10: [u8; 6],
}
const _: () = assert!(size_of::<AnaHeader>() == 16);

/// ANA Group Descriptor (Base 2.0, 5.16.1.13); its namespace identifiers follow.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AnaDescriptor {
    /// ANA Group ID.
    pub group: U32,
    /// Number of NSID Values.
    pub nsids: U32,
    /// Change Count of this group.
    pub change_count: U64,
    /// Asymmetric Namespace Access State in bits 3:0.
    pub state: u8,
    /// Reserved.
    pub reserved17: [u8; 15],
}
const _: () = assert!(size_of::<AnaDescriptor>() == 32);

/// Reservation Notification log page (Base 2.0, 5.16.1.24).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ReservationNotification {
    /// Log Page Count: the number of this notification; 0 for an empty page.
    pub count: U64,
    /// Reservation Notification Log Page Type: 0 for an empty page.
    pub kind: u8,
    /// Number of Available Log Pages, without this one.
    pub available: u8,
    /// Reserved.
    pub reserved10: [u8; 2],
    /// Namespace.
    pub nsid: U32,
    /// Reserved.
    pub reserved16: [u8; 48],
}
const _: () = assert!(size_of::<ReservationNotification>() == 64);
