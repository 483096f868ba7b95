//! What a conversion hands to the reactors.
//!
//! **Design.** One [`InheritedPart`] for each reactor: controllers, queues with their commands, and the spans of
//! volumes that carried commands and orphans may still change. Everything in it is already in the
//! successor's own region and memory, under the slots named here.
//!
//! **Not here:** how it is found out ([`super::queue`]) and what becomes of it
//! (`Frontend::inherit`, `Core::carry`).

use super::closing::Closing;
use crate::associations::Association;
use crate::core::staging::StagingBuffer;
use crate::core::{CarriedSpan, Devices};
use crate::frontend::vm::NewMachine;
use crate::lane::LaneIndex;
use crate::listener::ListenerTarget;
use crate::memory::{HeaderList, Keep};
use forebay_nvme::Sqe;
use forebay_nvme::controller::Controller;
use forebay_xlate::boundary::region::queue::InData;
use forebay_xlate::boundary::region::{Asked, Item, QueueConstants};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How an inherited command goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// From its beginning, with the data that is in its buffer; or, if it has none, by asking the host
    /// for it. After the fence of these devices.
    Begin {
        /// Where it was submitted.
        fenced: Devices,
    },
    /// The second of a fused pair, whose compare has passed: its write, after the fence of these devices.
    Passed {
        /// Where it was submitted.
        fenced: Devices,
    },
    /// The host sends its data, which an R2T asked for.
    Data {
        /// What has come.
        asked: Asked,
        /// R2Ts that were sent, or will be.
        r2ts: u8,
    },
    /// The controller keeps it (an Asynchronous Event Request).
    Kept,
    /// Its answer is among the queue's items.
    Answered,
    /// It has killed too often: Internal Error, and not again.
    Poisoned,
}

/// A command of a dead engine's queue.
#[derive(Debug)]
pub(crate) struct InheritedCommand {
    /// Its slot, which it keeps.
    pub slot: u16,
    /// Its number on the queue.
    pub number: u64,
    /// As it came.
    pub sqe: Sqe,
    /// CLOCK_MONOTONIC when it was taken, ns.
    pub taken_ns: u64,
    /// A data digest was wrong.
    pub damaged: bool,
    /// How it goes on.
    pub next: Next,
    /// Its data from the host.
    pub buffer: Option<StagingBuffer>,
}

/// An association that goes on.
#[derive(Debug)]
pub(crate) struct InheritedController {
    /// Its slot in the region.
    pub slot: u32,
    /// Its controller id, which stays taken.
    pub association: Association,
    /// What it controls.
    pub target: ListenerTarget,
    /// The export's lane.
    pub lane: Option<LaneIndex>,
    /// As its host knows it.
    pub controller: Box<Controller>,
    /// Our address, as the host reached it.
    pub local: SocketAddr,
    /// The namespace's size that the host was told last.
    pub blocks: u64,
}

/// A connection that goes on.
#[derive(Debug)]
pub(crate) struct InheritedQueue {
    /// Its slot in the region.
    pub queue: u32,
    /// Its association's place in [`InheritedPart::controllers`].
    pub controller: usize,
    /// Its constants in the region: its socket's number among them.
    pub constants: QueueConstants,
    /// The socket.
    pub fd: Arc<OwnedFd>,
    /// Commands taken.
    pub number: u64,
    /// The stream's position up to which PDUs are taken.
    pub taken: u64,
    /// Bytes that are taken and still in the socket.
    pub in_socket: u64,
    /// Its buffers for kept bytes.
    pub keep: Keep,
    /// Bytes received after `taken`: in the first of these buffers.
    pub kept_bytes: u32,
    /// The data that the position is within.
    pub data: Option<InData>,
    /// Its list of items.
    pub list: HeaderList,
    /// What is to be sent, from place 0 of the list on.
    pub items: Vec<(Item, Option<StagingBuffer>)>,
    /// Bytes of the first item that are sent.
    pub skip_bytes: u64,
    /// The transmitted stream's position after the last item.
    pub published: u64,
    /// In the order of their numbers.
    pub commands: Vec<InheritedCommand>,
}

/// What one reactor inherits.
#[derive(Debug, Default)]
pub(crate) struct InheritedPart {
    /// Its associations.
    pub controllers: Vec<InheritedController>,
    /// Their queues.
    pub queues: Vec<InheritedQueue>,
    /// What commands and orphans may still change, the oldest first.
    pub carried: Vec<CarriedSpan>,
    /// Machines' clients.
    pub machines: Vec<NewMachine>,
}

/// All that goes on, and what doesn't.
#[derive(Debug, Default)]
pub(crate) struct Inheritance {
    /// By reactor.
    pub parts: Vec<InheritedPart>,
    /// Connections that had not yet said who they are: the listener's again.
    pub handshakes: Vec<(u64, Arc<OwnedFd>)>,
    /// Connections that can't go on. They are shut down after `Resume`, not before.
    pub closed: Vec<(u64, Arc<OwnedFd>, Closing)>,
    /// The dead engine waited itself for something that has no record: nothing is served before the
    /// fences have passed.
    pub after_fence: bool,
    /// Which devices the dead engine served, by index: the word `served` of its records. From the others it
    /// still waited for what is older than itself, so its successor does too.
    pub served: Vec<u64>,
    /// Queues in `parts`.
    pub queues: u32,
    /// Their commands.
    pub commands: u32,
}
