//! The NVMe/TCP frontend of a reactor.
//!
//! **Purpose.** Carries commands of hosts over TCP to the core, and the core's answers back.
//!
//! **Design.** A turn ([`Frontend::poll`]) takes what the core has ended, then visits the connections
//! that are *active*: each receives once, as much as there is, and takes its PDUs in place; every few
//! commands, completions are taken again, and responses are sent when [`SEND_BYTES`] or more of at least
//! [`SEND_ITEMS`] have come together, the rest at the end of the turn. A connection that was quiet for a while leaves the list of
//! active ones and is woken by epoll. One that the core or the memory has no room for is tried again
//! each turn; one that doesn't take its answers is not listened to.
//!
//! [`rx`] takes PDUs ([`r2t`]: data of several R2Ts), [`command`] and [`admin`] are what they ask for, [`slots`] the commands of a queue,
//! [`tx`] what there is to send, [`watch`] what sockets are watched for, [`conn`] one connection, [`gate`] what its host may not do, [`controllers`] the associations, [`pool`]
//! what connections share, [`place`] and [`lifecycle`] are how connections and associations begin and end,
//! and [`record`] is what of all this a successor finds.
//!
//! **What it does not do.** TLS, in-band authentication, Disconnect of a single queue.

mod admin;
mod cids;
mod command;
mod conn;
mod controllers;
mod fused;
mod gate;
mod inherit;
mod lifecycle;
mod place;
mod pool;
mod r2t;
pub(crate) mod record;
mod reserve;
mod rx;
mod send;
mod share;
mod shared;
mod slots;
mod tx;
mod watch;
pub(crate) use watch::lose_the_vanished;

use crate::core::Core;
use crate::exports::Port;
use crate::memory::{Memory, ReceiveBuffer};
pub(crate) use command::NSID;
use conn::{Conn, Life};
use controllers::{Controllers, Quiesce};
use forebay_xlate::boundary::region::{MAX_QUEUE_ENTRIES, Region};
pub(crate) use inherit::controller_config;
pub(crate) use record::params_of_word;
use rx::{Received, Stop};
use shared::Shared;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

/// Maximum Data Transfer Size: the longest staging buffer.
pub(crate) const MDTS_BYTES: u32 = crate::core::staging::MAX_TRANSFER_BYTES;
/// In-capsule data of an I/O command (IOCCSZ without its 64 bytes).
pub(crate) const IN_CAPSULE_BYTES: u32 = 8192;
/// The largest I/O queue.
pub(crate) const MAX_IO_ENTRIES: u32 = MAX_QUEUE_ENTRIES as u32;
/// The largest admin queue. Smaller than a queue's record, which leaves a slot for our own flush.
pub(crate) const MAX_ADMIN_ENTRIES: u32 = 128;
/// That slot.
const INTERNAL_SLOT: u16 = MAX_QUEUE_ENTRIES as u16 - 1;
/// Responses are sent when so many bytes of them have come together: early, so that the host has something to do
/// meanwhile,
const SEND_BYTES: usize = 32 * 1024;
/// or, when more than this of the stream is yet to be taken, late: then the host waits for us, and fewer sends are less
/// work. What [`tx`] sends at once.
const SEND_LATE_BYTES: usize = 120 * 1024;
const MUCH_BYTES: usize = 2 * 1024;
/// Either way so many of them: large ones cost the kernel half when they go together.
const SEND_ITEMS: usize = 8;
/// While more of a lane's commands wait for their turns, its responses wait for one another so many turns at most, and up to so
/// many bytes: what one segment of the largest size holds.
const HELD_TURNS: u32 = 8;
const HELD_BYTES: usize = 60 * 1024;
/// A lane that has enough that waits is listened to only in each so many-th turn: its host may be gone.
pub(crate) const SKIPPED_TURNS: u32 = 64;
/// Turns without data after which a connection is left to epoll, divided by how many are active.
const QUIET_TURNS: u32 = 4000;
/// Data that an R2T asked for must come within this time.
const DATA_LIMIT_NS: u64 = 30_000_000_000;
/// A socket that takes nothing for so long is given up.
const BLOCKED_LIMIT_NS: u64 = 30_000_000_000;

