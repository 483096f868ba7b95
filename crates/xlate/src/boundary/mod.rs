//! Everything that crosses between the daemon and the engine.
//!
//! **Design.** [`message`]: what is said, with the version of the language; [`parts`]: what of; [`socket`]: how it is
//! carried (one datagram a message, descriptors beside it); [`frontend`]: how an export is reached; [`region`]: the shared-memory file in
//! which the engine records its queues, commands and statistics as it works. What recovery needs is
//! recorded from the first day, since it can't be added later.
//!
//! **Not here:** what either side does about it.

pub mod frontend;
pub mod message;
pub mod parts;
pub mod region;
pub mod socket;
