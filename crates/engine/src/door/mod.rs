//! The door: new connections, until it is known who they are and where they belong.
//!
//! **Purpose.** A socket that was just accepted may be anybody's. On the control thread, where slow
//! peers hurt nobody, it must say ICReq and then Connect; only then is it handed to the reactor that
//! serves its export, with the Connect checked as far as names go but not yet answered.
//!
//! **Design.** Each newcomer has a small state machine ([`newcomer`]) and [`WELCOME_LIMIT_NS`] of time.
//! It reads from the socket no byte more than the PDU at hand has, so that nothing has to travel with
//! the socket. Newcomers are bounded; when there is no place left, whoever has most of them loses its
//! oldest. Refusals are told in the words of the specification, and then the socket is closed.
//!
//! **Not here:** anything after Connect ([`crate::tcp`]), and what a controller has to say about a
//! Connect (queue ids, its state): the reactor asks it.

mod judge;
mod newcomer;

use crate::associations::{Association, Associations};
use crate::exports::Exports;
use forebay_nvme::Sqe;
use forebay_nvme::controller::AdminConnect;
use forebay_nvme::fabrics::ConnectData;
use forebay_nvme::tcp::TcpParams;
use forebay_xlate::boundary::message::ExportId;
use newcomer::{Newcomer, Step};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// How long a newcomer may take to say who it is.
pub(crate) const WELCOME_LIMIT_NS: u64 = 10_000_000_000;
/// How long a refused one may take to hang up.
pub(crate) const LEAVE_LIMIT_NS: u64 = 1_000_000_000;
/// Newcomers at once.
pub(crate) const MAX_NEWCOMERS: usize = 256;
/// The top byte of the door's epoll keys.
pub(crate) const KEY_BYTE: u64 = 0xD0;
/// Connections accepted for one event, so that the control thread gets to its other work.
const ACCEPT_BATCH: usize = 64;
const LISTENER_BIT: u64 = 1 << 55;

/// What an accepted connection wants to be.
#[derive(Debug)]
pub(crate) enum NewKind {
    /// The admin queue of a new association.
    Admin {
        /// Its controller id.
        association: Association,
        /// The Connect, checked.
        connect: Box<AdminConnect>,
        /// What it is to control.
        target: Target,
    },
    /// An I/O queue of an existing association, which is this host's.
    Io {
        /// The controller.
        cntlid: u16,
    },
}

/// What a controller controls.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// An export.
    Export(ExportId),
    /// Nothing: it tells what there is.
    Discovery(Exports),
}

/// A socket whose Connect is to be answered by the reactor. Nothing beyond the Connect has been read.
#[derive(Debug)]
pub(crate) struct NewConnection {
    /// The socket: non-blocking, without Nagle's delay.
    pub fd: OwnedFd,
    /// What ICReq and ICResp agreed on.
    pub params: TcpParams,
    /// The Connect command.
    pub connect: Sqe,
    /// Its data.
    pub data: Box<ConnectData>,
    /// What it wants to be.
    pub kind: NewKind,
    /// Our address, as the host reached it.
    pub local: SocketAddr,
}

struct Listener {
    address: String,
    fd: OwnedFd,
    /// Out of descriptors: not listened to until the next tick.
    muted: bool,
}

/// See the module's text.
pub(crate) struct Door {
    associations: Associations,
    epoll: Arc<OwnedFd>,
    listeners: Vec<Option<Listener>>,
    newcomers: Vec<Option<Box<Newcomer>>>,
    generation: u32,
    now_ns: u64,
}

impl Door {
    /// A door without listeners; its sockets are watched in `epoll`.
    pub(crate) fn new(associations: Associations, epoll: Arc<OwnedFd>) -> Self {
        let newcomers = (0..MAX_NEWCOMERS).map(|_| None).collect();
        Self {
            associations,
            epoll,
            listeners: Vec::new(),
            newcomers,
            generation: 0,
            now_ns: monotonic_ns(),
        }
    }

