//! An I/O queue of a session.
//!
//! It owns a command's buffer until the command ends. Commands leave together at [`IoQueue::poll`].
//! They are not split or retried.

use std::time::{Duration, Instant};

use forebay_nvme::host::{HostTransfer, command};
use forebay_nvme::io::{FUSE_FIRST, FUSE_SECOND};
use forebay_nvme::opcode::nvm;
use forebay_nvme::{Sqe, Status};

use crate::connection::{Connection, poll_sockets};
use crate::{Done, Error, Wait};

/// An I/O command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Reads `blocks` (1..=65536) from `lba` into the buffer.
    Read {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
    },
    /// Writes `blocks` (1..=65536) from the buffer to `lba`.
    Write {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
        /// Force unit access: completes when the data is durable.
        fua: bool,
    },
    /// Makes every completed write durable.
    Flush,
    /// Writes zeros to `blocks` (1..=65536) from `lba`.
    WriteZeroes {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
        /// Allows deallocation (DEAC).
        deallocate: bool,
    },
    /// Deallocates the buffer's ranges, made by [`dsm_ranges`].
    Deallocate {
        /// Number of ranges, 1..=256.
        ranges: u32,
    },
}

/// A command that was not submitted.
#[derive(Debug)]
pub struct NotSubmitted {
    /// The reason.
    pub reason: Reason,
    /// The command's buffer.
    pub buf: Vec<u8>,
}

/// Why a command was not submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The queue is full: poll first.
    Full,
    /// Buffer too short, or number of blocks or ranges out of range.
    Size,
}

/// The data of an [`IoOp::Deallocate`] of (first block, number of blocks).
#[must_use]
pub fn dsm_ranges(ranges: &[(u64, u32)]) -> Vec<u8> {
    let ranges = ranges.iter();
    ranges
        .flat_map(|&(lba, blocks)| command::dsm_range(lba, blocks))
        .collect()
}

/// An I/O queue, with its own connection.
#[derive(Debug)]
pub struct IoQueue {
    connection: Connection,
    qid: u16,
    nsid: u32,
    block_bytes: u32,
}

impl IoQueue {
    pub(crate) fn new(connection: Connection, qid: u16, nsid: u32, block_bytes: u32) -> Self {
        Self {
            connection,
            qid,
            nsid,
            block_bytes,
        }
    }

    /// The queue's number.
    #[must_use]
    pub fn qid(&self) -> u16 {
        self.qid
    }

