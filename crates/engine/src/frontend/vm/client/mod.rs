//! What a frontend has of its client: memory, descriptors, interrupts, the machine file.
//!
//! **Design.** What is changed here is recorded in the machine file ([`super::file`]) with the number of the
//! message that is being carried out, so that a successor can take it back and carry the message out again.
//! What is taken away (memory, descriptors) is let go of only when the message is over, and elsewhere
//! ([`super::closer`]).
//!
//! What of its memory the ring knows is in [`known`].
//!
//! **Not here:** the client's socket and its messages ([`super::talk`]), what messages mean
//! ([`super::protocol`]).

mod interrupts;
mod known;

use self::interrupts::Interrupts;
use self::known::Registered;
pub(crate) use self::known::{MAX_REGISTERED, MAX_REGISTERED_ENTRIES};
use super::closer::Closer;
use super::file::{ClientRegion, MAX_SLOTS, MachineFile, MessageStage};
use super::protocol::{Closing, Deposit};
use super::registered::Asker;
use super::signal::Signals;
use crate::core::{CommandRef, Core, FrontendIndex, Owner};
use crate::lane::LaneIndex;
use crate::upcall::Upcall;
use forebay_guest::{GuestMemory, Limits, MapError, Mapping, NewRegion, Retired};
use forebay_xlate::boundary::message::ExportConfig;
use forebay_xlate::boundary::region::bump;
use rustix::event::epoll;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

/// The longest message, in bytes.
pub(crate) const MAX_MESSAGE_BYTES: usize = 64 * 1024 + 64;
/// Descriptors that come with one message.
pub(crate) const MAX_DESCRIPTORS: usize = 32;
/// How long a message may take.
pub(crate) const MESSAGE_LIMIT_NS: u64 = 30_000_000_000;
/// Refusals of one client that become events.
const MAX_TOLD: u32 = 8;
/// Deposits that a client may have at once.
pub(crate) const MAX_DEPOSITS: usize = 1024;

/// See the module's text.
pub(crate) struct Client {
    /// The socket's number.
    pub socket: u64,
    /// The message's answer: bytes, put here by the frontend; empty: there is none.
    pub reply: Vec<u8>,
    /// What goes with it.
    pub reply_descriptor: Option<Arc<OwnedFd>>,
    /// A message of the protocol's own, put here when there is none: sent as soon as no answer is under way.
    pub request: ClientRequest,
    /// What it says is looked at: no message of its is under way. Said before each [`super::protocol::Protocol::tick`].
    pub is_heard: bool,
    pub(super) export: Arc<ExportConfig>,
    pub(super) lane: Option<LaneIndex>,
    pub(super) file: MachineFile,
    pub(super) memory: GuestMemory,
    /// What was taken away, and may still be used; whether there is any.
    retired: Retired,
    retires: bool,
    /// The lane that it had from the beginning.
    pub(super) home: Option<LaneIndex>,
    pub(super) deposits: BTreeMap<u32, Arc<OwnedFd>>,
    slots: Box<[Option<Arc<OwnedFd>>]>,
    pub(super) interrupts: Interrupts,
    /// Where it is among the clients of its reactor.
    place: ClientPlace,
    pub(super) closing: Option<Closing>,
    /// The newest deposit of our own that the daemon has yet to acknowledge.
    pub(super) awaits_deposit: Option<u32>,
    /// Messages for the control thread.
    pub(super) upcalls: Vec<Upcall>,
    /// Refusals that became events.
    told: u32,
    /// Deposits may have become unused.
    changed: bool,
    /// Something of a dead engine may still be at its memory.
    pub(super) inherited: bool,
    /// What of its memory the ring knows.
    registered: Vec<Registered>,
}

/// A message of a protocol's own to its client.
#[derive(Default)]
pub(crate) struct ClientRequest {
    /// The message; empty: there is none.
    pub bytes: Vec<u8>,
    /// Its number, another for each: what a successor knows it by ([`MachineFile::asked`]).
    pub number: u64,
    /// So much of it is sent.
    pub(super) sent: usize,
}

