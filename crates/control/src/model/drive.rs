//! The drive below a device.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The command set that a drive answers in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DriveSource {
    /// NVMe.
    Nvme,
    /// ATA, as SATA drives do.
    Ata,
}

/// A drive and its health, as it last answered. Null is what the drive does not report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DriveHealth {
    /// Its path, e.g. `/dev/nvme0n1`.
    pub path: String,
    /// The command set.
    pub source: DriveSource,
    /// Model.
    pub model: String,
    /// Serial number.
    pub serial: String,
    /// Firmware revision.
    pub firmware: String,
    /// When it answered, milliseconds since the Unix epoch.
    pub read_unix_ms: u64,
    /// Its warnings, in words with the drive as the subject.
    pub warnings: Vec<String>,
    /// The same as bits of NVMe's Critical Warning. For ATA they follow from attributes at their
    /// thresholds.
    pub critical_warning: u8,
    /// Temperature, degrees Celsius.
    pub temperature_c: Option<i16>,
    /// Spare capacity left, in percent.
    pub spare_percent: Option<u8>,
    /// The drive warns below this spare capacity, in percent.
    pub spare_threshold_percent: Option<u8>,
    /// Life used, in percent of the maker's estimate; may exceed 100.
    pub used_percent: Option<u8>,
    /// Media errors that the drive could not correct.
    pub media_errors: Option<u64>,
    /// Hours in operation.
    pub power_on_hours: Option<u64>,
    /// Power cuts without an orderly shutdown.
    pub unsafe_shutdowns: Option<u64>,
    /// Sectors replaced by spare ones.
    pub reallocated_sectors: Option<u64>,
    /// Sectors that can't be read now.
    pub pending_sectors: Option<u64>,
    /// Sectors that an offline test could not correct.
    pub uncorrectable_sectors: Option<u64>,
}
