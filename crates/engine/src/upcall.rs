//! Messages from a reactor to the control thread. **Not here:** the other direction
//! ([`crate::reactor::mailbox`]).

use crate::lane::LaneIndex;
use forebay_device::Errno;
use forebay_xlate::boundary::message::{ExportId, ReserveAsk, ReserveToken};
use forebay_xlate::{ExtentRange, VolumeId};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Completes the text "its machine was disconnected: ...".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Closing(pub &'static str);

/// The daemon holds it too.
#[derive(Clone, Debug)]
pub struct Deposit {
    /// For this client.
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
    CommitWanted {
        volume: VolumeId,
        /// Must be durable.
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
    /// No command waits for it now.
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
    /// Connections and commands that the change forbids have ended,
    ExportSettled {
        request: u64,
        /// except those at devices.
        at_devices: u32,
    },
    LaneGone {
        lane: LaneIndex,
    },
    /// Its records are freed.
    SocketGone(u64),
    /// The daemon is to keep and acknowledge them.
    Deposits(u64, Vec<Deposit>),
    /// No longer needed.
    Withdrawn(u64, Vec<u32>),
    /// Its last command has ended.
    MachineLeft(u64, ExportId, Closing),
    /// For the operator.
    MachineRefused(ExportId, String),
    Stopped,
}