/// A look at who is within its base and comes by another way than TCP: such are served.
type Beside<'a> = &'a mut dyn FnMut(&mut Core) -> bool;

/// What the handling of one connection needs of the rest.
struct Turn<'a> {
    core: &'a mut Core,
    controllers: &'a mut Controllers,
    events: &'a mut Vec<Event>,
}

/// What concerns more than the connection at hand, and is settled when that is put away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    /// A connection's socket is closed.
    Closed(u32),
    /// The core has given back the last command of a closed connection.
    Drained(u32),
    /// A controller is to be reset or shut down, or has come further with it.
    Quiesce(u32),
    /// The flush of a shutdown has ended.
    Flushed(u32),
    /// A controller's Keep Alive Timeout has changed.
    Patience(u32),
    /// The host of this connection asks to abort a command ([`lifecycle`]).
    Abort {
        /// The admin queue's connection.
        admin: u32,
        /// The Abort's slot.
        slot: u16,
        /// Whose queue.
        sqid: u16,
        /// Which command.
        cid: u16,
    },
}

/// See the module's text.
pub(crate) struct Frontend {
    shared: Rc<Shared>,
    reactor: usize,
    conns: Vec<Option<Box<Conn>>>,
    generation: u32,
    controllers: Controllers,
    buffer: ReceiveBuffer,
    active: Vec<u32>,
    first: usize,
    dirty: Vec<u32>,
    events: Vec<Event>,
    stopping: bool,
    /// Reservation commands that wait.
    reserving: Vec<reserve::Reserving>,
    ports: Arc<Vec<Port>>,
    /// Places among the controllers whose lists are to be looked at, and the last that was.
    lists_left: u32,
    list_at: u32,
}

impl Frontend {
    /// A frontend without connections, for reactor number `reactor`. Its sockets are watched in
    /// `epoll`, with keys whose top byte is 0.
    pub(crate) fn new(
        reactor: usize,
        region: Arc<Region>,
        epoll: Arc<OwnedFd>,
        memory: &'static Memory,
        receive: ReceiveBuffer,
    ) -> Self {
        Self {
            shared: Rc::new(Shared::new(&region, memory, epoll)),
            reactor,
            conns: Vec::new(),
            generation: 0,
            controllers: Controllers::default(),
            buffer: receive,
            active: Vec::new(),
            first: 0,
            dirty: Vec::new(),
            events: Vec::with_capacity(64),
            stopping: false,
            reserving: Vec::new(),
            ports: Arc::default(),
            lists_left: 0,
            list_at: 0,
        }
    }

    /// One turn; true if anything was done. Whoever is to blame last is so until [`Core::submit`]. Between connections, `beside` serves
    /// who comes by another way than TCP and is within its base, while some lane is above its base.
    pub(crate) fn poll(&mut self, core: &mut Core, beside: Beside<'_>) -> bool {
        let mut any = self.complete(core);
        let active = self.active.len();
        if active > 0 {
            // Whoever was first is last.
            self.first = (self.first + 1) % active;
            for i in 0..active {
                let index = self.active[(self.first + i) % active];
                let came = self.visit(core, index);
                any |= came;
                if came {
                    beside(core);
                }
            }
            any |= self.complete(core);
            let conns = &mut self.conns;
            self.active.retain(|i| match conns.get_mut(*i as usize) {
                Some(Some(conn)) => {
                    conn.listed = conn.active;
                    conn.active
                }
                _ => false,
            });
        }
        if self.has_reserving() {
            any |= self.reserve(core);
        }
        if self.lists_left > 0 {
            self.look_at_lists(core);
            any = true;
        }
        any |= self.send_all(core, beside);
        if !self.events.is_empty() {
            self.settle(core);
            self.send_all(core, beside);
            any = true;
        }
        any
    }

