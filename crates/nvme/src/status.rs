//! The status field of a completion, with the specification's names.
//!
//! The constants hold type and code; the caller adds Do Not Retry.

use std::fmt;

/// Status without the phase tag (Base 2.0, 3.3.3.2.1): SC 7:0, SCT 10:8, CRD 12:11, More 13, Do Not
/// Retry 14.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

const DNR: u16 = 1 << 14;
const MORE: u16 = 1 << 13;

macro_rules! statuses {
    ($( $(#[$doc:meta])* $name:ident = $sct:literal, $sc:literal; )*) => {
        impl Status {
            $( $(#[$doc])* pub const $name: Status = Status($sct << 8 | $sc); )*
            /// The constant's name.
            pub fn name(self) -> Option<&'static str> {
                match self.code() {
                    $( Self::$name => Some(stringify!($name)), )*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    // Generic command status, SCT 0h (Base 2.0, 3.3.3.2.1).
    /// Successful Completion.
    SUCCESS = 0, 0x00;
    /// Invalid Command Opcode.
    INVALID_OPCODE = 0, 0x01;
    /// Invalid Field in Command.
    INVALID_FIELD = 0, 0x02;
    /// Command ID Conflict.
    COMMAND_ID_CONFLICT = 0, 0x03;
    /// Data Transfer Error.
    DATA_TRANSFER_ERROR = 0, 0x04;
    /// Aborted due to Power Loss Notification.
    ABORTED_POWER_LOSS = 0, 0x05;
    /// Internal Error.
    INTERNAL_ERROR = 0, 0x06;
    /// Command Abort Requested.
    COMMAND_ABORT_REQUESTED = 0, 0x07;
    /// Aborted due to SQ Deletion.
    ABORTED_SQ_DELETION = 0, 0x08;
    /// Aborted due to Failed Fused Command.
    ABORTED_FAILED_FUSED = 0, 0x09;
    /// Aborted due to Missing Fused Command.
    ABORTED_MISSING_FUSED = 0, 0x0A;
    /// Invalid Namespace or Format.
    INVALID_NAMESPACE_OR_FORMAT = 0, 0x0B;
    /// Command Sequence Error.
    COMMAND_SEQUENCE_ERROR = 0, 0x0C;
    /// Invalid SGL Segment Descriptor.
    INVALID_SGL_SEGMENT_DESCRIPTOR = 0, 0x0D;
    /// Invalid Number of SGL Descriptors.
    INVALID_NUMBER_OF_SGL_DESCRIPTORS = 0, 0x0E;
    /// Data SGL Length Invalid.
    DATA_SGL_LENGTH_INVALID = 0, 0x0F;
    /// Metadata SGL Length Invalid.
    METADATA_SGL_LENGTH_INVALID = 0, 0x10;
    /// SGL Descriptor Type Invalid.
    SGL_DESCRIPTOR_TYPE_INVALID = 0, 0x11;
    /// PRP Offset Invalid.
    PRP_OFFSET_INVALID = 0, 0x13;
    /// Atomic Write Unit Exceeded.
    ATOMIC_WRITE_UNIT_EXCEEDED = 0, 0x14;
    /// Operation Denied.
    OPERATION_DENIED = 0, 0x15;
    /// SGL Offset Invalid.
    SGL_OFFSET_INVALID = 0, 0x16;
    /// Host Identifier Inconsistent Format.
    HOST_IDENTIFIER_INCONSISTENT_FORMAT = 0, 0x18;
    /// Keep Alive Timer Expired.
    KEEP_ALIVE_TIMER_EXPIRED = 0, 0x19;
    /// Keep Alive Timeout Invalid.
    KEEP_ALIVE_TIMEOUT_INVALID = 0, 0x1A;
    /// SGL Data Block Granularity Invalid.
    SGL_DATA_BLOCK_GRANULARITY_INVALID = 0, 0x1E;
    /// Namespace is Write Protected.
    NAMESPACE_IS_WRITE_PROTECTED = 0, 0x20;
    /// Command Interrupted.
    COMMAND_INTERRUPTED = 0, 0x21;
    /// Transient Transport Error.
    TRANSIENT_TRANSPORT_ERROR = 0, 0x22;
    /// Host Identifier Not Initialized (Base 2.1, 4.2.3.1).
    HOST_IDENTIFIER_NOT_INITIALIZED = 0, 0x27;
    /// LBA Out of Range.
    LBA_OUT_OF_RANGE = 0, 0x80;
    /// Capacity Exceeded.
    CAPACITY_EXCEEDED = 0, 0x81;
    /// Namespace Not Ready.
    NAMESPACE_NOT_READY = 0, 0x82;
    /// Reservation Conflict.
    RESERVATION_CONFLICT = 0, 0x83;
    /// Format In Progress.
    FORMAT_IN_PROGRESS = 0, 0x84;

    // Command specific status, SCT 1h.
    /// Completion Queue Invalid.
    COMPLETION_QUEUE_INVALID = 1, 0x00;
    /// Invalid Queue Identifier.
    INVALID_QUEUE_IDENTIFIER = 1, 0x01;
    /// Invalid Queue Size.
    INVALID_QUEUE_SIZE = 1, 0x02;
    /// Abort Command Limit Exceeded.
    ABORT_COMMAND_LIMIT_EXCEEDED = 1, 0x03;
    /// Asynchronous Event Request Limit Exceeded.
    ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED = 1, 0x05;
    /// Invalid Interrupt Vector.
    INVALID_INTERRUPT_VECTOR = 1, 0x08;
    /// Invalid Firmware Slot.
    INVALID_FIRMWARE_SLOT = 1, 0x06;
    /// Invalid Firmware Image.
    INVALID_FIRMWARE_IMAGE = 1, 0x07;
    /// Invalid Log Page.
    INVALID_LOG_PAGE = 1, 0x09;
    /// Invalid Format.
    INVALID_FORMAT = 1, 0x0A;
    /// Invalid Queue Deletion.
    INVALID_QUEUE_DELETION = 1, 0x0C;
    /// Feature Not Saveable.
    FEATURE_NOT_SAVEABLE = 1, 0x0D;
    /// Feature Not Changeable.
    FEATURE_NOT_CHANGEABLE = 1, 0x0E;
    /// Feature Not Namespace Specific.
    FEATURE_NOT_NAMESPACE_SPECIFIC = 1, 0x0F;
    /// Firmware Activation Requires Maximum Time Violation.
    FIRMWARE_ACTIVATION_MAX_TIME = 1, 0x12;
    /// Firmware Activation Prohibited.
    FIRMWARE_ACTIVATION_PROHIBITED = 1, 0x13;
    /// Overlapping Range.
    OVERLAPPING_RANGE = 1, 0x14;
    /// Namespace Insufficient Capacity.
    NAMESPACE_INSUFFICIENT_CAPACITY = 1, 0x15;
    /// Namespace Identifier Unavailable.
    NAMESPACE_IDENTIFIER_UNAVAILABLE = 1, 0x16;
    /// Namespace Already Attached.
    NAMESPACE_ALREADY_ATTACHED = 1, 0x18;
    /// Namespace Is Private.
    NAMESPACE_IS_PRIVATE = 1, 0x19;
    /// Namespace Not Attached.
    NAMESPACE_NOT_ATTACHED = 1, 0x1A;
    /// Thin Provisioning Not Supported.
    THIN_PROVISIONING_NOT_SUPPORTED = 1, 0x1B;
    /// Controller List Invalid.
    CONTROLLER_LIST_INVALID = 1, 0x1C;
    /// Invalid Controller Identifier.
    INVALID_CONTROLLER_IDENTIFIER = 1, 0x1F;
    /// Invalid Secondary Controller State.
    INVALID_SECONDARY_CONTROLLER_STATE = 1, 0x20;
    /// Invalid Number of Controller Resources.
    INVALID_NUMBER_OF_CONTROLLER_RESOURCES = 1, 0x21;
    /// Invalid Resource Identifier.
    INVALID_RESOURCE_IDENTIFIER = 1, 0x22;
    /// Namespace Attachment Limit Exceeded.
    NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED = 1, 0x27;
    /// I/O Command Set Not Supported.
    IO_COMMAND_SET_NOT_SUPPORTED = 1, 0x29;
    // Fabrics commands.
    /// Connect Incompatible Format.
    CONNECT_INCOMPATIBLE_FORMAT = 1, 0x80;
    /// Connect Controller Busy.
    CONNECT_CONTROLLER_BUSY = 1, 0x81;
    /// Connect Invalid Parameters.
    CONNECT_INVALID_PARAMETERS = 1, 0x82;
    /// Connect Restart Discovery.
    CONNECT_RESTART_DISCOVERY = 1, 0x83;
    /// Connect Invalid Host.
    CONNECT_INVALID_HOST = 1, 0x84;
    /// Invalid Queue Type (Disconnect).
    INVALID_QUEUE_TYPE = 1, 0x85;
    /// Discover Restart.
    DISCOVER_RESTART = 1, 0x90;
    /// Authentication Required.
    AUTHENTICATION_REQUIRED = 1, 0x91;

    // Media and data integrity errors, SCT 2h.
    /// Write Fault.
    WRITE_FAULT = 2, 0x80;
    /// Unrecovered Read Error.
    UNRECOVERED_READ_ERROR = 2, 0x81;
    /// Compare Failure.
    COMPARE_FAILURE = 2, 0x85;
    /// Access Denied.
    ACCESS_DENIED = 2, 0x86;
    /// Deallocated or Unwritten Logical Block.
    DEALLOCATED_OR_UNWRITTEN_BLOCK = 2, 0x87;

    // Path related status, SCT 3h.
    /// Internal Path Error.
    INTERNAL_PATH_ERROR = 3, 0x00;
    /// Asymmetric Access Persistent Loss.
    ASYMMETRIC_ACCESS_PERSISTENT_LOSS = 3, 0x01;
    /// Asymmetric Access Inaccessible.
    ASYMMETRIC_ACCESS_INACCESSIBLE = 3, 0x02;
    /// Asymmetric Access Transition.
    ASYMMETRIC_ACCESS_TRANSITION = 3, 0x03;
    /// Host Pathing Error.
    HOST_PATHING_ERROR = 3, 0x70;
    /// Command Aborted By Host.
    COMMAND_ABORTED_BY_HOST = 3, 0x71;
}

impl Status {
    // These NVM values coincide with Fabrics values; `name` returns those (NVM Command Set 1.0,
    // 3.1).
    /// Conflicting Attributes.
    pub const CONFLICTING_ATTRIBUTES: Status = Status(0x180);
    /// Invalid Protection Information.
    pub const INVALID_PROTECTION_INFORMATION: Status = Status(0x181);
    /// Command Size Limit Exceeded.
    pub const COMMAND_SIZE_LIMIT_EXCEEDED: Status = Status(0x183);

    /// Status code.
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }
    /// Status code type.
    pub const fn sct(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }
    /// Type and code only.
    pub const fn code(self) -> Status {
        Status(self.0 & 0x7FF)
    }
    /// Do Not Retry.
    pub const fn dnr(self) -> bool {
        self.0 & DNR != 0
    }
    /// Details are in the Error Information log.
    pub const fn more(self) -> bool {
        self.0 & MORE != 0
    }
    /// Sets Do Not Retry.
    pub const fn with_dnr(self) -> Status {
        Status(self.0 | DNR)
    }
    /// A device failure: a media and data integrity error except compare failure.
    pub const fn is_media_error(self) -> bool {
        self.sct() == 2 && self.code().0 != Self::COMPARE_FAILURE.0
    }

    /// Whether type and code are zero.
    pub const fn is_success(self) -> bool {
        self.0 & 0x7FF == 0
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name)?,
            None => f.write_str("status")?,
        }
        write!(f, "({:x}h/{:02x}h", self.sct(), self.sc())?;
        if self.dnr() {
            f.write_str(", do not retry")?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_field() {
        let status = Status::CONNECT_INVALID_HOST.with_dnr();
        assert_eq!(status.0, 0x4184);
        assert_eq!(
            (status.sct(), status.sc(), status.dnr(), status.more()),
            (1, 0x84, true, false)
        );
        assert_eq!(status.code(), Status::CONNECT_INVALID_HOST);
        assert!(!status.is_success() && Status::SUCCESS.with_dnr().is_success());
        assert_eq!(
            status.to_string(),
            "CONNECT_INVALID_HOST(1h/84h, do not retry)"
        );
    }
}
