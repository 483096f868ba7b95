//! The place of a volume in an RBD image: one linear run on its RADOS client.
//!
//! A client's addresses are divided into spans of 64 TiB, the size of the largest volume. Each image
//! has one of them.

use super::PoolVolume;
use crate::extents::runs::DeviceRun;
use forebay_xlate::types::DeviceIndex;

/// The size of an extent of a volume in an RBD image, in bytes.
pub const IMAGE_EXTENT_BYTES: u64 = 4 << 20;
const SPAN_SHIFT: u32 = 24;
const SPAN_EXTENTS: u64 = 1 << SPAN_SHIFT;
/// Spans of a client.
pub(crate) const SPANS: u32 = 4096;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ImagePlace {
    pub(crate) client: DeviceIndex,
    /// Below [`SPANS`].
    pub(crate) span: u32,
}

impl ImagePlace {
    /// Extents from `logical` on, up to `limit`, in a volume that has `end`.
    pub(crate) fn run(self, logical: u64, limit: u64, end: u64) -> Option<DeviceRun> {
        let left = end.min(SPAN_EXTENTS).checked_sub(logical)?;
        let first = u64::from(self.span) << SPAN_SHIFT | logical;
        let run = DeviceRun::new(self.client, first, limit.min(left));
        (left > 0).then_some(run)
    }
}

impl PoolVolume {
    pub(crate) fn client(&self) -> Option<DeviceIndex> {
        self.image.map(|image| image.client)
    }
}