    /// Sockets of these keys have something to say, or room.
    pub(crate) fn sockets_ready(&mut self, keys: &[u64]) {
        for key in keys {
            let index = *key as u32;
            if let Some(Some(conn)) = self.conns.get_mut(index as usize)
                && conn.key() == *key
            {
                conn.quiet_turns = 0;
                conn.hung_up |= conn.is_watched_for_its_end();
                conn.active = conn.life != Life::Draining;
                if conn.active && !conn.listed {
                    conn.listed = true;
                    self.active.push(index);
                }
            }
        }
    }

    /// Whether the reactor may sleep: everything that can be done waits for a socket, the core or time.
    pub(crate) fn is_idle(&self) -> bool {
        self.dirty.is_empty() && self.events.is_empty() && self.lists_left == 0
    }

    /// Whether a connection waits for memory or room that others hold.
    pub(crate) fn must_retry(&self) -> bool {
        let must_retry = |i: &u32| {
            self.conns
                .get(*i as usize)
                .is_some_and(|c| c.as_ref().is_some_and(|c| c.must_retry()))
        };
        self.active.iter().any(must_retry) || self.is_draining()
    }

    /// Connections, those that wait for their last commands too.
    pub(crate) fn connections(&self) -> usize {
        self.conns.iter().flatten().count()
    }

