//! Header and data digests: reflected, inverted CRC32C as in iSCSI (TCP 3.3.1), little-endian on
//! the wire.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32C of `data`.
#[must_use]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// CRC32C of data in parts.
#[derive(Clone, Copy)]
pub struct DataDigest(Digest);

impl DataDigest {
    /// Digest of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds bytes.
    pub fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    /// Digest of all bytes so far.
    #[must_use]
    pub fn finish(&self) -> u32 {
        // The CRC is in the low half.
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
