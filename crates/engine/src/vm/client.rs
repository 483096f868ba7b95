//! One client: its socket, its messages in two phases, its memory, descriptors and interrupts.
//!
//! **Design.** A message is *peeked*; its descriptors are deposited with the daemon, and that is waited
//! for; then its intent is noted in the machine file ([`super::file`]), it is carried out, answered, and
//! only then consumed. Which of the last steps were done when an engine died is told by the kernel: the
//! socket's peek offset falls by what is consumed (SO_PEEK_OFF), and it outlives us.
//!
//! **Not here:** what messages mean ([`super::frontend`]).

use super::file::MachineFile;
use super::frontend::{Closing, Deposit};
use super::signal::Signals;
use crate::core::{CommandRef, Owner};
use crate::lane::LaneIndex;
use rustix::event::epoll;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The longest message, in bytes.
pub(crate) const MAX_MESSAGE_BYTES: usize = 64 * 1024 + 64;
/// Descriptors that come with one message.
pub(crate) const MAX_DESCRIPTORS: usize = 32;
/// How long a message may take.
pub(crate) const MESSAGE_LIMIT_NS: u64 = 30_000_000_000;

/// What a frontend knows of its client.
pub(crate) struct Client {
    /// The socket's number.
    pub socket: u64,
    /// The message's answer: bytes, put here by the frontend; empty: there is none.
    pub reply: Vec<u8>,
    /// What goes with it.
    pub reply_descriptor: Option<Arc<OwnedFd>>,
    pub(super) fd: Arc<OwnedFd>,
    pub(super) lane: Option<LaneIndex>,
    pub(super) file: MachineFile,
    pub(super) signals: Signals,
    pub(super) deposits: BTreeMap<u32, Arc<OwnedFd>>,
    pub(super) slots: Box<[Option<Arc<OwnedFd>>]>,
    pub(super) index: u32,
    pub(super) generation: u16,
    pub(super) epoll: Arc<OwnedFd>,
    pub(super) closing: Option<Closing>,
}

impl Client {
    /// Its export's lane; none when the export is removed.
    #[inline]
    pub(crate) fn lane(&self) -> Option<LaneIndex> {
        self.lane
    }

    /// Who gets a command's result, by the frontend's own number for it.
    #[inline]
    pub(crate) fn owner(&self, slot: u16) -> Owner {
        Owner {
            conn: Owner::MACHINE | self.index,
            conn_generation: u32::from(self.generation),
            slot,
        }
    }

    /// The frontend's own area of the machine file ([`MachineFile::area`]).
    #[inline]
    pub(crate) fn file(&self) -> &MachineFile {
        &self.file
    }

    /// Closes it at the end of this turn's work for it.
    pub(crate) fn fail(&mut self, why: Closing) {
        self.closing.get_or_insert(why);
    }

    /// What a slot holds.
    #[inline]
    pub(crate) fn held(&self, slot: usize) -> Option<BorrowedFd<'_>> {
        Some(self.slots.get(slot)?.as_ref()?.as_fd())
    }

    /// Keeps a deposit in a slot of the frontend's choice ([`super::file::MAX_SLOTS`]), instead of what
    /// was there; `None` empties it. A descriptor may be in several slots. Survives the engine.
    pub(crate) fn hold(&mut self, slot: usize, deposit: Option<&Deposit>) -> bool {
        let Some(place) = self.slots.get_mut(slot) else {
            return false;
        };
        *place = deposit.map(|deposit| deposit.fd.clone());
        self.file
            .set_slot(slot, deposit.map(|deposit| deposit.number))
    }

    /// Rings the eventfd in a slot, at the end of the turn; nothing if there is none.
    #[inline]
    pub(crate) fn raise(&mut self, slot: usize) {
        if let Some(Some(fd)) = self.slots.get(slot) {
            self.signals.raise(fd.as_fd());
        }
    }

    /// Has [`super::frontend::Frontend::ready`] called when the eventfd in a slot is rung. It need not be read: each ring is
    /// told of once. False: it can't be watched.
    pub(crate) fn watch(&mut self, slot: usize) -> bool {
        let Some(Some(fd)) = self.slots.get(slot) else {
            return false;
        };
        let data = epoll::EventData::new_u64(super::key(self.index, self.generation, slot + 1));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&*self.epoll, fd, data, flags).is_ok()
    }

    /// No longer. Before the slot gets something else.
    pub(crate) fn unwatch(&mut self, slot: usize) {
        if let Some(Some(fd)) = self.slots.get(slot) {
            let _ = epoll::delete(&*self.epoll, fd);
        }
    }

    /// How a command is known while the core works on it: its frontend's number for it.
    #[inline]
    pub(crate) fn command_ref(&self, lane: LaneIndex, slot: u16) -> CommandRef {
        CommandRef::machine(lane.0, slot)
    }
}
