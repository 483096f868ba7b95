//! The engine's view of a device: submits operations and interprets their results, for all kinds.
//!
//! A device keeps no list of operations in flight, retries no error, and orders nothing: a flush
//! covers what *completed* before it.

use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use crate::error::DeviceError;
use crate::fence::FenceError;
use crate::kind::registry;
use crate::kind::spec::DeviceSpec;
use crate::kind::{
    AtOnce, Backend, DeviceInfo, ImageChanged, ImageName, OpenOptions, RemoteImages,
};
use crate::mem::{Buf, IoMemory};
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::Ring;

/// Bytes that need no ring ([`Device::now`]).
#[derive(Debug)]
pub struct Now<'a> {
    /// `None`: the device discards them.
    copies: Option<&'a dyn Backend>,
    offset_bytes: u64,
}

impl Now<'_> {
    /// Reads or writes these bytes under [`crate::Buf::new`]'s contract; the buffers' total length
    /// must match. Discarded data leaves them as they are.
    #[inline(always)]
    pub fn transfer(self, write: bool, bufs: impl Iterator<Item = Buf>) -> Result<(), Errno> {
        match self.copies {
            Some(backend) => self.copy(backend, write, bufs),
            None => Ok(()),
        }
    }

    #[inline(never)]
    fn copy(
        &self,
        backend: &dyn Backend,
        write: bool,
        bufs: impl Iterator<Item = Buf>,
    ) -> Result<(), Errno> {
        let mut at = self.offset_bytes;
        for buf in bufs {
            backend.copy(write, at, buf)?;
            at += u64::from(buf.len_bytes());
        }
        Ok(())
    }
}

/// An open device; one per process, shared by all reactors.
#[derive(Debug)]
pub struct Device {
    pub(crate) backend: Arc<dyn Backend>,
    at_once: AtOnce,
    info: DeviceInfo,
    prefers_sleep: bool,
}

impl Device {
    /// Opens the device for I/O through rings.
    pub fn open(spec: &DeviceSpec, options: &OpenOptions) -> Result<Self, DeviceError> {
        let (spec, kind) = registry::resolved(spec)?;
        let opened = kind.open(&spec, options)?;
        Ok(Self::over(opened.info, opened.backend))
    }

    pub(crate) fn over(info: DeviceInfo, backend: Arc<dyn Backend>) -> Self {
        Self {
            at_once: backend.at_once(),
            prefers_sleep: backend.images().is_some(),
            backend,
            info,
        }
    }

    /// The properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Starts an operation under [`crate::Buf::new`]'s contract. Keep `op` for [`Device::finish`].
    /// `EINVAL`: outside the device, or not aligned.
    pub fn queue(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        if let Err(errno) = self.check(op) {
            return Submitted::Done(Err(errno));
        }
        self.backend.submit(ring, op, user_data)
    }

