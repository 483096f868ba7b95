//! VFIO_USER_VERSION: reads a client's proposal (untrusted JSON) and writes the answer.
//!
//! Unknown members are ignored; known ones must have the right type.

use crate::wire::{VERSION_MAJOR, VERSION_MINOR, u16_at};
use crate::{Errno, MAX_DATA_BYTES, MAX_DESCRIPTORS, MAX_DMA_MAPS};
use serde_json::Value;

/// The most version data accepted, in bytes.
pub const MAX_VERSION_DATA_BYTES: usize = 4096;

/// Accepted page sizes: any multiple of 4 KiB.
const PAGE_SIZES: u64 = 4096;

/// The result of the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The minor version.
    pub minor: u16,
    /// Descriptors that the client accepts in one message.
    pub client_descriptors: u32,
    /// Bytes that the client accepts in one answer.
    pub client_data_bytes: u32,
}

pub(crate) fn judge(payload: &[u8]) -> Result<Negotiated, Errno> {
    let major = u16_at(payload, 0).ok_or(Errno::EINVAL)?;
    let minor = u16_at(payload, 2).ok_or(Errno::EINVAL)?;
    if major != VERSION_MAJOR {
        return Err(Errno::ENOTSUP);
    }
    let mut negotiated = Negotiated {
        minor: minor.min(VERSION_MINOR),
        // The specification's defaults.
        client_descriptors: 1,
        client_data_bytes: 1 << 20,
    };
    let data = payload.get(4..).unwrap_or_default();
    if data.is_empty() {
        return Ok(negotiated);
    }
    if data.len() > MAX_VERSION_DATA_BYTES {
        return Err(Errno::EINVAL);
    }
    let end = data.iter().position(|b| *b == 0).ok_or(Errno::EINVAL)?;
    let json: Value = serde_json::from_slice(&data[..end]).map_err(|_| Errno::EINVAL)?;
    let json = json.as_object().ok_or(Errno::EINVAL)?;
    let Some(capabilities) = json.get("capabilities") else {
        return Ok(negotiated);
    };
    let capabilities = capabilities.as_object().ok_or(Errno::EINVAL)?;
    let number = |name: &str| match capabilities.get(name) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or(Errno::EINVAL),
    };
    if let Some(descriptors) = number("max_msg_fds")? {
        negotiated.client_descriptors = u32::try_from(descriptors).unwrap_or(u32::MAX);
    }
    if let Some(bytes) = number("max_data_xfer_size")? {
        negotiated.client_data_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    }
    if let Some(sizes) = number("pgsizes")? {
        // With smaller pages the client could map parts of a page.
        if sizes == 0 || sizes & (PAGE_SIZES - 1) != 0 {
            return Err(Errno::EINVAL);
        }
    }
    number("max_dma_maps")?;
    Ok(negotiated)
}

pub(crate) fn payload(negotiated: &Negotiated) -> Vec<u8> {
    let mut payload = Vec::with_capacity(256);
    payload.extend_from_slice(&VERSION_MAJOR.to_le_bytes());
    payload.extend_from_slice(&negotiated.minor.to_le_bytes());
    let capabilities = format!(
        "{{\"capabilities\":{{\"max_msg_fds\":{MAX_DESCRIPTORS},\
         \"max_data_xfer_size\":{MAX_DATA_BYTES},\
         \"max_dma_maps\":{MAX_DMA_MAPS},\"pgsizes\":{PAGE_SIZES}}}}}"
    );
    payload.extend_from_slice(capabilities.as_bytes());
    payload.push(0);
    payload
}
