//! How threads of the engine wake one another.
//!
//! **Purpose.** A message costs its sender a system call only when the receiver sleeps.
//! **Design.** The sleeper says that it sleeps and looks once more afterwards, with a full fence on both sides
//! ([`Sleeper`]), so no message is slept through. Each thread has an eventfd to be woken by.
//! **Not here:** the messages ([`crate::reactor::mailbox`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*, fence};

/// Whether a thread sleeps until its eventfd is rung.
#[derive(Debug, Default)]
pub struct Sleeper(AtomicBool);

impl Sleeper {
    /// The thread is about to sleep; false when there is something for it, so that it must not.
    pub fn fall_asleep(&self, nothing: impl FnOnce() -> bool) -> bool {
        self.0.store(true, SeqCst);
        fence(SeqCst);
        if nothing() {
            return true;
        }
        self.0.store(false, SeqCst);
        false
    }

    /// The thread is awake.
    pub fn awake(&self) {
        self.0.store(false, SeqCst);
    }

    /// Whether it must be woken to see what was just put there for it.
    #[inline]
    pub(crate) fn must_be_woken(&self) -> bool {
        fence(SeqCst);
        self.0.load(SeqCst)
    }
}

/// What wakes a reactor, for other reactors.
#[derive(Clone, Debug)]
pub struct ReactorBell {
    /// Whether it sleeps.
    pub asleep: Arc<Sleeper>,
    /// Its eventfd.
    pub wake: Arc<OwnedFd>,
}

impl ReactorBell {
    /// A bell for a reactor that is awake.
    ///
    /// # Errors
    /// The system's.
    #[cfg(test)]
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            asleep: Arc::default(),
            wake: Arc::new(eventfd()?),
        })
    }

    /// Sees to it that the reactor looks at what was put there for it.
    #[inline]
    pub fn ring(&self) {
        if self.asleep.must_be_woken() {
            ring_bell(&*self.wake);
        }
    }

    /// Whether it sleeps, as far as that can be seen.
    #[inline]
    pub fn sleeps(&self) -> bool {
        self.asleep.0.load(Relaxed)
    }
}

/// A non-blocking eventfd.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    use rustix::event::EventfdFlags;
    Ok(rustix::event::eventfd(
        0,
        EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
    )?)
}

/// Makes an eventfd readable.
pub(crate) fn ring_bell(fd: impl AsFd) {
    // A full counter is readable already.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Makes an eventfd unreadable until it is rung again.
pub(crate) fn quiet_bell(fd: impl AsFd) {
    let _ = rustix::io::read(fd, &mut [0u8; 8]);
}

/// What wakes the control thread.
#[derive(Clone, Debug)]
pub(crate) struct ControlBell {
    /// Its eventfd.
    pub wake: Arc<OwnedFd>,
    /// Whether it sleeps.
    pub asleep: Arc<Sleeper>,
}

impl ControlBell {
    /// A bell for a thread that is awake.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            wake: Arc::new(eventfd()?),
            asleep: Arc::default(),
        })
    }
}
