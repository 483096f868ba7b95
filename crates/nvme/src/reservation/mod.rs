//! Reservations of a namespace (Base 2.0, 8.19): who is registered, who holds it, who may do what.
//!
//! # Design
//! [`Reservations`] is the whole state of one namespace and knows no controller: a host is its 128-bit
//! Host Identifier. [`Reservations::apply`] takes a [`ReservationCommand`] and either changes the state
//! or refuses and changes nothing; [`Reservations::access`] says what a host may do. Everything is a
//! plain value, so that one process can decide, store and hand over what another one enforces. A state
//! that was stored or sent is checked as it is read.
//!
//! Notices (Base 2.0, 8.19.2) are part of the state, numbered without gaps: whoever remembers the last
//! number that it saw finds what is new, whatever died in between.
//!
//! # What it does not do
//! It moves no data, waits for no command in flight (a preemptor's answer has to), and keeps nothing on
//! disk. Dispersed namespaces aren't known.

mod command;
mod report;
#[cfg(test)]
mod tests;

pub use command::{ReservationCommand, action_of, action_of_persistence, key_bytes, keys_of};
pub(crate) use report::is_extended;
pub use report::{MAX_REPORT_BYTES, NO_CONTROLLER};

use crate::Status;
use serde::{Deserialize, Serialize};

/// A Host Identifier of 128 bits (Base 2.0, 5.27.1.25).
pub type HostId = [u8; 16];
/// The Host Identifier of a host that has none: it can't use reservations.
pub const NO_HOST: HostId = [0; 16];
/// The most registrants of a namespace.
pub const MAX_REGISTRANTS: usize = 128;
/// Notices that are kept: more hosts than this can't be told anything by one command.
pub const MAX_NOTICES: usize = MAX_REGISTRANTS;

/// Reservation types (Base 2.0, 7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[repr(u8)]
pub enum ReservationType {
    /// The holder alone writes.
    WriteExclusive = 1,
    /// The holder alone reads and writes.
    ExclusiveAccess = 2,
    /// Registrants alone write; one of them holds it.
    WriteExclusiveRegistrantsOnly = 3,
    /// Registrants alone read and write; one of them holds it.
    ExclusiveAccessRegistrantsOnly = 4,
    /// Registrants alone write; all of them hold it.
    WriteExclusiveAllRegistrants = 5,
    /// Registrants alone read and write; all of them hold it.
    ExclusiveAccessAllRegistrants = 6,
}

impl ReservationType {
    /// From RTYPE.
    pub fn new(rtype: u8) -> Option<Self> {
        Some(match rtype {
            1 => Self::WriteExclusive,
            2 => Self::ExclusiveAccess,
            3 => Self::WriteExclusiveRegistrantsOnly,
            4 => Self::ExclusiveAccessRegistrantsOnly,
            5 => Self::WriteExclusiveAllRegistrants,
            6 => Self::ExclusiveAccessAllRegistrants,
            _ => return None,
        })
    }

    /// Whether each registrant holds it.
    pub fn all_hold(self) -> bool {
        matches!(
            self,
            Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants
        )
    }

    /// Whether registrants that don't hold it have the holder's rights.
    fn serves_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Whether others may read.
    fn lets_read(self) -> bool {
        matches!(
            self,
            Self::WriteExclusive
                | Self::WriteExclusiveRegistrantsOnly
                | Self::WriteExclusiveAllRegistrants
        )
    }
}

/// A host and its reservation key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Registrant {
    /// Host Identifier; never [`NO_HOST`].
    pub host: HostId,
    /// Its key; never 0.
    pub key: u64,
}

/// Reservation notifications, numbered as in log page 80h and, as a bit, in feature 82h.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[repr(u8)]
pub enum NoticeKind {
    /// The host's registration was preempted.
    RegistrationPreempted = 1,
    /// The reservation was released, or its type changed; the host is still registered.
    ReservationReleased = 2,
    /// Registrations and reservation were cleared.
    ReservationPreempted = 3,
}

