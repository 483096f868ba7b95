//! A device with a volatile write cache whose power a test can cut.
//!
//! **Purpose.** Show what a power cut may leave: of everything that was written and not flushed, some is there, some is
//! lost, some is torn between sectors, in whatever order. Both processes use the device, and both may be killed at any
//! instruction before the cut.
//!
//! **Design.** Three files. The one at the device's path is what reads see, and carries the fence's locks. `.journal`
//! holds every write, zeroing and flush since the last cut ([`journal`]); it is appended under a file lock before the
//! visible file is changed, and says how far the visible file is, so that whoever comes after a kill completes the last
//! step, or removes half a record, which nobody was told had ended. `.stable` is what the last cut left. A flush covers what
//! had *ended* (was judged by [`crate::Device::finish`]) when it was submitted, and only once it has ended itself.
//! [`crate::power::cut`] makes a cut of all this.
//! Two more files beside it are switches: while `.hang` exists, no operation on this device begins or ends; while
//! `.fail` exists, each ends with `EIO`.
//!
//! **What it does not do.** It is for tests (cargo feature `test-device`): slow, and its journal grows until the cut. A
//! flush by one process may cover what the other has in flight. An operation that hangs holds no fence's lock beyond
//! its process.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::device::{Finish, Submitted};
use crate::error::DeviceError;
use crate::hang::{HangGate, LOOK_AGAIN};
use crate::op::{Op, OpKind};
use crate::ring::{Io, Ring};

pub(crate) mod journal;

use journal::{Journal, Record};

/// The file that holds what the last cut left.
pub(crate) fn stable_path(device: &Path) -> PathBuf {
    beside(device, "stable")
}

/// The file that holds what happened since.
pub(crate) fn journal_path(device: &Path) -> PathBuf {
    beside(device, "journal")
}

/// While this file exists, the device at `device` hangs.
pub fn hang_path(device: &Path) -> PathBuf {
    beside(device, "hang")
}

/// While this file exists, the device at `device` fails.
pub fn fail_path(device: &Path) -> PathBuf {
    beside(device, "fail")
}

pub(crate) fn beside(device: &Path, ending: &str) -> PathBuf {
    let mut path = device.as_os_str().to_owned();
    path.push(".");
    path.push(ending);
    path.into()
}

