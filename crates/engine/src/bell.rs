//! Wakes threads; a message costs a system call only if the receiver sleeps.
//!
//! **Design.** The sleeper sets its flag, then checks its ring again, with a full fence on both
//! sides ([`Sleeper`]), so no wakeup is lost. **Not here:** messages ([`crate::reactor::mailbox`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*, fence};

#[derive(Debug, Default)]
pub(crate) struct Sleeper(AtomicBool);

impl Sleeper {
    /// False if there is work: the thread must not sleep.
    pub(crate) fn fall_asleep(&self, nothing: impl FnOnce() -> bool) -> bool {
        self.0.store(true, SeqCst);
        fence(SeqCst);
        if nothing() {
            return true;
        }
        self.0.store(false, SeqCst);
        false
    }

    pub(crate) fn awake(&self) {
        self.0.store(false, SeqCst);
    }

    /// Whether it must be woken to see an entry just added.
    #[inline]
    pub(crate) fn must_be_woken(&self) -> bool {
        fence(SeqCst);
        self.0.load(SeqCst)
    }
}

/// Wakes a reactor, for other reactors.
#[derive(Clone, Debug)]
pub(crate) struct ReactorBell {
    pub asleep: Arc<Sleeper>,
    pub wake: Arc<OwnedFd>,
}

impl ReactorBell {
    #[cfg(test)]
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            asleep: Arc::default(),
            wake: Arc::new(eventfd()?),
        })
    }

    /// Wakes the reactor if it sleeps. Call it after an entry was added.
    #[inline]
    pub(crate) fn ring(&self) {
        if self.asleep.must_be_woken() {
            ring_bell(&*self.wake);
        }
    }

    /// An approximate answer, without a fence.
    #[inline]
    pub(crate) fn sleeps(&self) -> bool {
        self.asleep.0.load(Relaxed)
    }
}

pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    use rustix::event::EventfdFlags;
    Ok(rustix::event::eventfd(
        0,
        EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
    )?)
}

pub(crate) fn ring_bell(fd: impl AsFd) {
    // A full counter is readable already.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

pub(crate) fn quiet_bell(fd: impl AsFd) {
    let _ = rustix::io::read(fd, &mut [0u8; 8]);
}

#[derive(Clone, Debug)]
pub(crate) struct ControlBell {
    pub wake: Arc<OwnedFd>,
    pub asleep: Arc<Sleeper>,
}

impl ControlBell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            wake: Arc::new(eventfd()?),
            asleep: Arc::default(),
        })
    }
}