/// Something that a host is to be told.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Notice {
    /// Whom.
    pub host: HostId,
    /// What.
    pub kind: NoticeKind,
}

/// What a host may do with the namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Read, Compare.
    pub read: bool,
    /// Write, Write Zeroes, Dataset Management, Flush.
    pub write: bool,
}

impl Access {
    /// Everything.
    pub const ALL: Self = Self {
        read: true,
        write: true,
    };
}

/// What a command did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Applied {
    /// Whether anything is other than before, and so has to be stored.
    pub changed: bool,
}

/// The reservation state of one namespace.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Reservations {
    generation: u32,
    held: Option<HeldReservation>,
    registrants: Vec<Registrant>,
    ptpl: bool,
    notices_end: u64,
    notices: Vec<Notice>,
}

/// A reservation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct HeldReservation {
    rtype: ReservationType,
    /// `None` where all registrants hold it.
    holder: Option<HostId>,
}

/// [`Reservations`] as it was read, its fields in the same order.
#[derive(Deserialize)]
struct Unchecked {
    generation: u32,
    held: Option<HeldReservation>,
    registrants: Vec<Registrant>,
    ptpl: bool,
    notices_end: u64,
    notices: Vec<Notice>,
}

impl TryFrom<Unchecked> for Reservations {
    type Error = &'static str;

    fn try_from(from: Unchecked) -> Result<Self, Self::Error> {
        let state = Self {
            generation: from.generation,
            held: from.held,
            registrants: from.registrants,
            ptpl: from.ptpl,
            notices_end: from.notices_end,
            notices: from.notices,
        };
        match state.is_sound() {
            true => Ok(state),
            false => Err("a reservation state that can't be"),
        }
    }
}

impl Reservations {
    /// Whether the state can have come about.
    fn is_sound(&self) -> bool {
        let list = &self.registrants;
        let distinct = |(i, r): (usize, &Registrant)| list[..i].iter().all(|o| o.host != r.host);
        let held = self.held.is_none_or(|held| match held.holder {
            Some(host) => !held.rtype.all_hold() && self.key_of(&host).is_some(),
            None => held.rtype.all_hold() && !list.is_empty(),
        });
        list.len() <= MAX_REGISTRANTS
            && list.iter().all(|r| r.host != NO_HOST && r.key != 0)
            && list.iter().enumerate().all(distinct)
            && held
            && self.notices.len() <= MAX_NOTICES
            && self.notices.len() as u64 <= self.notices_end
    }

    /// GEN of Reservation Report: rises with each command that changes registrations, and wraps.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The reservation that is held.
    pub fn reservation_type(&self) -> Option<ReservationType> {
        self.held.map(|held| held.rtype)
    }

    /// All registrants, in the order in which they came.
    pub fn registrants(&self) -> &[Registrant] {
        &self.registrants
    }

    /// Whether registrations and reservation outlive a power loss.
    pub fn ptpl(&self) -> bool {
        self.ptpl
    }

    /// Whether the host holds the reservation.
    pub fn holds(&self, host: &HostId) -> bool {
        self.held.is_some_and(|held| match held.holder {
            Some(holder) => holder == *host,
            None => self.key_of(host).is_some(),
        })
    }

    /// Whether nothing is registered, held or to be told: as a namespace that never saw a command, but
    /// for its counters.
    pub fn is_idle(&self) -> bool {
        self.registrants.is_empty() && self.notices.is_empty()
    }

    /// How many notices there have been: what to remember to find those that come later.
    pub fn notices_end(&self) -> u64 {
        self.notices_end
    }

    /// Notices from number `seen` on that are still kept, the oldest first.
    pub fn notices_from(&self, seen: u64) -> &[Notice] {
        let first = self.notices_end - self.notices.len() as u64;
        let skip = seen.saturating_sub(first).min(self.notices.len() as u64);
        &self.notices[skip as usize..]
    }

