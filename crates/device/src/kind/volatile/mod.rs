//! A device with a volatile write cache whose power a test can cut with [`crate::power::cut`].
//!
//! The file at the device's path is what reads see, and carries the fence's locks. `.journal`
//! records every change and flush since the last cut ([`journal`]). A record is appended under a
//! file lock before the visible file changes, so that the next process after a kill repairs the
//! last step. `.stable` is what the last cut left. A flush covers writes that had *ended* (in
//! [`crate::Device::finish`]) when it was submitted, and only once it has ended too. One process's
//! flush may cover another's writes in flight.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::file::SyncFile;
use super::file_io::FileIo;
use super::hang::{HangGate, POLL_AGAIN};
use super::info::{DeviceKind, DeviceNow, OpenOptions};
use super::local::{CacheUse, Local, Node, create_missing};
use super::spec::{DeviceSpec, SpecError, SpecText};
use super::{Backend, BackendKind, Opened, SyncBackend, note};
use crate::error::DeviceError;
use crate::fence::{Claims, Fence};
use crate::op::{Finish, Op, OpKind, Submitted};
use crate::ring::Ring;

mod copy;
pub(crate) mod journal;

use journal::{JournalRecord, WriteJournal};

pub(crate) fn stable_path(device: &Path) -> PathBuf {
    beside(device, "stable")
}

pub(crate) fn journal_path(device: &Path) -> PathBuf {
    beside(device, "journal")
}

/// While this file exists, no operation on `device` begins or ends.
pub fn hang_path(device: &Path) -> PathBuf {
    beside(device, "hang")
}

/// While this file exists, each operation on `device` ends with `EIO`.
pub fn fail_path(device: &Path) -> PathBuf {
    beside(device, "fail")
}

pub(crate) fn beside(device: &Path, ending: &str) -> PathBuf {
    let mut path = device.as_os_str().to_owned();
    path.push(".");
    path.push(ending);
    path.into()
}

impl DeviceKind {
    /// For tests: a file with a volatile write cache.
    #[allow(
        non_upper_case_globals,
        reason = "named as the variant of an enum that it was"
    )]
    pub const Volatile: Self = Self("volatile");
}

const LOCAL: Local = Local {
    kind: DeviceKind::Volatile,
    node: Node::File,
    wants_direct: false,
    keeps: true,
};

pub(super) struct VolatileKind;

impl VolatileKind {
    fn create(spec: &DeviceSpec, options: &OpenOptions) -> Result<(), DeviceError> {
        if let (true, Some(size_bytes)) = (options.create_missing, spec.size_bytes()) {
            create_missing(spec.path(), size_bytes)?;
            create_missing(&stable_path(spec.path()), size_bytes)?;
            create_missing(&journal_path(spec.path()), journal::HEADER_BYTES)?;
        }
        Ok(())
    }
}

impl BackendKind for VolatileKind {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Volatile
    }

    fn example(&self) -> &'static str {
        ""
    }

    fn parse(&self, text: &SpecText<'_>) -> Result<DeviceSpec, SpecError> {
        text.path_and_size(DeviceKind::Volatile)
    }

    fn open(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Arc<dyn Backend>>, DeviceError> {
        Self::create(spec, options)?;
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Direct)?;
        let cache = Cache::open(spec.path(), fd.as_fd())?;
        let file = FileIo::new(fd, &info);
        let backend = Arc::new(Volatile { file, cache });
        Ok(Opened { info, backend })
    }

    fn open_sync(
        &self,
        spec: &DeviceSpec,
        options: &OpenOptions,
    ) -> Result<Opened<Box<dyn SyncBackend>>, DeviceError> {
        Self::create(spec, options)?;
        let (fd, info) = LOCAL.open(spec, options, CacheUse::Buffered)?;
        let cache = Cache::open(spec.path(), fd.as_fd())?;
        let file = SyncFile::new(fd, &info);
        let backend = Box::new(SyncVolatile { file, cache });
        Ok(Opened { info, backend })
    }
}

#[derive(Debug)]
struct Volatile {
    file: FileIo,
    cache: Cache,
}

impl Backend for Volatile {
    fn submit(&self, ring: &mut Ring, op: &mut Op, user_data: u64) -> Submitted {
        if ring.free_entries() < 2 {
            return Submitted::RingFull;
        }
        op.note &= !note::WAITS;
        let result = if self.cache.hangs() {
            op.note |= note::WAITS;
            let answer = ring.answer(0, user_data);
            return ring
                .push_request_behind(self.cache.gate.fd(), &answer)
                .into();
        } else if self.cache.fail.exists() {
            Errno::IO.raw_os_error().saturating_neg()
        } else if op.kind == OpKind::Read {
            return self.file.submit(ring, op, user_data);
        } else if let Err(errno) = self.cache.begin(self.file.fd(), op) {
            return Submitted::Done(Err(errno));
        } else {
            0
        };
        let answer = ring.answer(result, user_data);
        ring.push_request(&answer).into()
    }

