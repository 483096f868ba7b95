//! A client's memory, descriptors, interrupts and VM file, for its frontend.
//!
//! Each change is recorded in the VM file ([`super::file`]) with the current message's number.
//! So a successor can undo it, and handle the message again. Removed memory and descriptors are
//! released after the message, on another thread ([`super::closer`]). **Not here:** the socket
//! ([`super::talk`]), what messages mean ([`super::protocol`]).

mod interrupts;
mod known;

use self::interrupts::Interrupts;
use self::known::Registered;
pub(crate) use self::known::{MAX_REGISTERED, MAX_REGISTERED_ENTRIES};
use super::closer::Closer;
use super::file::{ClientRegion, MAX_SLOTS, MessageStage, VmFile};
use super::protocol::{Closing, DepositedFd};
use super::registered::Asker;
use super::signal::Signals;
use crate::core::{CommandRef, Core, FrontendIndex, Issuer};
use crate::lane::LaneIndex;
use crate::upcall::Upcall;
use forebay_guest::{GuestMemory, Limits, MapError, Mapping, NewRegion, Retired};
use forebay_xlate::boundary::message::ExportConfig;
use forebay_xlate::boundary::region::bump;
use rustix::event::epoll;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

pub(crate) const MAX_MESSAGE_BYTES: usize = 64 * 1024 + 64;
pub(crate) const MAX_DESCRIPTORS: usize = 32;
pub(crate) const MESSAGE_LIMIT_NS: u64 = 30_000_000_000;
/// Refusals per client that become events.
const MAX_REPORTS: u32 = 8;
pub(crate) const MAX_DEPOSITS: usize = 1024;

pub(crate) struct Client {
    pub socket: u64,
    /// The answer's bytes; empty: no answer.
    pub reply: Vec<u8>,
    pub reply_descriptor: Option<Arc<OwnedFd>>,
    /// The frontend's own request, sent when no answer is in flight.
    pub request: ClientRequest,
    /// No message of the client is in flight. Set before each [`super::protocol::Protocol::tick`].
    pub is_heard: bool,
    pub(super) export: Arc<ExportConfig>,
    pub(super) lane: Option<LaneIndex>,
    pub(super) file: VmFile,
    pub(super) memory: GuestMemory,
    /// Removed memory that may still be in use.
    retired: Retired,
    retires: bool,
    /// The lane at attach; kept after the export's removal.
    pub(super) home: Option<LaneIndex>,
    pub(super) deposits: BTreeMap<u32, Arc<OwnedFd>>,
    slots: Box<[Option<Arc<OwnedFd>>]>,
    pub(super) interrupts: Interrupts,
    place: ClientPlace,
    pub(super) closing: Option<Closing>,
    /// Its own newest deposit that the daemon has yet to acknowledge.
    pub(super) awaits_deposit: Option<u32>,
    pub(super) upcalls: Vec<Upcall>,
    /// Refusals that became events.
    reported: u32,
    /// Some deposits may be unused now.
    changed: bool,
    /// A dead engine's commands may still touch its memory.
    pub(super) inherited: bool,
    registered: Vec<Registered>,
}

#[derive(Default)]
pub(crate) struct ClientRequest {
    /// The bytes; empty: no request.
    pub bytes: Vec<u8>,
    /// A unique number, by which a successor knows it ([`VmFile::asked`]).
    pub number: u64,
    pub(super) sent: usize,
}

pub(super) struct ClientPlace {
    pub frontend: FrontendIndex,
    pub index: u32,
    pub generation: u16,
    pub epoll: Arc<OwnedFd>,
    pub closer: Closer,
    /// Registers its memory, if it may be registered.
    pub asker: Option<Asker>,
}

impl ClientPlace {
    fn key(&self, what: usize) -> u64 {
        super::key(self.frontend, self.index, self.generation, what)
    }
}

