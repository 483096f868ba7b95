//! Storage devices behind one interface: regular files, block devices, memory (`ram`), nothing
//! (`null`), and images of a Ceph cluster (`rbd`).
//!
//! [`Device`] is the engine's asynchronous view, [`sync_io::SyncDevice`] the daemon's synchronous
//! one. [`Device::queue`] puts an [`Op`] into a reactor's [`ring::Ring`], and [`Device::finish`]
//! interprets its result, without an allocation or lock. [`fence`] keeps a successor off a device
//! until a dead engine's last request has ended. For tests, the cargo feature `test-device` adds
//! the suite `conformance` and the kinds `volatile` and `faulty`. Nothing here retries an I/O
//! error, caches, or follows a device that changes its size.

mod device;
mod dying;
pub mod error;
pub mod fence;
pub mod file_limit;
mod fixed;
pub mod health;
pub mod heartbeat;
mod kind;
pub mod mem;
pub mod mounts;
pub mod op;
pub mod ring;
mod signatures;
pub mod size;
pub mod sync_io;
mod vectors;

#[cfg(feature = "test-device")]
pub mod conformance;
#[cfg(feature = "test-device")]
pub mod gate;
#[cfg(feature = "test-device")]
pub mod power;

pub use device::{Device, Now};
pub use error::DeviceError;
pub use fixed::{MAX_ENTRIES, MAX_ENTRY_BYTES, Pinned, Registration};
pub use kind::rbd::{IMAGE_SPAN_BYTES, MAX_IMAGES};
pub use kind::spec::{self, DeviceSpec};
pub use kind::{DeviceInfo, DeviceKind, Identity, ImageChanged, ImageName, OpenOptions};
#[cfg(feature = "test-device")]
pub use kind::{faulty, volatile};
pub use mem::Buf;
pub use op::{Finish, Op, OpKind, Submitted};
pub use rustix::io::Errno;
pub use vectors::{Bufs, Vectors};
