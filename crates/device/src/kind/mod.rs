//! Kinds of devices, and what each of them must hold.
//!
//! **Purpose.** A new kind is one file here, its `mod` line, and one line in `registry`. The file says how its spec reads,
//! how it is opened, what is known of it, how operations get there and back, and its fence.
//!
//! **Design.** [`BackendKind`] is a static value that opens devices. [`Backend`] is an open device for the engine: one indirect
//! call submits an operation and one judges its end. [`SyncBackend`] is the same device for the daemon. A wrapper is a
//! backend around another one: test devices are such.
//!
//! **Not here:** bounds and alignment, which [`crate::Device`] and [`crate::sync_io::SyncDevice`] check for all kinds.

pub(crate) mod block;
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
pub(crate) mod registry;
pub mod spec;
#[cfg(all(test, feature = "test-device"))]
mod threads;
#[cfg(feature = "test-device")]
pub mod volatile;

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use rustix::io::Errno;

pub use self::info::{DeviceInfo, DeviceKind, DeviceNow, Identity, OpenOptions};
use self::spec::{DeviceSpec, SpecError, SpecText};
use crate::error::DeviceError;
use crate::fence::{Claims, Fence};
use crate::mem::Buf;
use crate::op::{Finish, Op, Submitted};
use crate::ring::{Ring, RingIo};

/// A kind of devices: reads specs, and opens what they name.
pub(crate) trait BackendKind: Sync {
    /// Its name, which stands before the colon of a spec. No two kinds have the same.
    fn kind(&self) -> DeviceKind;

    /// An example of a spec, for messages; empty for a kind that no user should hear of.
    fn example(&self) -> &'static str;

    /// Reads what follows the colon. Must not look at the system, and what it gives must print as a text that it reads
    /// as the same spec.
    ///
    /// # Errors
    /// What is wrong with the text, in words for its writer.
    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError>;

    /// Opens a device for the engine. Must send nothing that changes it, and take no fence. The alignments are powers of
    /// two, and the capacity is at least `options.min_capacity_bytes`. Two engines have a device open at once.
    ///
    /// # Errors
    /// What is wrong with the device, and what to do.
    fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError>;

    /// Opens a device for the daemon. Must tell the same of it as [`BackendKind::open`].
    ///
    /// # Errors
    /// As [`BackendKind::open`].
    fn open_sync(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError>;
}

/// An open device, and what is known about it.
pub(crate) struct Opened<T> {
    pub(crate) info: DeviceInfo,
    pub(crate) backend: T,
}

/// An open device as the engine uses it. All reactors share it, so nothing here may lock or allocate, except in devices
/// for tests.
pub(crate) trait Backend: Debug + Send + Sync {
    /// Starts an operation that is inside the device and aligned. Must end it at once, or leave exactly one entry in the
    /// ring that completes with `user_data` when the operation has ended; with [`Submitted::RingFull`], nothing.
    ///
    /// A kind with threads of its own leaves an entry that waits for them, a poll for example. The memory that `op` names
    /// stays valid until that completion was taken. What `finish` must know goes into `op`. Without this, the operation
    /// is [`Backend::request`].
    #[inline]
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        match self.request(op) {
            Some(io) => ring.push_io(&io, user_data).into(),
            None => Submitted::Done(Err(Errno::OPNOTSUPP)),
        }
    }

    /// Judges the result of the entry that `submit` left. Must give the whole rest of an operation of which only a part
    /// was done, and must not repeat what failed with an error of the device.
    fn finish(&self, op: Op, result: i32) -> Finish;

    /// The ring request that would carry an operation out, if one alone does that: a wrapper may have it wait. Notes in
    /// `op` what `finish` must know. `None`: the wrapper waits first, and submits then.
    fn request(&self, _op: &mut Op) -> Option<RingIo<'_>> {
        None
    }

    /// What needs no ring; asked once. For such offsets, [`Backend::copy`] must do what a submission would.
    fn at_once(&self) -> AtOnce {
        AtOnce::NEVER
    }

    /// Reads into or writes from `buf` during the call, which must not wait for a device. Only for [`AtOnce::copies`].
    ///
    /// # Errors
    /// The device's.
    fn copy(&self, _write: bool, _offset_bytes: u64, _buf: Buf) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Whether it takes NVMe commands, of rings that are prepared for them.
    fn is_native(&self) -> bool {
        false
    }

    /// How many NVMe commands it has carried out.
    fn native_commands(&self) -> u64 {
        0
    }

    /// Its fence. After a death of this process it must hold until the last request that `submit` handed over can change
    /// neither the device nor memory that a successor uses.
    fn fence(&self) -> &dyn Fence;
}

/// Which operations need no ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AtOnce {
    /// All reads and writes are copies between two places in memory.
    pub(crate) copies: bool,
    /// From here on nothing is kept.
    pub(crate) nothing_from_bytes: u64,
}

impl AtOnce {
    /// Each needs it.
    pub(crate) const NEVER: Self = Self {
        copies: false,
        nothing_from_bytes: u64::MAX,
    };

    /// Whether each operation ends while it is submitted.
    pub(crate) fn is_always(self) -> bool {
        self.copies || self.nothing_from_bytes < u64::MAX
    }
}

/// An open device as the daemon uses it: any byte range that is inside, from any thread. Calls may take long.
pub(crate) trait SyncBackend: Debug + Send + Sync {
    /// Reads all of `into`, as it was last written here, durable or not.
    ///
    /// # Errors
    /// The device's.
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes all of `from`. Must be durable only after [`SyncBackend::sync`].
    ///
    /// # Errors
    /// The device's; then any part of it may be written.
    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()>;

    /// Makes everything durable that was written, the device's own cache included.
    ///
    /// # Errors
    /// The device's; then nothing is known of what was written since the last one.
    fn sync(&self) -> io::Result<()>;

    /// Reads all of `into` if that needs no request to the device; whether it did.
    fn try_read_at(&self, _offset_bytes: u64, _into: &mut [u8]) -> bool {
        false
    }

    /// As `read_at`, but must see what another machine has written. In multiples of 4 KiB.
    ///
    /// # Errors
    /// The device's.
    fn read_direct_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_at(offset_bytes, into)
    }

    /// As `write_at`, but must be seen by another machine when it returns. In multiples of 4 KiB.
    ///
    /// # Errors
    /// The device's.
    fn write_direct_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()> {
        self.write_at(offset_bytes, from)
    }

    /// A hint: this range is read soon.
    fn will_read(&self, _offset_bytes: u64, _bytes: u64) {}

    /// Drops what is cached here: an engine may have written past it.
    fn drop_cache(&self) {}

    /// How the device is now, whatever it was when it was opened.
    ///
    /// # Errors
    /// The system's.
    fn look_now(&self) -> io::Result<DeviceNow>;

    /// Its claims and locks. They must be those that [`Backend::fence`] takes.
    fn claims(&self) -> &dyn Claims;
}

/// The bits of an operation's note that belong to wrappers.
#[cfg(feature = "test-device")]
pub(crate) mod note {
    /// Its completion says only that it may begin: `finish` gives it back, to be submitted.
    pub(crate) const WAITS: u32 = 1 << 31;
    /// It fails, however its request ends.
    pub(crate) const TORN: u32 = 1 << 30;
}
