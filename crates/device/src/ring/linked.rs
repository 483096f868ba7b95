//! Requests that wait before they begin, and completions without a request: for test devices.
//!
//! A request is linked behind a poll or a timeout. An answer is a message to the ring itself, with
//! any result and user data.

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::opcode;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{Fd, TimeoutFlags, Timespec};

use super::options::RingFull;
use super::request::RingIo;
use super::{RESERVED_USER_DATA, Ring};

/// An entry of a [`RingIo`], or an answer.
pub(crate) struct PreparedRequest(Entry);

impl Ring {
    pub(crate) fn free_entries(&mut self) -> usize {
        let queue = self.inner.submission();
        queue.capacity() - queue.len()
    }

    pub(crate) fn request(&self, io: &RingIo<'_>, user_data: u64) -> PreparedRequest {
        PreparedRequest(io.entry(&self.fixed).user_data(user_data))
    }

    /// A request that does nothing and completes with `result`.
    pub(crate) fn answer(&self, result: i32, user_data: u64) -> PreparedRequest {
        let fd = Fd(self.inner.as_raw_fd());
        let entry = opcode::MsgRingData::new(fd, result, user_data, None)
            .build()
            .flags(Flags::SKIP_SUCCESS);
        // The message's user data is its argument. This one is for its own completion, which comes
        // only if the message fails.
        PreparedRequest(entry.user_data(user_data))
    }

    pub(crate) fn push_request(&mut self, request: &PreparedRequest) -> Result<(), RingFull> {
        // SAFETY: as in `push_io`: the makers of a `RingIo`'s `Buf`s promised what `push` asks for;
        // an answer names no memory.
        unsafe { self.push(&request.0) }
    }

    pub(crate) fn push_request_behind(
        &mut self,
        gate: BorrowedFd<'_>,
        request: &PreparedRequest,
    ) -> Result<(), RingFull> {
        let wait = opcode::PollAdd::new(Fd(gate.as_raw_fd()), libc::POLLIN as u32).build();
        self.push_linked(wait, request)
    }

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
        // SAFETY: as in `push_request`; a poll names no memory, and the time of a timeout is
        // static.
        unsafe { self.inner.submission().push_multiple(&entries) }.map_err(|_| RingFull)
    }
}
