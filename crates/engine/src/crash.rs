//! What a crash leaves in the state region.
//!
//! **Purpose.** The daemon is to know that an engine crashed by itself, and which reactor did, so that it
//! can blame what that reactor was working on.
//!
//! **Design.** A handler for the signals of a crash (a panic aborts, which is one of them) stores one
//! word in the region's header; then the signal has its usual effect. It runs on the alternate stack
//! that the standard library gives to each thread, and does nothing but loads and stores.
//!
//! **What it does not do.** It prints nothing: the panic's message is in the log already.

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

/// The header's word; null: nowhere.
static CRASH: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());

thread_local! {
    /// Number + 1; 0 for other threads.
    static REACTOR: Cell<u64> = const { Cell::new(0) };
}

/// This thread is a reactor.
pub(crate) fn this_is_reactor(number: usize) {
    REACTOR.set(number as u64 + 1);
}

/// Has crashes of this process recorded in this region, which stays mapped from now on.
///
/// # Errors
/// The system's.
pub(crate) fn record_in(region: &Arc<Region>) -> io::Result<()> {
    let region: &'static Arc<Region> = Box::leak(Box::new(region.clone()));
    CRASH.store((&raw const region.header().crash).cast_mut(), Release);
    for signal in SIGNALS {
        // SAFETY: all zeros is a valid sigaction (no flags, an empty mask); the handler that goes into
        // it has the type that is called without SA_SIGINFO, and does only what a handler may.
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
        // The first one counts: what comes after it may be its consequence.
        let _ = crash.compare_exchange(0, word, Release, Relaxed);
    }
    // Its usual effect, when this returns: the handler is reset and the signal blocked until then.
    // SAFETY: raise is one of the functions that a handler may call.
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
