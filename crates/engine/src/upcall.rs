//! Messages from a reactor to the control thread: plain values, in order. **Not here:** the other
//! direction ([`crate::reactor::mailbox`]).

use crate::lane::LaneIndex;
use forebay_device::Errno;
use forebay_xlate::boundary::message::{ExportId, ReserveAsk, ReserveToken};
use forebay_xlate::{ExtentRange, VolumeId};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Why a client's socket is closed; completes the text "its machine was disconnected: ...".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Closing(pub &'static str);

/// A descriptor that came with a message. The daemon holds it too.
#[derive(Clone, Debug)]
pub struct Deposit {
    /// Its number, for this client.
    pub number: u32,
    /// Unchecked: the frontend determines its type.
    pub fd: Arc<OwnedFd>,
}

#[derive(Debug)]
pub enum Upcall {
    /// A command found no grant.
    Fault {
        volume: VolumeId,
        extent: u64,
        write: bool,
    },
    /// A command waits for a commit.
    CommitWanted {
        volume: VolumeId,
        /// The sequence that must be durable.
        sequence: u64,
    },
    /// A tenant deallocates.
    Release {
        /// Index of the command.
        io: u32,
        /// Its slot's generation.
        generation: u32,
        volume: VolumeId,
        range: ExtentRange,
    },
    /// A release has waited too long: give it up, unless the owner has begun it.
    AbandonRelease {
        io: u32,
        generation: u32,
    },
    /// A host changes a volume's reservations.
    Reserve(ReserveAsk),
    /// No command waits for this change now.
    ReserveGone(VolumeId, ReserveToken),
    /// This reactor has drained a revoke.
    Drained {
        revoke: u64,
    },
    /// All commands that were in flight at the job's request to settle have ended.
    Settled {
        job: u64,
    },
    /// The internal lane ended a job.
    JobDone {
        job: u64,
        error: Option<Errno>,
    },
    /// Connections and commands that an export's change forbids have ended.
    ExportSettled {
        /// From the post.
        request: u64,
        /// Their commands that are still at devices.
        at_devices: u32,
    },
    LaneGone {
        lane: LaneIndex,
    },
    /// A connection's socket is shut down and its records are freed.
    SocketGone(u64),
    /// A VM's client has sent descriptors: the daemon is to keep and acknowledge them.
    Deposits(u64, Vec<Deposit>),
    /// The client needs these deposits no longer.
    Withdrawn(u64, Vec<u32>),
    /// A VM's client has left, and its last command has ended.
    MachineLeft(u64, ExportId, Closing),
    /// A VM's request was refused; the text is for the operator.
    MachineRefused(ExportId, String),
    Stopped,
}
