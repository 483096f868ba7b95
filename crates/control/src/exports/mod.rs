//! Volumes, and how hosts and virtual machines get to them.
//!
//! Purpose: what the API changes of volumes, exports, ports, sockets and transfers, and who is connected to what.
//! Design: the catalog first, then the engine.
//! Not here: where bytes lie (`mapping`), who may use how much (`qos`).

pub(crate) mod export;
pub(crate) mod hosts;
pub(crate) mod in_use;
pub(crate) mod ports;
pub(crate) mod quarantine;
pub(crate) mod registrations;
pub(crate) mod show;
pub(crate) mod transfers;
pub(crate) mod vms;
pub(crate) mod volumes;