/// Where a client is among those of its reactor.
pub(super) struct ClientPlace {
    /// The frontend.
    pub frontend: FrontendIndex,
    /// Its number, and which use of that number it is.
    pub index: u32,
    pub generation: u16,
    /// Where its descriptors are watched.
    pub epoll: Arc<OwnedFd>,
    /// Lets go of what it had.
    pub closer: Closer,
    /// Has its memory registered, if it is to be.
    pub asker: Option<Asker>,
}

impl ClientPlace {
    /// The epoll key of the client's socket (0) or of what it watches (its slot + 1).
    fn key(&self, what: usize) -> u64 {
        super::key(self.frontend, self.index, self.generation, what)
    }
}

impl Client {
    /// One that has said nothing yet.
    pub(super) fn new(
        socket: u64,
        export: Arc<ExportConfig>,
        lane: Option<LaneIndex>,
        file: MachineFile,
        place: ClientPlace,
    ) -> Self {
        Self {
            socket,
            reply: Vec::new(),
            request: ClientRequest::default(),
            is_heard: true,
            reply_descriptor: None,
            export,
            lane,
            file,
            memory: GuestMemory::new(LIMITS),
            retired: Retired::default(),
            retires: false,
            home: lane,
            deposits: BTreeMap::new(),
            slots: (0..MAX_SLOTS).map(|_| None).collect(),
            interrupts: Interrupts::default(),
            place,
            closing: None,
            awaits_deposit: None,
            upcalls: Vec::new(),
            told: 0,
            changed: false,
            inherited: false,
            registered: Vec::new(),
        }
    }

    /// Its lane, and when its export is removed the one that it had, unless that is another's now.
    #[inline]
    pub(super) fn own_lane(&self, core: &Core) -> Option<LaneIndex> {
        let is_own = |lane: &LaneIndex| {
            (core.lane(*lane)).is_some_and(|lane| lane.export.export == self.export.export)
        };
        self.lane.or_else(|| self.home.filter(is_own))
    }

    /// Takes up what a dead engine's client had: its memory is mapped again, its descriptors are in their
    /// slots. What it had of a message that was not answered is taken back first. `again`: that message will be
    /// carried out again, so a slot that it gave something that was not deposited yet is empty.
    ///
    /// # Errors
    /// Why it can't go on.
    pub(super) fn inherit(
        &mut self,
        deposits: BTreeMap<u32, Arc<OwnedFd>>,
        again: bool,
    ) -> Result<(), Closing> {
        self.inherited = true;
        self.changed = true;
        self.deposits = deposits;
        let regions: Vec<(usize, ClientRegion)> = self.file.regions().collect();
        for (_, region) in regions {
            let fd = match region.deposit {
                Some(number) => Some(self.deposits.get(&number).ok_or(NOT_DEPOSITED)?),
                None => None,
            };
            let mapped = self.memory.map(&NewRegion {
                guest_address: region.address,
                user_address: region.word,
                len_bytes: region.len,
                writable: region.writable,
                file: fd.map(|fd| (fd.as_fd(), region.offset)),
            });
            mapped.map_err(|_| Closing("its memory can't be mapped again"))?;
        }
        for slot in 0..MAX_SLOTS {
            let Some(number) = self.file.slot(slot) else {
                continue;
            };
            match self.deposits.get(&number) {
                Some(fd) => self.slots[slot] = Some(fd.clone()),
                None if again => _ = self.file.set_slot(slot, None),
                None => return Err(NOT_DEPOSITED),
            }
        }
        self.have_registered(None);
        Ok(())
    }

    /// Whether a dead engine's commands may still be at its memory; when its export is removed, too.
    pub(crate) fn may_be_touched(&self, core: &Core) -> bool {
        self.home
            .is_some_and(|lane| core.carried.may_touch_memory_of(lane))
    }

    /// Which use of its place it is.
    pub(super) fn generation(&self) -> u16 {
        self.place.generation
    }

