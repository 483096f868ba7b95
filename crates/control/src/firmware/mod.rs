//! Firmware: signed images of the program, and the slots from which engines and daemons start.
//!
//! The terms are those of NVMe (NVM Express Base Specification, Firmware Image Download and
//! Firmware Commit). Slot 1 is the installed program. Slot 2 has a downloaded image. A commit
//! verifies the download and stores it in slot 2. An image can be executed, so slot 2 is one file.

mod download;
mod error;
mod follow;
mod health;
pub mod image;
mod slots;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use error::FirmwareError;
pub use follow::{can_not_follow, follow, installed};
pub(crate) use health::{EngineEnd, SERVES_LIMIT};
pub(crate) use slots::{Firmware, ImageSource, Running, Slot};
