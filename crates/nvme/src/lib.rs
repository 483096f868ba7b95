//! NVMe as types and state machines: no socket, no clock, no thread, no allocation per command.
//!
//! # Purpose
//! Everything Forebay knows about the NVM Express specifications lives here, so that the target
//! (`engine`), the host side (`initiator`, later remote devices) and the tests agree on one set of
//! layouts and one controller behaviour.
//!
//! # Design
//! * [`command`], [`status`], [`opcode`], [`nqn`], [`fabrics`], [`identify`], [`log_page`],
//!   [`feature`] and [`register`] are layouts and numbers. Layouts are `repr(C)` structures of
//!   little-endian byte-aligned integers, so a view of received bytes is a checked cast, and their
//!   sizes are asserted at compile time.
//! * [`controller`] is a controller as a state machine: commands and the time go in, completions,
//!   data and deadlines come out.
//! * [`io`] turns I/O submission queue entries into checked commands; [`reservation`] has the rules of
//!   reservations.
//! * [`pcie`] is a controller on PCI Express; [`tcp`] frames the NVMe/TCP transport; [`host`] is the host side as a state machine.
//!
//! Section numbers cite *NVM Express Base Specification 2.0*, *NVM Command Set Specification 1.0*
//! and *NVMe/TCP Transport Specification 1.0* unless another document is named.
//!
//! # What it does not do
//! No I/O and no clock (time comes in as `now_ns`). No metadata, protection information, zoned or
//! key-value command sets or in-band authentication: those are absent from what the controller advertises, and commands for them are refused.

pub mod command;
pub mod controller;
pub mod fabrics;
pub mod feature;
pub mod host;
pub mod identify;
pub mod io;
pub mod log_page;
pub mod nqn;
pub mod opcode;
pub mod pcie;
pub mod register;
pub mod reservation;
pub mod status;
pub mod tcp;

pub use command::{Cqe, SglDescriptor, Sqe};
pub use nqn::{Nqn, NqnError};
pub use status::Status;

/// The namespace identifier that addresses every namespace (Base 2.0, 3.2.1.2).
pub const NSID_ALL: u32 = 0xFFFF_FFFF;
