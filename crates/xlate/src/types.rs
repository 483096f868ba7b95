//! Identities and ranges that the owner and the data path share.
//!
//! **Design.** Newtypes, so that a logical extent and a device's extent can't be confused by
//! position. **Not here:** what a pool or a tenant is.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A volume's identity within its pool; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct VolumeId(pub u64);

/// A device's place in its pool (0..=255).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceIndex(pub u8);

/// A number of an extent: of a volume (logical) or of a device's data area, as the context says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ExtentIndex(pub u64);

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volume {}", self.0)
    }
}

impl fmt::Display for DeviceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// What a grant allows (`shared/design.md`, "Grants and revokes").
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Rights {
    /// Nothing is stored: reads are zeros, a write faults.
    Hole,
    /// Reads go to the device, a write faults (shared with a snapshot).
    Read,
    /// Reads and writes go to the device.
    ReadWrite,
}

/// A run of a volume's logical extents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ExtentRange {
    /// First logical extent.
    pub first: u64,
    /// How many; never 0 in a message that is acted on.
    pub count: u64,
}

impl ExtentRange {
    /// The range `first .. first + count`.
    pub const fn new(first: u64, count: u64) -> Self {
        Self { first, count }
    }

    /// One past the last extent; saturates, so that a hostile range can't wrap.
    pub const fn end(&self) -> u64 {
        self.first.saturating_add(self.count)
    }

    /// Whether the two share an extent.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.first < other.end() && other.first < self.end()
    }

    /// Whether `extent` lies within.
    pub const fn contains(&self, extent: u64) -> bool {
        self.first <= extent && extent < self.end()
    }
}
