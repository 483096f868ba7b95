//! The interface between the daemon and the engine.
//!
//! [`message`] and [`parts`] define the messages, [`socket`] their transport, [`frontend`] how
//! exports are reached. [`scheduling`] converts admission settings. [`region`] is the shared memory
//! in which the engine records its state. [`formats`] tells whether a process can continue from
//! another's state: only if both have the same versions.

mod from_engine;
pub mod frontend;
pub mod message;
pub mod parts;
pub mod region;
pub mod scheduling;
pub mod socket;

/// The version of machine files (`engine::vm::file`), which the daemon keeps without reading them.
pub const MACHINE_FILE_VERSION: u64 = 3;
/// The version of the engine's memory file (`engine::memory`): its layout and the state region's
/// references to it.
pub const MEMORY_VERSION: u64 = 1;

/// The versions of messages, state regions, machine files, the grant table and memory files. Any
/// change of a layout must raise its number: upgrades rely on this alone.
#[must_use]
pub fn formats() -> String {
    format!(
        "{}.{}.{MACHINE_FILE_VERSION}.{}.{MEMORY_VERSION}",
        message::BOUNDARY_VERSION,
        region::REGION_VERSION,
        crate::grants::GRANT_TABLE_VERSION
    )
}
