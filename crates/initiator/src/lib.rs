//! The host side: an NVMe/TCP initiator, a load generator and data verification, without a kernel
//! driver or privileges.
//!
//! The protocol is in [`forebay_nvme`] ([`forebay_nvme::tcp`], [`forebay_nvme::host`]), the only
//! code shared with the target. This crate adds sockets, time and threads. A [`Session`] is an
//! association. An [`IoQueue`] is one of its connections, owned by one thread without a lock.
//! [`load`] measures; [`verify`] checks data.
//!
//! Only [`verify`] reconnects. Commands are not split. There is no multipath, in-band
//! authentication or TLS.

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
