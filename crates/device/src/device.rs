//! A device as the engine uses it.
//!
//! **Purpose.** Submit operations to whatever kind of device this is, and judge their results, the same way for all.
//!
//! **Design.** [`Device::submit`] checks bounds and alignment, then either does the operation at once (memory and null
//! devices) or queues one ring entry. [`Device::finish`] turns a completion's result into the end of the operation, or
//! into what is left to do: the rest of a short transfer, or the next method where a device doesn't know the quick way
//! to zero or punch (which is learned once per device). Zeroing goes by `FALLOC_FL_ZERO_RANGE`, then by a hole (files
//! only), then by writing zeros in pieces; punching begins with the hole. The descriptor stays inside, because the
//! fence's lock lives on it ([`crate::fence`]).
//!
//! An NVMe namespace has another descriptor, to which reads and writes go as commands where that is possible (`native`).
//!
//! **What it does not do.** It keeps no list of what is in flight, orders nothing (a flush covers what *completed*
//! before it), and retries no error. It registers no files and no buffers with the ring.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;

use crate::Buf;
use crate::error::DeviceError;
use crate::fence::{self, FenceError};
use crate::mem::{Memory, ZEROS_BYTES, zeros};
use crate::native::Native;
use crate::op::{Method, Op, OpKind, Way};
use crate::open::{Access, DeviceInfo, DeviceKind, Identity, OpenOptions};
use crate::ram::Ram;
use crate::ring::{Io, Ring};
use crate::spec::DeviceSpec;

/// What became of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// It ended during the call. No completion will come, and `finish` is not to be called.
    Done(Result<(), Errno>),
    /// A completion with the user data will come.
    Queued,
    /// There is no room in the ring; nothing was submitted.
    RingFull,
}

/// What a completion means.
#[derive(Debug, Clone, Copy)]
pub enum Finish {
    /// All of it is done.
    Done,
    /// Submit this, which is what is left of it, with the same user data.
    Again(Op),
    /// It failed, perhaps in the middle.
    Failed(Errno),
}

/// Bytes that need no ring ([`Device::now`]).
#[derive(Debug)]
pub struct Now<'a> {
    ram: Option<&'a Ram>,
    fd: &'a OwnedFd,
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
        match self.ram {
            Some(ram) => self.copy(ram, write, bufs),
            // Data that nobody keeps is whatever the reader's own memory holds.
            None => Ok(()),
        }
    }

    #[inline(never)]
    fn copy(&self, ram: &Ram, write: bool, bufs: impl Iterator<Item = Buf>) -> Result<(), Errno> {
        let (fd, mut at) = (self.fd.as_fd(), self.offset_bytes);
        for buf in bufs {
            match write {
                true => ram.write(fd, at, buf)?,
                false => ram.read(fd, at, buf)?,
            }
            at += u64::from(buf.len_bytes());
        }
        Ok(())
    }
}

/// An open device. Shared by all reactors; one per device and process.
#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
    info: DeviceInfo,
    ram: Option<Ram>,
    /// From here on nothing is stored; the capacity for all but null devices.
    nothing_from_bytes: u64,
    /// Of an NVMe namespace.
    native: Option<Native>,
    /// Whether `FALLOC_FL_ZERO_RANGE` is known, as far as we know.
    zero_range: AtomicBool,
    /// Whether `FALLOC_FL_PUNCH_HOLE` is known, as far as we know.
    punch_hole: AtomicBool,
    #[cfg(feature = "test-device")]
    volatile: Option<crate::volatile::Volatile>,
    #[cfg(feature = "test-device")]
    faulty: Option<crate::faulty::Faulty>,
    #[cfg(feature = "test-device")]
    gate: Option<std::sync::Arc<crate::gate::TestGate>>,
}

