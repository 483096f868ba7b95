//! Firmware slots, as the API shows them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The firmware slots of this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FirmwareSlots {
    /// The slot of the running engine's program; null if no engine runs.
    pub running: Option<u8>,
    /// The slot that the next engine starts from.
    pub next: u8,
    /// Slot 1, the installed program, and slot 2, a downloaded image.
    pub slots: Vec<FirmwareSlot>,
    /// The version that failed in slot 2, and why; slot 1 took its place.
    pub fell_back: Option<String>,
}

/// A firmware slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FirmwareSlot {
    /// Its number: 1 or 2.
    pub slot: u8,
    /// Its program's version; null if the slot is empty or the version is unknown.
    pub version: Option<String>,
}

/// Body of `POST /v1/firmware/install`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FirmwareInstall {
    /// The absolute path of an image on the daemon's node.
    pub path: String,
    /// Leave the running engine; the next one starts from slot 2.
    #[serde(default)]
    pub at_next_start: bool,
}

/// Body of `POST /v1/firmware/activate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FirmwareActivate {
    /// The slot: 1 or 2.
    pub slot: u8,
    /// Leave the running engine; the next one starts from this slot.
    #[serde(default)]
    pub at_next_start: bool,
}
