//! Decodes and checks PDU headers.
//!
//! [`parse`] depends only on the bytes and the parameters; it never asks for data. The header
//! digest is checked before fields after the common header. Callers check TTAG, CCCID and offsets
//! across PDUs. Reserved fields are ignored, as the specification requires.

use zerocopy::FromBytes;

use super::wire::{
    CommonHeader, DGST_DATA, DGST_HEADER, FLAG_DDGST, FLAG_HDGST, FLAG_LAST_PDU, FLAG_SUCCESS,
    InitializeConnection, PduType, TermReqHeader, TransferHeader,
};
use super::{
    C2hData, COMMON_HEADER_BYTES, DIGEST_BYTES, FatalStatus, H2cData, IcReq, IcResp,
    MAX_TERM_DATA_BYTES, Pdu, PduError, Phase, R2t, Role, TcpParams, TermReq, crc32c, field,
};
use crate::{Cqe, Sqe};

/// The result of [`parse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// Call again with at least this many bytes of the PDU.
    NeedMore(usize),
    /// A complete, valid header.
    Pdu(Frame),
}

/// A PDU's header and the place of its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The header.
    pub pdu: Pdu,
    /// Offset of the data: header, header digest, padding.
    pub header_bytes: usize,
    /// Length of the data.
    pub data_bytes: usize,
    /// Whether [`DIGEST_BYTES`] follow the data.
    pub data_digest: bool,
}

impl Frame {
    /// The PDU's length.
    #[must_use]
    pub const fn total_bytes(&self) -> usize {
        self.header_bytes + self.data_bytes + if self.data_digest { DIGEST_BYTES } else { 0 }
    }
}

/// Parses the header of the PDU at the start of `buf`.
///
/// An error is for the terminate-connection PDU; the rest of the stream is unusable.
pub fn parse(buf: &[u8], params: &TcpParams) -> Result<Parsed, PduError> {
    let Ok((ch, _)) = CommonHeader::ref_from_prefix(buf) else {
        return Ok(Parsed::NeedMore(COMMON_HEADER_BYTES));
    };
    let kind = PduType::from_u8(ch.pdu_type).ok_or(PduError::field(field::PDU_TYPE))?;
    check_turn(kind, params)?;
    let layout = PduLayout::of(kind, ch, params)?;
    let Some(header) = buf.get(..layout.header_bytes) else {
        return Ok(Parsed::NeedMore(layout.header_bytes));
    };
    if layout.header_digest {
        check_header_digest(header, kind.header_bytes())?;
    }
    let pdu = decode(kind, header, layout.data_bytes)?;
    Ok(Parsed::Pdu(Frame {
        pdu,
        header_bytes: layout.header_bytes,
        data_bytes: layout.data_bytes,
        data_digest: layout.data_digest,
    }))
}

/// Checks sender (TCP 3.6.2) and phase (TCP 3.4).
fn check_turn(kind: PduType, params: &TcpParams) -> Result<(), PduError> {
    if kind.is_from_host() != (params.role == Role::Controller) {
        return Err(PduError::field(field::PDU_TYPE));
    }
    let in_turn = match kind {
        PduType::IcReq | PduType::IcResp => params.phase == Phase::Initialize,
        PduType::H2cTermReq | PduType::C2hTermReq => true,
        _ => params.phase == Phase::Ready,
    };
    if in_turn {
        Ok(())
    } else {
        Err(PduError::SEQUENCE)
    }
}

struct PduLayout {
    header_bytes: usize,
    data_bytes: usize,
    header_digest: bool,
    data_digest: bool,
}

