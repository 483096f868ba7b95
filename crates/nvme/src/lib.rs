//! NVMe as types and state machines, shared by the target (`engine`), the host side (`initiator`)
//! and the tests.
//!
//! - Layouts: [`command`], [`status`], [`opcode`], [`nqn`], [`fabrics`], [`identify`],
//!   [`log_page`], [`feature`], [`register`]. They are `repr(C)` and byte-aligned, so received
//!   bytes are viewed by a checked cast.
//! - [`controller`] is a controller as a state machine.
//! - [`io`] checks I/O commands; [`reservation`] has the rules of reservations.
//! - [`pcie`] is a controller on PCI Express; [`tcp`] is the NVMe/TCP codec; [`host`] is the host
//!   side.
//! - [`mi`] has messages and command slots of the Management Interface; [`management`] decodes
//!   Admin commands that change the subsystem.
//!
//! Unless stated otherwise, section numbers are those of *NVM Express Base Specification 2.0*, *NVM
//! Command Set Specification 1.0* and *NVMe/TCP Transport Specification 1.0*.
//!
//! There is no I/O, clock (callers pass `now_ns`), thread, or allocation per command. Metadata,
//! protection information, in-band authentication and the zoned and key-value command sets are not
//! supported: controllers do not advertise them and refuse their commands.

pub mod command;
pub mod controller;
pub mod fabrics;
pub mod feature;
pub mod host;
pub mod identify;
pub mod io;
pub mod log_page;
pub mod management;
pub mod mi;
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

/// The NSID of all namespaces (Base 2.0, 3.2.1.2).
pub const NSID_ALL: u32 = 0xFFFF_FFFF;
