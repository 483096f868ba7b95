//! Feature identifiers and data layouts; [`crate::controller`] holds the values.
//!
//! Section numbers are of Base 2.0 unless stated.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Arbitration (5.27.1.1).
pub const ARBITRATION: u8 = 0x01;
/// Power Management (5.27.1.2).
pub const POWER_MANAGEMENT: u8 = 0x02;
/// Temperature Threshold (5.27.1.3).
pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
/// Error Recovery (NVM Command Set 1.0, 4.1.3.2).
pub const ERROR_RECOVERY: u8 = 0x05;
/// Volatile Write Cache (5.27.1.4).
pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
/// Number of Queues (5.27.1.5).
pub const NUMBER_OF_QUEUES: u8 = 0x07;
/// Interrupt Coalescing (5.27.1.6).
pub const INTERRUPT_COALESCING: u8 = 0x08;
/// Interrupt Vector Configuration (5.27.1.7).
pub const INTERRUPT_VECTOR_CONFIGURATION: u8 = 0x09;
/// Write Atomicity Normal (NVM Command Set 1.0, 4.1.3.3).
pub const WRITE_ATOMICITY: u8 = 0x0A;
/// Asynchronous Event Configuration (5.27.1.8).
pub const ASYNC_EVENT_CONFIGURATION: u8 = 0x0B;
/// Keep Alive Timer (5.27.1.12).
pub const KEEP_ALIVE_TIMER: u8 = 0x0F;
/// Host Behavior Support (5.27.1.18).
pub const HOST_BEHAVIOR_SUPPORT: u8 = 0x16;
/// Host Identifier (5.27.1.25).
pub const HOST_IDENTIFIER: u8 = 0x81;
/// Reservation Notification Mask (5.27.1.26): bits 1 to 3 suppress a type.
pub const RESERVATION_NOTIFICATION_MASK: u8 = 0x82;
/// Reservation Persistence (5.27.1.27): bit 0.
pub const RESERVATION_PERSISTENCE: u8 = 0x83;

/// Whether the scope is a namespace, not the controller.
pub const fn is_of_namespace(fid: u8) -> bool {
    matches!(
        fid,
        ERROR_RECOVERY | RESERVATION_NOTIFICATION_MASK | RESERVATION_PERSISTENCE
    )
}

/// Namespace Attribute Notices (also OAES bit 8).
pub const AEC_NAMESPACE_ATTRIBUTE: u32 = 1 << 8;
/// ANA Change Notices (also OAES bit 11).
pub const AEC_ANA_CHANGE: u32 = 1 << 11;
/// Discovery Log Page Change (also OAES bit 31).
pub const AEC_DISCOVERY_LOG_CHANGE: u32 = 1 << 31;
/// SMART / Health critical warnings.
pub const AEC_SMART_WARNINGS: u32 = 0x1F;

/// Host Behavior Support data (5.27.1.18).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct HostBehavior {
    /// Advanced Command Retry Enable: understands Command Interrupted and delays.
    pub acre: u8,
    /// Extended telemetry data area 4.
    pub etdas: u8,
    /// LBA format extension.
    pub lbafee: u8,
    /// Reserved.
    pub reserved3: [u8; 509],
}
const _: () = assert!(size_of::<HostBehavior>() == 512);
