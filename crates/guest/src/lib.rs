//! A VM's memory: files of its client, mapped and treated as untrusted.
//!
//! The client may change, shrink or withdraw the files at any time. A [`Mapping`] is one mapped
//! range; [`GuestMemory`] translates guest addresses. Rings use an [`Area`], a command's data
//! [`Pieces`], which devices access directly. No Rust reference to guest memory exists. [`guard`]
//! replaces missing pages by zeros and marks the mapping *broken*; the frontends decide what that
//! means.

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
