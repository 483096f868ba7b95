//! Everything that crosses between the daemon and the engine.
//!
//! **Design.** [`message`]: what is said, with the version of the language; [`parts`]: what of; [`socket`]: how it is
//! carried (one datagram a message, descriptors beside it); [`frontend`]: how an export is reached; [`scheduling`]: how admission is told; [`region`]: the shared-memory file in
//! which the engine records its queues, commands and statistics as it works. What recovery needs is
//! recorded from the first day, since it can't be added later.
//!
//! [`formats`] says which versions of all of it this program speaks: a process goes on with what another left only if both
//! say the same.
//!
//! **Not here:** what either side does about it.

mod from_engine;
pub mod frontend;
pub mod message;
pub mod parts;
pub mod region;
pub mod scheduling;
pub mod socket;

/// The version of machine files (`engine::vm::file`), which the daemon keeps without reading them.
pub const MACHINE_FILE_VERSION: u64 = 3;
/// The version of the engine's memory file (`engine::memory`): where what lies in it, and what its state region says of that.
pub const MEMORY_VERSION: u64 = 1;

/// The versions of everything that one program's processes leave to another's: messages, state regions, machine files, the
/// grant table, memory files. Whoever changes the layout of one of them, however little, raises its number: an upgrade goes by
/// this alone.
#[must_use]
pub fn formats() -> String {
    format!(
        "{}.{}.{MACHINE_FILE_VERSION}.{}.{MEMORY_VERSION}",
        message::BOUNDARY_VERSION,
        region::REGION_VERSION,
        crate::grants::GRANT_TABLE_VERSION
    )
}
