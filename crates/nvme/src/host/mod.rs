//! The host side of NVMe over Fabrics as a state machine: commands, Identify data, and
//! [`HostQueue`].
//!
//! It takes headers decoded by [`crate::tcp::parse`] and returns events; data stays outside. A
//! command identifier includes its slot's use count, so late or repeated responses are detected.
//! The controller is not trusted: ranges, order and complete data are checked. Reconnects, retries,
//! timeouts and buffers are the caller's; nothing is allocated after creation.

pub mod command;
pub mod identify;
mod queue;
mod slots;
#[cfg(test)]
mod tests;

pub use queue::{Begun, Completion, DataIn, DataOut, Event, HostQueue, HostTransfer, Violation};
pub use slots::CommandSlots;
