//! Volumes, exports, ports, sockets and transfers. Changes go to the catalog first, then to the
//! engine.

pub(crate) mod export;
pub(crate) mod hosts;
pub(crate) mod image_reports;
mod images;
pub(crate) mod in_use;
mod names;
pub(crate) mod ports;
pub(crate) mod quarantine;
pub(crate) mod registrations;
pub(crate) mod show;
mod snapshots;
pub(crate) mod transfers;
pub(crate) mod vms;
pub(crate) mod volumes;