impl PduLayout {
    /// Checks the common header (TCP 3.6.1).
    fn of(kind: PduType, ch: &CommonHeader, params: &TcpParams) -> Result<Self, PduError> {
        let hlen = kind.header_bytes();
        if usize::from(ch.hlen) != hlen {
            return Err(PduError::field(field::HLEN));
        }
        let header_digest = kind.has_digests() && params.header_digest;
        if kind.has_digests() && (ch.flags & FLAG_HDGST != 0) != header_digest {
            return Err(PduError::field(field::FLAGS));
        }
        let bare_bytes = hlen + if header_digest { DIGEST_BYTES } else { 0 };
        let plen = ch.plen.get() as usize;
        if plen < bare_bytes {
            return Err(PduError::field(field::PLEN));
        }
        match kind {
            PduType::IcReq | PduType::IcResp | PduType::CapsuleResp | PduType::R2t => {
                if plen != bare_bytes {
                    return Err(PduError::field(field::PLEN));
                }
                Ok(Self::bare(bare_bytes, header_digest))
            }
            PduType::H2cTermReq | PduType::C2hTermReq => {
                // PDO is reserved; the data follows directly (TCP 3.6.2.4).
                let data_bytes = plen - bare_bytes;
                if data_bytes > MAX_TERM_DATA_BYTES {
                    return Err(PduError::field(field::PLEN));
                }
                Ok(Self {
                    data_bytes,
                    ..Self::bare(bare_bytes, false)
                })
            }
            PduType::CapsuleCmd if plen == bare_bytes => {
                // No data, hence no digest; PDO is reserved (TCP 3.6.2.6).
                if ch.flags & FLAG_DDGST != 0 {
                    return Err(PduError::field(field::FLAGS));
                }
                Ok(Self::bare(bare_bytes, header_digest))
            }
            PduType::CapsuleCmd => {
                let limit = params.max_in_capsule_bytes;
                Self::with_data(ch, bare_bytes, plen, header_digest, params, limit)
            }
            PduType::H2cData | PduType::C2hData => {
                let limit = params.max_data_bytes;
                Self::with_data(ch, bare_bytes, plen, header_digest, params, limit)
            }
        }
    }

    const fn bare(header_bytes: usize, header_digest: bool) -> Self {
        Self {
            header_bytes,
            data_bytes: 0,
            header_digest,
            data_digest: false,
        }
    }

    fn with_data(
        ch: &CommonHeader,
        bare_bytes: usize,
        plen: usize,
        header_digest: bool,
        params: &TcpParams,
        limit_bytes: u32,
    ) -> Result<Self, PduError> {
        let data_digest = params.data_digest;
        if (ch.flags & FLAG_DDGST != 0) != data_digest {
            return Err(PduError::field(field::FLAGS));
        }
        // PDO is past header and digest and a multiple of the receiver's alignment (TCP 3.6.1).
        let pdo = usize::from(ch.pdo);
        let alignment = usize::from(params.rx_alignment_bytes()).max(4);
        if pdo < bare_bytes || !pdo.is_multiple_of(alignment) {
            return Err(PduError::field(field::PDO));
        }
        let digest_bytes = if data_digest { DIGEST_BYTES } else { 0 };
        let data_bytes = plen
            .checked_sub(pdo + digest_bytes)
            .filter(|&bytes| bytes > 0)
            .ok_or(PduError::field(field::PLEN))?;
        if data_bytes > limit_bytes as usize {
            return Err(PduError::LIMIT_EXCEEDED);
        }
        Ok(Self {
            header_bytes: pdo,
            data_bytes,
            header_digest,
            data_digest,
        })
    }
}

/// The digest follows the header and covers it without padding (TCP 3.3.1.1).
fn check_header_digest(header: &[u8], hlen: usize) -> Result<(), PduError> {
    let Some((covered, rest)) = header.split_at_checked(hlen) else {
        return Err(PduError::field(field::HLEN));
    };
    let Some(received) = rest.first_chunk::<DIGEST_BYTES>() else {
        return Err(PduError::field(field::PLEN));
    };
    let received = u32::from_le_bytes(*received);
    if received == crc32c(covered) {
        Ok(())
    } else {
        Err(PduError {
            status: FatalStatus::HeaderDigestError,
            info: received,
        })
    }
}

