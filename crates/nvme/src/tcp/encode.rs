//! Writes PDU headers into buffers.
//!
//! Each `put_*` writes header, header digest and zeroed padding, and returns their length. The
//! caller appends data and, with [`TcpParams::data_digest`], its little-endian digest. A buffer
//! below [`super::MAX_HEADER_BYTES`] may panic, as buffers are our own.

use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U32};

use super::params::dgst_bits;
use super::wire::{
    CommonHeader, FLAG_DDGST, FLAG_HDGST, FLAG_LAST_PDU, FLAG_SUCCESS, InitializeConnection,
    PduType, TermReqHeader, TransferHeader,
};
use super::{
    C2hData, COMMON_HEADER_BYTES, DIGEST_BYTES, H2cData, IcReq, IcResp, MAX_TERM_DATA_BYTES,
    PduError, R2t, Role, TcpParams, crc32c,
};
use crate::{Cqe, Sqe};

/// Writes an ICReq (TCP 3.6.2.2).
pub fn put_ic_req(out: &mut [u8], req: &IcReq) -> usize {
    let dgst = dgst_bits(req.header_digest, req.data_digest);
    put_ic(out, PduType::IcReq, req.pfv, req.hpda, dgst, req.max_r2t)
}

/// Writes an ICResp (TCP 3.6.2.3).
pub fn put_ic_resp(out: &mut [u8], resp: &IcResp) -> usize {
    let dgst = dgst_bits(resp.header_digest, resp.data_digest);
    let maximum = resp.max_h2c_data_bytes;
    put_ic(out, PduType::IcResp, resp.pfv, resp.cpda, dgst, maximum)
}

fn put_ic(out: &mut [u8], kind: PduType, pfv: u16, pda: u8, dgst: u8, maximum: u32) -> usize {
    let header = InitializeConnection {
        ch: common(kind, 0, 0, kind.header_bytes() as u32),
        pfv: U16::new(pfv),
        pda,
        dgst,
        maximum: U32::new(maximum),
        reserved: [0; 112],
    };
    put(out, header.as_bytes())
}

/// Writes a terminate-connection PDU (TCP 3.6.2.4, 3.6.2.5), with the offending header truncated to
/// fit. `out` must hold [`super::MAX_TERM_REQ_BYTES`].
pub fn put_term_req(
    out: &mut [u8],
    role: Role,
    error: &PduError,
    offending_header: &[u8],
) -> usize {
    let kind = match role {
        Role::Host => PduType::H2cTermReq,
        Role::Controller => PduType::C2hTermReq,
    };
    let echo = &offending_header[..offending_header.len().min(MAX_TERM_DATA_BYTES)];
    let header = TermReqHeader {
        ch: common(kind, 0, 0, (kind.header_bytes() + echo.len()) as u32),
        fes: U16::new(error.status.to_u16()),
        fei: U32::new(error.info),
        reserved: [0; 10],
    };
    let at = put(out, header.as_bytes());
    at + put(&mut out[at..], echo)
}

/// Writes a command capsule without its data (TCP 3.6.2.6).
pub fn put_capsule_cmd(
    out: &mut [u8],
    params: &TcpParams,
    sqe: &Sqe,
    in_capsule_bytes: u32,
) -> usize {
    let ch = negotiated(PduType::CapsuleCmd, 0, params, in_capsule_bytes);
    put(out, ch.as_bytes());
    put(&mut out[COMMON_HEADER_BYTES..], sqe.as_bytes());
    finish(out, &ch, in_capsule_bytes)
}

/// Writes a response capsule: 24 bytes, 28 with header digest (TCP 3.6.2.7).
pub fn put_capsule_resp(out: &mut [u8], params: &TcpParams, cqe: &Cqe) -> usize {
    let ch = negotiated(PduType::CapsuleResp, 0, params, 0);
    put(out, ch.as_bytes());
    put(&mut out[COMMON_HEADER_BYTES..], cqe.as_bytes());
    finish(out, &ch, 0)
}

