//! The fence of files and block devices: locks on the open file to which requests refer.
//!
//! An open-file-description lock falls with the last reference to the open file, and each request
//! in flight holds one. So it outlives the process and the last request. Engine generation *g*
//! locks byte 2^62 + g through the descriptor of its requests, which stays inside [`crate::Device`]
//! and is close-on-exec. A successor waits until all bytes below its own are free. A locked byte
//! *above* its own means that it must not start.
//!
//! A daemon claims byte 2^62 - 1 or one of the 63 before it. A daemon that is killed while a device
//! hangs keeps its claims on all devices; its successor passes over those where it has nothing in
//! flight (`dying`). Locks are on the path's inode: they don't fence two nodes of one block device,
//! or two machines.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{FenceError, Holder, MAX_GENERATION, Predecessor};
use crate::dying::{self, Keeper};

/// Byte 2^62 + g is generation g's.
const GENERATIONS_AT: u64 = 1 << 62;
/// Taken from the last byte down: a daemon that passes over a dying one takes the next.
const DAEMONS: u64 = 64;
const DAEMONS_AT: u64 = GENERATIONS_AT - DAEMONS;

/// Time between two checks of a predecessor's lock, which falls 10 to 50 ms after the last request.
const POLL_AGAIN: Duration = Duration::from_millis(2);

/// The holders of locks on a file or block device; takes no lock and doesn't wait.
pub fn lock_holders(path: &Path) -> Result<Vec<Holder>, FenceError> {
    use rustix::fs::{Mode, OFlags};
    let fd = rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .map_err(|errno| io_error(path, "opening it", errno))?;
    holders(fd.as_fd(), path)
}

pub(crate) fn holders(fd: BorrowedFd<'_>, path: &Path) -> Result<Vec<Holder>, FenceError> {
    let mut found = Vec::new();
    if first_lock(fd, path, DAEMONS_AT, DAEMONS)?.is_some() {
        found.push(Holder::Daemon);
    }
    let mut from = GENERATIONS_AT;
    let end = GENERATIONS_AT + MAX_GENERATION;
    while from < end
        && let Some((start, len)) = first_lock(fd, path, from, end - from)?
    {
        // Neighbouring bytes of one descriptor appear as one lock, if another program takes them.
        let start = start.max(from);
        let len = len.clamp(1, 1024);
        found.extend((start..start.saturating_add(len)).map(|at| Holder::Engine {
            generation: at - GENERATIONS_AT,
        }));
        from = start.saturating_add(len);
    }
    Ok(found)
}

/// Claims a file while it is open; returns whether a dying daemon was passed over. `name`: see
/// [`dying::keeper`].
pub(crate) fn claim_for_daemon(
    fd: BorrowedFd<'_>,
    path: &Path,
    name: Option<&CStr>,
) -> Result<bool, FenceError> {
    let passed = passable(fd, path, name)?;
    let free = (DAEMONS_AT..GENERATIONS_AT)
        .rev()
        .find(|at| !passed.contains(at));
    let held = || FenceError::Held {
        device: path.display().to_string(),
        holder: Holder::Daemon,
    };
    let own = free.ok_or_else(held)?;
    lock(fd, path, own, Holder::Daemon)?;
    // Checked after locking: of two daemons that lock different bytes at once, at least one sees
    // the other.
    let now = passable(fd, path, name);
    let is_alone = |now: &Vec<u64>| now.iter().all(|at| passed.contains(at));
    match now {
        Ok(now) if is_alone(&now) => Ok(!passed.is_empty()),
        other => {
            let mut request = write_lock(own, 1);
            request.l_type = libc::F_UNLCK as libc::c_short;
            fcntl(fd, libc::F_OFD_SETLK, &mut request)
                .map_err(|errno| io_error(path, "unlocking it", errno))?;
            Err(other.err().unwrap_or_else(held))
        }
    }
}

/// Claims a file that is no device, like [`crate::sync_io::SyncDevice::claim_for_daemon`]. Returns
/// whether it passed over a dying process.
pub fn claim_file(file: &std::fs::File, path: &Path) -> Result<bool, FenceError> {
    claim_for_daemon(file.as_fd(), path, None)
}

/// Daemon bytes of dying processes with nothing in flight here; an error if another daemon has one.
pub(crate) fn passable(
    fd: BorrowedFd<'_>,
    path: &Path,
    name: Option<&CStr>,
) -> Result<Vec<u64>, FenceError> {
    let mut passed = Vec::new();
    if first_lock(fd, path, DAEMONS_AT, DAEMONS)?.is_none() {
        return Ok(passed);
    }
    // Byte by byte: for a range, the kernel names an arbitrary one of several locks.
    for at in DAEMONS_AT..GENERATIONS_AT {
        if first_lock(fd, path, at, 1)?.is_none() {
            continue;
        }
        let device = path.display().to_string();
        match dying::keeper(fd, at, name) {
            Keeper::Dying => passed.push(at),
            Keeper::Inside => return Err(FenceError::Hangs { device }),
            Keeper::Lives => {
                let holder = Holder::Daemon;
                return Err(FenceError::Held { device, holder });
            }
        }
    }
    Ok(passed)
}

