//! The host side of NVMe over Fabrics as a state machine: no socket, no clock, no thread.
//!
//! Purpose: what every host needs whatever moves its bytes: commands ([`command`]), the fields of identify data that a
//! host reads ([`identify`]), command identifiers ([`CommandSlots`]), and the life of commands on one NVMe/TCP queue
//! ([`HostQueue`]).
//!
//! Design: headers go in decoded by [`crate::tcp::parse`], events come out; data never passes through here. A command is
//! a slot; its command identifier carries the slot's use count in the upper bits, so that a response that comes twice
//! or late is recognised instead of completing a stranger. The controller is not believed: ranges, order, and that a
//! successful command moved all its data are checked.
//!
//! What it does *not* do: reconnect, retry, keep time, hold buffers, or allocate after a queue is made.

pub mod command;
pub mod identify;
mod queue;
mod slots;
#[cfg(test)]
mod tests;

pub use queue::{Begun, Completion, DataIn, DataOut, Event, HostQueue, HostTransfer, Violation};
pub use slots::CommandSlots;