/// Makes what is beside the visible file, unless it is there.
pub(crate) fn create(device: &Path, size_bytes: u64) -> Result<(), DeviceError> {
    for (path, bytes) in [
        (stable_path(device), size_bytes),
        (journal_path(device), journal::HEADER_BYTES),
    ] {
        match crate::open::create_file(&path, bytes) {
            Ok(()) | Err(DeviceError::Exists { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

/// One process's view.
#[derive(Debug)]
pub(crate) struct Volatile {
    hang: PathBuf,
    fail: PathBuf,
    state: Mutex<State>,
    gate: Arc<HangGate>,
}

#[derive(Debug)]
struct State {
    journal: Journal,
    /// Writes and zeroings that were submitted and not judged: place in the journal, offset, length.
    in_flight: Vec<(u64, u64, u64)>,
    /// What the flushes in flight cover: everything before a place but these.
    flushes: Vec<(u64, Vec<u64>)>,
}

impl Volatile {
    /// Opens what is beside the visible file, and makes that complete.
    pub(crate) fn open(device: &Path, visible: BorrowedFd<'_>) -> Result<Self, DeviceError> {
        let path = journal_path(device);
        let failed = |doing| {
            let path = path.clone();
            move |errno| DeviceError::from_errno(&path, doing, errno)
        };
        let fd = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(failed("opening it"))?;
        let this = Self {
            hang: hang_path(device),
            fail: fail_path(device),
            state: Mutex::new(State {
                journal: Journal::new(fd),
                in_flight: Vec::new(),
                flushes: Vec::new(),
            }),
            gate: HangGate::new().map_err(failed("making an eventfd"))?,
        };
        this.lock(visible)
            .map_err(failed("completing its last step"))?;
        Ok(this)
    }

    /// As [`crate::Device::submit`], checks done.
    pub(crate) fn submit(
        &self,
        visible: BorrowedFd<'_>,
        ring: &mut Ring,
        op: &mut Op,
        user_data: u64,
    ) -> Submitted {
        // An operation and the poll before it.
        if ring.free_entries() < 2 {
            return Submitted::RingFull;
        }
        let answer = |result| Io::Answer { result, user_data };
        let pushed = if self.hangs() {
            op.held = true;
            ring.push_io_behind(self.gate.fd(), &answer(0), user_data)
        } else if self.fail.exists() {
            ring.push_io(
                &answer(Errno::IO.raw_os_error().saturating_neg()),
                user_data,
            )
        } else {
            match (op.kind, op.memory()) {
                (OpKind::Read, Some(memory)) => {
                    let io = Io::Read {
                        fd: visible,
                        offset_bytes: op.offset_bytes,
                        memory,
                    };
                    ring.push_io(&io, user_data)
                }
                _ => match self.begin(visible, op) {
                    Ok(()) => ring.push_io(&answer(0), user_data),
                    Err(errno) => return Submitted::Done(Err(errno)),
                },
            }
        };
        match pushed {
            Ok(()) => Submitted::Queued,
            Err(crate::ring::RingFull) => Submitted::RingFull,
        }
    }

    /// As [`crate::Device::finish`], for all but reads that were not held; their result is the ring's own.
    pub(crate) fn finish(&self, visible: BorrowedFd<'_>, op: &Op, result: i32) -> Finish {
        if result < 0 {
            return Finish::Failed(Errno::from_raw_os_error(result.saturating_neg()));
        }
        let held = op.held;
        let ended = || {
            if held && self.fail.exists() {
                return Err(Errno::IO);
            }
            match (op.kind, op.memory()) {
                (OpKind::Read, Some(memory)) => {
                    return memory.try_each(|before, buf| {
                        crate::ram::read_by_call(visible, op.offset_bytes + before, buf)
                    });
                }
                _ if held => self.begin(visible, op)?,
                _ => {}
            }
            self.end(visible, op)
        };
        match ended() {
            Ok(()) => Finish::Done,
            Err(errno) => Finish::Failed(errno),
        }
    }

    /// The daemon's write.
    pub(crate) fn write_at(
        &self,
        visible: BorrowedFd<'_>,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        self.wait_while_hanging()?;
        let state = &mut *self.lock(visible)?;
        let record = Record::Write {
            offset_bytes,
            bytes,
        };
        state.journal.append(visible, &record).map(|_| ())
    }

    /// The daemon's flush.
    pub(crate) fn sync(&self, visible: BorrowedFd<'_>) -> Result<(), Errno> {
        self.wait_while_hanging()?;
        let state = &mut *self.lock(visible)?;
        let before = state.journal.end()?;
        let record = Record::Flush { before, but: &[] };
        state.journal.append(visible, &record).map(|_| ())
    }

    /// Before the daemon does anything.
    pub(crate) fn wait_while_hanging(&self) -> Result<(), Errno> {
        while self.hang.exists() {
            std::thread::sleep(LOOK_AGAIN);
        }
        match self.fail.exists() {
            true => Err(Errno::IO),
            false => Ok(()),
        }
    }

    fn begin(&self, visible: BorrowedFd<'_>, op: &Op) -> Result<(), Errno> {
        let state = &mut *self.lock(visible)?;
        let (offset_bytes, len_bytes) = (op.offset_bytes, op.len_bytes);
        let at = match (op.kind, op.memory()) {
            (OpKind::Flush, _) => {
                let but = state.in_flight.iter().map(|(at, ..)| *at).collect();
                let before = state.journal.end()?;
                state.flushes.push((before, but));
                return Ok(());
            }
            (OpKind::Write, Some(memory)) => {
                let bytes = &memory.to_vec()[..];
                let record = Record::Write {
                    offset_bytes,
                    bytes,
                };
                state.journal.append(visible, &record)?
            }
            _ => {
                let record = Record::Zero {
                    offset_bytes,
                    len_bytes,
                };
                state.journal.append(visible, &record)?
            }
        };
        state.in_flight.push((at, offset_bytes, len_bytes));
        Ok(())
    }

    fn end(&self, visible: BorrowedFd<'_>, op: &Op) -> Result<(), Errno> {
        let state = &mut *self.lock(visible)?;
        if op.kind == OpKind::Flush {
            // The newest covers what any other does, and had ended before.
            if let Some((before, but)) = state.flushes.pop() {
                let but = &but[..];
                let record = Record::Flush { before, but };
                state.journal.append(visible, &record)?;
            }
            return Ok(());
        }
        let range = (op.offset_bytes, op.len_bytes);
        let mut ended = state.in_flight.iter();
        if let Some(index) = ended.position(|(_, offset, len)| (*offset, *len) == range) {
            let (at, ..) = state.in_flight.remove(index);
            if op.dsync {
                state.journal.append(visible, &Record::Durable { at })?;
            }
        }
        Ok(())
    }

    fn hangs(&self) -> bool {
        let hang = self.hang.clone();
        self.gate.shut_while(move || hang.exists())
    }

    /// For this process and thread alone, with a visible file that shows all that the journal has.
    fn lock(&self, visible: BorrowedFd<'_>) -> Result<Locked<'_>, Errno> {
        let mut locked = Locked(lock(&self.state));
        loop {
            match rustix::fs::flock(locked.journal.fd(), FlockOperation::LockExclusive) {
                Err(Errno::INTR) => {}
                other => break other?,
            }
        }
        locked.journal.complete(visible)?;
        Ok(locked)
    }
}

struct Locked<'a>(MutexGuard<'a, State>);

impl std::ops::Deref for Locked<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        &self.0
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.0
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(self.0.journal.fd(), FlockOperation::Unlock);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes all of it.
pub(crate) fn write_all(fd: impl AsFd, offset_bytes: u64, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(&fd, &bytes[done..], offset_bytes + done as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Makes a range of a file read as zeros.
pub(crate) fn zero(fd: impl AsFd, offset_bytes: u64, len_bytes: u64) -> Result<(), Errno> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, mode, offset_bytes, len_bytes)
}
