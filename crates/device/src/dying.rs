//! Recognises a killed process that can't end, and the devices on which it may still write.
//!
//! Such a process waits in the kernel for a hanging device and keeps its files and locks, which
//! `fdinfo` shows. A process is being killed when a thread has `SIGKILL` pending; its threads then
//! at most end their system calls. A thread inside a request has the device's name ([`Inside`]), so
//! the remaining threads' names tell the devices: the daemon does no other I/O. A process that
//! can't be inspected counts as alive, an unnamed thread as inside. Engines have their own fence
//! ([`crate::fence`]).

use std::ffi::{CStr, CString};
use std::fs;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

const SIGKILL_BIT: u64 = 1 << 8;

/// While this lives, the thread is inside a request to a device.
pub(crate) struct Inside(CString);

impl Inside {
    pub(crate) fn of(name: &CStr) -> std::io::Result<Self> {
        let before = rustix::thread::name()?;
        rustix::thread::set_name(name)?;
        Ok(Self(before))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = rustix::thread::set_name(&self.0);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// Alive, or unknown.
    Lives,
    /// Being killed, outside requests to the device.
    Dying,
    /// Being killed, inside a request to the device.
    Inside,
}

/// The holder of the lock on byte `at` of `fd`'s file. `name` is that of threads inside requests to
/// it.
pub(crate) fn keeper(fd: BorrowedFd<'_>, at: u64, name: Option<&CStr>) -> Keeper {
    let Some(has_lock) = has_lock(fd, at) else {
        return Keeper::Lives;
    };
    for process in numbered(Path::new("/proc")) {
        let threads = numbered(&process.join("task"));
        let mut dying = threads.iter().filter(|thread| is_being_killed(thread));
        if dying.any(|thread| has_lock(thread)) {
            let is_inside = name.is_some_and(|name| is_inside(&process, name));
            return if is_inside {
                Keeper::Inside
            } else {
                Keeper::Dying
            };
        }
    }
    Keeper::Lives
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HoldingProcess {
    pub(crate) pid: u32,
    pub(crate) name: String,
    pub(crate) is_being_killed: bool,
}

/// The process that locks byte `at` of `fd`'s file; `None` if no readable process does.
pub(crate) fn holding_process(fd: BorrowedFd<'_>, at: u64) -> Option<HoldingProcess> {
    let has_lock = has_lock(fd, at)?;
    numbered(Path::new("/proc"))
        .into_iter()
        .find_map(|process| {
            // A thread that has ended shows no files.
            let threads = numbered(&process.join("task"));
            let shows_files = |thread: &&PathBuf| !numbered(&thread.join("fdinfo")).is_empty();
            let thread = threads.iter().find(shows_files)?;
            if !has_lock(thread) {
                return None;
            }
            let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
            Some(HoldingProcess {
                pid: process.file_name()?.to_str()?.parse().ok()?,
                name: name.trim_end().to_owned(),
                is_being_killed: threads.iter().any(|thread| is_being_killed(thread)),
            })
        })
}

/// Tests whether a thread has a file open with a lock on byte `at` of `fd`'s file.
fn has_lock(fd: BorrowedFd<'_>, at: u64) -> Option<impl Fn(&Path) -> bool> {
    let file = rustix::fs::fstat(fd).ok()?;
    let (major, minor) = (
        rustix::fs::major(file.st_dev),
        rustix::fs::minor(file.st_dev),
    );
    let device_and_inode = format!("{major:02x}:{minor:02x}:{}", file.st_ino);
    Some(move |thread: &Path| {
        numbered(&thread.join("fdinfo")).iter().any(|file| {
            let text = fs::read_to_string(file).unwrap_or_default();
            names_lock(&text, &device_and_inode, at)
        })
    })
}

/// Whether a thread of the process has this name.
pub(crate) fn is_inside(process: &Path, name: &CStr) -> bool {
    let is_called = |thread: PathBuf| match fs::read(thread.join("comm")) {
        Ok(called) => called.trim_ascii_end() == name.to_bytes(),
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => error.raw_os_error() != Some(rustix::io::Errno::SRCH.raw_os_error()),
    };
    numbered(&process.join("task")).into_iter().any(is_called)
}

fn numbered(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_number = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.parse::<u32>().is_ok())
    };
    entries
        .map(|entry| entry.path())
        .filter(is_number)
        .collect()
}

fn is_being_killed(thread: &Path) -> bool {
    let status = fs::read_to_string(thread.join("status")).unwrap_or_default();
    let pending = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .unwrap_or(0)
    };
    (pending("SigPnd:") | pending("ShdPnd:")) & SIGKILL_BIT != 0
}

/// `lock: 1: OFDLCK ADVISORY  WRITE -1 00:2a:17 4611686018427387903 4611686018427387903`
fn names_lock(fdinfo: &str, device_and_inode: &str, at: u64) -> bool {
    fdinfo
        .lines()
        .filter_map(|line| line.strip_prefix("lock:"))
        .any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [.., on, first, _] = words.as_slice() else {
                return false;
            };
            words.contains(&"OFDLCK") && *on == device_and_inode && first.parse() == Ok(at)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_known_by_its_file_and_its_byte() {
        let text = "pos:\t0\nflags:\t02\nlock:\t1: OFDLCK ADVISORY  WRITE -1 00:2a:17 99 99\n";
        assert!(names_lock(text, "00:2a:17", 99));
        assert!(!names_lock(text, "00:2a:18", 99));
        assert!(!names_lock(text, "00:2a:17", 100));
        assert!(!names_lock(
            "lock:\t1: POSIX  ADVISORY  WRITE 7 00:2a:17 99 99",
            "00:2a:17",
            99
        ));
        assert!(!names_lock("lock:\t99", "00:2a:17", 99));
    }

    #[test]
    fn a_running_process_is_not_being_killed() {
        assert!(!is_being_killed(Path::new("/proc/thread-self")));
        assert!(!is_being_killed(Path::new("/proc/nobody")));
    }

    #[test]
    fn a_thread_is_called_after_the_device_while_it_is_inside() {
        let name = c"dev-0123456789a";
        let own = Path::new("/proc/self");
        assert!(!is_inside(own, name));
        let before = rustix::thread::name().expect("a name");
        let inside = Inside::of(name).expect("a name");
        assert!(is_inside(own, name), "all 15 bytes are kept");
        drop(inside);
        assert!(!is_inside(own, name));
        assert_eq!(rustix::thread::name().expect("a name"), before);
        assert!(!is_inside(Path::new("/proc/nobody"), name));
    }
}
