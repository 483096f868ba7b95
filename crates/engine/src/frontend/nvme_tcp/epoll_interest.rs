//! The epoll events per socket, so that a sleeping reactor wakes only for work.
//!
//! Data that would not be taken now (the stream waits for memory, or the lane is throttled) would
//! wake the reactor again and again. So before a sleep such a socket is watched only for its end.
//! It stays in the active list, and the reactor wakes at the window's end or to retry. Once it may
//! be read again, it is watched for data before the next sleep. **Not here:** when a reactor sleeps
//! ([`crate::reactor`]).

use super::NvmeTcp;
use super::conn::Conn;
use crate::core::Core;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Only the end of the stream; epoll always reports a hang-up.
const END: EventFlags = EventFlags::RDHUP;

/// TCP keep-alive: the first probe, the interval, and the number of probes.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 6;
/// How long a peer may leave data or a probe unacknowledged.
const VANISHED_MS: u32 = 60_000;

/// Has the kernel end a connection whose host vanished, even without a Keep Alive Timeout, but not
/// before that timeout.
pub(crate) fn lose_the_vanished(socket: &OwnedFd, kato_ms: u32) -> Result<(), Errno> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(socket, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(socket, PROBES)?;
    // The kernel takes a signed number.
    let timeout_ms = VANISHED_MS.max(kato_ms.saturating_add(VANISHED_MS / 2));
    sockopt::set_tcp_user_timeout(socket, timeout_ms.min(i32::MAX as u32))
}

impl NvmeTcp {
    pub(super) fn set_patience(&self, controller: u32) {
        let Some(attached) = self.controllers.get(controller) else {
            return;
        };
        for index in &attached.conns {
            let conn = self.conns.get(*index as usize).and_then(Option::as_ref);
            if let Some(fd) = conn.and_then(|conn| conn.socket.fd.as_ref()) {
                // Fails if the socket has ended meanwhile.
                let _ = lose_the_vanished(fd, attached.controller.kato_ms());
            }
        }
    }
}

impl Conn {
    /// Whether its lane has enough throttled commands: then most turns skip the receive.
    #[inline]
    pub(super) fn is_held_back(&self, core: &Core) -> bool {
        self.qid != 0 && self.lane.is_some_and(|lane| core.qos.is_held_back(lane))
    }
}

pub(super) struct Socket {
    /// The control thread shares it until it hears of the end.
    pub fd: Option<Arc<OwnedFd>>,
    pub number: u64,
    pub key: u64,
    watched: EventFlags,
    /// Since when it takes nothing; 0: it does.
    pub blocked_since_ns: u64,
    /// The end was seen while nothing was received.
    pub hung_up: bool,
}

impl Socket {
    pub(super) fn new(fd: Arc<OwnedFd>, number: u64, key: u64) -> Self {
        Self {
            fd: Some(fd),
            number,
            key,
            watched: EventFlags::IN,
            blocked_since_ns: 0,
            hung_up: false,
        }
    }

    pub(super) fn begin_watch(&self, epoll: &OwnedFd) -> Result<(), Errno> {
        let key = epoll::EventData::new_u64(self.key);
        match &self.fd {
            Some(fd) => epoll::add(epoll, fd, key, self.watched),
            None => Ok(()),
        }
    }

    pub(super) fn watch(&mut self, epoll: &OwnedFd, blocked: bool) -> Result<(), Errno> {
        match (blocked, self.watched == EventFlags::OUT) {
            // A host that doesn't take its answers gets no further commands.
            (true, _) => self.watch_for(epoll, EventFlags::OUT),
            (false, true) => self.watch_for(epoll, EventFlags::IN),
            (false, false) => Ok(()),
        }
    }

    /// Watches for data or, if not `listens`, only for the end. A socket without room is watched
    /// for room.
    pub(super) fn listen(
        &mut self,
        epoll: &OwnedFd,
        blocked: bool,
        listens: bool,
    ) -> Result<(), Errno> {
        match (blocked, listens) {
            (true, _) => Ok(()),
            (false, true) => self.watch_for(epoll, EventFlags::IN),
            (false, false) => self.watch_for(epoll, END),
        }
    }

    /// Watched only for its end: then any event is that.
    pub(super) fn is_watched_for_its_end(&self) -> bool {
        self.watched == END
    }

    fn watch_for(&mut self, epoll: &OwnedFd, wanted: EventFlags) -> Result<(), Errno> {
        if wanted != self.watched
            && let Some(fd) = &self.fd
        {
            let key = epoll::EventData::new_u64(self.key);
            epoll::modify(epoll, fd, key, wanted)?;
            self.watched = wanted;
        }
        Ok(())
    }
}
