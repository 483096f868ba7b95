//! NVMe/TCP PDUs as bytes: the codec of both sides of a connection.
//!
//! Purpose: turn bytes of a TCP stream into checked PDU headers, and headers into bytes.
//!
//! Design: the decoder works on headers alone. [`parse`] needs a PDU's header and nothing of its data, and answers
//! where the data begins and how long it is, so that the caller can receive data straight into its final place. One
//! [`TcpParams`] holds what a connection negotiated and serves reading and writing in both roles. Every rule of the
//! common header is checked before a field of the PDU's own is looked at; an error carries exactly what the
//! terminate-connection PDU must say.
//!
//! What it does *not* do: no socket, no allocation, no memory of earlier PDUs (order inside a transfer is for
//! [`crate::host`] and the target to judge), no check of data digests (the data isn't here; see [`DataDigest`]).
//!
//! Section numbers are those of the NVMe/TCP Transport Specification 1.0 ("TCP"), NVMe Base Specification 2.0 ("Base").

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

/// The bytes of the common header, which is all that is needed to know how much more is (TCP 3.6.1).
pub const COMMON_HEADER_BYTES: usize = 8;
/// A digest, of header or data (TCP 3.3.1).
pub const DIGEST_BYTES: usize = 4;
/// The most bytes any `put_*` function but [`put_term_req`] writes: an aligned command capsule's 76 bytes of header and
/// digest, padded to a multiple of 72.
pub const MAX_HEADER_BYTES: usize = 144;
/// The bytes of the offending header that a terminate-connection PDU may carry (TCP 3.6.2.4).
pub const MAX_TERM_DATA_BYTES: usize = 128;
/// The longest terminate-connection PDU (TCP 3.6.2.4).
pub const MAX_TERM_REQ_BYTES: usize = wire::TERM_REQ_BYTES + MAX_TERM_DATA_BYTES;
/// The least that a controller may announce as MAXH2CDATA (TCP 3.6.2.3).
pub const MIN_MAX_H2C_DATA_BYTES: u32 = 4096;
/// What an admin queue's (and a Fabrics command's) capsule may carry over TCP (TCP 3.5).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;

/// A decoded PDU header. Data, where there is some, follows it in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pdu {
    /// The host opens the connection (TCP 3.6.2.2).
    IcReq(IcReq),
    /// The controller accepts it (TCP 3.6.2.3).
    IcResp(IcResp),
    /// The host gives up the connection; the data is the offending header (TCP 3.6.2.4).
    H2cTermReq(TermReq),
    /// The controller gives up the connection; the data is the offending header (TCP 3.6.2.5).
    C2hTermReq(TermReq),
    /// A command, with in-capsule data or without (TCP 3.6.2.6).
    CapsuleCmd(Sqe),
    /// A response (TCP 3.6.2.7).
    CapsuleResp(Cqe),
    /// Data that an R2T asked for (TCP 3.6.2.8).
    H2cData(H2cData),
    /// Data of a command that reads (TCP 3.6.2.9).
    C2hData(C2hData),
    /// The controller asks for data (TCP 3.6.2.10).
    R2t(R2t),
}

/// Initialize Connection Request (TCP 3.6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// PDU Format Version: 0 is the only one.
    pub pfv: u16,
    /// Host PDU Data Alignment, 0's based in dwords, 0..=31.
    pub hpda: u8,
    /// DGST bit 0: the host asks for header digests.
    pub header_digest: bool,
    /// DGST bit 1: the host asks for data digests.
    pub data_digest: bool,
    /// Maximum outstanding R2Ts per command, 0's based (MAXR2T).
    pub max_r2t: u32,
}

/// Initialize Connection Response (TCP 3.6.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    /// PDU Format Version: 0 is the only one.
    pub pfv: u16,
    /// Controller PDU Data Alignment, 0's based in dwords, 0..=31.
    pub cpda: u8,
    /// DGST bit 0: header digests are on.
    pub header_digest: bool,
    /// DGST bit 1: data digests are on.
    pub data_digest: bool,
    /// MAXH2CDATA: the most data bytes in one H2CData PDU.
    pub max_h2c_data_bytes: u32,
}

/// Terminate Connection Request of either side (TCP 3.6.2.4, 3.6.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// FES: why.
    pub status: FatalStatus,
    /// FEI: a byte offset in the offending header, or the received header digest.
    pub info: u32,
}

/// Host To Controller Data Transfer (TCP 3.6.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2cData {
    /// CCCID: the command.
    pub cid: u16,
    /// TTAG of the R2T it answers.
    pub ttag: u16,
    /// DATAO: where in the command's data it belongs.
    pub offset_bytes: u32,
    /// DATAL.
    pub length_bytes: u32,
    /// LAST_PDU: the last one for its R2T.
    pub last: bool,
}

/// Controller To Host Data Transfer (TCP 3.6.2.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct C2hData {
    /// CCCID: the command.
    pub cid: u16,
    /// DATAO: where in the command's data it belongs.
    pub offset_bytes: u32,
    /// DATAL.
    pub length_bytes: u32,
    /// LAST_PDU: the last one for its command.
    pub last: bool,
    /// SUCCESS: no response capsule follows; only with `last`.
    pub success: bool,
}

/// Ready To Transfer (TCP 3.6.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// CCCID: the command.
    pub cid: u16,
    /// TTAG, which the H2CData PDUs repeat.
    pub ttag: u16,
    /// R2TO: where in the command's data the asked-for part begins.
    pub offset_bytes: u32,
    /// R2TL: how long it is.
    pub length_bytes: u32,
}