    fn finish(&self, op: Op, result: i32) -> Finish {
        if op.note & note::WAITS != 0 {
            let note = op.note & !note::WAITS;
            return Finish::Again(Op { note, ..op });
        }
        if op.kind == OpKind::Read {
            return self.file.finish(op, result);
        }
        if result < 0 {
            return Finish::Failed(Errno::from_raw_os_error(result.saturating_neg()));
        }
        match self.cache.end(self.file.fd(), &op) {
            Ok(()) => Finish::Done,
            Err(errno) => Finish::Failed(errno),
        }
    }

    fn fence(&self) -> &dyn Fence {
        &self.file
    }
}

#[derive(Debug)]
struct SyncVolatile {
    file: SyncFile,
    cache: Cache,
}

impl SyncBackend for SyncVolatile {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> io::Result<()> {
        self.cache.wait_while_hanging()?;
        self.file.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> io::Result<()> {
        Ok(self.cache.write_at(self.file.fd(), offset_bytes, from)?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(self.cache.sync(self.file.fd())?)
    }

    fn will_read(&self, offset_bytes: u64, bytes: u64) {
        self.file.will_read(offset_bytes, bytes);
    }

    fn drop_cache(&self) {
        self.file.drop_cache();
    }

    fn poll_now(&self) -> io::Result<DeviceNow> {
        self.file.poll_now()
    }

    fn claims(&self) -> &dyn Claims {
        self.file.claims()
    }
}

#[derive(Debug)]
struct Cache {
    hang: PathBuf,
    fail: PathBuf,
    state: Mutex<CacheState>,
    gate: Arc<HangGate>,
}

#[derive(Debug)]
struct CacheState {
    journal: WriteJournal,
    /// Submitted, unfinished changes: journal position, offset, length.
    in_flight: Vec<(u64, u64, u64)>,
    /// What flushes in flight cover: everything before a position, except these.
    flushes: Vec<(u64, Vec<u64>)>,
}

impl Cache {
    fn open(device: &Path, visible: BorrowedFd<'_>) -> Result<Self, DeviceError> {
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
            state: Mutex::new(CacheState {
                journal: WriteJournal::new(fd),
                in_flight: Vec::new(),
                flushes: Vec::new(),
            }),
            gate: HangGate::new().map_err(failed("creating an eventfd"))?,
        };
        this.lock(visible)
            .map_err(failed("completing its last step"))?;
        Ok(this)
    }

    fn write_at(
        &self,
        visible: BorrowedFd<'_>,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        self.wait_while_hanging()?;
        let state = &mut *self.lock(visible)?;
        let record = JournalRecord::Write {
            offset_bytes,
            bytes,
        };
        state.journal.append(visible, &record).map(|_| ())
    }

    fn sync(&self, visible: BorrowedFd<'_>) -> Result<(), Errno> {
        self.wait_while_hanging()?;
        let state = &mut *self.lock(visible)?;
        let before = state.journal.end()?;
        let record = JournalRecord::Flush { before, but: &[] };
        state.journal.append(visible, &record).map(|_| ())
    }

    fn wait_while_hanging(&self) -> Result<(), Errno> {
        while self.hang.exists() {
            std::thread::sleep(POLL_AGAIN);
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
                let bytes = &copy::to_vec(&memory)[..];
                let record = JournalRecord::Write {
                    offset_bytes,
                    bytes,
                };
                state.journal.append(visible, &record)?
            }
            _ => {
                let record = JournalRecord::Zero {
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
                let record = JournalRecord::Flush { before, but };
                state.journal.append(visible, &record)?;
            }
            return Ok(());
        }
        let range = (op.offset_bytes, op.len_bytes);
        let mut ended = state.in_flight.iter();
        if let Some(index) = ended.position(|(_, offset, len)| (*offset, *len) == range) {
            let (at, ..) = state.in_flight.remove(index);
            if op.dsync {
                state
                    .journal
                    .append(visible, &JournalRecord::Durable { at })?;
            }
        }
        Ok(())
    }

    fn hangs(&self) -> bool {
        let hang = self.hang.clone();
        self.gate.shut_while(move || hang.exists())
    }

    /// Excludes other processes and threads, and makes the visible file show the whole journal.
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

struct Locked<'a>(MutexGuard<'a, CacheState>);

impl std::ops::Deref for Locked<'_> {
    type Target = CacheState;
    fn deref(&self) -> &CacheState {
        &self.0
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut CacheState {
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

pub(crate) fn zero(fd: impl AsFd, offset_bytes: u64, len_bytes: u64) -> Result<(), Errno> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, mode, offset_bytes, len_bytes)
}
