//! A reactor's epoll set: sockets and mailbox. **Not here:** the owners of keys
//! ([`crate::frontend::Frontend::sockets_ready`]).

use super::WAKE_KEY;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

const EVENTS: usize = 256;

pub(crate) struct Sockets {
    epoll: Arc<OwnedFd>,
    events: Vec<epoll::Event>,
    keys: Vec<u64>,
}

impl Sockets {
    /// A set with the mailbox's bell.
    ///
    /// # Errors
    /// Those of the system.
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

    pub(crate) fn epoll(&self) -> &Arc<OwnedFd> {
        &self.epoll
    }

    /// The keys of ready sockets, without the mailbox's.
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
