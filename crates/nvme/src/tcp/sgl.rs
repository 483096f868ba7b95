//! SGL Descriptor 1 of a command over NVMe/TCP: where its data is (Base 4.1.2.1, TCP 3.3.2).
//!
//! Design: only two descriptors exist here: an offset into the capsule, and the transport's data block. Anything else
//! gets the status that the base specification names for it.
//! What it does *not* do: know whether the command moves data. Call it only for one that does.

use crate::{SglDescriptor, Sqe, Status};

/// Where a command's data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPlace {
    /// In the capsule, so many bytes behind the first data byte.
    InCapsule {
        /// From the first data byte (ICDOFF is 0 over TCP).
        offset_bytes: u32,
        /// How long it is.
        length_bytes: u32,
    },
    /// Moved by C2HData, or by R2T and H2CData.
    Transport {
        /// How long it is.
        length_bytes: u32,
    },
}

impl DataPlace {
    /// How long the data is.
    #[must_use]
    pub const fn length_bytes(&self) -> u32 {
        match *self {
            Self::InCapsule { length_bytes, .. } | Self::Transport { length_bytes } => length_bytes,
        }
    }
}

/// Reads SGL Descriptor 1 of a command whose capsule carries `in_capsule_bytes` of data.
///
/// # Errors
/// The status to end the command with. The connection goes on.
pub fn decode_sgl(sqe: &Sqe, in_capsule_bytes: u32) -> Result<DataPlace, Status> {
    // Fabrics commands must use SGLs: PSDT 01b or 10b (Base 3.3.3.1).
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