    /// Has other events of its socket told.
    pub(super) fn watch_socket(&self, fd: &OwnedFd, flags: epoll::EventFlags) {
        let data = epoll::EventData::new_u64(self.place.key(0));
        let _ = epoll::modify(&*self.place.epoll, fd, data, flags);
    }

    /// Lets go of everything elsewhere: mappings before their files.
    pub(super) fn end(mut self) {
        // Whoever is still about to hold some of it sees that it is over.
        let gone = self.memory.unmap_all();
        let closer = self.place.closer;
        closer.close((gone, self.retired, self.file));
        closer.close_all(self.deposits.into_values());
        closer.close_all(self.slots.into_iter().flatten());
        closer.close_all(self.reply_descriptor);
    }

    /// Its export.
    #[inline]
    pub(crate) fn export(&self) -> &ExportConfig {
        &self.export
    }

    /// Its export's lane; none when the export is removed.
    #[inline]
    pub(crate) fn lane(&self) -> Option<LaneIndex> {
        self.lane
    }

    /// Who gets a command's result, by the frontend's own number for it.
    #[inline]
    pub(crate) fn owner(&self, slot: u16) -> Owner {
        Owner {
            frontend: self.place.frontend,
            conn: self.place.index,
            conn_generation: u32::from(self.place.generation),
            slot,
        }
    }

    /// How a command is known while the core works on it: its frontend's number for it.
    #[inline]
    pub(crate) fn command_ref(&self, lane: LaneIndex, slot: u16) -> CommandRef {
        CommandRef::machine(lane.0, slot)
    }

    /// The machine file, for its area ([`MachineFile::area`]).
    #[inline]
    pub(crate) fn file(&self) -> &MachineFile {
        &self.file
    }

    /// Its memory.
    #[inline]
    pub(crate) fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Closes it at the end of this turn's work for it.
    pub(crate) fn fail(&mut self, why: Closing) {
        self.closing.get_or_insert(why);
    }

    /// Makes an event of a refusal. Each client gets a few of these, as it may ask for ever.
    pub(crate) fn tell_refused(&mut self, why: impl FnOnce() -> String) {
        if self.told < MAX_TOLD {
            self.told += 1;
            let told = Upcall::MachineRefused(self.export.export, why());
            self.upcalls.push(told);
        }
    }

    fn message_number(&self) -> u64 {
        self.file.message().0
    }

    /// Adds a region of its memory. Only while a message is carried out; so is all that follows.
    /// Without a deposit it is known and can't be reached. `word`: the frontend's (vhost: where it begins for the client).
    ///
    /// # Errors
    /// Why not; nothing is changed.
    pub(crate) fn map(
        &mut self,
        deposit: Option<&Deposit>,
        address: u64,
        len: u64,
        offset: u64,
        writable: bool,
        word: u64,
    ) -> Result<(), MapError> {
        self.memory.map(&NewRegion {
            guest_address: address,
            user_address: word,
            len_bytes: len,
            writable,
            file: deposit.map(|deposit| (deposit.fd.as_fd(), offset)),
        })?;
        let record = ClientRegion {
            address,
            len,
            offset,
            deposit: deposit.map(|deposit| deposit.number),
            writable,
            word,
        };
        if self
            .file
            .add_region(self.message_number(), &record)
            .is_none()
        {
            if let Some(retired) = self.memory.unmap(address, len) {
                self.place.closer.close(retired);
            }
            let limit = super::file::MAX_REGIONS;
            return Err(MapError::TooMany { limit });
        }
        self.have_registered(Some(address));
        Ok(())
    }

