//! The trait of a VM protocol: NVMe over vfio-user, and vhost-user-blk.
//!
//! [`super::Vms`] has the sockets, deposits, VM files and interrupts; a [`Protocol`] has the
//! messages' meaning and the rings. Whatever a successor must know is in the VM file
//! ([`VmFile::area`](super::file::VmFile::area)) *before* the client can see its effect.
//!
//! **The message rule.** A successor may handle a message again after a death at any instruction of
//! [`Protocol::message`] or [`Protocol::later`]. Effects of [`Client::map`], [`Client::unmap`] and
//! their like are undone first. The frontend's own area is not, so store only idempotent values
//! there, no toggles or counters.
//!
//! [`Protocol::poll`], [`Protocol::done`] and [`Protocol::arm`] do not allocate, lock, log or
//! block.

use super::client::Client;
use crate::core::{Core, DoneIo};
pub(crate) use crate::upcall::{Closing, DepositedFd};

pub(crate) const UNSHARED: &str = "its memory is not shared with Forebay: start it with share=on (QEMU: -object memory-backend-memfd,share=on; Cloud Hypervisor: --memory shared=on)";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamFrame {
    /// The least bytes needed, from the message's start.
    Need(usize),
    Whole(usize),
}

#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub bytes: &'a [u8],
    pub descriptors: &'a [DepositedFd],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// Carried out. [`Client::reply`] is sent when removed memory is unused and own deposits are
    /// acknowledged.
    Now,
    /// [`Protocol::later`] is called every turn, for at most [`super::client::MESSAGE_LIMIT_NS`].
    /// No other message is taken meanwhile.
    Later,
    Close(Closing),
}

pub(crate) struct Turn<'a> {
    pub core: &'a mut Core,
    pub client: &'a mut Client,
}

pub(crate) trait Protocol {
    /// The length of the message that begins with these bytes (at least one). Called again with
    /// more.
    fn frame(&self, peeked: &[u8]) -> Result<StreamFrame, Closing>;

    /// Whether a message may bring a socket. Descriptors queued in a socket cannot be inspected.
    fn takes_socket(&self, _message: &[u8]) -> bool {
        false
    }

    fn message(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer;

    fn later(&mut self, turn: &mut Turn<'_>) -> Answer;

    /// Reads doorbells and rings, and starts commands; true if anything was done. Called each turn
    /// while [`Protocol::is_active`].
    fn poll(&mut self, turn: &mut Turn<'_>) -> bool;

    /// Whether the driver has queued anything since the last [`Protocol::poll`]. Called often: a
    /// few loads at most.
    fn has_rung(&self) -> bool;

    fn is_active(&self) -> bool;

    fn hung_up(&self) -> Closing {
        super::talk::HUNG_UP
    }

    /// Queues in use, without an Admin queue; for display.
    fn queues(&self) -> usize {
        0
    }

    /// Before a sleep: asks the guest to notify (event indexes, flags), then polls once more.
    /// False: there is work, or nothing would notify (mapped doorbells). The next
    /// [`Protocol::poll`] undoes it.
    fn arm(&mut self, turn: &mut Turn<'_>) -> bool;

    /// The watched descriptor in `slot` ([`Client::watch`]) is readable.
    fn ready(&mut self, turn: &mut Turn<'_>, slot: usize);

    fn done(&mut self, turn: &mut Turn<'_>, done: DoneIo);

    /// Continues after a take-over, from the VM file alone, which is hostile. Recovers
    /// commands in flight (`RecoveredIo::recover_vm`), raises every interrupt and reads every ring. `blamed`:
    /// the slot of the command ([`Client::command_ref`]) that crashed the dead engine; the third
    /// such death fails it. Memory and descriptor slots are already restored.
    fn resume(&mut self, turn: &mut Turn<'_>, blamed: Option<u16>) -> Result<(), Closing>;

    /// The volume grew, or the export changed otherwise ([`Client::lane`]).
    fn changed(&mut self, turn: &mut Turn<'_>);

    /// The export is removed, and no command can start. `true`: the client knows, and has
    /// [`super::REMOVAL_GRACE_NS`] to leave; `false`: close it now.
    fn removed(&mut self, turn: &mut Turn<'_>) -> bool;

    /// The client is gone. Only commands at devices may still access its memory; [`Protocol::done`]
    /// only cleans up.
    fn close(&mut self, turn: &mut Turn<'_>);

    /// Checks time limits: about ten times a second while the reactor is awake, and at
    /// [`Protocol::deadline_ns`].
    fn tick(&mut self, turn: &mut Turn<'_>);

    /// The latest time of the next [`Protocol::tick`], CLOCK_MONOTONIC ns.
    fn deadline_ns(&self) -> Option<u64>;
}
