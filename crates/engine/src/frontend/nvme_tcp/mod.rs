//! The NVMe/TCP frontend of a reactor.
//!
//! A turn takes ended commands from the core, then visits the *active* connections. Each receives
//! once and takes its PDUs in place; completions are polled every few commands. An idle connection
//! is left to epoll. One that lacks memory or room in the core retries each turn. One that doesn't
//! take its answers is not read.
//!
//! **Not supported:** TLS, in-band authentication, Disconnect of a single queue.

mod admin;
mod attach;
mod cids;
mod command;
mod conn;
mod controllers;
mod epoll_interest;
mod fused;
mod inherit;
mod lifecycle;
mod message;
mod quotas;
mod r2t;
pub(crate) mod record;
mod reserve;
mod restrictions;
mod rx;
mod send;
mod send_lists;
mod shared;
mod slots;
mod turn;
mod tx;
mod visit;
pub(crate) use epoll_interest::lose_the_vanished;
pub(crate) use message::TcpMessage;

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
pub(crate) const MAX_IO_ENTRIES: u32 = MAX_QUEUE_ENTRIES as u32;
/// Smaller than a queue's record, which leaves a slot for the internal flush.
pub(crate) const MAX_ADMIN_ENTRIES: u32 = 128;
/// That slot.
const INTERNAL_SLOT: u16 = MAX_QUEUE_ENTRIES as u16 - 1;
/// Responses are sent early, at this many bytes, so that the host has work meanwhile.
const SEND_BYTES: usize = 32 * 1024;
/// If more than `MUCH_BYTES` of the stream are untaken, they are sent late: the host waits anyway,
/// and fewer sends cost less. The limit is one send of [`tx`].
const SEND_LATE_BYTES: usize = 120 * 1024;
const MUCH_BYTES: usize = 2 * 1024;
/// The least items in both cases: large ones cost the kernel half when sent together.
const SEND_ITEMS: usize = 8;
/// While a lane's further commands wait for their quanta, responses are held for at most this many
/// turns and bytes (one largest segment).
const HELD_TURNS: u32 = 8;
const HELD_BYTES: usize = 60 * 1024;
/// A lane with enough waiting commands is read only every n-th turn, to notice a host that is gone.
pub(crate) const SKIPPED_TURNS: u32 = 64;
/// Idle turns before a connection is left to epoll, divided by the number of active ones.
const QUIET_TURNS: u32 = 4000;
const DATA_LIMIT_NS: u64 = 30_000_000_000;
/// A socket that takes nothing for so long is closed.
const BLOCKED_LIMIT_NS: u64 = 30_000_000_000;
/// The longest sleep while a connection waits for memory or room.
const RETRY_NS: u64 = 10_000_000;

struct TcpTurn<'a> {
    core: &'a mut Core,
    controllers: &'a mut Controllers,
    events: &'a mut Vec<TurnEvent>,
}

/// Follow-up work after a connection's visit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TurnEvent {
    Closed(u32),
    /// The core returned the last command of a closed connection.
    Drained(u32),
    /// A controller begins or continues a reset or shutdown.
    Quiesce(u32),
    Flushed(u32),
    Patience(u32),
    Abort {
        admin: u32,
        slot: u16,
        sqid: u16,
        cid: u16,
    },
}

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
    reserving: Vec<reserve::Reserving>,
    ports: Arc<Vec<Port>>,
    /// How many controllers' lists are left to check, and the last index checked.
    lists_left: u32,
    list_at: u32,
}

impl NvmeTcp {
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
