//! What a reactor watches: its frontends' sockets and its mailbox.
//!
//! **Purpose.** One epoll set tells of all of them, and the ring polls that set while the reactor sleeps.
//! **Design.** A look takes as many events as there is room for, without allocating.
//! **Not here:** whose a key is ([`crate::frontend::Frontend::sockets_ready`]).

use super::WAKE_KEY;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Events that are taken at once.
const EVENTS: usize = 256;

/// See the module's text.
pub(crate) struct Sockets {
    epoll: Arc<OwnedFd>,
    events: Vec<epoll::Event>,
    keys: Vec<u64>,
}

impl Sockets {
    /// A set in which the mailbox's bell is.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new(wake: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(WAKE_KEY);
        epoll::add(&epoll, wake, data, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll: Arc::new(epoll),
            events: Vec::with_capacity(EVENTS),
            keys: Vec::with_capacity(EVENTS),
        })
    }

    /// The set, for who watches something in it.
    pub(crate) fn epoll(&self) -> &Arc<OwnedFd> {
        &self.epoll
    }

    /// The keys of what is ready, but for the mailbox's.
    pub(super) fn poll(&mut self) -> &[u64] {
        self.events.clear();
        self.keys.clear();
        let none = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let _ = epoll::wait(&*self.epoll, spare_capacity(&mut self.events), Some(&none));
        let keys = self.events.iter().map(|event| event.data.u64());
        self.keys.extend(keys.filter(|key| *key != WAKE_KEY));
        &self.keys
    }
}
