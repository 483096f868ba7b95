//! Requests that wait for something before they begin, and answers without a request: for test devices.
//!
//! **Purpose.** "This operation is in flight, and begins when the test says so" is a state of the ring, not of a thread.
//!
//! **Design.** A request is linked behind a poll or a timeout; both entries go in, or none. An answer is a message to the
//! ring itself, which brings any result with any mark; its own completion stays away.
//!
//! **Not here:** what waits for what (`gate`, `kind::faulty`, `kind::volatile`).

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::opcode;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{Fd, TimeoutFlags, Timespec};

use super::options::RingFull;
use super::request::RingIo;
use super::{RESERVED_USER_DATA, Ring};

/// An entry that was made of a [`RingIo`], or that only answers.
pub(crate) struct PreparedRequest(Entry);

impl Ring {
    /// How many more entries fit.
    pub(crate) fn free_entries(&mut self) -> usize {
        let queue = self.inner.submission();
        queue.capacity() - queue.len()
    }

    /// What a device asks for, marked.
    pub(crate) fn request(&self, io: &RingIo<'_>, user_data: u64) -> PreparedRequest {
        PreparedRequest(io.entry(&self.fixed).user_data(user_data))
    }

    /// A request that completes with this result and does nothing.
    pub(crate) fn answer(&self, result: i32, user_data: u64) -> PreparedRequest {
        let fd = Fd(self.inner.as_raw_fd());
        let entry = opcode::MsgRingData::new(fd, result, user_data, None)
            .build()
            .flags(Flags::SKIP_SUCCESS);
        // The message's mark is its argument; this one belongs to its own completion, which comes only if it fails.
        PreparedRequest(entry.user_data(user_data))
    }

    /// Queues a request.
    pub(crate) fn push_request(&mut self, request: &PreparedRequest) -> Result<(), RingFull> {
        // SAFETY: as in `push_io`: a `RingIo` holds `Buf`s, whose makers promised what `push` asks for; an answer names no
        // memory.
        unsafe { self.push(&request.0) }
    }

    /// Queues a request to start when `gate` becomes readable.
    pub(crate) fn push_request_behind(
        &mut self,
        gate: BorrowedFd<'_>,
        request: &PreparedRequest,
    ) -> Result<(), RingFull> {
        let wait = opcode::PollAdd::new(Fd(gate.as_raw_fd()), libc::POLLIN as u32).build();
        self.push_linked(wait, request)
    }

    /// Queues a request to start after so long.
    pub(crate) fn push_request_after(
        &mut self,
        delay: &'static Timespec,
        request: &PreparedRequest,
    ) -> Result<(), RingFull> {
        let wait = opcode::Timeout::new(delay)
            .flags(TimeoutFlags::ETIME_SUCCESS)
            .build();
        self.push_linked(wait, request)
    }

    fn push_linked(&mut self, wait: Entry, request: &PreparedRequest) -> Result<(), RingFull> {
        let wait = wait
            .flags(Flags::IO_LINK | Flags::SKIP_SUCCESS)
            .user_data(RESERVED_USER_DATA);
        let entries = [wait, request.0.clone()];
        // SAFETY: as in `push_request`; a poll names no memory, and the time of a timeout is static.
        unsafe { self.inner.submission().push_multiple(&entries) }.map_err(|_| RingFull)
    }
}
