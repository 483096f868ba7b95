//! Copies images into and out of volumes, over any queue of NVMe I/O commands.
//!
//! Import skips zeros on fresh volumes and deallocates them elsewhere. Export reads ahead. Any
//! failed command ends the transfer.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use forebay_initiator::{Done, Error, IoOp, IoQueue, NotSubmitted, Wait};
use forebay_nvme::Status;

use super::sink::Sink;
use super::source::Source;
use crate::failure::{Failure, Outcome};
use crate::output::exactly;

/// The unit of zero detection: the smallest extent, a divisor of others.
const IMPORT_GRANULE_BYTES: usize = 64 * 1024;
/// Data of one command, if the controller allows it.
const CHUNK_MAX_BYTES: usize = 512 * 1024;
/// Blocks that one Write Zeroes covers (NVM Command Set 1.0, 3.2.8: NLB is 16 bits, 0's based).
const ZEROES_MAX_BLOCKS: u64 = 1 << 16;
const WINDOW: usize = 16;
/// The longest wait between checks for an interrupt.
const POLL_LIMIT: Duration = Duration::from_millis(200);

pub(super) trait Commands {
    fn submit(&mut self, op: &IoOp, tag: u64, buf: Vec<u8>) -> Result<(), NotSubmitted>;
    fn poll(&mut self, out: &mut Vec<Done>, limit: Duration) -> Result<usize, Error>;
    fn in_flight(&self) -> usize;
    fn depth(&self) -> usize;
}

impl Commands for IoQueue {
    fn submit(&mut self, op: &IoOp, tag: u64, buf: Vec<u8>) -> Result<(), NotSubmitted> {
        IoQueue::submit(self, op, tag, buf)
    }

    fn poll(&mut self, out: &mut Vec<Done>, limit: Duration) -> Result<usize, Error> {
        IoQueue::poll(self, out, Wait::Block, limit)
    }

    fn in_flight(&self) -> usize {
        IoQueue::in_flight(self)
    }