    /// Listens on a socket that already does, under the name of its address; it replaces an earlier
    /// one of that name.
    ///
    /// # Errors
    /// When the socket can't be watched.
    pub(crate) fn add_listener(&mut self, address: String, fd: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        self.remove_listener(&address);
        let at = self
            .listeners
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.listeners.len());
        epoll::add(&self.epoll, &fd, listener_key(at), epoll::EventFlags::IN)?;
        let listener = Some(Listener {
            address,
            fd,
            muted: false,
        });
        match self.listeners.get_mut(at) {
            Some(free) => *free = listener,
            None => self.listeners.push(listener),
        }
        Ok(())
    }

    /// Stops listening on an address; true if it was listened on.
    pub(crate) fn remove_listener(&mut self, address: &str) -> bool {
        let found = self
            .listeners
            .iter_mut()
            .find(|l| l.as_ref().is_some_and(|l| l.address == address));
        match found.and_then(Option::take) {
            Some(listener) => {
                let _ = epoll::delete(&self.epoll, &listener.fd);
                true
            }
            None => false,
        }
    }

    /// The addresses listened on, and their sockets.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.listeners
            .iter()
            .flatten()
            .map(|l| (l.address.as_str(), l.fd.as_fd()))
    }

    /// Newcomers now.
    #[cfg(test)]
    pub(crate) fn newcomers(&self) -> usize {
        self.newcomers.iter().flatten().count()
    }

    /// Whether newcomers are waiting, whose time limits must be looked at.
    pub(crate) fn is_busy(&self) -> bool {
        self.newcomers.iter().any(Option::is_some)
            || self.listeners.iter().flatten().any(|l| l.muted)
    }

    /// Takes no more connections, and drops those that have not said who they are.
    pub(crate) fn close(&mut self) {
        self.listeners.clear();
        self.newcomers.fill_with(|| None);
    }

    /// Something happened on the socket of `key`. Connections that have said who they are go to
    /// `route`, with the number of their reactor.
    pub(crate) fn ready(
        &mut self,
        key: u64,
        exports: &Exports,
        route: &mut dyn FnMut(usize, Box<NewConnection>),
    ) {
        self.now_ns = monotonic_ns();
        if key & LISTENER_BIT != 0 {
            self.accept((key & 0xffff) as usize, exports, route);
            return;
        }
        let (at, generation) = ((key & 0xffff) as usize, (key >> 16) as u32);
        let newcomer = self.newcomers.get(at).and_then(Option::as_ref);
        if newcomer.is_some_and(|n| n.generation == generation) {
            self.advance(at, exports, route);
        }
    }

    /// Drops those whose time is up, and listens again where descriptors had run out.
    pub(crate) fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        for newcomer in &mut self.newcomers {
            if newcomer.as_ref().is_some_and(|n| now_ns >= n.deadline_ns) {
                *newcomer = None;
            }
        }
        for (at, listener) in self.listeners.iter_mut().enumerate() {
            if let Some(listener) = listener.as_mut().filter(|l| l.muted) {
                let again = epoll::modify(
                    &self.epoll,
                    &listener.fd,
                    listener_key(at),
                    epoll::EventFlags::IN,
                );
                listener.muted = again.is_err();
            }
        }
    }

    fn accept(
        &mut self,
        listener: usize,
        exports: &Exports,
        route: &mut dyn FnMut(usize, Box<NewConnection>),
    ) {
        for _ in 0..ACCEPT_BATCH {
            let Some(Some(l)) = self.listeners.get_mut(listener) else {
                return;
            };
            match rustix::net::accept_with(&l.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => {
                    if let Some(at) = self.admit(fd) {
                        // Often everything is there already.
                        self.advance(at, exports, route);
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    let none = epoll::EventFlags::empty();
                    l.muted =
                        epoll::modify(&self.epoll, &l.fd, listener_key(listener), none).is_ok();
                    return;
                }
                // The connection died before it was taken, or a signal came.
                Err(_) => {}
            }
        }
    }

    /// Gives a socket a place among the newcomers.
    fn admit(&mut self, fd: OwnedFd) -> Option<usize> {
        rustix::net::sockopt::set_tcp_nodelay(&fd, true).ok()?;
        let peer = address_of(rustix::net::getpeername(&fd).ok()??)?;
        let local = address_of(rustix::net::getsockname(&fd).ok()?)?;
        let at = match self.newcomers.iter().position(Option::is_none) {
            Some(at) => at,
            None => self.make_room()?,
        };
        self.generation = self.generation.wrapping_add(1);
        epoll::add(
            &self.epoll,
            &fd,
            newcomer_key(at, self.generation),
            epoll::EventFlags::IN,
        )
        .ok()?;
        let deadline_ns = self.now_ns.saturating_add(WELCOME_LIMIT_NS);
        self.newcomers[at] = Some(Box::new(Newcomer::new(
            fd,
            peer,
            local,
            self.generation,
            deadline_ns,
        )));
        Some(at)
    }

    /// Drops the oldest newcomer of the peer that has most of them.
    fn make_room(&mut self) -> Option<usize> {
        let of = |ip: IpAddr| {
            self.newcomers
                .iter()
                .flatten()
                .filter(|n| n.peer.ip() == ip)
                .count()
        };
        let crowd = self
            .newcomers
            .iter()
            .flatten()
            .map(|n| n.peer.ip())
            .max_by_key(|ip| of(*ip))?;
        let oldest = self
            .newcomers
            .iter()
            .enumerate()
            .filter_map(|(at, n)| {
                n.as_ref()
                    .filter(|n| n.peer.ip() == crowd)
                    .map(|n| (n.deadline_ns, at))
            })
            .min()?;
        self.newcomers[oldest.1] = None;
        Some(oldest.1)
    }

    fn advance(
        &mut self,
        at: usize,
        exports: &Exports,
        route: &mut dyn FnMut(usize, Box<NewConnection>),
    ) {
        let Some(mut newcomer) = self.newcomers[at].take() else {
            return;
        };
        match newcomer.advance(&self.associations, exports, self.now_ns) {
            Step::Wait => self.newcomers[at] = Some(newcomer),
            Step::Gone => {}
            Step::Welcome(welcome) => {
                let Newcomer {
                    fd, params, local, ..
                } = *newcomer;
                if epoll::delete(&self.epoll, &fd).is_ok() {
                    let judge::Welcome {
                        reactor,
                        connect,
                        data,
                        kind,
                    } = *welcome;
                    route(
                        reactor,
                        Box::new(NewConnection {
                            fd,
                            params,
                            connect,
                            data,
                            kind,
                            local,
                        }),
                    );
                }
            }
        }
    }
}

fn listener_key(at: usize) -> epoll::EventData {
    epoll::EventData::new_u64(KEY_BYTE << 56 | LISTENER_BIT | at as u64)
}

fn newcomer_key(at: usize, generation: u32) -> epoll::EventData {
    epoll::EventData::new_u64(KEY_BYTE << 56 | u64::from(generation) << 16 | at as u64)
}

fn address_of(address: rustix::net::SocketAddrAny) -> Option<SocketAddr> {
    SocketAddr::try_from(address).ok()
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests;
