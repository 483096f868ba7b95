//! What the conversion of a dead engine's state hands to the reactors: one [`InheritedPart`] each.
//! All of it is already in the successor's own region and memory.
//!
//! **Not here:** the conversion itself ([`super::queue`]), and its use (`Frontend::inherit`,
//! `Core::carry`).

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

/// How an inherited command continues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Starts again after the fence of these devices, with the data in its buffer; without a
    /// buffer, it asks the host for data.
    Begin {
        /// Devices it was submitted to.
        fenced: Devices,
    },
    /// Second of a fused pair whose compare has passed: does its write after the fence of these
    /// devices.
    Passed {
        /// Devices it was submitted to.
        fenced: Devices,
    },
    /// The host sends its data, which an R2T asked for.
    Data {
        /// Data received.
        asked: Asked,
        /// R2Ts sent or queued.
        r2ts: u8,
    },
    /// The controller keeps it (an Asynchronous Event Request).
    Kept,
    /// Its answer is among the queue's items.
    Answered,
    /// It killed too many engines: it ends with Internal Error and is not repeated.
    Poisoned,
}

#[derive(Debug)]
pub(crate) struct InheritedCommand {
    pub slot: u16,
    /// Its number on the queue.
    pub number: u64,
    /// As received.
    pub sqe: Sqe,
    /// CLOCK_MONOTONIC when it was taken, ns.
    pub taken_ns: u64,
    /// A data digest was wrong.
    pub damaged: bool,
    pub next: Next,
    /// Its data from the host.
    pub buffer: Option<StagingBuffer>,
}

#[derive(Debug)]
pub(crate) struct InheritedController {
    /// Its slot in the region.
    pub slot: u32,
    /// Its controller id, which stays taken.
    pub association: Association,
    pub target: ListenerTarget,
    /// The export's lane.
    pub lane: Option<LaneIndex>,
    /// The state that its host knows.
    pub controller: Box<Controller>,
    /// Our address, as the host reached it.
    pub local: SocketAddr,
    /// Namespace size last reported to the host.
    pub blocks: u64,
}

#[derive(Debug)]
pub(crate) struct InheritedQueue {
    /// Its slot in the region.
    pub queue: u32,
    /// Index of its association in [`InheritedPart::controllers`].
    pub controller: usize,
    /// Its constants in the region, with its socket number.
    pub constants: QueueConstants,
    pub fd: Arc<OwnedFd>,
    /// Number of commands taken.
    pub number: u64,
    /// Stream position up to which PDUs are taken.
    pub taken: u64,
    /// Bytes that are taken but still in the socket.
    pub in_socket: u64,
    pub keep: Keep,
    /// Bytes received after `taken`, in the first buffer of `keep`.
    pub kept_bytes: u32,
    /// The data transfer that the position is in.
    pub data: Option<InData>,
    pub list: HeaderList,
    /// Data to send, from place 0 of the list on.
    pub items: Vec<(Item, Option<StagingBuffer>)>,
    /// Bytes of the first item already sent.
    pub skip_bytes: u64,
    /// Position of the transmitted stream after the last item.
    pub published: u64,
    /// Ordered by number.
    pub commands: Vec<InheritedCommand>,
}

#[derive(Debug, Default)]
pub(crate) struct InheritedPart {
    pub controllers: Vec<InheritedController>,
    pub queues: Vec<InheritedQueue>,
    /// Spans that commands and orphans may still change, oldest first.
    pub carried: Vec<CarriedSpan>,
    pub machines: Vec<NewMachine>,
}

#[derive(Debug, Default)]
pub(crate) struct Inheritance {
    pub parts: Vec<InheritedPart>,
    /// Unfinished handshakes, which go back to the listener.
    pub handshakes: Vec<(u64, Arc<OwnedFd>)>,
    /// Connections that cannot continue. They are shut down only after `Resume`.
    pub closed: Vec<(u64, Arc<OwnedFd>, Closing)>,
    /// The dead engine itself waited for an unrecorded operation: nothing is served before the
    /// fences.
    pub after_fence: bool,
    /// By device index: the word `served` of the dead engine's records. It still waited for the
    /// fence of the other devices, so its successor does too.
    pub served: Vec<u64>,
    /// Queues in `parts`.
    pub queues: u32,
    /// Commands of these queues.
    pub commands: u32,
}
