//! Moving an image into and out of a volume.
//!
//! Purpose: the loops of `volume import` and `volume export`, over anything that takes NVMe I/O
//! commands.
//! Design: a window of commands is kept in flight, a chunk each; buffers go round. Import: a granule
//! of zeros is not written: where the volume is fresh nothing has to be done, elsewhere it is zeroed
//! and deallocated. Export: a granule of zeros becomes a hole of the file. Any command that fails ends
//! the transfer.
//! Not here: connecting, progress bars, retries.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use forebay_initiator::{Done, Error, IoOp, IoQueue, NotSubmitted, Wait};
use forebay_nvme::Status;

use crate::failure::{Failure, Outcome, While};
use crate::output::exactly;

/// What zeros are looked for in: the smallest extent, and a divisor of every other.
const IMPORT_GRANULE_BYTES: usize = 64 * 1024;
/// A filesystem's block, as a rule.
const EXPORT_GRANULE_BYTES: usize = 4096;
/// Data of one command, if the controller takes so much.
const CHUNK_MAX_BYTES: usize = 512 * 1024;
/// Blocks that one Write Zeroes covers (NVM Command Set 1.0, 3.2.8: NLB is 16 bits, 0's based).
const ZEROES_MAX_BLOCKS: u64 = 1 << 16;
/// Commands in flight.
const WINDOW: usize = 16;
/// How long one look for completions takes; the transfer looks for interrupts in between.
const POLL_LIMIT: Duration = Duration::from_millis(200);

/// Where commands go.
pub(super) trait Commands {
    /// As [`IoQueue::submit`].
    fn submit(&mut self, op: &IoOp, tag: u64, buf: Vec<u8>) -> Result<(), NotSubmitted>;
    /// As [`IoQueue::poll`], sleeping.
    fn poll(&mut self, out: &mut Vec<Done>, limit: Duration) -> Result<usize, Error>;
    /// As [`IoQueue::in_flight`].
    fn in_flight(&self) -> usize;
    /// As [`IoQueue::depth`].
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

/// The volume as its controller shows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) size_bytes: u64,
    pub(super) block_bytes: u32,
    /// The most that one command moves; `None`: no limit.
    pub(super) max_transfer_bytes: Option<u64>,
}

impl Shape {
    fn chunk_bytes(&self) -> usize {
        let limit = self.max_transfer_bytes.unwrap_or(u64::MAX);
        let chunk = usize::try_from(limit)
            .unwrap_or(usize::MAX)
            .min(CHUNK_MAX_BYTES);
        // At least a block: a controller that can't move one can't be used anyway.
        (chunk - chunk % self.block_bytes as usize).max(self.block_bytes as usize)
    }

    fn blocks(&self, bytes: u64) -> u64 {
        bytes / u64::from(self.block_bytes)
    }
}

/// Is told how many bytes are done; ends the transfer by an error.
pub(super) type Progress<'a> = &'a mut dyn FnMut(u64) -> Outcome;

/// Copies `file`, of `file_bytes`, into the volume; the rest of it is deallocated. `fresh`: the volume reads as zeros.
pub(super) fn import(
    queue: &mut impl Commands,
    shape: Shape,
    file: &File,
    file_bytes: u64,
    fresh: bool,
    progress: Progress<'_>,
) -> Outcome {
    if file_bytes > shape.size_bytes {
        return Err(Failure::new(format!(
            "the image has {}, the volume only {}",
            exactly(file_bytes),
            exactly(shape.size_bytes)
        ))
        .hint("grow the volume first: `forebay volume resize`"));
    }
    let block_bytes = shape.block_bytes as usize;
    let chunk_bytes = shape.chunk_bytes();
    let mut window = Window::new(queue, chunk_bytes);
    let mut zeros = Zeros { start: 0, bytes: 0 };
    let mut data_start = 0;
    let mut at = 0;
    while at < file_bytes {
        let bytes = chunk_bytes.min(usize::try_from(file_bytes - at).unwrap_or(chunk_bytes));
        // The file's end may be within a block: that one is filled up with zeros.
        let padded = bytes.next_multiple_of(block_bytes);
        if data_start <= at {
            data_start = next_data(file, at, file_bytes);
        }
        if data_start >= at + bytes as u64 {
            zeros.add(at, padded as u64, &mut |run| window.zero(shape, run, fresh))?;
        } else {
            let mut chunk = window.buffer(&mut nothing)?;
            file.read_exact_at(&mut chunk[..bytes], at)
                .while_doing(format!("read the image at byte {at}"))?;
            chunk[bytes..padded].fill(0);
            for run in runs(&chunk[..padded], IMPORT_GRANULE_BYTES) {
                let start = at + run.start as u64;
                if run.zero {
                    zeros.add(start, run.bytes as u64, &mut |run| {
                        window.zero(shape, run, fresh)
                    })?;
                } else {
                    let mut buf = window.buffer(&mut nothing)?;
                    buf[..run.bytes].copy_from_slice(&chunk[run.start..run.start + run.bytes]);
                    let op = IoOp::Write {
                        lba: shape.blocks(start),
                        blocks: (run.bytes / block_bytes) as u32,
                        fua: false,
                    };
                    window.submit(&op, start, buf, &mut nothing)?;
                }
            }
            window.free.push(chunk);
        }
        at += bytes as u64;
        progress(at)?;
    }
    let end = file_bytes.next_multiple_of(block_bytes as u64);
    zeros.add(end, shape.size_bytes - end, &mut |run| {
        window.zero(shape, run, fresh)
    })?;
    zeros.end(&mut |run| window.zero(shape, run, fresh))?;
    window.drain(&mut nothing)?;
    window.submit(&IoOp::Flush, 0, Vec::new(), &mut nothing)?;
    window.drain(&mut nothing)
}

