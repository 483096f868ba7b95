//! What a reactor says to the control thread.
//!
//! **Purpose.** The core and the frontends ask the owner and report through one queue.
//! **Design.** Plain values; the reactor's mailbox carries them in order.
//! **Not here:** what the control thread says to a reactor ([`crate::reactor::mailbox`]).

use crate::lane::LaneIndex;
use forebay_device::Errno;
use forebay_xlate::boundary::message::{ExportId, ReserveAsk, ReserveToken};
use forebay_xlate::{ExtentRange, VolumeId};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Why a client's socket is closed, for people: the rest of "its machine was disconnected: ...".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Closing(pub &'static str);

/// A descriptor that came with a message. The daemon has it too.
#[derive(Clone, Debug)]
pub struct Deposit {
    /// Its number, for this client.
    pub number: u32,
    /// The descriptor: whatever the client sent. The frontend finds out what it is.
    pub fd: Arc<OwnedFd>,
}

/// From a reactor to the control thread.
#[derive(Debug)]
pub enum Upcall {
    /// A miss.
    Fault {
        /// Whose.
        volume: VolumeId,
        /// Which extent.
        extent: u64,
        /// For writing.
        write: bool,
    },
    /// A command waits for a commit.
    CommitWanted {
        /// Whose.
        volume: VolumeId,
        /// Up to which.
        sequence: u64,
    },
    /// A tenant deallocates.
    Release {
        /// The command.
        io: u32,
        /// Its slot's generation.
        generation: u32,
        /// Whose.
        volume: VolumeId,
        /// What.
        range: ExtentRange,
    },
    /// A release has waited too long: give it up, unless it is being carried out.
    AbandonRelease {
        /// The command.
        io: u32,
        /// Its slot's generation.
        generation: u32,
    },
    /// A host changes a volume's reservations.
    Reserve(ReserveAsk),
    /// Nobody waits for that any more.
    ReserveGone(VolumeId, ReserveToken),
    /// This reactor has drained a revoke.
    Drained {
        /// Which.
        revoke: u64,
    },
    /// Everything that was in flight here when the request to settle came has ended.
    Settled {
        /// Which job.
        job: u64,
    },
    /// The internal lane ended a job.
    JobDone {
        /// Which.
        job: u64,
        /// How.
        error: Option<Errno>,
    },
    /// What an export's change takes from hosts is taken: their connections are shut and their commands
    /// ended.
    ExportSettled {
        /// From the post.
        request: u64,
        /// Commands of theirs that are not ended: they are at devices.
        at_devices: u32,
    },
    /// A lane is gone from its reactor.
    LaneGone {
        /// Which.
        lane: LaneIndex,
    },
    /// A connection's socket is shut down, and no record is left of it.
    SocketGone(u64),
    /// A machine's client has sent descriptors: the daemon is to keep them, and say so.
    Deposits(u64, Vec<Deposit>),
    /// It has no use for these any more.
    Withdrawn(u64, Vec<u32>),
    /// A machine's client is gone, and its last command is back.
    MachineLeft(u64, ExportId, Closing),
    /// A machine was refused something: what and why, for people.
    MachineRefused(ExportId, String),
    /// The reactor has ended.
    Stopped,
}
