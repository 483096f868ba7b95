//! What a connection agreed on, and the agreement itself (TCP 3.3, 3.6.2.2, 3.6.2.3).
//!
//! Design: one `Copy` struct serves both directions and both roles; alignments are kept in bytes, limits in bytes, so
//! that the codec has nothing to convert.
//! What it does *not* do: know queues. Which in-capsule limit applies is set by who learns the queue's kind.

use super::wire::{DGST_DATA, DGST_HEADER};
use super::{ADMIN_IN_CAPSULE_BYTES, IcReq, IcResp, MIN_MAX_H2C_DATA_BYTES, PduError, field};

/// Which side of the connection we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// We are the target's controller.
    Controller,
    /// We are the host.
    Host,
}

/// How far the connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// ICReq and ICResp are not yet exchanged; nothing else may come.
    Initialize,
    /// They are; they must not come again.
    Ready,
}

/// The parameters of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpParams {
    /// Which side we are.
    pub role: Role,
    /// How far the connection is.
    pub phase: Phase,
    /// Header digests are on, in both directions.
    pub header_digest: bool,
    /// Data digests are on, in both directions.
    pub data_digest: bool,
    /// (HPDA + 1) * 4: alignment of the data in PDUs from controller to host.
    pub host_alignment_bytes: u8,
    /// (CPDA + 1) * 4: alignment of the data in PDUs from host to controller.
    pub controller_alignment_bytes: u8,
    /// The most in-capsule data that a command may carry.
    pub max_in_capsule_bytes: u32,
    /// The most data bytes in one received data PDU: for a controller the MAXH2CDATA that it announced, for a host a
    /// limit of its own.
    pub max_data_bytes: u32,
    /// MAXH2CDATA: how a host cuts the data of an R2T.
    pub max_h2c_data_bytes: u32,
    /// How many R2Ts the controller may have open per command (MAXR2T + 1).
    pub max_r2t: u64,
}

/// What a controller is ready to agree to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Header digests may be on, if the host asks.
    pub header_digest: bool,
    /// Data digests may be on, if the host asks.
    pub data_digest: bool,
    /// Alignment that we want of data from the host: a multiple of 4 in 4..=128.
    pub alignment_bytes: u8,
    /// MAXH2CDATA: a multiple of 4, at least 4096.
    pub max_h2c_data_bytes: u32,
    /// The most in-capsule data until the queue's kind is known.
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

/// The largest 0's based dword alignment (TCP 3.6.2.2).
const MAX_PDA: u8 = 31;

impl TcpParams {
    /// A connection on which nothing is agreed yet.
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

    /// A controller's answer to an ICReq.
    ///
    /// # Errors
    /// What the C2HTermReq must say.
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

    /// A host's view of the ICResp to its ICReq.
    ///
    /// # Errors
    /// What the H2CTermReq must say: an unknown format, an alignment or MAXH2CDATA out of range, or a digest that was
    /// not asked for.
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

    /// The alignment of data in PDUs that we receive.
    #[must_use]
    pub const fn rx_alignment_bytes(&self) -> u8 {
        match self.role {
            Role::Controller => self.controller_alignment_bytes,
            Role::Host => self.host_alignment_bytes,
        }
    }

    /// The alignment of data in PDUs that we send.
    #[must_use]
    pub const fn tx_alignment_bytes(&self) -> u8 {
        match self.role {
            Role::Controller => self.host_alignment_bytes,
            Role::Host => self.controller_alignment_bytes,
        }
    }
}

/// DGST of an ICReq or ICResp.
pub(super) const fn dgst_bits(header: bool, data: bool) -> u8 {
    (if header { DGST_HEADER } else { 0 }) | (if data { DGST_DATA } else { 0 })
}
