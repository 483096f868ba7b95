//! PDU errors as FES and FEI of the terminate-connection PDU.

use core::fmt;

/// Fatal error status (TCP 3.6.2.4, 3.6.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FatalStatus {
    /// 01h: invalid header field; FEI is its offset.
    InvalidHeaderField,
    /// 02h: unexpected PDU.
    SequenceError,
    /// 03h: wrong header digest; FEI is the received one.
    HeaderDigestError,
    /// 04h: data outside the command or R2T.
    DataOutOfRange,
    /// 05h: too much data from a controller, too many R2Ts from a host.
    LimitExceeded,
    /// 06h: unsupported parameter; FEI is its offset.
    UnsupportedParameter,
    /// A reserved code.
    Other(u16),
}

impl FatalStatus {
    /// The code.
    #[must_use]
    pub const fn to_u16(self) -> u16 {
        match self {
            Self::InvalidHeaderField => 0x01,
            Self::SequenceError => 0x02,
            Self::HeaderDigestError => 0x03,
            Self::DataOutOfRange => 0x04,
            Self::LimitExceeded => 0x05,
            Self::UnsupportedParameter => 0x06,
            Self::Other(code) => code,
        }
    }

    /// Decodes a code.
    #[must_use]
    pub const fn from_u16(code: u16) -> Self {
        match code {
            0x01 => Self::InvalidHeaderField,
            0x02 => Self::SequenceError,
            0x03 => Self::HeaderDigestError,
            0x04 => Self::DataOutOfRange,
            0x05 => Self::LimitExceeded,
            0x06 => Self::UnsupportedParameter,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for FatalStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidHeaderField => f.write_str("Invalid PDU Header Field"),
            Self::SequenceError => f.write_str("PDU Sequence Error"),
            Self::HeaderDigestError => f.write_str("Header Digest Error"),
            Self::DataOutOfRange => f.write_str("Data Transfer Out of Range"),
            Self::LimitExceeded => f.write_str("Data Transfer or R2T Limit Exceeded"),
            Self::UnsupportedParameter => f.write_str("Unsupported Parameter"),
            Self::Other(code) => write!(f, "reserved fatal error status {code:#06x}"),
        }
    }
}

/// An error that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduError {
    /// FES.
    pub status: FatalStatus,
    /// FEI, by [`FatalStatus`]: a header offset, the received digest, or 0.
    pub info: u32,
}

impl PduError {
    /// Unexpected PDU.
    pub const SEQUENCE: Self = Self {
        status: FatalStatus::SequenceError,
        info: 0,
    };
    /// Data outside the command or R2T.
    pub const DATA_OUT_OF_RANGE: Self = Self {
        status: FatalStatus::DataOutOfRange,
        info: 0,
    };
    /// More data or R2Ts than the receiver's limit.
    pub const LIMIT_EXCEEDED: Self = Self {
        status: FatalStatus::LimitExceeded,
        info: 0,
    };

    /// An invalid field at this offset (see [`field`]).
    #[must_use]
    pub const fn field(offset: u32) -> Self {
        Self {
            status: FatalStatus::InvalidHeaderField,
            info: offset,
        }
    }

    /// An unsupported field at this offset.
    #[must_use]
    pub const fn unsupported(offset: u32) -> Self {
        Self {
            status: FatalStatus::UnsupportedParameter,
            info: offset,
        }
    }
}

impl fmt::Display for PduError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            FatalStatus::InvalidHeaderField | FatalStatus::UnsupportedParameter => {
                write!(f, "{} at byte {} of the PDU", self.status, self.info)
            }
            FatalStatus::HeaderDigestError => {
                write!(f, "{}: received {:#010x}", self.status, self.info)
            }
            _ => write!(f, "{}", self.status),
        }
    }
}

impl core::error::Error for PduError {}

/// Offsets of header fields (TCP 3.6.1, 3.6.2.2, 3.6.2.3, 3.6.2.8, 3.6.2.10).
pub mod field {
    /// PDU type.
    pub const PDU_TYPE: u32 = 0;
    /// FLAGS.
    pub const FLAGS: u32 = 1;
    /// HLEN.
    pub const HLEN: u32 = 2;
    /// PDO.
    pub const PDO: u32 = 3;
    /// PLEN.
    pub const PLEN: u32 = 4;
    /// PFV.
    pub const PFV: u32 = 8;
    /// HPDA or CPDA.
    pub const PDA: u32 = 10;
    /// DGST.
    pub const DGST: u32 = 11;
    /// MAXR2T or MAXH2CDATA.
    pub const MAXIMUM: u32 = 12;
    /// CCCID.
    pub const CCCID: u32 = 8;
    /// TTAG.
    pub const TTAG: u32 = 10;
    /// DATAO or R2TO.
    pub const DATAO: u32 = 12;
    /// DATAL or R2TL.
    pub const DATAL: u32 = 16;
}
