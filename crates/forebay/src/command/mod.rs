//! The commands that ask a running daemon, one file per subject.
//!
//! Purpose: from arguments to one or two calls of the API, and from the answer to a table.
//! Design: each command is a function of the client, the output and its arguments.
//! Not here: commands that move data (`image`), and the daemon itself (`serve`).

pub(crate) mod attach;
pub(crate) mod events;
pub(crate) mod export;
mod machine;
pub(crate) mod pool;
pub(crate) mod port;
pub(crate) mod scheduling;
pub(crate) mod status;
pub(crate) mod tenant;
pub(crate) mod terminal;
pub(crate) mod top;
pub(crate) mod volume;
