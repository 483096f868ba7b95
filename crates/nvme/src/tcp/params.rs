//! Negotiation and parameters of a connection (TCP 3.3, 3.6.2.2, 3.6.2.3).
//!
//! One struct serves both roles and directions, with alignments and limits in bytes. The caller
//! sets the in-capsule limit for the queue's kind.

use super::wire::{DGST_DATA, DGST_HEADER};
use super::{ADMIN_IN_CAPSULE_BYTES, IcReq, IcResp, MIN_MAX_H2C_DATA_BYTES, PduError, field};

/// Our side of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The controller.
    Controller,
    /// The host.
    Host,
}

/// Phase of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Only ICReq and ICResp are allowed.
    Initialize,
    /// ICReq and ICResp are no longer allowed.
    Ready,
}

/// Parameters of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpParams {
    /// Our side.
    pub role: Role,
    /// The phase.
    pub phase: Phase,
    /// Header digests in both directions.
    pub header_digest: bool,
    /// Data digests in both directions.
    pub data_digest: bool,
    /// (HPDA + 1) * 4: alignment of data to the host.
    pub host_alignment_bytes: u8,
    /// (CPDA + 1) * 4: alignment of data to the controller.
    pub controller_alignment_bytes: u8,
    /// Maximum in-capsule data.
    pub max_in_capsule_bytes: u32,
    /// Maximum data in a received PDU: a controller's MAXH2CDATA, or a host's own limit.
    pub max_data_bytes: u32,
    /// MAXH2CDATA: maximum data in a host's H2CData.
    pub max_h2c_data_bytes: u32,
    /// Open R2Ts per command: MAXR2T + 1.
    pub max_r2t: u64,
}

/// A controller's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Header digests, if requested.
    pub header_digest: bool,
    /// Data digests, if requested.
    pub data_digest: bool,
    /// Alignment of data from the host: a multiple of 4 in 4..=128.
    pub alignment_bytes: u8,
    /// MAXH2CDATA: a multiple of 4, at least 4096.
    pub max_h2c_data_bytes: u32,
    /// Maximum in-capsule data until the queue's kind is known.
    pub max_in_capsule_bytes: u32,
}

impl Default for Offer {
    fn default() -> Self {
        Self {
            header_digest: true,
            data_digest: true,
            alignment_bytes: 4,
            max_h2c_data_bytes: 128 * 1024,
            max_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
        }
    }
}

/// Maximum alignment, 0's based dwords (TCP 3.6.2.2).
const MAX_PDA: u8 = 31;

impl TcpParams {
    /// A connection before negotiation.
    #[must_use]
    pub const fn before(role: Role) -> Self {
        Self {
            role,
            phase: Phase::Initialize,
            header_digest: false,
            data_digest: false,
            host_alignment_bytes: 4,
            controller_alignment_bytes: 4,
            max_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            max_data_bytes: MIN_MAX_H2C_DATA_BYTES,
            max_h2c_data_bytes: MIN_MAX_H2C_DATA_BYTES,
            max_r2t: 1,
        }
    }

    /// A controller's answer to ICReq. The error is for the C2HTermReq.
    pub fn accept(req: &IcReq, offer: &Offer) -> Result<(Self, IcResp), PduError> {
        if req.pfv != 0 {
            return Err(PduError::unsupported(field::PFV));
        }
        if req.hpda > MAX_PDA {
            return Err(PduError::field(field::PDA));
        }
        let resp = IcResp {
            pfv: 0,
            cpda: (offer.alignment_bytes / 4).saturating_sub(1).min(MAX_PDA),
            header_digest: req.header_digest && offer.header_digest,
            data_digest: req.data_digest && offer.data_digest,
            max_h2c_data_bytes: (offer.max_h2c_data_bytes & !3).max(MIN_MAX_H2C_DATA_BYTES),
        };
        let mut params = Self::agreed(Role::Controller, req, &resp);
        params.max_data_bytes = resp.max_h2c_data_bytes;
        params.max_in_capsule_bytes = offer.max_in_capsule_bytes;
        Ok((params, resp))
    }

    /// A host's parameters after ICResp. The error is for the H2CTermReq.
    ///
    /// It may be an unknown format, an invalid alignment or MAXH2CDATA, or an unrequested digest.
    pub fn connected(req: &IcReq, resp: &IcResp) -> Result<Self, PduError> {
        if resp.pfv != 0 {
            return Err(PduError::unsupported(field::PFV));
        }
        if resp.cpda > MAX_PDA {
            return Err(PduError::field(field::PDA));
        }
        if (resp.header_digest && !req.header_digest) || (resp.data_digest && !req.data_digest) {
            return Err(PduError::field(field::DGST));
        }
        if resp.max_h2c_data_bytes < MIN_MAX_H2C_DATA_BYTES
            || !resp.max_h2c_data_bytes.is_multiple_of(4)
        {
            return Err(PduError::field(field::MAXIMUM));
        }
        let mut params = Self::agreed(Role::Host, req, resp);
        params.max_data_bytes = u32::MAX;
        Ok(params)
    }

    const fn agreed(role: Role, req: &IcReq, resp: &IcResp) -> Self {
        Self {
            role,
            phase: Phase::Ready,
            header_digest: resp.header_digest,
            data_digest: resp.data_digest,
            host_alignment_bytes: (req.hpda + 1) * 4,
            controller_alignment_bytes: (resp.cpda + 1) * 4,
            max_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            max_data_bytes: resp.max_h2c_data_bytes,
            max_h2c_data_bytes: resp.max_h2c_data_bytes,
            max_r2t: req.max_r2t as u64 + 1,
        }
    }

    /// Alignment of received data.
    #[must_use]
    pub const fn rx_alignment_bytes(&self) -> u8 {
        match self.role {
            Role::Controller => self.controller_alignment_bytes,
            Role::Host => self.host_alignment_bytes,
        }
    }

    /// Alignment of sent data.
    #[must_use]
    pub const fn tx_alignment_bytes(&self) -> u8 {
        match self.role {
            Role::Controller => self.host_alignment_bytes,
            Role::Host => self.controller_alignment_bytes,
        }
    }
}

pub(super) const fn dgst_bits(header: bool, data: bool) -> u8 {
    (if header { DGST_HEADER } else { 0 }) | (if data { DGST_DATA } else { 0 })
}
