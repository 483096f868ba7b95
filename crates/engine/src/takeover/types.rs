//! The conversion's result for the reactors, one [`InheritedPart`] each; all data is already in the
//! successor's own region and memory. **Not here:** the conversion ([`super::queue`]), and its use
//! (`Frontend::inherit`, `RecoveredIo::recover`).

use super::closing::Closing;
use crate::associations::Association;
use crate::core::staging::StagingBuffer;
use crate::core::{FenceSet, RecoveredSpan};
use crate::frontend::vm::NewVm;
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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Starts again after the fence of these devices. Without buffer, it asks the host for data.
    Begin { fenced: FenceSet },
    /// A fused pair's second whose compare has passed: writes after the fence.
    Passed { fenced: FenceSet },
    /// The host sends data for an R2T.
    Data {
        /// Data received.
        asked: Asked,
        /// Sent or queued.
        r2ts: u8,
    },
    /// The controller keeps it (an Asynchronous Event Request).
    Kept,
    /// Its answer is among the queue's items.
    Answered,
    /// It killed too many engines: ends with Internal Error.
    Poisoned,
}

#[derive(Debug)]
pub(crate) struct InheritedCommand {
    pub slot: u16,
    /// Position in the queue's order.
    pub number: u64,
    /// As received.
    pub sqe: Sqe,
    /// When it was taken, CLOCK_MONOTONIC, ns.
    pub taken_ns: u64,
    /// A data digest was wrong.
    pub damaged: bool,
    pub next: Next,
    pub buffer: Option<StagingBuffer>,
}

#[derive(Debug)]
pub(crate) struct InheritedController {
    pub slot: u32,
    /// Its controller id stays taken.
    pub association: Association,
    pub target: ListenerTarget,
    pub lane: Option<LaneIndex>,
    pub controller: Box<Controller>,
    /// Our address, as the host reached it.
    pub local: SocketAddr,
    /// Namespace size, as last reported to the host.
    pub blocks: u64,
}

#[derive(Debug)]
pub(crate) struct InheritedQueue {
    pub queue: u32,
    /// Index of its association in [`InheritedPart::controllers`].
    pub controller: usize,
    pub constants: QueueConstants,
    pub fd: Arc<OwnedFd>,
    /// Commands taken.
    pub number: u64,
    /// Position up to which PDUs are taken.
    pub taken: u64,
    /// Bytes taken but still in the socket.
    pub in_socket: u64,
    pub keep: Keep,
    /// Bytes received after `taken`, in `keep`.
    pub kept_bytes: u32,
    pub data: Option<InData>,
    pub list: HeaderList,
    /// Items to send, from place 0 of the list on.
    pub items: Vec<(Item, Option<StagingBuffer>)>,
    /// Bytes of the first item already sent.
    pub skip_bytes: u64,
    /// Transmit position after the last item.
    pub published: u64,
    /// Ordered by number.
    pub commands: Vec<InheritedCommand>,
}

#[derive(Debug, Default)]
pub(crate) struct InheritedPart {
    pub controllers: Vec<InheritedController>,
    pub queues: Vec<InheritedQueue>,
    pub recovered: Vec<RecoveredSpan>,
    pub vms: Vec<NewVm>,
}

#[derive(Debug, Default)]
pub(crate) struct Inheritance {
    pub parts: Vec<InheritedPart>,
    pub handshakes: Vec<(u64, Arc<OwnedFd>)>,
    /// Connections that end, but only after `Resume`.
    pub closed: Vec<(u64, Arc<OwnedFd>, Closing)>,
    /// The dead engine waited for an unrecorded operation: nothing is served before the fences.
    pub after_fence: bool,
    /// By device: the dead engine's word `served`. It still waited for the others' fences.
    pub served: Vec<u64>,
    pub queues: u32,
    pub commands: u32,
}