impl Device {
    /// Opens the device for I/O through rings.
    pub fn open(spec: &DeviceSpec, options: &OpenOptions) -> Result<Self, DeviceError> {
        let opened = crate::open::open(spec, options, Access::Direct)?;
        let (fd, info) = (opened.fd, opened.info);
        let ram = match info.kind {
            DeviceKind::Ram => {
                Some(Ram::map(fd.as_fd(), info.capacity_bytes).map_err(|errno| {
                    DeviceError::from_errno(info.spec.path(), "mapping it", errno)
                })?)
            }
            _ => None,
        };
        #[cfg(feature = "test-device")]
        let volatile = match info.kind {
            DeviceKind::Volatile => Some(crate::volatile::Volatile::open(
                info.spec.path(),
                fd.as_fd(),
            )?),
            _ => None,
        };
        #[cfg(feature = "test-device")]
        let faulty = crate::faulty::Faulty::open(&info.spec)?;
        let nothing_from_bytes = match info.kind {
            DeviceKind::Null => options.data_offset_bytes,
            _ => info.capacity_bytes,
        };
        let native = match info.identity {
            Identity::Block { rdev } => {
                let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
                Native::find(major, minor, fd.as_fd()).map_err(|errno| {
                    DeviceError::from_errno(
                        info.spec.path(),
                        "asking what NVMe namespace it is",
                        errno,
                    )
                })?
            }
            Identity::Inode { .. } => None,
        };
        Ok(Self {
            zero_range: AtomicBool::new(true),
            punch_hole: AtomicBool::new(info.can_punch),
            native,
            fd,
            info,
            ram,
            nothing_from_bytes,
            #[cfg(feature = "test-device")]
            volatile,
            #[cfg(feature = "test-device")]
            faulty,
            #[cfg(feature = "test-device")]
            gate: None,
        })
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
        #[cfg(feature = "test-device")]
        if let Some(gate) = &self.gate
            && let Some(submitted) = gate.submit(self, ring, op, user_data)
        {
            return submitted;
        }
        #[cfg(feature = "test-device")]
        if let Some(volatile) = &self.volatile {
            return volatile.submit(self.fd.as_fd(), ring, op, user_data);
        }
        #[cfg(feature = "test-device")]
        if let Some(faulty) = &self.faulty {
            return faulty.submit(self, ring, op, user_data);
        }
        if let Some(result) = self.at_once(op) {
            return Submitted::Done(result);
        }
        if let Some(native) = &self.native
            && op.way != Way::Usual
            && ring.takes_native()
            && let Some(io) = native.io(op)
        {
            return match ring.push_io(&io, user_data) {
                Ok(()) => {
                    op.way = Way::Native;
                    Submitted::Queued
                }
                Err(crate::ring::RingFull) => Submitted::RingFull,
            };
        }
        match ring.push_io(&self.io(op), user_data) {
            Ok(()) => Submitted::Queued,
            Err(crate::ring::RingFull) => Submitted::RingFull,
        }
    }

