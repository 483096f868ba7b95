//! Response data of the Management Interface's commands (5).

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// NVM Subsystem Information (5.7.1).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SubsystemInformation {
    /// NUMP: ports, less one.
    pub last_port: u8,
    /// MJR: NVMe-MI version.
    pub major: u8,
    /// MNR.
    pub minor: u8,
    /// Reserved; byte 3, of 2.0: bit 0 Status Reporting Enhancements.
    pub reserved: [u8; 29],
}
const _: () = assert!(size_of::<SubsystemInformation>() == 32);

/// Port Information (5.7.2).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PortInformation {
    /// PRTTYP: 0 inactive, 1 PCIe, 2 SMBus.
    pub kind: u8,
    /// Bit 0: Command Initiated Auto Pause. Bit 1, of 2.0: Asynchronous Event Messages.
    pub capabilities: u8,
    /// MMTUS: the largest transmission unit.
    pub max_unit_bytes: U16,
    /// MEBS: the size of the Management Endpoint Buffer.
    pub buffer_bytes: U32,
    /// Of the port's type.
    pub specific: [u8; 24],
}
const _: () = assert!(size_of::<PortInformation>() == 32);

/// Controller Information (5.7.4). PCI fields are 0 without a PCI function.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ControllerInformation {
    /// PORTID.
    pub port: u8,
    /// Reserved.
    pub reserved: [u8; 4],
    /// PRII, bit 0: the routing identifier is valid.
    pub routing_valid: u8,
    /// PCIe routing identifier.
    pub routing: U16,
    /// PCI vendor.
    pub vendor: U16,
    /// PCI device.
    pub device: U16,
    /// PCI subsystem vendor.
    pub subsystem_vendor: U16,
    /// PCI subsystem device.
    pub subsystem_device: U16,
    /// PCIe segment.
    pub segment: u8,
    /// Reserved.
    pub reserved_end: [u8; 15],
}
const _: () = assert!(size_of::<ControllerInformation>() == 32);

/// NVM Subsystem Health (5.6).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SubsystemHealth {
    /// NSS: [`Self::FUNCTIONAL`], [`Self::NO_RESET_REQUIRED`] and others.
    pub status: u8,
    /// SW: the Critical Warning of SMART / Health Information, inverted.
    pub no_warnings: u8,
    /// CTEMP: [`composite_temperature`].
    pub temperature: u8,
    /// PDLU: percent of the drive's life used; 255 and more is 255.
    pub life_used: u8,
    /// CCS: changes of any controller, see [`status_change`].
    pub changes: U16,
    /// Reserved.
    pub reserved: [u8; 2],
}
const _: () = assert!(size_of::<SubsystemHealth>() == 8);

impl SubsystemHealth {
    /// NSS: the drive works.
    pub const FUNCTIONAL: u8 = 1 << 5;
    /// NSS: no reset is required.
    pub const NO_RESET_REQUIRED: u8 = 1 << 4;
}

/// Bits of the Composite Controller Status (5.6). Bits 0 to 7 are those of
/// [`ControllerHealth::status`], too.
pub mod status_change {
    /// Ready.
    pub const READY: u16 = 1 << 0;
    /// Controller Fatal Status.
    pub const FATAL: u16 = 1 << 1;
    /// Shutdown Status.
    pub const SHUTDOWN: u16 = 1 << 2;
    /// NVM Subsystem Reset Occurred.
    pub const SUBSYSTEM_RESET: u16 = 1 << 4;
    /// Controller Enable Change Occurred.
    pub const ENABLE: u16 = 1 << 5;
    /// Namespace Attribute Changed.
    pub const NAMESPACE: u16 = 1 << 6;
    /// Firmware Activated.
    pub const FIRMWARE: u16 = 1 << 7;
    /// Controller Status Change.
    pub const STATUS: u16 = 1 << 8;
    /// Composite Temperature Change.
    pub const TEMPERATURE: u16 = 1 << 9;
    /// Percentage Used.
    pub const LIFE_USED: u16 = 1 << 10;
    /// Available Spare.
    pub const SPARE: u16 = 1 << 11;
    /// Critical Warning.
    pub const WARNING: u16 = 1 << 12;
}

/// Controller Health (5.3), an entry for each controller.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ControllerHealth {
    /// CTLID.
    pub controller: U16,
    /// CSTS: bits 0 to 7 of [`status_change`].
    pub status: U16,
    /// CTEMP in kelvins.
    pub temperature_k: U16,
    /// PDLU: percent of the drive's life used; 255 and more is 255.
    pub life_used: u8,
    /// SPARE in percent.
    pub spare: u8,
    /// CWARN: the Critical Warning of SMART / Health Information.
    pub warnings: u8,
    /// CHSC, of 2.0: what changed since the last poll.
    pub changes: U16,
    /// Reserved.
    pub reserved: [u8; 5],
}
const _: () = assert!(size_of::<ControllerHealth>() == 16);

/// CTEMP of [`SubsystemHealth`] for kelvins; `None`: no data.
#[must_use]
pub fn composite_temperature(kelvins: Option<u16>) -> u8 {
    match kelvins {
        None => 0x80,
        // Two's complement of -60 to 127 degrees Celsius.
        Some(kelvins) => (i32::from(kelvins) - 273).clamp(-60, 127) as i8 as u8,
    }
}
