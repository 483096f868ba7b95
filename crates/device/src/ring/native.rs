//! The second ring of a reactor, whose entries are long enough for NVMe commands.
//!
//! **Purpose.** Commands go to a drive past the kernel's block layer, beside the requests of the first ring.
//!
//! **Design.** The first ring polls this one, so a thread that sleeps in the first wakes for both. The poll ends once, and
//! is armed anew before the next sleep.
//!
//! **Not here:** the commands themselves, and which devices take them (`kind::nvme`).

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

/// The mark of the poll that says that the second ring has completions.
pub(super) const NATIVE_USER_DATA: u64 = u64::MAX - 1;

/// `linux/nvme_ioctl.h`: `_IOWR('N', 0x80, struct nvme_uring_cmd)`, whose size is 72, and the same with 0x81.
const NVME_URING_CMD_IO: u32 = 0xc048_4e80;
const NVME_URING_CMD_IO_VEC: u32 = 0xc048_4e81;

/// See the module.
pub(super) struct NativeRing {
    inner: IoUring<Entry128, Entry32>,
    /// The first ring polls it.
    is_watched: bool,
}

impl NativeRing {
    /// Makes one that knows the same memory as the first.
    pub(super) fn new(options: &RingOptions, fixed: &Fixed) -> io::Result<Self> {
        let inner = super::build(options)?;
        fixed.also(&inner.submitter())?;
        Ok(Self {
            inner,
            is_watched: false,
        })
    }

    /// Where memory is registered.
    pub(super) fn submitter(&self) -> Submitter<'_> {
        self.inner.submitter()
    }

    /// Hands what is queued to the kernel.
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

    /// Before a sleep: has the first ring wake when this one has completions. False if it has some, or may not sleep.
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

    /// The first ring's poll has ended.
    pub(super) fn poll_ended(&mut self) {
        self.is_watched = false;
    }

    /// What it has completed.
    #[cold]
    pub(super) fn next(&mut self) -> Option<Completion> {
        let entry = self.inner.completion().next()?;
        Some(Completion {
            user_data: entry.user_data(),
            result: entry.result(),
        })
    }

    /// Whether there are completions to take.
    pub(super) fn has_completions(&mut self) -> bool {
        !self.inner.completion().is_empty()
    }

    /// How many entries are queued and not yet handed to the kernel.
    pub(super) fn queued(&mut self) -> usize {
        self.inner.submission().len()
    }

    /// Queues a command.
    #[cold]
    pub(super) fn push(
        &mut self,
        fixed: &Fixed,
        fd: BorrowedFd<'_>,
        memory: &IoMemory,
        bytes: CommandBytes,
        user_data: u64,
    ) -> Result<(), RingFull> {
        // A list is never known to be registered here: which kernels take that is not asked.
        let (command, index) = match memory {
            IoMemory::One(_) => (NVME_URING_CMD_IO, fixed.index_of(memory)),
            IoMemory::Many(_) => (NVME_URING_CMD_IO_VEC, None),
        };
        let entry = opcode::UringCmd80::new(Fd(fd.as_raw_fd()), command)
            .cmd(bytes)
            .buf_index(index)
            .build()
            .user_data(user_data);
        // SAFETY: as in `Ring::push_io`: the command's memory is that of an operation, and the kernel copies the entry
        // itself.
        unsafe { self.inner.submission().push(&entry) }.map_err(|_| RingFull)
    }
}