    /// What can be read or written here and now, where no ring is needed for it: on a device whose bytes are in memory, or that
    /// keeps none. `None`: it must be submitted, and if that can't be, [`Device::submit`] says why.
    #[inline(always)]
    pub fn now(&self, offset_bytes: u64, len_bytes: u32) -> Option<Now<'_>> {
        #[cfg(feature = "test-device")]
        if self.gate.is_some() || self.faulty.is_some() || self.volatile.is_some() {
            return None;
        }
        let keeps_nothing = offset_bytes >= self.nothing_from_bytes;
        if self.ram.is_none() && !keeps_nothing || self.info.memory_align_bytes > 1 {
            return None;
        }
        let align = u64::from(self.info.offset_align_bytes);
        let len = u64::from(len_bytes);
        let end = offset_bytes.checked_add(len)?;
        if len == 0 || (offset_bytes | len) & (align - 1) != 0 || end > self.info.capacity_bytes {
            return None;
        }
        Some(Now {
            ram: self.ram.as_ref(),
            fd: &self.fd,
            offset_bytes,
        })
    }

    /// Judges the result of `op`'s completion.
    pub fn finish(&self, op: Op, result: i32) -> Finish {
        #[cfg(feature = "test-device")]
        if let Some(volatile) = &self.volatile
            && (op.held || op.kind != OpKind::Read)
        {
            return volatile.finish(self.fd.as_fd(), &op, result);
        }
        #[cfg(feature = "test-device")]
        if op.torn {
            return Finish::Failed(Errno::IO);
        }
        if op.way == Way::Native
            && let Some(native) = &self.native
        {
            if native.is_done(result) {
                return Finish::Done;
            }
            let way = Way::Usual;
            return Finish::Again(Op { way, ..op });
        }
        let Ok(done_bytes) = u64::try_from(result) else {
            return self.failed(op, Errno::from_raw_os_error(result.saturating_neg()));
        };
        let transfers = match op.kind {
            OpKind::Read | OpKind::Write => true,
            OpKind::Flush => false,
            OpKind::WriteZeroes | OpKind::Punch => op.method == Method::WriteZeros,
        };
        if !transfers || done_bytes == op.len_bytes {
            return Finish::Done;
        }
        // Nothing at all, more than was asked, or a part of a block: the file was cut short below us.
        let aligned = done_bytes.is_multiple_of(u64::from(self.info.offset_align_bytes));
        if done_bytes > 0
            && aligned
            && let Some(rest) = op.rest(done_bytes)
        {
            return Finish::Again(rest);
        }
        // Or the memory's pages end there, within a block: if the bytes are there.
        if done_bytes > 0 && done_bytes < op.len_bytes && self.has(&op) {
            return Finish::Failed(Errno::FAULT);
        }
        Finish::Failed(Errno::IO)
    }

    /// Whether the file is still as long as an operation needs it.
    #[cold]
    fn has(&self, op: &Op) -> bool {
        let stat = rustix::fs::fstat(&self.fd);
        let size = stat.map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        op.offset_bytes + op.len_bytes <= size
    }

    fn failed(&self, op: Op, errno: Errno) -> Finish {
        if errno == Errno::INTR {
            return Finish::Again(op);
        }
        let zeroing = matches!(op.kind, OpKind::WriteZeroes | OpKind::Punch);
        if zeroing && matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV) {
            let known = match op.method {
                Method::ZeroRange => &self.zero_range,
                Method::PunchHole => &self.punch_hole,
                Method::WriteZeros => return Finish::Failed(errno),
            };
            known.store(false, Ordering::Relaxed);
            return Finish::Again(op);
        }
        Finish::Failed(errno)
    }

    /// Takes generation `generation`'s lock; before the first operation. Held until this device is dropped *and* the
    /// last request has ended.
    pub fn take_fence(&self, generation: u64) -> Result<(), FenceError> {
        #[cfg(feature = "test-device")]
        if let Some(faulty) = &self.faulty {
            faulty.generation_is(generation);
        }
        fence::take(self.fd.as_fd(), self.info.spec.path(), generation)?;
        match &self.native {
            Some(native) => fence::take(native.fd(), self.info.spec.path(), generation),
            None => Ok(()),
        }
    }

    /// Whether no earlier generation has anything in flight here.
    pub fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError> {
        let gone = |fd| fence::predecessors_gone(fd, self.info.spec.path(), generation);
        Ok(gone(self.fd.as_fd())? && self.native.as_ref().map_or(Ok(true), |n| gone(n.fd()))?)
    }

    /// Sleeps until no earlier generation has anything in flight here; says how long it took. For a helper thread.
    pub fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError> {
        let wait =
            |fd, limit| fence::wait_for_predecessors(fd, self.info.spec.path(), generation, limit);
        let first = wait(self.fd.as_fd(), limit)?;
        match &self.native {
            Some(native) => Ok(first + wait(native.fd(), limit.saturating_sub(first))?),
            None => Ok(first),
        }
    }

    /// Whether it is an NVMe namespace that takes commands as such, of rings that are prepared for them
    /// ([`Ring::prepare_native`]).
    pub fn is_native(&self) -> bool {
        self.native.is_some()
    }

    /// Whether it carries out what it is given while that is submitted ([`Submitted::Done`]).
    #[must_use]
    pub fn ends_at_once(&self) -> bool {
        #[cfg(feature = "test-device")]
        if self.gate.is_some() || self.faulty.is_some() || self.volatile.is_some() {
            return false;
        }
        self.ram.is_some() || self.info.kind == DeviceKind::Null
    }

    /// How many commands it has carried out as such.
    pub fn native_commands(&self) -> u64 {
        self.native.as_ref().map_or(0, Native::done)
    }

    /// Puts a gate before all operations. Before the device is shared.
    #[cfg(feature = "test-device")]
    pub fn attach_gate(&mut self, gate: std::sync::Arc<crate::gate::TestGate>) {
        self.gate = Some(gate);
    }

    /// Pretends that the device knows no quick way of zeroing or punching.
    #[cfg(feature = "test-device")]
    pub fn forget_fallocate(&self) {
        self.zero_range.store(false, Ordering::Relaxed);
        self.punch_hole.store(false, Ordering::Relaxed);
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
        // On a null device label and data are different worlds; nothing may be in both.
        let one_world = op.offset_bytes >= self.nothing_from_bytes
            || op.offset_bytes.saturating_add(op.len_bytes) <= self.nothing_from_bytes;
        if op.len_bytes > 0 && aligned && inside && one_world {
            Ok(())
        } else {
            Err(Errno::INVAL)
        }
    }

    /// Whether the memory that an operation names is aligned as this device needs it. Where it isn't, its bytes must go
    /// through memory that is.
    pub fn takes(&self, op: &Op) -> bool {
        let (memory_align, block) = (self.info.memory_align_bytes, self.info.offset_align_bytes);
        match op.memory() {
            Some(Memory::One(buf)) => buf.is_aligned(memory_align),
            // Direct I/O may begin a new request at each piece.
            Some(Memory::Many(bufs)) if memory_align > 1 => bufs
                .iter()
                .all(|buf| buf.is_aligned(memory_align) && buf.len_bytes().is_multiple_of(block)),
            _ => true,
        }
    }

    /// Does what needs no ring.
    fn at_once(&self, op: &Op) -> Option<Result<(), Errno>> {
        if let Some(ram) = &self.ram {
            let fd = self.fd.as_fd();
            return Some(match (op.kind, op.memory()) {
                (OpKind::Read, Some(memory)) => {
                    memory.try_each(|before, buf| ram.read(fd, op.offset_bytes + before, buf))
                }
                (OpKind::Write, Some(memory)) => {
                    memory.try_each(|before, buf| ram.write(fd, op.offset_bytes + before, buf))
                }
                (OpKind::Flush, _) => Ok(()),
                _ => ram.punch(fd, op.offset_bytes, op.len_bytes),
            });
        }
        if self.stores_nothing(op) {
            // A buffer may hold others' bytes. Pieces are the reader's own memory, and keep what they hold.
            if let (OpKind::Read, Some(Memory::One(buf))) = (op.kind, op.memory()) {
                buf.fill_zero();
            }
            return Some(Ok(()));
        }
        None
    }

    /// Whether what a read from `offset_bytes` on would bring are zeros, whatever was written there.
    #[inline]
    pub fn reads_zeros(&self, offset_bytes: u64) -> bool {
        #[cfg(feature = "test-device")]
        if self.gate.is_some() || self.faulty.is_some() {
            return false;
        }
        self.info.kind == DeviceKind::Null && offset_bytes >= self.nothing_from_bytes
    }

    pub(crate) fn stores_nothing(&self, op: &Op) -> bool {
        match op.kind {
            OpKind::Flush => self.info.kind == DeviceKind::Null,
            _ => op.offset_bytes >= self.nothing_from_bytes,
        }
    }

    /// Marks an operation to begin only when its completion comes, if this device can do that.
    #[cfg(feature = "test-device")]
    pub(crate) fn hold(&self, op: &mut Op) -> bool {
        op.held = self.volatile.is_some();
        op.held
    }

    /// The ring's words for an operation; notes the method in it.
    pub(crate) fn io(&self, op: &mut Op) -> Io<'_> {
        let fd: BorrowedFd<'_> = self.fd.as_fd();
        let offset_bytes = op.offset_bytes;
        match (op.kind, op.memory()) {
            (OpKind::Read, Some(memory)) => Io::Read {
                fd,
                offset_bytes,
                memory,
            },
            (OpKind::Write, Some(memory)) => Io::Write {
                fd,
                offset_bytes,
                memory,
                dsync: op.dsync,
            },
            (OpKind::WriteZeroes | OpKind::Punch, _) => {
                op.method = self.method(op.kind);
                let mode = match op.method {
                    Method::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
                    Method::PunchHole => libc::FALLOC_FL_PUNCH_HOLE,
                    Method::WriteZeros => {
                        let len = op.len_bytes.min(u64::from(ZEROS_BYTES));
                        return Io::Write {
                            fd,
                            offset_bytes,
                            memory: Memory::One(zeros(len as u32)),
                            dsync: false,
                        };
                    }
                };
                Io::Fallocate {
                    fd,
                    offset_bytes,
                    len_bytes: op.len_bytes,
                    mode: mode | libc::FALLOC_FL_KEEP_SIZE,
                }
            }
            // A read or write without a buffer cannot be made.
            (OpKind::Flush | OpKind::Read | OpKind::Write, _) => Io::Flush { fd },
        }
    }

    fn method(&self, kind: OpKind) -> Method {
        let zero_range = self.zero_range.load(Ordering::Relaxed);
        let punch_hole = self.punch_hole.load(Ordering::Relaxed);
        // The kernel zeroes a block device's range by whatever means it has, so a hole is no help there beyond that.
        let hole_zeroes = punch_hole && self.info.kind != DeviceKind::Block;
        match kind {
            OpKind::Punch if punch_hole => Method::PunchHole,
            _ if zero_range => Method::ZeroRange,
            _ if hole_zeroes => Method::PunchHole,
            _ => Method::WriteZeros,
        }
    }
}
