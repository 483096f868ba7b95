//! Operations on images, which librbd carries out on its own threads.
//!
//! librbd only sees memory of this process. So a VM that takes its memory away harms no thread of
//! librbd's, and a dead engine's reads end with its process. The first ring polls an eventfd, so a
//! thread that sleeps in it wakes for images, too. The poll is one-shot and is rearmed before each
//! sleep.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use forebay_rbd::{Buffer, Completions, Ended, Image, ImageRequest, RefusedRequest};
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use rustix::io::Errno;

use super::options::{Completion, RingFull};
use crate::mem::{Buf, IoMemory};

pub(super) const REMOTE_USER_DATA: u64 = u64::MAX - 2;

/// The most operations in flight: as many as a reactor has slices.
const MOST: usize = 8192;
/// The most memory of operations in flight.
const MOST_BYTES: usize = 256 << 20;
/// Buffers by size in bytes, and how many unused ones are kept.
const CLASSES: [(usize, usize); 6] = [
    // Of operations without data.
    (0, 256),
    (4 << 10, 256),
    (16 << 10, 128),
    (64 << 10, 64),
    (128 << 10, 32),
    (512 << 10, 16),
];

struct Flight {
    user_data: u64,
    class: usize,
    /// A read's memory.
    into: Option<IoMemory>,
}

pub(super) struct RemoteIo {
    completions: Arc<Completions>,
    /// Operations that have ended, but are not taken.
    ended: VecDeque<Ended>,
    flights: Vec<Option<Flight>>,
    free: Vec<u32>,
    bytes_in_flight: usize,
    spare: [Vec<Buffer>; CLASSES.len()],
    /// The first ring polls the completions.
    is_watched: bool,
}

impl RemoteIo {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            completions: Arc::new(Completions::new()?),
            ended: VecDeque::new(),
            flights: Vec::new(),
            free: Vec::new(),
            bytes_in_flight: 0,
            spare: Default::default(),
            is_watched: false,
        })
    }

    /// Begins an operation; `memory` is that of a read or write, under the contract of
    /// [`Buf::new`].
    pub(super) fn begin(
        &mut self,
        image: &Image,
        request: ImageRequest,
        memory: Option<IoMemory>,
        user_data: u64,
    ) -> Result<Result<(), Errno>, RingFull> {
        let len_bytes = match request {
            ImageRequest::Read { length, .. } | ImageRequest::Write { length, .. } => length,
            _ => 0,
        };
        let into = memory.filter(|_| matches!(request, ImageRequest::Read { .. }));
        let Some(class) = CLASSES.iter().position(|(bytes, _)| len_bytes <= *bytes) else {
            return Ok(Err(Errno::INVAL));
        };
        let flight = Flight {
            user_data,
            class,
            into,
        };
        let (token, mut buffer) = self.start(flight)?;
        if let Some(memory) = memory.filter(|_| into.is_none()) {
            gather(&memory, buffer.bytes_mut());
        }
        let begun = image.submit(request, buffer, token.into(), &self.completions);
        Ok(begun.map_err(|RefusedRequest { buffer, errno }| {
            self.end(token.into(), buffer);
            errno
        }))
    }

    /// Takes a place and a buffer.
    fn start(&mut self, flight: Flight) -> Result<(u32, Buffer), RingFull> {
        let (bytes, _) = CLASSES[flight.class];
        if self.in_flight() == MOST || self.bytes_in_flight + bytes > MOST_BYTES {
            return Err(RingFull);
        }
        self.bytes_in_flight += bytes;
        let spare = self.spare[flight.class].pop();
        let token = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() as u32 - 1
        });
        self.flights[token as usize] = Some(flight);
        Ok((token, spare.unwrap_or_else(|| Buffer::new(bytes))))
    }

    /// Gives back a place and its buffer.
    fn end(&mut self, token: u64, buffer: Buffer) -> Option<Flight> {
        let at = u32::try_from(token).ok()?;
        let flight = self.flights.get_mut(at as usize)?.take()?;
        self.free.push(at);
        let (bytes, most) = CLASSES[flight.class];
        self.bytes_in_flight -= bytes;
        let spare = &mut self.spare[flight.class];
        if spare.len() < most {
            spare.push(buffer);
        }
        Some(flight)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Arms the first ring's poll before a sleep. False if operations have ended, or the poll could
    /// not be queued.
    pub(super) fn may_sleep(&mut self, first: &mut IoUring) -> bool {
        if !self.is_watched {
            let fd = Fd(self.completions.fd().as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32)
                .build()
                .user_data(REMOTE_USER_DATA);
            // SAFETY: a poll names no memory. The kernel takes its own reference to the file.
            self.is_watched = unsafe { first.submission().push(&entry) }.is_ok();
        }
        self.is_watched && self.ended.is_empty() && self.completions.arm()
    }

    pub(super) fn poll_ended(&mut self) {
        self.is_watched = false;
        self.completions.disarm();
    }

    pub(super) fn has_completions(&mut self) -> bool {
        if self.ended.is_empty() {
            self.ended.extend(self.completions.take());
        }
        !self.ended.is_empty()
    }

    /// The next ended operation. A read's bytes are in its memory.
    pub(super) fn next(&mut self) -> Option<Completion> {
        while self.has_completions() {
            let Ended {
                token,
                buffer,
                result,
            } = self.ended.pop_front()?;
            let at = usize::try_from(token).unwrap_or(usize::MAX);
            if let (Some(Some(flight)), Ok(bytes)) = (self.flights.get(at), &result)
                && let Some(into) = &flight.into
            {
                scatter(buffer.bytes().get(..*bytes).unwrap_or_default(), into);
            }
            if let Some(flight) = self.end(token, buffer) {
                let failed = |errno: Errno| -errno.raw_os_error();
                return Some(Completion {
                    user_data: flight.user_data,
                    result: result
                        .map_or_else(failed, |bytes| i32::try_from(bytes).unwrap_or(i32::MAX)),
                });
            }
        }
        None
    }
}