    fn depth(&self) -> usize {
        IoQueue::depth(self)
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct VolumeShape {
    pub(super) size_bytes: u64,
    pub(super) block_bytes: u32,
    /// The limit for one command, if any.
    pub(super) max_transfer_bytes: Option<u64>,
}

impl VolumeShape {
    fn chunk_bytes(&self) -> usize {
        let limit = self.max_transfer_bytes.unwrap_or(u64::MAX);
        let chunk = usize::try_from(limit)
            .unwrap_or(usize::MAX)
            .min(CHUNK_MAX_BYTES);
        // A controller with a lower limit is useless anyway.
        (chunk - chunk % self.block_bytes as usize).max(self.block_bytes as usize)
    }

    fn blocks(&self, bytes: u64) -> u64 {
        bytes / u64::from(self.block_bytes)
    }
}

/// Called with the bytes done; an error ends the transfer.
pub(super) type TransferProgress<'a> = &'a mut dyn FnMut(u64) -> Outcome;

/// Deallocates the rest and returns the image's length. `fresh`: the volume reads as zeros.
pub(super) fn import(
    queue: &mut impl Commands,
    shape: VolumeShape,
    source: &mut Source,
    fresh: bool,
    progress: TransferProgress<'_>,
) -> Outcome<u64> {
    let block_bytes = shape.block_bytes as usize;
    let mut window = Window::new(queue, shape.chunk_bytes());
    let mut zeros = Zeros { start: 0, bytes: 0 };
    let mut chunk = window.buffer()?;
    let mut at = 0;
    loop {
        let part = source.next(at, &mut chunk, &mut || {
            progress(at)?;
            window.idle()
        })?;
        let bytes = part.bytes;
        if bytes == 0 {
            break;
        }
        if bytes as u64 > shape.size_bytes - at {
            return Err(too_large(at + bytes as u64, shape.size_bytes));
        }
        // The image may end inside a block.
        let padded = bytes.next_multiple_of(block_bytes);
        if part.is_hole {
            zeros.add(at, padded as u64, &mut |run| window.zero(shape, run, fresh))?;
        } else {
            chunk[bytes..padded].fill(0);
            for run in runs(&chunk[..padded], IMPORT_GRANULE_BYTES) {
                let start = at + run.start as u64;
                if run.zero {
                    zeros.add(start, run.bytes as u64, &mut |run| {
                        window.zero(shape, run, fresh)
                    })?;
                } else {
                    let mut buf = window.buffer()?;
                    buf[..run.bytes].copy_from_slice(&chunk[run.start..run.start + run.bytes]);
                    let op = IoOp::Write {
                        lba: shape.blocks(start),
                        blocks: (run.bytes / block_bytes) as u32,
                        fua: false,
                    };
                    window.submit(&op, start, buf)?;
                }
            }
        }
        at += bytes as u64;
        progress(at)?;
    }
    let end = at.next_multiple_of(block_bytes as u64);
    zeros.add(end, shape.size_bytes - end, &mut |run| {
        window.zero(shape, run, fresh)
    })?;
    zeros.end(&mut |run| window.zero(shape, run, fresh))?;
    window.drain()?;
    window.submit(&IoOp::Flush, 0, Vec::new())?;
    window.drain()?;
    Ok(at)
}

fn too_large(seen_bytes: u64, size_bytes: u64) -> Failure {
    Failure::invalid(format!(
        "the image has at least {}, but the volume has only {}",
        exactly(seen_bytes),
        exactly(size_bytes)
    ))
    .hint("grow the volume first: `forebay volume resize`")
}

/// The ranges where a volume may hold data.
pub(super) trait Data {
    /// The next range in bytes, in whole blocks, ascending.
    fn next(&mut self) -> Outcome<Option<Range<u64>>>;
}

/// Copies the volume into `sink`; reads only `data`.
pub(super) fn export(
    queue: &mut impl Commands,
    shape: VolumeShape,
    data: &mut impl Data,
    sink: &mut Sink,
    progress: TransferProgress<'_>,
) -> Outcome {
    let chunk_bytes = shape.chunk_bytes();
    let mut window = Window::new(queue, chunk_bytes);
    let (mut left, mut is_over) = (0..0, false);
    let mut asked: VecDeque<Range<u64>> = VecDeque::new();
    let mut done = 0;
    while !is_over || !asked.is_empty() {
        while !is_over && window.has_room() {
            if left.is_empty() {
                match data.next()? {
                    Some(range) => left = range,
                    None => is_over = true,
                }
                continue;
            }
            let Some(buf) = window.spare() else { break };
            let chunk = left.start..left.end.min(left.start + chunk_bytes as u64);
            let op = IoOp::Read {
                lba: shape.blocks(chunk.start),
                blocks: shape.blocks(chunk.end - chunk.start) as u32,
            };
            window.submit(&op, chunk.start, buf)?;
            left.start = chunk.end;
            asked.push_back(chunk);
        }
        let first = asked.front().cloned();
        let ended = first.and_then(|chunk| Some((window.ended.remove(&chunk.start)?, chunk)));
        if let Some((buf, chunk)) = ended {
            let mut idle = || {
                progress(done)?;
                window.idle()
            };
            sink.skip(chunk.start - done, &mut idle)?;
            let bytes = (chunk.end - chunk.start) as usize;
            sink.write(chunk.start, &buf[..bytes], &mut idle)?;
            window.free.push(buf);
            done = chunk.end;
            asked.pop_front();
        } else if !is_over || !asked.is_empty() {
            window.turn()?;
        }
        progress(done)?;
    }
    sink.skip(shape.size_bytes - done, &mut || {
        progress(done)?;
        window.idle()
    })?;
    sink.finish(shape.size_bytes)
}

fn failed(at: u64, status: Status) -> Failure {
    if status.code() == Status::CAPACITY_EXCEEDED {
        return Failure::new(format!(
            "no space at byte {at} of the volume: the pool, or the file system below it, is full"
        ))
        .hint(
            "`forebay pool show` shows how full the pool is, and `df` the file system; delete volumes \
             that are not needed, or free space in the file system",
        );
    }
    Failure::new(format!("the volume failed at byte {at}: {status}"))
}

struct Window<'a, Q> {
    queue: &'a mut Q,
    free: Vec<Vec<u8>>,
    /// Buffers of ended commands, by tag.
    ended: BTreeMap<u64, Vec<u8>>,
    done: Vec<Done>,
    made: usize,
    depth: usize,
    buffer_bytes: usize,
}

impl<'a, Q: Commands> Window<'a, Q> {
    fn new(queue: &'a mut Q, buffer_bytes: usize) -> Self {
        let depth = queue.depth().clamp(1, WINDOW);
        Self {
            queue,
            free: Vec::new(),
            ended: BTreeMap::new(),
            done: Vec::new(),
            made: 0,
            depth,
            buffer_bytes,
        }
    }

