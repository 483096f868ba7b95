//! Identities and ranges of owner and data path.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A volume's identity within its pool; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct VolumeId(pub u64);

/// A device's index in its pool (0..=255).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceIndex(pub u8);

/// An extent's number, in a volume or on a device.
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

/// What a grant allows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Rights {
    /// Nothing is stored: reads return zeros, a write faults.
    Hole,
    /// Reads go to the device, writes fault (shared with a snapshot).
    Read,
    /// Reads and writes go to the device.
    ReadWrite,
}

/// A run of a volume's logical extents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ExtentRange {
    /// First logical extent.
    pub first: u64,
    /// Number of extents; not 0 in a used message.
    pub count: u64,
}

impl ExtentRange {
    /// The range `first .. first + count`.
    pub const fn new(first: u64, count: u64) -> Self {
        Self { first, count }
    }

    /// One past the last extent; saturates against hostile ranges.
    pub const fn end(&self) -> u64 {
        self.first.saturating_add(self.count)
    }

    /// Whether the ranges share an extent.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.first < other.end() && other.first < self.end()
    }

    /// Whether `extent` lies within.
    pub const fn contains(&self, extent: u64) -> bool {
        self.first <= extent && extent < self.end()
    }
}