/// `header` holds at least HLEN bytes.
fn decode(kind: PduType, header: &[u8], data_bytes: usize) -> Result<Pdu, PduError> {
    const SHORT: PduError = PduError::field(field::PLEN);
    Ok(match kind {
        PduType::IcReq | PduType::IcResp => {
            let (ic, _) = InitializeConnection::ref_from_prefix(header).map_err(|_| SHORT)?;
            let header_digest = ic.dgst & DGST_HEADER != 0;
            let data_digest = ic.dgst & DGST_DATA != 0;
            if kind == PduType::IcReq {
                Pdu::IcReq(IcReq {
                    pfv: ic.pfv.get(),
                    hpda: ic.pda,
                    header_digest,
                    data_digest,
                    max_r2t: ic.maximum.get(),
                })
            } else {
                Pdu::IcResp(IcResp {
                    pfv: ic.pfv.get(),
                    cpda: ic.pda,
                    header_digest,
                    data_digest,
                    max_h2c_data_bytes: ic.maximum.get(),
                })
            }
        }
        PduType::H2cTermReq | PduType::C2hTermReq => {
            let (term, _) = TermReqHeader::ref_from_prefix(header).map_err(|_| SHORT)?;
            let term_req = TermReq {
                status: FatalStatus::from_u16(term.fes.get()),
                info: term.fei.get(),
            };
            if kind == PduType::H2cTermReq {
                Pdu::H2cTermReq(term_req)
            } else {
                Pdu::C2hTermReq(term_req)
            }
        }
        PduType::CapsuleCmd => {
            let body = header.get(COMMON_HEADER_BYTES..).ok_or(SHORT)?;
            Pdu::CapsuleCmd(Sqe::read_from_prefix(body).map_err(|_| SHORT)?.0)
        }
        PduType::CapsuleResp => {
            let body = header.get(COMMON_HEADER_BYTES..).ok_or(SHORT)?;
            Pdu::CapsuleResp(Cqe::read_from_prefix(body).map_err(|_| SHORT)?.0)
        }
        PduType::H2cData | PduType::C2hData | PduType::R2t => {
            let (transfer, _) = TransferHeader::ref_from_prefix(header).map_err(|_| SHORT)?;
            return decode_transfer(kind, transfer, data_bytes);
        }
    })
}

/// DATAO and R2TO are multiples of 4; their ends fit in 32 bits; DATAL must agree with PLEN (TCP
/// 3.6.2.8 to 3.6.2.10).
fn decode_transfer(
    kind: PduType,
    transfer: &TransferHeader,
    data_bytes: usize,
) -> Result<Pdu, PduError> {
    let cid = transfer.cccid.get();
    let ttag = transfer.ttag.get();
    let offset_bytes = transfer.offset.get();
    let length_bytes = transfer.length.get();
    let last = transfer.ch.flags & FLAG_LAST_PDU != 0;
    let success = transfer.ch.flags & FLAG_SUCCESS != 0;
    if !offset_bytes.is_multiple_of(4) {
        return Err(PduError::field(field::DATAO));
    }
    if length_bytes == 0 || (kind != PduType::R2t && length_bytes as usize != data_bytes) {
        return Err(PduError::field(field::DATAL));
    }
    if offset_bytes.checked_add(length_bytes).is_none() {
        return Err(PduError::DATA_OUT_OF_RANGE);
    }
    match kind {
        PduType::H2cData => Ok(Pdu::H2cData(H2cData {
            cid,
            ttag,
            offset_bytes,
            length_bytes,
            last,
        })),
        PduType::C2hData if success && !last => Err(PduError::field(field::FLAGS)),
        PduType::C2hData => Ok(Pdu::C2hData(C2hData {
            cid,
            offset_bytes,
            length_bytes,
            last,
            success,
        })),
        _ => Ok(Pdu::R2t(R2t {
            cid,
            ttag,
            offset_bytes,
            length_bytes,
        })),
    }
}
