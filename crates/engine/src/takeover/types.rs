//! What a conversion hands to the reactors.
//!
//! **Design.** One [`Part`] for each reactor: controllers, queues with their commands, and the spans of
//! volumes that carried commands and orphans may still change. Everything in it is already in the
//! successor's own region and memory, under the slots named here.
//!
//! **Not here:** how it is found out ([`super::queue`]) and what becomes of it
//! (`Frontend::inherit`, `Core::carry`).

use super::closing::Closing;
use crate::associations::Association;
use crate::core::{CarriedSpan, Devices};
use crate::door::Target;
use crate::lane::LaneIndex;
use forebay_nvme::Sqe;
use forebay_nvme::controller::ControllerState;
use forebay_nvme::tcp::TcpParams;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How an inherited command goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// From its beginning; its data is in its buffer. After the fence of these devices.
    Begin {
        /// Where it was submitted.
        fenced: Devices,
    },
    /// The host sends its data: so much is there, and this R2T asked for it.
    Data {
        /// Bytes of it.
        received: u32,
        /// The transfer's tag.
        ttag: u16,
    },
    /// Its R2T never went out: it is asked again.
    AskAgain,
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
    /// As it came.
    pub sqe: Sqe,
    /// Its number on the queue.
    pub number: u64,
    /// CLOCK_MONOTONIC when it was taken, ns.
    pub taken_ns: u64,
    /// Engines that died of it.
    pub attempts: u32,
    /// How it goes on.
    pub next: Next,
}

/// An association that goes on.
#[derive(Debug)]
pub(crate) struct InheritedController {
    /// Its slot in the region.
    pub slot: u32,
    /// Its controller id, which stays taken.
    pub association: Association,
    /// What it controls.
    pub target: Target,
    /// The export's lane.
    pub lane: Option<LaneIndex>,
    /// As its host knows it.
    pub state: Box<ControllerState>,
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
    /// Its association's place in [`Part::controllers`].
    pub controller: usize,
    /// Its socket's number and the socket.
    pub socket: u64,
    /// See above.
    pub fd: Arc<OwnedFd>,
    /// What ICReq and ICResp agreed on.
    pub params: TcpParams,
    /// Queue id.
    pub qid: u16,
    /// Entries.
    pub entries: u16,
    /// The host does without SQHD.
    pub no_flow_control: bool,
    /// In the order of their numbers.
    pub commands: Vec<InheritedCommand>,
}

/// What one reactor inherits.
#[derive(Debug, Default)]
pub(crate) struct Part {
    /// Its associations.
    pub controllers: Vec<InheritedController>,
    /// Their queues.
    pub queues: Vec<InheritedQueue>,
    /// What commands and orphans may still change, the oldest first.
    pub carried: Vec<CarriedSpan>,
}

/// All that goes on, and what doesn't.
#[derive(Debug, Default)]
pub(crate) struct Inheritance {
    /// By reactor.
    pub parts: Vec<Part>,
    /// Connections that had not yet said who they are: the door's again.
    pub newcomers: Vec<(u64, Arc<OwnedFd>)>,
    /// Connections that can't go on. They are shut down after `Resume`, not before.
    pub closed: Vec<(u64, Arc<OwnedFd>, Closing)>,
    /// Queues in `parts`.
    pub queues: u32,
    /// Their commands.
    pub commands: u32,
}