    /// There is one buffer more than commands, for the chunk being scanned.
    fn spare(&mut self) -> Option<Vec<u8>> {
        if let Some(buf) = self.free.pop() {
            return Some(buf);
        }
        (self.made <= self.depth).then(|| {
            self.made += 1;
            vec![0; self.buffer_bytes]
        })
    }

    /// Waits for a command's end if necessary.
    fn buffer(&mut self) -> Outcome<Vec<u8>> {
        loop {
            let ended = self.ended.pop_first().map(|(_, buf)| buf);
            if let Some(buf) = ended.or_else(|| self.spare()) {
                return Ok(buf);
            }
            self.turn()?;
        }
    }

    fn has_room(&self) -> bool {
        self.queue.in_flight() < self.depth
    }

    /// Daemon and initiator give up commands that are not polled.
    fn idle(&mut self) -> Outcome<Duration> {
        if self.queue.in_flight() == 0 {
            return Ok(POLL_LIMIT);
        }
        self.turn()?;
        Ok(Duration::ZERO)
    }

    fn turn(&mut self) -> Outcome {
        let mut done = std::mem::take(&mut self.done);
        self.queue
            .poll(&mut done, POLL_LIMIT)
            .map_err(|error| Failure::new(error.to_string()))?;
        for end in done.drain(..) {
            if !end.status.is_success() {
                return Err(failed(end.tag, end.status));
            }
            // Flush and Write Zeroes have no buffer.
            if !end.buf.is_empty() {
                self.ended.insert(end.tag, end.buf);
            }
        }
        self.done = done;
        Ok(())
    }

    fn submit(&mut self, op: &IoOp, tag: u64, mut buf: Vec<u8>) -> Outcome {
        while !self.has_room() {
            self.turn()?;
        }
        loop {
            match self.queue.submit(op, tag, buf) {
                Ok(()) => return Ok(()),
                Err(refused) if refused.reason == forebay_initiator::Reason::Full => {
                    buf = refused.buf;
                    self.turn()?;
                }
                Err(refused) => {
                    return Err(Failure::new(format!(
                        "the initiator refused {op:?}: {:?}",
                        refused.reason
                    )));
                }
            }
        }
    }

    fn zero(&mut self, shape: VolumeShape, run: Zeros, fresh: bool) -> Outcome {
        if fresh {
            return Ok(());
        }
        let end = shape.blocks(run.start + run.bytes);
        let mut lba = shape.blocks(run.start);
        while lba < end {
            let blocks = (end - lba).min(ZEROES_MAX_BLOCKS);
            let op = IoOp::WriteZeroes {
                lba,
                blocks: blocks as u32,
                deallocate: true,
            };
            self.submit(&op, lba * u64::from(shape.block_bytes), Vec::new())?;
            lba += blocks;
        }
        Ok(())
    }

    fn drain(&mut self) -> Outcome {
        while self.queue.in_flight() > 0 {
            self.turn()?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
struct Zeros {
    start: u64,
    bytes: u64,
}

impl Zeros {
    /// Adds a range; hands over the previous one unless they touch.
    fn add(&mut self, start: u64, bytes: u64, zero: &mut dyn FnMut(Zeros) -> Outcome) -> Outcome {
        if self.start + self.bytes == start {
            self.bytes += bytes;
            return Ok(());
        }
        self.end(zero)?;
        *self = Self { start, bytes };
        Ok(())
    }

    fn end(&mut self, zero: &mut dyn FnMut(Zeros) -> Outcome) -> Outcome {
        if self.bytes > 0 { zero(*self) } else { Ok(()) }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: usize,
    pub(super) bytes: usize,
    pub(super) zero: bool,
}

pub(super) fn runs(data: &[u8], granule_bytes: usize) -> impl Iterator<Item = Run> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let first = data.get(start..).filter(|rest| !rest.is_empty())?;
        let mut granules = first.chunks(granule_bytes);
        let head = granules.next()?;
        let zero = is_zero(head);
        let more: usize = granules
            .take_while(|part| is_zero(part) == zero)
            .map(<[u8]>::len)
            .sum();
        let run = Run {
            start,
            bytes: head.len() + more,
            zero,
        };
        start += run.bytes;
        Some(run)
    })
}

fn is_zero(data: &[u8]) -> bool {
    let (chunks, rest) = data.as_chunks::<64>();
    rest.iter().all(|byte| *byte == 0)
        && chunks
            .iter()
            .all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
#[path = "transfer_tests.rs"]
mod tests;
