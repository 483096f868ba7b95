//! The host side of Forebay: an NVMe/TCP initiator, a load generator, and data verification.
//!
//! # Purpose
//! A host that needs no kernel driver and no privileges: for `make run`, for benchmarks, for tests that must see every
//! status and survive every death, and for images in and out of volumes.
//!
//! # Design
//! The protocol is in [`forebay_nvme`] ([`forebay_nvme::tcp`], [`forebay_nvme::host`]); this crate adds sockets, time
//! and threads. A [`Session`] is an association; an [`IoQueue`] is one connection of it, owned by one thread, with no
//! lock on its path. [`load`] measures; [`verify`] writes data that knows where and when it was written, reads it back
//! and says exactly what is wrong.
//!
//! # What it does not do
//! It shares no code with the target beyond `forebay_nvme`. It does not reconnect by itself (except [`verify`], whose
//! subject that is), does not split commands, does not do multipath, in-band authentication or TLS.

mod admin;
mod connection;
mod discovery;
mod error;
mod handshake;
pub mod load;
pub mod machine;
mod queue;
mod session;
mod tx;
pub mod verify;

pub use admin::AsyncEvent;
pub use connection::{Done, Wait};
pub use discovery::{Discovered, Host};
pub use error::Error;
pub use forebay_nvme::host::identify::{ControllerInfo, NamespaceInfo};
pub use queue::{IoOp, IoQueue, NotSubmitted, Reason, dsm_ranges};
pub use session::{Options, Session};