    /// What a host may do (Base 2.0, 8.19.1).
    pub fn access(&self, host: &HostId) -> Access {
        let Some(held) = self.held else {
            return Access::ALL;
        };
        let registered = self.key_of(host).is_some();
        if held.holder == Some(*host) || registered && held.rtype.serves_registrants() {
            return Access::ALL;
        }
        self.access_of_strangers()
    }

    /// What a host may do that can't register: one without an identifier.
    pub fn access_of_strangers(&self) -> Access {
        self.held.map_or(Access::ALL, |held| Access {
            read: held.rtype.lets_read(),
            write: false,
        })
    }

    fn key_of(&self, host: &HostId) -> Option<u64> {
        self.registrants
            .iter()
            .find(|r| r.host == *host)
            .map(|r| r.key)
    }

    /// Carries a command of a host out. Every status has Do Not Retry; then nothing has changed.
    pub fn apply(&mut self, host: HostId, command: &ReservationCommand) -> Result<Applied, Status> {
        use ReservationCommand as C;
        if host == NO_HOST {
            return Err(Status::HOST_IDENTIFIER_NOT_INITIALIZED.with_dnr());
        }
        let changed = match *command {
            C::Register { new_key, ptpl } => {
                match self.key_of(&host) {
                    Some(key) if key != new_key => Err(conflict()),
                    Some(_) => Ok(()),
                    None => self.add(host, new_key),
                }?;
                self.registered(ptpl)
            }
            C::Unregister { key, ptpl } => {
                let own = self.key_of(&host).ok_or(conflict())?;
                if key.is_some_and(|key| key != own) {
                    return Err(conflict());
                }
                self.unregister(host);
                self.registered(ptpl)
            }
            C::Replace { key, new_key, ptpl } => {
                match (self.key_of(&host), key) {
                    (None, Some(_)) => return Err(conflict()),
                    (Some(own), Some(key)) if own != key => return Err(conflict()),
                    (None, None) => self.add(host, new_key)?,
                    (Some(_), _) if new_key == 0 => return Err(Status::INVALID_FIELD.with_dnr()),
                    (Some(_), _) => {
                        let mine = self.registrants.iter_mut().filter(|r| r.host == host);
                        mine.for_each(|r| r.key = new_key);
                    }
                }
                self.registered(ptpl)
            }
            C::Acquire { key, rtype } => {
                self.check_key(&host, key)?;
                match self.held {
                    None => {
                        self.hold(rtype, host);
                        true
                    }
                    Some(held) if self.holds(&host) && held.rtype == rtype => false,
                    Some(_) => return Err(conflict()),
                }
            }
            C::Preempt {
                key,
                preempted,
                rtype,
                ..
            } => {
                self.check_key(&host, key)?;
                self.preempt(host, preempted, rtype)?;
                self.generation = self.generation.wrapping_add(1);
                true
            }
            C::Release { key, rtype } => {
                self.check_key(&host, key)?;
                self.release(host, rtype)?
            }
            C::Clear { key } => {
                self.check_key(&host, key)?;
                self.held = None;
                for gone in std::mem::take(&mut self.registrants) {
                    self.tell(gone.host, &host, NoticeKind::ReservationPreempted);
                }
                self.generation = self.generation.wrapping_add(1);
                true
            }
            C::SetPersistence { ptpl } => std::mem::replace(&mut self.ptpl, ptpl) != ptpl,
        };
        debug_assert!(self.is_sound(), "{command:?} left {self:?}");
        Ok(Applied { changed })
    }

    /// A power loss: what isn't to persist is gone. True if anything was.
    pub fn power_loss(&mut self) -> bool {
        if self.ptpl || self.registrants.is_empty() {
            return false;
        }
        self.registrants.clear();
        self.held = None;
        true
    }

    /// The end of each Reservation Register command that succeeds.
    fn registered(&mut self, ptpl: Option<bool>) -> bool {
        self.ptpl = ptpl.unwrap_or(self.ptpl);
        self.generation = self.generation.wrapping_add(1);
        true
    }

