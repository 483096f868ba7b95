//! Header and data digests: CRC32C as iSCSI has it, with the usual reflection and inversion (TCP 3.3.1).
//!
//! Design: a thin face over `crc-fast`, so that one place decides on the algorithm. On the wire a digest is the value
//! in little-endian order.
//! What it does *not* do: decide whether a digest is there; [`super::Frame`] says so.

use crc_fast::{CrcAlgorithm, Digest};

/// The CRC32C of `data`.
#[must_use]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// A CRC32C that is made in parts, for data that arrives in parts.
#[derive(Clone, Copy)]
pub struct DataDigest(Digest);

impl DataDigest {
    /// The digest of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds the next bytes.
    pub fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    /// The digest of all bytes so far.
    #[must_use]
    pub fn finish(&self) -> u32 {
        // A 32-bit CRC is returned in the low half.
        (self.0.finalize() & 0xffff_ffff) as u32
    }
}

impl Default for DataDigest {
    fn default() -> Self {
        Self::new()
    }
}

impl core::fmt::Debug for DataDigest {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DataDigest({:#010x})", self.finish())
    }
}
