//! Messages from a reactor to the control thread. **Not here:** the other direction
//! ([`crate::reactor::mailbox`]).

use crate::lane::LaneIndex;
use forebay_device::Errno;
use forebay_xlate::boundary::message::{ExportId, ReserveAsk, ReserveToken};
use forebay_xlate::{ExtentRange, VolumeId};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Why a client's socket is closed. Completes the text "its machine was disconnected: ...".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Closing(pub &'static str);

/// The daemon holds it too.
#[derive(Clone, Debug)]
pub(crate) struct DepositedFd {
    /// Its number, for this client.
    pub number: u32,
    /// Unchecked: the frontend determines its type.
    pub fd: Arc<OwnedFd>,
}

#[derive(Debug)]
pub(crate) enum Upcall {
    /// A command found no grant.
    Fault {
        volume: VolumeId,
        extent: u64,
        write: bool,
        /// The command writes the whole extent.
        whole: bool,
    },
    CommitWanted {
        volume: VolumeId,
        /// The sequence that must be durable.
        sequence: u64,
    },
    Release {
        io: u32,
        generation: u32,
        volume: VolumeId,
        range: ExtentRange,
    },
    /// Give it up, unless the owner has begun it.
    AbandonRelease {
        io: u32,
        generation: u32,
    },
    Reserve(ReserveAsk),
    /// No command waits for this change now.
    ReserveGone(VolumeId, ReserveToken),
    Drained {
        revoke: u64,
    },
    /// Commands in flight at the request have ended.
    Settled {
        job: u64,
    },
    JobDone {
        job: u64,
        error: Option<Errno>,
    },
    /// An export's change has ended connections and commands that it forbids.
    ExportSettled {
        request: u64,
        /// Those of the commands that are still at devices.
        at_devices: u32,
    },
    LaneGone {
        lane: LaneIndex,
    },
    /// A connection is shut down and its records are freed.
    SocketGone(u64),
    /// The daemon is to keep and acknowledge them.
    Deposits(u64, Vec<DepositedFd>),
    /// The client needs these deposits no longer.
    Withdrawn(u64, Vec<u32>),
    /// A VM's client has left, and its last command has ended.
    VmDetached(u64, ExportId, Closing),
    /// A VM's request was refused; the text is for the operator.
    VmRefused(ExportId, String),
    Stopped,
}
