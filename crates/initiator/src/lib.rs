//! The host side: an NVMe/TCP initiator, a load generator and data verification, without kernel
//! driver or privileges.
//!
//! Only [`forebay_nvme`] and [`forebay_mctp`] are shared with the target. A [`Session`] is an association. An [`IoQueue`]
//! is one of its connections, owned by one thread. [`load`] measures, [`verify`] checks data,
//! [`vm`] does both for VM disks. [`mi`] manages a subsystem out of band.
//!
//! Only [`verify`] reconnects. There is no command splitting, multipath, in-band authentication or
//! TLS.

mod admin;
mod connection;
mod discovery;
mod error;
mod handshake;
pub mod load;
pub mod mi;
mod queue;
mod session;
mod tx;
pub mod verify;
pub mod vm;

pub use admin::AsyncEvent;
pub use connection::{Done, Wait};
pub use discovery::{Discovered, Host};
pub use error::Error;
pub use forebay_nvme::host::identify::{ControllerInfo, NamespaceInfo};
pub use queue::{IoOp, IoQueue, NotSubmitted, Reason, dsm_ranges};
pub use session::{Options, Session};
