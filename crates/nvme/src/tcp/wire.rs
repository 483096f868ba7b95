//! Unchecked PDU headers in wire format, for [`super::parse`].

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// FLAGS: header digest present (TCP 3.6.1).
pub const FLAG_HDGST: u8 = 1 << 0;
/// FLAGS: data digest present (TCP 3.6.1).
pub const FLAG_DDGST: u8 = 1 << 1;
/// FLAGS: last data PDU of a transfer (TCP 3.6.2.8, 3.6.2.9).
pub const FLAG_LAST_PDU: u8 = 1 << 2;
/// FLAGS: success without response PDU (TCP 3.6.2.9).
pub const FLAG_SUCCESS: u8 = 1 << 3;
/// DGST: header digests (TCP 3.6.2.2).
pub const DGST_HEADER: u8 = 1 << 0;
/// DGST: data digests (TCP 3.6.2.2).
pub const DGST_DATA: u8 = 1 << 1;

/// HLEN of ICReq and ICResp.
pub const IC_BYTES: usize = 128;
/// HLEN of H2CTermReq and C2HTermReq.
pub const TERM_REQ_BYTES: usize = 24;
/// HLEN of CapsuleCmd.
pub const CAPSULE_CMD_BYTES: usize = 72;
/// HLEN of CapsuleResp.
pub const CAPSULE_RESP_BYTES: usize = 24;
/// HLEN of H2CData and C2HData.
pub const DATA_BYTES: usize = 24;
/// HLEN of R2T.
pub const R2T_BYTES: usize = 24;

/// PDU type (TCP 3.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PduType {
    /// Initialize Connection Request.
    IcReq = 0x00,
    /// Initialize Connection Response.
    IcResp = 0x01,
    /// Host Terminate Connection Request.
    H2cTermReq = 0x02,
    /// Controller Terminate Connection Request.
    C2hTermReq = 0x03,
    /// Command Capsule.
    CapsuleCmd = 0x04,
    /// Response Capsule.
    CapsuleResp = 0x05,
    /// Host To Controller Data.
    H2cData = 0x06,
    /// Controller To Host Data.
    C2hData = 0x07,
    /// Ready To Transfer.
    R2t = 0x09,
}

impl PduType {
    /// Decodes a type.
    #[must_use]
    pub const fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            0x00 => Self::IcReq,
            0x01 => Self::IcResp,
            0x02 => Self::H2cTermReq,
            0x03 => Self::C2hTermReq,
            0x04 => Self::CapsuleCmd,
            0x05 => Self::CapsuleResp,
            0x06 => Self::H2cData,
            0x07 => Self::C2hData,
            0x09 => Self::R2t,
            _ => return None,
        })
    }

    /// Whether the host sends it.
    #[must_use]
    pub const fn is_from_host(self) -> bool {
        matches!(
            self,
            Self::IcReq | Self::H2cTermReq | Self::CapsuleCmd | Self::H2cData
        )
    }

    /// Its HLEN.
    #[must_use]
    pub const fn header_bytes(self) -> usize {
        match self {
            Self::IcReq | Self::IcResp => IC_BYTES,
            Self::H2cTermReq | Self::C2hTermReq => TERM_REQ_BYTES,
            Self::CapsuleCmd => CAPSULE_CMD_BYTES,
            Self::CapsuleResp => CAPSULE_RESP_BYTES,
            Self::H2cData | Self::C2hData => DATA_BYTES,
            Self::R2t => R2T_BYTES,
        }
    }

    /// Whether digests apply: not when a connection opens or ends.
    #[must_use]
    pub const fn has_digests(self) -> bool {
        !matches!(
            self,
            Self::IcReq | Self::IcResp | Self::H2cTermReq | Self::C2hTermReq
        )
    }
}

/// Common header (TCP 3.6.1).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CommonHeader {
    /// PDU type.
    pub pdu_type: u8,
    /// Flags.
    pub flags: u8,
    /// Header length without digest.
    pub hlen: u8,
    /// Data offset from the PDU's start.
    pub pdo: u8,
    /// Total length.
    pub plen: U32,
}

/// ICReq (TCP 3.6.2.2) or ICResp (TCP 3.6.2.3).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InitializeConnection {
    /// Common header.
    pub ch: CommonHeader,
    /// PFV.
    pub pfv: U16,
    /// HPDA or CPDA.
    pub pda: u8,
    /// DGST.
    pub dgst: u8,
    /// MAXR2T or MAXH2CDATA.
    pub maximum: U32,
    /// Reserved.
    pub reserved: [u8; 112],
}

/// H2CTermReq (TCP 3.6.2.4) or C2HTermReq (TCP 3.6.2.5).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TermReqHeader {
    /// Common header.
    pub ch: CommonHeader,
    /// FES.
    pub fes: U16,
    /// FEI.
    pub fei: U32,
    /// Reserved.
    pub reserved: [u8; 10],
}

/// H2CData (TCP 3.6.2.8), C2HData (3.6.2.9; TTAG reserved) or R2T (3.6.2.10).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TransferHeader {
    /// Common header.
    pub ch: CommonHeader,
    /// CCCID.
    pub cccid: U16,
    /// TTAG.
    pub ttag: U16,
    /// DATAO or R2TO.
    pub offset: U32,
    /// DATAL or R2TL.
    pub length: U32,
    /// Reserved.
    pub reserved: [u8; 4],
}

const _: () = {
    assert!(size_of::<CommonHeader>() == super::COMMON_HEADER_BYTES);
    assert!(size_of::<InitializeConnection>() == IC_BYTES);
    assert!(size_of::<TermReqHeader>() == TERM_REQ_BYTES);
    assert!(size_of::<TransferHeader>() == DATA_BYTES);
    assert!(size_of::<crate::Sqe>() + size_of::<CommonHeader>() == CAPSULE_CMD_BYTES);
    assert!(size_of::<crate::Cqe>() + size_of::<CommonHeader>() == CAPSULE_RESP_BYTES);
    assert!(core::mem::offset_of!(InitializeConnection, pda) == 10);
    assert!(core::mem::offset_of!(InitializeConnection, dgst) == 11);
    assert!(core::mem::offset_of!(InitializeConnection, maximum) == 12);
    assert!(core::mem::offset_of!(TermReqHeader, fes) == 8);
    assert!(core::mem::offset_of!(TermReqHeader, fei) == 10);
    assert!(core::mem::offset_of!(TransferHeader, ttag) == 10);
    assert!(core::mem::offset_of!(TransferHeader, offset) == 12);
    assert!(core::mem::offset_of!(TransferHeader, length) == 16);
};