    /// Replaces all regions by these ([`Client::map`] says what each is).
    ///
    /// # Errors
    /// Why not; nothing is changed.
    pub(crate) fn replace_memory(
        &mut self,
        regions: &[(Option<&Deposit>, ClientRegion)],
    ) -> Result<(), MapError> {
        let new: Vec<NewRegion<'_>> = (regions.iter())
            .map(|(deposit, region)| NewRegion {
                guest_address: region.address,
                user_address: region.word,
                len_bytes: region.len,
                writable: region.writable,
                file: deposit.map(|deposit| (deposit.fd.as_fd(), region.offset)),
            })
            .collect();
        let retired = self.memory.replace(&new)?;
        self.retire(retired);
        let message = self.message_number();
        let old: Vec<usize> = self.file.regions().map(|(at, _)| at).collect();
        for at in old {
            self.file.take_region(message, at);
        }
        for (deposit, region) in regions {
            let record = ClientRegion {
                deposit: deposit.map(|deposit| deposit.number),
                ..*region
            };
            // Twice as many fit as there may be.
            if self.file.add_region(message, &record).is_none() {
                self.fail(Closing("it has more memory regions than can be recorded"));
            }
        }
        self.have_registered(None);
        Ok(())
    }

    /// Takes away the regions that lie whole in a range; how many. `None`, and nothing is changed: it
    /// begins or ends inside of one. The message's answer waits until nothing uses them.
    pub(crate) fn unmap(&mut self, address: u64, len: u64) -> Option<usize> {
        let retired = self.memory.unmap(address, len)?;
        let count = retired.regions();
        self.retire(retired);
        let message = self.message_number();
        let last = address + (len - 1);
        let gone: Vec<usize> = (self.file.regions())
            .filter(|(_, r)| r.address >= address && r.address <= last)
            .map(|(at, _)| at)
            .collect();
        for at in gone {
            self.file.take_region(message, at);
        }
        Some(count)
    }

    /// Takes all regions away.
    pub(crate) fn unmap_all(&mut self) {
        let retired = self.memory.unmap_all();
        self.retire(retired);
        let message = self.message_number();
        let gone: Vec<usize> = self.file.regions().map(|(at, _)| at).collect();
        for at in gone {
            self.file.take_region(message, at);
        }
    }

    fn retire(&mut self, retired: Retired) {
        self.retired.and(retired);
        self.retires = true;
        self.changed = true;
    }

    /// Whether nothing uses what was taken away.
    pub(super) fn is_settled(&mut self, core: &mut Core) -> bool {
        if !self.retires {
            return true;
        }
        // Nor a dead engine.
        let dead = self.inherited && self.may_be_touched(core);
        let registered = &self.registered;
        let known = |mapping: &Arc<Mapping>| {
            let of = |r: &&Registered| r.mapping.as_ptr() == Arc::as_ptr(mapping);
            registered.iter().filter(of).count()
        };
        if dead || !self.retired.is_free_but_for(known) {
            if let Some(lane) = self.lane {
                core.begin_owing(lane);
            }
            return false;
        }
        self.retires = false;
        if !self.registered.is_empty() {
            let retired = std::mem::take(&mut self.retired);
            let is_one = |gone: &Weak<Mapping>| {
                let mut mappings = retired.mappings().iter();
                mappings.any(|mapping| Arc::as_ptr(mapping) == gone.as_ptr())
            };
            self.unregister(core, is_one);
            self.retired = retired;
        }
        // To unmap much takes its time.
        self.place.closer.close(std::mem::take(&mut self.retired));
        true
    }

