//! Compare, and compare-and-write: stored data is read into private memory and compared with the
//! host's.
//!
//! **Design.** A comparing command reads into a *scratch* buffer; then [`Fused::judge`] continues
//! or ends it. A compare-and-write (one block: ACWU is 0, NVM Command Set 1.0, 2.1.4) becomes a
//! plain write. First its record gets the mark *passed*: the write may make the compare fail, so a
//! successor must only repeat the write.
//!
//! No other write may come between compare and answer, because a successor repeats a passed,
//! unanswered write. So a compare-and-write waits for overlapping commands in flight, and younger
//! ones wait for its answer ([`crate::recovery::RecoveredIo::pair_answered`]). With FUA on the Compare,
//! older data is first flushed and committed; a successor starts that again. **Not here:**
//! recognizing pairs, and their answers (`nvme_tcp::fused`).

use crate::io::command::{Io, IoOp};
use crate::io::slab::MAX_IOS;
use crate::io::staging::{Staging, StagingBuffer};
use crate::io::submit::CommandTransfer;
use forebay_nvme::Status;

/// Bytes of one read; fewer when memory is short.
pub(crate) const PIECE_BYTES: u32 = 64 << 10;
pub(crate) const SMALL_PIECE_BYTES: u32 = 4 << 10;

/// The expected data of a compare-and-write.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expected<'a> {
    /// Its one block.
    pub bytes: &'a [u8],
    /// FUA of the Compare: stored data must be durable first.
    pub durable: bool,
}

#[derive(Debug)]
pub(crate) struct Comparing {
    /// The expected data, or the data to write.
    pub(crate) from_host: Option<StagingBuffer>,
    pub(crate) done_bytes: u32,
    /// Stored data must still be made durable.
    pub(crate) flushes: bool,
    /// The compare has passed; only the write is left.
    pub(crate) passed: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Fused {
    /// Empty before the first one.
    comparing: Vec<Option<Comparing>>,
    count: usize,
}

impl Fused {
    pub(crate) fn any(&self) -> bool {
        self.count > 0
    }

    /// `None` while stored data is made durable.
    #[cold]
    pub(crate) fn next(&self, index: usize, io: &Io) -> Option<CommandTransfer> {
        let comparing = self.comparing.get(index).and_then(Option::as_ref);
        if comparing.is_some_and(|c| c.flushes) {
            return None;
        }
        let (offset_bytes, len_bytes) = match io.op {
            IoOp::Compare {
                offset_bytes,
                len_bytes,
            } => {
                let done_bytes = comparing.map_or(0, |c| c.done_bytes);
                let room = io.buffer.as_ref().map_or(0, |b| b.len() as u32);
                let left = len_bytes.saturating_sub(done_bytes);
                (offset_bytes + u64::from(done_bytes), left.min(room))
            }
            IoOp::CompareAndWrite {
                offset_bytes,
                len_bytes,
                ..
            } => (offset_bytes, len_bytes),
            _ => (0, 0),
        };
        Some(CommandTransfer {
            offset_bytes,
            len_bytes,
            write: false,
            fua: false,
        })
    }

    pub(crate) fn begin(&mut self, index: u32, comparing: Comparing) {
        if self.comparing.is_empty() {
            self.comparing.resize_with(MAX_IOS, || None);
        }
        self.comparing[index as usize] = Some(comparing);
        self.count += 1;
    }

    /// How a command whose reads or writes have ended continues.
    pub(crate) fn judge(&mut self, index: usize, io: &mut Io, staging: &mut Staging) -> Judged {
        let Some(mut comparing) = self.comparing.get_mut(index).and_then(Option::take) else {
            return Judged::Ended;
        };
        if comparing.passed {
            self.count -= 1;
            return Judged::Written;
        }
        if comparing.flushes && io.status == Status::SUCCESS {
            comparing.flushes = false;
            self.comparing[index] = Some(comparing);
            return Judged::More;
        }
        let more = io.status == Status::SUCCESS && comparing.goes_on(io);
        if more && let IoOp::Compare { .. } = io.op {
            io.cursor = 0;
            self.comparing[index] = Some(comparing);
            return Judged::More;
        }
        if let Some(scratch) = std::mem::replace(&mut io.buffer, comparing.from_host.take()) {
            staging.release(scratch);
        }
        if !more {
            self.count -= 1;
            return Judged::Ended;
        }
        comparing.passed = true;
        self.comparing[index] = Some(comparing);
        if let IoOp::CompareAndWrite {
            offset_bytes,
            len_bytes,
            fua,
        } = io.op
        {
            io.op = IoOp::Write {
                offset_bytes,
                len_bytes,
                fua,
            };
        }
        io.cursor = 0;
        Judged::Passed
    }
}

impl Comparing {
    /// True if more is to be compared; a mismatch fails the command.
    fn goes_on(&mut self, io: &mut Io) -> bool {
        let read = io.buffer.as_ref().map_or(&[][..], |b| b.as_slice());
        let (same, more) = match io.op {
            IoOp::Compare { len_bytes, .. } => {
                let from = self.done_bytes as usize;
                let to = len_bytes.min((from + read.len()) as u32);
                let expected = self.from_host.as_ref();
                let expected = expected.and_then(|b| b.as_slice().get(from..to as usize));
                self.done_bytes = to;
                (
                    expected.is_some_and(|e| read.starts_with(e)),
                    to < len_bytes,
                )
            }
            IoOp::CompareAndWrite { len_bytes, .. } => {
                let halves = read.split_at_checked(len_bytes as usize);
                (
                    halves.is_some_and(|(read, expected)| read == expected),
                    true,
                )
            }
            _ => (false, false),
        };
        if !same {
            io.status = Status::COMPARE_FAILURE;
        }
        same && more
    }
}

pub(crate) enum Judged {
    Ended,
    /// The write is not answered yet, so younger commands still wait.
    Written,
    More,
    Passed,
}