impl Client {
    pub(super) fn new(
        socket: u64,
        export: Arc<ExportConfig>,
        lane: Option<LaneIndex>,
        file: VmFile,
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
            reported: 0,
            changed: false,
            inherited: false,
            registered: Vec::new(),
        }
    }

    /// Its lane. After the export's removal: the former lane, unless another export has it now.
    #[inline]
    pub(super) fn own_lane(&self, core: &Core) -> Option<LaneIndex> {
        let is_own = |lane: &LaneIndex| {
            (core.lane(*lane)).is_some_and(|lane| lane.export.export == self.export.export)
        };
        self.lane.or_else(|| self.home.filter(is_own))
    }

    /// Restores a dead engine's client, after undoing an unanswered message. `again`: that message
    /// will be handled again, so a slot whose new descriptor was not deposited stays empty.
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

    /// Whether a dead engine's commands may still touch its memory, even after the export's
    /// removal.
    pub(crate) fn may_be_touched(&self, core: &Core) -> bool {
        self.home
            .is_some_and(|lane| core.recovered.may_touch_memory_of(lane))
    }

    pub(super) fn generation(&self) -> u16 {
        self.place.generation
    }

    pub(super) fn watch_socket(&self, fd: &OwnedFd, flags: epoll::EventFlags) {
        let data = epoll::EventData::new_u64(self.place.key(0));
        let _ = epoll::modify(&*self.place.epoll, fd, data, flags);
    }

    pub(super) fn end(mut self) {
        // Threads that still pin its memory see that it is retired.
        let gone = self.memory.unmap_all();
        let closer = self.place.closer;
        closer.close((gone, self.retired, self.file));
        closer.close_all(self.deposits.into_values());
        closer.close_all(self.slots.into_iter().flatten());
        closer.close_all(self.reply_descriptor);
    }

    #[inline]
    pub(crate) fn export(&self) -> &ExportConfig {
        &self.export
    }

    #[inline]
    pub(crate) fn lane(&self) -> Option<LaneIndex> {
        self.lane
    }

    /// The owner of the command that the frontend numbers `slot`.
    #[inline]
    pub(crate) fn owner(&self, slot: u16) -> Issuer {
        Issuer {
            frontend: self.place.frontend,
            conn: self.place.index,
            conn_generation: u32::from(self.place.generation),
            slot,
        }
    }

    /// The core's name for that command.
    #[inline]
    pub(crate) fn command_ref(&self, lane: LaneIndex, slot: u16) -> CommandRef {
        CommandRef::vm(lane.0, slot)
    }

    #[inline]
    pub(crate) fn file(&self) -> &VmFile {
        &self.file
    }

    #[inline]
    pub(crate) fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Closes it at the end of this turn's work for it.
    pub(crate) fn fail(&mut self, why: Closing) {
        self.closing.get_or_insert(why);
    }

    /// Makes an event of a refusal; their number per client is limited.
    pub(crate) fn report_refused(&mut self, why: impl FnOnce() -> String) {
        if self.reported < MAX_REPORTS {
            self.reported += 1;
            let reported = Upcall::VmRefused(self.export.export, why());
            self.upcalls.push(reported);
        }
    }

    fn message_number(&self) -> u64 {
        self.file.message().0
    }

    /// Adds a memory region. This and the calls below are allowed only while a message is handled.
    /// Without a deposit the region is not accessible. `word` is the frontend's (vhost: the
    /// client's own address). An error changes nothing.
    pub(crate) fn map(
        &mut self,
        deposit: Option<&DepositedFd>,
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

    /// Replaces all regions ([`Client::map`] explains the fields). An error changes nothing.
    pub(crate) fn replace_memory(
        &mut self,
        regions: &[(Option<&DepositedFd>, ClientRegion)],
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
            // The file has twice the room that the limit allows.
            if self.file.add_region(message, &record).is_none() {
                self.fail(Closing("it has more memory regions than can be recorded"));
            }
        }
        self.have_registered(None);
        Ok(())
    }

    /// Removes the regions inside a range, and returns their number. `None`: a region crosses the
    /// border, and nothing is changed. The message's answer waits until the memory is unused.
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

    /// Whether removed memory is unused.
    pub(super) fn is_settled(&mut self, core: &mut Core) -> bool {
        if !self.retires {
            return true;
        }
        // A dead engine may use it, too.
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
        // A large unmapping takes long.
        self.place.closer.close(std::mem::take(&mut self.retired));
        true
    }

    #[inline]
    pub(crate) fn held(&self, slot: usize) -> Option<BorrowedFd<'_>> {
        Some(self.slots.get(slot)?.as_ref()?.as_fd())
    }

    /// What a slot holds, as a deposit.
    pub(crate) fn held_deposit(&self, slot: usize) -> Option<DepositedFd> {
        let fd = self.slots.get(slot)?.clone()?;
        let number = self.file.slot(slot)?;
        Some(DepositedFd { number, fd })
    }

    /// Keeps a deposit in a slot, or empties it with `None`. A descriptor may be in several slots.
    /// It survives the engine. False: no such slot.
    pub(crate) fn hold(&mut self, slot: usize, deposit: Option<&DepositedFd>) -> bool {
        self.unwatch(slot);
        let Some(place) = self.slots.get_mut(slot) else {
            return false;
        };
        if let Some(old) = std::mem::replace(place, deposit.map(|deposit| deposit.fd.clone())) {
            // A pending interrupt of the old eventfd goes to the new one.
            self.place.closer.close_all([old]);
        }
        self.changed = true;
        self.file
            .set_slot(slot, deposit.map(|deposit| deposit.number))
    }

    /// Deposits a descriptor of our own that a successor or the answer needs. The answer waits for
    /// the daemon. `None`: too many deposits.
    pub(crate) fn deposit_own(&mut self, fd: OwnedFd) -> Option<DepositedFd> {
        let deposit = self.deposit(Arc::new(fd))?;
        self.upcalls
            .push(Upcall::Deposits(self.socket, vec![deposit.clone()]));
        self.awaits_deposit = Some(deposit.number);
        Some(deposit)
    }

    pub(super) fn deposit(&mut self, fd: Arc<OwnedFd>) -> Option<DepositedFd> {
        if self.deposits.len() >= MAX_DEPOSITS {
            return None;
        }
        let number = self.file.take_deposit()?;
        self.deposits.insert(number, fd.clone());
        self.changed = true;
        Some(DepositedFd { number, fd })
    }

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

    /// Signals the eventfd in a slot once at the end of the turn, if there is one.
    #[inline]
    pub(crate) fn raise(&mut self, slot: usize) {
        self.interrupts.raise(slot);
    }

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

    /// Calls [`super::protocol::Protocol::ready`] when the eventfd in a slot is signalled
    /// (edge-triggered, need not be read). False: it cannot be watched.
    pub(crate) fn watch(&mut self, slot: usize) -> bool {
        let Some(Some(fd)) = self.slots.get(slot) else {
            return false;
        };
        let data = epoll::EventData::new_u64(self.place.key(slot + 1));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&*self.place.epoll, fd, data, flags).is_ok()
    }

    /// A new descriptor in the slot is not watched either.
    pub(crate) fn unwatch(&mut self, slot: usize) {
        if let Some(Some(fd)) = self.slots.get(slot) {
            let _ = epoll::delete(&*self.place.epoll, fd);
        }
    }

    pub(super) fn detach(&mut self) {
        for slot in 0..MAX_SLOTS {
            self.unwatch(slot);
        }
        self.interrupts = Interrupts::default();
    }

    pub(super) fn stage(&self, stage: MessageStage) {
        self.file.set_message(self.message_number(), stage);
    }
}

/// One client may use only a part of the process's address space.
pub(crate) const LIMITS: Limits = Limits {
    regions: 256,
    bytes: 1 << 40,
};

const NOT_DEPOSITED: Closing = Closing("the daemon did not store one of its descriptors");
