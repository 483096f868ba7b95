//! The engine's I/O on a descriptor, through the ring.
//!
//! Zeroing tries `FALLOC_FL_ZERO_RANGE`, then a hole (files only), then writes of zeros; punching
//! begins with the hole. A method that the device rejects is not tried again. The descriptor stays
//! inside, because it carries the fence's lock.

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

#[derive(Debug)]
pub(crate) struct FileIo {
    fd: OwnedFd,
    path: PathBuf,
    block_bytes: u64,
    /// A hole reads as zeros: the kernel promises that only for files.
    hole_zeroes: bool,
    /// False once the device has rejected `FALLOC_FL_ZERO_RANGE`.
    zero_range: AtomicBool,
    /// False once the device has rejected `FALLOC_FL_PUNCH_HOLE`.
    punch_hole: AtomicBool,
}

impl FileIo {
    pub(crate) fn new(fd: OwnedFd, info: &DeviceInfo) -> Self {
        Self {
            fd,
            path: info.spec.path().to_owned(),
            block_bytes: u64::from(info.offset_align_bytes),
            // The kernel zeroes a block device's range by every means it has, so a hole adds
            // nothing.
            hole_zeroes: !matches!(info.identity, Identity::Block { .. }),
            zero_range: AtomicBool::new(true),
            punch_hole: AtomicBool::new(info.can_punch),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

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
            // A read or write without a buffer can't be constructed.
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
        // Zero bytes, too many, or a partial block mean that the file was shortened.
        let aligned = done_bytes.is_multiple_of(self.block_bytes);
        if done_bytes > 0
            && aligned
            && let Some(rest) = op.rest(done_bytes)
        {
            return Finish::Again(rest);
        }
        // Or, if the file still has the bytes, the memory's pages end within a block.
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

/// A lock on the descriptor, to which each request in flight refers.
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