    /// What a slot holds.
    #[inline]
    pub(crate) fn held(&self, slot: usize) -> Option<BorrowedFd<'_>> {
        Some(self.slots.get(slot)?.as_ref()?.as_fd())
    }

    /// The same as a deposit.
    pub(crate) fn held_deposit(&self, slot: usize) -> Option<Deposit> {
        let fd = self.slots.get(slot)?.clone()?;
        let number = self.file.slot(slot)?;
        Some(Deposit { number, fd })
    }

    /// Keeps a deposit in a slot of the frontend's choice ([`MAX_SLOTS`]), instead of what
    /// was there; `None` empties it. A descriptor may be in several slots. Survives the engine. False: there is
    /// no such slot.
    pub(crate) fn hold(&mut self, slot: usize, deposit: Option<&Deposit>) -> bool {
        self.unwatch(slot);
        let Some(place) = self.slots.get_mut(slot) else {
            return false;
        };
        if let Some(old) = std::mem::replace(place, deposit.map(|deposit| deposit.fd.clone())) {
            // What was raised for the old one is rung at the new one.
            self.place.closer.close_all([old]);
        }
        self.changed = true;
        self.file
            .set_slot(slot, deposit.map(|deposit| deposit.number))
    }

    /// Deposits a descriptor of our own, that a successor needs or that the answer carries. The message's
    /// answer waits for the daemon. `None`: there are too many.
    pub(crate) fn deposit_own(&mut self, fd: OwnedFd) -> Option<Deposit> {
        let deposit = self.deposit(Arc::new(fd))?;
        self.upcalls
            .push(Upcall::Deposits(self.socket, vec![deposit.clone()]));
        self.awaits_deposit = Some(deposit.number);
        Some(deposit)
    }

    /// Gives a descriptor a number.
    pub(super) fn deposit(&mut self, fd: Arc<OwnedFd>) -> Option<Deposit> {
        if self.deposits.len() >= MAX_DEPOSITS {
            return None;
        }
        let number = self.file.take_deposit()?;
        self.deposits.insert(number, fd.clone());
        self.changed = true;
        Some(Deposit { number, fd })
    }

    /// A message is over: deposits that nothing names are withdrawn.
    pub(super) fn withdraw_unused(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let regions = self.file.regions().filter_map(|(_, r)| r.deposit);
        let mut used: BTreeSet<u32> = regions.collect();
        used.extend((0..MAX_SLOTS).filter_map(|slot| self.file.slot(slot)));
        let unused: Vec<u32> = self
            .deposits
            .keys()
            .copied()
            .filter(|n| !used.contains(n))
            .collect();
        if unused.is_empty() {
            return;
        }
        let fds: Vec<Arc<OwnedFd>> = unused
            .iter()
            .filter_map(|n| self.deposits.remove(n))
            .collect();
        self.place.closer.close_all(fds);
        self.upcalls.push(Upcall::Withdrawn(self.socket, unused));
    }

    /// Rings the eventfd in a slot, at the end of the turn, once; nothing if there is none.
    #[inline]
    pub(crate) fn raise(&mut self, slot: usize) {
        self.interrupts.raise(slot);
    }

    /// Hands on what was raised.
    pub(super) fn flush(&mut self, core: &Core, signals: &mut Signals) {
        let mut count = 0;
        self.interrupts.drain(|slot| {
            if let Some(Some(fd)) = self.slots.get(slot) {
                signals.raise(fd.as_fd());
                count += 1;
            }
        });
        if let Some(lane) = self.lane.and_then(|lane| core.lane(lane)) {
            bump(&lane.record().interrupts, count);
        }
    }

    /// Has [`super::protocol::Protocol::ready`] called when the eventfd in a slot is rung. It need not be
    /// read: each ring is told of once. False: it can't be watched.
    pub(crate) fn watch(&mut self, slot: usize) -> bool {
        let Some(Some(fd)) = self.slots.get(slot) else {
            return false;
        };
        let data = epoll::EventData::new_u64(self.place.key(slot + 1));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&*self.place.epoll, fd, data, flags).is_ok()
    }

    /// No longer. What a slot gets instead is not watched either.
    pub(crate) fn unwatch(&mut self, slot: usize) {
        if let Some(Some(fd)) = self.slots.get(slot) {
            let _ = epoll::delete(&*self.place.epoll, fd);
        }
    }

    /// It is gone: nothing is rung or watched any more.
    pub(super) fn leave(&mut self) {
        for slot in 0..MAX_SLOTS {
            self.unwatch(slot);
        }
        self.interrupts = Interrupts::default();
    }

    /// Notes how far the present message is.
    pub(super) fn stage(&self, stage: MessageStage) {
        self.file.set_message(self.message_number(), stage);
    }
}

/// Of the process's addresses, one client takes but a part.
pub(crate) const LIMITS: Limits = Limits {
    regions: 256,
    bytes: 1 << 40,
};

const NOT_DEPOSITED: Closing = Closing("a descriptor of its was not deposited");
