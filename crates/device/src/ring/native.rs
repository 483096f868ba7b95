//! A reactor's second ring, with entries long enough for NVMe commands, which bypass the kernel's
//! block layer.
//!
//! The first ring polls this one, so a thread that sleeps in the first wakes for both. The poll is
//! one-shot and is rearmed before each sleep.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::cqueue::Entry32;
use io_uring::squeue::Entry128;
use io_uring::types::Fd;
use io_uring::{IoUring, Submitter, opcode};

use super::options::{Completion, RingFull, RingOptions, is_transient};
use super::request::CommandBytes;
use crate::fixed::Fixed;
use crate::mem::IoMemory;

pub(super) const NATIVE_USER_DATA: u64 = u64::MAX - 1;

/// `linux/nvme_ioctl.h`: `_IOWR('N', 0x80, struct nvme_uring_cmd)`, whose size is 72, and 0x81 for
/// vectored data.
const NVME_URING_CMD_IO: u32 = 0xc048_4e80;
const NVME_URING_CMD_IO_VEC: u32 = 0xc048_4e81;

pub(super) struct NativeRing {
    inner: IoUring<Entry128, Entry32>,
    /// The first ring polls this one.
    is_watched: bool,
}

impl NativeRing {
    pub(super) fn new(options: &RingOptions, fixed: &Fixed) -> io::Result<Self> {
        let inner = super::build(options)?;
        fixed.also(&inner.submitter())?;
        Ok(Self {
            inner,
            is_watched: false,
        })
    }

    pub(super) fn submitter(&self) -> Submitter<'_> {
        self.inner.submitter()
    }

    #[cold]
    pub(super) fn submit(&mut self) -> io::Result<usize> {
        let queue = self.inner.submission();
        let idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
        drop(queue);
        if idle {
            return Ok(0);
        }
        match self.inner.submit() {
            Err(error) if is_transient(&error) => Ok(0),
            other => other,
        }
    }

    /// Arms the first ring's poll before a sleep. False if this ring has completions, or the poll
    /// could not be queued.
    #[cold]
    pub(super) fn may_sleep(&mut self, first: &mut IoUring) -> io::Result<bool> {
        self.submit()?;
        if !self.is_watched {
            let entry = opcode::PollAdd::new(Fd(self.inner.as_raw_fd()), libc::POLLIN as u32)
                .build()
                .user_data(NATIVE_USER_DATA);
            // SAFETY: a poll names no memory, and the second ring lives as long as the first.
            self.is_watched = unsafe { first.submission().push(&entry) }.is_ok();
        }
        Ok(self.is_watched && !self.has_completions())
    }

    pub(super) fn poll_ended(&mut self) {
        self.is_watched = false;
    }

    #[cold]
    pub(super) fn next(&mut self) -> Option<Completion> {
        let entry = self.inner.completion().next()?;
        Some(Completion {
            user_data: entry.user_data(),
            result: entry.result(),
        })
    }

    pub(super) fn has_completions(&mut self) -> bool {
        !self.inner.completion().is_empty()
    }

    pub(super) fn queued(&mut self) -> usize {
        self.inner.submission().len()
    }

    #[cold]
    pub(super) fn push(
        &mut self,
        fixed: &Fixed,
        fd: BorrowedFd<'_>,
        memory: &IoMemory,
        bytes: CommandBytes,
        user_data: u64,
    ) -> Result<(), RingFull> {
        // Lists are never used as registered memory here: not every kernel takes that.
        let (command, index) = match memory {
            IoMemory::One(_) => (NVME_URING_CMD_IO, fixed.index_of(memory)),
            IoMemory::Many(_) => (NVME_URING_CMD_IO_VEC, None),
        };
        let entry = opcode::UringCmd80::new(Fd(fd.as_raw_fd()), command)
            .cmd(bytes)
            .buf_index(index)
            .build()
            .user_data(user_data);
        // SAFETY: as in `Ring::push_io`: the command's memory is that of an operation, and the
        // kernel copies the entry itself.
        unsafe { self.inner.submission().push(&entry) }.map_err(|_| RingFull)
    }
}