/// Copies an operation's bytes out of its memory, as far as there is room.
fn gather(memory: &IoMemory, into: &mut [u8]) {
    let mut rest = into;
    each(memory, |buf| {
        let len = rest.len().min(buf.len_bytes() as usize);
        let (here, after) = std::mem::take(&mut rest).split_at_mut(len);
        rest = after;
        // SAFETY: the memory is that of a write in progress, so it is readable by `Buf::new`'s
        // contract; `here` is our own. Wrong for an operation that has ended.
        unsafe { std::ptr::copy_nonoverlapping(buf.ptr().as_ptr(), here.as_mut_ptr(), len) };
    });
}

/// Copies bytes into an operation's memory, as far as there is room.
fn scatter(bytes: &[u8], memory: &IoMemory) {
    let mut rest = bytes;
    each(memory, |buf| {
        let (here, after) = rest.split_at(rest.len().min(buf.len_bytes() as usize));
        rest = after;
        // SAFETY: the completion of this read has not been taken. Until then the memory is writable
        // by `Buf::new`'s contract.
        unsafe { std::ptr::copy_nonoverlapping(here.as_ptr(), buf.ptr().as_ptr(), here.len()) };
    });
}

fn each(memory: &IoMemory, mut each: impl FnMut(Buf)) {
    match memory {
        IoMemory::One(buf) => each(*buf),
        IoMemory::Many(bufs) => bufs.iter().for_each(each),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::StaticRegion;
    use crate::ring::{Ring, RingOptions};
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    fn flight(user_data: u64, class: usize, into: Option<Buf>) -> Flight {
        Flight {
            user_data,
            class,
            into: into.map(IoMemory::One),
        }
    }

    fn ring() -> Ring {
        let mut ring = Ring::new(&RingOptions::default()).expect("io_uring works here");
        ring.remote = Some(Box::new(RemoteIo::new().expect("an eventfd")));
        ring
    }

    /// Each end wakes a thread that polls for a while, then sleeps.
    #[test]
    fn no_end_is_slept_through() {
        const ROUNDS: u64 = 20_000;
        let mut ring = ring();
        let completions = Arc::clone(&ring.remote.as_ref().unwrap().completions);
        let (begin, begun) = channel::<(u32, Buffer)>();
        let ends = std::thread::spawn(move || {
            for (round, (token, buffer)) in begun.into_iter().enumerate() {
                let until = Instant::now() + Duration::from_nanos(round as u64 % 97 * 300);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                completions.end(token.into(), buffer, Ok(0));
            }
        });
        let mut out = [Completion::default(); 4];
        for round in 0..ROUNDS {
            let remote = ring.remote.as_mut().unwrap();
            begin
                .send(remote.start(flight(round, 0, None)).unwrap())
                .unwrap();
            let mut turns = 0;
            while ring.drain(&mut out) == 0 {
                turns += 1;
                if turns > round % 50 {
                    let (slept, limit) = (Instant::now(), Duration::from_secs(20));
                    ring.wait(1, Some(limit)).unwrap();
                    assert!(slept.elapsed() < limit, "{round}: slept through its end");
                }
            }
            assert_eq!(out[0].user_data, round);
        }
        assert_eq!(ring.remote_in_flight(), 0);
        drop(begin);
        ends.join().unwrap();
    }

    #[test]
    fn a_read_ends_in_its_memory() {
        let mut ring = ring();
        let region = StaticRegion::anonymous(8192).unwrap();
        let into = region.buf(0, 8192).unwrap();
        let remote = ring.remote.as_mut().unwrap();
        let (token, mut buffer) = remote.start(flight(5, 2, Some(into))).unwrap();
        buffer.bytes_mut().fill(7);
        remote.completions.end(token.into(), buffer, Ok(4096));
        let mut out = [Completion::default(); 2];
        assert!(ring.has_completions());
        assert_eq!(ring.drain(&mut out), 1);
        assert_eq!((out[0].user_data, out[0].result), (5, 4096));
        let mut bytes = [9; 8192];
        assert!(region.copy_out(0, &mut bytes));
        assert!(bytes[..4096].iter().all(|byte| *byte == 7));
        assert!(bytes[4096..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn memory_in_flight_is_limited() {
        let mut remote = RemoteIo::new().unwrap();
        let mut flights = Vec::new();
        while let Ok(started) = remote.start(flight(0, CLASSES.len() - 1, None)) {
            flights.push(started);
        }
        assert_eq!(flights.len(), 512);
        assert!(remote.start(flight(0, 0, None)).is_ok());
        let (token, buffer) = flights.pop().unwrap();
        assert!(remote.end(token.into(), buffer).is_some());
        assert!(remote.end(token.into(), Buffer::new(0)).is_none(), "twice");
        assert!(remote.start(flight(0, CLASSES.len() - 1, None)).is_ok());
    }
}
