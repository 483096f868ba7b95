//! SGL descriptor of an NVMe/TCP command that moves data (Base 4.1.2.1, TCP 3.3.2).
//!
//! Valid are a capsule offset and the transport data block. Others get the status of the base
//! specification.

use crate::{SglDescriptor, Sqe, Status};

/// The place of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPlace {
    /// In the capsule.
    InCapsule {
        /// From the first data byte (ICDOFF is 0).
        offset_bytes: u32,
        /// Length.
        length_bytes: u32,
    },
    /// In C2HData, or R2T and H2CData.
    Transport {
        /// Length.
        length_bytes: u32,
    },
}

impl DataPlace {
    /// Length.
    #[must_use]
    pub const fn length_bytes(&self) -> u32 {
        match *self {
            Self::InCapsule { length_bytes, .. } | Self::Transport { length_bytes } => length_bytes,
        }
    }
}

/// Decodes the descriptor of a capsule with `in_capsule_bytes` of data.
///
/// An error is the command's status; the connection continues.
pub fn decode_sgl(sqe: &Sqe, in_capsule_bytes: u32) -> Result<DataPlace, Status> {
    // Fabrics requires SGLs: PSDT 01b or 10b (Base 3.3.3.1).
    if !matches!(sqe.psdt(), 1 | 2) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let sgl = sqe.sgl();
    let length_bytes = sgl.length_bytes();
    match sgl.kind {
        SglDescriptor::DATA_BLOCK_OFFSET => {
            let offset_bytes = u32::try_from(sgl.address())
                .ok()
                .filter(|&offset| offset <= in_capsule_bytes)
                .ok_or(Status::SGL_OFFSET_INVALID.with_dnr())?;
            if length_bytes > in_capsule_bytes - offset_bytes {
                return Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr());
            }
            Ok(DataPlace::InCapsule {
                offset_bytes,
                length_bytes,
            })
        }
        SglDescriptor::TRANSPORT_DATA_BLOCK => Ok(DataPlace::Transport { length_bytes }),
        _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr()),
    }
}
