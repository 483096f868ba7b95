//! What a process inherits of signals.
//!
//! **Purpose.** Whoever starts Forebay (a terminal, nohup, a service manager) decides neither which signals end it nor which
//! it never gets.
//!
//! **Design.** Nothing is blocked. SIGTERM, SIGINT and what tells of a crash or of children have their usual effect.
//! Everything else would end or stop the process and is ignored, so what exceeds a limit of file sizes is an error of the
//! call.
//!
//! **Not here:** what the daemon does when it is told to end or to read its configuration again.

#![allow(unsafe_code)]

use std::io;
use std::ptr::null_mut;

/// Their usual effect is wanted. Not those of [`crate::crash`]: the standard library has handlers for some.
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
    // These would stop the process, and with it all I/O.
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// Resets inherited signals. Call it before any thread is started, because each thread has its own mask.
///
/// # Errors
/// The system's.
pub fn reset() -> io::Result<()> {
    let usual = USUAL.map(|signal| (signal, libc::SIG_DFL));
    let ignored = IGNORED.map(|signal| (signal, libc::SIG_IGN));
    let real_time = (libc::SIGRTMIN()..=libc::SIGRTMAX()).map(|signal| (signal, libc::SIG_IGN));
    for (signal, effect) in usual.into_iter().chain(ignored).chain(real_time) {
        // SAFETY: neither of both effects is a handler: no code of ours runs in a signal.
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
