//! A device as the engine uses it.
//!
//! **Purpose.** Submit operations to whatever kind of device this is, and judge their results, the same way for all.
//!
//! **Design.** [`Device::submit`] checks bounds and alignment, then asks the device's kind, by one indirect call: memory
//! and null devices do the operation at once, others queue one ring entry. [`Device::finish`] turns a completion's result
//! into the end of the operation, or into what is left to do. What kinds there are, and what they must hold, is in
//! `kind`.
//!
//! **What it does not do.** It keeps no list of what is in flight, orders nothing (a flush covers what *completed*
//! before it), and retries no error. It registers no files and no buffers with the ring.

use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use crate::error::DeviceError;
use crate::fence::FenceError;
use crate::kind::registry;
use crate::kind::spec::DeviceSpec;
use crate::kind::{AtOnce, Backend, DeviceInfo, OpenOptions};
use crate::mem::{Buf, IoMemory};
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::Ring;

/// Bytes that need no ring ([`Device::now`]).
#[derive(Debug)]
pub struct Now<'a> {
    /// `None`: nobody keeps them.
    copies: Option<&'a dyn Backend>,
    offset_bytes: u64,
}

impl Now<'_> {
    /// Reads or writes them; who reads data that was not kept finds in its own memory what was there before. The buffers have
    /// as many bytes together; [`crate::Buf::new`]'s contract holds for them meanwhile.
    ///
    /// # Errors
    /// As of [`Submitted::Done`].
    #[inline(always)]
    pub fn transfer(self, write: bool, bufs: impl Iterator<Item = Buf>) -> Result<(), Errno> {
        match self.copies {
            Some(backend) => self.copy(backend, write, bufs),
            // Data that nobody keeps is whatever the reader's own memory holds.
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

/// An open device. Shared by all reactors; one per device and process.
#[derive(Debug)]
pub struct Device {
    pub(crate) backend: Arc<dyn Backend>,
    at_once: AtOnce,
    info: DeviceInfo,
}

impl Device {
    /// Opens the device for I/O through rings.
    pub fn open(spec: &DeviceSpec, options: &OpenOptions) -> Result<Self, DeviceError> {
        let (spec, kind) = registry::resolved(spec)?;
        let opened = kind.open(&spec, options)?;
        Ok(Self::over(opened.info, opened.backend))
    }

    /// A device that does what its backend does.
    pub(crate) fn over(info: DeviceInfo, backend: Arc<dyn Backend>) -> Self {
        Self {
            at_once: backend.at_once(),
            backend,
            info,
        }
    }

    /// What is known about it.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Starts an operation. Its buffer must obey [`crate::Buf::new`]'s contract; `op` is noted in, so keep it for
    /// [`Device::finish`]. Refused as `EINVAL`: outside the device, or not aligned as [`DeviceInfo`] says.
    pub fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        if let Err(errno) = self.check(op) {
            return Submitted::Done(Err(errno));
        }
        self.backend.submit(ring, op, user_data)
    }

    /// What can be read or written here and now, where no ring is needed for it: on a device whose bytes are in memory, or that
    /// keeps none. `None`: it must be submitted, and if that can't be, [`Device::submit`] says why.
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

    /// Judges the result of `op`'s completion.
    #[inline]
    pub fn finish(&self, op: Op, result: i32) -> Finish {
        self.backend.finish(op, result)
    }

    /// Takes generation `generation`'s place in the fence; before the first operation. Held until this device is dropped
    /// *and* the last request has ended.
    pub fn take_fence(&self, generation: u64) -> Result<(), FenceError> {
        self.backend.fence().take(generation)
    }

    /// Whether no earlier generation has anything in flight here.
    pub fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError> {
        self.backend.fence().predecessors_gone(generation)
    }

    /// Sleeps until no earlier generation has anything in flight here; says how long it took. For a helper thread.
    pub fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError> {
        (self.backend.fence()).wait_for_predecessors(generation, limit)
    }

    /// Whether it is an NVMe namespace that takes commands as such, of rings that are prepared for them
    /// ([`Ring::prepare_native`]).
    pub fn is_native(&self) -> bool {
        self.backend.is_native()
    }

    /// Whether it carries out what it is given while that is submitted ([`Submitted::Done`]).
    #[must_use]
    pub fn ends_at_once(&self) -> bool {
        self.at_once.is_always()
    }

    /// How many commands it has carried out as such.
    pub fn native_commands(&self) -> u64 {
        self.backend.native_commands()
    }

    /// Whether what a read from `offset_bytes` on would bring are zeros, whatever was written there.
    #[inline]
    pub fn reads_zeros(&self, offset_bytes: u64) -> bool {
        offset_bytes >= self.at_once.nothing_from_bytes
    }

    /// Whether the memory that an operation names is aligned as this device needs it. Where it isn't, its bytes must go
    /// through memory that is.
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
