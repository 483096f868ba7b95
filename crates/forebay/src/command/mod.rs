//! The commands that ask a running daemon: one or two API calls, and a table of the answer.

pub(crate) mod attach;
mod drive;
pub(crate) mod events;
pub(crate) mod export;
pub(crate) mod firmware;
pub(crate) mod mi;
pub(crate) mod pool;
pub(crate) mod port;
pub(crate) mod scheduling;
mod snapshot;
pub(crate) mod status;
pub(crate) mod tenant;
pub(crate) mod terminal;
pub(crate) mod top;
mod vm;
pub(crate) mod volume;
