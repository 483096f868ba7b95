//! Waiting for standard input and output.
//!
//! Purpose: a peer that is slow, or stands still, holds up neither the commands in flight nor an interrupt.
//! Design: `poll` before each read and write, with the transfer's other work in between.
//! Not here: reading and writing.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::failure::{Outcome, While};

/// What else there is to do while a stream is not ready. Returns how long to wait before it is asked again; fails to end
/// the transfer.
pub(super) type Idle<'a> = &'a mut dyn FnMut() -> Outcome<Duration>;

/// Whether a file's name stands for standard input or output.
pub(super) fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// A descriptor of our own for standard input or output, past the buffers of `std`.
pub(super) fn standard(stream: BorrowedFd<'_>) -> Outcome<File> {
    let owned = stream.try_clone_to_owned();
    owned.map(File::from).while_doing("open a standard stream")
}

/// Waits until `stream` can be read or written without a wait, or has failed.
pub(super) fn await_ready(stream: &File, what: PollFlags, idle: Idle<'_>) -> Outcome {
    let mut wait = Duration::ZERO;
    loop {
        let timeout = Timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(stream, what)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => wait = idle()?,
            ready => return ready.map(drop).while_doing("wait for a standard stream"),
        }
    }
}
