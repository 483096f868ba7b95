//! A machine's memory, as its client hands it over: files that are mapped here, and looked at with distrust.
//!
//! **Purpose.** The frontends of machines (vfio-user, vhost-user) read rings and commands out of a guest's memory, and
//! devices read and write a tenant's bytes there directly. All of that memory is a client's file, which that client
//! may change, shrink or take away at any time.
//!
//! **Design.** A [`Mapping`] is one range of a client's file, mapped; whoever holds it keeps it mapped. [`GuestMemory`]
//! says which guest address is where in which mapping. Small things are copied in and out, rings are reached through an
//! [`Area`], and a command's data is collected as [`Pieces`], which hold the mappings they lie in until the device is
//! done. Nothing gives out a Rust reference to guest memory. A page that is gone (the file was shrunk) would
//! kill the process: [`guard`] puts zeros there instead, and marks that mapping *broken*.
//!
//! **What it does not do.** It speaks no protocol, receives no descriptor and closes no client; it decides nothing when
//! a mapping is broken. It has pages held where it is asked to ([`Mapping::pin`]), and registers nothing with a ring.

mod area;
pub mod guard;
mod held;
mod mapping;
mod memory;
mod pieces;

pub use area::{Area, View};
pub use mapping::{MapError, Mapping};
pub use memory::{GuestMemory, GuestRegion, Limits, NewRegion, Retired};
pub use pieces::{GuestSlice, Hold, MAX_PIECES, PieceError, Pieces};