    /// Bytes of a logical block.
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The most commands in flight.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.connection.depth()
    }

    /// Commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.connection.in_flight()
    }

    /// Submits a command, which leaves with the next [`IoQueue::poll`].
    ///
    /// # Errors
    /// Returns the buffer if the queue is full or the buffer does not fit.
    pub fn submit(&mut self, op: &IoOp, tag: u64, buf: Vec<u8>) -> Result<(), NotSubmitted> {
        let nsid = self.nsid;
        let bytes = self.data_bytes(op).filter(|&n| buf.len() >= n as usize);
        let Some(bytes) = bytes else {
            let reason = Reason::Size;
            return Err(NotSubmitted { reason, buf });
        };
        let (sqe, transfer) = match *op {
            IoOp::Read { lba, blocks } => (
                command::read(nsid, lba, blocks),
                HostTransfer::ToHost(bytes),
            ),
            IoOp::Write { lba, blocks, fua } => (
                command::write(nsid, lba, blocks, fua),
                HostTransfer::ToController(bytes),
            ),
            IoOp::Flush => (command::flush(nsid), HostTransfer::None),
            IoOp::WriteZeroes {
                lba,
                blocks,
                deallocate,
            } => (
                command::write_zeroes(nsid, lba, blocks, deallocate),
                HostTransfer::None,
            ),
            IoOp::Deallocate { ranges } => (
                command::deallocate(nsid, ranges as usize),
                HostTransfer::ToController(bytes),
            ),
        };
        self.submit_command(sqe, transfer, tag, buf)
    }

    /// [`IoQueue::submit`] for any other command, without identifier and data pointer. Consecutive
    /// submissions stay in order.
    ///
    /// # Errors
    /// Returns the buffer if the queue is full or the buffer is too short.
    pub fn submit_command(
        &mut self,
        sqe: Sqe,
        transfer: HostTransfer,
        tag: u64,
        buf: Vec<u8>,
    ) -> Result<(), NotSubmitted> {
        let bytes = match transfer {
            HostTransfer::None => 0,
            HostTransfer::ToHost(bytes) | HostTransfer::ToController(bytes) => bytes,
        };
        if buf.len() < bytes as usize {
            let reason = Reason::Size;
            return Err(NotSubmitted { reason, buf });
        }
        let submitted = self.connection.submit(sqe, transfer, tag, buf, true);
        submitted.map_err(|buf| NotSubmitted {
            reason: Reason::Full,
            buf,
        })
    }

    /// Compare and Write of one block, a fused operation (Base 2.0, 3.4.2), on an idle queue.
    /// Returns whether the block was `expected`, and so was written. `fua` applies to both halves.
    pub fn compare_and_write(
        &mut self,
        lba: u64,
        expected: Vec<u8>,
        new: Vec<u8>,
        fua: bool,
        limit: Duration,
    ) -> Result<bool, Error> {
        let addr = self.connection.addr();
        let half = |opcode, fuse| {
            let mut sqe = Sqe::new(opcode, 0)
                .with_nsid(self.nsid)
                .with_cdw64(10, lba)
                .with_cdw(12, u32::from(fua) << 30);
            sqe.flags |= fuse;
            sqe
        };
        let transfer = HostTransfer::ToController(self.block_bytes);
        let first = half(nvm::COMPARE, FUSE_FIRST);
        let second = half(nvm::WRITE, FUSE_SECOND);
        let unfit = |e: NotSubmitted| Error::Argument(format!("a pair does not fit: {e:?}"));
        self.submit_command(first, transfer, 0, expected)
            .map_err(unfit)?;
        self.submit_command(second, transfer, 1, new)
            .map_err(unfit)?;
        let deadline = Instant::now() + limit;
        let mut out = Vec::with_capacity(2);
        while out.len() < 2 {
            let left = deadline.saturating_duration_since(Instant::now());
            if self.poll(&mut out, Wait::Block, left)? == 0 && left.is_zero() {
                return Err(Error::TimedOut {
                    addr,
                    what: "a compare and write".into(),
                    waited: limit,
                });
            }
        }
        out.sort_by_key(|done| done.tag);
        let [compared, written] = [out[0].status, out[1].status];
        if compared.is_success() && written.is_success() {
            return Ok(true);
        }
        if compared.code() == Status::COMPARE_FAILURE
            && written.code() == Status::ABORTED_FAILED_FUSED
        {
            return Ok(false);
        }
        let of_first = !compared.is_success();
        Err(Error::Status {
            addr,
            what: format!("half {} of a compare and write", u8::from(!of_first) + 1),
            status: if of_first { compared } else { written },
        })
    }

    /// `None`: a count is out of range.
    fn data_bytes(&self, op: &IoOp) -> Option<u32> {
        match *op {
            IoOp::Read { blocks, .. } | IoOp::Write { blocks, .. } => (1..=1 << 16)
                .contains(&blocks)
                .then(|| blocks.checked_mul(self.block_bytes))
                .flatten(),
            IoOp::WriteZeroes { blocks, .. } => (1..=1 << 16).contains(&blocks).then_some(0),
            IoOp::Flush => Some(0),
            IoOp::Deallocate { ranges } => (1..=command::DSM_MAX_RANGES as u32)
                .contains(&ranges)
                .then_some(ranges * command::DSM_RANGE_BYTES as u32),
        }
    }

    /// Sends commands, waits up to `limit` for completions, adds them to `out` and returns how
    /// many.
    ///
    /// # Errors
    /// The connection is lost, or a command is overdue; call [`IoQueue::abandon`] next.
    pub fn poll(
        &mut self,
        out: &mut Vec<Done>,
        wait: Wait,
        limit: Duration,
    ) -> Result<usize, Error> {
        self.connection.poll(out, wait, limit)
    }

    pub(crate) fn sleep_any<'a>(
        queues: impl Iterator<Item = &'a IoQueue>,
        limit: Duration,
    ) -> Result<(), Error> {
        let mut fds: Vec<_> = queues.map(|queue| queue.connection.poll_fd()).collect();
        poll_sockets(&mut fds, limit).map_err(|source| Error::System {
            what: "wait for the queues' sockets",
            source,
        })
    }

    /// Closes the connection; returns the tags and buffers in flight. The target may still execute
    /// these commands.
    pub fn abandon(mut self) -> Vec<(u64, Vec<u8>)> {
        self.connection.abandon()
    }

    /// Executes one command on an idle queue and returns its buffer.
    pub fn execute(&mut self, op: &IoOp, buf: Vec<u8>, limit: Duration) -> Result<Vec<u8>, Error> {
        let addr = self.connection.addr();
        if self.in_flight() > 0 {
            let what = "execute() on a queue with commands in flight; use submit() and poll()";
            return Err(Error::Argument(what.into()));
        }
        self.submit(op, 0, buf)
            .map_err(|e| Error::Argument(format!("{op:?} does not fit its buffer: {e:?}")))?;
        let deadline = Instant::now() + limit;
        let mut out = Vec::with_capacity(1);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            self.poll(&mut out, Wait::Block, left)?;
            match out.pop() {
                Some(done) if done.status.is_success() => return Ok(done.buf),
                Some(done) => {
                    return Err(Error::Status {
                        addr,
                        what: format!("{op:?}"),
                        status: done.status,
                    });
                }
                None if left.is_zero() => {
                    return Err(Error::TimedOut {
                        addr,
                        what: format!("{op:?}"),
                        waited: limit,
                    });
                }
                None => {}
            }
        }
    }
}
