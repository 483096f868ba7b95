//! The layout of a device.
//!
//! `[0, 1 MiB)` holds the labels; then follow up to two catalog areas, and at a multiple of 1 MiB
//! the extents. All areas of a pool have one size, enough for the worst mapping. Each device has an
//! area, so that it can take a copy, unless it is too small. If only one device can have one, it
//! has two.

use crate::error::{PoolError, Result};
use forebay_device::size::format_bytes;

/// The smallest extent, in bytes.
pub const MIN_EXTENT_BYTES: u64 = 64 << 10;
/// The largest extent, in bytes.
pub const MAX_EXTENT_BYTES: u64 = 4 << 20;
/// The default extent size, in bytes.
pub const DEFAULT_EXTENT_BYTES: u64 = MIN_EXTENT_BYTES;
/// Each takes a byte of memory. 64 TiB of the smallest.
pub(crate) const MAX_DEVICE_EXTENTS: u64 = 1 << 30;
/// The most devices of a pool.
pub const MAX_DEVICES: usize = 256;

const MIB: u64 = 1 << 20;
pub(crate) const CATALOG_OFFSET_BYTES: u64 = MIB;
/// An empty catalog: redb's own part, tenants, volumes and exports.
const CATALOG_BASE_BYTES: u64 = 4 * MIB;
/// A scattered extent takes about 4 bytes of records: 3 of map, at most 1 of state. The pool keeps
/// 14 free for it (`spare`). [`LIVE_FRACTION`] of the area may be records, which gives 16 per
/// extent.
const CATALOG_BYTES_PER_EXTENT: u64 = 48;
/// One third: a tree's pages are half full, and a transaction writes new pages before it frees old
/// ones.
pub(crate) const LIVE_FRACTION: u64 = 3;
/// An area may take at most a quarter of a device.
const AREA_FRACTION: u64 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    /// 0 to 2.
    pub(crate) catalog_areas: u32,
    pub(crate) catalog_bytes: u64,
    pub(crate) data_offset_bytes: u64,
    pub(crate) extents: u64,
}

fn lay_out(
    what: &str,
    capacity: u64,
    catalog_areas: u32,
    catalog_bytes: u64,
    extent_bytes: u64,
) -> Result<Layout> {
    let data_offset_bytes = CATALOG_OFFSET_BYTES + u64::from(catalog_areas) * catalog_bytes;
    let extents = capacity.saturating_sub(data_offset_bytes) / extent_bytes;
    if extents == 0 {
        return Err(PoolError::invalid(format!(
            "{what} has {}; it needs at least {}",
            format_bytes(capacity),
            format_bytes(data_offset_bytes + extent_bytes)
        )));
    }
    if extents > MAX_DEVICE_EXTENTS {
        return Err(PoolError::invalid(format!(
            "{what} has room for {extents} extents of {}, but {MAX_DEVICE_EXTENTS} is the maximum: \
             use larger extents, or a part of the device",
            format_bytes(extent_bytes)
        )));
    }
    Ok(Layout {
        catalog_areas,
        catalog_bytes: if catalog_areas == 0 { 0 } else { catalog_bytes },
        data_offset_bytes,
        extents,
    })
}

fn has_room(capacity: u64, catalog_bytes: u64) -> bool {
    catalog_bytes <= capacity / AREA_FRACTION
}

/// Whether a new pool has room on devices of these capacities.
///
/// # Errors
/// The reason if it has not.
pub fn check_room(capacities: &[u64], extent_bytes: u64) -> Result<()> {
    plan(capacities, extent_bytes).map(drop)
}

pub(crate) fn plan(capacities: &[u64], extent_bytes: u64) -> Result<Vec<Layout>> {
    if !extent_bytes.is_power_of_two()
        || !(MIN_EXTENT_BYTES..=MAX_EXTENT_BYTES).contains(&extent_bytes)
    {
        return Err(PoolError::invalid(format!(
            "an extent of {}: it must be a power of two from 64 KiB to 4 MiB",
            format_bytes(extent_bytes)
        )));
    }
    if capacities.is_empty() || capacities.len() > MAX_DEVICES {
        return Err(PoolError::invalid(format!(
            "{} devices: a pool has 1 to {MAX_DEVICES}",
            capacities.len()
        )));
    }
    let all: u64 = capacities.iter().map(|bytes| bytes / extent_bytes).sum();
    let catalog_bytes = (CATALOG_BASE_BYTES + all * CATALOG_BYTES_PER_EXTENT).next_multiple_of(MIB);
    let others = capacities.iter().skip(1);
    let alone = !others
        .clone()
        .any(|capacity| has_room(*capacity, catalog_bytes));
    let first = if alone { 2 } else { 1 };
    let areas = others.map(|capacity| u32::from(has_room(*capacity, catalog_bytes)));
    capacities
        .iter()
        .zip(std::iter::once(first).chain(areas))
        .enumerate()
        .map(|(index, (capacity, areas))| {
            lay_out(
                &format!("device {index}"),
                *capacity,
                areas,
                catalog_bytes,
                extent_bytes,
            )
        })
        .collect()
}

/// `catalog_bytes` is the size of the pool's areas.
pub(crate) fn plan_addition(
    what: &str,
    capacity: u64,
    catalog_bytes: u64,
    extent_bytes: u64,
) -> Result<Layout> {
    let areas = u32::from(has_room(capacity, catalog_bytes));
    lay_out(what, capacity, areas, catalog_bytes, extent_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans() {
        let two = plan(&[64 << 20, 32 << 20], 65536).unwrap();
        for (layout, extents) in two.iter().zip([58 * 16, 26 * 16]) {
            assert_eq!((layout.catalog_areas, layout.catalog_bytes), (1, 5 << 20));
            assert_eq!(layout.data_offset_bytes, 6 << 20);
            assert_eq!(layout.extents, extents);
        }
        // About a thousandth of a large pool, both copies.
        let large = plan(&[1 << 40], 65536).unwrap();
        assert_eq!(large[0].catalog_areas, 2);
        assert!(large[0].data_offset_bytes < (1 << 40) / 600);
        assert!(plan(&[5 << 20], 65536).is_err());
        assert!(plan(&[64 << 20], 1 << 15).is_err());
        assert!(plan(&[64 << 20], 3 << 16).is_err());
        assert!(plan(&[], 65536).is_err());
    }

    #[test]
    fn a_device_too_small_for_an_area_has_none_and_another_has_two() {
        let small = plan(&[64 << 20, 8 << 20], 65536).unwrap();
        assert_eq!(small[0].catalog_areas, 2);
        assert_eq!(small[0].data_offset_bytes, 11 << 20);
        assert_eq!(
            small[1],
            Layout {
                catalog_areas: 0,
                catalog_bytes: 0,
                data_offset_bytes: 1 << 20,
                extents: 7 * 16
            }
        );
        let added = plan_addition("it", 40 << 20, 5 << 20, 65536).unwrap();
        assert_eq!((added.catalog_areas, added.extents), (1, 34 * 16));
        assert!(plan_addition("it", 1 << 20, 5 << 20, 65536).is_err());
        // 128 TiB: too many of the smallest extents, but not of larger ones.
        assert!(plan_addition("it", 128 << 40, 5 << 20, 65536).is_err());
        assert!(plan_addition("it", 128 << 40, 5 << 20, 1 << 20).is_ok());
    }
}
