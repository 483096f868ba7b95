//! A VM's memory: files of its client, mapped and treated as untrusted.
//!
//! The VM frontends (vfio-user, vhost-user) read rings and commands from guest memory, and devices
//! access its data directly. The client may change, shrink or withdraw the files at any time. A
//! [`Mapping`] is one mapped range of such a file; [`GuestMemory`] translates guest addresses.
//! Rings use an [`Area`], a command's data [`Pieces`]; no Rust reference to guest memory exists. A
//! missing page would kill the process, so [`guard`] maps zeros there and marks the mapping
//! *broken*.
//!
//! The crate speaks no protocol. Its user decides what a broken mapping means, and registers memory
//! with a ring.

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