    /// Access without a ring, if the device is in memory or discards data; else submit an
    /// operation.
    #[inline(always)]
    pub fn now(&self, offset_bytes: u64, len_bytes: u32) -> Option<Now<'_>> {
        let keeps_nothing = offset_bytes >= self.at_once.nothing_from_bytes;
        if !self.at_once.copies && !keeps_nothing || self.info.memory_align_bytes > 1 {
            return None;
        }
        let align = u64::from(self.info.offset_align_bytes);
        let len = u64::from(len_bytes);
        let end = offset_bytes.checked_add(len)?;
        if len == 0 || (offset_bytes | len) & (align - 1) != 0 || end > self.info.capacity_bytes {
            return None;
        }
        Some(Now {
            copies: (self.at_once.copies).then_some(&*self.backend),
            offset_bytes,
        })
    }

    /// Interprets the result of `op`'s completion.
    #[inline]
    pub fn finish(&self, op: Op, result: i32) -> Finish {
        self.backend.finish(op, result)
    }

    /// Takes a generation's place, until this device is dropped *and* its last request has ended.
    /// Call it before the first operation.
    pub fn take_fence(&self, generation: u64) -> Result<(), FenceError> {
        self.backend.fence().take(generation)
    }

    /// Whether all earlier generations' requests have ended.
    pub fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError> {
        self.backend.fence().predecessors_gone(generation)
    }

    /// Waits for [`Device::predecessors_gone`], on a helper thread; returns the time taken.
    pub fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError> {
        (self.backend.fence()).wait_for_predecessors(generation, limit)
    }

    /// The address that a remote cluster knows this process by: what its successor fences.
    pub fn client_address(&self) -> Option<&str> {
        self.backend.images().map(RemoteImages::client_address)
    }

    /// Sets the addresses of dead engines' clients, for [`Device::wait_for_predecessors`].
    pub fn set_predecessors(&self, addresses: Vec<String>) {
        if let Some(images) = self.backend.images() {
            images.set_predecessors(addresses);
        }
    }

    /// Whether a remote cluster has refused this client: all operations fail with `ESHUTDOWN`, and
    /// only a new device helps.
    pub fn is_blocklisted(&self) -> bool {
        self.backend
            .images()
            .is_some_and(RemoteImages::is_blocklisted)
    }

    /// Opens an image of a remote device into a span of its addresses
    /// ([`crate::IMAGE_SPAN_BYTES`]), instead of an earlier one, and returns its size in bytes.
    /// Reads are served from then on; after an error, operations fail.
    ///
    /// It waits for the cluster, as the calls below do. Those for one span must not overlap.
    ///
    /// # Errors
    /// A text that says what failed and what to do.
    pub fn open_image(
        &self,
        span: u32,
        name: &ImageName,
        changed: ImageChanged,
    ) -> Result<u64, String> {
        self.images()?.open(span, name, changed)
    }

    /// Takes an image's exclusive lock, if it has that feature, once the fence has passed. Writes
    /// are served from then on.
    ///
    /// # Errors
    /// The image is not open, or another client has it locked, which the text names by address.
    pub fn lock_image(&self, span: u32) -> Result<(), String> {
        self.images()?.lock(span)
    }

    /// Asks for an image's size in bytes. Operations beyond it fail from then on.
    ///
    /// # Errors
    /// The image is not open, or the cluster does not answer.
    pub fn image_size(&self, span: u32) -> Result<u64, String> {
        self.images()?.size_bytes(span)
    }

    /// Closes an image once its operations have ended.
    pub fn close_image(&self, span: u32) {
        if let Some(images) = self.backend.images() {
            images.close(span);
        }
    }

    fn images(&self) -> Result<&dyn RemoteImages, String> {
        let none = || format!("{} has no images", self.info.spec);
        self.backend.images().ok_or_else(none)
    }

    /// Whether other threads of this process carry its operations out: a reactor that has nothing
    /// else to do should leave them the processor.
    #[inline]
    pub fn prefers_sleep(&self) -> bool {
        self.prefers_sleep
    }

    /// Whether it takes NVMe commands, on rings with [`Ring::prepare_native`].
    pub fn is_native(&self) -> bool {
        self.backend.is_native()
    }

    /// Whether operations end in [`Device::queue`].
    #[must_use]
    pub fn ends_at_once(&self) -> bool {
        self.at_once.is_always()
    }

    /// Number of executed NVMe commands.
    pub fn native_commands(&self) -> u64 {
        self.backend.native_commands()
    }

    /// Whether data from `offset_bytes` on is discarded, and reads as zeros.
    #[inline]
    pub fn reads_zeros(&self, offset_bytes: u64) -> bool {
        offset_bytes >= self.at_once.nothing_from_bytes
    }

    /// Whether the operation's memory is aligned for this device.
    pub fn takes(&self, op: &Op) -> bool {
        let (memory_align, block) = (self.info.memory_align_bytes, self.info.offset_align_bytes);
        match op.memory() {
            Some(IoMemory::One(buf)) => buf.is_aligned(memory_align),
            // Direct I/O may begin a new request at each piece.
            Some(IoMemory::Many(bufs)) if memory_align > 1 => bufs
                .iter()
                .all(|buf| buf.is_aligned(memory_align) && buf.len_bytes().is_multiple_of(block)),
            _ => true,
        }
    }

    fn check(&self, op: &Op) -> Result<(), Errno> {
        if op.kind == OpKind::Flush {
            return Ok(());
        }
        let align = u64::from(self.info.offset_align_bytes);
        let aligned = op.offset_bytes.is_multiple_of(align)
            && op.len_bytes.is_multiple_of(align)
            && self.takes(op);
        let inside = op
            .offset_bytes
            .checked_add(op.len_bytes)
            .is_some_and(|end| end <= self.info.capacity_bytes);
        if op.len_bytes > 0 && aligned && inside {
            Ok(())
        } else {
            Err(Errno::INVAL)
        }
    }
}
