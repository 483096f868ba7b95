//! Resets inherited signal settings, so that the parent does not decide which signals end Forebay.
//!
//! **Design.** None is blocked. SIGTERM, SIGINT and signals about crashes or children keep their
//! usual effect; others are ignored, so a write beyond the file size limit is an error of the call.

#![allow(unsafe_code)]

use std::io;
use std::ptr::null_mut;

/// Those of [`crate::crash`] are left: the standard library handles some.
const USUAL: [libc::c_int; 5] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGCHLD,
    libc::SIGCONT,
    libc::SIGURG,
];

const IGNORED: [libc::c_int; 16] = [
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGSTKFLT,
    libc::SIGXFSZ,
    libc::SIGXCPU,
    // These would stop all I/O.
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// Resets inherited signals. Call it before any thread starts, because each has its own mask.
///
/// # Errors
/// Those of the system.
pub fn reset() -> io::Result<()> {
    let usual = USUAL.map(|signal| (signal, libc::SIG_DFL));
    let ignored = IGNORED.map(|signal| (signal, libc::SIG_IGN));
    let real_time = (libc::SIGRTMIN()..=libc::SIGRTMAX()).map(|signal| (signal, libc::SIG_IGN));
    for (signal, effect) in usual.into_iter().chain(ignored).chain(real_time) {
        // SAFETY: neither effect is a handler, so no code runs in a signal.
        if unsafe { libc::signal(signal, effect) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: the set lives on this stack, and is made empty before it is read.
    let unblocked = unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, null_mut())
    };
    if unblocked != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
