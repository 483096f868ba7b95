//! The control thread's messages to the VM frontend. **Not here:** clients' messages
//! ([`super::talk`]).

use super::NewVm;

pub(crate) enum VmMessage {
    Client(Box<NewVm>),
    /// Socket and last deposit; whether the daemon stored the deposits, or had no room.
    Deposited(u64, u32, bool),
}
