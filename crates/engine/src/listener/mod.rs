//! The listener: new connections, until it is known who they are and where they belong.
//!
//! **Purpose.** A socket that was just accepted may be anybody's. On the control thread, where slow
//! peers hurt nobody, it must say ICReq and then Connect; only then is it handed to the reactor that
//! serves its export, with the Connect checked as far as names go but not yet answered.
//!
//! **Design.** Each handshake has a small state machine ([`handshake`]) and [`WELCOME_LIMIT_NS`] of time.
//! It only looks at what came, and consumes nothing: the reactor does, when the queue is recorded. So
//! nothing has to travel with the socket, and a successor that finds a handshake begins again with it: all
//! it has to know is whether the ICResp was sent. A socket has a number from its accept on, and others
//! ([`Outside`]) are told of it: the daemon holds it too, so it ends by being shut down, not by being
//! dropped. Handshakes are bounded; when there is no place left, whoever has most of them loses its
//! oldest. Refusals are told in the words of the specification, and then the socket is closed.
//!
//! **Not here:** anything after Connect ([`crate::frontend::nvme_tcp`]), and what a controller has to say about a
//! Connect (queue ids, its state): the reactor asks it.

mod handshake;
mod judge;
mod refused;

use crate::associations::{Association, Associations};
use crate::exports::ExportTable;
use forebay_nvme::Sqe;
use forebay_nvme::controller::AdminConnect;
use forebay_nvme::fabrics::ConnectData;
use forebay_nvme::tcp::TcpParams;
use forebay_xlate::boundary::message::ExportId;
use forebay_xlate::boundary::region::Region;
use forebay_xlate::kill_point;
use handshake::{Handshake, IC_BYTES, Step};
use refused::Refusals;
pub(crate) use refused::RefusedHost;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

/// How long a handshake may take to say who it is.
pub(crate) const WELCOME_LIMIT_NS: u64 = 10_000_000_000;
/// How long a refused one may take to hang up.
pub(crate) const LEAVE_LIMIT_NS: u64 = 1_000_000_000;
/// Handshakes at once.
pub(crate) const MAX_HANDSHAKES: usize = 256;
/// The top byte of the listener's epoll keys.
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
        target: ListenerTarget,
    },
    /// An I/O queue of an existing association, which is this host's.
    Io {
        /// The controller.
        cntlid: u16,
    },
}

/// What a controller controls.
#[derive(Clone, Debug)]
pub(crate) enum ListenerTarget {
    /// An export.
    Export(ExportId),
    /// Nothing: it tells what there is.
    Discovery(ExportTable),
}

/// A socket whose Connect is to be answered by the reactor. Nothing of it has been consumed.
#[derive(Debug)]
pub(crate) struct NewConnection {
    /// Its number.
    pub socket: u64,
    /// The socket: non-blocking, without Nagle's delay.
    pub fd: Arc<OwnedFd>,
    /// How many bytes ICReq and Connect are: to be consumed.
    pub consumed: usize,
    /// How many bytes were sent: the ICResp's.
    pub said: usize,
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

/// Whom the listener tells of its sockets.
pub(crate) trait Outside {
    /// A connection was accepted just now. Whoever is to hold its socket does from here on.
    fn accepted(&mut self, socket: u64, fd: &Arc<OwnedFd>);
    /// A handshake is gone; its socket is shut down.
    fn gone(&mut self, socket: u64);
    /// Hosts were not let in: the newest, and how many since the last time this was said.
    fn refused(&mut self, newest: RefusedHost, count: u32);
    /// A connection has said who it is; it goes to this reactor.
    fn route(&mut self, reactor: usize, connection: Box<NewConnection>);
}

struct Bound {
    address: String,
    fd: OwnedFd,
    /// Out of descriptors: not listened to until the next tick.
    muted: bool,
}

/// See the module's text.
pub(crate) struct Listener {
    associations: Associations,
    epoll: Arc<OwnedFd>,
    region: Arc<Region>,
    listeners: Vec<Option<Bound>>,
    handshakes: Vec<Option<Box<Handshake>>>,
    refusals: Refusals,
    generation: u32,
    /// The number of the last socket accepted: the engine's generation above a counter.
    socket: u64,
    now_ns: u64,
}

impl Listener {
    /// A door without listeners; its sockets are watched in `epoll`.
    /// It numbers its sockets with the engine's generation.
    pub(crate) fn new(
        associations: Associations,
        epoll: Arc<OwnedFd>,
        generation: u64,
        region: Arc<Region>,
    ) -> Self {
        let handshakes = (0..MAX_HANDSHAKES).map(|_| None).collect();
        Self {
            associations,
            epoll,
            region,
            listeners: Vec::new(),
            handshakes,
            refusals: Refusals::default(),
            generation: 0,
            socket: generation << 32,
            now_ns: monotonic_ns(),
        }
    }