    /// When [`Frontend::tick`] has something to do at the latest.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        let of_conn = |c: &Conn| {
            let leaving = match c.life {
                Life::Leaving { until_ns } => Some(until_ns),
                _ => None,
            };
            let data = (c.receiving > 0)
                .then(|| oldest_asked_ns(c))
                .flatten()
                .map(|t| t.saturating_add(DATA_LIMIT_NS));
            let blocked = (c.blocked_since_ns > 0)
                .then(|| c.blocked_since_ns.saturating_add(BLOCKED_LIMIT_NS));
            [leaving, data, blocked].into_iter().flatten().min()
        };
        let conns = self.conns.iter().flatten().filter_map(|c| of_conn(c)).min();
        let of_controller = |(_, a): (u32, &controllers::Attached)| match a.quiesce {
            // The core had no room for its flush: soon.
            Quiesce::Draining { .. } => Some(0),
            _ => a.admin.and(a.controller.deadline_ns()),
        };
        let controllers = self.controllers.iter().filter_map(of_controller).min();
        let reserving = self.reserving_deadline_ns();
        (conns.into_iter().chain(controllers))
            .chain(reserving)
            .min()
    }

    /// Lets a connection receive and do what it can.
    fn visit(&mut self, core: &mut Core, index: u32) -> bool {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return false;
        };
        let mut any = false;
        match conn.life {
            Life::Draining => {
                conn.active = false;
                return false;
            }
            Life::Leaving { .. } => return self.visit_leaving(core, index),
            Life::Open if conn.hung_up => {
                self.close(core, index);
                return true;
            }
            Life::Open => {}
        }
        if conn.tx.blocked() {
            conn.tx.unblock();
            self.send(core, index);
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                return true;
            };
            if conn.tx.blocked() || !conn.is_open() {
                return true;
            }
            any = true;
        }
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return any;
        };
        if conn.slots.first_waiting().is_some() && command::retry(conn, core) {
            any = true;
            self.mark_dirty(index);
        }
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return any;
        };
        if conn.rx.stalled()
            && let Some(keep) = rx::lend(conn)
        {
            conn.records.blame_stream();
            let kept = &keep.bytes(conn.rx.kept_in())[..conn.rx.kept()];
            let (taken, _) = self.take(core, index, Some(kept), 0..0);
            any |= taken > 0;
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                return true;
            };
            rx::put_back(conn, keep, taken);
            if conn.rx.stalled() || !conn.is_open() {
                return any;
            }
        }
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return any;
        };
        if conn.skipped_turns < SKIPPED_TURNS && conn.is_held_back(core) {
            conn.skipped_turns += 1;
            return any;
        }
        conn.skipped_turns = 0;
        conn.stalled = None;
        conn.records.blame_stream();
        let received = rx::receive(conn, &mut self.buffer);
        let (from, to) = match received {
            Received::Nothing => {
                conn.quiet_turns += 1;
                if conn.quiet_turns > QUIET_TURNS / self.active.len().max(1) as u32
                    && !conn.must_retry()
                {
                    conn.active = false;
                    if conn.listen(true).is_err() {
                        self.close(core, index);
                    }
                }
                return any;
            }
            Received::Ended => {
                self.close(core, index);
                return true;
            }
            Received::Bytes { from, to } => (from, to),
        };
        conn.quiet_turns = 0;
        let (taken, _) = self.take(core, index, None, from..to);
        if let Some(Some(conn)) = self.conns.get_mut(index as usize) {
            if conn.is_open() {
                rx::keep(conn, &self.buffer[from + taken..to]);
            }
            conn.records.blame_nobody();
        }
        true
    }

    /// Takes PDUs of `kept`, or of a part of the receive buffer, as far as it goes; returns how many bytes
    /// were taken. The stream is to blame already.
    fn take(
        &mut self,
        core: &mut Core,
        index: u32,
        kept: Option<&[u8]>,
        part: Range<usize>,
    ) -> (usize, Stop) {
        let mut at = 0;
        loop {
            let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
                return (at, Stop::Close);
            };
            if !conn.is_open() {
                return (at, Stop::Close);
            }
            let rest = match kept {
                Some(kept) => &kept[at..],
                None => &self.buffer[part.start + at..part.end],
            };
            let mut turn = Turn {
                core,
                controllers: &mut self.controllers,
                events: &mut self.events,
            };
            if at > 0 {
                conn.records.blame_stream();
            }
            conn.send_at_bytes = if rest.len() > MUCH_BYTES {
                SEND_LATE_BYTES
            } else {
                SEND_BYTES
            };
            let (taken, stop) = rx::take(conn, &mut turn, rest);
            at += taken;
            if let Stop::Terminate(error) = stop {
                let header = &rest[taken..];
                let header_bytes = header
                    .get(2)
                    .map_or(0, |hlen| usize::from(*hlen))
                    .min(header.len());
                conn.terminate(core, &error, &header[..header_bytes]);
            }
            if !conn.tx.is_empty() {
                self.mark_dirty(index);
            }
            match stop {
                Stop::Batch => {
                    self.complete(core);
                }
                Stop::Close => {
                    self.close(core, index);
                    return (at, stop);
                }
                Stop::Dry | Stop::Stalled | Stop::Terminate(_) => return (at, stop),
            }
        }
    }

    /// One that was told to go: its answers go out, what it still says is dropped.
    fn visit_leaving(&mut self, core: &mut Core, index: u32) -> bool {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return false;
        };
        if conn.tx.blocked() {
            conn.tx.unblock();
            self.mark_dirty(index);
        }
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return false;
        };
        conn.records.blame_stream();
        let Some(fd) = &conn.fd else { return false };
        match rustix::net::recv(fd, &mut self.buffer[..], rustix::net::RecvFlags::DONTWAIT) {
            Ok((_, n)) if n > 0 => true,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
                if conn.listen(true).is_ok() =>
            {
                conn.active = false;
                false
            }
            _ => {
                self.close(core, index);
                true
            }
        }
    }
}

/// When the oldest R2T of a connection was sent.
fn oldest_asked_ns(conn: &Conn) -> Option<u64> {
    let receiving = conn
        .slots
        .all()
        .filter(|(_, s)| s.stage == slots::Stage::Receiving);
    receiving.map(|(_, s)| s.asked_ns).min()
}

#[cfg(test)]
mod tests;
