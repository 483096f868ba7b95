//! What people are told: of the pool, its devices, its limits, and what takes long.
//!
//! Purpose: warnings, events and answers about the whole, looked up when asked for or with a slow beat.
//! Design: this folder reads all others and none of them knows it.
//! Not here: what follows from a device's state (`states`), what is counted (`statistics`).

pub(crate) mod check;
pub(crate) mod copies;
pub(crate) mod labels;
pub(crate) mod limits;
pub(crate) mod reports;
pub(crate) mod show;
pub(crate) mod space;
pub(crate) mod wait_reports;
pub(crate) mod watch;
