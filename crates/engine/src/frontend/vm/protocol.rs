//! What a kind of machine frontend must do: NVMe over vfio-user, and vhost-user-blk.
//!
//! **Design.** [`super::Vms`] has the sockets, deposits, machine files and interrupts; a
//! [`Protocol`] has the protocol and the rings. It is told what came and what ended, by one thread, the
//! reactor's; it never sees its own client's socket. All that it needs is in a [`Turn`].
//! Everything that a successor must know lies in the machine file ([`MachineFile::area`](super::file::MachineFile::area)) *before* it has an
//! effect that the client sees.
//!
//! **The message rule.** A message may be handled again from its start by a successor, after a death at any
//! instruction of [`Protocol::message`] or [`Protocol::later`]: what [`Client::map`], [`Client::unmap`] and
//! their like did for it is undone first, what the frontend stored in its own area is not; so a frontend
//! stores there what it would store again (plain values, no toggles or counters).
//!
//! **I/O path**: [`Protocol::poll`], [`Protocol::done`], [`Protocol::arm`] do not allocate, lock, log
//! or block. **Not here:** what is common to all clients ([`super::client`]).

use super::client::Client;
use crate::core::{Core, DoneIo};
pub(crate) use crate::upcall::{Closing, Deposit};

/// The reason for a machine with private memory.
pub(crate) const UNSHARED: &str = "its memory is not shared with Forebay: start it with share=on (QEMU: -object memory-backend-memfd,share=on; Cloud Hypervisor: --memory shared=on)";

/// What the bytes at the begin of a client's stream are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamFrame {
    /// Not yet a whole message: this many bytes, at least, are needed from its begin on.
    Need(usize),
    /// A whole message of this many bytes.
    Whole(usize),
}

/// A message, checked for nothing but its length.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    /// From its begin to its end.
    pub bytes: &'a [u8],
    /// What came with it, at most [`super::client::MAX_DESCRIPTORS`].
    pub descriptors: &'a [Deposit],
}

/// What becomes of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// It is carried out. What is in [`Client::reply`], if anything, is sent as soon as nothing uses the
    /// memory that it took away, and the deposits that it made are acknowledged.
    Now,
    /// It waits: [`Protocol::later`] is asked every turn, for at most
    /// [`super::client::MESSAGE_LIMIT_NS`]. No other message is taken meanwhile.
    Later,
    /// The client can't go on.
    Close(Closing),
}

/// What a frontend works with.
pub(crate) struct Turn<'a> {
    /// Commands: [`Core::start`], [`Core::may_start`], time.
    pub core: &'a mut Core,
    /// Its client: memory, interrupts, machine file, deposits, lane.
    pub client: &'a mut Client,
}

/// See the module's text.
pub(crate) trait Protocol {
    /// How long the message is that begins with these bytes (at least one). Called again with more.
    fn frame(&self, peeked: &[u8]) -> Result<StreamFrame, Closing>;

    /// Whether a message may bring a socket. What may wait in a socket nobody can look at, so it is taken for nothing else.
    fn takes_socket(&self, _message: &[u8]) -> bool {
        false
    }

    /// Carries a message out, or begins to.
    fn message(&mut self, turn: &mut Turn<'_>, message: &Message<'_>) -> Answer;

    /// Goes on with the message that [`Protocol::message`] left for later.
    fn later(&mut self, turn: &mut Turn<'_>) -> Answer;

    /// Looks at doorbells and rings, starts commands. True when anything was done. Called each turn of
    /// the reactor while [`Protocol::is_active`].
    fn poll(&mut self, turn: &mut Turn<'_>) -> bool;

    /// Whether the driver has made something available since the last [`Protocol::poll`]: asked often, and to be no more than
    /// a few loads.
    fn has_rung(&self) -> bool;

    /// Whether there is anything that [`Protocol::poll`] would look at.
    fn is_active(&self) -> bool;

    /// Why a client went that hung up.
    fn hung_up(&self) -> Closing {
        super::talk::HUNG_UP
    }

    /// Queues in use, an Admin queue not counted: for people.
    fn queues(&self) -> usize {
        0
    }

    /// The reactor is about to sleep: asks the guest to ring (event indexes, flags), then looks once
    /// more. False when there is something to do, or when nothing would ring (mapped doorbells).
    /// Undone by the next [`Protocol::poll`].
    fn arm(&mut self, turn: &mut Turn<'_>) -> bool;

    /// A descriptor that it has watched ([`Client::watch`]) is readable, by its slot.
    fn ready(&mut self, turn: &mut Turn<'_>, slot: usize);

    /// A command of its ([`Client::owner`]) ended.
    fn done(&mut self, turn: &mut Turn<'_>, done: DoneIo);

    /// Goes on after a take-over, from the machine file alone, which is hostile: checks it, has what was
    /// in flight carried (`Core::carry`) and begun again, raises every interrupt, looks at every ring. `blamed`: the
    /// slot of the command ([`Client::command_ref`]) that the dead engine crashed over; the third such death
    /// ends that command with an error. Memory is mapped and descriptors are in their slots already.
    ///
    /// # Errors
    /// The file is damaged; the client is closed.
    fn resume(&mut self, turn: &mut Turn<'_>, blamed: Option<u16>) -> Result<(), Closing>;

    /// The volume grew, or something else about its export changed ([`Client::lane`]).
    fn changed(&mut self, turn: &mut Turn<'_>);

    /// The export is removed: tells the client if there is a way to. It is given `true` for some
    /// seconds ([`super::REMOVAL_GRACE_NS`]) to go by itself; `false`: it is closed now. No command of its can be started any more.
    fn removed(&mut self, turn: &mut Turn<'_>) -> bool;

    /// The client is gone. Nothing may be read from or written into its memory any more, but by commands
    /// that are at devices. What still comes by [`Protocol::done`] is only put away; afterwards it is dropped.
    fn close(&mut self, turn: &mut Turn<'_>);

    /// Time limits: about ten times a second while the reactor is awake, and at
    /// [`Protocol::deadline_ns`].
    fn tick(&mut self, turn: &mut Turn<'_>);

    /// When [`Protocol::tick`] has something to do at the latest, CLOCK_MONOTONIC ns.
    fn deadline_ns(&self) -> Option<u64>;
}
