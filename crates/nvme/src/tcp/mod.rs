//! Codec of NVMe/TCP PDUs, for hosts and controllers.
//!
//! [`parse`] needs only a PDU's header and returns the place and length of its data, so callers
//! receive data directly into its buffer. The common header is checked before other fields; an
//! error has the contents of the terminate-connection PDU. [`TcpParams`] holds the negotiated
//! parameters. PDU order is checked by [`crate::host`] and the target, data digests with
//! [`DataDigest`].
//!
//! "TCP" is the NVMe/TCP Transport Specification 1.0, "Base" the NVMe Base Specification 2.0.

mod decode;
mod digest;
mod encode;
mod error;
mod params;
mod sgl;
#[cfg(test)]
mod tests;
pub mod wire;

pub use decode::{Frame, Parsed, parse};
pub use digest::{DataDigest, crc32c};
pub use encode::{
    put_c2h_data, put_capsule_cmd, put_capsule_resp, put_h2c_data, put_ic_req, put_ic_resp,
    put_r2t, put_term_req,
};
pub use error::{FatalStatus, PduError, field};
pub use params::{Offer, Phase, Role, TcpParams};
pub use sgl::{DataPlace, decode_sgl};

use crate::{Cqe, Sqe};

/// Size of the common header, which tells a PDU's length (TCP 3.6.1).
pub const COMMON_HEADER_BYTES: usize = 8;
/// Size of a digest (TCP 3.3.1).
pub const DIGEST_BYTES: usize = 4;
/// Maximum output of `put_*` except [`put_term_req`]: an aligned command capsule has 76 bytes,
/// padded to a multiple of 72.
pub const MAX_HEADER_BYTES: usize = 144;
/// Maximum bytes of the offending header in a terminate-connection PDU (TCP 3.6.2.4).
pub const MAX_TERM_DATA_BYTES: usize = 128;
/// Maximum terminate-connection PDU (TCP 3.6.2.4).
pub const MAX_TERM_REQ_BYTES: usize = wire::TERM_REQ_BYTES + MAX_TERM_DATA_BYTES;
/// Minimum MAXH2CDATA (TCP 3.6.2.3).
pub const MIN_MAX_H2C_DATA_BYTES: u32 = 4096;
/// In-capsule data of admin and Fabrics commands (TCP 3.5).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;

/// A decoded PDU header. Its data, if any, follows in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pdu {
    /// Connection request (TCP 3.6.2.2).
    IcReq(IcReq),
    /// Connection response (TCP 3.6.2.3).
    IcResp(IcResp),
    /// The host terminates; the data is the offending header (TCP 3.6.2.4).
    H2cTermReq(TermReq),
    /// The controller terminates; the data is the offending header (TCP 3.6.2.5).
    C2hTermReq(TermReq),
    /// A command, possibly with data (TCP 3.6.2.6).
    CapsuleCmd(Sqe),
    /// A response (TCP 3.6.2.7).
    CapsuleResp(Cqe),
    /// Data for an R2T (TCP 3.6.2.8).
    H2cData(H2cData),
    /// Data read (TCP 3.6.2.9).
    C2hData(C2hData),
    /// Request for data (TCP 3.6.2.10).
    R2t(R2t),
}

/// Initialize Connection Request (TCP 3.6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// Format version, always 0.
    pub pfv: u16,
    /// Host data alignment, 0's based dwords, 0..=31.
    pub hpda: u8,
    /// Request header digests.
    pub header_digest: bool,
    /// Request data digests.
    pub data_digest: bool,
    /// MAXR2T: outstanding R2Ts per command, 0's based.
    pub max_r2t: u32,
}

/// Initialize Connection Response (TCP 3.6.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    /// Format version, always 0.
    pub pfv: u16,
    /// Controller data alignment, 0's based dwords, 0..=31.
    pub cpda: u8,
    /// Header digests are on.
    pub header_digest: bool,
    /// Data digests are on.
    pub data_digest: bool,
    /// MAXH2CDATA: maximum data in an H2CData PDU.
    pub max_h2c_data_bytes: u32,
}

/// Terminate Connection Request (TCP 3.6.2.4, 3.6.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// FES: the reason.
    pub status: FatalStatus,
    /// FEI: an offset in the offending header, or the received header digest.
    pub info: u32,
}

/// Host-to-controller data (TCP 3.6.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2cData {
    /// CCCID.
    pub cid: u16,
    /// TTAG of the R2T.
    pub ttag: u16,
    /// DATAO: offset in the command's data.
    pub offset_bytes: u32,
    /// DATAL.
    pub length_bytes: u32,
    /// Last PDU of its R2T.
    pub last: bool,
}

/// Controller-to-host data (TCP 3.6.2.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct C2hData {
    /// CCCID.
    pub cid: u16,
    /// DATAO: offset in the command's data.
    pub offset_bytes: u32,
    /// DATAL.
    pub length_bytes: u32,
    /// Last PDU of its command.
    pub last: bool,
    /// No response follows; only with `last`.
    pub success: bool,
}

/// Ready To Transfer (TCP 3.6.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// CCCID.
    pub cid: u16,
    /// TTAG, repeated by H2CData.
    pub ttag: u16,
    /// R2TO: offset in the command's data.
    pub offset_bytes: u32,
    /// R2TL.
    pub length_bytes: u32,
}
