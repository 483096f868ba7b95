//! Whether whoever has a device's daemon byte is a process that is being killed.
//!
//! **Purpose.** A daemon that is killed while one of its threads waits in the kernel for a device that hangs keeps its
//! claim until that ends. The next daemon must tell it from one that lives.
//!
//! **Design.** The kernel names no process for such a lock, but shows each open file's locks in `fdinfo`. Only threads
//! that can't run any more are looked at: those with a `SIGKILL` pending, which nothing but their request's end
//! delays. What can't be read (another user's process) is taken for alive.
//!
//! **What it does not do.** It doesn't look for engines' locks: these have a fence of their own ([`crate::fence`]).

use std::fs;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// `SIGKILL` in a mask of signals.
const SIGKILL_BIT: u64 = 1 << 8;

/// Whether a thread that is being killed has a lock on the byte `at` of the file that `fd` is open on.
pub(crate) fn has_lock(fd: BorrowedFd<'_>, at: u64) -> bool {
    let Ok(file) = rustix::fs::fstat(fd) else {
        return false;
    };
    let (major, minor) = (
        rustix::fs::major(file.st_dev),
        rustix::fs::minor(file.st_dev),
    );
    let device_and_inode = format!("{major:02x}:{minor:02x}:{}", file.st_ino);
    let numbered = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.parse::<u32>().is_ok())
        })
    };
    let threads = numbered(Path::new("/proc")).flat_map(|process| {
        let threads: Vec<PathBuf> = numbered(&process.join("task")).collect();
        threads
    });
    threads
        .filter(|thread| is_being_killed(thread))
        .any(|thread| {
            let files: Vec<PathBuf> = numbered(&thread.join("fdinfo")).collect();
            let text = |file: &PathBuf| fs::read_to_string(file).unwrap_or_default();
            files
                .iter()
                .any(|file| names_lock(&text(file), &device_and_inode, at))
        })
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
    fn who_runs_is_not_being_killed() {
        assert!(!is_being_killed(Path::new("/proc/thread-self")));
        assert!(!is_being_killed(Path::new("/proc/nobody")));
    }
}
