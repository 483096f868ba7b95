//! Compare, and compare-and-write: what is stored is read into memory of our own, and compared there with
//! what the host expects.
//!
//! **Design.** While a command compares, its buffer is a *scratch* one, into which it reads as any read does; its
//! host's bytes wait here. When such a read has ended, [`Fused::judge`] looks: a Compare goes on with the next
//! piece or ends; a compare-and-write (one block, NVM Command Set 1.0, 2.1.4: ACWU is 0) becomes a plain write. Before
//! that goes to any device, its record says that it *passed*: so after a death the compare, which its own write
//! may have made fail, is not done again.
//!
//! Nothing else may change the block between the two, nor before it is known for good that it was written: a
//! successor writes again what passed and is not answered. So a compare-and-write makes spans of what is in hand
//! and overlaps it, then one of its own ([`crate::recovery`]): it begins when the former have ended, and what is younger
//! waits until its answer is published ([`crate::recovery::Carried::pair_answered`]). While nobody compares, all of this costs nothing.
//! It may allocate.
//!
//! A pair whose Compare has FUA makes what is stored durable before it reads it: flushed and committed as for a
//! FLUSH, when what is older has ended, and what is younger already waits. A successor that finds it so begins it again.
//!
//! **Not here:** which two commands are a pair, and their answers (`nvme_tcp::fused`).

use crate::io::command::{Io, IoOp};
use crate::io::slab::MAX_IOS;
use crate::io::staging::{Staging, StagingBuffer};
use crate::io::submit::SliceTransfer;
use forebay_nvme::Status;

/// What is read at once; less when memory is short.
pub(crate) const PIECE_BYTES: u32 = 64 << 10;
pub(crate) const SMALL_PIECE_BYTES: u32 = 4 << 10;

/// What the host of a compare-and-write expects to find.
#[derive(Clone, Copy, Debug, Default)]
pub struct Expected<'a> {
    /// Its one block.
    pub bytes: &'a [u8],
    /// What is found must be durable (FUA of the Compare).
    pub durable: bool,
}

/// A command that compares.
#[derive(Debug)]
pub(crate) struct Comparing {
    /// What came from its host: what it expects, or what it writes if the compare passes.
    pub(crate) from_host: Option<StagingBuffer>,
    /// Bytes that were as expected.
    pub(crate) done_bytes: u32,
    /// What is stored is yet to be made durable.
    pub(crate) flushes: bool,
    /// It has passed, and is but a write.
    pub(crate) passed: bool,
}

/// The commands that compare, by their places in the slab.
#[derive(Debug, Default)]
pub(crate) struct Fused {
    /// Empty before the first one.
    comparing: Vec<Option<Comparing>>,
    count: usize,
}

impl Fused {
    /// Whether anybody compares.
    pub(crate) fn any(&self) -> bool {
        self.count > 0
    }

    /// What a command that compares reads next; `None`: what is stored is made durable first.
    #[cold]
    pub(crate) fn next(&self, index: usize, io: &Io) -> Option<SliceTransfer> {
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
        Some(SliceTransfer {
            offset_bytes,
            len_bytes,
            write: false,
            fua: false,
        })
    }

    /// Begins to compare, with what came from the command's host.
    pub(crate) fn begin(&mut self, index: u32, comparing: Comparing) {
        if self.comparing.is_empty() {
            self.comparing.resize_with(MAX_IOS, || None);
        }
        self.comparing[index as usize] = Some(comparing);
        self.count += 1;
    }

    /// What a command that would end is to do.
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
            staging.give(scratch);
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
    /// Compares what a command has read. Whether it is as expected, and there is more to do; if not as expected, it fails.
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

/// What a command that would end is to do.
pub(crate) enum Judged {
    /// It ends; it compared, or never did.
    Ended,
    /// It ends, but what is younger waits on: its write is done, and not answered yet.
    Written,
    /// It goes on to compare.
    More,
    /// It has compared, and goes on to write.
    Passed,
}