/// Writes an H2CData header (TCP 3.6.2.8).
pub fn put_h2c_data(out: &mut [u8], params: &TcpParams, data: &H2cData) -> usize {
    let flags = if data.last { FLAG_LAST_PDU } else { 0 };
    let header = TransferHeader {
        ch: negotiated(PduType::H2cData, flags, params, data.length_bytes),
        cccid: U16::new(data.cid),
        ttag: U16::new(data.ttag),
        offset: U32::new(data.offset_bytes),
        length: U32::new(data.length_bytes),
        reserved: [0; 4],
    };
    put(out, header.as_bytes());
    finish(out, &header.ch, data.length_bytes)
}

/// Writes a C2HData header: at least 24 bytes (TCP 3.6.2.9).
pub fn put_c2h_data(out: &mut [u8], params: &TcpParams, data: &C2hData) -> usize {
    let flags =
        if data.last { FLAG_LAST_PDU } else { 0 } | if data.success { FLAG_SUCCESS } else { 0 };
    let header = TransferHeader {
        ch: negotiated(PduType::C2hData, flags, params, data.length_bytes),
        cccid: U16::new(data.cid),
        ttag: U16::new(0),
        offset: U32::new(data.offset_bytes),
        length: U32::new(data.length_bytes),
        reserved: [0; 4],
    };
    put(out, header.as_bytes());
    finish(out, &header.ch, data.length_bytes)
}

/// Writes an R2T: 24 bytes, 28 with header digest (TCP 3.6.2.10).
pub fn put_r2t(out: &mut [u8], params: &TcpParams, r2t: &R2t) -> usize {
    let header = TransferHeader {
        ch: negotiated(PduType::R2t, 0, params, 0),
        cccid: U16::new(r2t.cid),
        ttag: U16::new(r2t.ttag),
        offset: U32::new(r2t.offset_bytes),
        length: U32::new(r2t.length_bytes),
        reserved: [0; 4],
    };
    put(out, header.as_bytes());
    finish(out, &header.ch, 0)
}

fn common(kind: PduType, flags: u8, pdo: u8, plen: u32) -> CommonHeader {
    CommonHeader {
        pdu_type: kind as u8,
        flags,
        hlen: kind.header_bytes() as u8,
        pdo,
        plen: U32::new(plen),
    }
}

/// A common header with negotiated digests and alignment.
fn negotiated(kind: PduType, flags: u8, params: &TcpParams, data_bytes: u32) -> CommonHeader {
    let mut flags = flags;
    let mut bytes = kind.header_bytes();
    if params.header_digest {
        flags |= FLAG_HDGST;
        bytes += DIGEST_BYTES;
    }
    if data_bytes == 0 {
        return common(kind, flags, 0, bytes as u32);
    }
    let pdo = bytes.next_multiple_of(usize::from(params.tx_alignment_bytes()).max(4));
    let mut plen = (pdo as u32).saturating_add(data_bytes);
    if params.data_digest {
        flags |= FLAG_DDGST;
        plen = plen.saturating_add(DIGEST_BYTES as u32);
    }
    common(kind, flags, pdo as u8, plen)
}

/// Appends digest and padding; returns the data's offset.
fn finish(out: &mut [u8], ch: &CommonHeader, data_bytes: u32) -> usize {
    let mut at = usize::from(ch.hlen);
    if ch.flags & FLAG_HDGST != 0 {
        let digest = crc32c(&out[..at]);
        at += put(&mut out[at..], &digest.to_le_bytes());
    }
    if data_bytes > 0 {
        let pdo = usize::from(ch.pdo);
        out[at..pdo].fill(0);
        at = pdo;
    }
    at
}

fn put(out: &mut [u8], bytes: &[u8]) -> usize {
    out[..bytes.len()].copy_from_slice(bytes);
    bytes.len()
}
