//! The NVMe/TCP frontend of a reactor.
//!
//! **Purpose.** Carries commands of hosts over TCP to the core, and the core's answers back.
//!
//! **Design.** A turn (`NvmeTcp::poll`) takes what the core has ended, then visits the connections
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
mod message;
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
mod turn;
mod tx;
mod visit;
mod watch;
pub(crate) use message::TcpMessage;
pub(crate) use watch::lose_the_vanished;

use crate::core::{Core, FrontendIndex};
use crate::exports::Port;
use crate::memory::{Memory, ReceiveBuffer};
pub(crate) use command::NSID;
use conn::Conn;
use controllers::Controllers;
use forebay_xlate::boundary::region::{MAX_QUEUE_ENTRIES, Region};
pub(crate) use inherit::controller_config;
pub(crate) use record::params_of_word;
use shared::Shared;
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
/// The longest sleep while a connection waits for memory or room.
const RETRY_NS: u64 = 10_000_000;

/// What the handling of one connection needs of the rest.
struct TcpTurn<'a> {
    core: &'a mut Core,
    controllers: &'a mut Controllers,
    events: &'a mut Vec<TurnEvent>,
}

/// What concerns more than the connection at hand, and is settled when that is put away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TurnEvent {
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
pub(crate) struct NvmeTcp {
    shared: Rc<Shared>,
    reactor: usize,
    conns: Vec<Option<Box<Conn>>>,
    generation: u32,
    controllers: Controllers,
    buffer: ReceiveBuffer,
    active: Vec<u32>,
    first: usize,
    dirty: Vec<u32>,
    events: Vec<TurnEvent>,
    stopping: bool,
    /// Reservation commands that wait.
    reserving: Vec<reserve::Reserving>,
    ports: Arc<Vec<Port>>,
    /// Places among the controllers whose lists are to be looked at, and the last that was.
    lists_left: u32,
    list_at: u32,
}

impl NvmeTcp {
    /// A frontend without connections, for reactor number `reactor`. Its sockets are watched in
    /// `epoll`.
    pub(crate) fn new(
        index: FrontendIndex,
        reactor: usize,
        region: &Arc<Region>,
        epoll: Arc<OwnedFd>,
        memory: &'static Memory,
        receive: ReceiveBuffer,
    ) -> Self {
        Self {
            shared: Rc::new(Shared::new(index, region, memory, epoll)),
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
}

#[cfg(test)]
mod tests;
