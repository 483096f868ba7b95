//! The status of a response (4.1.2, figure 26).

/// A response's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MiStatus(pub u8);

impl MiStatus {
    /// Success.
    pub const SUCCESS: Self = Self(0x00);
    /// More Processing Required: the response follows later.
    pub const MORE_PROCESSING_REQUIRED: Self = Self(0x01);
    /// Internal Error.
    pub const INTERNAL_ERROR: Self = Self(0x02);
    /// Invalid Command Opcode: reserved, or not implemented.
    pub const INVALID_OPCODE: Self = Self(0x03);
    /// Invalid Parameter.
    pub const INVALID_PARAMETER: Self = Self(0x04);
    /// Invalid Command Size.
    pub const INVALID_SIZE: Self = Self(0x05);
    /// Invalid Command Input Data Size.
    pub const INVALID_INPUT_SIZE: Self = Self(0x06);
    /// Access Denied.
    pub const ACCESS_DENIED: Self = Self(0x07);
    /// VPD Updates Exceeded.
    pub const VPD_UPDATES_EXCEEDED: Self = Self(0x20);
    /// PCIe Inaccessible.
    pub const PCIE_INACCESSIBLE: Self = Self(0x21);
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MiRefusal {
    /// An error without further fields.
    Status(MiStatus),
    /// Invalid Parameter, and the place of its lowest byte and bit in the message (figure 29).
    Parameter {
        /// From the message's type, which is byte 0.
        byte: u16,
        /// 0 to 7.
        bit: u8,
    },
}

impl MiRefusal {
    pub(super) const OPCODE: Self = Self::Status(MiStatus::INVALID_OPCODE);
    pub(super) const SIZE: Self = Self::Status(MiStatus::INVALID_SIZE);
    pub(super) const INPUT_SIZE: Self = Self::Status(MiStatus::INVALID_INPUT_SIZE);

    /// An invalid parameter that begins with byte `byte` of the message.
    #[must_use]
    pub const fn at(byte: u16) -> Self {
        Self::Parameter { byte, bit: 0 }
    }
}
