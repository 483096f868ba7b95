//! Compare, and compare-and-write: what is stored is read into memory of our own, and compared there with
//! what the host expects.
//!
//! **Design.** While a command compares, its buffer is a *scratch* one, into which it reads as any read does; its
//! host's bytes wait here. When such a read has ended, [`Core::compared`] looks: a Compare goes on with the next
//! piece or ends; a compare-and-write (one block, NVM Command Set 1.0, 2.1.4: ACWU is 0) becomes a plain write. Before
//! that goes to any device, its record says that it *passed*: so after a death the compare, which its own write
//! may have made fail, is not done again.
//!
//! Nothing else may change the block between the two, nor before it is known for good that it was written: a
//! successor writes again what passed and is not answered. So a compare-and-write makes spans of what is in hand
//! and overlaps it, then one of its own ([`super::carried`]): it begins when the former have ended, and what is younger
//! waits until its answer is published ([`Core::pair_answered`]). While nobody compares, all of this costs nothing.
//! It may allocate.
//!
//! A pair whose Compare has FUA makes what is stored durable before it reads it: flushed and committed as for a
//! FLUSH, when what is older has ended, and what is younger already waits. A successor that finds it so begins it again.
//!
//! **Not here:** which two commands are a pair, and their answers (`tcp::fused`).

use super::carried::{Devices, Of, Span, overlap};
use super::io::{Stage, Token};
use super::staging::StagingBuffer;
use super::{CommandRef, Core, IoOp, MAX_IOS, NewIo};
use forebay_nvme::Status;
use forebay_xlate::kill_point;

/// What is read at once; less when memory is short.
const PIECE_BYTES: u32 = 64 << 10;
const SMALL_PIECE_BYTES: u32 = 4 << 10;

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
struct Comparing {
    /// What came from its host: what it expects, or what it writes if the compare passes.
    from_host: Option<StagingBuffer>,
    /// Bytes that were as expected.
    done_bytes: u32,
    /// What is stored is yet to be made durable.
    flushes: bool,
    /// It has passed, and is but a write.
    passed: bool,
}

/// The commands that compare, by their places in the slab.
#[derive(Debug, Default)]
pub(super) struct Fused {
    /// Empty before the first one.
    comparing: Vec<Option<Comparing>>,
    count: usize,
}

impl Fused {
    /// Whether anybody compares.
    pub(super) fn any(&self) -> bool {
        self.count > 0
    }
}

impl Core {
    /// Begins a Compare, whose buffer is what the host expects; or a compare-and-write, whose buffer is what
    /// it writes if its one block is as `expected`; or the write of one that has passed in a dead engine.
    ///
    /// # Errors
    /// The command itself, when there is no room or no memory for it now.
    pub fn start_comparing(&mut self, mut new: NewIo, expected: Expected<'_>) -> Result<(), NewIo> {
        self.settle_orphans();
        let served = self.lane(new.lane).is_some_and(|lane| !lane.removed);
        if !served || !self.may_start(new.lane) {
            return self.start(new);
        }
        // From here on nothing refuses it: the scratch that it takes would count against it.
        let scratch = match new.op {
            IoOp::Compare { len_bytes, .. } => (self.staging.take(len_bytes.min(PIECE_BYTES)))
                .or_else(|| self.staging.take(len_bytes.min(SMALL_PIECE_BYTES))),
            // What is read, and behind it what is expected.
            IoOp::CompareAndWrite { len_bytes, .. }
                if expected.bytes.len() == len_bytes as usize =>
            {
                self.staging.take(2 * len_bytes)
            }
            IoOp::Write { .. } => new.buffer.take(),
            _ => return self.start(new),
        };
        let Some(mut scratch) = scratch else {
            return Err(new);
        };
        let Some(index) = self.free_ios.pop() else {
            self.staging.give(scratch);
            return Err(new);
        };
        if let IoOp::CompareAndWrite { len_bytes, .. } = new.op {
            scratch.as_mut_slice()[len_bytes as usize..].copy_from_slice(expected.bytes);
        }
        if self.fused.comparing.is_empty() {
            self.fused.comparing.resize_with(MAX_IOS, || None);
        }
        self.fused.comparing[index as usize] = Some(Comparing {
            from_host: new.buffer.replace(scratch),
            done_bytes: 0,
            flushes: expected.durable,
            passed: matches!(new.op, IoOp::Write { .. }),
        });
        self.fused.count += 1;
        self.carried.compares();
        self.begin(new, index, 0);
        Ok(())
    }

