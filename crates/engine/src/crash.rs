//! Records a crash in the state region, so that the daemon can blame the reactor's command.
//!
//! **Design.** A handler for crash signals (a panic aborts) stores one word, with loads and stores
//! only, on the standard library's alternate stack; then the signal takes its usual effect. The
//! panic's message is already in the log.

#![allow(unsafe_code)]

use forebay_xlate::boundary::region::Region;
use std::cell::Cell;
use std::io;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::*};

const SIGNALS: [libc::c_int; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
];

/// The header's word, or null.
static CRASH: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());

thread_local! {
    /// Number + 1; 0 for other threads.
    static REACTOR: Cell<u64> = const { Cell::new(0) };
}

pub(crate) fn this_is_reactor(number: usize) {
    REACTOR.set(number as u64 + 1);
}

/// Records this process's crashes in the region, which stays mapped from now on.
///
/// # Errors
/// Those of the system.
pub(crate) fn record_in(region: &Arc<Region>) -> io::Result<()> {
    let region: &'static Arc<Region> = Box::leak(Box::new(region.clone()));
    CRASH.store((&raw const region.header().crash).cast_mut(), Release);
    for signal in SIGNALS {
        // SAFETY: all zeros is a valid sigaction (no flags, empty mask). The handler has the type
        // for a call without SA_SIGINFO, and is async-signal-safe.
        let done = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_crash as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_ONSTACK | libc::SA_RESETHAND;
            libc::sigaction(signal, &action, null_mut())
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

extern "C" fn on_crash(signal: libc::c_int) {
    // SAFETY: null, or a word of a mapping that is never unmapped (see `record_in`).
    if let Some(crash) = unsafe { CRASH.load(Acquire).as_ref() } {
        let word = u64::from(signal.unsigned_abs()) << 32 | REACTOR.get();
        // Later crashes may be a consequence.
        let _ = crash.compare_exchange(0, word, Release, Relaxed);
    }
    // SAFETY: raise is async-signal-safe. The usual effect follows when this returns: the handler
    // is reset, and the signal is blocked until then.
    unsafe { libc::raise(signal) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_xlate::shm::SharedMemory;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const REGION_VARIABLE: &str = "FOREBAY_TEST_CRASH_REGION";

    #[test]
    fn a_crash_says_which_reactor_it_was() {
        if let Some(path) = std::env::var_os(REGION_VARIABLE) {
            let region = Arc::new(Region::create(path.as_ref(), 1).unwrap());
            record_in(&region).unwrap();
            let crash = std::thread::spawn(|| {
                this_is_reactor(3);
                std::process::abort();
            });
            let _ = crash.join();
            unreachable!("it aborts");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("region");
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::tests::a_crash_says_which_reactor_it_was"])
            .env(REGION_VARIABLE, &path)
            .output()
            .unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{ended:?}");
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let region = Region::adopt(SharedMemory::from_fd(file.into()).unwrap()).unwrap();
        let word = region.header().crash.load(Relaxed);
        assert_eq!((word >> 32, word as u32), (libc::SIGABRT as u64, 4));
    }
}
