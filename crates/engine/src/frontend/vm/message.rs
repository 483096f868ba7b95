//! The control thread's messages to the VM frontend. **Not here:** clients' messages
//! ([`super::talk`]).

use super::NewMachine;

pub(crate) enum VmMessage {
    Client(Box<NewMachine>),
    /// Socket and deposit number: the daemon stored the deposits up to it (true), or has no room.
    Deposited(u64, u32, bool),
}
