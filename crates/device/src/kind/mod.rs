//! Kinds of devices. A new kind is one file here, its `mod` line, and one line in `registry`.
//!
//! A wrapper is a backend around another one. [`crate::Device`] and [`crate::sync_io::SyncDevice`]
//! check bounds and alignment for all kinds.

pub(crate) mod block;
#[cfg(all(test, feature = "test-device"))]
mod fake_remote;
#[cfg(feature = "test-device")]
pub mod faulty;
pub(crate) mod file;
mod file_io;
#[cfg(feature = "test-device")]
mod hang;
mod info;
pub(crate) mod local;
mod null;
mod nvme;
mod ram;
mod ram_map;
pub(crate) mod rbd;
pub(crate) mod registry;
pub mod spec;
#[cfg(feature = "test-device")]
pub mod volatile;

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use rustix::io::Errno;

pub use self::info::{
    DeviceInfo, DeviceKind, DeviceNow, Identity, ImageChanged, ImageName, OpenOptions,
};
use self::spec::{DeviceSpec, SpecError, SpecText};
use crate::error::DeviceError;
use crate::fence::{Claims, Fence};
use crate::mem::Buf;
use crate::op::{Finish, Op, Submitted};
use crate::ring::{Ring, RingIo};

pub(crate) trait BackendKind: Sync {
    /// Its name, unique, before the colon of a spec.
    fn kind(&self) -> DeviceKind;

    /// A spec for messages; empty for a kind that users should not know.
    fn example(&self) -> &'static str;

    /// Parses the text after the colon, without looking at the system. The result must print as an
    /// equivalent text.
    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError>;

    /// Opens a device for the engine, without changing it or taking a fence. Alignments are powers
    /// of two; the capacity is at least `options.min_capacity_bytes`. Two engines may have a device
    /// open.
    fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError>;

    /// Opens a device for the daemon, with the same info as [`BackendKind::open`].
    fn open_sync(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError>;
}

pub(crate) struct Opened<T> {
    pub(crate) info: DeviceInfo,
    pub(crate) backend: T,
}

/// An open device as the engine uses it. All reactors share it, so only test devices may lock or
/// allocate.
pub(crate) trait Backend: Debug + Send + Sync {
    /// Starts an operation that is inside the device and aligned. It must end at once, or leave
    /// exactly one entry in the ring that completes with `user_data` at the end; with
    /// [`Submitted::RingFull`] or [`Submitted::NotReady`], none. The memory of `op` stays valid until the completion was
    /// taken; `op` also holds notes for `finish`.
    #[inline]
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        match self.request(op) {
            Some(io) => ring.push_io(&io, user_data).into(),
            None => Submitted::Done(Err(Errno::OPNOTSUPP)),
        }
    }

    /// Interprets the result of `submit`'s entry. After a partial transfer it must return the whole
    /// rest; it must not retry an error.
    fn finish(&self, op: Op, result: i32) -> Finish;

    /// The ring request that alone carries an operation out; a wrapper may delay it. `None`: the
    /// wrapper waits first, then calls `submit`.
    fn request(&self, _op: &mut Op) -> Option<RingIo<'_>> {
        None
    }

    /// Which operations need no ring; asked once. For these, [`Backend::copy`] must do what a
    /// submission would.
    fn at_once(&self) -> AtOnce {
        AtOnce::NEVER
    }

    /// Reads into or writes from `buf` during the call, without waiting for a device. Only for
    /// [`AtOnce::copies`].
    fn copy(&self, _write: bool, _offset_bytes: u64, _buf: Buf) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn is_native(&self) -> bool {
        false
    }

    fn native_commands(&self) -> u64 {
        0
    }

    /// The images, if it has any.
    fn images(&self) -> Option<&dyn RemoteImages> {
        None
    }

    /// After this process dies, the fence must hold until no submitted request can still change the
    /// device or a successor's memory.
    fn fence(&self) -> &dyn Fence;
}

/// The images of a client of a remote cluster, each in a span of the device's addresses. Calls may
/// take long; those for one span come one at a time.
pub(crate) trait RemoteImages {
    /// The address that the cluster knows this process by.
    fn client_address(&self) -> &str;

    /// Addresses of dead engines' clients, for the fence.
    fn set_predecessors(&self, addresses: Vec<String>);

    /// Whether the cluster has refused this client as a whole.
    fn is_blocklisted(&self) -> bool;

    /// Opens an image for reading, instead of an earlier one. Returns its size in bytes.
    fn open(&self, span: u32, name: &ImageName, changed: ImageChanged) -> Result<u64, String>;

    /// Locks the image if it has that feature; it may be written from then on.
    fn lock(&self, span: u32) -> Result<(), String>;

    /// Asks the cluster for the image's size in bytes, which operations keep to from then on.
    fn size_bytes(&self, span: u32) -> Result<u64, String>;

    /// Closes the image once its operations have ended.
    fn close(&self, span: u32);
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct AtOnce {
    /// All reads and writes are copies in memory.
    pub(crate) copies: bool,
    pub(crate) nothing_from_bytes: u64,
}

impl AtOnce {
    /// Every operation needs the ring.
    pub(crate) const NEVER: Self = Self {
        copies: false,
        nothing_from_bytes: u64::MAX,
    };

    pub(crate) fn is_always(self) -> bool {
        self.copies || self.nothing_from_bytes < u64::MAX
    }
}

/// An open device as the daemon uses it: any byte range inside, from any thread. Calls may take
/// long.
pub(crate) trait SyncBackend: Debug + Send + Sync {
    /// Reads all of `into`, as last written here, durable or not.
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes all of `from`; durable only after [`SyncBackend::sync`]. An error may leave a part
    /// written.
    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()>;

    /// Makes all writes durable, the device's own cache included. After an error, they may be lost.
    fn sync(&self) -> io::Result<()>;

    /// Reads all of `into` if that needs no request to the device; returns whether it did.
    fn try_read_at(&self, _offset_bytes: u64, _into: &mut [u8]) -> bool {
        false
    }

    /// Like `read_at`, but must see what another machine has written. In multiples of 4 KiB.
    fn read_direct_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_at(offset_bytes, into)
    }

    /// Like `write_at`, but visible to other machines when it returns. In multiples of 4 KiB.
    fn write_direct_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()> {
        self.write_at(offset_bytes, from)
    }

    /// A hint: this range is read soon.
    fn will_read(&self, _offset_bytes: u64, _bytes: u64) {}

    /// Drops cached data of this device: an engine may have written past the cache.
    fn drop_cache(&self) {}

    fn poll_now(&self) -> io::Result<DeviceNow>;

    /// Its claims and locks: those that [`Backend::fence`] takes.
    fn claims(&self) -> &dyn Claims;
}

/// The bits of an operation's note that belong to wrappers.
#[cfg(feature = "test-device")]
pub(crate) mod note {
    /// Its completion only says that it may begin: `finish` returns it for submission.
    pub(crate) const WAITS: u32 = 1 << 31;
    /// It fails, whatever the result of its request.
    pub(crate) const TORN: u32 = 1 << 30;
}