/// Copies the whole volume into `file`, which is empty.
pub(super) fn export(
    queue: &mut impl Commands,
    shape: Shape,
    file: &File,
    progress: Progress<'_>,
) -> Outcome {
    let chunk_bytes = shape.chunk_bytes();
    let block_bytes = shape.block_bytes as usize;
    let mut window = Window::new(queue, chunk_bytes);
    let mut done_bytes = 0;
    let mut keep = |start: u64, data: &[u8]| -> Outcome {
        for run in runs(data, EXPORT_GRANULE_BYTES).filter(|run| !run.zero) {
            file.write_all_at(
                &data[run.start..run.start + run.bytes],
                start + run.start as u64,
            )
            .while_doing("write the image")?;
        }
        done_bytes += data.len() as u64;
        progress(done_bytes)
    };
    let chunk_at = |start: u64| {
        usize::try_from(shape.size_bytes - start)
            .unwrap_or(chunk_bytes)
            .min(chunk_bytes)
    };
    let mut finish = |start: u64, buf: &[u8]| keep(start, &buf[..chunk_at(start)]);
    let mut at = 0;
    while at < shape.size_bytes {
        let bytes = chunk_at(at);
        let buf = window.buffer(&mut finish)?;
        let op = IoOp::Read {
            lba: shape.blocks(at),
            blocks: (bytes / block_bytes) as u32,
        };
        window.submit(&op, at, buf, &mut finish)?;
        at += bytes as u64;
    }
    window.drain(&mut finish)?;
    file.set_len(shape.size_bytes)
        .while_doing("set the image's size")?;
    file.sync_all().while_doing("write the image")
}

/// What is done with a command that has ended: its tag and its buffer.
type Finish<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Outcome;

/// Nothing more is to be done with it.
fn nothing(_tag: u64, _buf: &[u8]) -> Outcome {
    Ok(())
}

/// A command at byte `at` of the volume has failed.
fn failed(at: u64, status: Status) -> Failure {
    if status.code() == Status::CAPACITY_EXCEEDED {
        return Failure::new(format!(
            "no space at byte {at} of the volume: the pool, or the file system below it, is full"
        ))
        .hint(
            "`forebay pool show` tells how full the pool is, `df` the file system; delete volumes \
             that nobody needs, or make room there",
        );
    }
    Failure::new(format!("the volume failed at byte {at}: {status}"))
}

/// Commands in flight, and the buffers that are not.
struct Window<'a, Q> {
    queue: &'a mut Q,
    free: Vec<Vec<u8>>,
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
            done: Vec::new(),
            made: 0,
            depth,
            buffer_bytes,
        }
    }

    /// A buffer; waits for a command to end when all are in use.
    fn buffer(&mut self, finish: Finish<'_>) -> Outcome<Vec<u8>> {
        loop {
            if let Some(buf) = self.free.pop() {
                return Ok(buf);
            }
            // One more than commands, for the chunk that is being looked at.
            if self.made <= self.depth {
                self.made += 1;
                return Ok(vec![0; self.buffer_bytes]);
            }
            self.turn(finish)?;
        }
    }

    fn turn(&mut self, finish: Finish<'_>) -> Outcome {
        let mut done = std::mem::take(&mut self.done);
        self.queue
            .poll(&mut done, POLL_LIMIT)
            .map_err(|error| Failure::new(error.to_string()))?;
        for end in done.drain(..) {
            if !end.status.is_success() {
                return Err(failed(end.tag, end.status));
            }
            // A Flush or Write Zeroes has no buffer.
            if !end.buf.is_empty() {
                finish(end.tag, &end.buf)?;
                self.free.push(end.buf);
            }
        }
        self.done = done;
        Ok(())
    }

    fn submit(&mut self, op: &IoOp, tag: u64, mut buf: Vec<u8>, finish: Finish<'_>) -> Outcome {
        while self.queue.in_flight() >= self.depth {
            self.turn(finish)?;
        }
        loop {
            match self.queue.submit(op, tag, buf) {
                Ok(()) => return Ok(()),
                Err(refused) if refused.reason == forebay_initiator::Reason::Full => {
                    buf = refused.buf;
                    self.turn(finish)?;
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

    /// Has a run of zeros made zeros.
    fn zero(&mut self, shape: Shape, run: Zeros, fresh: bool) -> Outcome {
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
            self.submit(
                &op,
                lba * u64::from(shape.block_bytes),
                Vec::new(),
                &mut nothing,
            )?;
            lba += blocks;
        }
        Ok(())
    }

    fn drain(&mut self, finish: Finish<'_>) -> Outcome {
        while self.queue.in_flight() > 0 {
            self.turn(finish)?;
        }
        Ok(())
    }
}

/// A range of zeros that is still growing.
#[derive(Debug, Clone, Copy)]
struct Zeros {
    start: u64,
    bytes: u64,
}

impl Zeros {
    /// Adds a range; hands over the one before if they don't touch.
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

/// A part of a chunk that is all zeros, or has none that matter.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    start: usize,
    bytes: usize,
    zero: bool,
}

/// The runs of a chunk, as long as possible.
fn runs(data: &[u8], granule_bytes: usize) -> impl Iterator<Item = Run> {
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

/// Where the file has data next; `at` itself where the filesystem can't tell.
fn next_data(file: &File, at: u64, end: u64) -> u64 {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(found) => found,
        // A hole up to the end.
        Err(rustix::io::Errno::NXIO) => end,
        Err(_) => at,
    }
}

#[cfg(test)]
#[path = "transfer_tests.rs"]
mod tests;