pub(crate) fn take(fd: BorrowedFd<'_>, path: &Path, generation: u64) -> Result<(), FenceError> {
    check(generation)?;
    let at = GENERATIONS_AT + generation;
    lock(fd, path, at, Holder::Engine { generation })?;
    // Checked after locking: of two that start at once, at least the older one sees the newer.
    refuse_newer(fd, path, generation)
}

pub(crate) fn predecessors_gone(
    fd: BorrowedFd<'_>,
    path: &Path,
    generation: u64,
) -> Result<bool, FenceError> {
    Ok(first_predecessor(fd, path, generation)?.is_none())
}

pub(crate) fn wait_for_predecessors(
    fd: BorrowedFd<'_>,
    path: &Path,
    generation: u64,
    limit: Duration,
) -> Result<Duration, FenceError> {
    let begin = Instant::now();
    loop {
        refuse_newer(fd, path, generation)?;
        let predecessor = first_predecessor(fd, path, generation)?;
        let waited = begin.elapsed();
        match predecessor {
            None => return Ok(waited),
            Some(predecessor) if waited >= limit => {
                return Err(FenceError::TimedOut {
                    device: path.display().to_string(),
                    predecessor,
                    process: known(fd, predecessor),
                    waited,
                });
            }
            Some(_) => std::thread::sleep(POLL_AGAIN.min(limit - waited)),
        }
    }
}

/// Reads much of `/proc`.
pub(crate) fn predecessor(
    fd: BorrowedFd<'_>,
    path: &Path,
    generation: u64,
) -> Result<Option<Predecessor>, FenceError> {
    let found = first_predecessor(fd, path, generation)?;
    Ok(found.map(|generation| known(fd, generation)))
}

fn known(fd: BorrowedFd<'_>, generation: u64) -> Predecessor {
    Predecessor {
        generation,
        process: dying::holding_process(fd, GENERATIONS_AT + generation),
    }
}

fn check(generation: u64) -> Result<(), FenceError> {
    if generation < MAX_GENERATION {
        Ok(())
    } else {
        Err(FenceError::BadGeneration(generation))
    }
}

fn first_predecessor(
    fd: BorrowedFd<'_>,
    path: &Path,
    generation: u64,
) -> Result<Option<u64>, FenceError> {
    check(generation)?;
    if generation == 0 {
        return Ok(None);
    }
    let found = first_lock(fd, path, GENERATIONS_AT, generation)?;
    Ok(found.map(|(start, _)| start.saturating_sub(GENERATIONS_AT)))
}

fn refuse_newer(fd: BorrowedFd<'_>, path: &Path, generation: u64) -> Result<(), FenceError> {
    check(generation)?;
    let above = GENERATIONS_AT + generation + 1;
    let end = GENERATIONS_AT + MAX_GENERATION;
    if above >= end {
        return Ok(());
    }
    match first_lock(fd, path, above, end - above)? {
        None => Ok(()),
        Some((start, _)) => Err(FenceError::NewerEngine {
            device: path.display().to_string(),
            own: generation,
            newer: start.max(above) - GENERATIONS_AT,
        }),
    }
}

fn lock(fd: BorrowedFd<'_>, path: &Path, at: u64, holder: Holder) -> Result<(), FenceError> {
    let mut request = write_lock(at, 1);
    match fcntl(fd, libc::F_OFD_SETLK, &mut request) {
        Ok(()) => Ok(()),
        Err(Errno::AGAIN | Errno::ACCESS) => Err(FenceError::Held {
            device: path.display().to_string(),
            holder,
        }),
        Err(errno) => Err(io_error(path, "locking it", errno)),
    }
}