    /// A number for a socket that was accepted.
    pub(crate) fn number(&mut self) -> u64 {
        self.socket += 1;
        self.socket
    }

    /// The controller ids.
    pub(crate) fn associations(&self) -> &Associations {
        &self.associations
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
        let listener = Some(Bound {
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

    /// Handshakes now.
    #[cfg(test)]
    pub(crate) fn handshakes(&self) -> usize {
        self.handshakes.iter().flatten().count()
    }

    /// Whether handshakes are waiting, whose time limits must be looked at.
    pub(crate) fn is_busy(&self) -> bool {
        self.handshakes.iter().any(Option::is_some)
            || self.listeners.iter().flatten().any(|l| l.muted)
    }

    /// Takes no more connections, and drops those that have not said who they are.
    pub(crate) fn close(&mut self, out: &mut dyn Outside) {
        self.listeners.clear();
        for at in 0..self.handshakes.len() {
            self.drop_handshake(at, out);
        }
    }

    /// A handshake is gone. Others have its socket too, so to drop it ends nothing, and leaves it watched.
    fn drop_handshake(&mut self, at: usize, out: &mut dyn Outside) {
        if let Some(handshake) = self.handshakes.get_mut(at).and_then(Option::take) {
            let _ = rustix::net::shutdown(&handshake.fd, Shutdown::Both);
            let _ = epoll::delete(&self.epoll, &handshake.fd);
            let socket = handshake.socket;
            drop(handshake);
            out.gone(socket);
        }
    }

    /// Something happened on the socket of `key`.
    pub(crate) fn ready(&mut self, key: u64, exports: &ExportTable, out: &mut dyn Outside) {
        self.now_ns = monotonic_ns();
        if key & LISTENER_BIT != 0 {
            self.accept((key & 0xffff) as usize, exports, out);
            return;
        }
        let (at, generation) = ((key & 0xffff) as usize, (key >> 16) as u32);
        let handshake = self.handshakes.get(at).and_then(Option::as_ref);
        if handshake.is_some_and(|n| n.generation == generation) {
            self.advance(at, exports, out);
        }
    }

    fn is_late(&self, at: usize, now_ns: u64) -> bool {
        let handshake = self.handshakes[at].as_ref();
        handshake.is_some_and(|handshake| now_ns >= handshake.deadline_ns)
    }

    /// Drops those whose time is up, and listens again where descriptors had run out. What lies in a socket by now came
    /// in time.
    pub(crate) fn tick(&mut self, now_ns: u64, exports: &ExportTable, out: &mut dyn Outside) {
        self.now_ns = now_ns;
        for at in 0..self.handshakes.len() {
            if self.is_late(at, now_ns) {
                self.advance(at, exports, out);
                if self.is_late(at, now_ns) {
                    self.drop_handshake(at, out);
                }
            }
        }
        self.tell_refused(out);
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

    fn accept(&mut self, listener: usize, exports: &ExportTable, out: &mut dyn Outside) {
        for _ in 0..ACCEPT_BATCH {
            let Some(Some(l)) = self.listeners.get_mut(listener) else {
                return;
            };
            match rustix::net::accept_with(&l.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => {
                    kill_point!("accept.accepted");
                    let (socket, fd) = (self.number(), Arc::new(fd));
                    out.accepted(socket, &fd);
                    kill_point!("accept.deposited");
                    self.begin(socket, fd, false, exports, out);
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

    /// Takes a handshake of a dead engine, which had sent the ICResp, or not yet. Its time begins anew.
    pub(crate) fn readmit(
        &mut self,
        socket: u64,
        fd: Arc<OwnedFd>,
        welcomed: bool,
        exports: &ExportTable,
        out: &mut dyn Outside,
    ) {
        self.now_ns = monotonic_ns();
        self.begin(socket, fd, welcomed, exports, out);
    }

    fn begin(
        &mut self,
        socket: u64,
        fd: Arc<OwnedFd>,
        welcomed: bool,
        exports: &ExportTable,
        out: &mut dyn Outside,
    ) {
        match self.admit(socket, fd.clone(), welcomed, out) {
            // Often everything is there already.
            Some(at) => self.advance(at, exports, out),
            None => {
                let _ = rustix::net::shutdown(&fd, Shutdown::Both);
                drop(fd);
                out.gone(socket);
            }
        }
    }

    /// Gives a socket a place among the handshakes.
    fn admit(
        &mut self,
        socket: u64,
        fd: Arc<OwnedFd>,
        welcomed: bool,
        out: &mut dyn Outside,
    ) -> Option<usize> {
        rustix::net::sockopt::set_tcp_nodelay(&fd, true).ok()?;
        crate::frontend::nvme_tcp::lose_the_vanished(&fd, 0).ok()?;
        // Urgent bytes would be left out of the stream, and of what the kernel counts of it.
        rustix::net::sockopt::set_socket_oobinline(&fd, true).ok()?;
        let peer = address_of(rustix::net::getpeername(&fd).ok()??)?;
        let local = address_of(rustix::net::getsockname(&fd).ok()?)?;
        let at = match self.handshakes.iter().position(Option::is_none) {
            Some(at) => at,
            None => self.make_room(out)?,
        };
        self.generation = self.generation.wrapping_add(1);
        epoll::add(
            &self.epoll,
            &fd,
            handshake_key(at, self.generation),
            // What came stays in the socket, so only news are of interest.
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )
        .ok()?;
        let deadline_ns = self.now_ns.saturating_add(WELCOME_LIMIT_NS);
        self.handshakes[at] = Some(Box::new(Handshake::new(
            socket,
            fd,
            welcomed,
            peer,
            local,
            self.generation,
            deadline_ns,
        )));
        Some(at)
    }

    /// Drops the oldest handshake of the peer that has most of them.
    fn make_room(&mut self, out: &mut dyn Outside) -> Option<usize> {
        let of = |ip: IpAddr| {
            self.handshakes
                .iter()
                .flatten()
                .filter(|n| n.peer.ip() == ip)
                .count()
        };
        let crowd = self
            .handshakes
            .iter()
            .flatten()
            .map(|n| n.peer.ip())
            .max_by_key(|ip| of(*ip))?;
        let oldest = self
            .handshakes
            .iter()
            .enumerate()
            .filter_map(|(at, n)| {
                n.as_ref()
                    .filter(|n| n.peer.ip() == crowd)
                    .map(|n| (n.deadline_ns, at))
            })
            .min()?;
        self.drop_handshake(oldest.1, out);
        Some(oldest.1)
    }

    fn advance(&mut self, at: usize, exports: &ExportTable, out: &mut dyn Outside) {
        let Some(Some(handshake)) = self.handshakes.get_mut(at) else {
            return;
        };
        // Should this engine die of its bytes, the next one won't look at them.
        self.region
            .header()
            .newcomer
            .store(handshake.socket, Release);
        let was_leaving = handshake.leaving();
        let step = handshake.advance(&self.associations, exports, self.now_ns);
        if let Some(refused) = handshake.refused.take() {
            self.refusals.note(refused);
        }
        match step {
            Step::Wait if !was_leaving && handshake.leaving() => {
                // What it still says is consumed from now on, a little at a time.
                let (key, level) = (
                    handshake_key(at, handshake.generation),
                    epoll::EventFlags::IN,
                );
                let _ = epoll::modify(&self.epoll, &handshake.fd, key, level);
            }
            Step::Wait => {}
            Step::Gone => self.drop_handshake(at, out),
            Step::Welcome(welcome) => {
                if epoll::delete(&self.epoll, &handshake.fd).is_err() {
                    self.drop_handshake(at, out);
                } else if let Some(handshake) = self.handshakes[at].take() {
                    let judge::Welcome {
                        reactor,
                        connect,
                        data,
                        kind,
                    } = *welcome;
                    let connection = NewConnection {
                        socket: handshake.socket,
                        consumed: handshake.looked_at(),
                        said: IC_BYTES,
                        params: handshake.params,
                        local: handshake.local,
                        fd: handshake.fd,
                        connect,
                        data,
                        kind,
                    };
                    out.route(reactor, Box::new(connection));
                    kill_point!("door.routed");
                }
            }
        }
        self.region.header().newcomer.store(0, Release);
        self.tell_refused(out);
    }

    fn tell_refused(&mut self, out: &mut dyn Outside) {
        if let Some((newest, count)) = self.refusals.take(self.now_ns) {
            out.refused(newest, count);
        }
    }
}

fn listener_key(at: usize) -> epoll::EventData {
    epoll::EventData::new_u64(KEY_BYTE << 56 | LISTENER_BIT | at as u64)
}

fn handshake_key(at: usize, generation: u32) -> epoll::EventData {
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
