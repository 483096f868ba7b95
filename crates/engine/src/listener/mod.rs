//! The listener: accepts connections and runs their handshakes.
//!
//! **Design.** Handshakes run on the control thread, where slow peers do no harm. A host must send
//! ICReq and Connect within [`WELCOME_LIMIT_NS`]; then its socket goes to the export's reactor. A
//! [`handshake`] only peeks: the reactor consumes the bytes once the queue is recorded. So a
//! successor can restart it, if it knows whether the ICResp was sent. The daemon holds each socket
//! too ([`Outside`]), so the listener shuts sockets down. If all places are taken, the peer with
//! the most handshakes loses its oldest. **Not here:** anything after Connect
//! ([`crate::frontend::nvme_tcp`]); the reactor checks queue ids and controller state.

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

/// Time limit for ICReq and Connect.
pub(crate) const WELCOME_LIMIT_NS: u64 = 10_000_000_000;
/// Time limit for a refused host to close.
pub(crate) const LEAVE_LIMIT_NS: u64 = 1_000_000_000;
pub(crate) const MAX_HANDSHAKES: usize = 256;
pub(crate) const KEY_BYTE: u64 = 0xD0;
/// Accepts per event, so that the control thread gets to its other work.
const ACCEPT_BATCH: usize = 64;
const LISTENER_BIT: u64 = 1 << 55;

#[derive(Debug)]
pub(crate) enum NewKind {
    Admin {
        association: Association,
        connect: Box<AdminConnect>,
        target: ListenerTarget,
    },
    Io {
        cntlid: u16,
    },
}

#[derive(Clone, Debug)]
pub(crate) enum ListenerTarget {
    Export(ExportId),
    Discovery(ExportTable),
}

/// A socket for the reactor. None of its bytes is consumed yet.
#[derive(Debug)]
pub(crate) struct NewConnection {
    pub socket: u64,
    /// Non-blocking, without Nagle's delay.
    pub fd: Arc<OwnedFd>,
    /// Bytes of ICReq and Connect, to be consumed.
    pub consumed: usize,
    /// Bytes of the sent ICResp.
    pub said: usize,
    pub params: TcpParams,
    pub connect: Sqe,
    pub data: Box<ConnectData>,
    pub kind: NewKind,
    /// Our address, as the host reached it.
    pub local: SocketAddr,
}

pub(crate) trait Outside {
    /// A connection was accepted; other holders must hold its socket from now on.
    fn accepted(&mut self, socket: u64, fd: &Arc<OwnedFd>);
    fn gone(&mut self, socket: u64);
    /// Hosts were refused: the newest, and the number since the last call.
    fn refused(&mut self, newest: RefusedHost, count: u32);
    fn route(&mut self, reactor: usize, connection: Box<NewConnection>);
}

struct Bound {
    address: String,
    fd: OwnedFd,
    /// Descriptors ran out: no accepts until the next tick.
    muted: bool,
}

pub(crate) struct Listener {
    associations: Associations,
    epoll: Arc<OwnedFd>,
    region: Arc<Region>,
    listeners: Vec<Option<Bound>>,
    handshakes: Vec<Option<Box<Handshake>>>,
    refusals: Refusals,
    generation: u32,
    /// Last socket number: the engine's generation above a counter.
    socket: u64,
    now_ns: u64,
}

impl Listener {
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

    pub(crate) fn number(&mut self) -> u64 {
        self.socket += 1;
        self.socket
    }

    pub(crate) fn associations(&self) -> &Associations {
        &self.associations
    }

    /// Replaces an earlier socket of that address.
    ///
    /// # Errors
    /// The socket cannot be watched.
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

    pub(crate) fn listeners(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.listeners
            .iter()
            .flatten()
            .map(|l| (l.address.as_str(), l.fd.as_fd()))
    }

    #[cfg(test)]
    pub(crate) fn handshakes(&self) -> usize {
        self.handshakes.iter().flatten().count()
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.handshakes.iter().any(Option::is_some)
            || self.listeners.iter().flatten().any(|l| l.muted)
    }

    pub(crate) fn close(&mut self, out: &mut dyn Outside) {
        self.listeners.clear();
        for at in 0..self.handshakes.len() {
            self.drop_handshake(at, out);
        }
    }

    /// Other holders keep the socket open, so a drop alone would not close it or end its watch.
    fn drop_handshake(&mut self, at: usize, out: &mut dyn Outside) {
        if let Some(handshake) = self.handshakes.get_mut(at).and_then(Option::take) {
            let _ = rustix::net::shutdown(&handshake.fd, Shutdown::Both);
            let _ = epoll::delete(&self.epoll, &handshake.fd);
            let socket = handshake.socket;
            drop(handshake);
            out.gone(socket);
        }
    }

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

    /// Drops late handshakes, and retries accepts where descriptors had run out. Bytes already in a
    /// socket came in time.
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
        self.report_refused(out);
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
                // The connection died before the accept, or a signal came.
                Err(_) => {}
            }
        }
    }

    /// Adopts a dead engine's handshake; its time starts again. `welcomed`: the ICResp was sent.
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
            Some(at) => self.advance(at, exports, out),
            None => {
                let _ = rustix::net::shutdown(&fd, Shutdown::Both);
                drop(fd);
                out.gone(socket);
            }
        }
    }

    fn admit(
        &mut self,
        socket: u64,
        fd: Arc<OwnedFd>,
        welcomed: bool,
        out: &mut dyn Outside,
    ) -> Option<usize> {
        rustix::net::sockopt::set_tcp_nodelay(&fd, true).ok()?;
        crate::frontend::nvme_tcp::lose_the_vanished(&fd, 0).ok()?;
        // Otherwise urgent bytes would be missing from the stream and from the kernel's byte
        // counts.
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
            // Received bytes stay in the socket, so edge triggering is needed.
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

    /// Drops the oldest handshake of the peer with the most handshakes.
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
        // If these bytes kill this engine, its successor will not look at them.
        self.region
            .header()
            .handshake
            .store(handshake.socket, Release);
        let was_leaving = handshake.leaving();
        let step = handshake.advance(&self.associations, exports, self.now_ns);
        if let Some(refused) = handshake.refused.take() {
            self.refusals.note(refused);
        }
        match step {
            Step::Wait if !was_leaving && handshake.leaving() => {
                // Its further bytes are consumed a little at a time.
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
                        consumed: handshake.examined(),
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
        self.region.header().handshake.store(0, Release);
        self.report_refused(out);
    }

    fn report_refused(&mut self, out: &mut dyn Outside) {
        if let Some((newest, count)) = self.refusals.next_report(self.now_ns) {
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
