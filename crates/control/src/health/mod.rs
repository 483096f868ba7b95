//! Warnings, events and answers about the whole pool. Reads all other modules, and none uses it.

pub(crate) mod check;
pub(crate) mod copies;
pub(crate) mod limits;
pub(crate) mod pool_hold;
pub(crate) mod reports;
pub(crate) mod show;
pub(crate) mod space;
pub(crate) mod wait_reports;
pub(crate) mod watch;