    fn check_key(&self, host: &HostId, key: u64) -> Result<(), Status> {
        match self.key_of(host) {
            Some(own) if own == key => Ok(()),
            _ => Err(conflict()),
        }
    }

    fn add(&mut self, host: HostId, key: u64) -> Result<(), Status> {
        // Hosts mean "none" by a key of 0, and preempting 0 means everybody.
        if key == 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if self.registrants.len() == MAX_REGISTRANTS {
            return Err(Status::INTERNAL_ERROR.with_dnr());
        }
        self.registrants.push(Registrant { host, key });
        Ok(())
    }

    fn hold(&mut self, rtype: ReservationType, host: HostId) {
        self.held = Some(HeldReservation {
            rtype,
            holder: (!rtype.all_hold()).then_some(host),
        });
    }

    /// A host's own wish (Base 2.0, 8.19.4).
    fn unregister(&mut self, host: HostId) {
        let released = self.remove(&host);
        if matches!(
            released,
            Some(
                ReservationType::WriteExclusiveRegistrantsOnly
                    | ReservationType::ExclusiveAccessRegistrantsOnly
            )
        ) {
            self.tell_registrants(&host);
        }
    }

    /// Takes a registrant away, and with it the reservation if nobody is left who holds it.
    fn remove(&mut self, host: &HostId) -> Option<ReservationType> {
        let held_by_it = self.holds(host);
        self.registrants.retain(|r| r.host != *host);
        let held = self.held?;
        let gone = held_by_it && (!held.rtype.all_hold() || self.registrants.is_empty());
        gone.then(|| {
            self.held = None;
            held.rtype
        })
    }

    /// Base 2.0, 8.19.7.
    fn preempt(
        &mut self,
        host: HostId,
        preempted: u64,
        rtype: ReservationType,
    ) -> Result<(), Status> {
        // Whom it takes the reservation from, if it does: holders with this key, or all others.
        let takes = match self.held {
            None => false,
            Some(HeldReservation { holder: None, .. }) => {
                if preempted != 0 && self.registrants.iter().all(|r| r.key != preempted) {
                    return Err(conflict());
                }
                preempted == 0
            }
            Some(HeldReservation {
                holder: Some(holder),
                ..
            }) => {
                if preempted == 0 {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                self.key_of(&holder) == Some(preempted)
            }
        };
        let before = self.reservation_type();
        let mut gone = self.registrants.clone();
        gone.retain(|r| match takes {
            true => r.host != host && (preempted == 0 || r.key == preempted),
            false => r.key == preempted,
        });
        for registrant in gone {
            self.remove(&registrant.host);
            self.tell(registrant.host, &host, NoticeKind::RegistrationPreempted);
        }
        if takes {
            self.hold(rtype, host);
        }
        if before.is_some() && self.reservation_type() != before {
            self.tell_registrants(&host);
        }
        Ok(())
    }

    /// Base 2.0, 8.19.6.
    fn release(&mut self, host: HostId, rtype: u8) -> Result<bool, Status> {
        let Some(held) = self.held else {
            return Ok(false);
        };
        if held.rtype as u8 != rtype {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if !self.holds(&host) {
            return Ok(false);
        }
        self.held = None;
        if held.rtype.serves_registrants() {
            self.tell_registrants(&host);
        }
        Ok(true)
    }

    /// Tells all registrants but one that the reservation was released.
    fn tell_registrants(&mut self, but: &HostId) {
        for at in 0..self.registrants.len() {
            let host = self.registrants[at].host;
            self.tell(host, but, NoticeKind::ReservationReleased);
        }
    }

    fn tell(&mut self, host: HostId, but: &HostId, kind: NoticeKind) {
        if host == *but {
            return;
        }
        if self.notices.len() == MAX_NOTICES {
            self.notices.remove(0);
        }
        self.notices.push(Notice { host, kind });
        self.notices_end += 1;
    }
}

fn conflict() -> Status {
    Status::RESERVATION_CONFLICT.with_dnr()
}