/// Start and length of another holder's lock in a range.
fn first_lock(
    fd: BorrowedFd<'_>,
    path: &Path,
    at: u64,
    len: u64,
) -> Result<Option<(u64, u64)>, FenceError> {
    let mut request = write_lock(at, len);
    fcntl(fd, libc::F_OFD_GETLK, &mut request)
        .map_err(|errno| io_error(path, "querying its locks", errno))?;
    if i32::from(request.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    let start = u64::try_from(request.l_start).unwrap_or(0);
    let len = match u64::try_from(request.l_len) {
        // Length zero: to the end of the file.
        Ok(0) | Err(_) => u64::MAX,
        Ok(len) => len,
    };
    Ok(Some((start, len)))
}

fn write_lock(at: u64, len: u64) -> libc::flock {
    // SAFETY: flock is a C structure of integers, for which all zeros is a value (and l_pid must be
    // zero).
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = libc::F_WRLCK as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    // Both are below 2^63: GENERATIONS_AT + MAX_GENERATION < 2^63.
    request.l_start = at as libc::off_t;
    request.l_len = len as libc::off_t;
    request
}

fn fcntl(fd: BorrowedFd<'_>, command: i32, request: &mut libc::flock) -> Result<(), Errno> {
    loop {
        // SAFETY: the descriptor is borrowed, so open; F_OFD_SETLK and F_OFD_GETLK take a pointer
        // to a flock, which `request` is. Wrong for other commands.
        let result = unsafe { libc::fcntl(fd.as_raw_fd(), command, request as *mut libc::flock) };
        if result != -1 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        match Errno::from_io_error(&error) {
            Some(Errno::INTR) => {}
            Some(errno) => return Err(errno),
            None => return Err(Errno::IO),
        }
    }
}

fn io_error(path: &Path, doing: &'static str, errno: Errno) -> FenceError {
    FenceError::Io {
        device: path.display().to_string(),
        doing,
        source: errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};

    struct Scratch {
        file: tempfile::NamedTempFile,
    }

    impl Scratch {
        fn new() -> Self {
            Self {
                file: tempfile::NamedTempFile::new().expect("temporary file"),
            }
        }
        fn open(&self) -> File {
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(self.file.path())
                .expect("open")
        }
        fn path(&self) -> &Path {
            self.file.path()
        }
    }

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn a_generation_is_held_once() {
        let scratch = Scratch::new();
        let (first, second) = (scratch.open(), scratch.open());
        take(first.as_fd(), scratch.path(), 3).expect("free");
        let error = take(second.as_fd(), scratch.path(), 3).expect_err("held");
        assert!(error.to_string().contains("generation 3"), "{error}");
        // Closing another descriptor doesn't drop the lock, unlike a POSIX lock.
        drop(second);
        let third = scratch.open();
        assert!(take(third.as_fd(), scratch.path(), 3).is_err());
        drop(first);
        take(third.as_fd(), scratch.path(), 3).expect("free again");
    }

    #[test]
    fn generations_coexist_and_the_younger_waits() {
        let scratch = Scratch::new();
        let (old, older, new) = (scratch.open(), scratch.open(), scratch.open());
        let path = scratch.path();
        take(older.as_fd(), path, 0).expect("free");
        take(old.as_fd(), path, 4).expect("free");
        take(new.as_fd(), path, 9).expect("its own byte is free");
        let now = |fd: &File, generation| wait_for_predecessors(fd.as_fd(), path, generation, NOW);
        assert!(!predecessors_gone(new.as_fd(), path, 9).expect("ask"));
        let error = now(&new, 9).expect_err("two are there");
        assert!(matches!(error, FenceError::TimedOut { predecessor: 0, .. }));
        drop(older);
        let error = now(&new, 9).expect_err("one is there");
        assert!(matches!(error, FenceError::TimedOut { predecessor: 4, .. }));
        let error = now(&old, 4).expect_err("it is the old one");
        assert!(matches!(error, FenceError::NewerEngine { newer: 9, .. }));
        assert_eq!(
            lock_holders(path).expect("ask"),
            [
                Holder::Engine { generation: 4 },
                Holder::Engine { generation: 9 }
            ]
        );
        drop(old);
        now(&new, 9).expect("alone");
        assert!(predecessors_gone(new.as_fd(), path, 9).expect("ask"));
    }

    #[test]
    fn an_old_generation_cannot_start_beside_a_newer_one() {
        let scratch = Scratch::new();
        let (new, old) = (scratch.open(), scratch.open());
        take(new.as_fd(), scratch.path(), 9).expect("free");
        let error = take(old.as_fd(), scratch.path(), 8).expect_err("too late");
        assert!(matches!(
            error,
            FenceError::NewerEngine {
                newer: 9,
                own: 8,
                ..
            }
        ));
    }

    #[test]
    fn waiting_ends_when_the_lock_falls() {
        let scratch = Scratch::new();
        let (old, new) = (scratch.open(), scratch.open());
        take(old.as_fd(), scratch.path(), 1).expect("free");
        take(new.as_fd(), scratch.path(), 2).expect("free");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                wait_for_predecessors(new.as_fd(), scratch.path(), 2, Duration::from_secs(20))
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiter.is_finished());
            drop(old);
            waiter.join().expect("no panic").expect("free at last");
        });
    }

    #[test]
    fn one_daemon_beside_engines() {
        let scratch = Scratch::new();
        let (daemon, second, engine) = (scratch.open(), scratch.open(), scratch.open());
        let path = scratch.path();
        claim_for_daemon(daemon.as_fd(), path, None).expect("free");
        let error = claim_for_daemon(second.as_fd(), path, None).expect_err("held");
        assert!(
            error.to_string().contains("a forebay daemon already holds"),
            "{error}"
        );
        take(engine.as_fd(), path, 0).expect("the daemon's byte is no engine's");
        wait_for_predecessors(engine.as_fd(), path, 0, NOW).expect("alone");
        assert_eq!(
            lock_holders(path).expect("ask"),
            [Holder::Daemon, Holder::Engine { generation: 0 }]
        );
    }

    #[test]
    fn generations_have_a_limit() {
        let scratch = Scratch::new();
        let file = scratch.open();
        let take = |generation| take(file.as_fd(), scratch.path(), generation);
        assert!(matches!(take(u64::MAX), Err(FenceError::BadGeneration(_))));
        assert!(matches!(
            take(MAX_GENERATION),
            Err(FenceError::BadGeneration(_))
        ));
        take(MAX_GENERATION - 1).expect("the last one");
    }
}