    /// Carries on a command that compares.
    #[cold]
    pub(super) fn compare(&mut self, token: Token) {
        let i = token.index();
        let comparing = self.fused.comparing.get(i).and_then(Option::as_ref);
        if comparing.is_some_and(|c| c.flushes) {
            self.begin_flush(token);
            if self.ios[i].stage == Stage::Flushing {
                kill_point!("fused.flushing");
            }
            return;
        }
        let (offset_bytes, len_bytes) = match self.ios[i].op {
            IoOp::Compare {
                offset_bytes,
                len_bytes,
            } => {
                let done_bytes = comparing.map_or(0, |c| c.done_bytes);
                let room = self.ios[i].buffer.as_ref().map_or(0, |b| b.len() as u32);
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
        self.transfer(token, offset_bytes, len_bytes, false, false);
    }

    /// A command would end. One that compares may have more to do: `None`.
    #[cold]
    pub(super) fn compared(&mut self, token: Token) -> Option<Token> {
        let i = token.index();
        let Some(mut comparing) = self.fused.comparing.get_mut(i).and_then(Option::take) else {
            self.carried_ended(i as u32);
            return Some(token);
        };
        if comparing.passed {
            self.fused.count -= 1;
            let io = &self.ios[i];
            if let Some(volume) = self.volume_of(io) {
                self.carried.hold(volume, i as u32, io.record);
            }
            return Some(token);
        }
        let io = &mut self.ios[i];
        if comparing.flushes && io.status == Status::SUCCESS {
            comparing.flushes = false;
            self.fused.comparing[i] = Some(comparing);
            self.dispatch(token);
            return None;
        }
        let read = io.buffer.as_ref().map_or(&[][..], |b| b.as_slice());
        let mut more = false;
        if io.status == Status::SUCCESS {
            let same = match io.op {
                IoOp::Compare { len_bytes, .. } => {
                    let from = comparing.done_bytes as usize;
                    let to = len_bytes.min((from + read.len()) as u32);
                    let expected = comparing.from_host.as_ref();
                    let expected = expected.and_then(|b| b.as_slice().get(from..to as usize));
                    comparing.done_bytes = to;
                    more = to < len_bytes;
                    expected.is_some_and(|e| read.starts_with(e))
                }
                IoOp::CompareAndWrite { len_bytes, .. } => {
                    let halves = read.split_at_checked(len_bytes as usize);
                    more = true;
                    halves.is_some_and(|(read, expected)| read == expected)
                }
                _ => false,
            };
            if !same {
                io.status = Status::COMPARE_FAILURE;
                more = false;
            }
        }
        if more && let IoOp::Compare { .. } = io.op {
            io.cursor = 0;
            self.fused.comparing[i] = Some(comparing);
            self.dispatch(token);
            return None;
        }
        if let Some(scratch) = std::mem::replace(&mut io.buffer, comparing.from_host.take()) {
            self.staging.give(scratch);
        }
        if !more {
            self.fused.count -= 1;
            self.carried_ended(i as u32);
            return Some(token);
        }
        comparing.passed = true;
        self.fused.comparing[i] = Some(comparing);
        kill_point!("fused.compared");
        self.write_passed(token);
        None
    }

    /// The compare of a compare-and-write has passed.
    fn write_passed(&mut self, token: Token) {
        let io = &mut self.ios[token.index()];
        if !io.record.is_machine() {
            self.commands[io.record.place()].pass();
        }
        kill_point!("fused.passed");
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
        self.dispatch(token);
        kill_point!("fused.put");
    }

    /// The answers to a compare-and-write are published, or never will be: what waited for it goes on.
    pub fn pair_answered(&mut self, record: CommandRef) {
        if self.carried.any() {
            self.carried.answered(record);
        }
    }

    /// A compare-and-write begins: it waits for what is in hand and overlaps it, and what is younger waits for it.
    pub(super) fn exclude(&mut self, index: u32) {
        let io = &self.ios[index as usize];
        let Some(volume) = self.volume_of(io) else {
            return;
        };
        let mut own = 0..0;
        self.each_range(index as usize, |range| own = range);
        let mut left = self.busy_ios();
        let mut older = Vec::new();
        for (other, io) in (0..).zip(&self.ios) {
            if left == 0 {
                break;
            }
            if io.stage == Stage::Free {
                continue;
            }
            left -= 1;
            // What waits for its budget has yet to begin, and comes after this one then.
            let waits = io.stage == Stage::Throttled;
            if other == index || waits || !io.op.writes() || self.volume_of(io) != Some(volume) {
                continue;
            }
            self.each_range(other as usize, |range| {
                if overlap(&range, &own) {
                    older.push((other, range));
                }
            });
        }
        for (of, bytes) in older.into_iter().chain([(index, own)]) {
            let span = Span {
                bytes,
                write: true,
                devices: Devices::None,
                of: Of::Io(of),
                machine: None,
                number: 0,
            };
            self.carried.push(volume, span);
        }
    }
}
