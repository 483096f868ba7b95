//! Reading, writing, flushing and zeroing through a descriptor, by the ring.
//!
//! **Purpose.** The engine's I/O on files and block devices, and what other kinds of this machine do with their files.
//!
//! **Design.** Zeroing goes by `FALLOC_FL_ZERO_RANGE`, then by a hole (files only), then by writing zeros in pieces;
//! punching begins with the hole. What a device doesn't know is learned once, from its answer. The descriptor stays
//! inside, because the fence's lock lives on it.
//!
//! **Not here:** opening (`local`), and the daemon's I/O (`file`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;

use super::Backend;
use super::info::{DeviceInfo, Identity};
use crate::fence::{Fence, FenceError, lock};
use crate::mem::{IoMemory, ZEROS_BYTES, zeros};
use crate::op::{Finish, Method, Op, OpKind};
use crate::ring::RingIo;

/// See the module.
#[derive(Debug)]
pub(crate) struct FileIo {
    fd: OwnedFd,
    path: PathBuf,
    block_bytes: u64,
    /// A hole in it reads as zeros, which the kernel promises of files alone.
    hole_zeroes: bool,
    /// Whether `FALLOC_FL_ZERO_RANGE` is known, as far as we know.
    zero_range: AtomicBool,
    /// Whether `FALLOC_FL_PUNCH_HOLE` is known, as far as we know.
    punch_hole: AtomicBool,
}

impl FileIo {
    /// I/O on a descriptor that was opened for a ring.
    pub(crate) fn new(fd: OwnedFd, info: &DeviceInfo) -> Self {
        Self {
            fd,
            path: info.spec.path().to_owned(),
            block_bytes: u64::from(info.offset_align_bytes),
            // The kernel zeroes a block device's range by whatever means it has, so a hole is no help there beyond that.
            hole_zeroes: !matches!(info.identity, Identity::Block { .. }),
            zero_range: AtomicBool::new(true),
            punch_hole: AtomicBool::new(info.can_punch),
        }
    }

    /// The descriptor, for calls of the same device.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The path by which it was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The ring's words for an operation; notes the method in it.
    #[inline]
    fn io(&self, op: &mut Op) -> RingIo<'_> {
        let (fd, offset_bytes) = (self.fd.as_fd(), op.offset_bytes);
        match (op.kind, op.memory()) {
            (OpKind::Read, Some(memory)) => RingIo::Read {
                fd,
                offset_bytes,
                memory,
            },
            (OpKind::Write, Some(memory)) => RingIo::Write {
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
                        return RingIo::Write {
                            fd,
                            offset_bytes,
                            memory: IoMemory::One(zeros(len as u32)),
                            dsync: false,
                        };
                    }
                };
                RingIo::Fallocate {
                    fd,
                    offset_bytes,
                    len_bytes: op.len_bytes,
                    mode: mode | libc::FALLOC_FL_KEEP_SIZE,
                }
            }
            // A read or write without a buffer cannot be made.
            (OpKind::Flush | OpKind::Read | OpKind::Write, _) => RingIo::Flush { fd },
        }
    }

    fn method(&self, kind: OpKind) -> Method {
        let zero_range = self.zero_range.load(Ordering::Relaxed);
        let punch_hole = self.punch_hole.load(Ordering::Relaxed);
        match kind {
            OpKind::Punch if punch_hole => Method::PunchHole,
            _ if zero_range => Method::ZeroRange,
            _ if punch_hole && self.hole_zeroes => Method::PunchHole,
            _ => Method::WriteZeros,
        }
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

    /// Whether the file is still as long as an operation needs it.
    #[cold]
    fn has(&self, op: &Op) -> bool {
        let stat = rustix::fs::fstat(&self.fd);
        let size = stat.map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        op.offset_bytes + op.len_bytes <= size
    }
}

impl Backend for FileIo {
    fn finish(&self, op: Op, result: i32) -> Finish {
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
        let aligned = done_bytes.is_multiple_of(self.block_bytes);
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

    #[inline]
    fn request(&self, op: &mut Op) -> Option<RingIo<'_>> {
        Some(self.io(op))
    }

    fn fence(&self) -> &dyn Fence {
        self
    }
}

/// A lock on the descriptor, which each request in flight refers to.
impl Fence for FileIo {
    fn take(&self, generation: u64) -> Result<(), FenceError> {
        lock::take(self.fd(), &self.path, generation)
    }

    fn predecessors_gone(&self, generation: u64) -> Result<bool, FenceError> {
        lock::predecessors_gone(self.fd(), &self.path, generation)
    }

    fn wait_for_predecessors(
        &self,
        generation: u64,
        limit: Duration,
    ) -> Result<Duration, FenceError> {
        lock::wait_for_predecessors(self.fd(), &self.path, generation, limit)
    }
}
