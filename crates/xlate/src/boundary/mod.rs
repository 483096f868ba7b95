//! The interface between the daemon and the engine.
//!
//! [`message`] and [`parts`] define the messages, [`socket`] the transport, [`region`] the engine's
//! records in shared memory. A process may continue from another's state only if their [`formats`]
//! are equal.

mod from_engine;
pub mod frontend;
pub mod message;
pub mod parts;
pub mod region;
pub mod scheduling;
pub mod socket;

/// The version of VM files (`engine::frontend::vm::file`).
pub const VM_FILE_VERSION: u64 = 3;
/// The layout version of the engine's memory file (`engine::memory`).
pub const MEMORY_VERSION: u64 = 1;

/// This program's version.
#[must_use]
pub fn version() -> &'static str {
    // Tests make another build by changing this text in the executable: it must be there in full.
    let text = std::hint::black_box(concat!("forebay version ", env!("CARGO_PKG_VERSION")));
    text.rsplit(' ').next().unwrap_or(text)
}

/// The versions of all formats that outlive a process. Any change of a layout must raise its
/// number: upgrades rely on this alone.
#[must_use]
pub fn formats() -> String {
    format!(
        "{}.{}.{VM_FILE_VERSION}.{}.{MEMORY_VERSION}",
        message::BOUNDARY_VERSION,
        region::REGION_VERSION,
        crate::grants::GRANT_TABLE_VERSION
    )
}
