//! What the control thread says to the frontend of VMs.
//!
//! **Purpose.** The reactor carries these without knowing them.
//! **Design.** Each is sent to the reactor that serves the client's export.
//! **Not here:** what clients say ([`super::talk`]).

use super::NewMachine;

/// See the module's text.
pub(crate) enum VmMessage {
    /// A client.
    Client(Box<NewMachine>),
    /// The daemon holds a client's deposits up to this one, or has no room for them.
    Deposited(u64, u32, bool),
}
