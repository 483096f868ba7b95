//! What sockets are watched for, so that a reactor that sleeps is woken for what it would do, and for nothing else.
//!
//! **Design.** As a rule a socket is watched for what its host sends; for room, while it has none. What is sent to a connection
//! that would not take it (its stream waits for memory, or its lane has enough that waits for a budget) lies in the socket, and
//! would wake the reactor again and again. So before it sleeps (`NvmeTcp::arm`), such a socket is watched for its end alone.
//! It stays in the list of those that are looked at each turn, and the reactor wakes when the window ends, or to try again;
//! when it may be taken from once more, it is listened to before the next sleep.
//!
//! **Not here:** when a reactor sleeps, and until when at most ([`crate::reactor`]).

use super::NvmeTcp;
use super::conn::Conn;
use crate::core::Core;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// What a socket is watched for whose host is not listened to: a hang-up, which is always told of, and the end of its stream.
const END: EventFlags = EventFlags::RDHUP;

/// TCP keep-alive: the first probe, the next ones, and how many there are.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 6;
/// How long a peer may leave data or a probe unacknowledged.
const VANISHED_MS: u32 = 60_000;

/// Has the kernel end a connection whose host has vanished, also one without a Keep Alive Timeout; never before that
/// time-out ends.
pub(crate) fn lose_the_vanished(socket: &OwnedFd, kato_ms: u32) -> Result<(), Errno> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(socket, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(socket, PROBES)?;
    // The kernel takes it as a signed number.
    let timeout_ms = VANISHED_MS.max(kato_ms.saturating_add(VANISHED_MS / 2));
    sockopt::set_tcp_user_timeout(socket, timeout_ms.min(i32::MAX as u32))
}

impl NvmeTcp {
    /// As [`lose_the_vanished`], for all connections of a controller.
    pub(super) fn set_patience(&self, controller: u32) {
        let Some(attached) = self.controllers.get(controller) else {
            return;
        };
        for index in &attached.conns {
            let conn = self.conns.get(*index as usize).and_then(Option::as_ref);
            if let Some(fd) = conn.and_then(|conn| conn.socket.fd.as_ref()) {
                // A socket that has ended meanwhile takes nothing more.
                let _ = lose_the_vanished(fd, attached.controller.kato_ms());
            }
        }
    }
}

impl Conn {
    /// Whether its lane has enough that waits for a budget: nothing more is received then, for most turns.
    #[inline]
    pub(super) fn is_held_back(&self, core: &Core) -> bool {
        self.qid != 0 && self.lane.is_some_and(|lane| core.qos.is_held_back(lane))
    }
}

/// A connection's socket, and what it is watched for.
pub(super) struct Socket {
    /// The socket; the control thread has it too until it hears that it is gone.
    pub fd: Option<Arc<OwnedFd>>,
    /// Its number.
    pub number: u64,
    /// The key of its events.
    pub key: u64,
    watched: EventFlags,
    /// Since when it takes nothing.
    pub blocked_since_ns: u64,
    /// Its host has gone, which was seen while nothing was taken from it.
    pub hung_up: bool,
}

impl Socket {
    /// One that is not watched yet.
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

    /// Has it watched from now on.
    pub(super) fn begin_watch(&self, epoll: &OwnedFd) -> Result<(), Errno> {
        let key = epoll::EventData::new_u64(self.key);
        match &self.fd {
            Some(fd) => epoll::add(epoll, fd, key, self.watched),
            None => Ok(()),
        }
    }

    /// Has it watched for room while it has none (`blocked`).
    pub(super) fn watch(&mut self, epoll: &OwnedFd, blocked: bool) -> Result<(), Errno> {
        match (blocked, self.watched == EventFlags::OUT) {
            // While the host doesn't take what it asked for, it gets to ask for nothing more.
            (true, _) => self.watch_for(epoll, EventFlags::OUT),
            (false, true) => self.watch_for(epoll, EventFlags::IN),
            (false, false) => Ok(()),
        }
    }

    /// Has it watched for what comes or, where that would not be taken (`false`), for its end alone: or what lies
    /// there would wake the reactor again and again. A socket without room is watched for that.
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

    /// Whether it is watched for its end alone: then an event is that.
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
