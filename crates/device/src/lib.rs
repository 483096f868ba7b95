//! Where bytes live: regular files, block devices, memory (`ram`) and nothing (`null`), behind one interface.
//!
//! **Purpose.** The engine reads, writes, flushes, zeroes and punches ranges of a device; the daemon reads and writes a
//! device's label and catalog area. Both ask here, and both lock here.
//!
//! **Design.** [`Device`] is the engine's view: asynchronous, one io_uring per reactor ([`ring::Ring`]), no allocation
//! and no lock per operation. An operation is a plain value ([`Op`]); [`Device::submit`] puts it into the ring and
//! [`Device::finish`] judges its result, so whatever a device had to do (a remainder after a short transfer, another
//! way of zeroing where the quick one is unknown), the caller sees one end. [`sync_io::SyncDevice`] is the daemon's
//! view: plain synchronous reads and writes. Kinds of devices are behind traits in `kind`, one file and one line of
//! registration each. [`fence`] keeps a successor away from a device until the last request
//! of a dead engine has ended there. `conformance` (cargo feature `test-device`) is the suite that every kind
//! of device passes; with the same feature there are two more kinds that wrap a file: `volatile`, whose power
//! `power::cut` cuts, and `faulty`, which fails, hangs and kills as told.
//!
//! **What it does not do.** It knows no volume, no extent and no catalog; it never retries an I/O error; it has no
//! cache; it doesn't follow a device that changes its size while open.

mod device;
mod dying;
pub mod error;
pub mod fence;
pub mod file_limit;
mod fixed;
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
pub use kind::spec::{self, DeviceSpec};
pub use kind::{DeviceInfo, DeviceKind, Identity, OpenOptions};
#[cfg(feature = "test-device")]
pub use kind::{faulty, volatile};
pub use mem::Buf;
pub use op::{Finish, Op, OpKind, Submitted};
pub use rustix::io::Errno;
pub use vectors::{Bufs, Vectors};
