//! Standard input and output with `poll`: a slow peer delays neither commands in flight nor an
//! interrupt.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::failure::{Outcome, While};

/// Work while a stream is not ready. Returns the time until the next check.
pub(super) type Idle<'a> = &'a mut dyn FnMut() -> Outcome<Duration>;

pub(super) fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// Bypasses the buffers of `std`.
pub(super) fn standard(stream: BorrowedFd<'_>) -> Outcome<File> {
    let owned = stream.try_clone_to_owned();
    owned.map(File::from).while_doing("open a standard stream")
}

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
