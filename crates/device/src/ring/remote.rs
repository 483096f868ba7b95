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

/// The most operations in flight.
const MOST: usize = 4096;
/// Buffers by size in bytes, and how many unused ones are kept.
const CLASSES: [(usize, usize); 5] = [
    (4 << 10, 256),
    (16 << 10, 128),
    (64 << 10, 64),
    (128 << 10, 32),
    (512 << 10, 16),
];

struct Flight {
    user_data: u64,
    class: Option<usize>,
    /// A read's memory.
    into: Option<IoMemory>,
}

pub(super) struct RemoteIo {
    completions: Arc<Completions>,
    /// Operations that have ended, but are not taken.
    ended: VecDeque<Ended>,
    flights: Vec<Option<Flight>>,
    free: Vec<u32>,
    spare: [Vec<Buffer>; CLASSES.len()],
    /// Buffers of operations without data.
    empty: Vec<Buffer>,
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
            spare: Default::default(),
            empty: Vec::new(),
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
        let (len_bytes, is_read) = match request {
            ImageRequest::Read { length, .. } => (length, true),
            ImageRequest::Write { length, .. } => (length, false),
            _ => (0, false),
        };
        let class = match CLASSES.iter().position(|(bytes, _)| len_bytes <= *bytes) {
            _ if len_bytes == 0 => None,
            Some(class) => Some(class),
            None => return Ok(Err(Errno::INVAL)),
        };
        let token = match self.free.pop() {
            Some(token) => token,
            None if self.flights.len() < MOST => {
                self.flights.push(None);
                self.flights.len() as u32 - 1
            }
            None => return Err(RingFull),
        };
        let mut buffer = match class {
            Some(class) => self.spare[class].pop(),
            None => self.empty.pop(),
        }
        .unwrap_or_else(|| Buffer::new(class.map_or(0, |class| CLASSES[class].0)));
        if let Some(memory) = memory.filter(|_| !is_read) {
            gather(&memory, buffer.bytes_mut());
        }
        self.flights[token as usize] = Some(Flight {
            user_data,
            class,
            into: memory.filter(|_| is_read),
        });
        let begun = image.submit(request, buffer, token.into(), &self.completions);
        Ok(begun.map_err(|RefusedRequest { buffer, errno }| {
            self.flights[token as usize] = None;
            self.free.push(token);
            self.keep(class, buffer);
            errno
        }))
    }

    fn keep(&mut self, class: Option<usize>, buffer: Buffer) {
        match class {
            Some(class) if self.spare[class].len() < CLASSES[class].1 => {
                self.spare[class].push(buffer);
            }
            None if self.empty.len() < CLASSES[0].1 => self.empty.push(buffer),
            _ => {}
        }
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
        loop {
            if !self.has_completions() {
                return None;
            }
            let Ended {
                token,
                buffer,
                result,
            } = self.ended.pop_front()?;
            let at = usize::try_from(token).unwrap_or(usize::MAX);
            let Some(flight) = self.flights.get_mut(at).and_then(Option::take) else {
                continue;
            };
            self.free.push(at as u32);
            let result = match result {
                Ok(bytes) => {
                    if let Some(into) = &flight.into {
                        scatter(buffer.bytes().get(..bytes).unwrap_or_default(), into);
                    }
                    i32::try_from(bytes).unwrap_or(i32::MAX)
                }
                Err(errno) => -errno.raw_os_error(),
            };
            self.keep(flight.class, buffer);
            return Some(Completion {
                user_data: flight.user_data,
                result,
            });
        }
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
        // SAFETY: the memory is that of a read whose completion nobody has taken, so it is
        // writable by `Buf::new`'s contract. Wrong for an operation that has ended.
        unsafe { std::ptr::copy_nonoverlapping(here.as_ptr(), buf.ptr().as_ptr(), here.len()) };
    });
}

fn each(memory: &IoMemory, mut each: impl FnMut(Buf)) {
    match memory {
        IoMemory::One(buf) => each(*buf),
        IoMemory::Many(bufs) => bufs.iter().for_each(each),
    }
}
