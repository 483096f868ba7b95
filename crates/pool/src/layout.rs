//! Where things are on a device.
//!
//! **Design.** `[0, 8 KiB)` two labels; from 1 MiB on, on the first device, the catalog; then, at a
//! multiple of 1 MiB, the extents. The catalog is sized for every extent mapped badly, so that it
//! does not fill before the pool does. **Not here:** reading or writing any of it.

use crate::error::{PoolError, Result};

/// The smallest extent, in bytes.
pub const MIN_EXTENT_BYTES: u64 = 64 << 10;
/// The largest extent, in bytes.
pub const MAX_EXTENT_BYTES: u64 = 4 << 20;
/// The extent size that a pool has unless told otherwise, in bytes.
pub const DEFAULT_EXTENT_BYTES: u64 = MIN_EXTENT_BYTES;

const MIB: u64 = 1 << 20;
pub(crate) const CATALOG_OFFSET_BYTES: u64 = MIB;
/// The catalog of an empty pool: redb's own, and tenants, volumes and exports.
const CATALOG_BASE_BYTES: u64 = 4 * MIB;
/// What the catalog has per extent. A scattered extent takes some 13 bytes of records (12 of map
/// and 1 of state); [`LIVE_FRACTION`] of the area may be records.
const CATALOG_BYTES_PER_EXTENT: u64 = 48;
/// Records may take one third of the area: a tree's pages are half full, and a transaction writes
/// new pages before old ones are free.
pub(crate) const LIVE_FRACTION: u64 = 3;

/// A device's parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    /// 0 where the device has no catalog.
    pub(crate) catalog_bytes: u64,
    pub(crate) data_offset_bytes: u64,
    pub(crate) extents: u64,
}

/// Lays out all of a pool's devices, given their capacities.
pub(crate) fn plan(capacities: &[u64], extent_bytes: u64) -> Result<Vec<Layout>> {
    if !extent_bytes.is_power_of_two()
        || !(MIN_EXTENT_BYTES..=MAX_EXTENT_BYTES).contains(&extent_bytes)
    {
        return Err(PoolError::invalid(format!(
            "an extent of {extent_bytes} bytes: it must be a power of two from 64 KiB to 4 MiB"
        )));
    }
    if capacities.is_empty() || capacities.len() > 256 {
        return Err(PoolError::invalid(format!(
            "{} devices: a pool has 1 to 256",
            capacities.len()
        )));
    }
    let all: u64 = capacities.iter().map(|bytes| bytes / extent_bytes).sum();
    let catalog = (CATALOG_BASE_BYTES + all * CATALOG_BYTES_PER_EXTENT).next_multiple_of(MIB);
    capacities
        .iter()
        .enumerate()
        .map(|(index, capacity)| {
            let catalog_bytes = if index == 0 { catalog } else { 0 };
            let data_offset_bytes = CATALOG_OFFSET_BYTES + catalog_bytes;
            let extents = capacity.saturating_sub(data_offset_bytes) / extent_bytes;
            if extents == 0 {
                return Err(PoolError::invalid(format!(
                    "device {index} has {capacity} bytes; it needs at least {}",
                    data_offset_bytes + extent_bytes
                )));
            }
            Ok(Layout {
                catalog_bytes,
                data_offset_bytes,
                extents,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans() {
        let plan_two = plan(&[64 << 20, 32 << 20], 65536).unwrap();
        assert_eq!(plan_two[0].data_offset_bytes, 6 << 20);
        assert_eq!(plan_two[0].extents, 58 * 16);
        assert_eq!(
            plan_two[1],
            Layout {
                catalog_bytes: 0,
                data_offset_bytes: 1 << 20,
                extents: 31 * 16
            }
        );
        // Below a thousandth of a large pool.
        let large = plan(&[1 << 40], 65536).unwrap();
        assert!(large[0].catalog_bytes < (1 << 40) / 1000);
        assert!(plan(&[5 << 20], 65536).is_err());
        assert!(plan(&[64 << 20], 1 << 15).is_err());
        assert!(plan(&[64 << 20], 3 << 16).is_err());
        assert!(plan(&[], 65536).is_err());
    }
}
